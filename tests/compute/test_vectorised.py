"""Many models in one pass, as on an accelerator: the numbers of one after another, and no more operations for more."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import Wrapped, batches, mlp, split_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.compute import vectorised
from polyfed.compute.batches import Batch
from polyfed.compute.check import check
from polyfed.compute.dropout import Key, halves, kept
from polyfed.compute.layout import Layout
from polyfed.compute.outputs import each_outputs
from polyfed.compute.recompute import saved_bytes
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.compute.trial import Keyed

SIZES = (10, 3, 8, 7)
SPLIT = split_of(*SIZES, d=36)


class Operations(TorchDispatchMode):
    """Names of what a device would be asked to do."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def image(*layers: nn.Module) -> nn.Module:
    """[b, 36] -> images of 6 x 6 -> the layers -> 3 outputs."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = nn.Sequential(nn.Unflatten(1, (1, 6, 6)), *layers, nn.Flatten())
        return nn.Sequential(net, nn.Linear(net(torch.zeros(1, 36)).shape[1], 3)).double()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))
        self.drop = nn.Dropout2d(0.4)

    def forward(self, x):
        x = x.repeat(1, 2, 1, 1)
        x = x + self.drop(torch.relu(self.a(x)))
        return x + F.dropout(torch.conv2d(x, self.b.weight, self.b.bias, padding=1), 0.3, self.training)


NETS = {
    "conv": lambda: image(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2)),
    "norms": lambda: image(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.AvgPool2d(2), nn.LayerNorm([4, 2, 2])),
    "dropout": lambda: image(nn.Conv2d(1, 3, 3), nn.Dropout(0.5), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(3, 2, 3)),
    "residual": lambda: image(Residual()),
}


def tasks(build, loss="cross-entropy", split=SPLIT, **settings) -> tuple[Task, Task]:
    """One after another, and many at once as `check` leaves it."""
    model = build()
    one, many = (Task(model, loss, **settings) for _ in range(2))
    many.net.vectorised = True
    for task in (one, many):
        check(task, split, None if split.y.is_floating_point() else 3)
    return one, many


def solved(task: Task, split, **work) -> torch.Tensor:
    return local_sgd(task, task.w0.expand(split.n, -1), batches(split, [0, 2, 3, 1], **work), 0.1)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0)), (3, 8, 7)),
        (nn.Conv2d(3, 5, (3, 2), padding="same", dilation=(2, 1), bias=False), (3, 8, 7)),
        (nn.Conv2d(3, 5, 3, stride=2, padding=2, dilation=2), (3, 8, 7)),
        (nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"), (3, 8, 7)),
        (nn.Conv2d(3, 5, 1, padding="valid"), (3, 4, 4)),
        (nn.Conv1d(3, 5, 3, stride=2, dilation=2, padding=1), (3, 11)),
        (nn.Conv3d(2, 3, 2, padding=1), (2, 4, 3, 5)),
        (nn.Conv2d(4, 4, 3, groups=2), (4, 8, 7)),
        (nn.ConvTranspose2d(3, 2, 3), (3, 4, 4)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_unfolded_convolutions_are_torchs(layer, shape):
    module = layer.double()
    layout = Layout(module)
    w = torch.randn(4, layout.p, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 2, *shape, dtype=torch.float64)
    many = vectorised.stacked_outputs(module, layout, w, x)
    slope = torch.randn_like(many)
    (g,) = torch.autograd.grad(many, w, slope)
    for i in range(4):
        own = layout.load_(module, w[i].detach())
        alone = own(x[i])
        torch.testing.assert_close(many[i], alone, rtol=0, atol=1e-12)
        names, parameters = zip(*own.named_parameters(), strict=True)
        grads = dict(zip(names, torch.autograd.grad(alone, parameters, slope[i]), strict=True))
        for name, view in layout.named(g[i]).items():
            torch.testing.assert_close(view, grads[name], rtol=0, atol=1e-11)


def test_no_convolution_has_a_group_per_client():
    """Only one whose weights no client trains is torch's own: it is the same for all."""
    task = tasks(NETS["conv"])[1]
    with Operations() as seen:
        solved(task, SPLIT, batch_size=4, steps=3)
    assert task.net.vectorised
    assert not any("conv" in name for name in seen.found)
    frozen = NETS["conv"]()
    frozen[0][1].requires_grad_(False)
    one, many = tasks(lambda: frozen)
    with Operations() as seen:
        found = solved(many, SPLIT, batch_size=4, steps=3)
    assert "convolution" in seen.found
    torch.testing.assert_close(found, solved(one, SPLIT, batch_size=4, steps=3), rtol=0, atol=1e-12)


NUMBERS = split_of(*SIZES, regression=True)
WEIGHTED = Split(NUMBERS.x, NUMBERS.y, NUMBERS.offsets, weight=torch.arange(len(NUMBERS.x)) % 3 + 1.0)
LOSSES = {
    "a mean": (F.smooth_l1_loss, True, NUMBERS),
    "a mean of weighted samples": (F.smooth_l1_loss, True, WEIGHTED),
    "of pairs": (lambda z, y: (z[:, None] - z[None, :] - y[:, None] + y[None, :]).square().mean(), True, NUMBERS),
    "what cannot be traced": (lambda z, y: F.mse_loss(z, y) ** (1.0 if F.mse_loss(z, y) > 1 else 0.5), False, NUMBERS),
}


