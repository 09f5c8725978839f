"""Who gains: differences between methods on the same splits, with intervals and an honest verdict.

Pairing: runs of the same seed share the split, so a difference is taken within the seed first and averaged after.
How an interval is made and what it covers is in `intervals`; docs/verdicts.md has its measured error rates.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from polyfed.metrics.metric import Metric
from polyfed.report import intervals
from polyfed.report.intervals import Spread
from polyfed.report.read import Study
from polyfed.runs import schema as files

LARGE = 0.2  # of the unit of `Evidence`: an interval that cannot tell such a gain from none says nothing
SMALL = 0.02  # of the unit: the gain that the report says what it takes to see


@dataclass(frozen=True)
class Interval:
    """A mean gain and its confidence interval; low and high are NaN where there is no spread to take it from.

    seeds: number of pairs it rests on     p: p value of no gain, for a joint verdict
    clear: whether the gain differs from zero, jointly over all clients where they are judged together
    enough: "" or what would be enough for a verdict, where the interval is too wide to say anything
    why: "" or why there is no interval, as a verdict
    """

    mean: float
    low: float
    high: float
    seeds: int
    p: float = math.nan
    clear: bool = False
    enough: str = ""
    why: str = ""

    @property
    def sign(self) -> int | None:
        """+1 or -1 for a clear gain or loss, 0 for an unclear one, None without an interval or with too wide a one."""
        return None if self.enough or not self.known else int(np.sign(self.mean)) if self.clear else 0

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low)


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a gain rests on.

    share: of the samples, how many are tested; None: the same are in every split, and there is no interval without
    scores per sample     samples: the client's, or all
    unit: the metric's range if it is bounded, else the reference's mean value     range: of a bounded metric
    common: whether it is one site's, between two models that are everybody's. Their difference there is mostly luck of
    the patients that all training sets share, which no splits of these patients show (docs/verdicts.md): it has an
    interval as one of these trained models only, from one split or a fixed test set
    """

    spread: Spread
    share: float | None = 0.0
    samples: int = 0
    unit: float = math.inf
    range: float = math.inf
    common: bool = False

    def interval(self, comparisons: int = 1) -> Interval:
        """95 % over all `comparisons` together (Bonferroni), within what is possible for the metric."""
        gain, splits = self.spread.gain, len(self.spread.means)
        if self.why:
            return Interval(gain, math.nan, math.nan, splits, why=self.why)
        var, freedom = intervals.variance(self.spread, self.share)
        half = intervals.half_width(var, freedom, comparisons)
        p = intervals.p_value(gain, var, freedom, comparisons)
        low, high = max(gain - half, -self.range), min(gain + half, self.range)
        enough = self._enough(comparisons) if abs(gain) <= half and half > LARGE * self.unit else ""
        return Interval(gain, low, high, splits, p, clear=abs(gain) > half, enough=enough)

    @property
    def why(self) -> str:
        """Why there is no interval, as a verdict; "": there is one."""
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
        return f"{need.splits} seeds" if need.splits else f"about {round_up(self.samples * need.times):,} samples"


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
    """What one client (or the mean over clients) should do.

    choice: the method to use, or None when nothing is clear     text: the verdict in words
    best: the method with the best mean     gains: of every other method against `reference`, in the metric's units,
    positive when better     reference: what they are held against, the own model if there is one
    """

    choice: str | None
    text: str
    best: str | None
    gains: Mapping[str, Interval]
    reference: str | None

    @property
    def shown(self) -> str | None:
        """The method whose gain belongs beside the verdict: the chosen one, else the best of those compared."""
        if self.choice in self.gains:
            return self.choice
        known = {label: g.mean for label, g in self.gains.items() if math.isfinite(g.mean)}
        return max(known, key=lambda label: known[label]) if known else None


UNCLEAR = "no clear difference"
ONE_SEED = "not decided (one seed)"
BLIND = "not decided (seeds do not show the chance in it)"
SAME = "not decided (the same difference under every seed)"
LONE = "not decided (one test sample)"
UNPAIRED = "not decided (no seed in common)"


