"""LG-FedAvg: every client has its own representation, the top layers are common.
Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations"
(arXiv 2001.01523), Algorithm 1.
"""

from dataclasses import dataclass

from polyfed.algorithms._shared.parts import Partial, part
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd


@dataclass(frozen=True)
class LGFedAvg(Partial):
    """Lower layers stay with the client, the top layers are shared: the mirror image of FedPer.

        (B_i, h_i) <- local SGD on f_i from (B_i, h)        h <- mean_S h_i

    Client i deploys its own body with the common head.

    Notes
    -----
    The paper starts from a model already trained by FedAvg. From a random start, comparisons published since find it
    no better than training alone.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    top: str = setting(
        "head", source="ours", doc='The layers that are shared: "head" is the last one; or names, separated by spaces.'
    )

    name = "lg-fedavg"

    def shared(self, layout):
        return part(layout, self.top)

    def train(self, task, w, shared, data):
        return local_sgd(task, w, data, self.lr)
