"""What a model must be before it is trained: repeatable by (parameters, samples, key), one tensor out."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import Wrapped, batches, mlp, split_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import polyfed as pf
from polyfed.base.errors import ModelError
from polyfed.compute import evaluation
from polyfed.compute.batches import Batch
from polyfed.compute.check import check
from polyfed.compute.gradients import hvp
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.task import Task

SPLIT = split_of(10, 7, 8)
TOKENS = Split(torch.arange(25 * 6).view(25, 6) % 11, SPLIT.y, SPLIT.offsets)


class Net(nn.Module):
    """Layers, and a forward pass given as a function of (self, x): by default, that of the first layer."""

    def __init__(self, forward=lambda s, x: s.m[0](x), *layers: nn.Module):
        super().__init__()
        self.f, self.m, self.seen = forward, nn.ModuleList(layers or [nn.Linear(4, 3)]), 0
        self.generator = torch.Generator()
        self.double()

    def forward(self, x):
        return self.f(self, x)


def wide(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), *between, nn.Linear(32, 3)).double()


def dropped(s, x):
    return s.m[1](F.dropout(torch.tanh(s.m[0](x)), 0.5, s.training))


LINEAR = nn.Linear(4, 32), nn.Linear(32, 3)
LSTM, HEAD = nn.LSTM(2, 8, 2, dropout=0.5, batch_first=True), nn.Linear(8, 3)
ATTENTION = nn.TransformerEncoderLayer(2, 1, 8, dropout=0.3, batch_first=True)


def cnn() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 3)).double()


def skipping(s, x):
    """Leaves its second layer out in the pass that is tried, and in some others."""
    x = F.dropout(s.m[0](x), 0.5, s.training)
    return x if s.training and torch.rand(()) < 0.6 else F.rrelu(s.m[1](x), training=s.training)


RANDOM = {
    "F.dropout": lambda: Net(dropped, *LINEAR),
    "nn.Dropout": lambda: wide(nn.Dropout(0.5)),
    "alpha dropout": lambda: wide(nn.AlphaDropout(0.5)),
    "LSTM": lambda: Net(lambda s, x: s.m[1](s.m[0](x.view(-1, 2, 2))[0][:, -1]), LSTM, HEAD),
    "attention": lambda: Net(lambda s, x: s.m[1](s.m[0](x.view(-1, 2, 2)).flatten(1)), ATTENTION, nn.Linear(4, 3)),
    "noise": lambda: Net(lambda s, x: s.m[0](x + torch.randn_like(x) * s.training)),
    "layer drop": lambda: Net(lambda s, x: s.m[1](s.m[0](x) * (torch.rand(()) > 0.5 if s.training else 1)), *LINEAR),
    "encoder": lambda: Net(
        lambda s, x: s.m[1](s.m[0](x[:, None])[:, 0]), nn.TransformerEncoderLayer(4, 2, 5), nn.Linear(4, 3)
    ),
    "drawing layer drop": lambda: Net(skipping, nn.Linear(4, 3), nn.Linear(3, 3)),
}
FED = pf.Federation.from_arrays([SPLIT.client(i) for i in range(3)], classes=3, test_fraction=0.0)


@pytest.mark.parametrize("build", RANDOM.values(), ids=RANDOM)
def test_random_layers_draw_by_client_and_step_alone(build):
    """The same on one thread and on three, in any order, whatever the global generator holds; it is left as it was."""
    model, weights = build(), []
    for workers, seed in ((1, 5), (3, 6)):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        run = pf.fit(model, FED, pf.FedAvg(lr=0.1), rounds=2, workers=workers, batch_size=3, device="cpu")
        assert torch.equal(torch.get_rng_state(), before)
        weights.append(run.trained.server["w"])
    assert torch.equal(*weights)


@pytest.mark.parametrize("build", RANDOM.values(), ids=RANDOM)
def test_functions_that_drew_nothing_need_not_be_watched(build):
    task, found = Task(build()), list[torch.Tensor]()
    check(task, SPLIT, 3)
    for still in (task.net.still, None):
        task.net.still = still
        torch.manual_seed(len(found))
        found.append(local_sgd(task, task.w0.expand(3, -1), batches(SPLIT, epochs=3, batch_size=3), 0.1))
    assert torch.equal(*found)


def test_masks_differ_between_clients_steps_seeds_and_rounds_and_not_with_who_is_beside():
    task = Task(RANDOM["F.dropout"]())
    x, y = torch.ones(2, 4, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.int64)
    w = task.w0.expand(2, -1)
    found = set()
    for t, seed in ((0, 0), (1, 0), (0, 1)):
        for batch in batches(SPLIT, [0, 2], round=t, seed=seed, steps=2, batch_size=4):
            g = task.gradient(w, batch._replace(x=x, y=y, weight=None, sizes=None))[0]
            found |= {tuple(row.tolist()) for row in g}
    assert len(found) == 12
    together = local_sgd(task, w, batches(SPLIT, [0, 2], epochs=2, batch_size=4), 0.1)
    for row, i in zip(together, (0, 2), strict=True):
        assert torch.equal(local_sgd(task, w[:1], batches(SPLIT, [i], epochs=2, batch_size=4), 0.1)[0], row)
    assert torch.equal(task.outputs(w[0], x[0]), task.outputs(w[0], x[0])), "no dropout in evaluation"


def counting(s, x):
    s.seen += 1
    return s.m[0](x) * s.seen


def asserting(s, x):
    assert x.shape[1] == 7, "seven features"
    return s.m[0](x)


def remembering(s, x):
    if s.training:
        s.mean = x.mean(0)
    return s.m[0](x - (0 if s.training else getattr(s, "mean", 0)))


BUFFERED = nn.InstanceNorm1d(1, track_running_stats=True)
REFUSED = {
    "spectral norm": (
        lambda: Net(Net().f, nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))),
        r"layer 'm\.0\.parametrizations\.weight\.0' \(_SpectralNorm\) changes its buffer '_u'",
    ),
    "instance norm": (
        lambda: Net(lambda s, x: s.m[1](s.m[0](x[:, None]).flatten(1)), BUFFERED, nn.Linear(4, 3)),
        r"layer 'm\.0' \(InstanceNorm1d\) changes its buffer 'running_mean'",
    ),
    "max norm": (
        lambda: Net(lambda s, x: s.m[0]((x > 0).long()).mean(1), nn.Embedding(2, 3, max_norm=0.1)),
        r"layer 'm\.0' \(Embedding\) changes its parameter 'weight'",
    ),
    "numpy": (lambda: Net(lambda s, x: s.m[0](x * np.random.rand())), "numpy's global generator"),
    "python": (lambda: Net(lambda s, x: s.m[0](x * random.random())), "Python's or numpy's global"),
    "own generator": (lambda: Net(lambda s, x: s.m[0](x * torch.rand((), generator=s.generator))), "tor of its own"),
    "a counter in a layer": (
        lambda: Net(Net().f, Net(counting)), r"layer 'm\.0' \(Net\) gives other outputs in a second pass"
    ),
    "a statistic": (lambda: Net(remembering), "gives other outputs in a second pass"),
    "checkpointed dropout": (
        lambda: Net(lambda s, x: checkpoint(lambda a: dropped(s, a), x, use_reentrant=False), *LINEAR),
        "random numbers in its backward pass",
    ),
    "evaluation": (lambda: Net(lambda s, x: s.m[0](F.dropout(x))), "random outputs in evaluation mode"),
    "tuple": (lambda: Net(lambda s, x: (s.m[0](x), x)), "returns a tuple, expected one tensor"),
    "dict": (lambda: Net(lambda s, x: {"logits": s.m[0](x)}), "returns a dict, expected one tensor"),
    "nothing": (lambda: Net(lambda s, x: None), "returns a NoneType, expected one tensor"),
    "labels": (lambda: Net(lambda s, x: s.m[0](x).argmax(1)), "int64 of shape"),
    "a mean": (lambda: Net(lambda s, x: s.m[0](x).mean(0)), r"shape \[3\] for 2 samples"),
    "KeyError": (lambda: Net(lambda s, x: {}["a"]), r"shape \[4\]: KeyError 'a'"),
    "AssertionError": (lambda: Net(asserting), r"shape \[4\]: AssertionError seven features"),
    "detached": (lambda: Net(lambda s, x: s.m[0](x).detach()), "output does not depend on its"),
    "in training only": (
        lambda: Net(lambda s, x: s.m[0](x) if not s.training else {}["b"]),
        "cannot be trained on inputs of shape .*KeyError 'b'",
    ),
}  # fmt: skip


def refused(words, do):
    with pytest.raises(ModelError, match=words):
        do()


@pytest.mark.parametrize("loss", ["cross-entropy", F.cross_entropy], ids=["named", "callable"])
@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused_by_name_in_one_line(build, words, loss):
    refused(words, lambda: check(Task(build(), loss), SPLIT, 3))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([nn.LazyLinear(3)], "'0.weight' has no shape yet"),
        ([nn.Linear(4, 3, device="meta")], "'0.weight' is on the meta device"),
        ([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)], "freeze it: requires_grad_"),
        ([nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 3)], "freeze it"),
        (
            [nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False).eval().requires_grad_(False)],
            "layer '1' is BatchNorm1d",
        ),
    ],
    ids=["lazy", "meta", "training", "evaluation mode alone", "no running statistics"],
)
def test_a_structure_that_cannot_be_trained_is_refused(layers, words):
    refused(words, lambda: Task(nn.Sequential(*layers)))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out, y: 1.0, "loss: returned a float, expected a float tensor"),
        (lambda out, y: None, "loss: returned a NoneType"),
        (lambda out, y: torch.tensor(1.0), "loss: it does not depend on the output"),
        (lambda out, y: F.cross_entropy(out, y).detach(), "loss: it does not depend on the output"),
        (lambda out, y: F.mse_loss(out, y[:, None].float().log().missing), "loss: fails on outputs"),
        (F.binary_cross_entropy_with_logits, r"loss: fails on outputs \[2, 3\] and targets \[2\] \(torch.int64\)"),
    ],
)
def test_a_loss_that_cannot_be_derived_is_refused(loss, words):
    refused(words, lambda: check(Task(mlp(), loss), SPLIT, 3))


def frozen(layer: nn.Module) -> nn.Module:
    return layer.eval().requires_grad_(False)


class KeptStill(nn.Module):
    """BatchNorm with a trainable scale whose statistics the module itself keeps still, as detection models do."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


