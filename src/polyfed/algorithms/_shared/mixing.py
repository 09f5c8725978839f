"""What methods of mixtures have in common: the E step, and a base whose mixing weights stay with the clients."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyfed.algorithms._shared.parts import Partial, split
from polyfed.base.errors import ModelError
from polyfed.base.settings import setting
from polyfed.compute.batches import Batch, Batches, on_device
from polyfed.compute.solvers import local_sgd
from polyfed.compute.task import Task
from polyfed.compute.terms import IMPOSSIBLE, Also
from polyfed.core.algorithm import State

MIXING = "mixing"  # the parameter of a mixture: [K] logarithms of the weights


@dataclass(frozen=True)
class Mixed(Partial, abstract=True):
    """Base: common nets, and for each client weights of its own that mix them (`polyfed.models.mixture`)."""

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    responsibilities: Literal["fixed", "following"] = setting(
        "fixed",
        source="paper",
        doc='"fixed": of the received models and the old weights, all through local training; "following": of the '
        "renewed weights and the models as they move.",
    )

    by_class: ClassVar[bool] = False  # True: the mixture has weights for every class

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

    def trained(self, task: Task, w: Tensor, shared: Tensor, data: Batches, q: Tensor, also: Also | None) -> Tensor:
        """[s, p] the M step from w, which has the renewed weights. q: [s, K, b] of all samples; also: if following"""
        if self.responsibilities == "fixed":
            also = held(q, data)
        return local_sgd(task, w, data, self.lr, only=shared.to(w), also=also)


def held(q: Tensor, data: Batches) -> Also:
    """The term mean_j sum_k q_jk l_k in place of a mixture's loss. q: [s, K, b] the shares in all samples"""
    starts = data.split.offsets[data.clients]

    def term(features: Tensor, outputs: Tensor, batch: Batch, rows: slice) -> Tensor:
        if features.dim() != 4:
            raise ModelError("model: found no log-probabilities of its parts, expected polyfed.models.mixture")
        share, y = q[rows, :, : batch.y.shape[1]], batch.y[:, :, None]
        if batch.places is not None:
            at = on_device(batch.places - starts[rows, None], q.device)
            share = q[rows].gather(2, at[:, None].expand(-1, q.shape[1], -1))
        each = features.gather(3, y[..., None].expand(-1, -1, q.shape[1], -1))[..., 0]
        own = outputs.log_softmax(2).gather(2, y)[..., 0]  # the mixture's, which is taken back
        return batch.mean(own - (share.transpose(1, 2) * each).sum(2))

    return term


def explained(task: Task, w: Tensor, mixing: Tensor, prior: Tensor, every: Batch) -> Tensor:
    """[s, K, b] the share of each part in every sample. prior: [s, K] or [s, K, b] logarithms of shares, unseen"""
    k = prior.shape[1]
    alone = w[:, None].repeat(1, k, 1)  # model k: all weight on part k
    away = IMPOSSIBLE * (1 - torch.eye(k, dtype=w.dtype, device=w.device))
    alone[..., mixing] = away.repeat_interleave(len(mixing) // k, 1)
    prior = prior if prior.dim() == 3 else prior[..., None]
    return (prior - task.losses(alone, every)).softmax(1)


def renewed(q: Tensor, every: Batch) -> Tensor:
    """[s, K] logarithms of the mean shares."""
    share = every.mean(q.transpose(1, 2))
    return (share / share.sum(1, keepdim=True)).clamp(min=1e-30).log()
