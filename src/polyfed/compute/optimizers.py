"""Local optimisers, and step sizes over the rounds: settings of a run that methods never see. `local_sgd` asks its
task for the optimiser, and the event loop scales the method's step sizes before every round."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from polyfed.base.typed import row_norms

Name = Literal["sgd", "momentum", "adam", "adamw"]
Advance = Callable[[Tensor, Tensor, float | Tensor], Tensor]


@dataclass(frozen=True)
class Optimizer:
    """A local optimiser, step by step that of torch.optim; each local solve starts with no memory.

        d <- d min(1, clip_norm / (||d|| + 1e-6))                                every client by its own norm
        sgd         w <- w - lr d
        momentum    m <- momentum m + d,   w <- w - lr m
        adam        m <- beta1 m + (1 - beta1) d,   v <- beta2 v + (1 - beta2) d^2
                    w <- w - lr m / (1 - beta1^k) / (sqrt(v / (1 - beta2^k)) + eps)                in the k-th step
        adamw       w <- (1 - lr weight_decay) w before the step of adam

    d is the direction of a method's local problem: the gradient with whatever the method adds, such as FedProx's pull.
    """

    name: Name = "sgd"
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None

    @property
    def plain(self) -> bool:
        """True where a step is lr times the direction, and no more."""
        return self.name == "sgd" and self.clip_norm is None

    def start(self, w: Tensor, only: Tensor | None = None) -> Advance:
        """The steps of one local solve of w: [s, p], as (models [m, p], directions [m, p], step size) -> next
        models."""
        # only: [p] or [s, p], 0 where a model stays as it is
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        k = 0

        def advance(w: Tensor, d: Tensor, lr: float | Tensor) -> Tensor:
            nonlocal k
            k, s = k + 1, len(w)
            if self.clip_norm is not None:
                d = d * (self.clip_norm / (row_norms(d) + 1e-6)).clamp(max=1)[:, None]
            if self.name == "sgd":
                return w - lr * d
            if self.name == "momentum":
                return w - lr * m[:s].mul_(self.momentum).add_(d)
            if self.name == "adamw":
                decay = lr * self.weight_decay
                w = w - decay * w * (1 if only is None else only if only.dim() == 1 else only[:s])
            m[:s].lerp_(d, 1 - self.beta1)
            v[:s].mul_(self.beta2).addcmul_(d, d, value=1 - self.beta2)
            size = (v[:s] / (1 - self.beta2**k)).sqrt_().add_(self.eps)
            return w - lr / (1 - self.beta1**k) * (m[:s] / size)

        return advance


class StepSizes(NamedTuple):
    """Factors of the methods' step sizes, from round to round."""

    decay: float = 1.0  # once every `every` rounds
    every: int = 1
    warmup: int = 0  # rounds of a linear rise to the full step
    cosine: int = 0  # rounds, warm-up included, after which half a cosine has fallen to zero; 0: none

    def at(self, t: int) -> float:
        """The factor in round t, from 0."""
        factor = self.decay ** (t // self.every)
        if t < self.warmup:
            return factor * (t + 1) / self.warmup
        if self.cosine:
            factor *= (1 + math.cos(math.pi * min(1.0, (t - self.warmup) / (self.cosine - self.warmup)))) / 2
        return factor
