"""FedAMP and HeurFedAMP: every client has its own model on the server, mixed with those that are close to it.
Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, Algorithm 1 and section 4.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.algorithm import Down, Personal, Server
from polyfed.core.errors import ConfigError
from polyfed.core.settings import setting
from polyfed.core.solvers import local_sgd

CITATION = """@inproceedings{huang2021personalized,
  title     = {Personalized Cross-Silo Federated Learning on Non-{IID} Data},
  author    = {Huang, Yutao and Chu, Lingyang and Zhou, Zirui and Wang, Lanjun and Liu, Jiangchuan and Pei, Jian
               and Zhang, Yong},
  booktitle = {AAAI},
  year      = {2021}
}"""


def messages(W: Tensor, alpha: float, sigma: float) -> Tensor:
    """[n, n] weights of FedAMP: alpha A'(||w_i - w_j||^2) with A'(x) = exp(-x/sigma)/sigma, what is left for self."""
    X = alpha / sigma * torch.exp(-torch.cdist(W.double(), W.double()).square() / sigma)
    X.fill_diagonal_(0)
    return X + torch.diag(1 - X.sum(1))


def heuristic(W: Tensor, sigma: float, self_weight: float) -> Tensor:
    """[n, n] weights of HeurFedAMP: a softmax of sigma cos(w_i, w_j) over the others, `self_weight` for self."""
    norm = W.double().norm(dim=1, keepdim=True)
    X = W.double() / torch.where(norm > 0, norm, 1.0)
    if len(X) == 1:
        return torch.ones_like(X[:, :1])
    others = (sigma * (X @ X.T)).fill_diagonal_(-torch.inf).softmax(1)
    return (1 - self_weight) * others + self_weight * torch.eye(len(X), dtype=X.dtype, device=X.device)


class Mixed(Personal, abstract=True):
    """What the two have in common: the server keeps n models and sends each client its own mixture u_i of them."""

    lr: float

    def weights(self, W: Tensor) -> Tensor:
        """[n, n] row-stochastic float64."""
        raise NotImplementedError

    def pull(self, n: int) -> float:
        """Strength of the proximal term that holds w_i near u_i."""
        raise NotImplementedError

    def init_server(self, task, w0, n):
        return Server(each={"w": w0.expand(n, -1).clone()})

    def downlink(self, server, round):
        W = server["w"]
        return Down(each={"u": self.weights(W)[round.ids].to(W.dtype) @ W})

    def local_update(self, task, client, down, data, round):
        u = down["u"]
        w = local_sgd(task, u, data, self.lr, pull=(self.pull(round.n), u))
        return {"w": w}, {"w": w}

    def aggregate(self, server, up, round):
        return {"w": server["w"].index_copy(0, round.ids, up["w"])}

    def report(self, server):
        return {"mixing": self.weights(server["w"])}


@dataclass(frozen=True)
class FedAMP(Mixed):
    """Attentive message passing: the closer two models are, the more they attract each other.

        min_W  sum_i f_i(w_i) + lam sum_{i<j} A(||w_i - w_j||^2),    A(x) = 1 - exp(-x / sigma)
        u_i = sum_j xi_ij w_j,   xi_ij = alpha A'(||w_i - w_j||^2) for j != i,   xi_ii = 1 - sum_{j != i} xi_ij
        w_i = argmin f_i(w) + lam / (2 alpha) ||w - u_i||^2, by local SGD from u_i

    The mixture runs over all n clients, each with the last model it sent.

    Parameters
    ----------
    lr : float
        Step size of local SGD.
    lam : float
        Strength of attraction.
    sigma : float
        Squared distance at which attraction fades. If it is far below the squared distances of the models, clients do
        not collaborate.
    alpha : float or None
        Step size of the mixture, at most sigma / (n - 1), so that no weight is negative; None: just that.

    Notes
    -----
    The paper lets alpha decay and uses sigma up to 1e6 for its networks.
    """

    lr: float = setting(0.1, source="ours")
    lam: float = setting(1.0, ge=0, source="paper")
    sigma: float = setting(100.0, gt=0, source="ours")
    alpha: float | None = setting(None, gt=0, source="ours")

    certificates = (
        "tests/algorithms/test_fedamp.py::test_weights_of_three_clients: the definition, digit for digit",
        "tests/algorithms/test_fedamp.py::test_mixing_is_a_gradient_step_of_the_attraction: finite differences",
        "tests/algorithms/test_fedamp.py::test_stationary_point_of_the_objective: optimality conditions",
        "tests/algorithms/test_fedamp.py::test_far_apart_it_is_local: identity as sigma falls",
        "tests/algorithms/test_fedamp.py::test_rounds_in_numpy: Algorithm 1 by hand, from u_i",
    )
    citation = CITATION

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

    def weights(self, W):
        return messages(W, self.step(len(W)), self.sigma)

    def pull(self, n):
        return self.lam / self.step(n)


@dataclass(frozen=True)
class HeurFedAMP(Mixed):
    """FedAMP for deep networks: weights from cosines, where distances say little.

        u_i = sum_j xi_ij w_j,   xi_ii = self_weight,
        xi_ij = (1 - self_weight) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)) for j != i
        w_i = argmin f_i(w) + lam / (2 alpha) ||w - u_i||^2, by local SGD from u_i

    The mixture runs over all n clients, each with the last model it sent.

    Parameters
    ----------
    lr : float
        Step size of local SGD.
    lam : float
        Strength of attraction; 0 leaves out the proximal term.
    alpha : float
        Step size of the mixture, here only a divisor of lam.
    sigma : float
        Sharpness of the softmax; 0: all others count the same.
    self_weight : float
        Share of the client's own model in its mixture.
    """

    lr: float = setting(0.1, source="ours")
    lam: float = setting(1.0, ge=0, source="paper")
    alpha: float = setting(100.0, gt=0, source="ours")
    sigma: float = setting(25.0, ge=0, source="ours")
    self_weight: float = setting(0.5, ge=0, le=1, source="ours")

    certificates = (
        "tests/algorithms/test_fedamp.py::test_heuristic_weights_of_three_clients: the definition in numpy",
        "tests/algorithms/test_fedamp.py::test_a_self_weight_of_one_is_local: identity",
        "tests/algorithms/test_fedamp.py::test_equal_weights_are_fedavg: identity at sigma = 0, self_weight = 1/n",
        "tests/algorithms/test_fedamp.py::test_rounds_in_numpy: the rounds by hand, from u_i",
    )
    citation = CITATION

    def weights(self, W):
        return heuristic(W, self.sigma, self.self_weight)

    def pull(self, n):
        return self.lam / self.alpha
