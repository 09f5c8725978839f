"""Metric: the computation of a model's score, its printing, and its better direction. `scores.py` has those known by
name; no other code depends on a score's name. The first of a run's metrics leads: it decides, and is shown first."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, SupportsFloat

import numpy as np

from polyfed.base.arguments import answer, checked
from polyfed.base.errors import ConfigError
from polyfed.base.settings import Configured, Setting, found, setting
from polyfed.base.values import Limits

if TYPE_CHECKING:  # a report reads metrics without torch
    from torch import Tensor

Kind = Literal["classes", "two classes", "numbers", "labels", "survival", "tokens"]
BETTER = r"^(higher|lower|near:-?\d+(\.\d+)?)$"


@dataclass(frozen=True)
class Predictions:
    """A model's outputs and the targets of the same b samples, from one or several clients."""

    output: Tensor  # [b, ...]
    target: Tensor  # [b, ...], integers for classes, [b, T] for those of tokens
    threshold: float | None = 0.0  # output between two classes: 0 for logits, 1/2 for probabilities; None: unknown

    def copy(self) -> Predictions:
        """A copy with tensors of its own, for a function that may write to them."""
        return Predictions(self.output.clone(), self.target.clone(), self.threshold)

    @cached_property
    def kind(self) -> Kind | None:
        """The kind of target: classes, numbers, labels (several a sample, all 0 or 1), survival, tokens; or None."""
        y, each = self.target, self.output.numel() == len(self.target)
        single = self.output.numel() == y.numel()
        if y.is_floating_point() and single and y.numel() > len(y) and bool(((y == 0) | (y == 1)).all()):
            return "labels"
        if self.output.dim() == 3 and self.output.shape[:2] == y.shape:
            return "tokens"
        if y.is_floating_point():
            return "numbers" if single else "survival" if each and y.dim() == 2 and y.shape[1] == 2 else None
        if self.output.dim() == 2 and self.output.shape[1] > 1:
            return "two classes" if self.output.shape[1] == 2 else "classes"
        return "two classes" if single and self.threshold is not None else None

    @cached_property
    def classes(self) -> np.ndarray:
        """[b] the true classes."""
        return self.target.reshape(-1).numpy()

    @cached_property
    def guess(self) -> np.ndarray:
        """[b] the predicted classes."""
        if self._several:
            return self.output.argmax(1).numpy()
        return (self.output.reshape(-1) > (self.threshold or 0.0)).long().numpy()

    @cached_property
    def probabilities(self) -> np.ndarray:
        """[b, C] probability of each class: softmax or sigmoid of logits, or the outputs if they are probabilities."""
        import torch

        if self.threshold == 0.5:
            p = self.output.double().clamp(0, 1)
            p = p if self._several else torch.stack([1 - p.reshape(-1), p.reshape(-1)], 1)
            return (p / p.sum(1, keepdim=True)).numpy()
        return self._logits.softmax(1).numpy()

    @cached_property
    def ranking(self) -> np.ndarray:
        """[b, C] for ranking samples by a class: its log-odds if outputs are logits, as probabilities round to 1."""
        if self.threshold == 0.5:
            return self.output.double().numpy() if self._several else self.probabilities
        import torch

        z = self._logits
        if z.shape[1] == 2:
            return (z - z.flip(1)).numpy()
        top = z.argmax(1, keepdim=True)
        most = z.gather(1, top)
        rest = (z - most).exp().sum(1, keepdim=True) - (z - most).exp()  # lost to rounding for the likeliest class
        without = z.scatter(1, top, -torch.inf)
        return (z - (rest.log() + most).scatter(1, top, without.logsumexp(1, keepdim=True))).numpy()

    @property
    def log_odds(self) -> np.ndarray:
        """[b] the log-odds of the second of two classes."""
        if self.threshold == 0.5:
            p = self.probabilities[:, 1].clip(1e-15, 1 - 1e-15)  # the log-odds of 0 and 1 are infinite
            return np.log(p / (1 - p))
        return self.ranking[:, 1]

    @cached_property
    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """([b, k] predicted, [b, k] true)."""
        b = len(self.target)
        return self.output.double().reshape(b, -1).numpy(), self.target.double().reshape(b, -1).numpy()

    @property
    def _several(self) -> bool:
        return self.output.dim() == 2 and self.output.shape[1] > 1

    @property
    def _logits(self) -> Tensor:
        import torch

        z = self.output.double()
        return z if self._several else torch.stack([torch.zeros(len(z), dtype=z.dtype), z.reshape(-1)], 1)


