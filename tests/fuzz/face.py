"""The Python face: every public call of polyfed with arguments that work, and values that no argument takes."""

import inspect
import math
import shutil
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import polyfed as pf
import polyfed_clinical
from fuzz import net, survives, tiny
from polyfed.base.errors import PolyfedError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Batches, Work
from polyfed.data.csv_files import sheet_of
from polyfed.metrics.metric import Predictions
from polyfed.runs.result import Result
from polyfed.runs.trainer import Trainer, prepare
from polyfed.studies.compare import Comparison
from polyfed.studies.predict import predictor
from polyfed.yardsticks import Yardstick
from polyfed_members.admission import Admission
from polyfed_papers.window import WindowAdvice, window_for
from polyfed_tuning.tuned import Tuned

NONSENSE = [None, 3, -1, "x", [], {}, object(), math.nan, 2**70, lambda *_: None]
# What polyfed calls and authors write, and what it hands to them, once per round or step: `check_method` sees to these.
OURS = (pf.Round, pf.Task, pf.Uplinks, pf.Down, pf.Server, pf.Needs, pf.Portrait)
HOOKS = (pf.Algorithm, Yardstick, pf.threats.Attack, pf.threats.Rule, *OURS)
THEIRS = (pf.FederatedClassifier, pf.FederatedRegressor)  # refuse as scikit-learn has it, which its own checks hold
FED, X = tiny(), np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.arange(8) % 2
PAIRS = [(X, Y), (X + 1, Y)]
TRAIN: dict[str, Any] = {"rounds": 1, "batch_size": None}


def _named() -> Iterator[tuple[str, Any]]:
    inside = (Result, Trainer, prepare, Admission, Comparison, Tuned, WindowAdvice, window_for)  # of their rooms
    named = {name: getattr(pf, name) for name in dir(pf) if name != "__version__"}
    for name, thing in (named | {thing.__name__: thing for thing in inside}).items():
        if not isinstance(thing, types.ModuleType):
            yield name, thing
        elif name not in ("algorithms", "errors"):
            for k in sorted(set(dir(thing)) | set(getattr(thing, "__all__", ()))):
                home = getattr(getattr(thing, k), "__module__", None) or ""
                if not k.startswith("_") and home.startswith(thing.__name__) and k != "Federation":
                    yield f"{name}.{k}", getattr(thing, k)


@cache
def calls() -> dict[str, Any]:
    """Every public call: its name -> the function, or the name of a method behind the class that has it."""
    found: dict[str, Any] = {}
    for name, thing in _named():
        if isinstance(thing, types.FunctionType):
            found[name] = thing
        elif (
            isinstance(thing, type)
            and not issubclass(thing, (PolyfedError, *HOOKS, *THEIRS))
            and not inspect.isabstract(thing)
        ):
            found[name] = thing
            for k, member in vars(thing).items():
                if not k.startswith("_") and isinstance(getattr(member, "__func__", member), types.FunctionType):
                    found[f"{name}.{k}"] = (thing, k)
    return found


