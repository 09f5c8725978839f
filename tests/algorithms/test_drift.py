"""SCAFFOLD, FedDyn, FedTrack and FedLin: the exact optimum under drift, their variates against their definition, their
algorithms in plain numpy, and the traps of known code."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares, zero_linear

import polyfed as pf

private = pytest.importorskip("polyfed_testing.stage").private


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=1, clients=8, dim=6)


def gradients(problem):
    return np.stack([problem.gradient(i, problem.optimum) for i in range(problem.clients)])


@certifies(pf.Scaffold, by="the centralised optimum and the clients' gradients there, both options")
@pytest.mark.parametrize("option", [1, 2])
def test_scaffolds_optimum_under_drift(problem, option):
    """FedAvg with the same steps stalls; c_i -> grad f_i(w*) and c -> 0: wrong sign, scale or step count would show."""
    run = problem.fit(pf.Scaffold(0.02, option=option), rounds=300)
    assert problem.error(run.server["w"]) < 1e-10
    assert problem.error(problem.fit(pf.FedAvg(0.02, weighted=False), rounds=100).server["w"]) > 1e-3
    assert np.allclose(private(run)["c"], gradients(problem), atol=1e-8)
    assert np.allclose(run.server["c"], 0, atol=1e-9)


def test_a_client_smaller_than_a_batch_has_its_own_number_of_steps():
    """Option II divides by the client's own steps: with unequal clients c_i is still a mean of gradients."""
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in (4, 50)]
    fed = pf.Federation.from_arrays(data, test=data)
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    run = pf.fit(model, fed, pf.Scaffold(0.01), rounds=1, batch_size=10, loss="mse", evaluate_every=0)
    X, y = data[0]
    gradient = -2 * X.T @ y / 4  # one step, from zero, on all it has
    assert np.allclose(private(run)["c"][0], gradient, atol=1e-12)


@pytest.mark.parametrize("option", [1, 2])
def test_the_servers_step_scales_the_models_move_alone(option):
    """One round from the same start: x moves by server_lr times the mean change, c and the c_i as without."""
    problem = LeastSquares(seed=2, clients=5, dim=4)
    whole, half = (problem.fit(pf.Scaffold(0.02, option=option, server_lr=s), rounds=1, steps=3) for s in (1.0, 0.5))
    assert whole.server["w"].abs().max() > 0.01
    assert torch.allclose(half.server["w"], whole.server["w"] / 2, atol=1e-15)  # the start is zero
    assert torch.equal(half.server["c"], whole.server["c"])


@certifies(pf.FedDyn, by="the centralised optimum and the clients' gradients there")
@pytest.mark.parametrize(("fraction", "rounds"), [(1.0, 200), (0.5, 500)])
def test_feddyns_optimum_under_drift(problem, fraction, rounds):
    run = problem.fit(pf.FedDyn(0.02, alpha=5.0), rounds=rounds, fraction=fraction)
    assert problem.error(run.server["w"]) < 1e-9
    assert np.allclose(private(run)["g"], gradients(problem), atol=1e-7)
    assert np.allclose(run.server["h"], private(run)["g"].mean(0), atol=1e-9)


@certifies(pf.FedDyn, by="Algorithm 1 in closed form")
def test_two_rounds_of_exact_solves(problem):
    """w_i = (H_i + alpha)^-1 (b_i + g_i + alpha x): the norm squared, and no pull left out."""
    alpha, eye = 2.0, np.eye(problem.dim)
    x, h, g = np.zeros(problem.dim), np.zeros(problem.dim), np.zeros((problem.clients, problem.dim))
    for _ in range(2):
        sides = zip(problem.H, problem.b, g, strict=True)
        w = np.stack([np.linalg.solve(H + alpha * eye, b + gi + alpha * x) for H, b, gi in sides])
        g = g - alpha * (w - x)
        h = h - alpha * (w - x).sum(0) / problem.clients
        x = w.mean(0) - h / alpha
    run = problem.fit(pf.FedDyn(0.05, alpha=alpha), rounds=2, steps=300)
    assert np.allclose(run.server["w"], x, atol=1e-10)
    assert np.allclose(private(run)["g"], g, atol=1e-10)


def numpy_fedlin(problem, total, steps, rounds, keep_up=None, keep_down=None):
    """Algorithm 1 as printed; steps: per client. Returns the server's x after each round."""

    def compress(v, keep):
        k = len(v) if keep is None else int(np.ceil(keep * len(v)))
        out = np.zeros_like(v)
        top = np.argsort(-np.abs(v))[:k]
        out[top] = v[top]
        return out

    n = problem.clients
    x, e, rho, seen = np.zeros(problem.dim), np.zeros(problem.dim), np.zeros((n, problem.dim)), []
    for _ in range(rounds):
        own = np.stack([problem.gradient(i, x) for i in range(n)])
        h = np.stack([compress(r + g, keep_up) for r, g in zip(rho, own, strict=True)])
        rho = rho + own - h
        g = compress(e + h.mean(0), keep_down)
        e = e + h.mean(0) - g
        local = np.stack([x] * n)
        for i in range(n):
            for _ in range(steps[i]):
                local[i] = local[i] - total / steps[i] * (problem.gradient(i, local[i]) - own[i] + g)
        x = local.mean(0)
        seen.append(x)
    return np.stack(seen)


