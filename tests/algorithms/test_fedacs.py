"""FedACS: the published three-client case digit for digit, groups found exactly, and the degenerate cases."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import centres, fit_points
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.algorithms._shared.similarity import mixed, similarity
from polyfed.algorithms.fedacs import AFFORDED, REPORTED, alike, mixing, refresh, weights
from polyfed.algorithms.fedamp import messages
from polyfed.core.algorithm import Round

THREE = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=torch.float64)
EYE = torch.eye(3, dtype=torch.float64)


@certifies(pf.FedACS, by="(4) digit for digit")
@pytest.mark.parametrize(
    ("quantile", "rows"),
    [
        (0.25, [[5 / 9, 4 / 9, 0], [4 / 9, 5 / 9, 0], [0, 0, 1]]),
        (0.0, [[5 / 9, 4 / 9, 0], [1 / 3, 5 / 12, 1 / 4], [0, 0.375, 0.625]]),
        (0.5, EYE.tolist()),
        (0.75, EYE.tolist()),  # (4) as printed is 0/0 here: self is always kept
        (1.0, EYE.tolist()),
    ],
)
def test_mixtures_of_three_clients(quantile, rows):
    assert torch.allclose(mixing(THREE, quantile), torch.tensor(rows, dtype=torch.float64), atol=1e-15)


def test_without_a_threshold_all_clients_enter_but_not_with_fedamps_weights():
    """2.3 calls U FedAMP's at infinite delta, a misprint of minus infinity: all enter, but by their cosines."""
    rows, amp = mixing(THREE, None), messages(THREE, 0.5, 1.0)
    assert torch.allclose(rows[0], torch.tensor([5 / 9, 4 / 9, 0], dtype=torch.float64), atol=1e-15)
    assert torch.allclose(rows[1], torch.tensor([0.8, 1, 0.6], dtype=torch.float64) / 2.4, atol=1e-15)
    assert (amp > 0).all()
    assert (rows - amp).abs().max() > 0.05


def test_negative_similarities_never_leave_the_hull():
    """(4) as printed would give u_1 = (3.4, -1.2) for these models."""
    W = torch.tensor([[1, 0], [-0.6, 0.8], [0, -1]], dtype=torch.float64)
    assert torch.equal(mixing(W, 0.0), EYE)


def test_a_zero_model_is_similar_to_nobody():
    A = mixing(torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 0.5]]), None)
    assert A[0].tolist() == [1, 0, 0]
    assert A[1, 0] == 0


@certifies(pf.FedACS, by="groups and limit in closed form")
@pytest.mark.parametrize("quantile", [0.495, 0.5, 0.505])
def test_two_groups_of_five(quantile):
    """F_i = 1/2 ||w - c_i||^2, one step of 1/2: block-diagonal mixture, limit 1/2 (group mean of c + c_i)."""
    rng = np.random.default_rng(0)
    c = np.concatenate([[5.0, 0, 0], [0, 5.0, 0]]).reshape(2, 1, 3) + 0.1 * rng.normal(size=(2, 5, 3))
    run = fit_points(centres(c.reshape(10, 3)), pf.FedACS(0.5, quantile=quantile), rounds=60, dim=3)
    A = np.asarray(run.findings["mixing"])
    assert (A[:5, 5:] == 0).all()
    assert (A[:5, :5] > 0).all()
    # weights inside a group are cosines, all within 1e-3 of one here, so the mean is nearly the plain one
    limit = (c.mean(1, keepdims=True) + c) / 2
    assert np.allclose(run.personal.reshape(2, 5, 3), limit, atol=1e-3)


def exchange(ids, n, t=0):
    ids = torch.as_tensor(ids)
    return Round(t, n, 0, ids, torch.ones(len(ids)), torch.full_like(ids, t))