class Face:
    """Arguments that work for every public call, and an object for every method; made once, in an empty folder."""

    def __init__(self, folder: Path):
        sites = folder / "sites"
        sites.mkdir()
        for k, (x, y) in enumerate(PAIRS):
            pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y}).to_csv(sites / f"site{k}.csv", index=False)
        tables = pf.Federation.from_folder(sites)
        model = pf.models.build("linear", tables.input_shape, tables.outputs)
        run = pf.fit(model, tables, pf.FedAvg(0.1), out=folder / "run", **TRAIN)
        comparison = pf.compare(
            net(), FED, [pf.Local(0.1), pf.FedAvg(0.1)], seeds=1, out=folder / "two", report=False, **TRAIN
        )
        study = pf.report.read([folder / "two"])
        two = pf.Federation.from_arrays(PAIRS, PAIRS)
        new = pf.Federation.from_arrays([(X[:, :2], Y)], [(X[:, :2], Y)], names=["new"])
        dataset = pf.data.Dataset("x", X, Y, classes=2, groups=Y, group_names=("a", "b"))
        keys, tables_frame = client_keys(FED.names), pd.read_csv(sites / "site0.csv")
        method, training = pf.FedAvg(0.1), pf.Training(rounds=1)
        trainer, search = prepare(net(), FED, method, training), {"grid": [0.1], "setting": "lr", "train_on": 0}
        batches = Batches(FED.train, np.arange(3), keys, Work(), 0, 0)
        owners = [
            run, run.admit(new, 1), pf.coalitions(net(), two, method, seeds=1, out=folder / "game", **TRAIN),
            comparison, predictor(run, 0), trainer, FED, polyfed_clinical.fit(PAIRS, intercepts="common"), dataset,
            study,
            pf.report.compare_table(study), training,
            pf.tune(net(), FED, method, **TRAIN, **search), WindowAdvice(), pf.Delays(), pf.Uniform(),
            pf.Bernoulli(0.5), pf.Asynchronous(pf.Delays()), pf.Timed(pf.Uniform(), pf.Delays()),
            pf.Availability(np.ones((2, 3))), pf.Metric("m", compute=lambda seen: seen.output.mean()),
            pf.data.IID(), pf.data.parse("iid+label-swap:2"),
            pf.data.Assignment([np.arange(2)] * 2), pf.data.Source(8, Y, 2),
        ]  # fmt: skip
        self.owners = {type(owner): owner for owner in owners}
        self.given: dict[str, Any] = {  # what a required parameter is given, under its name, or with that of its call
            "model": net(), "federation": FED, "algorithm": method, "algorithms": [method], "training": training,
            "run": run, "newcomers": new, "folder": folder / "run", "path": folder / "run", "paths": [folder / "two"],
            "data": self._new(folder, sites), "study": study, "studies": [study], "name": "linear", "client": 0,
            "split": "test", "value": 0.5,
            "seed": 0, "t": 0, "keys": keys, "n": 3, "ids": np.arange(3), "names": FED.names, "rows": tables_frame,
            "sheet": sheet_of(tables_frame), "predictions": Predictions(torch.zeros(2, 2), torch.tensor([0, 1])),
            "delays": pf.Delays(), "schedule": pf.Uniform(), "trace": np.ones((2, 3)), "probability": 0.5,
            "order": [0, 1], "fraction": 0.5, "train": PAIRS, "sites": PAIRS, "loss": "mse",
            "input_shape": (3,), "outputs": 2, "shape": (3,), "text": "iid", "label": "fedavg", "form": "csv",
            "groups": [0, 0, 1], "values": torch.ones(3, 2), "attackers": np.array([0]), "part": None, "attack": None,
            "curvatures": np.ones((2, 3)), "centres": np.ones((2, 3)), "time": [1, 2], "event": [1, 1], "risk": [1, 2],
            "source": pf.data.Source(8, Y, 2), "clients": 2, "size": 8, "indices": [np.arange(2)], "task": trainer.task,
            "w": trainer.task.w0.expand(3, -1), "lr": 0.1, "figure": pf.report.metric_figure(study), "out": None,
            "Federation.from_datasets.train": [[*zip(*pair, strict=True)] for pair in PAIRS],
            "Predictor.predict.rows": tables_frame, "Result.evaluate.models": run.personal, "Run.of.result": run,
            "fit.settings": TRAIN,
            "texts": {"a": ["x y", "y"], "b": ["y"]}, "tokenizer": lambda texts: [[1, 2] for _ in texts],
            "Federation.from_flat.x": X, "Federation.from_flat.y": Y, "data.with_global.rows": (X, Y),
            "Federation.from_flat.settings": {"offsets": [0, 4, len(Y)]},
            "compare.settings": TRAIN, "window_for.settings": {"iterations": 3},
            "coalitions.settings": TRAIN, "tune.settings": {**TRAIN, **search},
            "coalitions.federation": two,
            "Federation.from_files.paths": [*sites.iterdir()], "Federation.from_folder.path": sites,
            "Federation.without.names": ["client-0"], "Run.save.folder": folder / "copy", "local_sgd.data": batches,
            "Admission.save.folder": folder / "admitted", "Coalitions.open.folder": folder / "game",
            "Delays.from_text.text": "uniform:0,1", "Delays.from_file.path": self._delays(folder),
            "data.Assignment.among.clients": [0], "Predictor.open.path": None,
            "data.about.name": "digits", "data.options.name": "digits", "data.load.name": "digits",
            "threats.make_attack.name": "sign-flip", "threats.make_rule.name": "median",
            "report.save.path": folder / "x.svg", "Run.scored.name": "test", "Run.export.client": 0,
            "Run.peft.client": 0,
            "frames": {"a": tables_frame, "b": tables_frame}, "adapter": "probe",
            "data.fpfc.scenario": "s1", "models.lenet.input_shape": (1, 28, 28), "models.cnn.input_shape": (1, 28, 28),
            "models.resnet18.input_shape": (3, 8, 8), "Metric.name": "m",
            "models.pretrained.path": self._weights(folder),
            "models.named.federation": pf.Federation.from_arrays([({"x": x}, y) for x, y in PAIRS]),
            "models.with_statistics.model": torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)),
        }  # fmt: skip

    def _new(self, folder: Path, sites: Path) -> Path:
        (folder / "new").mkdir()
        return shutil.copy(sites / "site0.csv", folder / "new" / "another.csv").parent

    def _weights(self, folder: Path) -> Path:
        torch.save(net().state_dict(), folder / "weights.pt")
        return folder / "weights.pt"

    def _delays(self, folder: Path) -> Path:
        text = "".join(f"{name},1,1\n" for name in FED.names)
        (folder / "delays.csv").write_text(f"client,compute,network\n{text}")
        return folder / "delays.csv"

    def ready(self, call: str) -> tuple[Any, dict[str, Any], list[str]]:
        """What is called, arguments that work, and the names of all that it takes."""
        found = calls()[call]
        cls, name = found if isinstance(found, tuple) else (found, "")
        function = cls
        if name:
            function = getattr(next((o for kind, o in self.owners.items() if issubclass(kind, cls)), cls), name)
        known: Any = next((o for kind, o in self.owners.items() if kind is cls), None)
        plain = inspect.unwrap(function) if isinstance(function, types.FunctionType) else function
        parameters = inspect.signature(plain).parameters.values()
        own = {} if name or known is None else vars(known)
        given = {
            p.name: own.get(p.name, self.given.get(f"{call}.{p.name}", self.given.get(p.name)))
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        } | self.given.get(f"{call}.settings", {})
        return function, given, [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    def misuse(self, call: str, wrong: dict[str, Any]) -> str:
        function, given, _ = self.ready(call)
        given |= wrong
        parameters = inspect.signature(function).parameters.values()
        first = [given.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY]
        return survives((call, wrong), lambda: function(*first, **given))
