"""FedRPCA: Jhunjhunwala et al., "FedRPCA: Enhancing Federated LoRA Aggregation Using Robust PCA", arXiv 2506.01194."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, mean
from polyfed_adapters.lora import known, noted, places

CLOSE, MOST = 1e-7, 1000  # the gap relative to M, and iterations, at which ADMM ends


@dataclass(frozen=True)
class FedRPCA(Algorithm):
    """What clients' updates have in common is averaged; what each has alone is averaged, and scaled by beta.

        (A_i, B_i, h_i) <- local SGD on f_i from (A, B, h)
        A <- A + mean_i L_i + beta mean_i S_i      [L_1 ... L_n], [S_1 ... S_n] = robust PCA of [A_1 - A ... A_n - A]
        and B alike, of each layer;   h <- mean_i h_i                   h: all else that is trained, such as the head

    Robust PCA of M: min ||L||_* + lam ||S||_1 with L + S = M and lam = 1 / sqrt(the larger side of M).

    Notes
    -----
    With beta = 1 it is FedAvg with plain means. Of equal updates v of n clients S is 0 where max |v| / ||v|| is at most
    sqrt(n / length of v), so that beta changes nothing; with few clients most of what is not common to all goes to S.
    The paper's beta that follows the share of S is left out.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    beta: float = setting(2.0, ge=0, source="ours", doc="Scale of the mean of the clients' sparse parts; 1 is FedAvg.")

    adapter_train = "factors"

    def init_server(self, task, w0, n):
        return {"w": w0, **noted(places(task.layout, self))}

    def local_update(self, task, client, down, data, round):
        return {}, {"w": local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        own, w = up["w"], mean(up["w"], torch.ones_like(round.samples))
        for place in known(server).values():
            for at in (place.span("A"), place.span("B")):
                S = robust_pca((own[:, at] - server["w"][at]).T)[1]
                w[at] += (self.beta - 1) * S.mean(1)  # mean L + beta mean S, as L + S = M
        return server | {"w": w}


def robust_pca(M: Tensor) -> tuple[Tensor, Tensor]:
    """(L, S) = argmin ||L||_* + lam ||S||_1 with L + S = M, by ADMM (Candès, Li, Ma, Wright 2011, Algorithm 1)."""
    X, total = M.double(), M.double().abs().sum()
    L, S, Y = X, torch.zeros_like(X), torch.zeros_like(X)
    if not 0 < total < torch.inf:
        return M, S.to(M)  # nothing to part, or not finite, for what follows to notice
    lam, mu = max(M.shape) ** -0.5, M.numel() / (4 * total)
    for _ in range(MOST):
        Z = X - S + Y / mu
        squares, V = torch.linalg.eigh(Z.T @ Z)  # of one row and column for each client
        L = Z @ (V * (1 - 1 / (mu * squares.clamp(min=0).sqrt())).clamp(min=0)) @ V.T
        Z = X - L + Y / mu
        S = Z.sign() * (Z.abs() - lam / mu).clamp(min=0)
        gap = X - L - S
        Y = Y + mu * gap
        if gap.norm() <= CLOSE * X.norm():
            break
    return (X - S).to(M), S.to(M)
