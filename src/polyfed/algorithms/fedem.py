"""FedEM: every client's law is a mixture of a few common ones, in shares of its own.
Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021,
Algorithm 1.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.algorithms._shared.parts import Partial, split
from polyfed.base.errors import ModelError
from polyfed.base.settings import setting
from polyfed.compute.batches import Batch
from polyfed.compute.solvers import local_sgd
from polyfed.compute.task import Task
from polyfed.core.algorithm import State

MIXING = "mixing"  # the parameter of a mixture: [K] logarithms of the weights
NONE = -1e30  # the logarithm of a weight of zero, without an infinity


@dataclass(frozen=True)
class FedEM(Partial):
    """Expectation and maximisation over K common models theta_k, with private weights pi_i.

        E   q_ij(k) = pi_ik exp(-l(theta_k; x_ij, y_ij)) / sum_l pi_il exp(-l(theta_l; x_ij, y_ij))
            pi_ik <- mean_j q_ij(k)                                      before training, at the received models
        M   theta_i <- local SGD on sum_k q_ij(k) l(theta_k; x_ij, y_ij)         theta_k <- sum_i p_i theta_ik

    Client i deploys sum_k pi_ik softmax(theta_k). It takes a model that is a mixture (`polyfed.models.mixture`), whose
    parts have starts of their own.

    Notes
    -----
    The M step goes down -log sum_k pi_ik exp(-l(theta_k)), whose gradient is that of the box with q at the renewed
    weights and the present models instead of the received ones: it follows the models as they move. A client that has
    not taken part deploys equal weights; the weights of one that has are those of its last round, as in the released
    code. The code averages the last models of all clients, of those that did not take part too; here it is those of the
    round.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")

    by_class: ClassVar[bool] = False  # whether the mixture has weights for every class

    def shared(self, layout):
        if not any(e.name == MIXING and (len(e.shape) == 2) == self.by_class for e in layout.entries):
            kind = "mixture by class" if self.by_class else "mixture"
            raise ModelError(f"model: found no {kind}, expected one for {self.name} to train: polyfed.models.mixture")
        return ~layout.mask(MIXING)

    def init_server(self, task, w0, n) -> State:
        if task.loss != "cross-entropy":
            raise ModelError(
                f"loss: found no cross-entropy, which {self.name} expects: it mixes probabilities of classes"
            )
        return {"w": split(self.shared(task.layout), w0)[0]}

    def train(self, task, w, shared, data):
        mixing, every = (shared <= 0).nonzero()[:, 0], data.whole()
        q = explained(task, w, mixing, w[:, mixing].log_softmax(1), every)
        return local_sgd(task, w.index_copy(1, mixing, renewed(q, every)), data, self.lr, only=shared > 0)

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}


def explained(task: Task, w: Tensor, mixing: Tensor, prior: Tensor, every: Batch) -> Tensor:
    """[s, K, b] the share of each part in every sample.

    mixing: the places of the weights     prior: [s, K] or [s, K, b] logarithms of shares before the sample is seen
    """
    k = prior.shape[1]
    alone = w[:, None].repeat(1, k, 1)  # model k: all weight on part k
    away = NONE * (1 - torch.eye(k, dtype=w.dtype, device=w.device))
    alone[..., mixing] = away.repeat_interleave(len(mixing) // k, 1)
    prior = prior if prior.dim() == 3 else prior[..., None]
    return (prior - task.losses(alone, every)).softmax(1)


def renewed(q: Tensor, every: Batch) -> Tensor:
    """[s, K] logarithms of the mean shares."""
    share = every.mean(q.transpose(1, 2))
    return (share / share.sum(1, keepdim=True)).clamp(min=1e-30).log()
