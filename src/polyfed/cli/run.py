"""polyfed run and polyfed compare: experiments, from a file, from options, or the built-in one."""

from polyfed.cli.commands import Compare, Run
from polyfed.cli.execute import execute
from polyfed.cli.given import collect
from polyfed.runs.config import defaults_for, resolve

SEEDS = 5  # of a comparison


def run(o: Run) -> int:
    """One experiment."""
    typed = collect(o)
    found = resolve(o.experiment, typed, o.algorithm or (), defaults_for(o.experiment, typed))
    return execute(found, o.out, o.force, o.quiet)


def compare(o: Compare) -> int:
    """Several methods on the same data, seeds and starts."""
    typed = collect(o)
    found = resolve(None, typed, o.methods, defaults_for(None, typed) | {"seeds": SEEDS})
    return execute(found, o.out, o.force, o.quiet)
