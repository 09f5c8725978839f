"""Who gains: differences between methods, paired over seeds, with Student t intervals and an honest verdict.

Pairing: runs of the same seed share the split, so a difference is taken within the seed first and averaged after.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from scipy.special import stdtrit

from polyfed.report.read import Study

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean difference and its confidence interval; low and high are NaN when one seed gives no spread.

    seeds: number of pairs it rests on
    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def sign(self) -> int | None:
        """+1 or -1 when the interval lies on one side of zero, 0 when it contains zero, None when there is none."""
        if not math.isfinite(self.low):
            return None
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


def interval(differences: Sequence[float] | np.ndarray, comparisons: int = 1, floor: float = 0.0) -> Interval:
    """Student t interval of the mean of paired differences [seeds], 95 % over all `comparisons` together (Bonferroni).

    floor: the least standard deviation to believe, in units of the metric. NaN differences are dropped.
    """
    d = np.asarray(differences, dtype=float)
    d = d[np.isfinite(d)]
    k = len(d)
    if k < 2:
        return Interval(float(d.mean()) if k else math.nan, math.nan, math.nan, k)
    std = max(float(d.std(ddof=1)), floor)
    half = float(stdtrit(k - 1, 1 - (1 - LEVEL) / (2 * max(comparisons, 1)))) * std / math.sqrt(k)
    return Interval(float(d.mean()), float(d.mean()) - half, float(d.mean()) + half, k)


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
UNTESTED = "no test samples"
ALONE = "nothing to compare with"


def verdict(values: Mapping[str, Mapping[int, float]], roles: Mapping[str, str], floor: float = 0.0) -> Verdict:
    """Decide between methods from their values per seed.

    values: {method: {seed: value, higher is better}}     roles: {method: "own", "common" or "personalised"}
    floor: see `interval`

    The reference is the own model (the best of them, if several were tuned), or else the common one. A method is
    clearly better when its interval against the reference lies above zero; the intervals hold jointly over all
    methods compared, so that the best of many is not believed too easily. Among those, a personalised model is named
    only when it is clearly better than the best common model that is itself clearly better than the reference:
    when in doubt, the simpler one.
    """
    means = {label: m for label, v in values.items() if math.isfinite(m := mean_of(v.values()))}
    if not means:
        return Verdict(None, UNTESTED, None, {}, None)
    best = max(means, key=lambda label: means[label])
    reference = next(
        (
            max(of, key=lambda x: means[x])
            for role in ("own", "common")
            if (of := [x for x in means if roles[x] == role])
        ),
        None,
    )
    others = [x for x in means if x != reference and roles[x] != "own"]
    if reference is None or not others:
        return Verdict(None, ALONE, best, {}, reference)

    def against(label: str, other: str, comparisons: int) -> Interval:
        pairs = [v - values[other][s] for s, v in values[label].items() if s in values[other]]
        return interval(pairs, comparisons, floor)

    gains = {x: against(x, reference, len(others)) for x in others}
    signs = [g.sign for g in gains.values()]
    if all(s is None for s in signs):
        return Verdict(None, ONE_SEED, best, gains, reference)
    clear = [x for x in others if gains[x].sign == 1]
    choice = max(clear, key=lambda x: means[x]) if clear else reference if all(s == -1 for s in signs) else None
    simpler = [x for x in clear if roles[x] == "common"]
    if choice is not None and roles[choice] == "personalised" and simpler:
        common = max(simpler, key=lambda x: means[x])
        if against(choice, common, 1).sign != 1:
            choice = common
    return Verdict(choice, _words(choice, roles), best, gains, reference)


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
    """{method: "own", "common" or "personalised"}."""
    return {label: study.role(label) for label in study.labels}


@lru_cache(maxsize=1)
def floors(study: Study) -> dict[str, float]:
    """Per client, the least spread to believe: half a test sample for a share, which moves in steps of one sample."""
    if study.metric.unit != "%":
        return dict.fromkeys(study.names, 0.0)
    counts: dict[str, int] = {}
    for r in study.runs:
        for c in r.federation["clients"]:
            counts.setdefault(str(c["name"]), int(c.get(study.split) or 0))
    return {n: 0.5 / max(counts[n], 1) for n in study.names}


@lru_cache(maxsize=1)
def client_verdicts(study: Study) -> dict[str, Verdict]:
    """The verdict for every client, by name."""
    found, role, floor = merits(study), roles(study), floors(study)
    verdicts = {}
    for i, n in enumerate(study.names):
        values = {k: dict(zip(g.seeds, g.values[:, i].tolist(), strict=True)) for k, g in found.items()}
        verdicts[n] = verdict(values, role, floor[n])
    tested = {str(c["name"]) for r in study.runs for c in r.federation["clients"] if c.get(study.split)}
    none = f"n/a: {study.metric.lacks}"
    return {n: replace(v, text=none) if v.text == UNTESTED and n in tested else v for n, v in verdicts.items()}


def mean_verdict(study: Study) -> Verdict:
    """The verdict for the unweighted mean over clients."""
    return verdict({k: g.per_seed() for k, g in merits(study).items()}, roles(study))


def mean_gain(study: Study, label: str, reference: str, comparisons: int = 1) -> Interval:
    """Gain of one method over another in the mean over clients, paired over seeds, positive when better."""
    found = merits(study)
    one, other = found[label].per_seed(), found[reference].per_seed()
    return interval([v - other[s] for s, v in one.items() if s in other], comparisons)


@lru_cache(maxsize=32)
def gains(study: Study, label: str, reference: str) -> dict[str, Interval]:
    """Gain of one method over another for every client, paired over seeds, positive when better (95 % each)."""
    found, floor = merits(study), floors(study)
    if label not in found or reference not in found:
        return {}
    one, other = found[label], found[reference]
    common = [s for s in one.seeds if s in other.seeds]
    rows = [[g.seeds.index(s) for s in common] for g in (one, other)]
    d = one.values[rows[0]] - other.values[rows[1]]
    return {n: interval(d[:, i], 1, floor[n]) for i, n in enumerate(study.names)}
