"""polyfed privacy: what a private experiment will do, before anything is trained, and what it would cost."""

import dataclasses

from polyfed import report
from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Privacy
from polyfed.cli.console import Show
from polyfed.cli.folders import claimed
from polyfed.cli.given import collect
from polyfed.cli.screen import stdout
from polyfed.core.algorithm import Algorithm
from polyfed.report import words
from polyfed.report.privacy import sentences
from polyfed.runs.build import Parts
from polyfed.runs.config import defaults_for, resolve
from polyfed.runs.private import shared_by
from polyfed.runs.trainer import prepare
from polyfed.studies.price import price


def privacy(o: Privacy) -> int:
    """Print the plan of every method; exit status 2 where one is refused."""
    typed = collect(o)
    parts = Parts(resolve(o.experiment, typed, o.algorithm or (), defaults_for(o.experiment, typed)))
    e = parts.experiment
    if e.settings.privacy is None:
        raise ConfigError('privacy: found no table [privacy], expected one, such as sums = "secure"')
    if o.cost is not None:
        return _cost(o, parts)
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


def _cost(o: Privacy, parts: Parts) -> int:
    """Train at each epsilon, and say what it costs at each site."""
    e, method = parts.experiment, parts.experiment.methods[0].algorithm
    try:
        epsilons = [float(value) for value in (o.cost or "").split(",")]
    except ValueError:
        raise ConfigError(f"cost: found {o.cost!r}, expected numbers such as 8,4,2,1") from None
    if not isinstance(method, Algorithm):
        raise ConfigError(f"cost: {method.name} is a yardstick, which sends nothing")
    parts.check()
    with claimed(o.out, f"{e.name}-privacy", o.force, False) as folder:
        with Show(False, o.quiet, e.seeds) as show:
            price(parts.model, parts.federation, method, parts.training(), epsilons, e.seeds, folder, show)
        study = report.read(folder)
        stdout.print(f"What privacy costs, by {words.Scale(study.metric).name}, against none (simulation):")
        stdout.print(*(f"  {line}" for line in sentences(study)), sep="\n", markup=False, soft_wrap=True)
        stdout.print(f"report: {folder / 'report.html'}", markup=False, soft_wrap=True)
    return 0
