"""Verdicts of a study, each worked out once: results per seed and client, gains with intervals, effort to tell.

Runs of the same seed share the split, so a difference is taken within the seed first and averaged after.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from scipy.special import ndtri

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, closest
from polyfed.metrics.metric import Metric
from polyfed.report import intervals
from polyfed.report.intervals import Spread
from polyfed.report.pairs import (
    SHARED,
    SMALL,
    UNTESTED,
    Evidence,
    Interval,
    Verdict,
    evidence,
    jointly,
    mean_of,
    sides,
    together,
    verdict,
)
from polyfed.report.words import Scale
from polyfed.runs.numbers import Added, Numbers

Name = TypeVar("Name", bound=Hashable)
ALONE = ("own", "yardstick")  # the roles of what a site has without the others
LEAST = 10  # tested samples with which a client counts in the mean over clients


@dataclass(frozen=True, eq=False)
class Grid:
    """One method's results: values [seeds, clients] of the metric, NaN where a client was not tested."""

    seeds: tuple[int, ...]
    names: tuple[str, ...]
    values: np.ndarray
    counted: Sequence[bool] | None = None  # [clients] the mean is over these; None: all
    aim: float | None = None  # the mean is of the distances from it

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
        """{seed: unweighted mean over the clients that count}."""
        return {s: mean_of(row) for s, row in zip(self.seeds, self.bearing, strict=True)}

    @property
    def bearing(self) -> np.ndarray:
        """[seeds, clients that count] values, or their distances from what is best."""
        values = self.values if self.counted is None else self.values[:, list(self.counted)]
        return values if self.aim is None else np.abs(values - self.aim)

    def mean(self) -> float:
        """Mean over clients, then over seeds."""
        return mean_of(self.per_seed().values())


