"""Differences between runs on the same splits, with intervals (docs/verdicts-statistics.md) and an honest verdict."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polyfed.metrics.metric import Metric
from polyfed.report import intervals
from polyfed.report.intervals import Spread
from polyfed.report.words import listed
from polyfed.runs.numbers import Added

LARGE = 0.2  # of the unit of `Evidence`: an interval that cannot tell such a gain from none says nothing
SMALL = 0.02  # of the unit: the gain that the report says what it takes to see


@dataclass(frozen=True)
class Interval:
    """A mean gain and its confidence interval; low and high are NaN where there is no spread to take it from."""

    mean: float
    low: float
    high: float
    seeds: int  # pairs that it rests on
    p: float = math.nan  # of no gain, for a joint verdict
    clear: bool = False  # differs from zero, jointly over all clients where they are judged together
    enough: str = ""  # more data that would do for a verdict, where the interval is too wide
    why: str = ""  # the reason, as a verdict, where there is no interval
    same: bool = False  # known to be smaller than what is printed can show: no verdict, however clear

    @property
    def sign(self) -> int | None:
        """+1 or -1 for a clear gain or loss, 0 for an unclear one, None without an interval or with too wide a one."""
        clear = self.clear and not self.same
        return None if self.enough or not self.known else int(np.sign(self.mean)) if clear else 0

    @property
    def word(self) -> str:
        """The verdict on this gain alone; "" where there can be none."""
        return {1: "gains", -1: "loses"}.get(self.sign or 0, "undecided" if self.sign == 0 or self.enough else "")

    @property
    def known(self) -> bool:
        """True where there is an interval."""
        return math.isfinite(self.low)


@dataclass(frozen=True, eq=False)
class Evidence:
    """Evidence for a gain."""

    spread: Spread
    share: float | None = 0.0  # tested share of the samples; None: every split tests the same ones
    samples: int = 0  # the client's, or all
    unit: float = math.inf  # the metric's range if it is bounded, else the reference's mean value
    range: float = math.inf  # of a bounded metric
    # One site's gain between two models that are everybody's: mostly luck of the patients that all training sets share,
    # which no splits of these patients show (docs/verdicts.md). It has an interval for these trained models alone, from
    # one split or a fixed test set.
    common: bool = False
    step: float = 0.0  # the smallest gain that printed figures show

    def interval(self, comparisons: int = 1) -> Interval:
        """95 % over all `comparisons` together (Bonferroni), within what is possible for the metric."""
        gain, splits = self.spread.gain, len(self.spread.means)
        if self.why:
            return Interval(gain, math.nan, math.nan, splits, why=self.why)
        var, freedom = intervals.variance(self.spread, self.share)
        half = intervals.half_width(var, freedom, comparisons)
        p = intervals.p_value(gain, var, freedom, comparisons)
        low, high = max(gain - half, -self.range), min(gain + half, self.range)
        clear = abs(gain) > half
        enough = self._enough(comparisons) if not clear and half > LARGE * self.unit else ""
        same = abs(gain) < self.step and (clear or max(-low, high) < self.step)
        return Interval(gain, low, high, splits, p, clear=clear, enough=enough, same=same)

    @property
    def why(self) -> str:
        """The reason, as a verdict, for having no interval; "" with one."""
        splits = len(self.spread.means)
        if not splits:
            return UNPAIRED
        if self.spread.parts is not None and self.spread.sampling is None:
            return LONE
        unseen = self.share is None and self.spread.sampling is None  # seeds of one test set say nothing of samples
        if splits > 1 and (unseen or (self.common and self.share is not None)):
            return BLIND
        if math.isfinite(intervals.variance(self.spread, self.share)[0]):
            return ""
        return SAME if splits > 1 else ONE_SEED

    def _enough(self, comparisons: int) -> str:
        if self.spread.rare:
            return "more samples of the rarest class"
        need = intervals.needed(self.spread, self.share, LARGE * self.unit, comparisons)
        if need is None:
            return "more seeds"
        if need.splits:
            return f"{need.splits} seeds"
        return f"about {round_up(self.samples * need.times):,} samples" if math.isfinite(need.times) else OTHERS


def round_up(number: float) -> int:
    """To two figures, upwards."""
    step = 10 ** max(0, math.floor(math.log10(max(number, 1))) - 1)
    return math.ceil(number / step) * step


def mean_of(values: Iterable[float]) -> float:
    """Mean of the finite numbers; NaN when there is none."""
    v = [float(x) for x in values if math.isfinite(x)]
    return sum(v) / len(v) if v else math.nan


def sample_std(values: Sequence[float] | np.ndarray) -> float:
    """Standard deviation of a sample (ddof = 1); NaN for fewer than two numbers."""
    v = np.asarray(values, dtype=float)
    v = v[np.isfinite(v)]
    return float(v.std(ddof=1)) if len(v) > 1 else math.nan


@dataclass(frozen=True)
class Verdict:
    """Advice to one client (or on the mean over clients)."""

    choice: str | None  # the method to use, where that is clear
    text: str
    best: str | None  # the method with the best mean
    gains: Mapping[str, Interval]  # over `reference`, in the metric's units, positive when better
    reference: str | None  # the own model, if there is one

    @property
    def shown(self) -> str | None:
        """The method whose gain belongs beside the verdict: the chosen one, else the best of those compared."""
        if self.choice in self.gains:
            return self.choice
        finite = {label: g.mean for label, g in self.gains.items() if math.isfinite(g.mean)}
        return max(finite, key=lambda label: finite[label]) if finite else None


UNCLEAR = "no clear difference"
ONE_SEED = "not decided (one seed)"
BLIND = "not decided (seeds do not show the chance in it)"
SAME = "not decided (the same difference under every seed)"
LONE = "not decided (one test sample)"
UNPAIRED = "not decided (no seed in common)"


def reason(why: str) -> str:
    """The words in the brackets."""
    return why.partition("(")[2].removesuffix(")")


OTHERS = "more than a hundred times as many samples: not with such sites"
FEW = "too few seeds or samples for a verdict"
UNTESTED = "no test samples"
ALONE = "nothing to compare with"

SHARED = ("common", "personalised")  # the roles of methods that clients take part in together

Against = Callable[[str, str], Evidence]  # (method, what it is held against) -> what is known of its gain


def verdict(
    means: Mapping[str, float],
    roles: Mapping[str, str],
    against: Against,
    judged: tuple[str, Mapping[str, Interval]] | None = None,
) -> Verdict:
    """Decide between methods with the given `means` (higher is better) and `roles` (see `Numbers.role`).

    A method is clearly better when its interval against the reference lies above zero, jointly over all methods, so
    that the best of many is not believed too easily. `judged` has the reference and gains judged jointly with other
    clients'.
    """
    means = {label: m for label, m in means.items() if math.isfinite(m) and roles[label] != "oracle"}
    if not means:
        return Verdict(None, UNTESTED, None, {}, None)
    best = max(means, key=lambda label: means[label])
    reference, others = sides(means, roles)
    if judged is not None:
        reference, others = judged[0], [x for x in judged[1] if x in means]
    if reference not in means or not others:
        return Verdict(None, ALONE, best, {}, reference)
    gains = {x: judged[1][x] if judged else against(x, reference).interval(len(others)) for x in others}
    signs = [g.sign for g in gains.values()]
    if all(s is None for s in signs):
        shown = sorted(gains.values(), key=lambda g: -g.mean if math.isfinite(g.mean) else math.inf)  # the best first
        enough = [g.enough for g in shown if g.enough]
        text = f"{FEW}; it would take {enough[0]}" if enough else shown[0].why
        return Verdict(None, text, best, gains, reference)
    clear = [x for x in others if gains[x].sign == 1]
    choice = max(clear, key=lambda x: gains[x].mean) if clear else reference if all(s == -1 for s in signs) else None
    # in doubt the simpler one: a personalised model must clearly beat the best common one that is clearly better
    simpler = [x for x in clear if roles[x] == "common"]
    if choice is not None and roles[choice] == "personalised" and simpler:
        common = max(simpler, key=lambda x: gains[x].mean)
        choice = choice if against(choice, common).interval().sign == 1 else common
    losing = [x for x in others if gains[x].sign == -1]
    if choice is None and losing:
        rest = listed([x for x in (_words(reference, roles), *others) if x not in losing]).replace(" and ", " or ")
        return Verdict(None, f"{rest} ({listed(losing)} lose{'s' * (len(losing) == 1)})", best, gains, reference)
    return Verdict(choice, _words(choice, roles), best, gains, reference)


def sides(means: Mapping[str, float], roles: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """(what methods are held against, the best own model, else yardstick, else common one; the methods that are)."""
    reference = next(
        (
            max(of, key=lambda x: means[x])
            for role in ("own", "yardstick", "common")
            if (of := [x for x in means if roles[x] == role])
        ),
        None,
    )
    return reference, [x for x in means if x != reference and roles[x] in SHARED]


def _words(choice: str | None, roles: Mapping[str, str]) -> str:
    if choice is None:
        return UNCLEAR
    role = roles[choice]
    alone = role != "personalised" and sum(r == role for r in roles.values()) == 1
    return role if alone else f"{role} ({choice})"


def evidence(
    metric: Metric,
    gains: Sequence[float] | np.ndarray,
    parts: Sequence[Added],
    samples: tuple[float, int],
    level: float,
    redrawn: bool = False,
    one_test: bool = False,
    common: bool = False,
) -> Evidence:
    """Evidence on one client's gain, or on another combination of its scores, positive when better.

    `gains` [S] are NaN in splits without one, `parts` each test sample's part of them, and `samples` (tested share,
    number). `level` is a typical size of an unbounded metric; clients `redrawn` hold other samples under every seed;
    `one_test`: all splits test the same samples, where these are not known.
    """
    means, span = np.array([g for g in gains if math.isfinite(g)]), metric.span
    spread, alike = _sampled(metric, means, parts if len(parts) == len(gains) else (), floor(metric, *samples))
    fixed = not redrawn and (alike if len(parts) == len(gains) > 0 else one_test)
    unit = span if math.isfinite(span) else level
    return Evidence(spread, None if fixed else samples[0], samples[1], unit, span, common)


def _sampled(metric: Metric, means: np.ndarray, parts: Sequence[Added], floor: float) -> tuple[Spread, bool]:
    """(the spread of a site's gain, True if every split tests the same samples); `means` [S] are the known gains."""
    if not parts or not len(means):
        return Spread(means, floor=floor), False
    alike = len(parts) > 1 and all(np.array_equal(parts[0][0], samples) for samples, _ in parts[1:])
    distinct, place = np.unique(np.concatenate([samples for samples, _ in parts]), axis=0, return_inverse=True)
    values = np.full((len(parts), len(distinct)), math.nan)
    row = np.repeat(np.arange(len(parts)), [len(samples) for samples, _ in parts])
    values[row, place.reshape(-1)] = np.concatenate([v for _, v in parts])
    if np.isfinite(values).any(1).sum() != len(means):
        return Spread(means, floor=floor), alike
    span = metric.span if math.isfinite(metric.span) else 0.0
    two = metric.kind == "classes" and not span and {*distinct[:, 1].tolist()} <= {0, 1}
    classes = distinct[:, 1] if metric.classwise or two else None
    spread = intervals.spread(values, span, distinct[:, 0], classes, metric.classwise, metric.guesses)
    return replace(spread, means=means, floor=floor), alike


def floor(metric: Metric, share: float, total: int) -> float:
    """The least spread over seeds to believe without scores per sample: half a sample's part of a bounded metric."""
    span = metric.span if math.isfinite(metric.span) else float(metric.unit == "%")
    return 0.5 * span / max(round(share * total), 1)


def together(sites: Sequence[Evidence], means: np.ndarray | None = None, weights: np.ndarray | None = None) -> Evidence:
    """Evidence on the mean over clients, see `mean_spread`; `means` [S] where some lack a value in a split."""
    whole = intervals.mean_spread([e.spread for e in sites], means, weights)
    drawn = [e.share for e in sites if e.share is not None]
    share = float(np.mean(drawn)) if drawn else None
    return Evidence(whole, share, sum(e.samples for e in sites), sites[0].unit, sites[0].range, step=sites[0].step)


def jointly(gains: Sequence[Interval]) -> list[Interval]:
    """Intervals with `clear` decided for all of them together (Holm)."""
    clear = intervals.holm(np.array([g.p for g in gains]))
    return [replace(g, clear=bool(c)) for g, c in zip(gains, clear, strict=True)]
