"""Many adapters in one pass of their base: the gradients of one after another, whatever the mask."""

import pytest
import torch
from tiny import KINDS, tiny
from torch import nn

from polyfed import models
from polyfed.base.errors import ModelError
from polyfed.compute.batches import Batch
from polyfed.compute.check import check
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.models import build

CLIENTS, SAMPLES, T, V = 3, 4, 6, 11


class Net(nn.Module):
    """A transformer's block whose 2-D mask is looked into, as Hugging Face's are: vmap has no rule for that."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(V, 8, padding_idx=0), nn.LayerNorm(8)
        self.query, self.value, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(drop)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h, mask = self.norm(self.embedding(x)), x != 0
        scores = self.query(h) @ h.mT
        if not mask.all():
            scores = scores.masked_fill(~mask[:, None], -1e4)
        return self.head(self.drop(scores.softmax(-1) @ self.value(h)).mean(1))


class Root(nn.Module):
    """A normalisation as transformers has it; `plus`: its weight is kept less 1."""

    def __init__(self, d, plus=0.0):
        super().__init__()
        self.weight, self.plus = nn.Parameter(torch.full((d,), 1 - plus)), plus

    def forward(self, x):
        return (self.plus + self.weight) * (x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype)


def normed(norm):
    model = Net()
    model.norm = norm
    return model


class Images(nn.Module):
    """Convolutions of all kinds, on tokens' embeddings [8, T] as images."""

    def __init__(self, norm=False, frozen=()):
        super().__init__()
        self.embedding = nn.Embedding(V, 8).requires_grad_(False)
        self.line = nn.Conv1d(8, 6, 2, dilation=2, padding=1)
        self.square = nn.Conv2d(1, 4, (3, 2), stride=(2, 1), padding=(1, 0))
        self.norm = nn.GroupNorm(2, 4) if norm else nn.Identity()
        self.deep = nn.Conv2d(4, 8, 3, padding="same", groups=2, bias=False)
        self.cube, self.head = nn.Conv3d(1, 2, (2, 1, 2), padding="valid"), nn.Linear(2, 3)
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x):
        h = self.line(self.embedding(x).mT)[:, None].relu()
        h = self.deep(self.norm(self.square(h)).tanh())[:, None]
        return self.head(self.cube(h).relu().flatten(2).mean(2))


def batch(padded=True):
    """Samples with padding tokens; of the last client only two are there."""
    torch.manual_seed(2)
    x, y = torch.randint(1, V, (CLIENTS, SAMPLES, T)), torch.randint(0, 3, (CLIENTS, SAMPLES))
    x[:, 1, 4:] = 0
    sizes = [SAMPLES, SAMPLES, 2 if padded else SAMPLES]
    weight = torch.stack([(torch.arange(SAMPLES) < n).double() / n for n in sizes])
    return Batch(x, y, weight, sizes, seed=lambda: torch.arange(CLIENTS).numpy().astype("uint64"))


def checked(task, x):
    x = x.flatten(0, 1)
    check(task, Split(x, torch.arange(len(x)) % 3, torch.tensor([0, len(x)]).numpy()), 3)
    return task


def task_of(model):
    return checked(Task(model), batch().x)


def compared(task, some):
    """Largest difference of gradients, grouped and one by one, over the largest gradient."""
    w = task.w0 + 0.1 * torch.randn(CLIENTS, task.p, dtype=task.dtype)
    one, losses = task.gradient(w, some)
    task.net.vectorised = task.net.grouped = True
    many, same = task.gradient(w, some)
    torch.testing.assert_close(losses, same, rtol=0, atol=1e-6)
    return float((one - many).abs().max() / one.abs().max())


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize(
    "words",
    [
        *(None, "lora:r=2,targets=query+value", "lora:r=2,train=residual", "dora:r=2"),
        *("ia3:targets=query,inputs=value", "norms", "biases"),
    ],
)
def test_gradients_are_those_of_one_after_another(words, drop):
    torch.manual_seed(0)
    model = Net(drop).double()
    assert compared(task_of(model if words is None else models.adapted(model, words)), batch()) < 1e-12