def reason(why: str) -> str:
    """What is in the brackets."""
    return why.partition("(")[2].removesuffix(")")


FEW = "too few seeds or samples for a verdict"
UNTESTED = "no test samples"
ALONE = "nothing to compare with"

SHARED = ("common", "personalised")  # the roles of methods that clients take part in together

Added = tuple[np.ndarray, np.ndarray]  # ([m, 2] the test samples of a split, see `files.samples`, [m] what each adds)
Against = Callable[[str, str], Evidence]  # (method, what it is held against) -> what is known of its gain


def verdict(
    means: Mapping[str, float],
    roles: Mapping[str, str],
    against: Against,
    judged: tuple[str, Mapping[str, Interval]] | None = None,
) -> Verdict:
    """Decide between methods.

    means: {method: its mean, higher is better}     roles: {method: as `RunFiles.role` has it}
    against: gives the evidence for one method's gain over another     judged: the reference and the gains over it,
    where they were judged jointly with those of other clients

    The reference is the own model (the best of them, if several were tuned), or else what sites have without a torch
    model (yardsticks), or else the common one; an oracle is never named. A method is
    clearly better when its interval against the reference lies above zero; the intervals hold jointly over all
    methods compared, so that the best of many is not believed too easily. Among those, a personalised model is named
    only when it is clearly better than the best common model that is itself clearly better than the reference:
    when in doubt, the simpler one.
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
        text = f"{FEW}; {enough[0]} would do" if enough else shown[0].why
        return Verdict(None, text, best, gains, reference)
    clear = [x for x in others if gains[x].sign == 1]
    choice = max(clear, key=lambda x: gains[x].mean) if clear else reference if all(s == -1 for s in signs) else None
    simpler = [x for x in clear if roles[x] == "common"]
    if choice is not None and roles[choice] == "personalised" and simpler:
        common = max(simpler, key=lambda x: gains[x].mean)
        if against(choice, common).interval().sign != 1:
            choice = common
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


# over a study


@dataclass(frozen=True, eq=False)
class Grid:
    """One method's results: values [seeds, clients] of the metric, NaN where a client was not tested."""

    seeds: tuple[int, ...]
    names: tuple[str, ...]
    values: np.ndarray

    def of(self, name: str) -> np.ndarray:
        """[seeds] one client's values."""
        return self.values[:, self._places[name]]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def per_client(self) -> dict[str, float]:
        """{client: mean over seeds}."""
        return {n: mean_of(column) for n, column in zip(self.names, self.values.T, strict=True)}

    def per_seed(self) -> dict[int, float]:
        """{seed: unweighted mean over clients}."""
        return {s: mean_of(row) for s, row in zip(self.seeds, self.values, strict=True)}

    def mean(self) -> float:
        """Mean over clients, then over seeds."""
        return mean_of(self.per_seed().values())


@lru_cache(maxsize=1)  # here and below: every table and figure asks for it, and a study does not change
def grids(study: Study) -> dict[str, Grid]:
    """{method: its results per seed and client}; methods without results per client are left out."""
    found = {}
    for label in study.labels:
        rows = {r.seed: r.values() for r in study.counted(label)}
        if rows:
            table = [[row.get(n, math.nan) for n in study.names] for row in rows.values()]
            found[label] = Grid(tuple(rows), tuple(study.names), np.array(table, dtype=float))
    return found


@lru_cache(maxsize=1)
def merits(study: Study) -> dict[str, Grid]:
    """`grids` with values of which more is better, whatever the metric."""
    return {k: replace(g, values=study.metric.merit(g.values)) for k, g in grids(study).items()}


def roles(study: Study) -> dict[str, str]:
    """{method: as `RunFiles.role` has it}."""
    return {label: study.role(label) for label in study.labels}


@lru_cache(maxsize=1)
def shares(study: Study) -> dict[str, tuple[float, int]]:
    """{client: (share of its samples that is tested, number of its samples)}, of the first run that has it."""
    found: dict[str, tuple[float, int]] = {}
    for r in study.runs:
        for c in r.federation.clients:
            found.setdefault(c.name, (min(c.samples(study.split) / max(c.total, 1), 0.9), c.total))
    return found