class Verdicts:
    """Verdicts on the runs of a study, see `Study.verdicts`."""

    def __init__(self, study: "Study"):
        self.study = study
        self._evidence: dict[tuple[str, str], tuple[dict[str, Evidence], Evidence, Evidence]] = {}
        self._gains: dict[tuple[str, str], dict[str, Interval]] = {}

    @cached_property
    def roles(self) -> dict[str, str]:
        """{method: as `Numbers.role` has it}."""
        return {label: self.study.role(label) for label in self.study.labels}

    @cached_property
    def grids(self) -> dict[str, Grid]:
        """{method: its results per seed and client}; results on training samples judge nothing and are left out."""
        grids, names, bearing = {}, tuple(self.study.names), self.study.bearing
        counted, metric = None if len(bearing) == len(names) else [n in bearing for n in names], self.study.metric
        for label in self.study.labels if self.study.split != "train" else ():
            rows = {r.seed: r.values() for r in self.study.counted(label)}
            if rows:
                table = [[row.get(n, math.nan) for n in names] for row in rows.values()]
                grids[label] = Grid(
                    tuple(rows), names, np.array(table, dtype=float), counted, None if metric.sign else metric.aim
                )
        return grids

    def levels(self, run: Numbers, metric: Metric) -> list[float]:
        """A run's scores, of the clients that count and have one; for one that is best near a value, the distance."""
        scores = [v for n, v in run.values(metric=metric.name).items() if n in self.study.bearing and math.isfinite(v)]
        return scores if metric.sign else [abs(v - metric.aim) for v in scores]

    @cached_property
    def merits(self) -> dict[str, Grid]:
        """`grids` with values of which more is better, whatever the metric."""
        return {k: replace(g, values=self.study.metric.merit(g.values), aim=None) for k, g in self.grids.items()}

    @cached_property
    def means(self) -> dict[str, float]:
        """{method: the mean of its merits}, of those that have one: none of a method of which a run diverged."""
        gone = {r.label for r in self.study.runs if r.status == "diverged"}
        return {k: m for k, g in self.merits.items() if math.isfinite(m := g.mean()) and k not in gone}

    @cached_property
    def ranked(self) -> list[str]:
        """The methods in order of their result, the best first; those without a result last."""
        return sorted(self.study.labels, key=lambda k: -self.means.get(k, -math.inf))

    @cached_property
    def mean(self) -> Verdict:
        """The verdict for the unweighted mean over the clients that count."""
        return verdict(self.means, self.roles, lambda one, other: self.evidence(one, other)[1])

    @cached_property
    def clients(self) -> dict[str, Verdict]:
        """{client: its verdict}, all against the same reference; clear gains are decided jointly over clients."""
        study, verdicts = self.study, dict[str, Verdict]()
        reference, others = sides(self.means, self.roles)
        for name in study.names:
            means = {k: mean_of(g.of(name)) for k, g in self.merits.items()}
            judged = (reference, {x: self.gains(x, reference)[name] for x in others}) if reference else None
            verdicts[name] = verdict(means, self.roles, partial(self._site, name), judged)
        tested = {c.name for r in study.runs for c in r.about.clients if c.samples(study.split)}
        none = f"n/a: {study.metric.lacks}"
        return {n: replace(v, text=none) if v.text == UNTESTED and n in tested else v for n, v in verdicts.items()}

    @cached_property
    def lead(self) -> tuple[str, str] | None:
        """(the method with the best mean over clients, its reference: the own or else the common models)."""
        mean = self.mean
        shown = mean.choice if mean.choice in mean.gains else mean.shown
        return (shown, mean.reference) if shown and mean.reference else None

    @cached_property
    def best_by_chance(self) -> float:
        """How far the best of the methods compared is ahead by chance if all are worth the same; NaN: unknown."""
        rest = [self.evidence(k, self.lead[0])[1] for k in self.mean.gains if k != self.lead[0]] if self.lead else []
        pair = mean_of(intervals.variance(e.spread, e.share)[0] for e in rest if len(e.spread.means))
        best = float(ndtri((len(rest) + 0.625) / (len(rest) + 1.25)))  # the largest of normal numbers (Blom, 1958)
        return best * math.sqrt(pair / 2)

    def choices(self) -> dict[str, int]:
        """Count the clients of each verdict, most frequent first."""
        texts = [v.text for v in self.clients.values()]
        return {t: texts.count(t) for t in sorted(set(texts), key=lambda t: (-texts.count(t), t))}

    # one method over another

    def paired(self, label: str, reference: str) -> list[int]:
        """The seeds that two methods have in common."""
        return [s for s in self.grids[label].seeds if s in self.grids[reference].seeds]

    def mean_gain(self, label: str, reference: str, comparisons: int = 1) -> Interval:
        """Gain of one method over another in the mean over the clients that count, positive when better."""
        return self.evidence(label, reference)[1].interval(comparisons)

    def of(self, label: str, reference: str) -> str:
        """What intervals are of: these trained "models", these training "sets" (all splits test the same samples), the
        "procedure" on sets drawn anew, or "both" where only some clients' tests are given."""
        given = {e.share is None for e in self.evidence(label, reference)[0].values() if len(e.spread.means)}
        several = "both" if len(given) > 1 else "sets" if True in given else "procedure"
        return several if len(self.paired(label, reference)) > 1 else "models"

    def sample_gain(self, label: str, reference: str, comparisons: int = 1) -> Interval:
        """`mean_gain` of all clients, each weighted by its samples."""
        self.evidence(label, reference)
        return self._evidence[label, reference][2].interval(comparisons)

    def gains(self, label: str, reference: str) -> dict[str, Interval]:
        """Gain of one method over another for every client, positive when better, jointly over the methods compared."""
        if label not in self.grids or reference not in self.grids:
            return {}
        if (label, reference) not in self._gains:
            compared = sum(k != reference and self.roles[k] in SHARED for k in self.grids)
            evidence = self.evidence(label, reference)[0]
            gains = jointly([e.interval(max(compared, 1)) for e in evidence.values()])
            self._gains[label, reference] = dict(zip(evidence, gains, strict=True))
        return self._gains[label, reference]

    def effort(self, label: str, reference: str) -> tuple[float, int | None, float] | None:
        """Effort to see a small gain in the mean, four times in five: (the gain, seeds, times as many samples)."""
        e = self.evidence(label, reference)[1]
        if e.why or e.spread.rare or not e.unit < math.inf:
            return None
        needed = intervals.needed(e.spread, e.share, SMALL * e.unit, max(len(self.mean.gains), 1))
        return None if needed is None else (SMALL * e.unit, needed.splits, needed.times)

    def evidence(self, label: str, reference: str) -> tuple[dict[str, Evidence], Evidence]:
        """(per client, for the mean over those that count) what is known of the gain of one method over another."""
        if (label, reference) not in self._evidence:
            sites, d = self._sites(label, reference)
            mean = self._over(sites, d, [n in self.study.bearing for n in sites])
            each = self._over(sites, d, [self.shares[n][1] for n in sites])
            if self.roles[label] in SHARED and self.roles[reference] in SHARED:  # both have the same luck in training
                sites = {n: replace(e, spread=replace(e.spread, whole=True)) for n, e in sites.items()}
            self._evidence[label, reference] = sites, mean, each
        return self._evidence[label, reference][:2]

    def _over(self, sites: Mapping[str, Evidence], d: np.ndarray, weights: Sequence[int]) -> Evidence:
        """Evidence on the mean over clients of gains d [seeds, clients], by weights [clients]."""
        w = np.array(weights, dtype=float) * np.isfinite(d)  # [seeds, clients]
        rows, there = w.any(1), w.max(0, initial=0.0)
        if not rows.any():
            return Evidence(Spread(np.empty(0)), None)
        means = (w * np.nan_to_num(d)).sum(1)[rows] / w.sum(1)[rows]
        return together([e for e, k in zip(sites.values(), there, strict=True) if k], means, there[there > 0])

    def _site(self, name: str, label: str, reference: str) -> Evidence:
        return self.evidence(label, reference)[0][name]

    def _sites(self, label: str, reference: str) -> tuple[dict[str, Evidence], np.ndarray]:
        """(what is known of every client's gain, [seeds, clients] the gains)."""
        study, seeds, merits = self.study, self.paired(label, reference), self.merits
        one, other = (merits[k].values[[merits[k].seeds.index(s) for s in seeds]] for k in (label, reference))
        added = [self._added(label, reference, s) for s in seeds]
        common, d = self.roles[label] == self.roles[reference] == "common", one - other
        sites, one_test, step = {}, self._one_test(seeds), Scale(study.metric).step(self.level(reference))
        heavy = self.tails(label, reference) > intervals.HEAVY
        for i, name in enumerate(study.names):
            parts = [a[name] for a in added if a is not None and name in a]
            whole = parts if len(parts) == len(seeds) else ()
            e = evidence(
                study.metric, d[:, i], whole, self.shares[name], self._unit(reference), study.redrawn, one_test, common
            )
            sites[name] = replace(e, step=step, spread=replace(e.spread, whole=heavy))
        return sites, d

    def tails(self, label: str, reference: str) -> float:
        """The kurtosis of both methods' errors, the smaller one: 3 if they are normal; NaN where they are not known."""
        metric, found = self.study.metric, list[float]()
        for k in (label, reference) if metric.kind == "numbers" and self.study.split == "test" else ():
            each = [x for r in self.study.counted(k) for _, x in (r.added or {}).values()]
            # squared errors from the terms of a root (to first order), of a share explained, of absolute errors
            each = [(2 * x - x.mean()).clip(0) if metric.root else 1 - x if metric.sign > 0 else x**2 for x in each]
            each = np.concatenate([x / x.mean() for x in each if x.mean() > 0] or [np.empty(0)])
            found.append(float((each**2).mean()) if len(each) else math.nan)
        return min(found, default=math.nan)

    def level(self, reference: str) -> float:
        """The size of the reference's values."""
        values = self.grids[reference].values
        return float(np.nanmean(np.abs(values))) if np.isfinite(values).any() else math.inf

    def _unit(self, reference: str) -> float:
        """The range of a bounded metric, else the reference's mean value."""
        span = self.study.metric.span
        return span if math.isfinite(span) else self.level(reference)

    @cached_property
    def shares(self) -> dict[str, tuple[float, int]]:
        """{client: (share of its samples that is tested, number of its samples)}, of the first run that has it."""
        shares: dict[str, tuple[float, int]] = {}
        for r in self.study.runs:
            shares = r.shares(self.study.split) | shares
        return shares

    def _added(self, label: str, reference: str, seed: int) -> Mapping[str, Added] | None:
        """{client: (its test samples, each one's part of the gain)} in one split; None unless both runs wrote them."""
        if self.study.split != "test":
            return None
        one, other = (next(r for r in self.study.counted(k) if r.seed == seed).added for k in (label, reference))
        if one is None or other is None or one.keys() != other.keys():
            return None
        if not all(np.array_equal(one[n][0], other[n][0]) for n in one):
            return None
        return {n: (ids, self.study.metric.sign * (each - other[n][1])) for n, (ids, each) in one.items()}

    def _one_test(self, seeds: Sequence[int]) -> bool:
        """True where all seeds have one test set, by what the runs say of their split."""
        told = {(r.about.seed, r.about.test) for r in self.study.runs if r.seed in seeds}
        drawn = {seed for seed, _ in told}
        return len(seeds) > 1 and (any(test == "given" for _, test in told) or (len(drawn) == 1 and None not in drawn))


