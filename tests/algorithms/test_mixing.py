"""FedAMP, HeurFedAMP, APPLE, FedFomo, FedALA and pFedHN: models mixed or made for each client, by their equations."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import Given, LeastSquares, centres, fit_labels, fit_points, labelled, two_layers
from torch.func import functional_call

import polyfed as pf
from polyfed.algorithms.fedamp import messages
from polyfed.base.errors import ConfigError

private = pytest.importorskip("polyfed_testing.stage").private


def test_no_weight_is_negative():
    W = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
    A = messages(W, 100.0 / 29, 100.0)
    assert (A >= -1e-15).all()
    assert torch.allclose(A.sum(1), torch.ones(30, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"at most sigma/\(n-1\) = 25"):
        fit_points(centres(np.eye(5)), pf.FedAMP(0.1, alpha=26.0), rounds=1, dim=5)


def by_distance(W, alpha, sigma):
    """FedAMP's u_i, from the definition: sum_j xi_ij w_j with xi_ij = alpha exp(-||w_i - w_j||^2 / sigma) / sigma."""
    U = W.copy()
    for i in range(len(W)):
        for j in range(len(W)):
            U[i] += alpha / sigma * np.exp(-((W[i] - W[j]) ** 2).sum() / sigma) * (W[j] - W[i])
    return U


def by_cosine(W, sigma, own):
    """HeurFedAMP's u_i: `own` of w_i, the rest shared by exp(sigma cos(w_i, w_j))."""
    N = W / np.linalg.norm(W, axis=1, keepdims=True)
    E = np.exp(sigma * N @ N.T) * (1 - np.eye(len(W)))
    return own * W + (1 - own) * (E / E.sum(1, keepdims=True)) @ W


@certifies(pf.FedAMP, by="Algorithm 1 by hand, from u_i")
@certifies(pf.HeurFedAMP, by="the rounds by hand, from u_i")
@pytest.mark.parametrize(
    ("method", "mix"),
    [
        (pf.FedAMP(0.03, lam=3.0, sigma=2.0, alpha=0.25), lambda W: by_distance(W, 0.25, 2.0)),
        (pf.HeurFedAMP(0.03, lam=3.0, alpha=0.25, sigma=4.0, self_weight=0.3), lambda W: by_cosine(W, 4.0, 0.3)),
    ],
    ids=lambda m: getattr(m, "name", ""),
)
def test_rounds_in_numpy(method, mix):
    """Algorithm 1: local descent on f_i(w) + lam / (2 alpha) ||w - u_i||^2 from u_i, in steps too short to solve it.

    After so few steps the result still depends on where they began, and on lam / alpha = 12 as it could not on 3/4."""
    problem = LeastSquares(seed=4, clients=4, dim=3)
    W = np.zeros((4, 3))
    for t in range(3):
        U = mix(W) if t else W  # in the first round all models are equal
        W = U.copy()
        for _ in range(2):
            G = np.stack([problem.gradient(i, w) for i, w in enumerate(W)])
            W = W - 0.03 * (G + 3.0 / 0.25 * (W - U))
    assert np.abs(mix(W) - W).max() > 0.01
    assert np.allclose(problem.fit(method, rounds=3, steps=2).personal, W, atol=1e-13)


@pytest.mark.parametrize("method", [pf.FedAMP(0.05), pf.HeurFedAMP(0.05)], ids=lambda m: m.name)
def test_absent_clients_are_mixed_in_as_the_server_last_saw_them(method):
    problem = LeastSquares(seed=1, clients=6, dim=3)
    run = problem.fit(method, rounds=4, steps=2)
    sent = method.downlink(run.server, run.trained.round(np.array([1, 4]))).each["u"]
    everyone = method.weights(run.server["w"]) @ run.server["w"]
    assert torch.allclose(sent, everyone[[1, 4]], atol=1e-12)
    alone = method.weights(run.server["w"][[1, 4]]) @ run.server["w"][[1, 4]]
    assert (sent - alone).abs().max() > 1e-4