FROZEN = {
    "a layer": lambda: nn.Sequential(nn.Linear(4, 5), frozen(nn.BatchNorm1d(5)), nn.Linear(5, 3)),
    "without scale": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False).eval(), nn.Linear(5, 3)),
    "a backbone": lambda: nn.Sequential(
        frozen(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))), nn.Linear(5, 3)
    ),
    "by the module": KeptStill,
}


@pytest.mark.parametrize("build", FROZEN.values(), ids=FROZEN)
def test_a_frozen_batchnorm_normalises_by_its_statistics_which_stay(build):
    model, (x, y) = build().double(), SPLIT.client(0)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
    task = Task(model)
    check(task, SPLIT, 3)
    assert not task.net.random, "dropout inside a frozen part in evaluation mode is off"
    fixed = {name: t.clone() for name, t in task.net.fixed.items()}
    plain = task.module(task.w0).eval()  # gradients in evaluation mode: the batch has no say in the statistics
    loss = F.cross_entropy(plain(x), y)
    expected = torch.autograd.grad(loss, [q for q in plain.parameters() if q.requires_grad])
    g, value = task.gradient(task.w0[None], Batch(x[None], y[None]))
    assert float(value[0]) == pytest.approx(float(loss.detach()), abs=1e-12)
    for view, reference in zip(task.layout.views(g[0]), expected, strict=True):
        assert torch.allclose(view, reference, atol=1e-12)
    local_sgd(task, task.w0.expand(3, -1), batches(SPLIT, epochs=2, batch_size=4), 0.1)
    after = task.net.workspace(training=True)[0].state_dict()
    assert all(torch.equal(t, after[name]) for name, t in fixed.items())


