"""Federations from formulas: least-squares problems whose optimum is known.

Quadratics are linear regressions without intercept: `Linear(dim, 1, bias=False)` and the mean squared error are f_i.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from polyfed.base.arguments import checked
from polyfed.base.errors import DataError
from polyfed.base.values import COUNT, NOT_NEGATIVE, Limits
from polyfed.data import prepare
from polyfed.data.federation import Federation


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


def _quadratics(name: str, seed: int | None, curvatures: np.ndarray, centres: np.ndarray) -> Federation:
    h, c = np.asarray(curvatures, dtype=np.float64), np.asarray(centres, dtype=np.float64)
    if h.ndim != 2 or h.shape != c.shape or not (h >= 0).all():
        raise DataError(f"quadratics: curvatures {list(h.shape)} of 0 or more and centres {list(c.shape)} must agree")
    root = np.sqrt(h.shape[1] * h / 2)
    train = [(np.diag(r), r * ci) for r, ci in zip(root, c, strict=True)]
    return _regression(name, seed, train, None, {"curvatures": h, "centres": c})


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
