"""PACFL: angles against scipy, invariances of subspaces, planted subspaces, and FedAvg inside every cluster."""

import numpy as np
import pytest
import torch
from certify import certifies
from scipy.linalg import subspace_angles
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.algorithms.pacfl import orthonormal, principal_angles, signature


def subspace(rng, d, r):
    return torch.from_numpy(np.linalg.qr(rng.normal(size=(d, r)))[0])


@certifies(pf.PACFL, by="scipy.linalg.subspace_angles")
@pytest.mark.parametrize(("r", "q"), [(1, 1), (3, 3), (2, 5), (6, 4)])
@pytest.mark.parametrize("nearness", [0.0, 0.9, 1 - 1e-3])
def test_angles_are_scipys(r, q, nearness):
    rng = np.random.default_rng(r + q)
    A, B = rng.normal(size=(9, r)), rng.normal(size=(9, q))
    m = min(r, q)
    B[:, :m] = nearness * A[:, :m] + (1 - nearness) * B[:, :m]
    found = principal_angles(orthonormal(torch.from_numpy(A)), orthonormal(torch.from_numpy(B)))
    assert np.allclose(found, np.rad2deg(np.sort(subspace_angles(A, B))), atol=1e-5)


def test_the_angle_to_itself_is_zero_and_never_nan():
    Q = orthonormal(torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3))))
    assert torch.allclose(principal_angles(Q, Q * -1), torch.zeros(3, dtype=torch.float64), atol=1e-5)


def test_zero_columns_do_not_count():
    rng = np.random.default_rng(1)
    A, B = rng.normal(size=(9, 2)), rng.normal(size=(9, 4))
    padded = torch.from_numpy(np.concatenate([A, np.zeros((9, 3))], 1))
    found = principal_angles(orthonormal(padded), orthonormal(torch.from_numpy(B)))
    assert np.allclose(found[:2], np.rad2deg(np.sort(subspace_angles(A, B))), atol=1e-6)
    assert found[2:].isnan().all()


def flipped(U, rng):
    return U * torch.from_numpy(rng.choice([-1.0, 1.0], U.shape[-1]))


@certifies(pf.PACFL, by="an invariance")
@pytest.mark.parametrize(("angle", "invariant"), [("smallest", True), ("sum", True), ("entries", False)])
def test_signs_of_singular_vectors_do_not_matter(angle, invariant):
    """A singular vector's sign is arbitrary. What was released depends on it."""
    rng = np.random.default_rng(2)
    U = torch.stack([subspace(rng, 10, 3) for _ in range(4)])
    everyone = torch.arange(4)

    def angles(U):
        seen = torch.ones(4, dtype=torch.bool)
        return pf.PACFL(angle=angle)._angles(torch.zeros(4, 4, dtype=torch.float64), U, everyone, seen)

    other = torch.stack([flipped(u, rng) for u in U])
    assert torch.allclose(angles(U), angles(other), atol=1e-5) == invariant


