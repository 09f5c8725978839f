"""A run read back from its folder. Results come from its files; the models, the method and the server's state from its
last checkpoint. Nothing is written, and the data are looked for only where samples are needed.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from polyfed.base import checkpoint
from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, PolyfedError, RunError
from polyfed.base.randomness import client_keys
from polyfed.compute.augment import augmentation
from polyfed.compute.batches import Work
from polyfed.compute.check import check
from polyfed.compute.losses import LOSSES
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import REGISTRY, Algorithm, State
from polyfed.core.ledger import COLUMNS, Ledger
from polyfed.core.rounds import Loop, part
from polyfed.core.rows import is_mapped
from polyfed.core.schedule import Uniform
from polyfed.core.worker import Plan
from polyfed.data.federation import LEARNT, Federation
from polyfed.engines.local import LocalEngine, check_rows, make_rows, pick_device
from polyfed.metrics import scores
from polyfed.metrics.metric import Metric
from polyfed.metrics.scores import LOSS, leading
from polyfed.runs import ownership as files
from polyfed.runs import schema as reading
from polyfed.runs.build import Parts, make_model
from polyfed.runs.check import Where, read_table
from polyfed.runs.config import INFORMATION, TABLES, Settings, model_of, resolve
from polyfed.runs.fit import fit
from polyfed.runs.folder import client_model
from polyfed.runs.packages import installed
from polyfed.runs.result import Run
from polyfed.runs.resume import digest
from polyfed.runs.steps import local_steps_of
from polyfed.runs.training import Training
from polyfed.runs.userfile import algorithms_of
from polyfed.runs.watching import Callback
from polyfed.runs.weights import weights_of

if TYPE_CHECKING:
    from polyfed.studies.leave import Departure

SPLITS = ("train", "validation", "test")
NEEDED = ("seed", "dtype", "model", "data", "plan")  # keys of config.toml
SAID = ("data", "columns", "model", "algorithm", "start", "portable")


@checked
class Opened(Run):
    """A run that was read from its folder, see `Run.open`. `status` is "unfinished" where it was killed.

    Parameters
    ----------
    folder : str or Path
        The run's folder.
    federation : Federation or None
        The data, of a run that was started from Python with its own.
    model : nn.Module or None
        The model, of a run that was started from Python with its own.
    """

    def __init__(self, folder: str | Path, federation: Federation | None = None, model: nn.Module | None = None):
        path = Path(folder)
        config = files.config_of(path)
        if config.name == "comparison.toml":
            some = sorted(path.glob("runs/*-seed*"))
            raise ConfigError(
                f"{path}: is a comparison; name one of its runs" + (f", such as {some[0]}" if some else "")
            )
        self.folder = self._at = path
        self._given, self._own = federation, model
        self.settings = files.unsealed(config)
        missing = [key for key in NEEDED if key not in reading.config(path)]
        if missing:
            raise RunError(f"{config}: the key {missing[0]!r} is missing")
        self._about = reading.federation(path)
        names = [c["name"] for c in self._about["clients"]]
        found = reading.summary(path) if (path / "summary.json").exists() else {}
        self._table = _clients(path, names) if found else None
        self.status, self.seconds = found.get("status", "unfinished"), found.get("seconds") or 0.0
        self._rounds: int | None = found.get("rounds")
        self._metrics = tuple(map(scores.read, found.get("metrics") or [found])) if found else ()
        self.records = [{k: np.nan if v is None else v for k, v in r.items()} for r in reading.metrics(path)]
        self.final = {} if self._table is None else _final(self._table)
        self.ended = False

    def __getattr__(self, name: str) -> Any:
        """`loop` and `federation`, made when they are first asked for: most that a folder can say needs neither."""
        if name not in ("loop", "federation"):
            raise AttributeError(f"a Run has no {name!r}")
        self.__dict__[name] = self._reopened() if name == "loop" else self._data(forged=True)
        return self.__dict__[name]

    # from the files

    @property
    def rounds(self) -> int:
        last = self.records[-1]["round"] if self.records else 0
        return last if self._rounds is None else self._rounds

    @property
    def metrics(self) -> tuple[Metric, ...]:
        asked = tuple(scores.read({"metric": name}) for name in self.settings.get("metrics") or ())
        return self._metrics or asked or (leading(self.records[-1] if self.records else ()),)

    @property
    def _judges(self) -> list[Metric]:
        """The metrics, those that no file holds with an error in place of what computes them."""
        lost = self._gone("metrics")
        return [m if m.compute or m is LOSS else dataclasses.replace(m, compute=lost) for m in self.metrics]

    @property
    def clients(self) -> pd.DataFrame:
        return super().clients if self._table is None else self._table.copy()

    @property
    def ledger(self) -> pd.DataFrame:
        if not (self._at / "ledger.csv").exists():
            return super().ledger
        try:
            return reading.ledger(self._at).astype(dict.fromkeys(COLUMNS[:-1], "int64"))
        except (KeyError, ValueError) as e:
            raise RunError(f"{self._at / 'ledger.csv'}: not the ledger of a run ({checkpoint.reason(e)})") from None

    def _billed(self) -> Ledger:
        found = Ledger()
        found.restore(self._state[0]["ledger"])
        return found

    @property
    def findings(self) -> dict[str, Any]:
        return reading.report(self._at) if (self._at / "report.json").exists() else super().findings

    @cached_property
    def outline(self) -> Federation:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Who the clients are, how many samples each has and of which shape, from federation.json; no sample."""
        about = self._about
        if about.get("inputs") is None or about.get("outputs") is None:  # written by an older version
            return self.federation
        rows = about["clients"]
        parts = {k: _hollow([r.get(k) or 0 for r in rows], about) for k in SPLITS}
        return Federation(
            parts["train"],
            parts["test"],
            tuple(r["name"] for r in rows),
            parts["validation"] if parts["validation"].counts.any() else None,
            about["classes"],
            None if about.get("clusters") is None else np.array(about["clusters"]),
            {key: about[key] for key in LEARNT if key in about},
        )

    # from the checkpoint

    @cached_property
    def _state(self) -> tuple[State, dict[str, Any]]:
        """The last checkpoint's tensors and what is said of them."""
        place = self._at / "checkpoint"
        if not checkpoint.checkpoints(place):
            raise RunError(f"{self._at}: has no model yet; finish it with: polyfed resume {self._at}")
        tensors, meta, _ = checkpoint.load(place, partial(check_rows, self._at))
        if self._rounds not in (None, meta["t"]):
            raise RunError(
                f"{place}: the last checkpoint is damaged; found one of round {meta['t']}, expected {self._rounds}"
            )
        return tensors, meta

    @property
    def server(self) -> State:
        return self.loop.server if "loop" in self.__dict__ else part(self._state[0], "server.")

    @cached_property
    def algorithm(self) -> Algorithm:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The method."""
        installed(self.settings.get("packages", []), f"{self._at / 'config.toml'}: packages")
        table = dict(self._state[1]["fingerprint"]["algorithm"])
        file = table.pop("file", None)
        if file is not None:
            algorithms_of(Path(file))  # which registers them
        return REGISTRY.make(table.pop("name", None), {key.replace("-", "_"): v for key, v in table.items()})

    @cached_property
    def _module(self) -> nn.Module:
        """The model with the parameters that the run began with, and with the frozen tensors of its folder."""
        table = {k: v for k, v in self.settings["model"].items() if k != "parameters"}
        if self._own is not None:
            model = copy.deepcopy(self._own)
        elif "name" not in self.settings["data"]:
            raise RunError(
                f"{self._at}: its model was given in Python ({table.get('name')}); open the folder with "
                "polyfed.Run.open(folder, model=...)"
            )
        else:
            found = model_of(table, self._where)
            model = make_model(found, self.outline.input_shape, self.outline.outputs, self.settings["seed"])
        path = self._at / "fixed.safetensors"
        try:
            model.load_state_dict(reading.tensors(path) if path.is_file() else {}, strict=False)
        except RuntimeError as e:
            raise RunError(f"model: not the one of {self._at} ({' '.join(str(e).split())})") from None
        return model

    def _check_layout(self, task: Task) -> None:
        """Raise RunError for a model that is not the run's, as far as the files of its clients' models can tell."""
        found = client_model(self._at, 0, self._about["clients"][0]["name"])
        expected = {} if found is None else {name: list(t.shape) for name, t in found[0].items()}
        has = {name: list(t.shape) for name, t in task.layout.named(task.w0).items()}
        p = self.settings["model"].get("parameters", task.p)
        if task.p != p or (expected and has != expected):
            differ = [name for name in {**expected, **has} if has.get(name) != expected.get(name)] if expected else []
            which = f", not the same at {differ[0]}" if differ else ""
            raise RunError(f"model: not the one of {self._at}: found {task.p:,} parameters, expected {p:,}{which}")

    def _reopened(self) -> Loop:
        """The loop as the last checkpoint has it, with no samples behind it; it does not go on, see `resume`."""
        tensors, meta = self._state
        fed, t = self.outline, self._training
        try:
            plan = Plan(**self.settings["plan"])
        except TypeError as e:
            raise RunError(f"{self._at / 'config.toml'}: [plan] is not the plan of a run ({e})") from None
        device = pick_device("auto" if plan.device.startswith("cuda") else "cpu")
        assert t.loss is not None, "every run's config.toml has it"
        weights = weights_of(t.class_weights, t.loss, self._about)
        task = t.task(self._module, t.loss, device, self._judges, weights)
        self._check_layout(task)
        steps = local_steps_of(t.local_steps, fed.names)
        work = Work(t.epochs, steps, t.batch_size, augmentation(t.augment, fed.input_shape))
        seed, plan = t.seed, Plan(plan.chunk, 1, str(device), plan.path)
        place = self._at if is_mapped(part(tensors, "client.")) else None
        rows = make_rows(self.algorithm, task, fed.n, 1, place, tensors)
        engine = LocalEngine(task, {"train": fed.train}, rows, client_keys(fed.names), work, seed, plan, t.step_sizes)
        loop = Loop(task, fed.train.counts, fed.names, self.algorithm, Uniform(), engine, seed, t.step_sizes)
        loop.restore(tensors, meta)
        return loop

    # settings

    @property
    def _where(self) -> Where:
        return Where(self._at / "config.toml", self.settings, {})

    @property
    def _objects(self) -> list[str]:
        """The settings that were objects of Python, of which config.toml has a word only."""
        s = self.settings
        return [
            key
            for key, found in (
                ("loss", s.get("loss") not in LOSSES),
                ("augment", s.get("augment") == "function"),
                ("metrics", any(scores.known(name) is None for name in s.get("metrics") or ())),
                ("local-steps", s.get("local-steps") == "function"),
                ("schedule", isinstance(s.get("schedule"), str)),
            )
            if found
        ]

    @cached_property
    def _training(self) -> Settings:
        """How the run was trained; a function that no file holds raises an error when it is used."""
        aside = {*TABLES, *INFORMATION, "start", *self._objects}
        known = {k: v for k, v in self.settings.items() if k not in aside}
        gone = {key.replace("-", "_"): self._gone(key) for key in self._objects if key not in ("schedule", "metrics")}
        return dataclasses.replace(read_table(Settings, known, self._where, TABLES), **gone)

    def _gone(self, key: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise self._unknown(key)

        return refuse

    def _unknown(self, key: str) -> ConfigError:
        return ConfigError(
            f"{self._at}: its {key} was a Python object, which no file holds; continue with "
            "polyfed.fit(..., out=folder, resume=True)"
        )

    # with the data

    def _data(self, forged: bool) -> Federation:
        """The run's data, given or read again. forged: with what an attack on the labels has made of them."""
        s = self.settings
        if self._given is not None:
            fed = self._given
        elif "sites" in s["data"]:
            raise RunError(f"{self._at}: its data are at its sites: {', '.join(s['data']['sites'])}")
        elif "name" not in s["data"]:
            raise RunError(
                f"{self._at}: its data are needed and were given in Python ({self.outline.n} clients); open the "
                "folder with polyfed.Run.open(folder, federation=...)"
            )
        else:
            try:
                fed = Parts(resolve(self._at / "config.toml")).federation(s["seed"])
            except PolyfedError as e:
                where = s["data"].get("dir") or s["data"]["name"]
                raise RunError(f"{self._at}: its data, {where}, are needed and cannot be read ({e})") from None
        attack = self._training.attack
        attacked = fed if attack is None else attack.poison(fed, s["seed"])
        if s["data"].get("digest") not in (None, digest(attacked)):
            raise RunError(f"{self._at}: its data are not the ones it was trained on")
        return attacked if forged else fed

    def scored(self, name: str) -> dict[str, np.ndarray]:
        return self.evaluate(self.personal, name)

    def evaluate(self, models: Tensor | None, split: str = "test") -> dict[str, np.ndarray]:
        check(self.loop.task, self.federation.train, self.federation.classes)
        return super().evaluate(models, split)

    def parts(self) -> tuple[nn.Module, Federation, Training, Algorithm]:
        """What the run was made of.

        Returns
        -------
        tuple
            The model with the parameters that it began with, the data, how it was trained, the method.

        Raises
        ------
        RunError
            The data cannot be read, or have changed.
        ConfigError
            A setting was an object of Python, which no file holds.
        """
        if self._objects:
            raise self._unknown(self._objects[0])
        return self._module, self._data(forged=False), self._training, self.algorithm

    def leave(
        self, *clients: int | str, out: str | Path | None = None, callbacks: Sequence[Callback] = ()
    ) -> "Departure":
        """Train the run again without some of its clients, every other draw the same; the run stays as it is.

        The result is, bit for bit, the run of a federation that never had them: whatever follows from all clients is
        worked out anew. In a federation that was made in Python, what the program computed from all clients before
        (scaling, a vocabulary) is its own to redo.

        Parameters
        ----------
        *clients : int or str
            Who leaves, by position or name.
        out : str, Path or None
            Folder of the new run; None: beside the run's, under a name that says who left.
        callbacks : sequence of callable
            As for `fit`.

        Returns
        -------
        Departure
            What it costs those who stay, in scores and bytes; its `folder` is the new run's.

        Raises
        ------
        ConfigError
            There is no such client, none would stay, or the run started from another one.
        RunError
            The run is not finished, or its data cannot be read or have changed.
        """
        from polyfed.studies.leave import leave

        return leave(self, clients, None if out is None else Path(out), callbacks)

    def resume(self, rounds: int | None = None, callbacks: Sequence[Callback] = ()) -> Run:
        """Train on from the last checkpoint, to the numbers of a run that was never interrupted, and write the folder.

        Parameters
        ----------
        rounds : int or None
            In all; None: as many as the run was to have.
        callbacks : sequence of callable
            As for `fit`.

        Returns
        -------
        Run
            The run, trained on.

        Raises
        ------
        RunError
            The data cannot be read, or have changed.
        ConfigError
            A setting was an object of Python, which no file holds.
        """
        model, federation, training, algorithm = self.parts()
        training = training if rounds is None else dataclasses.replace(training, rounds=rounds)
        described = {key: self.settings[key] for key in SAID if key in self.settings}
        with files.locked(self._at):
            files.settle(self._at)
            return fit(
                model, federation, algorithm, training, out=self._at, resume=True, callbacks=callbacks,
                describe=described,
            )  # fmt: skip


