"""FedACS: Chen, Li, Shen (arXiv 2312.15148), equations (3) to (5)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithms._shared.clusters import components, start
from polyfed.algorithms._shared.similarity import distances, mirrored, mixed, products, similarity
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Personal, Portrait, Server

REPORTED = 300  # clients up to which the mixing matrix is reported
AFFORDED = 2e10  # products for a report of the groups of more clients than that, some seconds on one core


def refresh(S: Tensor, W: Tensor, ids: Tensor, sigma: float | None = None) -> Tensor:
    """`alike(W, sigma)`, out of S: [n, n] before the rows `ids` of W: [n, p] changed, in place; s n p products."""
    G, squares = products(W, ids)
    # in float64: models that set out together have cosines near 1, told apart by the last digits. Errors do not add up
    # over rounds, since every entry is made anew from its two models
    if sigma is None:
        norm = torch.where(squares > 0, squares.sqrt(), 1.0)
        rows = (G / norm[ids, None] / norm).clamp_(-1, 1)
    else:
        rows = torch.exp(-distances(G, squares, ids) / sigma)
    rows[:, ids] = mirrored(rows[:, ids])
    S.index_copy_(0, ids, rows)
    return S.index_copy_(1, ids, rows.T)


def alike(W: Tensor, sigma: float | None) -> Tensor:
    """[m, m] float64 similarities of models W: [m, p], symmetric, diagonal 1: cosines, or exp(-distance^2 / sigma)."""
    if sigma is None:
        return similarity(W)
    return refresh(W.new_zeros(len(W), len(W), dtype=torch.float64), W, torch.arange(len(W), device=W.device), sigma)


def threshold(S: Tensor, quantile: float | None) -> float:
    """The quantile of all elements of S, linear between two of them; -inf for None."""
    return -np.inf if quantile is None else float(np.quantile(S.cpu().numpy(), quantile))


def weights(S: Tensor, quantile: float | None, rows: Tensor | None = None) -> Tensor:
    """[m, m] row-stochastic weights of (4) from similarities S: [m, m], none negative; of some rows only, [s, m]."""
    delta = threshold(S, quantile)
    own = torch.arange(len(S), device=S.device) if rows is None else rows
    S = S if rows is None else S[rows]
    keep = (S > delta) & (S > 0)
    keep[torch.arange(len(S), device=S.device), own] = True
    A = torch.where(keep, S, 0.0)
    return A / A.sum(1, keepdim=True)


def mixing(W: Tensor, quantile: float | None, sigma: float | None = None) -> Tensor:
    """[m, m] row-stochastic weights of (4) for the models W: [m, p]."""
    return weights(alike(W, sigma), quantile)


@dataclass(frozen=True)
class FedACS(Personal):
    """Attention-based client selection: personal models, mixed among similar clients before each local training.

        s_ij = cos(w_i, w_j),   delta = quantile of all s_ij (diagonal included)
        u_i = sum_{j: s_ij > delta} s_ij w_j / sum_{j: s_ij > delta} s_ij                              (4)
        w_i = local SGD from u_i on f_i                                                                (5)
        with alpha below 1, and no quantile, u_i = w_i - alpha (w_i - sum_j s_ij w_j), sum_j s_ij = 1  (3)
        with sigma, s_ij = exp(-||w_i - w_j||^2 / sigma), the slope of R = 1 - exp(-x^2 / sigma)

    Self is always kept and non-positive similarities are dropped, where (4) as printed divides by zero or leaves the
    convex hull. The paper names no quantile, which decides everything: a client keeps about (1 - quantile) m - 1 peers,
    m the number of clients mixed.

    Notes
    -----
    With pool="all" the server keeps all similarities, n n float64 numbers, and only computes those of the clients whose
    models have changed: s n p operations a round for s participants.

    Groups are reported as the connected components of the mixing matrix, had all known clients taken part; the matrix
    itself for at most 300 clients. With pool="participants" the report alone needs the similarities of all clients, n n
    p products at every evaluation: above 300 clients it has groups up to 2e10 products (5000 clients with 610
    parameters, 400 with 100 000).
    """

    linear_claims = "its similarities between models"
    linear_only = True

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    quantile: float | None = setting(
        0.75,
        ge=0,
        le=1,
        source="ours",
        tune=True,
        doc="Threshold of similarity in [0, 1]; None: no threshold, all positive similarities count.",
    )
    pool: Literal["participants", "all"] = setting(
        "all",
        source="paper",
        doc='"all": similarities and mixture among the last known models of every client that has taken part, '
        'absent or not, as in Algorithm 1; "participants": among the round\'s participants.',
    )
    alpha: float = setting(
        1.0,
        gt=0,
        le=1,
        source="paper",
        doc="How far a client moves to its mix: 1 is (4); smaller values with quantile None are (3), Theorem 2.1's "
        "form.",
    )
    first: float | None = setting(
        None,
        ge=0,
        le=1,
        source="paper",
        doc="Threshold of the first round, from which it moves to `quantile` in equal steps; None: no other one.",
    )
    first_rounds: int = setting(10, ge=1, source="ours", doc="Rounds in which the threshold moves from `first`.")
    sigma: float | None = setting(
        None,
        gt=0,
        source="paper",
        doc="Width of the smooth attention exp(-||w_i - w_j||^2 / sigma); None: cosines of the models.",
    )
    start_seed: int | None = setting(
        None,
        ge=0,
        source="ours",
        doc="Each client's own start (line 3), drawn as the modules draw, under this seed; None: one common start.",
    )

    def __post_init__(self):
        super().__post_init__()
        self.require(self.first is None or self.quantile is not None, "first", "a quantile that it moves to")

    def init_server(self, task, w0, n):
        models = {"w": w0.expand(n, -1).clone()}
        seed, own = self.start_seed, {}
        if seed is not None:
            models, own = {}, {"w": lambda keys: torch.stack([start(task, w0, int(k), seed, None) for k in keys])}
        if self.pool == "participants":
            return Server(each=models, drawn=own)
        same = (w0 != 0).any() if self.sigma is None else 1.0  # one common start, similar to itself
        S = (w0.new_ones(n, n, dtype=torch.float64) * same).fill_diagonal_(1.0)
        return Server(each=models, pairs={"similarity": S}, drawn=own)

    def _quantile(self, t):
        if self.first is None or self.quantile is None or t >= self.first_rounds:
            return self.quantile
        return self.first + (self.quantile - self.first) * t / self.first_rounds

    def downlink(self, server, round):
        W, ids = server["w"], round.ids
        if self.pool == "participants":
            w = W[ids]
            return self._towards(mixed(mixing(w, self._quantile(round.t), self.sigma), w), W, ids)
        pool = (server["known"] > 0).index_fill(0, ids, True).nonzero()[:, 0]
        S = server["similarity"]
        if self.start_seed is not None:  # those who come for the first time are alike as they are
            S = refresh(S.clone(), W, ids[server["known"][ids] == 0], self.sigma)
        A = S.new_zeros(len(ids), len(W))
        A[:, pool] = weights(_among(S, pool), self._quantile(round.t), torch.searchsorted(pool, ids))
        return self._towards(mixed(A, W), W, ids)

    def _towards(self, mix, W, ids):
        return Down(each={"u": mix if self.alpha == 1 else W[ids] + self.alpha * (mix - W[ids])})

    def local_update(self, task, client, down, data, round):
        w = local_sgd(task, down["u"], data, self.lr)  # (5)
        return {"w": w}, {"w": w}

    def aggregate(self, server, up, round):
        """Renew the participants' rows, in place."""
        W = server["w"].index_copy_(0, round.ids, up["w"])
        if self.pool == "participants":
            return {"w": W}
        return {"w": W, "similarity": refresh(server["similarity"], W, round.ids, self.sigma)}

    def describe(self, server):
        n, pool = len(server["w"]), server["known"].nonzero()[:, 0]
        if self.pool == "participants" and n > REPORTED and len(pool) ** 2 * server["w"].shape[1] > AFFORDED:
            return Portrait()  # its similarities would cost more than a round
        S = _among(server["similarity"], pool) if self.pool == "all" else alike(server["w"][pool], self.sigma)
        A = torch.eye(n, dtype=torch.float64, device=pool.device)
        if len(pool):
            A[pool[:, None], pool] = weights(S, self.quantile)
        mixing = {"mixing": A} if n <= REPORTED else {}
        return Portrait(clusters=components(n, *A.nonzero().T), findings=mixing)


def _among(S: Tensor, pool: Tensor) -> Tensor:
    """S: [n, n] between the clients of `pool`, in rising order."""
    return S if len(pool) == len(S) else S[pool[:, None], pool]
