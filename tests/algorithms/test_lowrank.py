"""LPGD and GPGD, FedSLR's alternatives: identities, one round by hand, and that neither solves FedSLR's problem."""

import numpy as np
import pytest
import torch
from certify import certifies
from matrices import MultiOutput, matrix, shrink_singular
from torch import nn

import polyfed as pf
from polyfed.algorithms._shared.lowrank import sheets, shrink_layers, spectral
from polyfed.compute.layout import Layout


@pytest.fixture(scope="module")
def problem():
    return MultiOutput()


def alone(problem):
    """The same kind of problem with the first client only."""
    one = object.__new__(MultiOutput)
    one.data, one.clients = problem.data[:1], 1
    one.federation = pf.Federation.from_arrays(one.data, test=one.data)
    return one


def sgd(problem, i, W, lr, steps, amount=0.0):
    for _ in range(steps):
        W = W - lr * problem.gradient(i, W)
        W = shrink_singular(W, amount) if amount else W
    return W


@certifies(pf.GPGD, pf.LPGD, by="identity at lam = 0")
@pytest.mark.parametrize("fraction", [1.0, 0.3])
@pytest.mark.parametrize("method", [pf.LPGD, pf.GPGD])
def test_without_the_nuclear_norm_they_are_fedavg(problem, method, fraction):
    a = problem.fit(method(0.5, lam=0.0), 20, fraction=fraction)
    b = problem.fit(pf.FedAvg(0.5, weighted=False), 20, fraction=fraction)
    assert (a.server["w"] - b.server["w"]).abs().max() < 1e-12
    assert a.server["w"].abs().max() > 0.1


