"""polyfed resume: continue an interrupted run or comparison where it stopped."""

from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Resume
from polyfed.cli.folders import is_search, kind
from polyfed.cli.given import collect
from polyfed.cli.run import execute
from polyfed.runs.config import resolve
from polyfed.runs.ownership import MARK, config_of, is_ours, locked, unsealed


def resume(o: Resume) -> int:
    run = o.run
    if of := kind(run):
        return of.resumed(run, o)
    if is_search(run) and is_ours(run):
        raise ConfigError(f"{run}: holds a search; the same polyfed tune command with --out {run} continues it")
    if not (run / MARK).is_file():
        unsealed(config_of(run))  # a folder of somebody else is not even marked
    with locked(run):
        unsealed(config_of(run))
        return execute(resolve(config_of(run), collect(o)), run, quiet=o.quiet, resume=True)
