"""Robust rules: values [s, p] of a cohort -> [p], instead of their mean. Every upload counts the same: a number of
samples is a claim that an attacker may make. Columns are worked through in blocks, which need little memory beside
the uploads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import floor
from typing import Any

import torch
from torch import Tensor

from polyfed.base.settings import setting
from polyfed.base.typed import row_norms, weighted_sum
from polyfed.runs import threats
from polyfed.runs.threats import RULES

BLOCK = 1 << 22  # numbers per block of columns


@dataclass(frozen=True)
class Rule(threats.Rule):
    """Base of the robust rules."""

    def __init_subclass__(cls, name: str, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.name = name
        RULES.add(name, cls)

    def __call__(self, values: Tensor) -> Tensor:
        """values: [s, p] -> [p]."""
        raise NotImplementedError

    def idle(self, s: int) -> str:
        """The reason why the rule does nothing, or is not defined, for so many uploads at a time.

        Parameters
        ----------
        s : int
            Uploads at a time.

        Returns
        -------
        str
            "" where the rule is at work.
        """
        return ""


def _by_columns(values: Tensor, rule: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([rule(block) for block in _blocks(values)])


def _blocks(values: Tensor) -> Iterator[Tensor]:
    width = max(1, BLOCK // len(values))
    return (values[:, k : k + width] for k in range(0, max(1, values.shape[1]), width))


def gram(values: Tensor) -> Tensor:
    """[s, s] float64 inner products of the rows of `values: [s, p]`."""
    out = torch.zeros(len(values), len(values), dtype=torch.float64, device=values.device)
    for block in _blocks(values):
        b = block.double()
        out += b @ b.T
    return out


def false(share: float, s: int) -> int:
    """The number of false uploads among s by a share, rounded down."""
    return floor(share * s + 1e-9)  # 0.29 * 100 is 28.999999999999996


def combine(share: Tensor, values: Tensor) -> Tensor:
    """sum_i share_i values_i, where a row of share 0 does not count even if it is not finite."""
    rows = share.nonzero()[:, 0]
    return weighted_sum(share[rows], values[rows])


@dataclass(frozen=True)
class Median(Rule, name="median"):
    """The median of every coordinate; of an even number of values, the mean of the middle two (Yin et al., 2018)."""

    def __call__(self, values: Tensor) -> Tensor:
        s = len(values)

        def rule(block: Tensor) -> Tensor:
            ordered = block.sort(0).values
            return (ordered[(s - 1) // 2] + ordered[s // 2]) / 2

        return _by_columns(values, rule)

    def idle(self, s: int) -> str:
        return "" if s > 2 else "the median of fewer than 3 is their mean"


@dataclass(frozen=True)
class TrimmedMean(Rule, name="trimmed-mean"):
    """The mean of every coordinate without its largest and smallest values (Yin et al., 2018)."""

    share: float = setting(0.2, ge=0, lt=0.5, doc="Share of the values cut off at each end, rounded down; below 1/2.")

    def __call__(self, values: Tensor) -> Tensor:
        cut = false(self.share, len(values))
        return _by_columns(values, lambda block: block.sort(0).values[cut : len(values) - cut].mean(0))

    def idle(self, s: int) -> str:
        return (
            "" if not self.share or false(self.share, s) else f"share = {self.share:g} of them is none, so none is cut"
        )


@dataclass(frozen=True)
class Krum(Rule, name="krum"):
    """The upload with the least sum of squared distances to its s - f - 2 nearest others (Blanchard et al., 2017)."""

    share: float = setting(
        0.2,
        ge=0,
        lt=0.5,
        doc="Share of the uploads that may be false: f = share * s, rounded down. Its guarantee needs s >= 2 f + 3.",
    )

    def __call__(self, values: Tensor) -> Tensor:
        return values[self.scores(values).argmin()].clone()

    def idle(self, s: int) -> str:
        f = false(self.share, s)
        return "" if s >= f + 3 else f"of {f} false ones Krum compares s - f - 2 others, which needs {f + 3} or more"

    def scores(self, values: Tensor) -> Tensor:
        """Sums of squared distances to the s - f - 2 nearest others (at least one, where there is one).

        Parameters
        ----------
        values : Tensor
            [s, p] the uploads.

        Returns
        -------
        Tensor
            [s] one sum for each.
        """
        s = len(values)
        G = gram(values)
        square = (G.diagonal()[:, None] + G.diagonal() - 2 * G).clamp(min=0)  # rounding of equal ones may be below 0
        others = square.fill_diagonal_(torch.inf).sort(1).values
        return others[:, : min(max(1, s - false(self.share, s) - 2), s - 1)].sum(1)


@dataclass(frozen=True)
class MultiKrum(Rule, name="multi-krum"):
    """The mean of the s - f uploads of the least Krum scores (Blanchard et al., 2017)."""

    share: float = setting(
        0.2, ge=0, lt=0.5, doc="Share of the uploads that may be false: f = share * s, rounded down."
    )

    def __call__(self, values: Tensor) -> Tensor:
        krum, s = Krum(self.share), len(values)
        best = krum.scores(values).argsort(stable=True)[: s - false(self.share, s)]
        return _by_columns(values, lambda block: block[best].mean(0))

    def idle(self, s: int) -> str:
        none = self.share and not false(self.share, s)
        return f"share = {self.share:g} of them is none, so none is left out" if none else Krum(self.share).idle(s)


@dataclass(frozen=True)
class GeometricMedian(Rule, name="geometric-median"):
    """The point with the least sum of distances to the uploads, by Weiszfeld's iteration (Pillutla et al., 2022)."""

    iterations: int = setting(1000, ge=0, doc="At most.")
    tolerance: float = setting(
        1e-10,
        ge=0,
        doc="Stop when no weight moves by more; distances below the same share of the largest count as that.",
    )

    def __call__(self, values: Tensor) -> Tensor:
        # an iterate is sum_i a_i v_i, so its distances follow from inner products; centred, for their precision
        centred = values - Median()(values)
        G = gram(centred)
        a = G.new_full((len(values),), 1 / len(values))
        for _ in range(self.iterations):
            distance = (a @ G @ a - 2 * (G @ a) + G.diagonal()).clamp(min=0).sqrt()
            weight = 1 / distance.clamp(min=max(1e-100, self.tolerance * float(distance.max())))
            new = weight / weight.sum()
            done = (new - a).abs().max() <= self.tolerance
            a = new
            if done:
                break
        return combine(a, values)

    def idle(self, s: int) -> str:
        return "" if s > 2 else "any point between two uploads is their geometric median"


@dataclass(frozen=True)
class NormClipping(Rule, name="norm-clipping"):
    """The mean of the uploads, each shortened to a norm of at most `bound` (Sun et al., 2019).

    Meant for updates: a model is taken relative to the one of the same name that all clients received, and as it is
    where they received several (IFCA).
    """

    bound: float | None = setting(None, gt=0, doc="Largest norm; None: the median of the cohort's norms.")

    def __call__(self, values: Tensor) -> Tensor:
        norms = row_norms(values, torch.float64)
        bound = norms.quantile(0.5) if self.bound is None else self.bound
        return combine((bound / norms).clamp(max=1).nan_to_num(1) / len(values), values)  # 0 / 0: zeros stay

    def idle(self, s: int) -> str:
        return "" if s > 1 or self.bound is not None else "the median norm of one upload is its own; set bound"
