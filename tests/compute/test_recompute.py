"""Blocks that are computed again: the gradients of blocks that keep everything, dropout included, and less memory."""

import pytest
import torch
from small import batches, mlp, split_of
from test_elsewhere import V, words
from torch import nn

import polyfed as pf
from polyfed import models
from polyfed.base.errors import ConfigError, ModelError, RunError
from polyfed.compute.check import check
from polyfed.compute.gradients import hvp, losses_of
from polyfed.compute.recompute import blocks
from polyfed.compute.solvers import local_sgd
from polyfed.compute.task import Task
from polyfed.models import build
from polyfed.runs.trainer import prepare

D, WIDE, LAYERS = 8, 64, 6


class Layer(nn.Module):
    """A block with two dropouts, whose insides are much wider than what goes in."""

    def __init__(self, drop):
        super().__init__()
        self.query, self.value, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.wide, self.narrow, self.drop = nn.Linear(D, WIDE), nn.Linear(WIDE, D), nn.Dropout(drop)

    def forward(self, h, *, mask):
        scores = (self.query(h) @ h.mT).masked_fill(mask[:, None], -1e4)
        h = self.norm(h + self.drop(scores.softmax(-1) @ self.value(h)))
        return h + self.drop(self.narrow(torch.tanh(self.wide(h)).square()))


class Transformer(nn.Module):
    def __init__(self, drop=0.3, layers=LAYERS):
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, D), nn.Linear(D, 3)
        self.layers = nn.ModuleList(Layer(drop) for _ in range(layers))

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h, mask=x == 0)
        return self.head(h.mean(1))


def transformer(kind: str = "all", **given) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Transformer(**given).double()
        return net if kind == "all" else models.adapted(net, "lora:r=2,targets=query+value")


def task_of(model: nn.Module, recompute: bool, grouped: bool = False, **given) -> Task:
    task = Task(model, recompute=recompute, **given)
    task.net.vectorised = task.net.grouped = grouped
    check(task, SPLIT, 3)
    if grouped and not recompute:
        task.net.grouped = True  # where vmap has been found to do
    assert task.net.grouped == grouped
    return task


SPLIT = words(7, 3, 6)


def test_the_blocks_are_the_entries_of_the_outermost_lists():
    assert blocks(transformer()) == [f"layers.{k}" for k in range(LAYERS)]
    assert blocks(mlp()) == []
    assert len(blocks(build("resnet18", (3, 32, 32), 10))) == 8
    assert blocks(nn.ModuleList([transformer(layers=2), transformer(layers=2)])) == ["0", "1"]
    with pytest.raises(ConfigError, match="recompute: found no blocks in Sequential"):
        Task(mlp(), recompute=True)


@pytest.mark.parametrize(("kind", "grouped"), [("all", False), ("adapter", False), ("adapter", True)])
def test_local_training_has_the_same_bits(kind, grouped):
    tasks = [task_of(transformer(kind), again, grouped) for again in (False, True)]
    assert tasks[0].net.random
    work = batches(SPLIT, [0, 2, 1], batch_size=4, epochs=2)
    found = [local_sgd(task, task.w0.expand(3, -1), work, 0.1) for task in tasks]
    assert torch.equal(*found)
    assert not torch.equal(found[0][0], tasks[0].w0)


def test_bfloat16_and_second_derivatives_are_the_same():
    model = transformer(layers=2).float()
    batch = batches(SPLIT, [0, 2, 1]).whole()
    one, two = (task_of(model, again, bf16=True) for again in (False, True))
    w = one.w0.expand(3, -1).clone()
    assert torch.equal(one.gradient(w, batch)[0], two.gradient(w, batch)[0])
    one, two = (task_of(transformer(layers=2), again) for again in (False, True))
    w, v = one.w0.expand(3, -1).clone(), torch.randn(3, one.p, dtype=torch.float64)
    torch.testing.assert_close(hvp(one.net, w, v, batch), hvp(two.net, w, v, batch), rtol=0, atol=1e-12)


def test_what_is_planned_is_what_is_kept():
    """The tensors that are there between the two passes, counted, for one more sample."""
    for again in (False, True):
        task = task_of(transformer(), again)
        kept = []
        for b in (2, 3):
            seen: dict[int, int] = {}

            def note(t, seen=seen):
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            batch = batches(words(b), [0]).whole()
            with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
                _, _, parameters, loss = next(losses_of(task.net, task.w0[None].clone(), batch))
            kept.append(sum(seen.values()))
            torch.autograd.grad(loss, parameters)
        outside = kept[1] - kept[0]
        assert outside <= task.net.sample_bytes if again else abs(outside - task.net.sample_bytes) < 0.1 * outside


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, h):
        h += 1.0
        return self.b(torch.tanh(self.a(h)))


class Caching(Writing):
    """Keeps what it was given, as attention with a cache of keys does."""

    def forward(self, h):
        self.seen = [*getattr(self, "seen", []), h]
        return self.b(torch.tanh(self.a(torch.cat(self.seen)))[-len(h) :])


class Written(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.head = nn.Linear(4, D), nn.Linear(D, 3)
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, x):
        return self.head(self.layers[1](self.layers[0](self.first(x))))


@pytest.mark.parametrize(
    ("layer", "said"),
    [(Writing, "writes into its input"), (Caching, "does not do the same .* a cache of keys and values")],
)
def test_a_block_that_does_more_than_compute_is_refused_by_name(layer, said):
    task, batch = Task(Written(layer).double(), recompute=True), batches(split_of(8)).whole()
    with pytest.raises(ModelError, match=rf"layer 'layers\.1' {said}"):
        task.gradient(task.w0[None].clone(), batch)


def test_as_a_setting_it_fits_where_the_whole_does_not(monkeypatch):
    """`prepare` refuses what would not fit, before a step is taken."""
    fed = pf.Federation.from_arrays([(SPLIT.x.repeat(20, 1), SPLIT.y.repeat(20))] * 2, test_fraction=0.0)
    model = transformer()

    def prepared(recompute: bool):
        how = pf.Training(rounds=1, batch_size=300, evaluate_every=0, workers=1, recompute=recompute)
        return prepare(model, fed, pf.FedAvg(lr=0.1), how)

    whole, short = (prepared(recompute=again).memory.more for again in (False, True))
    assert short < whole / 3
    monkeypatch.setattr("polyfed.runs.trainer.free_memory", lambda device: (short + whole) // 2)
    with pytest.raises(RunError, match="does not fit"):
        prepared(recompute=False)
    assert prepared(recompute=True).task.net.blocks