def contraction(H, steps, lr):
    """M with x_{t+1} - x* = M (x_t - x*): a client's K steps of a move by -a sum_k (I - a H_i)^k grad f(x)."""
    eye, mean = np.eye(len(H[0])), np.mean(H, axis=0)
    clients = zip(H, steps, lr, strict=True)
    moves = [a * sum(np.linalg.matrix_power(eye - a * h, k) for k in range(K)) for h, K, a in clients]
    return eye - np.mean(moves, axis=0) @ mean


@certifies(pf.FedTrack, by="the centralised optimum, linear rate")
def test_fedtracks_optimum_under_drift(problem):
    """The linear rate of its own iteration matrix, and the optimum in the end."""
    M = contraction(problem.H, [5] * 8, [0.02] * 8)
    expected = problem.optimum - np.linalg.matrix_power(M, 20) @ problem.optimum
    assert np.allclose(problem.fit(pf.FedTrack(0.02), rounds=20).server["w"], expected, atol=1e-12)
    assert problem.error(problem.fit(pf.FedTrack(0.02), rounds=200).server["w"]) < 1e-10


@certifies(pf.FedTrack, by="identity with option I")
def test_scaffold_is_one_round_behind(problem):
    """Option I with everybody: c_i is the gradient at the last x. Hand-made with FedTrack's step and old gradients."""
    n, x, lr = problem.clients, np.zeros(problem.dim), 0.02
    old = np.zeros((n, problem.dim))
    for _ in range(6):
        local = np.stack([x] * n)
        for i in range(n):
            for _ in range(5):
                local[i] = local[i] - lr * (problem.gradient(i, local[i]) - old[i] + old.mean(0))
        old = np.stack([problem.gradient(i, x) for i in range(n)])
        x = local.mean(0)
    scaffold = problem.fit(pf.Scaffold(lr, option=1), rounds=6)
    assert np.allclose(scaffold.server["w"], x, atol=1e-12)
    fresh = numpy_fedlin(problem, 5 * lr, [5] * n, 6)[-1]
    assert np.allclose(problem.fit(pf.FedTrack(lr), rounds=6).server["w"], fresh, atol=1e-12)
    assert not np.allclose(x, fresh, atol=1e-6)


@certifies(pf.FedLin, by="Algorithm 1 in plain numpy, both memories")
@pytest.mark.parametrize(("up", "down"), [(None, 0.25), (0.5, None), (0.5, 0.25)])
def test_fedlin_as_printed(problem, up, down):
    run = problem.fit(pf.FedLin(0.05, keep_up=up, keep_down=down), rounds=25)
    assert np.allclose(run.server["w"], numpy_fedlin(problem, 0.05, [5] * 8, 25, up, down)[-1], atol=1e-11)


@certifies(pf.FedLin, by="the optimum")
def test_fedlin_is_exact_with_unequal_numbers_of_steps():
    """One to four steps by number of samples, each lr / tau_i long: the optimum of the plain mean, at its own rate."""
    rng = np.random.default_rng(0)
    X, y, steps = rng.normal(size=(8, 3)), rng.normal(size=8), np.arange(8) % 4 + 1
    data = [(np.tile(x, (4 * k, 1)), np.tile(t, 4 * k)) for x, t, k in zip(X, y, steps, strict=True)]  # batches alike
    H = [2 * np.outer(x, x) for x in X]
    optimum = np.linalg.lstsq(X, y, rcond=None)[0]
    fed = pf.Federation.from_arrays(data, test=data)
    for rounds in (10, 400):
        run = pf.fit(zero_linear(3), fed, pf.FedLin(0.2), rounds=rounds, batch_size=4, loss="mse", evaluate_every=0)
        M = contraction(H, steps, 0.2 / steps)
        assert np.allclose(run.server["w"], optimum - np.linalg.matrix_power(M, rounds) @ optimum, atol=1e-12)
    assert np.allclose(run.server["w"], optimum, atol=1e-10)


@certifies(pf.Scaffold, by="the definition of (4)")
def test_option_two_is_the_mean_of_the_gradients_used(problem):
    """After round one (all variates zero) c_i is the mean of the k gradients along plain descent."""
    c = private(problem.fit(pf.Scaffold(0.02), rounds=1, steps=4))["c"]
    for i in range(problem.clients):
        w, seen = np.zeros(problem.dim), []
        for _ in range(4):
            seen.append(problem.gradient(i, w))
            w = w - 0.02 * seen[-1]
        assert np.allclose(c[i], np.mean(seen, axis=0), atol=1e-12)
