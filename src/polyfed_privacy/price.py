"""price: the cost of differential privacy. The method is trained without it and at each epsilon, seed by seed on the
same rows, so that differences are paired. A simulation, with all data in one place; every run has its whole epsilon.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from polyfed import report as reports
from polyfed.base.errors import ConfigError
from polyfed.core.algorithm import Algorithm
from polyfed.data.federation import Federation
from polyfed.runs.folder import RunFolder
from polyfed.runs.ownership import locked
from polyfed.runs.trainer import prepare
from polyfed.runs.training import Training
from polyfed.studies.compare import Cached, Comparison, config_of
from polyfed.studies.jobs import Watch, execute, job_of
from polyfed_privacy.cost import OPEN, label_of


def price(
    model: Callable[[int], nn.Module],
    federation: Callable[[int], Federation],
    method: Algorithm,
    training: Training,
    epsilons: Sequence[float],
    seeds: Sequence[int],
    out: Path,
    watch: Watch,
) -> Comparison:
    """Train a method without privacy ("open") and at each epsilon ("epsilon-8", ...), into a comparison folder."""
    if training.privacy is None or training.privacy.clip is None:
        raise ConfigError("privacy.clip: found none, expected the clip that all epsilons are compared at")
    how = {OPEN: replace(training, privacy=None)}
    for epsilon in epsilons:
        how[label_of(epsilon)] = replace(training, privacy=replace(training.privacy, epsilon=epsilon, per="run"))
    made = Cached(model, federation)
    for one in how.values():
        prepare(*made(seeds[0]), method, replace(one, seed=seeds[0]))
    jobs = [
        job_of(out, label, seed, partial(made, seed), method, one, False)
        for seed in seeds
        for label, one in how.items()
    ]
    with locked(out):
        head = config_of(dict.fromkeys(how, method), list(seeds), training.dump())
        RunFolder(out).head("comparison.toml", head, "runs")
        runs = [done for _, done in execute(jobs, watch, False, training.rounds)]
        reports.write_report([out], out / "report.html")
    return Comparison(runs, folder=out)
