"""Local optimisers, and step sizes over the rounds: settings of a run that methods never see. `local_sgd` asks its
task for the optimiser, and the event loop scales the method's step sizes before every round."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.base.registry import Registry
from polyfed.base.settings import Configured, setting
from polyfed.base.typed import row_norms
from polyfed.base.values import COUNTED

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


@dataclass(frozen=True)
class SGD(Configured):
    table: ClassVar[str] = "optimizer"


@dataclass(frozen=True)
class Momentum(SGD):
    momentum: float = setting(0.9, ge=0, lt=1, doc="Share of the last direction that is kept.")


@dataclass(frozen=True)
class Adam(SGD):
    beta1: float = setting(0.9, ge=0, lt=1, doc="Decay rate of the first moment.")
    beta2: float = setting(0.999, ge=0, lt=1, doc="Decay rate of the second moment.")
    eps: float = setting(1e-8, gt=0, le=COUNTED, doc="Added to the divisor.")


OPTIMIZERS: Registry[type[SGD]] = Registry("optimizer")
OPTIMIZERS |= {"sgd": SGD, "momentum": Momentum, "adam": Adam, "adamw": Adam}


def optimizer_of(text: str, weight_decay: float = 0.0, clip_norm: float | None = None) -> Optimizer:
    """The optimiser of a text such as adam:beta1=0.8. Raises ConfigError for a text that names none."""
    name: Any = text.partition(":")[0].strip()
    return Optimizer(name, **vars(OPTIMIZERS.read(text, "optimizer")), weight_decay=weight_decay, clip_norm=clip_norm)


def _warmup() -> int:
    return setting(0, ge=0, le=COUNTED, doc="Rounds in which step sizes rise to their full value.")


class StepSizes(Configured):
    """Factors of the methods' step sizes, from round to round, after a linear rise."""

    table: ClassVar[str] = "lr-schedule"
    warmup: int

    def at(self, t: int) -> float:
        """The factor in round t, from 0."""
        factor = self.risen(t)
        return factor * (t + 1) / self.warmup if t < self.warmup else factor

    def risen(self, t: int) -> float:
        """The factor without the rise."""
        return 1.0


@dataclass(frozen=True)
class Constant(StepSizes):
    warmup: int = _warmup()  # pyrefly: ignore[bad-override]


@dataclass(frozen=True)
class Exponential(StepSizes):
    factor: float = setting(gt=0, le=1, doc="Factor of the step sizes.")
    every: int = setting(1, ge=1, le=COUNTED, doc="Rounds between two changes.")
    warmup: int = _warmup()  # pyrefly: ignore[bad-override]

    def risen(self, t: int) -> float:
        return self.factor ** (t // self.every)


@dataclass(frozen=True)
class Cosine(StepSizes):
    rounds: int = setting(ge=1, le=COUNTED, doc="Rounds until half a cosine has fallen to zero, warm-up included.")
    warmup: int = _warmup()  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.warmup < self.rounds, "rounds", f"more than warmup = {self.warmup}")

    def risen(self, t: int) -> float:
        past = max(0, t - self.warmup)
        return (1 + math.cos(math.pi * min(1.0, past / (self.rounds - self.warmup)))) / 2


LR_SCHEDULES: Registry[type[StepSizes]] = Registry("lr-schedule")
LR_SCHEDULES |= {"constant": Constant, "exponential": Exponential, "cosine": Cosine}


def step_sizes_of(text: str) -> StepSizes:
    """The step sizes of a text such as cosine:rounds=60,warmup=5. Raises ConfigError for a text that names none."""
    return LR_SCHEDULES.read(text, "lr-schedule")