def _hollow(counts: list[int], about: dict[str, Any]) -> Split:
    """A split with the right number of samples and no values: NaN, in no memory."""
    total, classes = sum(counts), about["classes"]
    x = torch.full((1,), torch.nan).view([1] * (1 + len(about["inputs"]))).expand(total, *about["inputs"])
    y = (
        x.new_full((1, 1), torch.nan).expand(total, about["outputs"])
        if classes is None
        else torch.zeros(1).long().expand(total)
    )
    return Split(x, y, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))


def _clients(folder: Path, names: list[str]) -> pd.DataFrame:
    """clients.csv with the types that `Run.clients` has."""
    found = reading.clients(folder, names)
    types: dict[str, Any] = dict.fromkeys(filter(_is_metric, found.columns), "float64")
    types |= {c: "Int64" for c in ("cluster", "assigned") if c in found}
    try:
        return found.astype(types)
    except (ValueError, TypeError) as e:
        raise RunError(f"{folder / 'clients.csv'}: not a readable table ({checkpoint.reason(e)})") from None


def _final(table: pd.DataFrame) -> dict[str, Mapping[str, np.ndarray]]:
    """The metrics of clients.csv, by split."""
    found: defaultdict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for column, values in table.items():
        if _is_metric(column):
            split, _, key = str(column).partition("_")
            found[split][key] = values.to_numpy()
    return {**found}


def _is_metric(column: Any) -> bool:
    split, _, key = str(column).partition("_")
    return split in SPLITS and key not in ("", "samples")
