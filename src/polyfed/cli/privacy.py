"""polyfed privacy: what a private experiment will do, before anything is trained."""

import dataclasses

from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Privacy
from polyfed.cli.given import collect
from polyfed.cli.screen import stdout
from polyfed.core.algorithm import Algorithm
from polyfed.runs.build import Parts
from polyfed.runs.config import defaults_for, resolve
from polyfed.runs.private import shared_by
from polyfed.runs.trainer import prepare


def privacy(o: Privacy) -> int:
    """Print the plan of every method; exit status 2 where one is refused."""
    typed = collect(o)
    parts = Parts(resolve(o.experiment, typed, o.algorithm or (), defaults_for(o.experiment, typed)))
    e = parts.experiment
    if e.settings.privacy is None:
        raise ConfigError('privacy: found no table [privacy], expected one, such as sums = "secure"')
    seed, status = e.seeds[0], 0
    methods = [m.algorithm for m in e.methods]
    how = dataclasses.replace(parts.training(seed), privacy=shared_by(e.settings.privacy, methods, len(e.seeds)))
    for method in e.methods:
        if not isinstance(method.algorithm, Algorithm):
            continue
        try:
            plan = prepare(parts.model(seed), parts.federation(seed), method.algorithm, how).private
            lines = [] if plan is None else plan.lines()
        except ConfigError as refused:
            status, lines = 2, [f"Refused: {refused}"]
        stdout.print(f"{method.label}:", *(f"  {line}" for line in lines), sep="\n", markup=False, soft_wrap=True)
    return status
