"""GPGD, FedSLR's second alternative: Huang et al., "Fusion of Global and Local Knowledge ...", A.2; equation (21)."""

from dataclasses import dataclass

from polyfed.algorithms._shared.lowrank import LowRank, received
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Needs


@dataclass(frozen=True)
class GPGD(LowRank):
    """Global proximal gradient descent: one proximal step at the server after each round of FedAvg.

        w_i = local SGD from w on f_i
        w   <- prox( mean_S w_i ),  singular values shrunk by steps lr lam                                   (21)

    Notes
    -----
    It solves FedSLR's problem (P1) only for one client and one step. The common model goes down as FedSLR's does.
    """

    lr: float = setting(0.1, source="FedSLR's paper", doc="Step size of local SGD, and scale of the threshold.")
    lam: float = setting(
        1e-4, ge=0, source="FedSLR's paper", doc="Weight of the nuclear norm; 0 is FedAvg with equal weights."
    )
    steps: int = setting(
        1,
        ge=1,
        source="FedSLR's paper",
        doc="Threshold in units of lr lam: 1 as printed; the number of local steps makes it as long as the way the "
        "mean has moved.",
    )

    needs = Needs(plain_sgd="its proximal step belongs to gradient steps of length lr")

    def local_update(self, task, client, down, data, round):
        return {}, {"w": local_sgd(task, received(down, task.layout), data, self.lr)}

    def aggregate(self, server, up, round):
        return self.shrunk(server, up.mean("w"), self.steps * self.lr * self.lam)
