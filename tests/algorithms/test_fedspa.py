"""FedSpa: FedAvg at density one, the kernel rule, one round entry by entry, and planted supports found."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, centres
from torch import nn

import polyfed as pf
from polyfed.algorithms._shared.bits import kth_largest, largest, unpack
from polyfed.algorithms.fedspa import erdos_renyi_kernel
from polyfed.compute.layout import Layout

D, HIDDEN, CLIENTS = 8, 6, 5


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=3, clients=CLIENTS, dim=D)


def network(bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(D, HIDDEN, bias=bias), nn.Tanh(), nn.Linear(HIDDEN, 1, bias=bias)).double()


def fit(problem, algorithm, rounds, model=None, **kwargs):
    settings = {"local_epochs": 2, "batch_size": None, "evaluate_every": 0, "loss": "mse"} | kwargs
    return pf.fit(model or network(), problem.federation, algorithm, rounds=rounds, **settings)


def masks(run):
    return run.trained.engine.rows.gather(torch.arange(run.trained.n))["mask"]


@certifies(pf.FedSpa, by="the rule's proportions and total")
def test_densities_by_the_kernel_rule():
    """Densities proportional to (o + i + kh + kw) / (o i kh kw), at most one, and the total that was asked for."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(1, 4), nn.Conv2d(4, 32, 3), nn.Conv2d(32, 16, 1, bias=False), nn.Flatten(),
        nn.Linear(640, 10),
    )  # fmt: skip
    layout = Layout(model)
    kept = np.array([k for _, k in erdos_renyi_kernel(layout, 0.4)])
    shapes = [e.shape for e in layout.entries if len(e.shape) >= 2]
    sizes, axes = np.array([np.prod(s) for s in shapes]), np.array([sum(s) for s in shapes])
    full = kept == sizes
    assert full[0]  # so small that the rule asks for more than all of it
    assert full.sum() < 3
    scale = kept[~full] / axes[~full]  # density over (sum / product) of the axes
    assert np.ptp(scale) <= 1 / axes[~full].min()  # equal up to rounding to whole entries
    assert (kept <= sizes).all()
    assert kept.sum() + layout.p - sizes.sum() == pytest.approx(0.4 * layout.p, abs=1.5)


@certifies(pf.FedSpa, by="Algorithm 1 entry by entry")
def test_one_round_in_numpy(problem):
    """Least squares with one layer: start from the kept part, masked descent, mean of masked changes, drop and grow."""
    model = nn.Linear(D, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, -0.8, 0.3, 0.7, -0.2, 0.6, 0.05, -0.4]]))
    w0, lr, kept = model.weight.detach().numpy()[0], 0.03, 4
    mask = np.zeros(D, dtype=bool)
    mask[[1, 3, 5, 7]] = True  # the largest magnitudes
    change, after = [], []
    for i in range(CLIENTS):
        w = w0 * mask
        for _ in range(3):
            w = w - lr * mask * problem.gradient(i, w)
        change.append(w0 * mask - w)
        g = np.abs(problem.gradient(i, w))
        stay = sorted(np.flatnonzero(mask), key=lambda j: -abs(w[j]))[: kept - 2]  # a_0 = 1/2 of four entries
        grow = sorted(set(range(D)) - set(stay), key=lambda j: -g[j])[:2]
        after.append(np.isin(np.arange(D), stay + grow))
    run = fit(problem, pf.FedSpa(lr, density=0.5), 1, model, local_epochs=3)
    assert np.allclose(run.server["w"], w0 - np.mean(change, axis=0), atol=1e-13)
    assert np.array_equal(masks(run), after)
    assert len({tuple(m) for m in after}) > 1
    assert torch.equal(unpack(run.server["mask"], D), masks(run))
    assert torch.equal(run.personal, run.server["w"] * masks(run))


