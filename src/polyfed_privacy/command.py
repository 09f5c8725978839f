"""polyfed privacy: what a private experiment will do, before anything is trained, and what it would cost.
polyfed audit: whether a private run keeps its promise against rows that were made to break it.
"""

import dataclasses

from polyfed import report
from polyfed.base.errors import ConfigError
from polyfed.cli.console import Show
from polyfed.cli.folders import claimed
from polyfed.cli.given import collect
from polyfed.cli.screen import stdout
from polyfed.core.algorithm import Algorithm
from polyfed.report import words
from polyfed.runs.build import Parts
from polyfed.runs.config import defaults_for, resolve
from polyfed.runs.ownership import config_of
from polyfed.runs.rehearsal import sending
from polyfed.runs.trainer import prepare
from polyfed_privacy.audit import audit as audited
from polyfed_privacy.commands import Audit, Privacy
from polyfed_privacy.cost import sentences
from polyfed_privacy.price import price


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
    runs = len(e.seeds) * sum(sending(m.algorithm) for m in e.methods)
    how = dataclasses.replace(parts.training(seed), privacy=e.settings.privacy.shared(runs))
    for method in e.methods:
        if not isinstance(method.algorithm, Algorithm):
            continue
        try:
            trainer = prepare(parts.model(seed), parts.federation(seed), method.algorithm, how)
            lines = trainer.describe["privacy-says"]
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


def audit(o: Audit) -> int:
    """Print the bound beside the claim; exit status 1 where the claim is broken."""
    settings = resolve(config_of(o.run)).settings
    if settings.privacy is None:
        raise ConfigError(f"{o.run}: has no table [privacy], and nothing to audit")
    result = audited(settings.privacy, settings.rounds)
    stdout.print(
        f"{result.right} of the {result.guesses} canaries that were guessed with most certainty were guessed rightly\n"
        f"epsilon is at least {result.bound:.2f} (95 % confidence), its settings claim {result.claim:.2f}: "
        + ("the claim is wrong" if result.bound > result.claim else "nothing speaks against the claim")
        + f"\nall canaries are told from absent ones with an AUC of {result.auc:.3f}; the claim's noise allows about "
        f"{result.best:.3f}\n"
        f"the noise has {result.second:.3f} times the variance that the claim needs, and a fourth moment of "
        f"{result.fourth:.2f} (Gaussian: 3), over {result.moves:,} numbers: "
        + ("the noise is wrong" if result.short else "as claimed"),
        markup=False,
        highlight=False,
    )
    return 1 if result.broken else 0
