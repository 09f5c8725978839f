"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers" (arXiv 1912.00818), Algorithms 1, 2."""

from dataclasses import dataclass

from polyfed.algorithms._shared.parts import Partial, part
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd


@dataclass(frozen=True)
class FedPer(Partial):
    """A shared body, personal heads, trained jointly.

        (B_i, h_i) <- local SGD on f_i from (B, h_i)        B <- mean_S B_i

    Client i deploys the common body with its own head.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    head: str = setting(
        "head",
        source="paper",
        doc='The layers that stay with the client: "head" is the last one; or names, separated by spaces.',
    )

    def shared(self, layout):
        return ~part(layout, self.head)

    def train(self, task, w, shared, data):
        return local_sgd(task, w, data, self.lr)
