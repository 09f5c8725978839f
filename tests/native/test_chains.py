"""Norms, activations whose derivative needs what went in, dropouts and additions in the compiled kernel: it ends where
torch does, by every instruction set; which models it takes, and which it leaves to torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_convolutions import odd
from test_kernel import CHAINS, IN, OUT, SIZES, WORK, batches, needed, split_of
from test_networks import Case, compare, convolutions, drawn, one_of
from torch import nn

import polyfed as pf
from polyfed import native as kernels
from polyfed.compute import compiled
from polyfed.compute.batches import Batch
from polyfed.compute.check import check
from polyfed.compute.compiled import path_of
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.steps import affine
from polyfed.compute.task import Task
from polyfed.compute.terms import Distillation

BENDS = (nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity)


class Plus(nn.Module):
    """x + f(x), in either order."""

    def __init__(self, *parts, turned=False):
        super().__init__()
        self.f, self.turned = nn.Sequential(*parts), turned

    def forward(self, x):
        return self.f(x) + x if self.turned else x + self.f(x)


class Net(nn.Module):
    """A body and a head with a forward of its own, by functions of torch."""

    def __init__(self, width=12):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(IN, width), nn.ReLU(inplace=True))
        self.norm, self.mid = nn.LayerNorm(width), nn.Linear(width, width)
        self.head = nn.Linear(width, OUT)

    def forward(self, x):
        h = self.body(torch.flatten(x, 1))
        out = F.dropout(F.gelu(self.mid(self.norm(h))), 0.3, self.training)
        out += h
        return self.head(out)


def net(make):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make()


def norm(rng, width: int) -> nn.Module:
    """Of deviations that are not so small that rounding shows."""
    how = one_of(rng, {}, {"bias": False}, {"elementwise_affine": False})
    return nn.LayerNorm(width, eps=one_of(rng, 1e-3, 0.1), **how)


def parts(rng, width: int, out: int, depth: int = 0) -> list[nn.Module]:
    """Layers from `width` to `out` numbers in any order, blocks that are added to their input among them."""
    found: list[nn.Module] = []
    for _ in range(rng.integers(0, 4)):
        kind = rng.integers(0, 5)
        if kind == 0 and width >= 8:
            found.append(norm(rng, width))
        if kind == 1:
            found.append(one_of(rng, *BENDS)())
        if kind == 2:
            found.append(nn.Dropout(float(one_of(rng, 0.0, 0.1, 0.5, 0.9))))
        if kind == 3 and depth < 2:
            inside = parts(rng, width, width, depth + 1)
            if any(isinstance(m, nn.Linear) for m in inside):
                found.append(Plus(*inside, turned=bool(rng.random() < 0.5)))
        if kind == 4:
            wide = int(one_of(rng, 16, 32, rng.integers(8, 40)))
            found += [nn.Linear(width, wide, bias=bool(rng.random() < 0.7)), one_of(rng, *BENDS)()]
            width = wide
    if width != out or rng.random() < 0.5:
        found.append(nn.Linear(width, out))
    return found


def network(rng, shape: tuple[int, ...], outputs: int, even: bool) -> nn.Module:
    modules = convolutions(rng, shape, even) if len(shape) == 3 else []
    width = nn.Sequential(*modules)(torch.zeros(2, *shape)).shape[1]
    last = int(rng.integers(8, 40))
    modules += [*parts(rng, width, last), one_of(rng, *BENDS)(), norm(rng, last), nn.Linear(last, outputs)]
    return nn.Sequential(*modules)


@needed
@pytest.mark.parametrize("few", range(24))
def test_the_kernel_takes_torchs_steps(few, monkeypatch):
    for seed in range(5 * few, 5 * few + 5):
        compare(drawn(seed, network), monkeypatch, seed)


@needed
@pytest.mark.long
def test_the_kernel_takes_torchs_steps_in_a_thousand_networks(monkeypatch):
    for seed in range(1000):
        compare(drawn(seed, network), monkeypatch, seed)


@needed
@pytest.mark.parametrize("bend", BENDS[:3], ids=["gelu", "gelu tanh", "silu"])
def test_activations_far_from_zero(bend, monkeypatch):
    """Where the normal distribution's tail, or the exponential of what goes in, is all or nothing."""
    task = Task(nn.Sequential(nn.Linear(1, 400, bias=False), bend(), nn.Linear(400, 1)), "mse", dtype=torch.float64)
    w = task.w0.clone()
    w[:400] = torch.linspace(-45, 45, 400)
    x = torch.ones(1, 1, 1, dtype=torch.float64)
    found = [task.gradient(w[None], Batch(x, 0 * x, native=native), need_loss=False)[0] for native in (False, True)]
    assert torch.allclose(*found, rtol=1e-12, atol=1e-15 * float(found[0].abs().max()))


