"""FedEM: every client's law is a mixture of a few common ones, in shares of its own.
Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021,
Algorithm 1.
"""

from dataclasses import dataclass

import torch

from polyfed.algorithms._shared.parts import Partial
from polyfed.base.errors import ModelError
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd

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
    weights and the present models instead of the received ones: it follows the models as they move. A client that has not taken part deploys
    equal weights; the weights of one that has are those of its last round, as in the released code. The code averages
    the last models of all clients, of those that did not take part too; here it is those of the round.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")

    def shared(self, layout):
        if not any(entry.name == MIXING for entry in layout.entries):
            raise ModelError("model: found no mixture, expected one for fedem to train: polyfed.models.mixture")
        return ~layout.mask(MIXING)

    def init_server(self, task, w0, n):
        if task.loss != "cross-entropy":
            raise ModelError("loss: found no cross-entropy, which fedem expects: it mixes probabilities of classes")
        return super().init_server(task, w0, n)

    def train(self, task, w, shared, data):
        common, mixing = shared > 0, (shared <= 0).nonzero()[:, 0]
        every, k = data.whole(), len(mixing)
        alone = w[:, None].repeat(1, k, 1)  # model k: all weight on part k
        alone[..., mixing] = NONE * (1 - torch.eye(k, dtype=w.dtype, device=w.device))
        evidence = w[:, mixing].log_softmax(1)[..., None] - task.losses(alone, every)
        share = every.mean(evidence.softmax(1).transpose(1, 2))
        w = w.index_copy(1, mixing, (share / share.sum(1, keepdim=True)).clamp(min=1e-30).log())
        return local_sgd(task, w, data, self.lr, only=common)

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}
