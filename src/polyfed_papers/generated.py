"""Data from formulas of papers: FPFC's scenarios, FCUBE, FedSoft's mixtures, and FedCET's estimation problem."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from polyfed.base.arguments import checked
from polyfed.base.errors import DataError
from polyfed.base.values import COUNT, Limits
from polyfed.data import prepare
from polyfed.data.dataset import Dataset
from polyfed.data.datasets import SEED
from polyfed.data.federation import Federation
from polyfed.data.synthetic import diagonal_quadratics

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
def fpfc(
    scenario: str = "s1",
    seed: SEED = 0,
    features: Literal["uniform", "normal"] = "uniform",
    scale: Literal["full", "small"] = "full",
) -> FPFCData:
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
    features : {"uniform", "normal"}
        "uniform" in [0, 1), which the released code and the paper's tables use; "normal", the paper's text.
    scale : {"full", "small"}
        "full"; "small" has fewer clients (20, 20, 16, 12, 12) of at most 1500 samples.

    Returns
    -------
    FPFCData
        The samples, the clusters and the true models.
    """
    if scenario not in FPFC_SCENARIOS:
        raise DataError(f"FPFC data: scenario is {scenario!r}; known: {', '.join(FPFC_SCENARIOS)}")
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


def _scenario(scenario: str) -> Callable[..., Dataset]:
    """The loader of a scenario."""

    def load(
        data_dir: Any,
        features: Literal["uniform", "normal"] = "uniform",
        scale: Literal["small", "full"] = "full",
        seed: SEED = 0,
    ) -> Dataset:
        d = fpfc(scenario, seed, features, scale)
        note = "normal features: the FPFC paper's text; its tables used uniform ones"
        return _generated(
            f"fpfc-{scenario}", d.x, d.y, 10, d.groups, d.clusters, validation_fraction=0.2,
            notes=(note,) if features == "normal" else (), meta={"weights": d.weights, "biases": d.biases},
        )  # fmt: skip

    blocks = FPFC_SCENARIOS[scenario]["full"]
    alike = len(set(blocks)) == 1
    sizes = f"{len(blocks)} clusters of {blocks[0]}" if alike else f"clusters of {', '.join(map(str, blocks))}"
    load.__doc__ = (
        f"FPFC's synthetic scenario {scenario.upper()}: {sum(blocks)} clients, {sizes}; 60 inputs, 10 classes.\n\n"
        'features: "uniform" (as the tables) or "normal" (as the text); scale: "full" or "small"; seed: the data\'s.\n'
        "Cut 64 % train, 16 % validation, 20 % test. See `pf.data.fpfc`."
    )
    return load


fpfc_s1, fpfc_s2, fpfc_s3, fpfc_s4, fpfc_s5 = map(_scenario, FPFC_SCENARIOS)


def fcube(data_dir: Any, seed: SEED = 0) -> Dataset:
    """FCUBE of NIID-Bench: 5000 points of a cube, two classes, four clients that see other octants of it.

    seed: the data's. The classes are those of one linear model at every client.
    """
    # ICDE 2022: x in [-1, 1]^3, y = (x_1 > 0); a client's points lie in two opposite octants
    rng, groups = prepare.keyed(seed, 25), np.arange(5000) % 4
    sign = np.where(rng.random(5000) < 0.5, -1, 1)
    octant = np.stack([np.ones(5000), np.where(groups // 2, -1, 1), np.where(groups % 2, -1, 1)], 1)
    x = sign[:, None] * octant * rng.random((5000, 3))
    return _generated("fcube", x, x[:, 0] > 0, 2, groups, np.zeros(4, dtype=np.int64))


def mixtures(
    data_dir: Any,
    shares: Literal["10:90", "30:70", "linear"] = "10:90",
    clients: Annotated[int, Limits(ge=2, le=10000)] = 100,
    seed: SEED = 0,
) -> Dataset:
    """Clients with samples of two sources in known shares, as FedSoft mixes them: 20 inputs, 5 classes.

    shares: "10:90", "30:70" or "linear"; clients: their number; seed: the data's. A client's cluster is the source that
    it has more of; meta has the shares.
    """
    # AAAI 2022: sources label x ~ N(0, I) by argmax(A x) and argmax(B x). "10:90" gives half of the clients 10 % of the
    # first, the others 90 %; "linear" gives client i the share (i + 1/2) / n
    rng, C, d = prepare.keyed(seed, 26), 5, 20
    models, sizes = rng.standard_normal((2, C, d)), rng.integers(100, 201, clients)
    if shares == "linear":
        first = (np.arange(clients) + 0.5) / clients
    else:
        low, high = (int(word) / 100 for word in shares.split(":"))
        first = np.where(np.arange(clients) < (clients + 1) // 2, low, high)
    source = np.concatenate([np.arange(n) >= round(p * n) for p, n in zip(first, sizes, strict=True)]).astype(np.int64)
    groups = np.repeat(np.arange(clients), sizes)
    x = rng.standard_normal((len(groups), d))
    y = np.einsum("ncd,nd->nc", models[source], x).argmax(1)
    found = np.stack([np.bincount(source[groups == i], minlength=2) for i in range(clients)]) / sizes[:, None]
    meta = {"weights": models, "shares": found, "source": source}
    return _generated("mixtures", x, y, 5, groups, found.argmax(1), meta=meta)


def _generated(
    name: str, x: np.ndarray, y: np.ndarray, classes: int, groups: np.ndarray, clusters: np.ndarray, **more: Any
) -> Dataset:
    """Samples of natural clients from a formula."""
    return Dataset(
        name, x.astype(np.float32), y.astype(np.int64), classes=classes, groups=groups,
        group_names=tuple(f"client-{i}" for i in range(len(clusters))), group_clusters=clusters, **more,
    )  # fmt: skip


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
    fed = diagonal_quadratics(np.full((clients, dim), 4.0), centre)
    more = {"dataset": "fedcet-quadratics", "seed": seed, "measurements": b, "constant": constant}
    return replace(fed, meta={**fed.meta, **more})
