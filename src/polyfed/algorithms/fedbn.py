"""FedBN: Li et al., ICLR 2021, Algorithm 1."""

from dataclasses import dataclass

from polyfed.algorithms._shared.parts import Partial
from polyfed.base.errors import ModelError
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd


@dataclass(frozen=True)
class FedBN(Partial):
    """Common layers, personal normalisation: scale gamma and offset beta of every normalisation layer never leave.

        (B_i, gamma_i, beta_i) <- local SGD on f_i from (B, gamma_i, beta_i)        B <- mean_S B_i

    Client i deploys the common layers with its own normalisation.

    Notes
    -----
    As in the paper, the running mean and variance of BatchNorm stay at the client too, for a model from
    `polyfed.models.with_statistics`, where they move by the layer's own momentum, whatever takes the steps; GroupNorm,
    LayerNorm and InstanceNorm have none. A model without trained normalisation parameters is refused: FedBN of it is
    FedAvg. Newcomers start with the initial ones.
    """

    lr: float = setting(0.01, source="code", doc="Step size of local SGD.")

    def shared(self, layout):
        norm = layout.mask("norm")
        if not norm.any():
            names = ", ".join(e.name for e in layout.entries)
            raise ModelError(
                f"model: found no normalisation layer among {names}, expected one, for fedbn to keep local"
            )
        return ~norm

    def train(self, task, w, shared, data):
        return local_sgd(task, w, data, self.lr)