@lru_cache(maxsize=64)
def _sampled(study: Study, label: str) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """{seed: (where each client's test samples begin, their numbers and classes, what each adds to the metric)}"""
    found = {}
    for r in study.counted(label) if study.split == "test" else ():
        scores = files.scores(r.folder)
        if scores is not None and len(scores["counts"]) == r.n:
            at = np.r_[0, np.cumsum(scores["counts"])]
            found[r.seed] = (at, files.samples(scores), files.added(scores, study.metric))
    return found


def paired(study: Study, label: str, reference: str) -> list[int]:
    """The seeds that two methods have in common."""
    found = grids(study)
    return [s for s in found[label].seeds if s in found[reference].seeds]


@lru_cache(maxsize=128)
def evidence(study: Study, label: str, reference: str) -> tuple[dict[str, Evidence], Evidence]:
    """(per client, for the unweighted mean over clients) what is known of the gain of one method over another."""
    one, other = grids(study)[label], grids(study)[reference]
    seeds = paired(study, label, reference)
    rows = [[g.seeds.index(s) for s in seeds] for g in (one, other)]
    d = study.metric.merit(one.values[rows[0]]) - study.metric.merit(other.values[rows[1]])
    level = np.nanmean(np.abs(other.values)) if np.isfinite(other.values).any() else math.inf
    span = study.metric.span
    unit = span if math.isfinite(span) else float(level)
    added = [_added(study, label, reference, s) for s in seeds]
    sites, share, common = {}, shares(study), study.role(label) == study.role(reference) == "common"
    for i, name in enumerate(study.names):
        means = d[np.isfinite(d[:, i]), i]
        parts = [a[name] for a in added if a is not None and name in a]
        known = parts if len(parts) == len(seeds) else []
        spread, alike = sampled(study.metric, means, known, floor(study.metric, *share[name]))
        fixed = not study.redrawn and (alike if known else _one_test(study, seeds))
        sites[name] = Evidence(spread, None if fixed else share[name][0], share[name][1], unit, span, common)
    known = [e for e in sites.values() if len(e.spread.means)]
    means = [float(np.nanmean(row)) for row in d if np.isfinite(row).any()]
    whole = intervals.mean_spread([e.spread for e in known], np.array(means)) if known else Spread(np.array(means))
    drawn = [e.share for e in known if e.share is not None]
    total = sum(e.samples for e in known)
    return sites, Evidence(whole, float(np.mean(drawn)) if drawn else None, total, unit, span)


def _added(study: Study, label: str, reference: str, seed: int) -> dict[str, Added] | None:
    """{client: (its test samples, what each adds to the gain)} in one split; None where that was not written."""
    found = [_sampled(study, k).get(seed) for k in (label, reference)]
    if found[0] is None or found[1] is None:
        return None
    (at, ids, one), (_, same, other) = found[0], found[1]
    if len(ids) != len(same) or (ids != same).any():
        return None
    names = next(r for r in study.counted(label) if r.seed == seed).federation.names
    gain = study.metric.sign * (one - other)
    return {n: (ids[a:b], gain[a:b]) for n, a, b in zip(names, at, at[1:], strict=False) if b > a}


def sampled(metric: Metric, means: np.ndarray, parts: Sequence[Added], floor: float) -> tuple[Spread, bool]:
    """(the spread of a site's gain, whether the same samples are tested in every split). means: [S] the gain in the
    splits that have one     parts: of every split, none: not known"""
    if not parts or not len(means):
        return Spread(means, floor=floor), False
    alike = len(parts) > 1 and all(np.array_equal(parts[0][0], samples) for samples, _ in parts[1:])
    known, place = np.unique(np.concatenate([samples for samples, _ in parts]), axis=0, return_inverse=True)
    values = np.full((len(parts), len(known)), math.nan)
    row = np.repeat(np.arange(len(parts)), [len(samples) for samples, _ in parts])
    values[row, place.reshape(-1)] = np.concatenate([v for _, v in parts])
    if np.isfinite(values).any(1).sum() != len(means):
        return Spread(means, floor=floor), alike
    span, classes = metric.span if math.isfinite(metric.span) else 0.0, known[:, 1] if metric.classwise else None
    found = intervals.spread(values, span, known[:, 0], classes, metric.classwise, metric.guesses)
    return replace(found, means=means, floor=floor), alike


