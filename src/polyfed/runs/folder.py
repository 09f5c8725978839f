"""The run folder: plain files that outlive the process, written so that nothing already computed can be lost."""

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polyfed.base import checkpoint
from polyfed.base.errors import RunError
from polyfed.base.randomness import key_of
from polyfed.base.system import DEVICE
from polyfed.base.text import marked
from polyfed.compute import evaluation
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm
from polyfed.core.ledger import COLUMNS
from polyfed.core.messages import size
from polyfed.metrics.metric import Predictions, mean_of
from polyfed.native import VERSION, kernel
from polyfed.runs import ownership as files
from polyfed.runs.result import Result
from polyfed.runs.schema import CROWD, About, Config, Findings, Judge, Record, Spread, Summary, finite, tensors
from polyfed.runs.trained import raw
from polyfed.runs.training import Training, stop_of
from polyfed.yardsticks import Yardstick

LOG = logging.getLogger("polyfed")
MODELS_LIMIT = 2 << 30  # bytes of per-client model files written without being asked
MANY = 256  # clients from which all models are in one file, a tensor per parameter
EVERY = 10.0  # seconds between checkpoints, when no number of rounds is given


class RunFolder:
    """Writes one run's files. Every file is replaced atomically or appended to line by line."""

    def __init__(self, path: Path, checkpoint_every: int | None = None):
        self.path, self.checkpoint_every = path, checkpoint_every
        self._saved_at = time.monotonic()
        self._saved_round: int = -1
        self._late: list[Path] | None = None

    def refuse_used(self) -> None:
        """Raise RunError when the folder holds an earlier run: its results would be lost, its checkpoints mistaken."""
        names = ("config.toml", "checkpoint", "rows", "summary.json", "metrics.jsonl")
        if any((self.path / name).exists() for name in names):
            raise RunError(f"{self.path} already holds a run; resume=True continues it, otherwise give another folder")

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Make the folder and keep other processes out of it."""
        return files.locked(self.path)

    def forget_rows(self) -> None:
        """Remove memory-mapped rows that belong to no checkpoint."""
        files.note(self.path / "rows", self.path / "checkpoint")
        shutil.rmtree(self.path / "rows", ignore_errors=True)

    def begin(self, run: Result, fresh: bool) -> None:
        """Write what describes the run: config.toml, federation.json, partition.safetensors, fixed.safetensors.

        fresh: start over; otherwise metrics.jsonl is cut back to the rounds that `run` has done.
        """
        with self._together():
            self.write("config.toml", files.sealed(tomli_w.dumps(run.settings.toml())))
            about, crowd = run.federation.describe(), run.federation.n > CROWD  # whose rows are written as they are
            about = about if crowd else About.model_validate(about).written()
            self.write("federation.json", json.dumps(about, indent=None if crowd else 1))
            indices = run.federation.meta.get("indices")
            if indices is not None:
                tensors = {f"{i:06d}": torch.as_tensor(np.asarray(index)) for i, index in enumerate(indices)}
                self.write_bytes("partition.safetensors", tensors)
            self._fixed(run.trained.task)
            if not fresh:
                self.log(f"resumed at round {run.rounds}")
            self.write("metrics.jsonl", "".join(json.dumps(r.written()) + "\n" for r in run.records))

    def _fixed(self, task: Task) -> None:
        """Write what clients' models have in common from before the run, unless a run beside this one has it."""
        wanted = {"digest": task.net.fixed_digest}
        if not task.net.fixed or files.linked(self.path, "fixed.safetensors", lambda path: said(path) == wanted):
            return
        storages, copies = set[int](), dict[str, Tensor]()
        for name, t in task.net.fixed.items():
            t = t.detach().cpu().contiguous()
            # one that shares the memory of another is written apart
            copies[name] = t.clone() if t.untyped_storage().data_ptr() in storages else t
            storages.add(t.untyped_storage().data_ptr())
        self._put("fixed.safetensors", lambda draft: save_file(copies, draft, wanted))

    def record(self, records: list[Record]) -> None:
        """Append one evaluated round to metrics.jsonl."""
        lines = [r.written() for r in records]
        for line in lines:
            LOG.debug("%s: %s", self.path, {key: value for key, value in line.items() if key != "assigned"})
        self.append("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def due(self, t: int) -> bool:
        """True where it is time for a checkpoint after t rounds."""
        if self.checkpoint_every is not None:
            return t % self.checkpoint_every == 0
        return time.monotonic() - self._saved_at > EVERY

    def checkpoint(self, run: Result, force: bool = False) -> None:
        """Save the state of a run, if it is finite. force: unless this round's is there"""
        t = run.rounds
        if (not force or t != self._saved_round) and run.trained.finite:
            tensors, meta = run.trained.state()
            meta |= {"records": [r.table() for r in run.records], "seconds": run.seconds}
            meta |= {"fingerprint": fingerprint(run.settings, run.trained.task)}
            meta |= {"ended": run.ended, "versions": run.settings.versions}
            checkpoint.save(self.path / "checkpoint", t, tensors, meta)
            run.trained.engine.saved()
            self._saved_at, self._saved_round = time.monotonic(), t

    def rescue(self, run: Result, error: Exception) -> None:
        """Save the last whole round of a run that an error ends."""
        with contextlib.suppress(RunError):
            self.checkpoint(run, force=True)
            self.log(f"ended after round {run.rounds} by {type(error).__name__}: {checkpoint.reason(error)}")

    def finish(self, run: Result) -> None:
        """The results: checkpoint, clients, scores, ledger, assignments, findings, models, and at last summary.json."""
        self.checkpoint(run, force=True)
        with self._together():  # the summary says that all else is there
            self.write("clients.csv", csv_text(run.clients))
            if run.federation.n > CROWD:
                self.log(f"scores of single samples are not written for more than {CROWD:,} clients")
            elif "test" in run.final and run.trained.engine.here:
                self.write_bytes("scores.safetensors", scores(run))
            self.write("ledger.csv", run.ledger.to_csv(index=False, lineterminator="\n"))
            if run.clusters is not None:
                self.write("assignments.csv", csv_text(run.assignments.reset_index()))
            Findings.model_validate(run.findings)
            self.write("report.json", json.dumps(finite(run.findings)))
            self._models(run)
            self.log(f"{run.status} after round {run.rounds}")
        with self._together():
            self.write("summary.json", json.dumps(summary(run).written(), indent=1))

    def _models(self, run: Result) -> None:
        task, n = run.trained.task, run.trained.n
        if isinstance(run.algorithm, Yardstick) or not run.trained.engine.here:
            return
        if n * task.p * task.w0.element_size() > MODELS_LIMIT:
            self.log(
                "models are not written out, they would take more than 2 GiB; take single ones from the checkpoint"
            )
            return
        personal = run.personal
        same = n > 1 and personal.stride(0) == 0
        if n > MANY and not same:
            self.write_bytes("models.safetensors", task.layout.named(personal))
            return
        (self.path / "models").mkdir(exist_ok=True)
        for i, name in enumerate(["common"] if same else distinct(run.federation.names)):
            self.write_bytes(f"models/{name}.safetensors", task.layout.named(personal[i]))

    # files

    def head(self, name: str, table: dict[str, Any], *inside: str) -> None:
        """Write the sealed file that says what the folder is. inside: folders to make in it"""
        try:
            for folder in inside:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise RunError(f"cannot make the folder {self.path}: {checkpoint.reason(e)}") from None
        with self._together():
            self.write(name, files.sealed(tomli_w.dumps(table)))

    def write(self, name: str, text: str) -> None:
        """Replace a text file atomically."""
        self._put(name, text.encode())

    def write_bytes(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Replace a safetensors file atomically."""
        plain = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
        self._put(name, lambda draft: save_file(plain, draft))

    def _put(self, name: str, content: bytes | Callable[[Path], None]) -> None:
        try:
            files.put(self.path / name, content, self._late)
        except (OSError, SafetensorError) as e:
            raise self._unwritten(name, e) from e

    @contextlib.contextmanager
    def _together(self) -> Generator[None]:
        """Files that are written inside get their names at its end, all at once."""
        self._late = late = []
        try:
            yield
        finally:
            self._late = None
        try:
            files.placed(*late)
            files.flush(*{self.path, *(path.parent for path in late)})
        except OSError as e:
            raise self._unwritten("", e) from e

    def _unwritten(self, name: str, error: Exception) -> RunError:
        return RunError(f"cannot write {self.path / name}: {checkpoint.reason(error)}; what was written before is kept")

    def append(self, name: str, text: str) -> None:
        try:
            with (self.path / name).open("a", encoding="utf-8", newline="\n") as f:
                f.write(text)
            files.note(self.path / name)
        except OSError as e:
            raise self._unwritten(name, e) from e

    def log(self, line: str) -> None:
        """One line with the time in log.txt, and to Python's logger `polyfed`."""
        LOG.info("%s: %s", self.path, line)
        self.append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def said(path: Path) -> dict[str, str] | None:
    """What a safetensors file says of itself; None for what is no such file."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata()
    except (OSError, SafetensorError):
        return None


def csv_text(frame: pd.DataFrame) -> str:
    """A table as CSV; names that a spreadsheet would take for a formula are marked, see `cells`."""
    table = frame.rename(columns=lambda c: marked(c) if isinstance(c, str) else c)
    for column in table.columns:
        if table[column].dtype == object or isinstance(table[column].dtype, pd.StringDtype):
            table[column] = table[column].map(lambda v: marked(v) if isinstance(v, str) else v)
    return table.to_csv(index=False, lineterminator="\n")


def client_model(run: Path, i: int, name: str) -> tuple[dict[str, Tensor], bool] | None:
    """(parameters of a client's model, whether it is all clients'), by its position and name; None: not written."""
    whole, models = run / "models.safetensors", run / "models"
    files = [models / f"{file}.safetensors" for file in (safe(name, alike=True), safe(name), "common")]
    if found := next((path for path in files if path.is_file()), None):
        return tensors(found), found == files[-1]
    return ({k: t.clone() for k, t in tensors(whole, i).items()}, False) if whole.is_file() else None


def scores(run: Result) -> dict[str, Tensor]:
    """Terms of every test sample, as scores.safetensors holds them: the mean over a client's samples is its metric in
    clients.csv; scores that are no means, such as AUC, are written as one, see `metrics.terms`.

    counts: [n] test samples per client, whose samples follow one another     id: [N] the sample, the same number in
    every run on the same data     a float32 array [N] per metric, NaN where the client's metric is
    whose: [N] the group of each sample, by which it is held out, where there are any
    class: [N] where a metric is taken class by class, the class of each; of survival 1 with the event and -1 without
    probability: [N] of two classes, that of the second; class is there too
    """
    task, test = run.trained.task, run.federation.test.to(run.trained.task.device, run.trained.task.dtype)
    indices = run.federation.meta.get("split_indices")
    ids = np.arange(len(test.x)) if indices is None else np.concatenate(indices["test"], dtype=np.int64)
    parts: dict[str, list[Tensor]] = {}
    for i, outputs in run.answers():
        for name, values in evaluation.terms(task, outputs, test.client(i)[1], test.units([i])).items():
            lost = math.isnan(run.final["test"][name][i])  # an attacker's
            values = torch.full_like(values, math.nan) if lost else values
            parts.setdefault(name, []).append(values.cpu())
        exact = Predictions(outputs.cpu().double(), test.client(i)[1].cpu(), task.threshold)
        if exact.kind == "two classes":
            one = math.nan if math.isnan(run.final["test"]["loss"][i]) else 1.0  # an attacker has no scores
            parts.setdefault("probability", []).append(one * torch.as_tensor(exact.probabilities[:, 1]))
    terms = {name: torch.cat(values).float() for name, values in parts.items()}
    if any(m.classwise for m in run.metrics) or "probability" in terms:
        y = test.y.cpu()
        terms["class"] = torch.where(y[:, 1] > 0, 1, -1) if y.is_floating_point() else y.reshape(-1).long()
    if (whose := run.federation.meta.get("whose")) is not None:
        terms["whose"] = torch.as_tensor(np.concatenate(whose))
    return terms | {"counts": torch.as_tensor(test.counts), "id": torch.as_tensor(ids)}


def fingerprint(settings: Config, task: Task) -> dict[str, Any]:
    """Settings and model of a run that must not change when it is continued."""
    keys = [*Training.deciding(), "privacy-plan", "model", "algorithm", "plan"]
    s, parts = settings.table(), {"data": settings.data.digest, "fixed": task.net.fixed_digest}
    keys += ["evaluate-every"] * (s.get("stop") is not None)  # as the round that is kept is one of these
    decided = json.loads(json.dumps({k: s.get(k) for k in keys} | parts))
    decided["model"] = {k: v for k, v in decided["model"].items() if k != "backbone"}  # its digest says which it is
    return decided


def summary(run: Result) -> Summary:
    """The run in a few numbers, as summary.json holds them."""
    metric, judges = run.metric, run.metrics
    scores = {
        split: {m.name: Spread.of(m, values[m.name]) for m in judges if m.name in values}
        for split, values in run.final.items()
    }
    final = {split: values[metric.name] for split, values in scores.items()}
    down, up = run.trained.ledger.totals()
    return Summary.model_validate({
        "status": run.status,
        "algorithm": run.algorithm.name,
        "seed": run.trained.seed,
        "rounds": run.rounds,
        **Judge.of(metric).model_dump(),
        "higher_is_better": metric.better == "higher",
        "final": final,
        "metrics": [Judge.of(m) for m in judges],
        "scores": scores,
        "down_bytes": down,
        "up_bytes": up,
        "seconds": run.seconds,
        "parameters": run.trained.task.p,
        "trained_bytes": run.trained.task.w0.nbytes,
        "frozen_bytes": size(run.trained.task.net.fixed),
        "described_by": float(run.parameters.mean()),
        "common": _common(run, metric.name),
        "steps": _steps(run),
        "deploys": run.deploys,
        "digest": digests(run),
        **_stopped(run),
    })  # fmt: skip


def _stopped(run: Result) -> dict[str, int]:
    """The round that validation chose, and the bytes of rounds that it spared, each as the median of those before."""
    if run.settings.stop is None or isinstance(run.algorithm, Yardstick):
        return {}
    best, left = run.trained.t, run.settings.rounds - run.rounds
    if run.status != "finished" or left <= 0 or run.rounds - best < stop_of(run.settings.stop).rounds:
        return {"best_round": best}
    moved = run.ledger.query("round >= 0").groupby("round")[["down_bytes", "up_bytes"]].sum().sum(axis=1)
    return {"best_round": best, "unsent_bytes": left * int(moved.median() if len(moved) else 0)}


def _steps(run: Result) -> float:
    """Local steps of a client in a round that it takes part in, on average."""
    rows = run.trained.ledger.array()
    steps = rows[rows[:, 0] >= 0, COLUMNS.index("steps")]
    return float(steps.mean()) if len(steps) else math.nan


def _common(run: Result, metric: str) -> dict[str, float] | None:
    """The mean over clients of the common model alone, by split, where clients deploy others of their own."""
    common, method = run.common, type(run.trained.algorithm)
    if common is None or method.personal is Algorithm.personal or not run.trained.engine.here:
        return None
    return {split: mean_of(run.evaluate(common, split)[metric]) for split in run.final}


@cache  # reading it takes as long as a small run's training, and the code of a process does not change
def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    facts = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    facts |= {package: version_of(package) for package in ("polyfed", "torch", "numpy", "scikit-learn")}
    # the instructions that torch, MKL and our kernel choose decide the last bits
    compiled = kernel()
    return facts | {
        "sums": "in one order",
        "cpu-capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": "none" if compiled is None else compiled.set,
        "kernel-version": "none" if compiled is None else str(VERSION),
        "mkl-cbwr": os.environ.get("MKL_CBWR", "none"),
    }


def digests(run: Result) -> dict[str, str]:
    """sha256 of the server's state, of the clients' models and of the history without seconds."""
    server = hashlib.sha256()
    for name, t in sorted(run.kept.server.items()):
        server.update(f"{name} {t.dtype} {list(t.shape)} ".encode() + raw(t))
    history = [{k: v for k, v in record.written().items() if k != "seconds"} for record in run.records]
    told = hashlib.sha256(json.dumps(history).encode())
    models = {"models": run.kept.judged.digest()} if run.trained.engine.here else {}
    return {"server": server.hexdigest(), **models, "history": told.hexdigest()}


def safe(name: str, alike: bool = False) -> str:
    """A client's name as a file name that every system has; names that would collide or escape keep a hash.

    alike: another one differs in case alone
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "client"
    plain = f"_{plain}" if DEVICE.fullmatch(plain) else plain
    kept = plain == name and len(name) < 100 and name.lower() != "common" and not (alike or name.endswith("."))
    return plain if kept else f"{plain[:80]}-{key_of(name) & 0xFFFFFFFF:08x}"


def distinct(names: Sequence[str]) -> list[str]:
    """The names of clients' files, no two of which differ in case alone."""
    often = Counter(safe(name).lower() for name in names)
    return [safe(name, often[safe(name).lower()] > 1) for name in names]