COMPUTE = Setting(
    doc="The score of `Predictions`; None for the loss, which the task computes. NaN or a ValueError: these samples "
    "have no such score."
)
TERMS = Setting(
    doc="Of `Predictions` [b] what each sample adds, for scores that are no means over samples, see `terms`. None: not "
    "known, and intervals then rest on the spread over splits alone."
)


@checked
@dataclass(frozen=True)
class Metric(Configured):
    """A measure of a client's model on the client's samples, as one number."""

    name: str = setting(doc="Name in files and tables.")
    unit: str = setting(
        "", doc='"%": a share, printed as a percentage; "target": in the unit of the targets; "": a plain number.'
    )
    better: str = setting("higher", doc='"higher", "lower", or such as "near:1": the nearer to 1 the better.')
    compute: Callable[[Predictions], Any] | None = field(
        default=None, repr=False, compare=False, metadata={"setting": COMPUTE}
    )
    per: Literal["sample", "client"] = setting(
        "client",
        doc='"sample": `compute` returns [b] values, and their mean is taken; "client": one number for all samples '
        "of a client.",
    )
    kind: Kind | None = setting(
        None,
        doc='Kind of target: "classes", "two classes", "numbers", "labels" (several, 0 or 1) or "survival"; None: any.',
    )
    root: bool = setting(False, doc="True: the square root of the mean over samples.")
    terms: Callable[[Predictions], np.ndarray] | None = field(
        default=None, repr=False, compare=False, metadata={"setting": TERMS}
    )
    title: str = setting("", doc="Name in a sentence.")
    decimals: Annotated[int, Limits(ge=0, le=100)] | None = setting(
        None, doc="Decimals that are printed; None: four significant figures."
    )
    lacks: str = setting("no value", doc='Why a client may have no score, such as "one class".')
    least: float | None = setting(None, doc="Lowest possible value; None: no bound.")
    most: float | None = setting(None, doc="Highest possible value; None: no bound.")
    classwise: Annotated[int, Limits(ge=0)] = setting(
        0,
        doc="0, or where it is taken class by class (or by those who have the event), so that it hangs on the "
        "smallest class, the number of classes that it is a mean over where there are two: 1 for AUC, 2 for "
        "balanced accuracy.",
    )
    guesses: bool = setting(
        False, doc="True where right guesses count class by class: two models may agree on every sample of a class."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bool(re.fullmatch(BETTER, self.better)), "better", "higher, lower, or such as near:1")
        self.require(self.span > 0, "most", "a number above the lowest")

    def __str__(self) -> str:
        return self.name

    @property
    def span(self) -> float:
        """The largest distance of two values."""
        return math.inf if self.least is None or self.most is None else self.most - self.least

    @property
    def pooled(self) -> bool:
        """True where its value on all samples together is the mean over clients, weighted by their samples."""
        return self.per == "sample" and not self.root

    @property
    def sign(self) -> float:
        """+1 when higher is better, -1 when lower is; 0 when neither is."""
        return {"higher": 1.0, "lower": -1.0}.get(self.better, 0.0)

    @property
    def aim(self) -> float:
        """The best value, for a metric that is better the nearer to it."""
        return float(self.better.removeprefix("near:"))

    def merit(self, value: SupportsFloat | np.ndarray) -> Any:
        """A value turned so that higher is better.

        Parameters
        ----------
        value : float or array
            One value, or several.

        Returns
        -------
        float or array
            Of the same shape.
        """
        given: Any = value
        return self.sign * given if self.sign else -abs(given - self.aim)

    @property
    def lost(self) -> float:
        """The value of a model that has diverged: infinitely bad. A score that samples do not have is NaN."""
        return -math.inf if self.sign > 0 else math.inf

    def fits(self, predictions: Predictions) -> bool:
        """True where it can be computed from such outputs and targets.

        Parameters
        ----------
        predictions : Predictions
            A sample of them.

        Returns
        -------
        bool
            True for outputs and targets of this metric's `kind`.
        """
        wider = {"two classes": "classes", "labels": "numbers"}.get(str(predictions.kind))
        return self.kind in (None, predictions.kind, wider)

    def of(self, predictions: Predictions) -> float:
        """Its value for one client's samples.

        Parameters
        ----------
        predictions : Predictions
            All of the client's outputs and targets.

        Returns
        -------
        float
            NaN where the samples have no such score; `lost` where outputs are not finite.
        """
        if not len(predictions.target) or self.compute is None:
            return math.nan
        if not bool(predictions.output.isfinite().all()):
            return self.lost
        values = self.computed(predictions)
        mean = float((values.double().numpy() if hasattr(values, "double") else values).mean())
        return math.sqrt(mean) if self.root else mean

    def computed(self, predictions: Predictions, needed: bool = False) -> Any:
        """The numbers that `compute` gives.

        Parameters
        ----------
        predictions : Predictions
            Samples that it fits.
        needed : bool
            True: a ValueError of `compute` is an error; False: it is NaN.

        Returns
        -------
        Tensor or array
            [b] where the metric is one "per sample", else of any shape.
        """
        assert self.compute is not None
        output, target = predictions.output, predictions.target
        subject = f"metrics: {self.name} on outputs {[*output.shape]} and targets {[*target.shape]}"
        try:
            values = answer(subject, self.compute, predictions.copy(), through=() if needed else (ValueError,))
        except ValueError:
            values = np.full(len(target), math.nan)
        if not hasattr(values, "double"):
            try:
                values = np.asarray(values, dtype=float)
            except (TypeError, ValueError):
                raise ConfigError(f"{subject}: {found(values, 'numbers')}") from None
        if self.per == "sample" and values.shape != target.shape[:1]:
            raise ConfigError(f"{subject}: found {[*values.shape]}, expected [{len(target)}], one for each sample")
        return values


def short(value: float) -> str:
    """A value for a line of progress."""
    return f"{value:.4g}" if math.isfinite(value) else "n/a"


def mean_of(values: np.ndarray) -> float:
    """The mean over the clients that have a value, infinite if a model diverged; NaN if none has one."""
    return math.nan if np.isnan(values).all() else float(np.nanmean(values))


def marked(values: Mapping[str, np.ndarray], counts: np.ndarray, metrics: Iterable[Metric]) -> dict[str, np.ndarray]:
    """Scores [n] of models, with `Metric.lost` in all of a client whose model has diverged; NaN: it has no score."""
    by_name = {m.name: m for m in metrics}
    infinite = np.isinf(np.stack([*values.values()])).any(0)
    # the client has samples, and its loss is no finite number or another score is infinite
    gone = (counts > 0) & (infinite | ~np.isfinite(values["loss"]))
    return {k: np.where(gone, by_name[k].lost if k in by_name else np.inf, v) for k, v in values.items()}


def diverged(values: Mapping[str, np.ndarray]) -> tuple[str, int] | None:
    """(score, client) of the first diverged model in scores of `marked`."""
    return next(((k, int(np.flatnonzero(np.isinf(v))[0])) for k, v in values.items() if np.isinf(v).any()), None)