def test_a_lone_participant_meets_the_cached_models_of_those_seen():
    """Clients 0 to 2 of four have taken part and are absent but one: rows of (4) over three models, digit for digit."""
    method = pf.FedACS(quantile=0.25, pool="all")
    start = method.init_server(None, torch.tensor([1.0, 0.3], dtype=torch.float64), 4).whole()
    known = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    server = method.aggregate(start, {"w": THREE}, exchange([0, 1, 2], 4)) | {"known": known}
    u = method.downlink(server, exchange([0], 4)).each["u"]
    assert torch.allclose(u, torch.tensor([[8.2 / 9, 2.4 / 9]], dtype=torch.float64), atol=1e-15)
    assert torch.equal(server["w"][:3], THREE)  # their cached copies stay
    alone = pf.FedACS(quantile=0.25, pool="participants").downlink(server, exchange([0], 4)).each["u"]
    assert torch.equal(alone, THREE[:1])


@certifies(pf.FedACS, by="smooth attention in numpy, and FedAMP's weights but for one's own")
@pytest.mark.parametrize("quantile", [None, 0.5])
def test_smooth_attention_is_the_slope_of_the_smooth_penalty(quantile):
    """R = 1 - exp(-x^2 / sigma): weights exp(-||w_i - w_j||^2 / sigma), those above the threshold."""
    W, sigma = np.random.default_rng(0).normal(size=(7, 4)), 3.0
    S = np.exp(-((W[:, None] - W) ** 2).sum(2) / sigma)
    kept = S if quantile is None else np.where((S > np.quantile(S, quantile)) | (np.eye(7) > 0), S, 0)
    found = mixing(torch.as_tensor(W), quantile, sigma)
    assert np.abs(found.numpy() - kept / kept.sum(1, keepdims=True)).max() < 1e-14
    if quantile is None:  # FedAMP's, but for the weight of one's own
        others = torch.as_tensor(S).fill_diagonal_(0)
        amp = messages(torch.as_tensor(W), 0.1, sigma).fill_diagonal_(0)
        assert (others / others.sum(1, keepdim=True) - amp / amp.sum(1, keepdim=True)).abs().max() < 1e-14


def test_the_threshold_moves_from_the_first_one_in_equal_steps():
    method = pf.FedACS(quantile=0.5, first=0.0, first_rounds=2, pool="participants")
    for t, quantile in enumerate([0.0, 0.25, 0.5, 0.5]):
        u = method.downlink({"w": THREE}, exchange([0, 1, 2], 3, t)).each["u"]
        assert torch.equal(u, mixed(mixing(THREE, quantile), THREE))
    with pytest.raises(pf.errors.ConfigError, match=r"algorithm\.first"):
        pf.FedACS(quantile=None, first=0.5)


@pytest.mark.parametrize("sigma", [None, 2.0])
def test_each_client_may_have_a_start_of_its_own(sigma):
    """Drawn under the seed; alike as they are, from the first round on, and at the end."""
    c = np.random.default_rng(2).normal(size=(6, 5)) + 1
    method = pf.FedACS(0.5, quantile=None, sigma=sigma, start_seed=1)
    starts = fit_points(centres(c), method, rounds=0, dim=5).server
    assert len({*map(tuple, starts["w"].tolist())}) == 6
    run = fit_points(centres(c), method, rounds=1, dim=5, fraction=0.5)
    S = alike(starts["w"], sigma)
    ids = run.ledger["client"].astype(int).tolist()
    u = weights(S[ids][:, ids], None) @ starts["w"][ids]
    assert (run.server["w"][ids] - (u + 0.5 * (torch.as_tensor(c[ids]) - u))).abs().max() < 1e-12
    assert (run.server["similarity"] - alike(run.server["w"], sigma))[ids].abs().max() < 1e-12


