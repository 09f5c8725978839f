"""`local_steps` as `fit` takes it: a number, a function of the round, or a number per client; and how many rounds lie
between evaluations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyfed.base.errors import ConfigError, closest
from polyfed.base.randomness import key_of
from polyfed.compute.batches import Each, Work
from polyfed.runs.training import plain

FREE = 20_000_000  # products (samples times parameters) of an evaluation that takes about a millisecond
INTEGER: type[Any] = np.integer
LocalSteps = int | Sequence[int] | Mapping[str, int] | Callable[[int], int]


@dataclass(frozen=True, eq=False)
class Listed(Each):
    """A fixed number of local steps for every client, by name."""

    steps: Mapping[str, int]

    @property
    def equal(self) -> bool:
        return len(set(self.steps.values())) == 1

    def __call__(self, seed: int, round: int, keys: np.ndarray) -> np.ndarray:
        known = {key_of(name): steps for name, steps in self.steps.items()}
        if any(key not in known for key in keys.tolist()):
            raise ConfigError("local_steps: found a list without the new client, expected one number or rule")
        return np.array([known[key] for key in keys.tolist()], dtype=np.int64)


def local_steps_of(given: LocalSteps | None, names: Sequence[str]) -> int | Callable[[int], int] | Each | None:
    """The rule that `Work` takes.

    names: [n] of the federation's clients; a list has one number for each, in this order, a table one by each name
    Raises ConfigError for anything that is not a rule, a missing or unknown client, and a number below 1.
    """
    if given is None or callable(given):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return _count(given, "local_steps")
    if isinstance(given, Mapping):
        for name in given:
            if name not in names:
                raise ConfigError(f"local_steps: there is no client {name!r}{closest(str(name), names)}")
        missing = [name for name in names if name not in given]
        if missing:
            raise ConfigError(f"local_steps: no number for client {missing[0]!r}, expected one for each")
        return Listed({name: _count(given[name], f"local_steps of client {name!r}") for name in names})
    if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str):
        if len(given) != len(names):
            raise ConfigError(f"local_steps: found {len(given)} numbers, expected one for each of {len(names)} clients")
        return Listed({n: _count(v, f"local_steps of client {n!r}") for n, v in zip(names, given, strict=True)})
    raise ConfigError(f"local_steps: found {given!r}, expected a number, a function or one number for each client")


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


def _count(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, INTEGER)) or value < 1:
        raise ConfigError(f"{what}: found {value!r}, expected an integer of at least 1")
    return int(value)