def test_fixed_is_what_the_vector_does_not_hold():
    assert Task(mlp()).net.fixed == {}
    assert Task(mlp()).net.fixed_digest == ""
    build = FROZEN["a backbone"]
    torch.manual_seed(0)
    model = build()
    task = Task(model)
    assert set(task.net.fixed) == {k for k in model.state_dict() if k.startswith("0.")}
    assert set(task.net.fixed) | {e.name for e in task.layout.entries} == set(model.state_dict())
    assert task.net.fixed_digest == Task(model).net.fixed_digest != ""
    model[1].weight.data.add_(1)  # part of the vector
    assert Task(model).net.fixed_digest == task.net.fixed_digest
    for name in task.net.fixed:
        torch.manual_seed(0)
        other = build()
        other.state_dict()[name].add_(1)
        assert Task(other).net.fixed_digest != task.net.fixed_digest, name


def tied() -> nn.Sequential:
    m = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    m[2].weight = m[0].weight
    return m


def test_tied_weights_train_as_autograd_says():
    """Steps of plain autograd on the module itself, where the tied matrix takes the sum of both layers' gradients."""
    torch.manual_seed(0)
    model = tied()
    task = Task(model)
    check(task, SPLIT, 3)
    assert task.p == 16 + 4 + 4 + 15
    assert task.net.fixed == {}
    x, y = SPLIT.client(0)
    w = task.w0[None].clone()
    for _ in range(5):
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for q, g in zip(model.parameters(), grads, strict=True):
                q.sub_(0.1 * g)
        task.descend_(w, Batch(x[None], y[None]), 0.1)
    assert torch.allclose(w[0], task.layout.flatten(model), atol=1e-14)
    trained = task.module(w[0])
    assert trained[0].weight is trained[2].weight


