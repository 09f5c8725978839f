"""Tables of a recipe: settings and whose they are, figures beside the printed ones, claims and what decides them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from polyfed.report import intervals
from polyfed.report.table import Cell, Table

Source = Literal["paper", "code", "ours"]


class Setting(NamedTuple):
    """One choice of an experiment and whose it is: the paper's text, the authors' released code, or ours."""

    key: str
    value: str
    source: Source


def listed(values: Iterable[float]) -> str:
    """Values in a line."""
    return ", ".join(f"{v:g}" for v in values)


def without(settings: Sequence[Setting], *keys: str) -> tuple[Setting, ...]:
    """Settings but for those that a recipe has its own way. Every key must be there, so that none is left by a typo."""
    assert not (unknown := set(keys) - {s.key for s in settings}), unknown
    return tuple(s for s in settings if s.key not in keys)


class Claim(NamedTuple):
    """A statement of a paper and our finding."""

    text: str
    holds: bool | None  # None: our runs do not decide it
    evidence: str
    p: float = float("nan")  # of no difference, where an interval decides
    edge: bool = False  # that interval ends within a tenth of its width of zero

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "undecided"}[self.holds]


def decided(text: str, low: float, high: float, p: float, unit: str = "", digits: str = "+.3g") -> Claim:
    """The claim that a difference is above zero, by its 95 % interval."""
    holds = True if low > 0 else False if high < 0 else None
    edge = min(abs(low), abs(high)) <= (high - low) / 10 and high > low
    evidence = f"difference {(low + high) / 2:{digits}}{unit}, 95 % interval {low:{digits}} to {high:{digits}}"
    return Claim(text, holds, evidence, p, edge)


def ordered(
    text: str, higher: np.ndarray, lower: np.ndarray, factor: float = 1.0, unit: str = "", share: float = 0.0
) -> Claim:
    """The claim that `higher` exceeds `lower` under the same seeds, by the 95 % interval of the mean paired difference.

    `share` is the tested share of samples that seeds divide anew (Nadeau and Bengio's variance, see
    `report.intervals`); 0: every seed draws its own samples, and the interval is Student's t. One seed never decides.
    """
    gap = factor * (np.asarray(higher, dtype=float) - np.asarray(lower, dtype=float))
    gap = gap[np.isfinite(gap)]
    if len(gap) < 2:
        return Claim(
            text, None, f"difference {gap.mean():+.3g}{unit} from one seed" if len(gap) else "no finished runs"
        )
    mean, (var, freedom) = float(gap.mean()), intervals.variance(intervals.Spread(gap), share)
    if not np.isfinite(var):  # the same under every seed: nothing was drawn
        return decided(text, mean, mean, 0.0 if mean else 1.0, unit)
    half = intervals.half_width(var, freedom)
    return decided(text, mean - half, mean + half, intervals.p_value(mean, var, freedom), unit)


def points(text: str, higher: np.ndarray, lower: np.ndarray, share: float = 0.0) -> Claim:
    """`ordered` of shares, whose difference is told in points of a hundred."""
    return ordered(text, higher, lower, 100, " points", share)


def claims_table(claims: Sequence[Claim]) -> Table:
    """Tabulate what was claimed, and what our runs say: each for itself, and all of the table together."""
    marks = {True: "gain", False: "loss", None: "quiet"}
    p = np.array([c.p for c in claims], dtype=float)
    count, clear = int(np.isfinite(p).sum()), intervals.holm(p)
    rows = []
    for c, compared, holds in zip(claims, np.isfinite(p), clear, strict=True):
        texts = [*(["decided" if holds else "not decided"] if compared else ["–"]), *(["edge"] if c.edge else [])]
        rows.append((Cell(c.text), Cell(c.verdict, {}, marks[c.holds]), Cell(c.evidence), Cell(", ".join(texts))))
    notes = (
        f"Holm: whether the difference is still decided at 5 % over all {count} intervals of this table together",
        "edge: the interval ends within a tenth of its width of zero; another processor may decide otherwise",
    )
    heads = ("claim<", "here<", "evidence<", "over the table (Holm)<")
    return Table("Claims", heads, tuple(rows), notes if count else ())


def settings_table(settings: Sequence[Setting]) -> Table:
    """Every setting and whose it is."""
    rows = tuple((Cell(s.key), Cell(s.source, {}, "quiet"), Cell(s.value)) for s in settings)
    return Table("Setting", ("what<", "whose<", "value<"), rows)


def ours(values: Iterable[float], factor: float = 1.0, decimals: int = 2, mark: str = "") -> Cell:
    """Mean and standard deviation over seeds as a cell."""
    v = factor * np.asarray(list(values), dtype=float)
    v = v[np.isfinite(v)]
    if not len(v):
        return Cell("–", {"mean": None, "std": None}, "quiet")
    spread = float(v.std(ddof=1)) if len(v) > 1 else float("nan")
    text = f"{v.mean():.{decimals}f}" + (f" ± {spread:.{decimals}f}" if len(v) > 1 else "")
    return Cell(text, {"mean": float(v.mean()), "std": spread}, mark)


def paper(text: str | float | None) -> Cell:
    """A figure printed in the paper."""
    return Cell("–" if text is None else str(text), {}, "quiet")


def beside(
    title: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[tuple[str | float | None, Cell]]],
    notes: Sequence[str] = (),
    first: str = "method",
) -> Table:
    """Paper and ours side by side, a pair of cells per column; rows map a label to [(paper, ours), ...]."""
    heads = [f"{first}<", *(text for c in columns for text in (f"{c}, paper", f"{c}, ours"))]
    body = []
    for label, pairs in rows.items():
        cells = [Cell(label, {first: label})]
        for column, (printed, mine) in zip(columns, pairs, strict=True):
            text = paper(printed)
            cells.append(Cell(text.text, {f"{column} paper": text.text}, text.mark))
            cells.append(Cell(mine.text, {f"{column} {k}": v for k, v in mine.values.items()}, mine.mark))
        body.append(tuple(cells))
    return Table(title, tuple(heads), tuple(body), tuple(notes))


def told_by(title: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table whose machine columns are named by their heads."""
    names = [h.removesuffix("<") for h in heads]
    body = (
        tuple(Cell(c.text, {f"{name} {k}": v for k, v in c.values.items()} or {name: c.text}, c.mark)
              for name, c in zip(names, row, strict=True))
        for row in rows
    )  # fmt: skip
    return Table(title, tuple(heads), tuple(body))