@certifies(pf.APPLE, by="its equations in numpy")
@pytest.mark.parametrize("form", ["exponential", "cosine"])
def test_rounds_of_apple_by_hand(form):
    """p starts at the shares of samples; both steps are taken from the same point; the pull is of mu ||p - p0||^2."""
    problem, lr, lr_p, mu, fade = LeastSquares(seed=2, clients=4, dim=3), 0.03, 0.05, 0.4, 3
    sizes = np.array([len(y) for _, y in problem.data], dtype=float)
    p0 = sizes / sizes.sum()
    core, p = np.zeros((4, 3)), np.tile(p0, (4, 1))
    for t in range(4):
        lam = 0 if t >= fade else 1e-3 ** (t / fade) if form == "exponential" else (np.cos(np.pi * t / fade) + 1) / 2
        new, new_p = core.copy(), p.copy()
        for i in range(4):
            mine, q = core.copy(), p[i].copy()
            for _ in range(3):
                g = problem.gradient(i, q @ mine)
                slope = mine @ g
                mine[i] = mine[i] - lr * q[i] * g
                q = q - lr_p * (slope + 2 * lam * mu * (q - p0))
            new[i], new_p[i] = mine[i], q
        core, p = new, new_p
    run = problem.fit(pf.APPLE(lr, weight_lr=lr_p, mu=mu, fade=fade, form=form), rounds=4, steps=3)
    assert np.allclose(run.server["core"], core, atol=1e-12)
    assert np.allclose(run.server["p"], p, atol=1e-12)
    assert np.allclose(run.personal, p @ core, atol=1e-12)
    assert np.abs(p - p0).max() > 0.01


@certifies(pf.APPLE, by="autograd in the weights")
def test_the_gradient_of_a_weight_is_a_sum_over_all_parameters():
    """<g, c_j>: neither a mean, nor one in which a bias weighs as much as a dense layer."""
    fed, lr_p = labelled(), 0.3
    method = pf.APPLE(0.0, weight_lr=lr_p, mu=0.0)
    run = fit_labels(fed, method, rounds=1, local_steps=1)
    core = run.server["core"]
    p0 = torch.tensor([24.0, 9.0, 30.0]).double() / 63
    layout, net = run.trained.task.layout, two_layers()
    for i in range(3):
        x, y = fed.train.client(i)
        p = p0.clone().requires_grad_()
        w = p @ core
        out = functional_call(net, layout.named(w), (x.double(),))
        (slope,) = torch.autograd.grad(torch.nn.functional.cross_entropy(out, y), p)
        assert torch.allclose(run.server["p"][i], p0 - lr_p * slope, atol=1e-12)


POINTS = np.random.default_rng(2).normal(size=(5, 3)) * 2


def loss_of(w):
    """[client, model]: 1/2 ||w_n - c_i||^2."""
    return ((w[None] - POINTS[:, None]) ** 2).sum(2) / 2


@certifies(pf.FedFomo, by="its equations in numpy")
def test_rounds_of_fedfomo_by_hand():
    """theta_i is the model after training; weights are positive parts that add up to one, summed uncut."""
    lr, w, P = 0.3, np.zeros_like(POINTS), np.zeros((5, 5))
    for _ in range(4):
        F, gap = loss_of(w), w[None] - w[:, None]  # gap[i, n] = theta_n - theta_i
        length = np.linalg.norm(gap, axis=2)
        v = (np.diag(F)[:, None] - F) / np.where(length > 0, length, 1)
        P += v
        u = np.maximum(v, 0)
        u = u / np.where(u.sum(1, keepdims=True) > 0, u.sum(1, keepdims=True), 1)
        w = w + np.einsum("in,ind->id", u, gap)
        w = w - lr * (w - POINTS)
    run = fit_points(centres(POINTS), pf.FedFomo(lr, models=4, validation=0.0), 4, 3)
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(run.server["P"], P, atol=1e-12)
    assert (P < 0).any()


@certifies(pf.FedFomo, by="identity with Local")
def test_without_models_or_better_ones_it_is_local():
    """Far apart, nobody else's model is ever better. In the first round all are equal: nothing is divided by 0."""
    far = centres(np.array([[9.0, 0], [-9, 0], [0, 9], [0, -9]]))
    b = fit_points(far, pf.FedFomo(0.4, validation=0.0), 5, 2).personal
    assert torch.allclose(b, fit_points(far, pf.Local(0.4), 5, 2).personal, atol=1e-13)


