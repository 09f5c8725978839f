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

    certificates = (
        "tests/algorithms/test_fedavg.py::test_fedprox_without_pull_is_fedavg: identity at mu = 0",
        "tests/algorithms/test_fedavg.py::test_fedprox_solves_its_subproblem: closed form of the proximal step",
    )
    citation = """@inproceedings{li2020fedprox,
  title     = {Federated Optimization in Heterogeneous Networks},
  author    = {Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar
               and Talwalkar, Ameet and Smith, Virginia},
  booktitle = {MLSys},
  year      = {2020}
}"""

    def local_update(self, task, client, down, data, round):
        x = down["w"]
        return {}, {"w": local_sgd(task, x, data, self.lr, pull=(self.mu, x))}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}