@certifies(pf.FedACS, by="identity over partial rounds")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_refreshed_similarities_are_fresh_ones(dtype, tolerance):
    """200 rounds in which three of 30 models change, each time only their rows are computed."""
    rng = torch.Generator().manual_seed(0)
    W = torch.randn(30, 50, generator=rng, dtype=dtype)
    W[4] = 0
    S = similarity(W)
    for t in range(200):
        ids = torch.randperm(30, generator=rng)[:3].sort()[0]
        W = W.index_copy(0, ids, W[ids] + torch.randn(3, 50, generator=rng, dtype=dtype) * 10.0 ** -(t % 8))
        S = refresh(S, W, ids)
        assert torch.equal(S, S.T)
    assert (S.diagonal() == 1).all()
    assert (S - similarity(W)).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_models_near_their_common_start_are_told_apart(dtype):
    """At 1e-4 of the start all cosines are 1 in float32. Ours are exact, by 1 - |x_i - x_j|^2 / 2 of unit vectors."""
    rng = np.random.default_rng(0)
    start, apart = rng.normal(size=(2, 2000))
    W = start + 1e-4 * np.repeat([[1.0], [-1.0]], 5, axis=0) * apart + 1e-5 * rng.normal(size=(10, 2000))
    W = torch.as_tensor(W, dtype=dtype)
    x = W.double() / W.double().norm(dim=1, keepdim=True)
    exact = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") ** 2 / 2
    S = refresh(torch.ones(10, 10, dtype=torch.float64), W, torch.arange(10))
    assert (1 - S - exact).abs().max() <= 1e-14
    assert exact.max() < torch.finfo(torch.float32).eps / 2
    groups = mixing(W, 0.5) > 0
    assert groups[:5, :5].all()
    assert groups[5:, 5:].all()
    assert not groups[:5, 5:].any()


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_a_run_keeps_the_similarities_of_its_models(fraction):
    c = np.random.default_rng(2).normal(size=(12, 5)) + 1
    run = fit_points(centres(c), pf.FedACS(0.5, pool="all"), rounds=30, dim=5, fraction=fraction)
    assert (run.server["similarity"] - similarity(run.server["w"])).abs().max() <= 1e-12


@pytest.mark.parametrize("pool", ["all", "participants"])
def test_the_groups_of_many_clients_are_reported_without_the_matrix(pool):
    """Two bundles of models at a right angle; clients that were never seen are groups of their own."""
    n, method = REPORTED + 1, pf.FedACS(quantile=0.6, pool=pool)
    W = torch.zeros(n - 1, 3, dtype=torch.float64)
    W[:200, 0] = W[200:, 1] = 1
    W[:, 2] = torch.linspace(0, 0.1, n - 1)
    server = method.init_server(None, torch.ones(3, dtype=torch.float64), n).whole()
    known = torch.arange(n) < n - 1
    server = method.aggregate(server, {"w": W}, exchange(range(n - 1), n)) | {"known": known}
    found = method.describe(server)
    assert not found.findings
    assert adjusted_rand_score([0] * 200 + [1] * (n - 201) + [2], found.clusters) == 1


def test_groups_that_cost_too_much_are_not_reported():
    """More than 300 clients and 2e10 products: with pool="all" alone, where the similarities are at hand."""
    n, method = REPORTED + 1, pf.FedACS(pool="participants")
    server = {"w": torch.ones(1, 1).expand(n, int(AFFORDED) // n**2 + 1), "known": torch.ones(n)}
    assert method.describe(server).clusters is None
    at_hand = server | {"similarity": torch.eye(n, dtype=torch.float64)}
    assert len(set(pf.FedACS(pool="all").describe(at_hand).clusters.tolist())) == n


@pytest.mark.parametrize("method", [pf.FedACS(), pf.FedAMP(), pf.HeurFedAMP()])
def test_a_message_stays_as_it_was_sent(method):
    """The server changes the participants' rows in place; what it has sent before is not among them."""
    w, ids = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 2])
    round = Round(0, 4, 0, ids, torch.ones(2), torch.zeros(2, dtype=torch.int64))
    server = {"w": w.clone(), "known": torch.ones(4), "similarity": similarity(w)}
    down = method.downlink(server, round)
    sent, up = down.each["u"].clone(), torch.randn(2, 6, dtype=torch.float64)
    after = method.aggregate(server, {"w": up}, round)
    assert torch.equal(down.each["u"], sent)
    assert after["w"].data_ptr() == server["w"].data_ptr()
    assert torch.equal(after["w"], w.index_copy(0, ids, up))
