"""polyfed run and polyfed compare: experiments, from a file, from options, or the built-in one; and `execute`, which
brings a checked experiment to results on disk and on the screen.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from polyfed import report
from polyfed.base import system
from polyfed.base.part import CHECK
from polyfed.base.settings import hinges
from polyfed.cli.commands import Compare, Run
from polyfed.cli.console import Show, results
from polyfed.cli.folders import claimed
from polyfed.cli.given import collect
from polyfed.cli.portable import pin
from polyfed.cli.screen import interrupted, say, stderr
from polyfed.report.words import duration
from polyfed.runs import stop
from polyfed.runs.build import Parts
from polyfed.runs.config import Experiment, defaults_for, resolve
from polyfed.runs.ownership import holds_results
from polyfed.studies.compare import Comparison
from polyfed.studies.compare import compare as comparing
from polyfed.studies.jobs import read_result

SEEDS = 5  # of a comparison
OWN, LEAST, MINUTE = 10, 3, 60.0  # seeds of a run of several methods that names none, at least, and seconds for them


def run(o: Run) -> int:
    typed = collect(o)
    experiment = resolve(o.experiment, typed, o.algorithm or (), defaults_for(o.experiment, typed))
    s = experiment.settings
    if opened := len(experiment.methods) > 1 and s.seeds is None and "seed" not in typed and s.seed == 0:
        experiment = replace(experiment, settings=replace(s, seeds=OWN))
    return execute(experiment, o.out, o.force, o.quiet, opened=opened)


def compare(o: Compare) -> int:
    typed = collect(o)
    experiment = resolve(None, typed, o.methods, defaults_for(None, typed) | {"seeds": SEEDS})
    return execute(experiment, o.out, o.force, o.quiet)


def execute(
    experiment: Experiment,
    out: Path | None,
    force: bool = False,
    quiet: bool = False,
    resume: bool = False,
    left: Callable[[Path], None] | None = None,
    opened: bool = False,
) -> int:
    """Run (or continue) an experiment in `out`, report it, and return the exit status.

    left: for an experiment that clients have left, what to say and write at its end
    opened: fewer seeds, down to `LEAST`, where a minute holds no more
    """
    parts = prepared(experiment, not resume and left is None)
    experiment, since = parts.experiment, stop.interruptions()
    federation = parts.federation(experiment.seeds[0])
    for note in federation.notes if not resume else ():
        if note.startswith(CHECK):
            say(note, stderr)
    for line in sorted(parts.unknown - {""}):
        say(line, stderr)
    with claimed(out, experiment.name, force, resume) as folder:
        say(federation.aim)
        one = experiment.single and not (resume and (folder / "comparison.toml").exists())
        try:
            status = _single(parts, folder, quiet, resume) if one else _many(parts, folder, quiet, resume, opened)
        except KeyboardInterrupt:
            status = "interrupted"
        if status == "interrupted":
            return interrupted(go_on(folder), since)
        study = report.read(folder)
        results(study, report.write_report(study))
        if left is not None:
            left(folder)
    if status:
        say(f"polyfed: {status}", stderr)
    return 1 if status else 0


def prepared(experiment: Experiment, fresh: bool = False) -> Parts:
    """The parts of an experiment, checked. fresh: that clients are left out by `polyfed leave` alone as well"""
    if experiment.settings.portable:
        pin()
    parts = Parts(experiment)
    if fresh:
        parts.check_without()
    parts.check()
    return parts


def go_on(folder: Path) -> str:
    """Say how to go on."""
    return f"resume with: polyfed resume {folder}" if holds_results(folder) else "nothing had been computed yet"


def _single(parts: Parts, folder: Path, quiet: bool, resume: bool) -> str:
    """One run in its own folder; returns "" or "interrupted"."""
    e, (method,), (seed,) = parts.experiment, parts.experiment.methods, parts.experiment.seeds
    if resume and (done := read_result(folder, method.label, seed, e.settings.rounds)) and done.status == "finished":
        say("finished already; nothing to resume", stderr)
        return ""
    with Show(True, quiet, [seed]) as show:
        show.begin(method.label, seed)
        run = parts.trainer.run(folder, resume, show.callbacks())
    return "interrupted" if run.status == "interrupted" else ""


def _untuned(method: Any) -> str:
    """The settings on which a method's result hinges and that are at their defaults, as `lam = 0.6`."""
    return ", ".join(f"{f.name} = {f.default}" for f in hinges(method) if getattr(method, f.name) == f.default)


def _many(parts: Parts, folder: Path, quiet: bool, resume: bool, opened: bool) -> str:
    """A comparison; returns "", "interrupted", or what to say of the runs that diverged."""
    e, since = parts.experiment, time.monotonic()
    by_label = {m.label: m for m in e.methods}
    left = {m.label: (m.algorithm.name, _untuned(m.algorithm)) for m in e.methods}
    notes = [
        f"note: {label} has its default {untuned}, on which its result hinges; polyfed tune {name} chooses it"
        for label, (name, untuned) in left.items()
        if untuned and not resume
    ]
    if not system.FORKS:
        notes.append("note: runs train one after another: a process that has used torch cannot be forked here")
    with Show(False, quiet, e.seeds, notes) as show:
        several = partial(
            comparing,
            parts.model,
            parts.federation,
            {m.label: m.algorithm for m in e.methods},
            parts.training(),
            out=folder,
            keep=False,
            watch=show,
            describe=lambda label: parts.describe(by_label[label]),
            report=False,  # `execute` writes it
        )
        if opened:
            show.least = len(e.seeds) * len(e.methods)
            first = several(seeds=e.seeds[:1], config=e.toml())
            took = time.monotonic() - since
            if first.status == "interrupted":
                return "interrupted"
            if MINUTE < took * OWN:
                e = replace(e, settings=replace(e.settings, seeds=max(LEAST, int(MINUTE / took))))
                show.least = 0
                say(f"{len(e.seeds)} seeds: one takes {duration(took)}; more by --seeds", stderr)
        comparison = several(seeds=e.seeds, config=e.toml(), resume=resume or opened)
    return "interrupted" if comparison.status == "interrupted" else _diverged(comparison)


def _diverged(comparison: Comparison) -> str:
    if not comparison.failures:
        return ""
    which = ", ".join(f"{r.label} seed {r.seed}" for r in comparison.failures)
    first = comparison.failures[0].message
    return f"{len(comparison.failures)} of {len(comparison.results)} runs diverged ({which}): {first}"