@checked
@dataclass(frozen=True, eq=False)
class Study:
    """Runs that belong together: one data set, any number of methods and seeds. `read` makes one.

    Parameters
    ----------
    runs : sequence of Numbers
        The runs, in the order read.
    paths : sequence of Path
        The folders asked for.
    """

    runs: Sequence[Numbers]
    paths: Sequence[Path] = field(default_factory=tuple)

    @cached_property
    def labels(self) -> list[str]:
        """The methods: own models first, then the common ones, the personalised ones, and what they are measured by."""
        order = ("own", "common", "personalised", "yardstick", "oracle")
        return sorted(dict.fromkeys(r.label for r in self.runs), key=lambda label: order.index(self.role(label)))

    def of(self, label: str) -> list[Numbers]:
        """All runs of one method.

        Parameters
        ----------
        label : str
            The method, one of `labels`.

        Returns
        -------
        list of Numbers
            The runs, by seed.
        """
        return sorted((r for r in self.runs if r.label == label), key=lambda r: r.seed)

    def counted(self, label: str) -> list[Numbers]:
        """The runs that enter means.

        Parameters
        ----------
        label : str
            The method, one of `labels`.

        Returns
        -------
        list of Numbers
            The finished ones, or where none is, all that have results per client and did not diverge.
        """
        runs = [r for r in self.of(label) if r.clients is not None]
        finished = [r for r in runs if r.status == "finished"]
        return finished or [r for r in runs if r.status != "diverged"]

    def role(self, label: str) -> str:
        """The kind of model that a client deploys.

        Parameters
        ----------
        label : str
            The method, one of `labels`.

        Returns
        -------
        str
            "own" (trained alone), "common" (one for all) or "personalised"; of a finished run where there is one.
        """
        runs = self.counted(label) or self.of(label)
        if not runs:
            labels = sorted({run.label for run in self.runs})
            raise ConfigError(f"no method {label!r}{closest(label, labels)}; there are {', '.join(labels)}")
        return runs[0].role

    @cached_property
    def verdicts(self) -> Verdicts:
        """Gains, intervals, who gains, and what would be enough to tell: each worked out once."""
        return Verdicts(self)

    @property
    def first(self) -> Numbers:
        """The first run."""
        return self.runs[0]

    @property
    def metric(self) -> Metric:
        """The metric that leads."""
        return self.first.summary.leads

    @property
    def metrics(self) -> list[Metric]:
        """All metrics that the runs were judged by, the one that leads first."""
        return self.first.summary.judges

    @property
    def split(self) -> str:
        """The split that the runs are judged on: test, or else validation, or else train."""
        return self.first.split

    @property
    def seeds(self) -> list[int]:
        """The seeds of all runs, sorted."""
        return sorted({r.seed for r in self.runs})

    @cached_property
    def names(self) -> list[str]:
        """The clients' names, in the federation's order."""
        return list(dict.fromkeys(name for r in self.runs for name in r.about.names))

    @cached_property
    def tested(self) -> dict[str, float]:
        """{client: the samples that it is judged on (patients, where several rows are of one), mean over seeds}."""
        drawn = [r.judged(self.split) for r in {r.seed: r for r in self.runs}.values()]
        return {n: mean_of(d[n] for d in drawn if n in d) for n in self.names}

    @cached_property
    def bearing(self) -> tuple[str, ...]:
        """The clients that the mean is over, see `bearing`."""
        return bearing(self.tested)

    @property
    def whom(self) -> str:
        """The clients that the mean is over: `clients`, or `4 of 5 clients`."""
        return f"{len(self.bearing)} of {len(self.names)} clients" if self.needs else "clients"

    @cached_property
    def needs(self) -> dict[str, tuple[float, int]]:
        """{client that the mean leaves out: (its tested samples, how many samples in all would test ten)}."""
        left = {n: k for n, k in self.tested.items() if n not in self.bearing and k > 0}
        return {n: (k, math.ceil(LEAST * self.verdicts.shares[n][1] / k)) for n, k in left.items()}

    @cached_property
    def redrawn(self) -> bool:
        """True where the partition was redrawn: clients of one name hold other data under another seed."""
        drawn = list({r.seed: r for r in self.runs}.values())
        total = [r.samples("train") + r.samples("validation") + r.samples("test") for r in drawn]
        if any(len(t) != len(total[0]) or (t != total[0]).any() for t in total):
            return True
        labels = [r.labels for r in drawn if r.labels is not None]
        return any(_apart(one, labels[0]) for one in labels[1:])


def bearing(tested: Mapping[Name, float]) -> tuple[Name, ...]:
    """The clients that a mean is over: those that test ten samples, whatever their scores. All, where fewer than two
    do, or where those test less than half of all samples."""
    able = tuple(n for n, k in tested.items() if k >= LEAST)
    most = 2 * sum(tested[n] for n in able) >= sum(tested.values())
    return able if len(able) > 1 and most else tuple(tested)


def _apart(one: np.ndarray, other: np.ndarray) -> bool:
    """True where counts [clients, classes] differ by more than splits of the same rows can (chi-square)."""
    terms = (one - other) ** 2 / (one + other).clip(1)
    many = np.count_nonzero(one + other)
    return bool(terms.sum() > many + 6 * math.sqrt(2 * many))
