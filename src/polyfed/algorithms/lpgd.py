"""LPGD, FedSLR's first alternative: Huang et al., "Fusion of Global and Local Knowledge ...", A.2."""

from dataclasses import dataclass

from polyfed.algorithms._shared.lowrank import sheets, shrink_layers
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Needs


@dataclass(frozen=True)
class LPGD(Algorithm):
    """Local proximal gradient descent: every client keeps its own model low-rank.

        w_i <- prox( w_i - lr grad f_i(w_i) ),  singular values shrunk by lr lam, at every local step, from w
        w   <- mean_S w_i

    Notes
    -----
    It does not solve FedSLR's problem (P1), and the mean of low-rank models is of higher rank. A decomposition of every
    layer at every step is slow for large layers.
    """

    lr: float = setting(0.1, source="FedSLR's paper", doc="Step size of the local steps.")
    lam: float = setting(
        1e-4, ge=0, source="FedSLR's paper", doc="Weight of the nuclear norm; 0 is FedAvg with equal weights."
    )

    needs = Needs(plain_sgd="its proximal steps belong to gradient steps of length lr")

    def local_update(self, task, client, down, data, round):
        layers, shrink = sheets(task.layout), self.lr * self.lam
        return {}, {"w": local_sgd(task, down["w"], data, self.lr, prox=lambda w: shrink_layers(w, layers, shrink))}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w")}
