"""A newcomer to clients that FPFC has clustered, which stay as they are: Yu et al. (arXiv 2211.04218), "Newcomers"."""

from typing import Any

import torch
from torch import Tensor

from polyfed.algorithms._shared.parts import assemble, part, split
from polyfed.algorithms.fpfc.penalty import shrinkage
from polyfed.core.algorithm import Down, Round, State
from polyfed.core.newcomer import Newcomer


class Joining(Newcomer):
    """Rule (6) for the pairs of the newcomer w with each of the n clients before it, w_j frozen.

        entry      theta_j = w - w_j, v_j = 0, and so zeta = w
        device     w <- w - lr (grad f(w) + rho (w - zeta)), from its own last w                              (5)
        server     delta_j = w - w_j + v_j / rho,  theta_j = c(||delta_j||) delta_j                           (6)
                   v_j <- v_j + rho (w - w_j - theta_j)
                   zeta = 1/(n+1) (w + sum_j (w_j + theta_j - v_j / rho))

    The newcomer belongs to the cluster of the client with the smallest ||theta_j||, if that is at most nu, and deploys
    the mean of that cluster's models and its own, weighted by samples. The paper does not say its first w: here it is
    the offered cluster model with the least training loss. From the common start it mostly stays out of reach of every
    cluster, as the penalty is flat beyond a lam.
    """

    algorithm: Any

    def __init__(self, algorithm: Any, task, server: State, samples: Tensor):
        self.algorithm = algorithm
        self.task, self.before, self.samples, self.n = task, server, samples, len(samples)
        self.axes, self.rows, self.trains = {}, {}, True
        self.labels, self.models = algorithm.clusters(server), algorithm.cluster_models(server)
        self.size = 0.0  # training samples of the newcomer
        self.w = self.models[:0]  # [1, q] once it has entered
        self.delta, self.c = torch.zeros_like(server["w"]), server["w"].new_ones(self.n)
        self.theta = torch.full_like(self.c, torch.inf)

    def offered(self):
        first = [int((self.labels == k).nonzero()[0]) for k in self.labels.unique()]
        return self._whole(self.models[first])

    def enter(self, choice, samples):
        offered = self.offered()
        w = self.task.w0 if choice < 0 else offered[choice]
        if self.algorithm.shared_layers:
            w = split(self._shared(), w)[1]
        self.size, self.w = samples, w[None]
        return {"w": w}

    def _whole(self, w: Tensor) -> Tensor:
        """[s, p]: w with the shared layers."""
        if not self.algorithm.shared_layers:
            return w
        return assemble(self._shared(), self.before["common"].expand(len(w), -1), w)

    def _shared(self) -> Tensor:
        return part(self.task.layout, self.algorithm.shared_layers)

    def downlink(self, round: Round):
        common = {"common": self.before["common"]} if self.algorithm.shared_layers else {}
        if not self.w.shape[1]:
            return Down(shared=common)
        if self.theta.isinf().all():
            return Down(shared=common, each={"zeta": self.w})
        total = self.before["w"].sum(0) + self.w + (2 * self.c - 1) @ self.delta
        return Down(shared=common, each={"zeta": total / (self.n + 1)})

    def aggregate(self, up: State, round: Round):
        a = self.algorithm
        self.w = up["w"]
        self.delta = self.delta * (1 - self.c)[:, None] + self.w - self.before["w"]
        length = self.delta.norm(dim=1)
        self.c = shrinkage(length, *a.fusion[:5])
        self.theta = self.c * length

    def deployment(self, round: Round):
        common = {"common": self.before["common"]} if self.algorithm.shared_layers else {}
        if not self.algorithm.merge:
            return Down(common)
        label = self.cluster(self.labels)
        if label < 0:
            return Down(common, {"w": self.w})
        at = self.labels == label
        weight = self.before["known"][at].clamp(min=1)
        mean = (weight.sum() * self.models[at][:1] + self.size * self.w) / (weight.sum() + self.size)
        return Down(common, {"w": mean})

    def cluster(self, labels: Tensor):
        """The label of the nearest client, if it is within nu; -1 otherwise."""
        near = int(self.theta.argmin())
        return int(labels[near]) if self.theta[near] <= self.algorithm.within else -1