def test_the_first_models_are_drawn_and_places_are_explored():
    """Not the first ones by index, and not the same in every round while epsilon lasts; nobody is sent its own."""
    method, n = pf.FedFomo(models=3, epsilon=0.5, decay=0.05), 40
    key = torch.arange(1, n + 1) * 7919
    P = torch.zeros(n, n).double()
    at = [pf.Round(t, n, 0, torch.arange(n), torch.ones(n), torch.full((n,), t)) for t in range(12)]
    sent = [method._sent({"P": P, "key": key}, r).numpy() for r in at]
    assert all((s != np.arange(n)[:, None]).all() and all(len({*row}) == 3 for row in s.tolist()) for s in sent)
    assert len(np.unique(sent[0])) > n / 2
    known = {"P": torch.arange(n).expand(n, -1).double(), "key": key}
    best = [(np.sort(method._sent(known, r).numpy()[:30], 1) == [37, 38, 39]).mean() for r in at]
    assert 0.3 < best[0] < 0.8
    assert best[-1] == 1.0


@pytest.mark.parametrize("validation", [0.3, 0.0])
def test_validation_samples_do_not_train(validation):
    """Without models, a client that sets 30 % apart is Local on the other 70 %."""
    fed = labelled((30, 20, 11))
    run = fit_labels(fed, pf.FedFomo(0.2, models=0, validation=validation), rounds=2)
    alone = fit_labels(fed, pf.Local(0.2), rounds=2)
    assert torch.equal(run.personal, alone.personal) is (validation == 0)


FIVE = np.random.default_rng(3).normal(size=(5, 4))


def ala_by_hand(points, lr, eta, rounds, first_passes):
    """f_i = 1/2 ||w - c_i||^2 with one local step a round: (w, A) after `rounds`."""
    w, A, x = np.zeros_like(points), np.ones_like(points), np.zeros(points.shape[1])
    for t in range(rounds):
        for _ in range(0 if t == 0 else first_passes if t == 1 else 1):
            s = w + (x - w) * A
            A = np.clip(A - eta * (s - points) * (x - w), 0, 1)
        s = w + (x - w) * A
        w = s - lr * (s - points)
        x = w.mean(0)
    return w, A


@certifies(pf.FedALA, by="its equations in numpy")
@pytest.mark.parametrize(("passes", "settled", "first"), [(1, 0.1, 1), (50, 1e9, 11), (50, 0.0, 50)])
def test_rounds_of_fedala_by_hand(passes, settled, first):
    """The first training ends after ten passes whose losses hardly differ. What is deployed is w_i after training."""
    run = fit_points(centres(FIVE), pf.FedALA(0.4, eta=0.7, passes=passes, settled=settled), 4, 4)
    w, A = ala_by_hand(FIVE, 0.4, 0.7, 4, first)
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(private(run)["A"], A, atol=1e-12)
    assert ((A > 0) & (A < 1)).any()


def test_a_pass_ends_with_its_share_and_is_judged_by_the_last_step_that_trained():
    """One sample twice a client, so that half a pass is one step; losses tell A after k steps from A after k + 1."""
    point, lr, eta = np.array([[1.0], [-1.0]]), 0.4, 0.3
    own = lr * point  # after the first round, from zero
    apart, A, losses = own.mean(0) - own, np.ones_like(point), []
    for _ in range(12):
        s = own + apart * A
        losses.append((0.5 * (s - point) ** 2)[:, 0])
        A = np.clip(A - eta * (s - point) * apart, 0, 1)
    early, late = (np.std(losses[k : k + 10], axis=0) for k in (1, 2))
    settled = (early + late).mean() / 2
    assert (late < settled).all()
    assert (early > settled).all()
    data = [(np.full((2, 1), np.sqrt(0.5)), np.full((2, 1), np.sqrt(0.5) * c)) for (c,) in point]
    method = pf.FedALA(lr, eta=eta, share=0.5, settled=settled)
    run = fit_points(pf.Federation.from_arrays(data, test=data), method, 2, 1, batch_size=1)
    w, A = ala_by_hand(point, lr, eta, 2, 12)
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(private(run)["A"], A, atol=1e-12)