@needed
@pytest.mark.parametrize("make", [*CHAINS.values(), odd, Net], ids=[*CHAINS, "convolutions", "own forward"])
def test_a_client_comes_out_the_same_whoever_is_trained_with_it_and_a_diverging_one_is_seen(make):
    """So the result does not depend on chunks and threads, and nothing of a client's numbers is left for the next."""
    task = Task(net(make))
    split = task.place(split_of(inputs=(2, 11, 10)) if make is odd else split_of())
    w = task.w0 + 0.02 * torch.randn(len(SIZES), task.p)
    for work in WORK:
        calm = local_sgd(task, w, batches(split, work, True), 0.05)
        found = local_sgd(task, w.index_fill(0, torch.tensor([1]), torch.nan), batches(split, work, True), 0.05)
        assert found[1].isnan().any()
        for i in (0, 2, 3, 4):
            alone = local_sgd(task, w[[i]], batches(split, work, True, [i]), 0.05)[0]
            assert torch.equal(found[i], calm[i])
            assert torch.equal(alone, calm[i])


class Own(nn.Module):
    """A forward that is given, around two linear layers and a norm."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(IN, 12), nn.LayerNorm(12), nn.Linear(12, OUT)
        self.of = forward

    def forward(self, x):
        return self.of(self, x)


def _after(m, x):
    h = m.a(x)
    return m.b(m.norm(F.gelu(h)) + h + h)


def _written(m, x):
    """The sum reads what ReLU has written over."""
    h = m.norm(m.a(x))
    g = F.relu(h, inplace=True)
    return m.b(h + torch.tanh(g))


TAKEN = {
    "functions": lambda m, x: m.b(torch.tanh(m.norm(F.silu(m.a(x))))),
    "one after another": lambda m, x: m.b(F.dropout(F.relu(torch.sigmoid(m.norm(m.a(x)))), 0.2, m.training)),
    "sums with what an activation took": _after,
    "written over": _written,
}
LEFT = {
    "by its numbers": lambda m, x: m.b(m.norm(m.a(x)) if x.sum() > 0 else m.a(x)),
    "another function": lambda m, x: m.b(F.softplus(m.norm(m.a(x)))),
    "a product": lambda m, x: m.b(m.norm(h := m.a(x)) * h),
    "a weight by itself": lambda m, x: m.b(m.norm(F.linear(x, 2 * m.a.weight, m.a.bias))),
    "no gradient": lambda m, x: m.b(m.norm(m.a(x).detach())),
    "another one in evaluation": lambda m, x: m.b(m.norm(m.a(x)) if m.training else F.relu(m.norm(m.a(x)))),
    "two branches": lambda m, x: m.b(F.relu(h := m.norm(m.a(x))) + torch.tanh(h)),
    "something behind the head": lambda m, x: F.relu(m.b(m.norm(m.a(x)))),
    "a number": lambda m, x: m.b(m.norm(m.a(x)) + 1),
    "a sum with a factor": lambda m, x: m.b(torch.add(m.norm(h := m.a(x)), h, alpha=2)),
    "a layer twice": lambda m, x: m.b(m.norm(m.norm(m.a(x)))),
    "a layer left out": lambda m, x: m.b(m.a(x)),
    "a draw of its own": lambda m, x: m.b(torch.rand_like(h := m.norm(m.a(x))) * h),
}


@needed
@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_which_forwards_the_kernel_takes(name):
    task, split = Task(net(lambda: Own((TAKEN | LEFT)[name])), dtype=torch.float64), split_of()
    state = torch.get_rng_state()
    assert path_of(task.net, None, split) == ("native" if name in TAKEN else "client by client")
    assert torch.equal(torch.get_rng_state(), state)
    if name in TAKEN:
        w = task.w0.expand(len(SIZES), -1)
        found = [local_sgd(task, w, batches(split, WORK[0], native), 0.05) for native in (False, True)]
        assert (found[0] - found[1]).abs().max() < 1e-12


def test_a_kernel_that_is_absent_is_said_once_where_it_would_have_trained(monkeypatch, capsys):
    split, taken, left = split_of(), Task(net(Net)).net, Task(net(Net), bf16=True).net
    monkeypatch.setattr(kernels, "built", lambda: None)
    kernels.lament.cache_clear()
    assert path_of(left, None, split) == "client by client"
    monkeypatch.setenv("POLYFED_NATIVE", "0")  # as its user has it
    assert path_of(taken, None, split) == "client by client"
    monkeypatch.delenv("POLYFED_NATIVE")
    assert capsys.readouterr().err == ""
    kernels.lament.cache_clear()
    assert [path_of(taken, None, split) for _ in range(2)] == ["client by client"] * 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("polyfed: the compiled kernel is absent here (")
    assert line.endswith("): torch trains, several times slower")
    kernels.lament.cache_clear()


@needed
def test_parameters_in_another_order_and_frozen_ones_are_left_to_torch():
    split = split_of()
    turned, frozen = net(Net), net(Net)
    turned.norm = turned._modules.pop("norm")
    frozen.norm.weight.requires_grad_(False)
    assert path_of(Task(net(Net)).net, None, split) == "native"
    for model in (turned, frozen):
        assert path_of(Task(model).net, None, split) == "client by client"
    assert path_of(Task(net(Net), bf16=True).net, None, split) == "client by client"


@needed
def test_the_plan_says_which_layer_leaves_the_whole_model_to_torch(tmp_path):
    fed = pf.Federation.from_arrays([(np.eye(4, dtype=np.float32), np.arange(4))] * 2)
    own = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 1, 1, dilation=2), nn.Flatten())
    for m, word in ((nn.Tanh(), None), (nn.LeakyReLU(), "1 (LeakyReLU)"), (own, "1.1 (Conv2d)")):
        to, model = tmp_path / str(word), nn.Sequential(nn.Linear(4, 4), m, nn.Linear(4, 4))
        pf.fit(model, fed, pf.FedAvg(lr=0.1), rounds=1, out=to)
        said = (to / "log.txt").read_text().split("plan: torch trains the whole model, as the kernel does not know ")
        assert [t.partition("\n")[0] for t in said[1:]] == [word] * (word is not None)


@needed
def test_where_other_gradients_are_made_the_kernel_makes_none():
    task, split = Task(net(Net)), split_of().to("cpu", torch.float32)
    w = task.w0.expand(len(SIZES), -1)
    task.net.guard = lambda w, batch: torch.zeros_like(w)
    assert compiled.train(task.net, w, batches(split, WORK[0], True), 0.1, affine(task.net, w, 0.1)) is None
    assert torch.equal(local_sgd(task, w, batches(split, WORK[0], True), 0.1), w)


class Tables(nn.Module):
    """Columns of a sample by a forward that is given: two are categories of 7 and of 40, six are numbers."""

    def __init__(self, row, width=14):
        super().__init__()
        self.a, self.b, self.of = nn.Embedding(7, 5), nn.Embedding(40, 3), row
        self.body, self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)), nn.Linear(width, OUT)

    def forward(self, x):
        z = self.of(self, x)
        return self.head(z + self.body(z))


def rows_of(whole=False):
    """Two columns of categories, then six of numbers; or only the former, as integers."""
    rng = np.random.default_rng(0)

    def client(n):
        x = np.stack([rng.integers(0, 7, n), rng.integers(0, 40, n)], 1)
        x = x if whole else np.concatenate([x, rng.normal(size=(n, 6))], 1)
        return torch.tensor(x), torch.tensor(rng.integers(0, OUT, n))

    return Split.of([client(n) for n in SIZES])


def _mixed(m, x):
    return torch.cat([x[:, 4:], m.a(x[:, 0].long()), x[:, 2:4], m.b(x[:, 1:2].to(torch.int64)).flatten(1)], 1)


ROWS = {  # how a row is made, of how many numbers, of integers
    "mixed": (_mixed, 14, False),
    "integers": (lambda m, x: torch.cat([m.a(x[:, 0]), m.b(x[:, -1])], -1), 8, True),
    "a table for two": (lambda m, x: torch.cat([m.a(x[:, :1]).flatten(1), m.b(x).flatten(1)], 1), 11, True),
}


def tables(name, dtype=torch.float64):
    row, width, whole = ROWS[name]
    task, split = Task(net(lambda: Tables(row, width)), dtype=dtype), rows_of(whole)
    check(task, split, OUT)
    return task, task.place(split)


@needed
@pytest.mark.parametrize("name", ROWS)
def test_tables_of_categories(name, monkeypatch):
    for dtype in (torch.float64, torch.float32):
        task, split = tables(name, dtype)
        w, teacher = task.w0 + 0.1 * torch.randn(2, len(SIZES), task.p, dtype=dtype)
        only = (torch.rand(len(SIZES), task.p) < 0.7).to(dtype)
        stated = {"pull": (0.3, teacher), "only": only, "teacher": (teacher, Distillation(0.5, 2.0, False))}
        toward = {"toward": (0.3, torch.randn(len(SIZES), OUT, task.width, dtype=dtype))}
        for work, more in zip([*WORK, WORK[0]], ({"shift": teacher}, stated, toward, {}), strict=True):
            work = work if dtype == torch.float64 else replace(work, steps=1)
            compare(Case(task, split, work, w, 0.05, more, False), monkeypatch, name)
        upper = {"only": task.layout.mask("body", "head").to(dtype)}
        compare(Case(task, split, WORK[0], w, 0.05, upper, False), monkeypatch, name)


@needed
@pytest.mark.parametrize("name", ["mixed", "integers"])
@pytest.mark.parametrize("category", [-1, 7])
def test_a_category_that_a_table_has_no_row_for_is_refused(name, category):
    task, split = tables(name)
    w = task.w0.expand(len(SIZES), -1)
    split.x[60, 0] = category
    for native in (False, True):
        with pytest.raises(IndexError):
            local_sgd(task, w, batches(split, WORK[0], native), 0.05)
    split.x[60, 0] = 0
    local_sgd(task, w, batches(split, WORK[0], True), 0.05)


OTHER_ROWS = {
    "another order": lambda m, x: torch.cat([m.b(x[:, 1].long()), m.a(x[:, 0].long()), x[:, 2:]], 1),
    "a table twice": lambda m, x: torch.cat(
        [m.a(x[:, 0].long()), m.b(x[:, 1].long()), m.a(x[:, 0].long()), x[:, 7:]], 1
    ),
    "numbers cut to integers": lambda m, x: torch.cat([m.a(x[:, 0].long()), m.b(x[:, 1].long()), x.long()[:, 2:]], 1),
    "columns apart": lambda m, x: torch.cat([m.a(x[:, 0].long()), m.b(x[:, 1].long()), x[:, ::2], x[:, 6:]], 1),
    "something behind a table": lambda m, x: torch.cat([m.a(x[:, 0].long()).relu(), m.b(x[:, 1].long()), x[:, 2:]], 1),
    "of each one": lambda m, x: m.a(x[:, 0].long()).repeat(1, 2)[:, :8] + m.b(x[:, 1].long()).repeat(1, 3)[:, :8],
}


@needed
def test_other_tables_are_left_to_torch():
    def path(row, width=14, change=lambda model: None, whole=False):
        model = net(lambda: Tables(row, width))
        change(model)
        task, split = Task(model), rows_of(whole)
        check(task, split, OUT)
        return path_of(task.net, None, task.place(split))

    assert path(_mixed) == "native"
    for name, row in OTHER_ROWS.items():
        assert path(row, 8 if name == "of each one" else 14) == "client by client", name
    for name, value in (("padding_idx", 0), ("scale_grad_by_freq", True)):
        assert path(_mixed, change=lambda m, name=name, value=value: setattr(m.a, name, value)) == "client by client"
    task, split = tables("integers")
    assert path_of(task.net, None, replace(split, x=split.x.int())) == "client by client"