def test_a_signature_spans_the_samples_of_every_class():
    """Fewer samples than vectors: their span exactly; more: the best approximation (Eckart-Young)."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(12, 7))
    y = np.array([0] * 2 + [2] * 10)
    U = signature(torch.from_numpy(x), torch.from_numpy(y), classes=3, basis=3).view(7, 3, 3).numpy()
    assert np.allclose(U[:, 0] @ U[:, 0].T @ x[:2].T, x[:2].T)
    assert (U[:, 0, 2] == 0).all()
    assert (U[:, 1] == 0).all()
    left, size, _ = np.linalg.svd(x[2:].T)
    residual = x[2:].T - U[:, 2] @ U[:, 2].T @ x[2:].T
    assert np.linalg.norm(residual) == pytest.approx(np.linalg.norm(size[3:]))
    assert np.allclose(np.abs(U[:, 2].T @ left[:, :3]), np.eye(3), atol=1e-10)


def planted(seed=0, n=12, groups=3, d=20, noise=0.01):
    """Clients whose samples lie near one of three planes per group, two classes, unequal sizes, in no order."""
    rng = np.random.default_rng(seed)
    planes = [np.linalg.qr(rng.normal(size=(d, 2)))[0] for _ in range(groups)]
    group = rng.permutation(np.arange(n) % groups)
    train = []
    for g in group:
        m = int(rng.integers(8, 30))
        z = rng.normal(size=(m, 2))
        train.append((z @ planes[g].T + noise * rng.normal(size=(m, d)), (z[:, 0] > 0).astype(int)))
    return pf.Federation.from_arrays(train, test=train, clusters=group)


def fit(fed, method, **settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(fed.input_shape[0], fed.classes, dtype=torch.float64)
    return pf.fit(model, fed, method, **{"rounds": 4, "batch_size": 8, "evaluate_every": 0} | settings)


@certifies(pf.PACFL, by="planted clusters")
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(
    ("angle", "threshold", "linkage"),
    [
        ("smallest", 20.0, "average"),
        ("smallest", 20.0, "weighted"),
        ("smallest", 20.0, "single"),
        ("sum", 80.0, "complete"),
    ],
)
def test_planted_subspaces_are_found(fraction, angle, threshold, linkage):
    """Also when clients come in one by one, each with its signature when it is first picked."""
    fed = planted()
    method = pf.PACFL(basis=2 if angle == "smallest" else 1, threshold=threshold, angle=angle, linkage=linkage)
    run = fit(fed, method, fraction=fraction, rounds=10)
    assert (run.clients["rounds"] > 0).all()
    assert adjusted_rand_score(fed.clusters, run.clusters) == 1


@pytest.mark.parametrize(
    ("linkage", "threshold", "clusters"),
    [
        ("average", 24.5, [0, 0, 0, 1]),  # (30 + 28 + 18) / 3 = 25.33
        ("average", 26.0, [0, 0, 0, 0]),
        ("weighted", 24.5, [0, 0, 0, 0]),  # ((30 + 28) / 2 + 18) / 2 = 23.5
        ("weighted", 23.0, [0, 0, 0, 1]),
    ],
)
def test_average_linkage_counts_every_pair_once(linkage, threshold, clusters):
    """Lines at 0, 2, 12 and 30 degrees: the last is at the mean of its three angles (UPGMA), not "weighted" (WPGMA)."""
    lines = np.deg2rad([0.0, 2.0, 12.0, 30.0])
    train = [(np.array([[np.cos(a), np.sin(a)]]), np.ones(1)) for a in lines]
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    method = pf.PACFL(basis=1, threshold=threshold, linkage=linkage)
    run = pf.fit(model, pf.Federation.from_arrays(train, test=train), method, rounds=1, loss="mse", evaluate_every=0)
    expected = np.rad2deg(np.abs(lines[:, None] - lines))
    assert np.allclose(run.server["angles"], expected, atol=1e-5)
    assert adjusted_rand_score(clusters, run.clusters) == 1


@certifies(pf.PACFL, by="identity with FedAvg")
def test_every_cluster_is_a_federation_of_its_own():
    """The models are those of FedAvg run on each group alone."""
    fed = planted()
    run = fit(fed, pf.PACFL(basis=2, threshold=20.0), batch_size=None)
    for g in range(3):
        ids = np.flatnonzero(fed.clusters == g)
        alone = fit(fed.reorder(ids), pf.FedAvg(), batch_size=None)
        assert torch.allclose(run.personal[ids], alone.personal, atol=1e-12)


def test_the_order_of_arrival_does_not_move_anyone():
    """Who is placed stays placed, and the clusters are those of full participation."""
    fed = planted(seed=5)
    before = np.full(12, -1)
    run = None
    for rounds in range(1, 9):
        run = fit(fed, pf.PACFL(basis=2, threshold=20.0), rounds=rounds, fraction=0.25)
        now = run.server["cluster"].numpy()
        met = (run.server["known"] > 0).numpy()
        known = before >= 0
        assert (now[known] == before[known]).all()
        before = np.where(met, now, -1)
    assert run is not None
    assert adjusted_rand_score(fed.clusters[before >= 0], before[before >= 0]) == 1
