"""coalitions: the clients' federation trained again for its coalitions, 2^n - 1 runs a seed, and each client's gains.

Draws are keyed by names: a client has the same samples and batches in every coalition, and all else is its members'.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.local import Local
from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.values import COUNT
from polyfed.core.algorithm import Contender
from polyfed.data.federation import Federation
from polyfed.data.validation import validated
from polyfed.models.start import Start
from polyfed.runs import ownership as files
from polyfed.runs.folder import RunFolder
from polyfed.runs.privacy import refuse_private
from polyfed.runs.training import MANY, SEED, Training, training_of
from polyfed.studies.compare import Cached, config_of, seeds_of
from polyfed.studies.jobs import Job, Watch, execute, job_of
from polyfed_games import values as game
from polyfed_games.found import HEAD, Found, names_of, settle, walks_of
from polyfed_games.result import Coalitions

MOST = 8  # clients up to which every coalition is trained
SAMPLES = 10  # beyond: how often every client joins every other, on average
Made = tuple[nn.Module, Federation]
Maker = Callable[[int, Sequence[str]], Made]  # of (seed, who is left out)
Tables = Callable[[str, Sequence[str]], Mapping[str, Any]]  # of (label, who is left out): further ones for config.toml


@checked
def coalitions(
    model: Start,
    federation: Federation | Callable[[int], Federation],
    algorithm: Contender | None = None,
    training: Training | None = None,
    *,
    seeds: MANY | Sequence[SEED] = 5,
    samples: COUNT | None = None,
    against: Mapping[str, Contender] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    **settings: Any,
) -> Coalitions:
    """Train the coalitions of a federation's clients, for each client's gain from the others.

    Up to 8 clients every coalition is trained; beyond, coalitions are sampled. Ctrl-C finishes and saves the round in
    hand and raises KeyboardInterrupt.

    Parameters
    ----------
    model : nn.Module or callable
        As for `compare`.
    federation : Federation or callable
        As for `compare`, with test samples. Without a validation split, a fifth of each client's training samples
        becomes one; ``partition(validation_fraction=0.2)`` holds it out before inputs are scaled or filled in.
    algorithm : Algorithm, Yardstick or None
        Method of the coalitions; None: FedAvg. Own models are trained alone with the same step size.
    training : Training or None
        As for `fit`; its seed is not used.
    seeds : int or sequence of int
        Their number (0, 1, ...), or the seeds.
    samples : int or None
        Joinings of each pair in the coalitions sampled, on average; None: every coalition up to 8 clients, else 10.
    against : dict or None
        Methods whose clusters (FPFC, IFCA) or mixing weights (FedACS) are compared with the coalitions.
    out : str, Path or None
        Folder of coalitions.toml, runs/<coalition>-seed<k>/ and the results; without it nothing is kept.
    resume : bool
        Go on in `out`: finished runs are read back.
    watch : Watch or None
        Callbacks for the progress of the runs.
    **settings
        Settings for `fit`, such as rounds=100, batch_size=None.

    Returns
    -------
    Coalitions
        Scores, gains, Shapley values, stable partitions, and the agreement with other methods.
    """
    which = seeds_of(seeds)
    how, method = training_of(training, {"evaluate_every": 0, **settings}), algorithm or FedAvg()
    methods = {method.name: method, **(against or {})}

    both = Cached(model, federation)

    def make(seed: int, without: Sequence[str]) -> Made:
        net, data = both(seed)
        data = validated(data, seed)
        return net, data.without(without) if without else data

    config = config_of({k.replace(" ", "-"): v for k, v in methods.items()}, which, how.dump())
    game_of = Game(make, make(which[0], ())[1], list(methods.values()), list(methods), how, which, samples)
    with tempfile.TemporaryDirectory() if out is None else contextlib.nullcontext(out) as place:
        played = game_of.play(Path(place), resume, watch or Watch(), config)
        return played if out is not None else dataclasses.replace(played, folder=None)


@dataclass(frozen=True)
class Game:
    """Facts that the runs of a folder have in common."""

    make: Maker
    federation: Federation  # of the first seed
    methods: Sequence[Contender]  # the coalitions' own first, then those compared with them
    labels: Sequence[str]
    training: Training
    seeds: Sequence[int]
    samples: int | None
    describe: Tables = lambda label, without: {"data": {"without": list(without)}} if without else {}

    def __post_init__(self) -> None:
        refuse_private(self.training.privacy, "coalitions")
        n = self.federation.n
        if n < 2:
            raise ConfigError(f"coalitions: found {n} client, expected at least two")
        if not len(self.federation.test.x):
            raise ConfigError("coalitions: found a federation without test samples, expected some to judge by")
        if self.training.attack is not None:
            raise ConfigError("attack: attackers have no score, so coalitions with them cannot be judged; leave it out")
        if n > MOST and self.samples is None:
            object.__setattr__(self, "samples", SAMPLES)

    @property
    def names(self) -> tuple[str, ...]:
        return self.federation.names

    def play(self, folder: Path, resume: bool, watch: Watch, config: Mapping[str, Any]) -> Coalitions:
        """Train what is missing in a folder and write the results."""
        told = {"clients": list(self.names), "labels": list(self.labels)}
        told |= {} if self.samples is None else {"samples": self.samples}
        with files.locked(folder):
            _begin(folder, {**config, "coalitions": told}, resume)
            n, orders = len(self.names), walks_of(len(self.names), self.samples, self.seeds[0])
            all_of_them, alone = game.everyone(n), [1 << i for i in range(n)]
            chosen = game.visited(orders) if orders else range(1, 1 << n)
            left_out = [all_of_them & ~(1 << i) for i in range(n)]
            wanted = list(dict.fromkeys([all_of_them, *alone, *chosen, *left_out]))
            jobs: list[Job] = []
            for s in self.seeds:
                jobs += [self._coalition(folder, c, s, resume) for c in wanted]
                others = zip(self.labels[1:], self.methods[1:], strict=True)
                jobs += [self._job(folder, label, s, method, (), resume) for label, method in others]
            self._train(jobs, resume, watch)

            def more(coalitions: list[int]) -> None:
                extra = [self._coalition(folder, c, s, True) for s in self.seeds for c in coalitions]
                self._train(extra, True, watch)

            if orders:
                settle(Found.read(folder), more)
            result = Coalitions.open(folder)
            result.save()
        return result

    def _coalition(self, folder: Path, c: int, seed: int, resume: bool) -> Job:
        without = tuple(name for i, name in enumerate(self.names) if not c >> i & 1)
        method = self.methods[0] if c & (c - 1) else self._own
        return self._job(folder, names_of(c, self.names), seed, method, without, resume)

    def _job(
        self, folder: Path, label: str, seed: int, method: Contender, without: tuple[str, ...], resume: bool
    ) -> Job:
        parts, about = partial(self.make, seed, without), partial(self.describe, label, without)
        return job_of(folder, label, seed, parts, method, self.training, resume, describe=about)

    @property
    def _own(self) -> Contender:
        """Score of a client that trains alone."""
        lr = getattr(self.methods[0], "lr", None)
        return Local(float(lr)) if isinstance(lr, int | float) else Local()

    def _train(self, jobs: Sequence[Job], resume: bool, watch: Watch) -> None:
        for _ in execute(jobs, watch, resume, self.training.rounds, alone=self.training.engine != "local"):
            pass


def _begin(folder: Path, config: Mapping[str, Any], resume: bool) -> None:
    """Write coalitions.toml. Raises RunError for a folder that holds something else, or is not to be resumed."""
    path = folder / HEAD
    if path.exists():
        if not resume:
            raise RunError(
                f"{folder} already holds coalitions; resume=True continues them, otherwise give another folder"
            )
        before, now = files.unsealed(path)["coalitions"], config["coalitions"]
        for key, name in (("clients", "clients"), ("samples", "samples"), ("labels", "method")):
            then, wanted = ((t[key][0] if key == "labels" else t.get(key)) for t in (before, now))
            if then != wanted:
                raise RunError(f"cannot resume {folder}: its {name}: found {wanted!r}, expected {then!r}")
    elif files.holds_results(folder):
        raise RunError(f"{folder}: holds other results; give another folder")
    RunFolder(folder).head(HEAD, dict(config), "runs")