BUILT = {
    "rms": lambda: normed(nn.RMSNorm(8)),
    "rms of several dimensions": lambda: normed(nn.RMSNorm([T, 8])),
    "rms by name": lambda: normed(Root(8)),
    "rms kept less 1": lambda: normed(Root(8, 1.0)),
    "convolutions": Images,
    "weights of convolutions": lambda: Images(frozen=("line.bias", "square.bias")),
    "biases of convolutions": lambda: Images(frozen=("line.weight", "square.weight", "deep.weight")),
    "group norm": lambda: Images(True),
    "weights of a group norm": lambda: Images(True, ("norm.bias", "square.weight")),
}


@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("build", BUILT.values(), ids=BUILT)
def test_gradients_of_norms_and_convolutions(build, dtype, least):
    """In float32 but for the bias of a Conv3d, whose own sum in torch is 5e-7 from that in double precision."""
    torch.manual_seed(0)
    model = build().to(dtype)
    if isinstance(model, Images) and dtype == torch.float32:
        model.cube.bias.requires_grad_(False)
    assert compared(task_of(model), batch()) < least


def test_norms_are_known_by_their_class_or_its_name():
    class TinyRMSNorm(Root):
        pass

    for norm in (nn.RMSNorm(8), TinyRMSNorm(8)):
        task = Task(models.adapted(normed(norm), "norms"))
        assert [e.name for e in task.layout.entries] == ["norm.weight", "head.weight", "head.bias"]
        assert int(task.layout.mask("norm").sum()) == 8


def test_a_convolution_without_a_form_is_said():
    circular = nn.Conv1d(T, 3, 2, padding_mode="circular")
    task = task_of(nn.Sequential(nn.Embedding(V, 2), circular, nn.Flatten()).double())
    task.net.vectorised = task.net.grouped = True
    with pytest.raises(ModelError, match="padding_mode 'circular' has no grouped form"):
        task.gradient(task.w0.expand(CLIENTS, -1), batch())


@pytest.mark.parametrize(("kind", "part"), [*((kind, "lora") for kind in KINDS), ("llama", "norms")])
def test_models_of_transformers(kind, part, tmp_path):
    """With masks and padded clients, in single precision; layers that are computed again have the same bits."""
    torch.manual_seed(0)
    tiny(kind, V).save_pretrained(tmp_path)
    some = batch()
    if kind == "vit":
        some = some._replace(x=torch.randn(CLIENTS, SAMPLES, 3, 8, 8))
    else:
        some = some._replace(x=torch.stack([some.x, (some.x != 0).long()], 2))
    targets = "q_proj+v_proj" if kind == "llama" else "query+value" if kind == "bert" else ""
    model = build("transformers", tuple(some.x.shape[2:]), 3, backbone=str(tmp_path))
    words = "norms" if part == "norms" else "lora:r=2" + (f",targets={targets}" if targets else "")
    task, again = (checked(Task(models.adapted(model, words), recompute=given), some.x) for given in (False, True))
    assert compared(task, some) < 1e-6
    assert len(again.net.blocks) == 2
    w = task.w0 + 0.1 * torch.randn(CLIENTS, task.p)
    for together in (False, True):
        for one in (task, again):
            one.net.vectorised = one.net.grouped = together
        assert torch.equal(task.gradient(w, some)[0], again.gradient(w, some)[0])


def test_where_vmap_fails_check_takes_the_grouped_pass_or_says_so(caplog):
    """Settled on a processor as it would be on an accelerator."""

    class Odd(Net):
        def forward(self, x):
            return super().forward(x) + self.head.weight.sum(1) * x.sum(1, keepdim=True)

    for model, together in ((models.adapted(Net(), "lora:r=2"), True), (Odd(), False)):
        task = Task(model)
        task.net.vectorised = True
        checked(task, batch().x)
        assert task.net.vectorised == together
        assert task.net.grouped or not together
        assert ("is trained one client after another" in caplog.text) != together
