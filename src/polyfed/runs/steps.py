"""`local_steps` as `fit` takes it: a number, a function of the round, or a number per client; and how many rounds lie
between evaluations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polyfed.base.errors import ConfigError, closest
from polyfed.base.randomness import key_of
from polyfed.compute.batches import Each, Work
from polyfed.runs.training import plain

FREE = 20_000_000  # products (samples times parameters) of an evaluation that takes about a millisecond
LocalSteps = int | Sequence[int] | Mapping[str, int] | Callable[[int], int]


@dataclass(frozen=True, eq=False)
class Listed(Each):
    """A fixed number of local steps for every client, by name."""

    steps: Mapping[str, int]

    @property
    def equal(self) -> bool:
        return len(set(self.steps.values())) == 1

    def __call__(self, seed: int, round: int, keys: np.ndarray) -> np.ndarray:
        by_key = {key_of(name): steps for name, steps in self.steps.items()}
        if any(key not in by_key for key in keys.tolist()):
            raise ConfigError("local_steps: found a list without the new client, expected one number or rule")
        return np.array([by_key[key] for key in keys.tolist()], dtype=np.int64)


def local_steps_of(given: LocalSteps | None, names: Sequence[str]) -> int | Callable[[int], int] | Each | None:
    """The rule that `Work` takes.

    given: as `Training` has checked it     names: [n] of the federation's clients; a list has one number for each, in
        this order, a table one by each name
    Raises ConfigError for a missing or unknown client, and a number below 1.
    """
    if given is None or callable(given) or isinstance(given, int):
        return given
    if not isinstance(given, Mapping):
        if len(given) != len(names):
            raise ConfigError(f"local_steps: found {len(given)} numbers, expected one for each of {len(names)} clients")
        given = dict(zip(names, given, strict=True))
    if strange := next((name for name in given if name not in names), None):
        raise ConfigError(f"local_steps: there is no client {strange!r}{closest(strange, names)}")
    for name in names:
        if name not in given:
            raise ConfigError(f"local_steps: no number for client {name!r}, expected one for each")
        if given[name] < 1:
            raise ConfigError(f"local_steps of client {name!r}: found {given[name]}, expected an integer of at least 1")
    return Listed(given)


def recorded(rule: int | Callable[[int], int] | Each | None) -> int | str | dict[str, int] | None:
    """local-steps as config.toml has it."""
    if isinstance(rule, Listed):
        return dict(rule.steps)
    return plain(rule)


def between_evaluations(samples: int, counts: np.ndarray, keys: np.ndarray, work: Work, share: float, p: int) -> int:
    """Rounds between evaluations: 1, 2, 5, 10, 20, ..., the first with at most a tenth of the arithmetic of training.

    It is counted, not timed, so that the same run has the same curve everywhere: a sample that is evaluated costs one
    pass, one that is trained on three. Evaluations of at most `FREE` products are made after every round.

    samples: evaluated     counts: [n] training samples     share: of the clients, that train in a round
    """
    rounds = 1
    if samples * p > FREE:
        trained = share * (work.taken(counts, 0, keys) * np.minimum(counts, work.batch_size or counts)).sum()
        for rounds in (b * 10**k for k in range(6) for b in (1, 2, 5)):
            if 10 * samples <= 3 * rounds * trained:
                break
    return rounds
