"""What methods of mixtures have in common: the E step, and a base whose mixing weights stay with the clients."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.algorithms._shared.parts import Partial, split
from polyfed.base.errors import ModelError
from polyfed.compute.batches import Batch
from polyfed.compute.task import Task
from polyfed.core.algorithm import State

MIXING = "mixing"  # the parameter of a mixture: [K] logarithms of the weights
NONE = -1e30  # the logarithm of a weight of zero, without an infinity


@dataclass(frozen=True)
class Mixed(Partial, abstract=True):
    """Base: common nets, and for each client weights of its own that mix them (`polyfed.models.mixture`)."""

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
