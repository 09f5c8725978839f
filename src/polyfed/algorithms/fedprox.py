"""FedProx: local SGD held near the common model. Li et al., MLSys 2020, Algorithm 2."""

from dataclasses import dataclass

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm


@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedAvg with a proximal term against drift.

        w_i ~ argmin_w f_i(w) + mu/2 ||w - w_t||^2, by local SGD from w_t        w_{t+1} = sum_i n_i w_i / sum_i n_i

    Li et al. (2020), Algorithm 2.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    mu: float = setting(0.01, ge=0, source="paper", doc="Strength of the proximal term; 0 is FedAvg.")

    def local_update(self, task, client, down, data, round):
        x = down["w"]
        return {}, {"w": local_sgd(task, x, data, self.lr, pull=(self.mu, x))}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}