def test_a_contact_at_the_clients_own_model_does_not_spend_the_first_training():
    """Alone in the first rounds a client meets its own model; with the second client's it trains A eleven times."""
    points = np.array([[1.0], [-1.0]])
    method = pf.FedALA(0.4, eta=0.3, passes=50, settled=1e9)
    run = fit_points(centres(points), method, 4, 1, schedule=Given(((0,), (0,), (0, 1), (0, 1))))
    x, w, A, contacts = np.zeros(1), np.zeros((2, 1)), np.ones((2, 1)), [0, 0]
    for cohort in ([0], [0], [0, 1], [0, 1]):
        for i in cohort:
            away = x - w[i]
            passes = 0 if contacts[i] == 0 or not away.any() else 11 if contacts[i] == 1 else 1
            for _ in range(passes):
                A[i] = np.clip(A[i] - 0.3 * (w[i] + away * A[i] - points[i]) * away, 0, 1)
            contacts[i] += contacts[i] == 0 or bool(passes)
            start = w[i] + away * A[i]
            w[i] = start - 0.4 * (start - points[i])
        x = w[cohort].mean(0)
    assert contacts == [2, 2]
    assert np.allclose(run.personal, w, atol=1e-12)
    assert np.allclose(private(run)["A"], A, atol=1e-12)


def network(server, v, layers):
    h = v
    for k in range(layers + 1):
        H = server[f"h{k}"]
        h = h @ H[:, :-1].T + H[:, -1]
        h = torch.relu(h) if k < layers else h
    return h


@certifies(pf.PFedHN, by="autograd through the hypernetwork")
@pytest.mark.parametrize("layers", [0, 2])
def test_a_step_is_the_vector_jacobian_product_of_the_moves(layers):
    """Summed over the cohort; vectors of clients that did not take part stay."""
    problem = LeastSquares(seed=2, clients=5, dim=4)
    method = pf.PFedHN(0.05, server_lr=0.3, hidden=6, layers=layers, embedding=3)
    before, after = (problem.fit(method, rounds=r, fraction=0.6) for r in (0, 1))
    state = {k: torch.as_tensor(t).clone().requires_grad_() for k, t in before.server.items() if k != "known"}
    ids = torch.as_tensor(np.sort(after.ledger["client"].unique()))
    theta = network(state, state["v"][ids], layers)
    D = torch.zeros_like(theta)
    for row, i in enumerate(ids.tolist()):
        w = theta[row].detach().numpy().copy()
        for _ in range(5):
            w -= 0.05 * problem.gradient(i, w)
        D[row] = theta[row].detach() - torch.as_tensor(w)
    grads = torch.autograd.grad((theta * D).sum(), [*state.values()])
    for (name, old), g in zip(state.items(), grads, strict=True):
        assert torch.allclose(torch.as_tensor(after.server[name]), old.detach() - 0.3 * g, atol=1e-12), name
    absent = [i for i in range(5) if i not in ids]
    assert torch.equal(torch.as_tensor(after.server["v"])[absent], state["v"].detach()[absent])
    assert torch.allclose(after.personal, network(after.server, torch.as_tensor(after.server["v"]), layers))


def test_a_client_is_drawn_by_its_name():
    """In another order of the clients each has the model that it had."""
    problem, order = LeastSquares(seed=2, clients=5, dim=4), [3, 1, 4, 0, 2]
    how = {"rounds": 2, "local_steps": 2, "batch_size": None, "loss": "mse"}
    a, b = (
        pf.fit(problem.model(), fed, pf.PFedHN(0.05, layers=1), **how).personal
        for fed in (problem.federation, problem.federation.reorder(order))
    )
    assert torch.allclose(a[order], b, atol=1e-12)
    assert (a[0] - a[1]).abs().max() > 1e-3


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_before_training_every_model_is_the_common_start_and_a_little_of_its_own(layers):
    """The start may be far from zero, as where a layer normalises: what a client adds is no larger for it."""
    problem = LeastSquares(seed=2, clients=6, dim=4)
    method = pf.PFedHN(0.05, hidden=30, layers=layers, embedding=5)
    own = []
    for start in (0.0, 100.0):
        model = problem.model()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(start)
        run = pf.fit(model, problem.federation, method, rounds=0, batch_size=None, loss="mse")
        own.append(run.personal - start)
        assert own[-1].abs().max() < 4
        assert torch.equal(torch.as_tensor(run.server[f"h{layers}"])[:, -1], torch.full_like(own[-1][0], start))
        assert own[-1].std(0).min() > 1e-3, "no two clients have one model"
    assert torch.allclose(*own, atol=1e-12)


@certifies(pf.PFedHN, by="the clients' own optima")
def test_every_client_reaches_its_own_optimum():
    points = np.random.default_rng(0).normal(size=(4, 3))
    run = fit_points(centres(points), pf.PFedHN(0.5, server_lr=0.05, hidden=20, layers=1, embedding=6), 300, 3)
    assert np.allclose(run.personal, points, atol=1e-6)
