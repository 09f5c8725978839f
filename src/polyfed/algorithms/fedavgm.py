"""FedAvgM: Hsu, Qi, Brown (arXiv 1909.06335)."""

from dataclasses import dataclass

from torch import zeros_like

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """FedAvg with momentum at the server.

    D = sum_i n_i w_i / sum_i n_i - w,   w_i = local SGD from w on f_i
    v <- beta v + D,   w <- w + server_lr v
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    server_lr: float = setting(1.0, ge=0, source="paper", doc="Step size of the server.")
    beta: float = setting(0.9, ge=0, lt=1, source="paper", doc="Momentum; 0 is FedAvg with a step size at the server.")
    weighted: bool = setting(
        True, source="paper", doc="Weigh clients by their number of samples, as in the paper; False: plain mean."
    )

    def init_server(self, task, w0, n):
        return {"w": w0, "v": zeros_like(w0)}

    def local_update(self, task, client, down, data, round):
        return {}, {"w": local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        d = up.mean("w", round.samples if self.weighted else None) - server["w"]
        v = self.beta * server["v"] + d
        return {"w": server["w"] + self.server_lr * v, "v": v}
