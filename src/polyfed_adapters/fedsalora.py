"""FedSA-LoRA: Guo et al., ICLR 2025."""

from dataclasses import dataclass
from typing import Literal

from polyfed.algorithms._shared.parts import Partial
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed_adapters.lora import places, without


@dataclass(frozen=True)
class FedSALoRA(Partial):
    """Both factors are trained; A is averaged, B is the client's own.

        (A_i, B_i, h_i) <- local SGD on f_i from (A, B_i, h_i)        A <- mean_S A_i

    Client i deploys the common A with its own B and head h; newcomers begin with B = 0.

    Notes
    -----
    The accuracies that the paper prints are of personal models on the validation data that also chose the round.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    head: Literal["own", "shared"] = setting(
        "own", source="code", doc="Whether what is trained beside A and B, such as the head, stays or is averaged."
    )

    name = "fedsa-lora"
    adapter_train = "factors"

    def shared(self, layout):
        layers = places(layout, self).values()
        kept = without(layers, layout.p, "A")
        return ~kept if self.head == "own" else without(layers, layout.p, "B")

    def train(self, task, w, shared, data):
        return local_sgd(task, w, data, self.lr)
