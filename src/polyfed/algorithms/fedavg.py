"""FedAvg: local SGD from the common model, then the mean. McMahan et al., AISTATS 2017, Algorithm 1."""

from dataclasses import dataclass

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging: one common model.

        w_i = local SGD from w on f_i        w <- sum_i n_i w_i / sum_i n_i

    McMahan et al. (2017), Algorithm 1.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    weighted: bool = setting(
        True, source="paper", doc="Weigh clients by their number of samples, as in the paper; False: plain mean."
    )

    linear = "its means"

    def local_update(self, task, client, down, data, round):
        return {}, {"w": local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples if self.weighted else None)}