@certifies(pf.GPGD, pf.LPGD, by="the centralised solution for one client")
@pytest.mark.parametrize(("method", "steps"), [(pf.LPGD, 5), (pf.GPGD, 1)])
def test_one_client_solves_p1(problem, method, steps):
    """Full batches and one client: proximal gradient, whose fixed point is the solution for n = 1."""
    one = alone(problem)
    run = one.fit(method(1.2, lam=one.lam), 1500 // steps, steps=steps)
    assert np.abs(matrix(run) - one.solution()).max() < 1e-9


@certifies(pf.LPGD, by="the equations in plain numpy")
def test_one_round_of_lpgd(problem):
    """Every local step shrinks by lr lam; the server takes the plain mean, of higher rank than any of its terms."""
    lr, lam = 1.0, 0.1
    W = np.zeros((problem.out, problem.inputs))
    each = [sgd(problem, i, W, lr, 3, lr * lam) for i in range(problem.clients)]
    run = problem.fit(pf.LPGD(lr, lam=lam), 1, steps=3)
    assert np.abs(matrix(run) - np.mean(each, axis=0)).max() < 1e-12
    assert np.linalg.matrix_rank(matrix(run), tol=1e-9) > max(np.linalg.matrix_rank(w, tol=1e-9) for w in each)


@certifies(pf.GPGD, by="the equations in plain numpy")
@pytest.mark.parametrize("factor", [1, 3])
def test_one_round_of_gpgd(problem, factor):
    """The server shrinks the mean by `steps` lr lam, and sends factors where these are smaller than 16 x 12."""
    lr, lam = 1.0, 0.1
    W = np.zeros((problem.out, problem.inputs))
    for _ in range(2):
        mean = np.mean([sgd(problem, i, W, lr, 3) for i in range(problem.clients)], axis=0)
        W = shrink_singular(mean, factor * lr * lam)
    run = problem.fit(pf.GPGD(lr, lam=lam, steps=factor), 2, steps=3)
    assert np.abs(matrix(run) - W).max() < 1e-12
    rank = np.linalg.matrix_rank(W, tol=1e-9)
    assert run.findings["ranks"] == {"weight": rank}
    assert run.findings["gkr_parameters"] == min(16 * 12, rank * 28)
    after = problem.fit(pf.GPGD(lr, lam=lam, steps=factor), 3, steps=3).ledger
    assert (after[after["round"] == 2]["down_bytes"] == 8 * min(16 * 12, rank * 28)).all()


@certifies(pf.GPGD, pf.LPGD, by="against FedSLR on the same problem")
def test_neither_solves_p1(problem):
    """Clients that take several steps drift: at rest LPGD and GPGD are off by percents, and LPGD's mean is dense.

    GPGD's printed threshold fits one step: with K of them it is nearer to the solution for lam / K. FedSLR is exact
    after as many local steps.
    """
    K, lam, slow = 5, 0.1, 0.2
    solution, weaker = problem.solution(lam), problem.solution(lam / K)
    methods = {
        "lpgd": (pf.LPGD(slow, lam=lam), 150),
        "gpgd": (pf.GPGD(slow, lam=lam), 150),
        "gpgd K": (pf.GPGD(slow, lam=lam, steps=K), 150),
        "fedslr": (pf.FedSLR(1 / (0.8 + 1 / 2), lam=lam, eta_g=2.0, personal_epochs=0), 120),
    }
    found, moved = {}, {}
    for name, (method, rounds) in methods.items():
        last = []
        run = problem.fit(
            method, rounds, steps=K, callbacks=[lambda now, last=last: last.append(matrix(now.run).copy())]
        )
        found[name], moved[name] = matrix(run), np.abs(last[-1] - last[-2]).max()
    assert max(moved.values()) < 1e-7, "not at rest"
    error = {name: np.abs(w - solution).max() for name, w in found.items()}
    assert error["fedslr"] < 1e-6
    assert min(error["lpgd"], error["gpgd K"]) > 0.01
    assert error["gpgd"] > 3 * max(error["lpgd"], error["gpgd K"])
    assert np.abs(found["gpgd"] - weaker).max() < error["gpgd"] / 3
    rank = {name: np.linalg.matrix_rank(w, tol=1e-6) for name, w in found.items()}
    assert rank["lpgd"] == 12 > rank["fedslr"] == np.linalg.matrix_rank(solution, tol=1e-6)


@pytest.mark.parametrize("amount", [1e-8, 1e-4, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (20, 20)])
def test_shrunk_layers_are_those_of_the_singular_values(shape, dtype, amount):
    """To the rounding of the layer, whichever way they are found, and of the rank that the values left say."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=(shape[0], 3)) @ rng.normal(size=(3, shape[1]))  # three values of some 20, the rest 1e-3
    for given in (rng.normal(size=shape), low + 1e-4 * rng.normal(size=shape), np.zeros(shape)):
        w = torch.tensor(given, dtype=dtype).flatten()
        layers = sheets(Layout(nn.Linear(shape[1], shape[0], bias=False)))
        bad = torch.full_like(w, torch.nan)
        found = shrink_layers(torch.stack([w, 2 * w, bad]), layers, amount)
        assert found[2].isnan().all()
        whole = shrink_layers(torch.stack([w, 2 * w]), layers, amount)  # a row that is not finite takes another way
        for row, scale in zip([*found[:2], *whole], (1, 2, 1, 2), strict=True):
            U, S, Vh = np.linalg.svd(scale * w.double().view(shape).numpy(), full_matrices=False)
            exact = (U * np.maximum(S - amount, 0)) @ Vh
            rounding = 20 * torch.finfo(dtype).eps * max(S[0], 1e-30)
            assert np.abs(row.double().view(shape).numpy() - exact).max() <= rounding
            left = np.linalg.svd(row.double().view(shape).numpy(), compute_uv=False)
            assert (left[S <= amount] <= rounding).all()


def test_layers_whose_gram_matrix_defeats_lapack_are_shrunk_all_the_same():
    """Sparse ones of low rank, of which MKL's eigenvalue solver leaves one in twenty."""
    rng, layers = np.random.default_rng(0), sheets(Layout(nn.Linear(300, 100, bias=False)))
    for _ in range(200):
        r = int(rng.integers(1, 34))
        given = np.zeros((100, 300), np.float32)
        given[rng.permutation(100)[:r]] = rng.normal(size=(r, 300)) * np.logspace(-4, 0, r)[:, None]
        found = shrink_layers(torch.tensor(given).view(1, -1), layers, 0.01)[0].view(100, 300).double().numpy()
        exact = shrink_singular(given.astype(float), 0.01)
        assert np.abs(found - exact).max() <= 20 * torch.finfo(torch.float32).eps * np.linalg.norm(given, 2)
        assert np.linalg.matrix_rank(found) < 100


def test_where_the_eigenvalue_solver_does_not_converge_the_singular_values_say_the_same(monkeypatch):
    """Smallest first, as the solver has them, which FlexCFL's directions and FedSLR's cut-off rest on."""
    part = torch.randn(3, 8, 5, dtype=torch.float64)
    gram = part @ part.mT
    exact = torch.linalg.eigvalsh(gram)

    def gives_up(matrix):
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(torch.linalg, "eigh", gives_up)
    values, vectors = spectral(gram)
    assert (values - exact).abs().max() < 1e-12 * exact.max()
    assert ((vectors * values[:, None]) @ vectors.mT - gram).abs().max() < 1e-12 * exact.max()