class Tokens(nn.Module):
    def __init__(self, words: int = 11):
        super().__init__()
        self.table, self.out = nn.Embedding(words, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.table(x).mean(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_size", [4, None])
def test_tokens_reach_the_embedding_as_integers(batch_size, dtype):
    torch.manual_seed(0)
    task = Task(Tokens(), dtype=dtype)
    check(task, TOKENS, 3)
    split = task.place(TOKENS)
    assert split.x.dtype == torch.int64
    w = task.w0.expand(3, -1).clone()
    for batch in batches(split, [0, 2, 1], batch_size=batch_size, epochs=2):  # ragged and padded
        g = task.gradient(w[: batch.rows], batch)[0]
        for i in range(batch.rows):
            b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
            if b == 0:
                continue
            module = task.module(w[i])
            loss = F.cross_entropy(module(batch.x[i, :b]), batch.y[i, :b])
            reference = torch.autograd.grad(loss, list(module.parameters()))
            for view, r in zip(task.layout.views(g[i]), reference, strict=True):
                assert torch.allclose(view, r, atol=1e-6 if dtype == torch.float32 else 1e-13)
    trained = local_sgd(task, w, batches(split, batch_size=batch_size, epochs=2), 0.1)
    assert trained.dtype == dtype
    found = evaluation.metrics(task, trained, split, np.arange(3))
    x, y = split.client(1)
    assert found["loss"][1] == pytest.approx(float(F.cross_entropy(task.outputs(trained[1], x), y)))


def test_integers_become_floats_where_no_layer_embeds_them():
    floats = Split(TOKENS.x.double(), TOKENS.y, TOKENS.offsets)
    for build in (lambda: nn.Linear(6, 3).double(), lambda: Wrapped(nn.Linear(6, 3).double())):
        torch.manual_seed(0)
        task = Task(build())
        check(task, TOKENS, 3)
        assert task.place(TOKENS).x.dtype == torch.float64
        w = task.w0.expand(3, -1)
        for a, b in zip(batches(TOKENS, batch_size=4), batches(floats, batch_size=4), strict=True):
            assert torch.allclose(task.gradient(w[: a.rows], a)[0], task.gradient(w[: b.rows], b)[0], atol=1e-15)
        found = [evaluation.metrics(task, w, split, np.arange(3))["loss"] for split in (TOKENS, floats)]
        assert found[0][0] == found[1][0]
    task = Task(Net(lambda s, x: s.m[0](F.one_hot(x, 11).double().mean(1)), nn.Linear(11, 3)))  # looks up by hand
    check(task, TOKENS, 3)
    assert task.net.integers


def test_tokens_out_of_range_and_floats_to_an_embedding_are_told_so():
    with pytest.raises(ModelError, match=r"IndexError index out of range.*integers from 0 to 10"):
        check(Task(Tokens(10)), TOKENS, 3)
    with pytest.raises(ModelError, match="takes integers, and the inputs are floats"):
        check(Task(Tokens()), Split(TOKENS.x.float(), TOKENS.y, TOKENS.offsets), 3)


@pytest.mark.parametrize(
    ("loss", "column"),
    [
        ("mse", False),
        (F.mse_loss, False),
        (F.l1_loss, False),
        (F.huber_loss, False),
        (nn.MSELoss(), False),
        (lambda out, y: (out[:, 0] - y).square().mean(), False),
        (lambda out, y: (out.squeeze(-1) - y).square().mean(), False),
        (F.mse_loss, True),
        (lambda out, y: (out - y.unsqueeze(1)).square().mean(), False),
        (lambda out, y: (out - y[:, None]).square(), False),
        (lambda out, y: F.mse_loss(out, y.view(-1, 1)), False),
        (lambda out, y: F.l1_loss(out, y.reshape(-1, 1)), False),
        (lambda out, y: (out.exp() - y.exp()[:, None] * out).mean(), False),
        (lambda out, y: (out[..., 0] - y).square().mean(), False),
        (lambda out, y: (out - y[:, 0]).square().mean(), True),
    ],
    ids=["named", "mse", "l1", "huber", "module", "takes the column", "squeezes", "targets in a column", "unsqueezes",
         "each", "views", "reshapes", "rates", "last axis", "takes the targets' column"],
)  # fmt: skip
@pytest.mark.parametrize("start", ["drawn", "zeros, all below the targets"])
def test_a_callable_loss_pairs_each_output_with_its_own_target(loss, column, start):
    """[b, 1] against [b] is b pairs, never a [b, b] table: the loss of a batch is the mean of its samples' losses."""
    y = SPLIT.x.sum(1) + (0 if start == "drawn" else 20)
    split = Split(SPLIT.x, y[:, None] if column else y, SPLIT.offsets)
    model = Net(lambda s, x: s.m[0](x)[:, 0], nn.Linear(4, 1)) if column else nn.Linear(4, 1).double()
    if start != "drawn":
        for q in model.parameters():
            nn.init.zeros_(q)
    task = Task(model, loss)
    check(task, split, None)
    task.w0 += torch.linspace(-1, 1, task.p)  # where a loss and that of the table are not the same
    xi, yi = split.client(0)
    batch = Batch(xi[None], yi[None])
    each = [task.loss_of(task.w0[None], Batch(xi[None, k : k + 1], yi[None, k : k + 1])) for k in range(len(xi))]
    mean = float(torch.cat(each).mean())
    assert float(task.loss_of(task.w0[None], batch)) == pytest.approx(mean)
    assert float(task.gradient(task.w0[None], batch)[1]) == pytest.approx(mean)
    metrics = evaluation.metrics(task, task.w0.expand(3, -1), split, np.arange(3))
    assert metrics["loss"][0] == pytest.approx(mean)
    gap = task.outputs(task.w0, xi).flatten() - yi.flatten()
    assert metrics["rmse"][0] == pytest.approx(float(gap.square().mean().sqrt()))


def cox(out, y):
    """Targets are times, negative for who is censored."""
    order = y.abs().argsort(descending=True)
    eta, died = out[order], (y[order] > 0).double()
    return -((eta - eta.logcumsumexp(0)) * died).sum() / len(y)


def table(out, y):
    return (out[:, None] - y).square().mean()


def balanced(out, y):
    weight = 1 + (y > 0).double()
    return ((out - y).square() * weight).sum() / weight.sum()


PAIRS = "pairs every output [b, 1] with every target [b]; shuffled targets do not change it"


@pytest.mark.parametrize(
    ("loss", "shape", "said"),
    [
        (lambda out, y: (out - y).square().sum(), (-1,), ""),
        (lambda out, y: (out - y.view(-1, 1)).square().sum(), (-1, 1), ""),
        (lambda out, y: (out - y).square().sum(-1), (-1,), ""),
        (lambda out, y: (out - y).square(), (-1,), ""),
        (lambda out, y: (out - y).square().mean() + 0.1 * out.square().mean(), (-1,), ""),
        (lambda out, y: (out - y).square().mean().sqrt(), (-1,), ""),
        (lambda out, y: (out - y[:, None]).square().mean().sqrt(), (-1, 1), ""),
        (cox, (-1,), "loss cox: no mean over samples, and for outputs [b, 1] not what it is for [b], which it gets"),
        (lambda out, y: cox(out[:, 0], y), (-1, 1), ""),
        (balanced, (-1,), ""),
        (lambda out, y: -torch.corrcoef(torch.stack([out, y]))[0, 1], (-1,), ""),
        (lambda out, y: (out - y).abs().quantile(0.25), (-1,), ""),
        (table, (-1,), f"loss table: {PAIRS}"),
    ],
)
def test_a_loss_that_is_no_mean_keeps_its_meaning(loss, shape, said, caplog):
    """What pairs outputs and targets in their own shape gets that shape; what pairs all with all is told so."""
    split = Split(SPLIT.x, SPLIT.x.sum(1), SPLIT.offsets)
    task = Task(nn.Linear(4, 1).double(), loss)
    check(task, split, None)
    x, y = split.client(0)
    found = task.loss_of(task.w0[None], Batch(x[None], y[None]))
    torch.testing.assert_close(found[0], loss(task.outputs(task.w0, x).view(shape), y).mean())
    assert caplog.messages == ([said] if said else [])
    before = task.net.criterion.reshape
    check(task, Split(x[:1], y[:1], np.array([0, 1])), None)  # newcomers of whom nothing can be seen
    assert task.net.criterion.reshape == before


BINARY = Split(SPLIT.x, (SPLIT.x.sum(1) > 0).long(), SPLIT.offsets)


@pytest.mark.parametrize(
    ("loss", "probability"),
    [
        (F.binary_cross_entropy_with_logits, False),
        (lambda out, y: F.binary_cross_entropy_with_logits(out, y, pos_weight=torch.tensor(3.0)), False),
        (lambda out, y: F.soft_margin_loss(out, 2.0 * y - 1), False),
        (F.binary_cross_entropy, True),
        (F.mse_loss, True),
    ],
    ids=["logits", "weighted", "margin", "probabilities", "squares"],
)
def test_one_output_for_two_classes_is_cut_where_the_loss_is_indifferent(loss, probability, caplog):
    """And for three it has no accuracy; a loss on labels gets its outputs as they are."""
    model = nn.Sequential(nn.Linear(4, 1), *([nn.Sigmoid()] if probability else [])).double()
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[0].bias.zero_()
    task = Task(model, lambda out, y: loss(out[:, 0], y.double()))
    check(task, BINARY, 2)
    for sign, right in ((1, 1), (-1, 0)):
        found = evaluation.metrics(task, sign * task.w0.expand(3, -1), BINARY, np.arange(3))
        assert found["accuracy"].tolist() == [right] * 3
    three = Task(nn.Linear(4, 1).double(), lambda out, y: F.mse_loss(out[:, 0], y.double()))
    check(three, SPLIT, 3)
    assert set(evaluation.metrics(three, three.w0.expand(3, -1), SPLIT, np.arange(3))) == {"loss"}
    assert not caplog.messages
    check(Task(nn.Linear(4, 1).double(), lambda out, y: (out - y).square().mean()), BINARY, 2)
    assert caplog.messages == [f"loss <lambda>: {PAIRS}"]


@pytest.mark.parametrize(
    ("build", "random", "expected"),
    [
        (lambda: Wrapped(mlp()), False, True),
        (cnn, False, True),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)).double(), False, True),
        *((make, True, name in ("F.dropout", "nn.Dropout")) for name, make in RANDOM.items()),
    ],
    ids=["module", "cnn", "dropout of nothing", *RANDOM],
)
def test_many_models_at_once_only_where_every_operation_can(build, random, expected):
    """What an accelerator does in one pass; what draws but by plain dropout goes client by client."""
    task = Task(build())
    task.net.vectorised = True  # as on an accelerator
    check(task, SPLIT, 3)
    assert (task.net.random, task.net.vectorised) == (random, expected)