@certifies(pf.FedSpa, by="the plain mean")
def test_an_entry_that_few_hold_moves_by_the_mean_over_all(problem):
    """x <- x - (1/S) sum_S (m_i * x - w_i), zero where a client has no entry: the divisor is S, not the holders."""
    model = nn.Linear(D, 1, bias=False).double()
    before, after = (fit(problem, pf.FedSpa(0.03, density=0.5), r, model, local_epochs=3) for r in (1, 2))
    x, mask = before.server["w"].numpy(), masks(before).numpy()
    holders = mask.sum(0)
    assert set(holders.tolist()) & set(range(1, CLIENTS))  # some entries have some of the clients
    change = np.zeros((CLIENTS, D))
    for i in range(CLIENTS):
        w = x * mask[i]
        for _ in range(3):
            w = w - 0.03 * mask[i] * problem.gradient(i, w)
        change[i] = x * mask[i] - w
    assert np.allclose(after.server["w"], x - change.sum(0) / CLIENTS, atol=1e-13)


@pytest.mark.parametrize("search", ["dst", "rsm"])
def test_every_mask_keeps_as_much_of_each_layer(problem, search):
    run = fit(problem, pf.FedSpa(0.05, density=0.4, search=search), 6, fraction=0.6, batch_size=8)
    layout = run.trained.task.layout
    for span, k in erdos_renyi_kernel(layout, 0.4):
        assert (masks(run)[:, span].sum(1) == k).all()
    assert (masks(run)[:, layout.mask("0.bias", "2.bias")]).all()  # one-dimensional parts are dense
    assert torch.equal(unpack(run.server["mask"], layout.p), masks(run))
    dense = int(layout.mask("0.bias", "2.bias").sum())
    kept = dense + sum(k for _, k in erdos_renyi_kernel(layout, 0.4))
    assert (run.parameters == kept).all()
    assert kept == pytest.approx(0.4 * layout.p, abs=1)
    assert (run.ledger["down_bytes"] == 8 * kept).all()  # and a bit per parameter up for the mask
    assert (run.ledger["up_bytes"] == 8 * kept + -(-layout.p // 8)).all()


def test_random_masks_are_drawn_once_and_differ(problem):
    a = fit(problem, pf.FedSpa(0.05, density=0.4, search="rsm"), 1)
    b = fit(problem, pf.FedSpa(0.05, density=0.4, search="rsm"), 5)
    assert torch.equal(masks(a), masks(b))
    assert len({tuple(m.tolist()) for m in masks(a)}) == CLIENTS


def test_the_search_comes_to_rest(problem):
    settings = {"density": 0.4, "search_rounds": 4}
    runs = [fit(problem, pf.FedSpa(0.05, **settings), r) for r in (1, 2, 4, 8)]
    assert torch.equal(masks(runs[2]), masks(runs[3]))
    assert not torch.equal(masks(runs[0]), masks(runs[1]))


@certifies(pf.FedSpa, by="sparse least squares")
def test_the_search_finds_a_planted_support():
    """f_i = 1/2 ||w - c_i||^2 with 4 of 16 entries in c_i, another 4 for each client: all masks find them."""
    rng = np.random.default_rng(0)
    c = np.zeros((6, 16))
    for row in c:
        row[rng.choice(16, 4, replace=False)] = rng.choice([-1, 1], 4) * rng.uniform(2, 3, 4)
    model = nn.Linear(16, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.as_tensor(0.01 * rng.normal(size=(1, 16))))
    settings = {"local_steps": 60, "batch_size": None, "evaluate_every": 0, "loss": "mse"}
    run = pf.fit(model, centres(c), pf.FedSpa(0.3, density=0.25, search_rounds=8), rounds=8, **settings)
    assert np.array_equal(masks(run), c != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 7, 300, 599, 600])
def test_the_kth_largest_is_that_of_a_sort(k, dtype):
    """Numbers of every size, zeros and equal ones among them."""
    values = torch.logspace(-40, 38, 600, dtype=torch.float64).to(dtype)
    values[::5], values[1::7] = 0, 1
    rows = torch.stack([values, values.flip(0), values.roll(99)])
    assert (kth_largest(rows, k) == rows.sort(1, descending=True).values[:, k - 1]).all()


def test_the_largest_are_as_many_as_asked_for():
    """Among those that may be chosen only, the first ones where scores are equal."""
    score, among = torch.tensor([[3.0, 0, 2, 0, 0, 5]]), torch.tensor([[True, True, True, True, True, False]])
    wanted = {0: [], 1: [0], 2: [0, 2], 3: [0, 1, 2], 4: [0, 1, 2, 3], 5: [0, 1, 2, 3, 4]}
    assert {k: largest(score, k, among)[0].nonzero()[:, 0].tolist() for k in wanted} == wanted