@pytest.mark.parametrize("build", [mlp, lambda: Wrapped(mlp()), lambda: Wrapped(nn.Sequential(mlp(), nn.Dropout(0.5)))])
@pytest.mark.parametrize(("loss", "traced", "split"), LOSSES.values(), ids=LOSSES)
def test_a_loss_of_the_users_own(loss, traced, split, build):
    one, many = tasks(build, loss, split)
    assert many.net.vectorised == traced or torch.__version__ < "2.5"  # which says why, and trains one after another
    for size in (4, None):
        found, expected = (solved(task, split, batch_size=size, steps=3) for task in (many, one))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Mixing(Wrapped):
    """Samples of a batch know of each other, so that padding behind them would be known too."""

    def forward(self, x):
        return self.inner(x - x.mean(0))


def test_a_model_that_mixes_samples_goes_one_after_another():
    split = split_of(*SIZES)
    one, many = tasks(lambda: Mixing(mlp()), split=split)
    assert not many.net.vectorised
    assert torch.equal(solved(many, split, batch_size=4), solved(one, split, batch_size=4))


def test_masks_are_those_of_the_hash_and_do_not_depend_on_who_is_beside():
    keys = np.array([3, 2**63 + 7, 2**40], dtype=np.uint64)
    low, high = torch.from_numpy(halves(keys)).unbind(1)
    n, device = 1000, torch.device("cpu")
    together = torch.func.vmap(lambda a, b: kept(Key(a, b), 2, n, 0.3, device))(low, high)
    for i, key in enumerate(keys.tolist()):
        alone = kept(Key(int(low[i]), int(high[i])), 2, n, 0.3, device)
        assert torch.equal(together[i], alone)
        assert torch.equal(alone[:10], kept(Key(int(low[i]), int(high[i])), 2, 10, 0.3, device)), "padding changes it"
        assert alone.tolist() == [_word(key, 2, j) < int(0.7 * 2**32) for j in range(n)]


def _word(key: int, count: int, j: int) -> int:
    """The hash by Python's integers, as an unsigned number of which 2^31 is the smallest."""

    def finish(x: int, between: int = 0) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D + between & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    place = finish(j + (count + 1) * 0x9E3779B9 & 0xFFFFFFFF)
    return finish(place ^ (key & 0xFFFFFFFF), key >> 32) ^ 1 << 31


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("drop", "shape"), [(nn.Dropout, (5, 7)), (nn.Dropout1d, (50, 6, 4)), (nn.Dropout2d, (50, 6, 4, 3))]
)
def test_what_is_kept_is_scaled_and_channels_go_as_a_whole(drop, shape, inplace):
    x = torch.ones(shape)
    with Keyed(5, x.device) as keyed:
        out = drop(0.25, inplace=inplace)(x)
    assert keyed.drew
    assert (out is x) == inplace
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    if len(shape) > 2:
        assert all(len(channel.unique()) == 1 for channel in out.flatten(0, 1))
    with Keyed(5, x.device):
        assert not drop(1.0)(torch.ones(shape)).any()
        assert torch.equal(drop(0.5).eval()(torch.ones(shape)), torch.ones(shape))


@pytest.mark.parametrize("samples", [1, 3, 9, 1000])
def test_many_models_are_evaluated_in_parts_of_the_memory(samples, monkeypatch):
    task = tasks(NETS["dropout"])[1]
    w = torch.randn(4, task.p, dtype=torch.float64)
    x = torch.randn(4, 5, 36, dtype=torch.float64)
    whole = each_outputs(task.net, w, x)
    monkeypatch.setattr("polyfed.compute.outputs.AT_ONCE", samples * task.net.sample_bytes)
    torch.testing.assert_close(each_outputs(task.net, w, x), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(whole[2], task.outputs(w[2], x[2]), rtol=0, atol=1e-12)


def test_saved_bytes_grow_with_the_samples_alone_and_their_counting_leaves_no_graph_behind():
    task = Task(NETS["conv"]())

    def kept(samples: int) -> int:
        w, x = task.w0[None].clone().requires_grad_(), torch.zeros(1, samples, 36, dtype=torch.float64)
        outputs = partial(vectorised.stacked_outputs, task.model.train(), task.layout, w, x)
        return saved_bytes(lambda: outputs().sum(), (w, x))

    assert kept(3) - kept(2) == kept(2) - kept(1) > 0

    def counted() -> weakref.ref:
        w = torch.ones(3, requires_grad=True)
        assert saved_bytes(lambda: (2 * w).softmax(0).sum(), [w]) == 3 * 4  # an output that its own graph saves
        return weakref.ref(w)

    gone = counted()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("sizes", [[2, 0], [0, 0]])
@pytest.mark.parametrize("loss", ["cross-entropy", lambda out, y: F.nll_loss(out, y)], ids=["named", "own"])
def test_a_batch_of_nobody_moves_nobody(loss, sizes):
    one, many = tasks(NETS["conv"], loss)
    x = torch.randn(2, 3, 36, dtype=torch.float64)
    weight = (torch.arange(3) < torch.tensor(sizes)[:, None]) / 2.0
    batch = Batch(x, torch.zeros(2, 3, dtype=torch.int64), weight.double(), sizes)
    w = one.w0.expand(2, -1)
    found, expected = (task.gradient(w, batch)[0] for task in (many, one))
    assert many.net.vectorised
    assert not found[1].any()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