class Skips(nn.Module):
    """Two layers, each left out of a training pass with probability p."""

    def __init__(self, p):
        super().__init__()
        torch.manual_seed(0)
        self.p, self.layers, self.end = p, nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        for layer in self.layers:
            if not self.training or torch.rand(()) >= self.p:
                x = x + torch.relu(layer(x))
        return self.end(x)


def experts(s, x):
    """Each sample by one of three layers."""
    out, which = x.new_zeros(len(x), 3), s.m[0](x).argmax(1)
    for k, layer in enumerate(s.m[1:]):
        if (mine := which == k).any():
            out = out.index_put((mine.nonzero()[:, 0],), layer(x[mine]) * s.m[0](x[mine]).softmax(1)[:, k : k + 1])
    return out


PARTS = {
    **{f"layers with {p}": partial(Skips, p) for p in (0.1, 0.5, 0.9, 1.0)},
    "experts": lambda: Net(experts, *(nn.Linear(4, 3) for _ in range(4))),
    "a branch on data": lambda: Net(lambda s, x: s.m[int(x.sum() > 0)](x), nn.Linear(4, 3), nn.Linear(4, 3)),
    "all of it at times": lambda: Net(lambda s, x: s.m[0](x) if not s.training or torch.rand(()) > 0.5 else x[:, :3]),
}


