"""FedRep: Collins et al., ICML 2021, Algorithm 1."""

from dataclasses import dataclass

from polyfed.algorithms._shared.parts import Partial, part
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd


@dataclass(frozen=True)
class FedRep(Partial):
    """A shared body, personal heads, trained one after the other.

        h_i <- head_epochs of SGD on f_i(B, h_i), the body B as received and frozen
        B_i <- body_epochs of SGD on f_i(B_i, h_i) from B, the new head frozen
        B   <- mean_S B_i

    Client i deploys the common body with its own head. Numbers of epochs replace the run's amount of local work.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of both solves.")
    head_epochs: int | None = setting(
        10, ge=0, source="paper", doc="Passes over the local data for the head, each round; None: the run's local work."
    )
    body_epochs: int | None = setting(
        1, ge=0, source="paper", doc="Passes over the local data for the body, each round; None: the run's local work."
    )
    head: str = setting(
        "head",
        source="paper",
        doc='The layers that stay with the client: "head" is the last one; or names, separated by spaces.',
    )

    def shared(self, layout):
        return ~part(layout, self.head)

    def train(self, task, w, shared, data):
        first, then = data.again("head", epochs=self.head_epochs), data.again("body", epochs=self.body_epochs)
        w = local_sgd(task, w, first, self.lr, only=1 - shared)
        return local_sgd(task, w, then, self.lr, only=shared)
