"""Federations from formulas: FPFC's synthetic scenarios, and least-squares problems whose optimum is known.

Quadratics are linear regressions without intercept: `Linear(dim, 1, bias=False)` and the mean squared error are f_i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from polyfed.base.arguments import checked
from polyfed.base.errors import DataError
from polyfed.base.values import COUNT, NOT_NEGATIVE, Limits
from polyfed.data import prepare
from polyfed.data.federation import Federation

# Clients per ground-truth cluster: the paper's sizes, and smaller ones for tests and quick runs.
FPFC_SCENARIOS = {
    "s1": {"full": (25, 25, 25, 25), "small": (5, 5, 5, 5)},
    "s2": {"full": (10, 40, 10, 40), "small": (2, 8, 2, 8)},
    "s3": {"full": (50, 50), "small": (8, 8)},
    "s4": {"full": (50,), "small": (12,)},
    "s5": {"full": (1,) * 50, "small": (1,) * 12},
}


@dataclass(frozen=True, eq=False)
class FPFCData:
    """Samples of one FPFC scenario, clients end to end: m clients, L clusters."""

    x: np.ndarray  # [N, 60] float64
    y: np.ndarray  # [N] int64, 0..9
    groups: np.ndarray  # [N] client of each sample
    sizes: np.ndarray  # [m]
    clusters: np.ndarray  # [m]
    weights: np.ndarray  # [L, 10, 60], of the true models
    biases: np.ndarray  # [L, 10]


@checked
def fpfc(scenario: str = "s1", seed: int = 0, features: str = "uniform", scale: str = "full") -> FPFCData:
    """The synthetic classification data of FPFC (arXiv 2211.04218, section 5), draw for draw as its released code.

    Legacy `RandomState(seed)`, in this order: sizes (floor(LogNormal(4, 2)) + 50) * 5; one mean per cluster; per
    cluster W [10, 60], then b [10], normal around that mean; per client the features, then noise N(0, 0.5^2) on the
    logits; y is the largest logit. W, b and the noise are rounded to float32, as there.

    Parameters
    ----------
    scenario : str
        "s1" 4 clusters of 25 clients; "s2" 10, 40, 10, 40; "s3" two of 50; "s4" one of 50; "s5" 50 of one.
    seed : int
        Below 2^32.
    features : str
        "uniform" in [0, 1), which the released code and the paper's tables use; "normal", the paper's text.
    scale : str
        "full"; "small" has fewer clients (20, 20, 16, 12, 12) of at most 1500 samples.

    Returns
    -------
    FPFCData
        The samples, the clusters and the true models.
    """
    for value, allowed, what in (
        (scenario, tuple(FPFC_SCENARIOS), "scenario"),
        (features, ("uniform", "normal"), "features"),
        (scale, ("full", "small"), "scale"),
    ):
        if value not in allowed:
            raise DataError(f"FPFC data: {what} is {value!r}; known: {', '.join(allowed)}")
    prepare.keyed(seed, 0)
    if seed >= 2**32:
        raise DataError(f"FPFC data: seed: found {seed}, expected less than 2**32")
    blocks = FPFC_SCENARIOS[scenario][scale]
    m, L, C, d = sum(blocks), len(blocks), 10, 60
    clusters = np.repeat(np.arange(L), blocks)
    rng = np.random.RandomState(seed)
    sizes = (np.floor(rng.lognormal(4, 2, m)).astype(np.int64) + 50) * 5
    if scale == "small":
        sizes = np.minimum(sizes, 1500)
    means = rng.normal(0, 1, L)  # shifts all classes alike, so it cancels; drawn for the sake of the later draws
    W, b = np.empty((L, C, d), np.float32), np.empty((L, C), np.float32)
    for k in range(L):
        W[k] = rng.normal(means[k], 1, (C, d))
        b[k] = rng.normal(means[k], 1, C)
    xs, ys = [], []
    for i in range(m):
        k, size = clusters[i], sizes[i]
        x = rng.random_sample((size, d)) if features == "uniform" else rng.standard_normal((size, d))
        noise = rng.normal(0, 0.5, (size, C)).astype(np.float32)
        ys.append((x @ W[k].T.astype(np.float64) + b[k] + noise).argmax(1))
        xs.append(x)
    groups = np.repeat(np.arange(m), sizes)
    return FPFCData(np.concatenate(xs), np.concatenate(ys), groups, sizes, clusters, W, b)


def synthetic(
    alpha: float, beta: float, clients: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """FedProx's Synthetic(alpha, beta), arXiv 1812.06127, section 5.1: (x [N, 60], y, client of each sample, W, b).

    W_i, b_i ~ N(u_i, 1), u_i ~ N(0, alpha); x ~ N(v_i, diag(j^-1.2)), v_i ~ N(B_i, 1), B_i ~ N(0, beta); y = argmax(W_i
    x + b_i). alpha and beta are deviations, as in the released code, and sizes are floor(LogNormal(4, 2)) + 50.
    """
    rng, C, d = prepare.keyed(seed, 24), 10, 60
    sizes = np.floor(rng.lognormal(4, 2, clients)).astype(np.int64) + 50
    u, B = alpha * rng.standard_normal(clients), beta * rng.standard_normal(clients)
    W = u[:, None, None] + rng.standard_normal((clients, C, d))
    b = u[:, None] + rng.standard_normal((clients, C))
    v = B[:, None] + rng.standard_normal((clients, d))
    groups, spread = np.repeat(np.arange(clients), sizes), np.arange(1, d + 1) ** -0.6
    x = v[groups] + spread * rng.standard_normal((len(groups), d))
    y = np.concatenate([(x[groups == i] @ W[i].T + b[i]).argmax(1) for i in range(clients)])
    return x, y, groups, W, b


def fcube(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """FCUBE of NIID-Bench (ICDE 2022): points x [N, 3] of [-1, 1]^3, y = (x_1 > 0), and the client of each.

    Four clients have as many points each, in two opposite octants: inputs differ, the true model does not.
    """
    rng = prepare.keyed(seed, 25)
    groups = np.arange(samples) % 4
    sign = np.where(rng.random(samples) < 0.5, -1, 1)
    octant = np.stack([np.ones(samples), np.where(groups // 2, -1, 1), np.where(groups % 2, -1, 1)], 1)
    x = sign[:, None] * octant * rng.random((samples, 3))
    return x, (x[:, 0] > 0).astype(np.int64), groups


def mixtures(
    shares: str, clients: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """FedSoft's protocol (AAAI 2022): clients with 100 to 200 samples of two sources in known shares.

    Sources label x ~ N(0, I) by argmax(A x) and argmax(B x). "10:90" gives half of the clients 10 % of the first, the
    others 90 %; "linear" gives client i the share (i + 1/2) / n. Returns x [N, 20], y [N], client and source of each
    sample, the shares [n, 2] and the models [2, 5, 20].
    """
    rng, C, d = prepare.keyed(seed, 26), 5, 20
    models, sizes = rng.standard_normal((2, C, d)), rng.integers(100, 201, clients)
    if shares == "linear":
        first = (np.arange(clients) + 0.5) / clients
    else:
        low, high = (int(word) / 100 for word in shares.split(":"))
        first = np.where(np.arange(clients) < (clients + 1) // 2, low, high)
    source = np.concatenate(
        [(np.arange(n) >= round(p * n)).astype(np.int64) for p, n in zip(first, sizes, strict=True)]
    )
    groups = np.repeat(np.arange(clients), sizes)
    x = rng.standard_normal((len(groups), d))
    y = np.einsum("ncd,nd->nc", models[source], x).argmax(1)
    counted = np.stack([np.bincount(source[groups == i], minlength=2) for i in range(clients)])
    return x, y, groups, source, counted / sizes[:, None], models


@checked
def least_squares(
    clients: COUNT = 10,
    samples: int | Sequence[int] = 50,
    dim: COUNT = 10,
    heterogeneity: NOT_NEGATIVE = 1.0,
    seed: int = 0,
    *,
    noise: NOT_NEGATIVE = 0.1,
    curvature: Annotated[float, Limits(ge=0, le=50)] = 0.0,
    test_fraction: float = 0.0,
) -> Federation:
    """Heterogeneous linear regression, f_i(w) = mean_j (x_ij . w - y_ij)^2, float64, without intercept.

    w_i = w_0 + heterogeneity * N(0, I), w_0 ~ N(0, I); x_ij ~ N(0, I), its columns times exp(curvature * N(0, I)) per
    client; y_ij = x_ij . w_i + noise * N(0, 1).

    Parameters
    ----------
    clients : int
        Number n of clients.
    samples : int or sequence of int
        Training samples, one number or one per client.
    dim : int
        Width of an input.
    heterogeneity : float
        Deviation of the true models, at least 0.
    seed : int
        Seed of the draws.
    noise : float
        Deviation of the targets, at least 0.
    curvature : float
        Stretch of the clients' inputs, at least 0.
    test_fraction : float
        Extra test samples per client, as a share of its training samples.

    Returns
    -------
    Federation
        meta: optimum [dim], the minimiser of (1/n) sum_i f_i; local_optima [n, dim], of each f_i (least norm); weights
        [n, dim], the w_i.
    """
    sizes = _sizes(samples, clients)
    prepare.check_fraction(test_fraction, "the test fraction")
    rng = prepare.keyed(seed, 21)
    w = rng.standard_normal(dim) + heterogeneity * rng.standard_normal((clients, dim))
    stretch = np.exp(curvature * rng.standard_normal((clients, dim)))

    def draw(i: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.standard_normal((count, dim)) * stretch[i]
        return x, x @ w[i] + noise * rng.standard_normal(count)

    train = [draw(i, size) for i, size in enumerate(sizes)]
    test = [draw(i, round(size * test_fraction)) for i, size in enumerate(sizes)]
    meta = {"local_optima": np.stack([np.linalg.lstsq(x, y)[0] for x, y in train]), "weights": w}
    return _regression("least-squares", seed, train, test, meta)


@checked
def diagonal_quadratics(curvatures: np.ndarray, centres: np.ndarray) -> Federation:
    """f_i(w) = 1/2 sum_k h_ik (w_k - c_ik)^2 as linear regression: one sample per coordinate, float64.

    Sample k of client i has input sqrt(d h_ik / 2) e_k and target sqrt(d h_ik / 2) c_ik: f_i is the mean squared error.

    Parameters
    ----------
    curvatures : array
        [n, d] h, of 0 or more: the eigenvalues of client i's Hessian.
    centres : array
        [n, d] c: client i's minimiser.

    Returns
    -------
    Federation
        meta: optimum [d], curvatures, centres.
    """
    return _quadratics("quadratics", None, curvatures, centres)


def _quadratics(name: str, seed: int | None, curvatures: np.ndarray, centres: np.ndarray, **extra: Any) -> Federation:
    h, c = np.asarray(curvatures, dtype=np.float64), np.asarray(centres, dtype=np.float64)
    if h.ndim != 2 or h.shape != c.shape or not (h >= 0).all():
        raise DataError(f"quadratics: curvatures {list(h.shape)} of 0 or more and centres {list(c.shape)} must agree")
    root = np.sqrt(h.shape[1] * h / 2)
    train = [(np.diag(r), r * ci) for r, ci in zip(root, c, strict=True)]
    return _regression(name, seed, train, None, {"curvatures": h, "centres": c, **extra})


@checked
def heterogeneous_quadratics(
    clients: COUNT = 10, dim: COUNT = 60, mu: float = 1.0, L: float = 4.0, spread: NOT_NEGATIVE = 10.0, seed: int = 0
) -> Federation:
    """Diagonal quadratics whose curvatures differ between clients: h_ik uniform in [mu, L], c_ik in [-spread, spread].

    Every client has coordinates of curvature exactly mu and exactly L (dim >= 2), so f_i is L-smooth and mu-strongly
    convex and no better.

    Parameters
    ----------
    clients, dim : int
        Numbers of clients and of coordinates.
    mu, L : float
        Least and largest curvature, 0 < mu <= L.
    spread : float
        Bound of the minimisers.
    seed : int
        Seed of the draws.

    Returns
    -------
    Federation
        meta as of `diagonal_quadratics`.
    """
    if not 0 < mu <= L:
        raise DataError(f"quadratics: found mu = {mu:g} and L = {L:g}, expected 0 < mu <= L")
    rng = prepare.keyed(seed, 22)
    h = rng.uniform(mu, L, (clients, dim))
    if dim >= 2:
        for row in h:
            low, high = rng.permutation(dim)[:2]
            row[low], row[high] = mu, L
    return _quadratics("heterogeneous-quadratics", seed, h, rng.uniform(-abs(spread), abs(spread), (clients, dim)))


@checked
def fedcet_quadratics(clients: COUNT = 10, measurements: COUNT = 10, dim: COUNT = 60, seed: int = 0) -> Federation:
    """The estimation problem of FedCET's Fig. 1: f_i(x) = (1/n_i) sum_j ||x - b_ij||^2 + ||x||^2, up to a constant.

    b_ij uniform in [-10, 10]^dim; M_i = I, r_i = 1. The gradient is 4 x - 2 mean_j b_ij, so mu = L = 4 and the optimum
    is mean_i mean_j b_ij / 2. The federation holds 2 ||x - mean_j b_ij / 2||^2, of the same gradient, as
    `diagonal_quadratics`.

    Parameters
    ----------
    clients, measurements : int
        Number n of clients, and n_i of measurements of each.
    dim : int
        Width of a measurement.
    seed : int
        Seed of the draws.

    Returns
    -------
    Federation
        meta as of `diagonal_quadratics`, with measurements [n, n_i, dim], the b_ij, and constant [n], the rest of f_i.
    """
    b = prepare.keyed(seed, 23).uniform(-10, 10, (clients, measurements, dim))
    centre = b.mean(1) / 2
    constant = (b**2).sum(2).mean(1) - 2 * (centre**2).sum(1)
    h = np.full((clients, dim), 4.0)
    return _quadratics("fedcet-quadratics", seed, h, centre, measurements=b, constant=constant)


def _regression(name, seed, train, test, meta) -> Federation:
    """A float64 regression federation with the minimiser of the clients' mean of mean squared errors."""
    A = np.concatenate([x / np.sqrt(len(y)) for x, y in train])
    t = np.concatenate([y / np.sqrt(len(y)) for _, y in train])
    optimum = np.linalg.lstsq(A, t)[0]
    meta = {"dataset": name, "partition": "natural", "seed": seed, "notes": [], "optimum": optimum, **meta}
    return Federation.from_arrays(train, test, meta=meta, test_fraction=0.0)


def _sizes(samples: int | Sequence[int], clients: int) -> list[int]:
    sizes = [samples] * clients if isinstance(samples, int | np.integer) else [int(s) for s in samples]
    if len(sizes) != clients or min(sizes, default=0) < 1:
        raise DataError(f"samples: found {samples!r}, expected an integer of at least 1, or {clients} of them")
    return [int(s) for s in sizes]


__all__ = [
    "FPFC_SCENARIOS",
    "FPFCData",
    "diagonal_quadratics",
    "fedcet_quadratics",
    "fpfc",
    "heterogeneous_quadratics",
    "least_squares",
]
