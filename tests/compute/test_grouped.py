"""Many adapters in one pass of their base: the gradients of one after another, whatever the mask."""

import pytest
import torch
from tiny import KINDS, tiny
from torch import nn

from polyfed.compute.batches import Batch
from polyfed.compute.check import check
from polyfed.compute.grouped import grouped_pass
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.models import adapted, build

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


def batch(padded=True):
    """Samples with padding tokens; of the last client only two are there."""
    torch.manual_seed(2)
    x, y = torch.randint(1, V, (CLIENTS, SAMPLES, T)), torch.randint(0, 3, (CLIENTS, SAMPLES))
    x[:, 1, 4:] = 0
    sizes = [SAMPLES, SAMPLES, 2 if padded else SAMPLES]
    weight = torch.stack([(torch.arange(SAMPLES) < n).double() / n for n in sizes])
    return Batch(x, y, weight, sizes, seed=lambda: torch.arange(CLIENTS).numpy().astype("uint64"))


def task_of(model):
    task = Task(model)
    x = batch().x.flatten(0, 1)
    check(task, Split(x, torch.arange(len(x)) % 3, torch.tensor([0, len(x)]).numpy()), 3)
    return task


def compared(task, some):
    """Largest difference of gradients, grouped and one by one, over the largest gradient."""
    w = task.w0 + 0.1 * torch.randn(CLIENTS, task.p, dtype=task.dtype)
    one, losses = task.gradient(w, some)
    task.vectorised = task.grouped = True
    many, same = task.gradient(w, some)
    torch.testing.assert_close(losses, same, rtol=0, atol=1e-6)
    return float((one - many).abs().max() / one.abs().max())


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize(
    "words", [None, "lora:r=2,targets=query+value", "lora:r=2,train=residual", "dora:r=2", "norms", "biases"]
)
def test_gradients_are_those_of_one_after_another(words, drop):
    torch.manual_seed(0)
    model = Net(drop).double()
    assert compared(task_of(model if words is None else adapted(model, words)), batch()) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers(kind, tmp_path):
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
    words = "lora:r=2" + (f",targets={targets}" if targets else "")
    task, again = Task(adapted(model, words)), Task(adapted(model, words), recompute=True)
    x = some.x.flatten(0, 1)
    for one in (task, again):
        check(one, Split(x, torch.arange(len(x)) % 3, torch.tensor([0, len(x)]).numpy()), 3)
    assert compared(task, some) < 1e-6
    assert len(again.blocks) == 2
    w = task.w0 + 0.1 * torch.randn(CLIENTS, task.p)
    for together in (False, True):
        for one in (task, again):
            one.vectorised = one.grouped = together
        assert torch.equal(task.gradient(w, some)[0], again.gradient(w, some)[0])


def test_where_vmap_fails_check_takes_the_grouped_pass_or_says_so(caplog):
    """Settled on a processor as it would be on an accelerator."""
    x = batch().x.flatten(0, 1)
    split = Split(x, torch.arange(len(x)) % 3, torch.tensor([0, len(x)]).numpy())
    task = Task(adapted(Net(), "lora:r=2"))
    task.vectorised = True
    check(task, split, 3)
    assert task.vectorised
    assert task.grouped
    assert not caplog.records

    class Odd(Net):
        def forward(self, x):
            return super().forward(x) + self.head.weight.sum(1) * x.sum(1, keepdim=True)

    task = Task(Odd())
    task.vectorised = True
    check(task, split, 3)
    assert not task.vectorised
    assert "is trained one client after another" in caplog.text


def test_operations_do_not_grow_with_the_clients():
    """No loop over clients: the graph of 20 has as many nodes as that of 2."""

    def nodes(s):
        task = task_of(adapted(Net(), "lora:r=2"))
        w = task.w0.expand(s, -1).clone().requires_grad_()
        with torch.enable_grad():
            out = grouped_pass(task.workspace(True)[0], task.layout, w, batch().x[:1].expand(s, -1, -1), None, None)[0]
        seen, left = set(), [out.grad_fn]
        while left:
            node = left.pop()
            if node is not None and node not in seen:
                seen.add(node)
                left += [n for n, _ in node.next_functions]
        return len(seen)

    assert nodes(2) == nodes(20)
