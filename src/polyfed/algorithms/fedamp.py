"""FedAMP and HeurFedAMP: Huang et al., AAAI 2021, Algorithm 1 and section 4."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.algorithms._shared.similarity import distances, mixed, products
from polyfed.base.errors import ConfigError
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Personal, Portrait, Server


def messages(W: Tensor, alpha: float, sigma: float, ids: Tensor | None = None) -> Tensor:
    """[m, n] weights of FedAMP for the clients `ids` (None: all): alpha A'(||w_i - w_j||^2), the rest for self."""
    ids, own = _rows(W, ids)
    X = (alpha / sigma * torch.exp(-distances(*products(W, ids), ids) / sigma)).masked_fill_(own, 0)
    return X + own * (1 - X.sum(1, keepdim=True))


def heuristic(W: Tensor, sigma: float, self_weight: float, ids: Tensor | None = None) -> Tensor:
    """[m, n] weights of HeurFedAMP for the clients `ids` (None: all)."""
    ids, own = _rows(W, ids)
    if len(W) == 1:
        return own.double()
    G, squares = products(W, ids)
    norm = torch.where(squares > 0, squares.sqrt(), 1.0)
    others = (sigma * G / (norm[ids, None] * norm)).masked_fill_(own, -torch.inf).softmax(1)
    return ((1 - self_weight) * others).masked_fill_(own, self_weight)


def _rows(W: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """(ids, [m, n] bool: True where a row is the client's own)"""
    everyone = torch.arange(len(W), device=W.device)
    ids = everyone if ids is None else ids
    return ids, ids[:, None] == everyone


class Mixed(Personal, abstract=True):
    """Base: the server keeps n models and sends each client its own mixture u_i of them."""

    linear_claims = "its distances and cosines between models"
    linear_only = True

    lr: float

    def weights(self, W: Tensor, ids: Tensor | None = None) -> Tensor:
        """[m, n] row-stochastic float64, for the clients `ids`; None: all."""
        raise NotImplementedError

    def pull(self, n: int) -> float:
        """Strength of the proximal term that holds w_i near u_i."""
        raise NotImplementedError

    def init_server(self, task, w0, n):
        return Server(each={"w": w0.expand(n, -1).clone()})

    def downlink(self, server, round):
        W = server["w"]
        return Down(each={"u": mixed(self.weights(W, round.ids), W)})

    def local_update(self, task, client, down, data, round):
        u = down["u"]
        w = local_sgd(task, u, data, self.lr, pull=(self.pull(round.n), u))
        return {"w": w}, {"w": w}

    def aggregate(self, server, up, round):
        """Renew the participants' rows, in place."""
        return {"w": server["w"].index_copy_(0, round.ids, up["w"])}

    def describe(self, server):
        return Portrait(findings={"mixing": self.weights(server["w"])})


@dataclass(frozen=True)
class FedAMP(Mixed):
    """Attentive message passing: the closer two models are, the more they attract each other.

        min_W  sum_i f_i(w_i) + lam sum_{i<j} A(||w_i - w_j||^2),    A(x) = 1 - exp(-x / sigma)
        u_i = sum_j xi_ij w_j,   xi_ij = alpha A'(||w_i - w_j||^2) for j != i,   xi_ii = 1 - sum_{j != i} xi_ij
        w_i = argmin f_i(w) + lam / (2 alpha) ||w - u_i||^2, by local SGD from u_i

    The mixture runs over all n clients, each with the last model it sent.

    Notes
    -----
    The paper lets alpha decay and uses sigma up to 1e6 for its networks.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")  # pyrefly: ignore[bad-override]
    lam: float = setting(1.0, ge=0, source="paper", doc="Strength of attraction.")
    sigma: float = setting(
        100.0,
        gt=0,
        source="ours",
        doc="Squared distance at which attraction fades. If it is far below the squared distances of the models, "
        "clients do not collaborate.",
    )
    alpha: float | None = setting(
        None,
        gt=0,
        source="ours",
        doc="Step size of the mixture, at most sigma / (n - 1), so that no weight is negative; None: just that.",
    )

    def init_server(self, task, w0, n):
        most = self.sigma / max(n - 1, 1)
        if self.alpha is not None and self.alpha > most * (1 + 1e-12):
            raise ConfigError(
                f"algorithm.alpha of FedAMP: found {self.alpha!r}, expected at most sigma/(n-1) = {most:.6g}, or none"
            )
        return super().init_server(task, w0, n)

    def step(self, n: int) -> float:
        """alpha in a federation of n clients."""
        return self.sigma / max(n - 1, 1) if self.alpha is None else self.alpha

    def weights(self, W, ids=None):
        return messages(W, self.step(len(W)), self.sigma, ids)

    def pull(self, n):
        return self.lam / self.step(n)


@dataclass(frozen=True)
class HeurFedAMP(Mixed):
    """FedAMP for deep networks: weights from cosines, where distances say little.

        u_i = sum_j xi_ij w_j,   xi_ii = self_weight,
        xi_ij = (1 - self_weight) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)) for j != i
        w_i = argmin f_i(w) + lam / (2 alpha) ||w - u_i||^2, by local SGD from u_i

    The mixture runs over all n clients, each with the last model it sent.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")  # pyrefly: ignore[bad-override]
    lam: float = setting(1.0, ge=0, source="paper", doc="Strength of attraction; 0 leaves out the proximal term.")
    alpha: float = setting(100.0, gt=0, source="ours", doc="Step size of the mixture, here only a divisor of lam.")
    sigma: float = setting(25.0, ge=0, source="ours", doc="Sharpness of the softmax; 0: all others count the same.")
    self_weight: float = setting(0.5, ge=0, le=1, source="ours", doc="Share of the client's own model in its mixture.")

    def weights(self, W, ids=None):
        return heuristic(W, self.sigma, self.self_weight, ids)

    def pull(self, n):
        return self.lam / self.alpha
