"""A rehearsal: one round of two clients that leaves no trace, to see what a method sends and asks of its uplinks."""

import torch
from torch import nn

from polyfed.core.algorithm import Algorithm
from polyfed.core.batches import Work
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import client_keys
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Schedule, Uniform
from polyfed.core.task import Task
from polyfed.data.federation import Federation
from polyfed.engines.local import LocalEngine, make_plan, make_rows
from polyfed.threats import Rule


def rehearse(algorithm: Algorithm, task: Task, federation: Federation, work: Work, rounds: int = 1) -> Loop:
    """The event loop of the first two clients that have samples, after `rounds`.

    `used` says what the method asked of its uplinks, `ledger` what was sent.
    """
    who = federation.train.counts.nonzero()[0][:2]
    names = [federation.names[i] for i in who]
    train = federation.train.select(who).to(task.device, task.dtype)
    plan = make_plan(task, len(who), 1, workers=1)
    engine = LocalEngine(task, train, client_keys(names), work, 0, plan)
    rows = make_rows(algorithm, task, len(who), len(who), None)
    loop = Loop(task, train, names, algorithm, Uniform(), engine, rows, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(rounds):
            loop.step()
    finally:
        torch.set_num_threads(threads)
    return loop


def averaged(used: dict[str, set[str]]) -> list[str]:
    """The uplinks, by name, that a method takes means or sums of: those that a robust rule protects."""
    return sorted(name for name, words in used.items() if words != {"rows"})


def check_robust(
    algorithm: Algorithm, rule: Rule, model: nn.Module, loss, federation: Federation, work: Work, schedule: Schedule
) -> str:
    """What a robust rule will act on, in words. Raises ConfigError where that is nothing, or too few uploads."""
    taken = schedule.replies(federation.n)
    if why := rule.idle(taken):
        raise ConfigError(f"robust: {rule.name} would see {taken} upload{'s' * (taken > 1)} at a time; {why}")
    used = rehearse(algorithm, Task(model, loss, device="cpu"), federation, work).used
    means = averaged(used)
    if not means:
        raise ConfigError(f"robust: {algorithm.name} does not average its uploads, so {rule.name} cannot be applied")
    alone = sorted(name for name, words in used.items() if words == {"rows"})
    rest = f"; {', '.join(alone)} {'is' if len(alone) == 1 else 'are'} used client by client, as sent" if alone else ""
    return f"{rule.name} replaces the mean of {', '.join(means)}{rest}"
