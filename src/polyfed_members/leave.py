"""leave: an experiment trained again without some of its clients, and the cost for those who stay.

Bit for bit the federation that never had the others: draws are keyed by names, and what follows from all is redone.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from polyfed.base.errors import ConfigError, RunError
from polyfed.base.settings import is_list, is_mapping
from polyfed.metrics.metric import mean_of
from polyfed.report.pairs import Evidence, evidence, jointly, together
from polyfed.report.read import read
from polyfed.report.verdicts import bearing
from polyfed.runs import ownership as files
from polyfed.runs.build import Parts
from polyfed.runs.config import Experiment, resolve
from polyfed.runs.folder import safe
from polyfed.runs.numbers import Numbers
from polyfed.runs.opened import stored
from polyfed.runs.privacy import refuse_private
from polyfed.runs.result import Result, position
from polyfed.runs.schema import About, Client
from polyfed.runs.trainer import fit
from polyfed.runs.watching import Callback
from polyfed.studies.jobs import whole
from polyfed_members.departure import MEAN, Departure


def leave(run: Result, clients: Sequence[str | int], out: Path | None, callbacks: Sequence[Callback]) -> Departure:
    """Train the run of a folder again without some of its clients; see `Run.leave`."""
    names = leaving(clients, run.outline.names)
    if run.status != "finished":
        raise RunError(f"{run.place()}: the run is {run.status}; finish it with: polyfed resume {run.place()}")
    if run.settings.start is not None:
        raise ConfigError(f"{run.place()}: started from another run, whose models have seen {', '.join(names)}")
    target = out or run.place().with_name(f"{run.place().name}-without-{safe('+'.join(names))}")
    if run.settings.data.name is not None:
        experiment = without(resolve(run.place() / "config.toml"), names, run.outline.names)
        parts, seed = Parts(experiment), experiment.seeds[0]
        model, federation, training = parts.model(seed), parts.federation(seed), parts.training(seed)
        algorithm, described = experiment.methods[0].algorithm, parts.describe(experiment.methods[0])
    else:
        model, federation, training, algorithm = stored(run).parts()
        refuse_private(training.privacy, "leave")
        federation, described = federation.without(names), {"data": {"without": names}}
        training = dataclasses.replace(training, local_steps=_rest(training.local_steps, names, run.outline.names))
    _check_same(stored(run).numbers, About.model_validate(federation.describe()).clients)
    training = dataclasses.replace(training, rounds=run.rounds if training.stop is None else run.settings.rounds)
    whole(fit(model, federation, algorithm, training, out=target, callbacks=callbacks, describe=described))
    departure = compared(run.place(), target, names)
    departure.save()
    return departure


def leaving(clients: Sequence[str | int], names: Sequence[str]) -> list[str]:
    """The names of the clients that leave, by name or position. Raises ConfigError where none would stay."""
    left = [names[position(c, names)] for c in clients]
    if not left or set(left) == set(names):
        raise ConfigError(f"leave: found {len(left)} of {len(names)} clients, expected some to leave and some to stay")
    return list(dict.fromkeys(left))


def without(experiment: Experiment, names: Sequence[str], everyone: Sequence[str]) -> Experiment:
    """An experiment without some of its clients; `everyone` is in the order of a list of local steps."""
    e = experiment
    refuse_private(e.settings.privacy, "leave")
    data = dataclasses.replace(e.data, without=[*(e.data.without or ()), *names])
    settings = dataclasses.replace(e.settings, local_steps=_rest(e.settings.local_steps, names, everyone))
    return dataclasses.replace(e, data=data, settings=settings, name=f"{e.name}-without-{safe('+'.join(names))}")


def _rest(steps: Any, names: Sequence[str], everyone: Sequence[str]) -> Any:
    """A rule for local steps without what it says of clients that leave."""
    if is_mapping(steps):
        return {name: number for name, number in steps.items() if name not in names}
    if is_list(steps) and len(steps) == len(everyone):
        return [number for name, number in zip(everyone, steps, strict=True) if name not in names]
    return steps


def _check_same(before: Numbers, clients: Sequence[Client]) -> None:
    """Raise RunError where those who stay have other samples than in the run."""
    earlier = {c.name: c for c in before.about.clients}
    for now in clients:
        for part in ("train", "validation", "test"):
            then, found = earlier[now.name].samples(part), now.samples(part)
            if found != then:
                samples = f"{part} samples of client {now.name!r}"
                raise RunError(f"{before.folder}: its data have changed: found {found} {samples}, expected {then}")


def compared(before: Path, after: Path, left: Sequence[str]) -> Departure:
    """Compare runs or comparisons without some clients with those with them, from their folders alone."""
    runs: dict[str, list[tuple[Numbers, Numbers]]] = {}
    for old, new in _pairs(before, after):
        _check_same(old, new.about.clients)
        runs.setdefault(new.label, []).append((old, new))
    if not runs:
        raise RunError(f"{after}: no run of {before} was finished there, so nothing can be compared")
    first = next(iter(runs.values()))[0][1]
    counted = bearing({n: mean_of(np.array(k)) for n, k in _tested(runs, first.split).items()})
    rows = [row for label, pairs in runs.items() for row in _rows(label, pairs, first.split, counted)]
    lead = read(before).verdicts.lead if (before / "comparison.toml").exists() else None
    apart = tuple(n for n in first.about.names if n not in counted)
    return Departure(tuple(left), after, pd.DataFrame(rows), first.summary.leads, first.split, lead and lead[0], apart)


def _tested(runs: Mapping[str, list[tuple[Numbers, Numbers]]], split: str) -> dict[str, list[int]]:
    """{client that stays: the samples that it is judged on in every run}."""
    drawn = [new.judged(split) for pairs in runs.values() for _, new in pairs]
    return {n: [d[n] for d in drawn] for n in drawn[0]}


def _pairs(before: Path, after: Path) -> list[tuple[Numbers, Numbers]]:
    """The runs to compare, (with, without) those who left; a run that diverged on one side has no pair."""
    if files.config_of(before).name == "config.toml":
        return [(Numbers.of(before), Numbers.of(after))]
    places = [(before / "runs" / p.name, p) for p in sorted((after / "runs").glob("*-seed*"))]
    over = [pair for pair in places if all((p / "summary.json").exists() for p in pair)]
    runs = [(Numbers.of(a), Numbers.of(b, b.name.rpartition("-seed")[0])) for a, b in over]
    return [pair for pair in runs if all(run.status == "finished" for run in pair)]


def _rows(label: str, runs: list[tuple[Numbers, Numbers]], split: str, counted: Sequence[str]) -> list[dict[str, Any]]:
    """One row per client that stays, and one for the mean over those that count."""
    first = runs[0][1]
    metric, samples, sites, rows = first.summary.leads, first.shares(), list[Evidence](), list[dict[str, Any]]()
    values = [(a.values(split), b.values(split)) for a, b in runs]
    for name in first.about.names:
        pairs = [(a[name], b[name]) for a, b in values]
        means = [float(metric.merit(b) - metric.merit(a)) for a, b in pairs]
        added = [
            (a.added[name], b.added[name])
            for (a, b), mean in zip(runs, means, strict=True)
            if split == "test" and math.isfinite(mean) and a.added and b.added and name in a.added and name in b.added
        ]
        parts = [(ids, metric.sign * (now - then)) for (ids, then), (_, now) in added]
        was, now = (mean_of(np.array(v)) for v in zip(*pairs, strict=True))
        sites.append(evidence(metric, [m for m in means if math.isfinite(m)], parts, samples[name], abs(was)))
        moved = {
            f"bytes_{k}": math.nan if first.role == "oracle" else float(np.mean([r[i].moved[name] for r in runs]))
            for i, k in enumerate(("before", "after"))
        }
        rows.append({"method": label, "client": name, "before": was, "after": now} | moved)
    intervals = jointly([e.interval() for e in sites])
    same = [k for k, e in enumerate(sites) if rows[k]["client"] in counted and len(e.spread.means) == len(runs)]
    if same:
        whole = {k: mean_of(np.array([r[k] for r in rows])) for k in ("bytes_before", "bytes_after")}
        whole |= {k: mean_of(np.array([rows[i][k] for i in same])) for k in ("before", "after")}
        rows.append({"method": label, "client": MEAN} | whole)
        intervals.append(together([sites[k] for k in same]).interval())
    for row, gain in zip(rows, intervals, strict=True):
        row |= {"change": gain.mean, "low": gain.low, "high": gain.high, "clear": gain.clear, "seeds": gain.seeds}
    return rows
