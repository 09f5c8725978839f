"""Metrics: what a model is judged by. A `Metric` says how it is computed, how it is printed and which way is better;
nothing else in the code knows one by its name. The first of a run's metrics leads: it decides and is shown first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # a report reads metrics without torch
    from torch import Tensor

Kind = Literal["classes", "numbers"]


@dataclass(frozen=True)
class Seen:
    """Outputs of a model and the targets of the same b samples, of one client or of several.

    output: [b, ...]     target: [b, ...], integers for classes
    threshold: the output at which a model with one output prefers neither of two classes; None: not known
    """

    output: Tensor
    target: Tensor
    threshold: float | None = 0.0

    @cached_property
    def kind(self) -> Kind | None:
        """What is predicted: "classes", "numbers" (one output per number), or None where neither is known."""
        single = self.output.numel() == self.target.numel()
        if self.target.is_floating_point():
            return "numbers" if single else None
        if self.output.dim() == 2 and self.output.shape[1] > 1:
            return "classes"
        return "classes" if single and self.threshold is not None else None


@dataclass(frozen=True)
class Metric:
    """One number that says how good a client's model is on the client's samples.

    name: in files and tables
    unit: "%": a share, printed in per cent; "target": in the unit of the targets; "": a plain number
    better: "higher", "lower", or "near:1", nearer to that number
    compute: of a `Seen`; None for the loss, which the task knows
    per: "sample": it gives [b] values, whose mean is taken chunk by chunk; "client": a number, from all samples of one
    kind: what must be predicted, "classes" or "numbers"; None: anything
    root: whether the square root of a mean over samples is taken
    title: the name in a sentence     span: how far apart two values can be
    """

    name: str
    unit: str = ""
    better: str = "higher"
    compute: Callable[[Seen], Any] | None = field(default=None, repr=False)
    per: Literal["sample", "client"] = "client"
    kind: Kind | None = None
    root: bool = False
    title: str = ""
    span: float = math.inf

    def __str__(self) -> str:
        return self.name

    @property
    def sign(self) -> float:
        """+1 when higher is better, else -1."""
        return 1.0 if self.better == "higher" else -1.0

    @property
    def pooled(self) -> bool:
        """Whether its mean over all samples, whoever has them, is the mean over clients weighted by their samples."""
        return self.per == "sample" and not self.root

    def merit(self, value: Any) -> Any:
        """A value, or an array of them, as something of which more is better."""
        if self.better.startswith("near:"):
            return -abs(value - float(self.better[5:]))
        return self.sign * value

    def fits(self, seen: Seen) -> bool:
        return self.kind in (None, seen.kind)

    def of(self, seen: Seen) -> float:
        """Its value for one client's samples; NaN where there is none."""
        if not len(seen.target) or self.compute is None or not bool(seen.output.isfinite().all()):
            return math.nan
        values = self.compute(seen)
        mean = float(values.double().mean()) if hasattr(values, "double") else float(values)
        return math.sqrt(mean) if self.root else mean


def _correct(seen: Seen) -> Tensor:
    output, target = seen.output, seen.target
    if output.dim() == 2 and output.shape[1] > 1:
        return (output.argmax(1) == target).to(output.dtype)
    assert seen.threshold is not None
    return ((output.reshape(target.shape) > seen.threshold) == target).to(output.dtype)


def _squared(seen: Seen) -> Tensor:
    gap = seen.output.reshape(seen.target.shape) - seen.target
    return gap.square().flatten(1).mean(1) if gap.dim() > 1 else gap.square()


LOSS = Metric("loss", better="lower", per="sample")
ACCURACY = Metric("accuracy", "%", "higher", _correct, "sample", "classes", span=1.0)
RMSE = Metric("rmse", "target", "lower", _squared, "sample", "numbers", root=True, title="RMSE")
DEFAULT = (ACCURACY, RMSE, LOSS)  # the first that fits leads where none is asked for
KNOWN = {m.name: m for m in DEFAULT}
BETTER = r"^(higher|lower|near:-?\d+(\.\d+)?)$"


def written(metric: Metric) -> dict[str, Any]:
    """The lead metric as summary.json holds it; `higher_is_better` is for those who read it without polyfed."""
    return {
        "metric": metric.name,
        "unit": metric.unit,
        "better": metric.better,
        "higher_is_better": metric.better == "higher",
    }


def read(summary: Mapping[str, Any]) -> Metric:
    """The lead metric of a summary.json. What an older version left out is that of the known metric of the name."""
    name = str(summary["metric"])
    if name in KNOWN:
        return KNOWN[name]
    better = "higher" if summary["higher_is_better"] else "lower"
    return Metric(name, summary.get("unit") or "", summary.get("better") or better)


def leading(columns: Any) -> Metric:
    """The metric that leads where nothing says which: the first of the default ones that there is."""
    return next((m for m in DEFAULT if m.name in columns), LOSS)
