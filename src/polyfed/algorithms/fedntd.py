"""FedNTD: Lee et al., NeurIPS 2022."""

from dataclasses import dataclass

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.compute.terms import Distillation
from polyfed.core.algorithm import Algorithm


@dataclass(frozen=True)
class FedNTD(Algorithm):
    """Not-true distillation from the received model x; z~ are the logits without the one of the sample's own class.

    w_i = local SGD from x on f_i + beta tau^2 mean_j KL( softmax(z~_j(x) / tau) || softmax(z~_j / tau) )
    x <- sum_i n_i w_i / sum_i n_i
    """

    lr: float = setting(
        0.1, source="ours", doc="Step size of local SGD; in the released config 0.01, with momentum 0.9 and decay 0.99."
    )
    beta: float = setting(1.0, ge=0, source="paper", doc="Weight of the distillation; 0 is FedAvg.")
    tau: float = setting(1.0, gt=0, source="paper", doc="Temperature of the distillation.")

    def init_server(self, task, w0, n):
        assert task.classes > 0  # which refuses a model or loss without classes
        return {"w": w0}

    def local_update(self, task, client, down, data, round):
        x = down["w"]
        teacher = (x, Distillation(self.beta, self.tau, true=False)) if self.beta else None
        return {}, {"w": local_sgd(task, x, data, self.lr, teacher=teacher)}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}
