"""From a checked experiment to results on disk and on the screen: what run, compare and resume have in common."""

from collections.abc import Callable
from pathlib import Path

from polyfed import report
from polyfed.cli.console import Show, results, stderr
from polyfed.cli.folders import claimed
from polyfed.cli.portable import pin
from polyfed.runs import ownership as files
from polyfed.runs import stop
from polyfed.runs.build import Parts
from polyfed.runs.config import Experiment
from polyfed.runs.trainer import fit
from polyfed.studies.compare import Comparison, compare
from polyfed.studies.jobs import read_result


def execute(
    experiment: Experiment,
    out: Path | None,
    force: bool = False,
    quiet: bool = False,
    resume: bool = False,
    left: Callable[[Path], None] | None = None,
) -> int:
    """Run (or continue) an experiment in `out`, report it, and return the exit status.

    left: for an experiment that clients have left, what to say and write at its end
    """
    if experiment.settings.portable:
        pin()
    parts = Parts(experiment)
    experiment = parts.experiment
    if not resume and left is None:
        parts.check_without()
    parts.check()
    since = stop.interruptions()
    with claimed(out, experiment.name, force, resume) as folder:
        one = experiment.single and not (resume and (folder / "comparison.toml").exists())
        try:
            status = _single(parts, folder, quiet, resume) if one else _many(parts, folder, quiet, resume)
        except KeyboardInterrupt:
            status = "interrupted"
        if status == "interrupted":
            say_interrupted(folder)
            return stop.status(since)
        study = report.read(folder)
        results(study, report.write_report(study))
        if left is not None:
            left(folder)
        files.forget_old(folder)
    if status:
        stderr.print(f"polyfed: {status}", soft_wrap=True, markup=False)
    return 1 if status else 0


def say_interrupted(folder: Path) -> None:
    """Say how to go on. Where nothing has been begun, results from before are put back."""
    then = f"resume with: polyfed resume {folder}{files.where_old(folder)}"
    if not any((folder / name).exists() for name in files.HEADS):
        files.settle(folder)
        then = "nothing had been computed yet"
    stderr.print(f"polyfed: interrupted; {then}", soft_wrap=True, markup=False)


def _single(parts: Parts, folder: Path, quiet: bool, resume: bool) -> str:
    """One run in its own folder; returns "" or "interrupted"."""
    e, seed = parts.experiment, parts.experiment.seeds[0]
    method = e.methods[0]
    if resume and (done := read_result(folder, method.label, seed, e.settings.rounds)) and done.status == "finished":
        stderr.print("finished already; nothing to resume")
        return ""
    with Show(True, quiet) as show:
        show.begin(method.label, seed)
        run = fit(
            parts.model(seed),
            parts.federation(seed),
            method.algorithm,
            parts.training(seed),
            out=folder,
            resume=resume,
            callbacks=show.callbacks(),
            describe=parts.describe(method),
        )
    return "interrupted" if run.status == "interrupted" else ""


def _many(parts: Parts, folder: Path, quiet: bool, resume: bool) -> str:
    """A comparison; returns "", "interrupted", or what to say of the runs that diverged."""
    e = parts.experiment
    by_label = {m.label: m for m in e.methods}
    with Show(False, quiet) as show:
        found = compare(
            parts.model,
            parts.federation,
            {m.label: m.algorithm for m in e.methods},
            parts.training(),
            seeds=e.seeds,
            out=folder,
            resume=resume,
            keep=False,
            watch=show,
            config=e.toml(),
            describe=lambda label: parts.describe(by_label[label]),
            report=False,  # `execute` writes it
        )
    return "interrupted" if found.status == "interrupted" else _diverged(found)


def _diverged(found: Comparison) -> str:
    if not found.failures:
        return ""
    which = ", ".join(f"{r.label} seed {r.seed}" for r in found.failures)
    first = found.failures[0].message
    return f"{len(found.failures)} of {len(found.results)} runs diverged ({which}): {first}"