@pytest.mark.parametrize("build", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_parameter_that_a_pass_leaves_out_has_the_gradient_zero(build, optimizer):
    how = {"rounds": 2, "batch_size": 2, "dtype": torch.float64, "evaluate_every": 0}
    assert pf.fit(build(), FED, pf.FedAvg(lr=0.01), optimizer=optimizer, **how).personal.isfinite().all()
    task = Task(build())
    check(task, SPLIT, 3)
    w, x, y = task.w0[None], *SPLIT.client(0)
    for seed in np.arange(20, dtype=np.uint64)[:, None]:
        batch = Batch(x[None, :2], y[None, :2], seed=lambda seed=seed: seed)
        g = task.gradient(w, batch)[0]
        assert g.isfinite().all()
        copy = w.clone()
        task.descend_(copy, batch, 0.1)
        torch.testing.assert_close(copy, w - 0.1 * g, rtol=0, atol=1e-15)
        assert hvp(task.net, w, w, batch).isfinite().all()


def test_a_parameter_that_no_pass_uses_is_noted_and_stays(caplog):
    model = Net(lambda s, x: s.m[0](x), nn.Linear(4, 3), nn.Linear(3, 3))
    found = pf.fit(model, FED, pf.FedAvg(), rounds=1, dtype=torch.float64).model(0)
    assert "'m.1.weight', 'm.1.bias'" in caplog.text
    torch.testing.assert_close(found.m[1].weight, model.m[1].weight, rtol=0, atol=1e-15)
    assert not torch.equal(found.m[0].weight, model.m[0].weight)


SQUEEZED, FAILS = r"Net returns .*\[3\] for one sample", "Net takes 2 samples at once and fails on one"
ONE = {
    "squeeze": (lambda s, x: s.m[0](x).squeeze(), SQUEEZED),
    "squeeze of inputs": (lambda s, x: s.m[0](x[:, None].squeeze()), SQUEEZED),
    "in training alone": (lambda s, x: s.m[0](x).squeeze() if s.training else s.m[0](x), f"{SQUEEZED} in training"),
    "one that fails": (lambda s, x: s.m[0](x - x[1]), FAILS),
    "a batch's own statistics": (lambda s, x: F.batch_norm(s.m[0](x), None, None, training=True), FAILS),
}


@pytest.mark.parametrize(("forward", "words"), ONE.values(), ids=ONE)
def test_a_model_that_does_not_take_one_sample_as_several_is_refused_by_its_name(forward, words):
    refused(words, lambda: pf.fit(Net(forward), FED, pf.FedAvg(), rounds=1, batch_size=None))


def test_a_model_that_mixes_samples_in_evaluation_is_named(caplog):
    check(Task(Net(lambda s, x: s.m[0](x - x.mean(0)))), SPLIT, 3, "Centred")
    assert "Centred: what it returns for a sample depends on those beside it" in caplog.text
    caplog.clear()
    check(Task(cnn()), SPLIT, 3)
    assert not caplog.text
