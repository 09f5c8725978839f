"""Ditto: Li et al., ICML 2021, Algorithm 1."""

from dataclasses import dataclass

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Personal


@dataclass(frozen=True)
class Ditto(Personal):
    """A personal model per client, regularised towards the FedAvg model x it received.

    w_i = local SGD from x on f_i                     x <- sum_i n_i w_i / sum_i n_i
    v_i <- v_i - lr (grad f_i(v_i) + lam (v_i - x))   with x as received, frozen; v_i never leaves the client
    """

    lr: float = setting(0.1, source="ours", doc="Step size of both local solves.")
    lam: float = setting(
        0.1, ge=0, source="FedSLR's comparison", doc="Pull of the personal model towards the common one; 0 is Local."
    )
    personal_epochs: int = setting(
        1,
        ge=0,
        source="FedSLR's comparison",
        doc="Passes over the local data for the personal model, each round; 0: the very batches of the common one.",
    )

    def init_server(self, task, w0, n):
        return {"w": w0}

    def local_update(self, task, client, down, data, round):
        x = down["w"]
        w = local_sgd(task, x, data, self.lr)
        again = data.again("personal", epochs=self.personal_epochs) if self.personal_epochs else data
        v = local_sgd(task, client["w"], again, self.lr, pull=(self.lam, x))
        return {"w": v}, {"w": w}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}