def floor(metric: Metric, share: float, total: int) -> float:
    """Without scores per sample, the least spread over seeds to believe: half a test sample's part of what a bounded
    metric can change by."""
    span = metric.span if math.isfinite(metric.span) else float(metric.unit == "%")
    return 0.5 * span / max(round(share * total), 1)


def _one_test(study: Study, seeds: Sequence[int]) -> bool:
    """Whether all seeds have one test set, by what the runs say of their split."""
    told = {(r.federation.seed, r.federation.test) for r in study.runs if r.seed in seeds}
    drawn = {seed for seed, _ in told}
    return len(seeds) > 1 and (any(test == "given" for _, test in told) or (len(drawn) == 1 and None not in drawn))


def _together(found: dict[str, Interval]) -> dict[str, Interval]:
    """The clients' gains with `clear` decided jointly over all of them (Holm)."""
    clear = intervals.holm(np.array([g.p for g in found.values()]))
    return {n: replace(g, clear=bool(c)) for (n, g), c in zip(found.items(), clear, strict=True)}


@lru_cache(maxsize=1)
def client_verdicts(study: Study) -> dict[str, Verdict]:
    """The verdict for every client, by name, all against the same reference, the best in the mean; which gains are
    clear is decided jointly over clients."""
    found, role = merits(study), roles(study)
    verdicts: dict[str, Verdict] = {}
    reference, others = sides({k: m for k, g in found.items() if math.isfinite(m := g.mean())}, role)
    for name in study.names:
        means = {k: mean_of(g.of(name)) for k, g in found.items()}
        judged = (reference, {x: gains(study, x, reference)[name] for x in others}) if reference else None
        verdicts[name] = verdict(means, role, lambda one, other, n=name: evidence(study, one, other)[0][n], judged)
    tested = {c.name for r in study.runs for c in r.federation.clients if c.samples(study.split)}
    none = f"n/a: {study.metric.lacks}"
    return {n: replace(v, text=none) if v.text == UNTESTED and n in tested else v for n, v in verdicts.items()}


@lru_cache(maxsize=1)
def mean_verdict(study: Study) -> Verdict:
    """The verdict for the unweighted mean over clients."""
    means = {k: g.mean() for k, g in merits(study).items()}
    return verdict(means, roles(study), lambda one, other: evidence(study, one, other)[1])


def mean_gain(study: Study, label: str, reference: str, comparisons: int = 1) -> Interval:
    """Gain of one method over another in the mean over clients, positive when better."""
    return evidence(study, label, reference)[1].interval(comparisons)


@lru_cache(maxsize=32)
def gains(study: Study, label: str, reference: str) -> dict[str, Interval]:
    """Gain of one method over another for every client, positive when better: 95 % for a client, jointly over the
    methods compared. Which gains are clear is decided jointly over clients too."""
    found = grids(study)
    if label not in found or reference not in found:
        return {}
    role = roles(study)
    compared = sum(k != reference and role[k] in SHARED for k in found)
    return _together({n: e.interval(max(compared, 1)) for n, e in evidence(study, label, reference)[0].items()})


def effort(study: Study, label: str, reference: str) -> tuple[float, int | None, float] | None:
    """What it takes to see a small gain in the mean over clients, four times in five: (the gain, seeds or None where no
    number of them is enough, how many times as many samples with the present seeds); None: nothing is known of it."""
    e = evidence(study, label, reference)[1]
    if e.why or e.spread.rare:
        return None
    compared = len(mean_verdict(study).gains)
    found = intervals.needed(e.spread, e.share, SMALL * e.unit, max(compared, 1)) if e.unit < math.inf else None
    return None if found is None else (SMALL * e.unit, found.splits, found.times)
