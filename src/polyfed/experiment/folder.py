"""The run folder: plain files that outlive the process, written so that nothing already computed can be lost."""

import json
import math
import os
import platform
import re
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from safetensors.torch import save_file

from polyfed.core import checkpoint
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import RunError
from polyfed.core.ledger import COLUMNS
from polyfed.experiment.run import Run

MODELS_LIMIT = 2 << 30  # bytes of per-client model files written without being asked
EVERY = 10.0  # seconds between checkpoints, when no number of rounds is given


class RunFolder:
    """Writes one run's files. Every file is replaced atomically or appended to line by line."""

    def __init__(self, path: Path, checkpoint_every: int | None = None):
        self.path, self.checkpoint_every = path, checkpoint_every
        self._saved_at, self._saved_round = time.monotonic(), -1

    def refuse_used(self) -> None:
        """Raise RunError when the folder holds an earlier run: its results would be lost, its checkpoints mistaken."""
        found = [
            name for name in ("checkpoint", "rows", "summary.json", "metrics.jsonl") if (self.path / name).exists()
        ]
        if found:
            raise RunError(f"{self.path} already holds a run; resume=True continues it, otherwise give another folder")

    def forget_rows(self) -> None:
        """Remove memory-mapped rows that belong to no checkpoint."""
        shutil.rmtree(self.path / "rows", ignore_errors=True)

    def begin(self, run: Run, fresh: bool) -> None:
        """The files that describe the run: config.toml, federation.json, partition.safetensors.

        fresh: start over; otherwise metrics.jsonl is cut back to the rounds that `run` has done.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise RunError(f"cannot make the run folder {self.path}: {checkpoint.reason(e)}") from e
        self.write("config.toml", tomli_w.dumps(_toml(run.settings)))
        self.write("federation.json", json.dumps(run.federation.describe(), indent=1))
        indices = run.federation.meta.get("indices")
        if indices is not None:
            tensors = {f"{i:06d}": torch.as_tensor(np.asarray(index)) for i, index in enumerate(indices)}
            self.write_bytes("partition.safetensors", tensors)
        if not fresh:
            self.log(f"resumed at round {run.loop.t}")
        self.write("metrics.jsonl", "".join(json.dumps(_finite(r)) + "\n" for r in run.records))

    def record(self, run: Run, records: list[dict[str, Any]]) -> None:
        """Append one evaluated round to metrics.jsonl."""
        self.append("metrics.jsonl", "".join(json.dumps(_finite(r)) + "\n" for r in records))

    def checkpoint(self, run: Run, force: bool = False) -> None:
        """Save the loop's state when it is time to, or now."""
        t = run.loop.t
        by_rounds = self.checkpoint_every is not None and t % self.checkpoint_every == 0
        by_time = self.checkpoint_every is None and time.monotonic() - self._saved_at > EVERY
        if (force and t != self._saved_round) or by_rounds or by_time:
            tensors, meta = run.loop.state()
            meta |= {"records": run.records, "seconds": run.seconds, "fingerprint": fingerprint(run)}
            checkpoint.save(self.path / "checkpoint", t, tensors, meta)
            run.loop.rows.committed()
            self._saved_at, self._saved_round = time.monotonic(), t

    def finish(self, run: Run) -> None:
        """The results: checkpoint, clients.csv, ledger.csv, assignments.csv, report.json, summary.json, models/."""
        self.checkpoint(run, force=True)
        self.write("clients.csv", run.clients.to_csv(index=False))
        self.write("ledger.csv", run.ledger.to_csv(index=False))
        if run.clusters is not None:
            self.write("assignments.csv", run.assignments.to_csv())
        self.write("report.json", json.dumps(_finite(run.report)))
        self._models(run)
        self.write("summary.json", json.dumps(_finite(summary(run)), indent=1))
        self.log(f"{run.status} after round {run.loop.t}")

    def _models(self, run: Run) -> None:
        task, n = run.loop.task, run.loop.n
        if n * task.p * task.w0.element_size() > MODELS_LIMIT:
            self.log(
                "models are not written out, they would take more than 2 GiB; take single ones from the checkpoint"
            )
            return
        (self.path / "models").mkdir(exist_ok=True)
        personal = run.personal
        same = n > 1 and personal.stride(0) == 0
        for i in range(1 if same else n):
            named = {k: v.detach().cpu().contiguous() for k, v in task.layout.named(personal[i]).items()}
            self.write_bytes(
                "models/common.safetensors" if same else f"models/{safe(run.federation.names[i])}.safetensors", named
            )

    # files

    def write(self, name: str, text: str) -> None:
        """Replace a text file atomically."""
        draft = self.path / f".{name}.draft"
        try:
            draft.write_text(text)
            os.replace(draft, self.path / name)
        except OSError as e:
            raise RunError(
                f"cannot write {self.path / name}: {checkpoint.reason(e)}; what was written before is kept"
            ) from e

    def write_bytes(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        draft = self.path / f"{name}.draft"
        try:
            save_file(tensors, draft)
            os.replace(draft, self.path / name)
        except Exception as e:
            raise RunError(
                f"cannot write {self.path / name}: {checkpoint.reason(e)}; what was written before is kept"
            ) from e

    def append(self, name: str, text: str) -> None:
        try:
            with (self.path / name).open("a") as f:
                f.write(text)
        except OSError as e:
            raise RunError(
                f"cannot write {self.path / name}: {checkpoint.reason(e)}; what was written before is kept"
            ) from e

    def log(self, line: str) -> None:
        """One line with the time in log.txt."""
        self.append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def fingerprint(run: Run) -> dict[str, Any]:
    """What must not change between a run and its continuation."""
    s = run.settings
    keys = (
        "seed",
        "fraction",
        "local-epochs",
        "local-steps",
        "batch-size",
        "augment",
        "weight-decay",
        "lr-decay",
        "lr-decay-every",
        "attack",
        "robust",
        "schedule",
        "model",
        "loss",
        "dtype",
        "algorithm",
        "plan",
    )
    return json.loads(json.dumps({k: s.get(k) for k in keys} | {"data": run.settings["data"].get("digest")}))


def summary(run: Run) -> dict[str, Any]:
    """The run in a few numbers, as summary.json holds them."""
    metric = run.metric
    higher = metric == "accuracy"
    final = {}
    for name, metrics in run.final.items():
        values = np.where(np.isfinite(metrics[metric]), metrics[metric], np.nan)
        if np.isnan(values).all():
            continue
        worst, best = (np.nanmin, np.nanmax) if higher else (np.nanmax, np.nanmin)
        final[name] = {
            "mean": float(np.nanmean(values)),
            "std": float(np.nanstd(values)),
            "worst": float(worst(values)),
            "best": float(best(values)),
        }
    down, up = run.loop.ledger.totals()
    return {
        "status": run.status,
        "algorithm": run.loop.algorithm.name,
        "seed": run.loop.seed,
        "rounds": run.loop.t,
        "metric": metric,
        "higher_is_better": higher,
        "final": final,
        "down_bytes": down,
        "up_bytes": up,
        "seconds": run.seconds,
        "parameters": run.loop.task.p,
        "described_by": float(run.parameters.mean()),
        "common": _common(run, metric),
        "steps": _steps(run),
        "deploys": "common" if _one_for_all(run) else "personal",
    }


def _steps(run: Run) -> float:
    """Local steps of a client in a round that it takes part in, on average."""
    rows = run.loop.ledger.array()
    steps = rows[rows[:, 0] >= 0, COLUMNS.index("steps")]
    return float(steps.mean()) if len(steps) else math.nan


def _one_for_all(run: Run) -> bool:
    """Whether clients deploy the one model that the server sends to all of them."""
    loop = run.loop
    if type(loop.algorithm).personal is not Algorithm.personal:
        return False
    return "w" in loop.algorithm.deployment(loop.server, loop.round(np.arange(loop.n))).shared


def _common(run: Run, metric: str) -> dict[str, float] | None:
    """The mean over clients of the common model alone, by split, where clients deploy others of their own."""
    common, method = run.common, type(run.loop.algorithm)
    if common is None or method.personal is Algorithm.personal:
        return None
    return {split: float(np.nanmean(run.evaluate(common, split)[metric])) for split in run.final}


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in ("polyfed", "torch", "numpy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def safe(name: str) -> str:
    """A client's name as a file name; names that would collide or escape keep a hash."""
    from polyfed.core.randomness import key_of

    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "client"
    return plain if plain == name and len(name) < 100 else f"{plain[:80]}-{key_of(name) & 0xFFFFFFFF:08x}"


def _finite(value: Any) -> Any:
    """JSON has no NaN: absent values become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _toml(value: Any) -> Any:
    """TOML has no null: unset keys are left out."""
    if isinstance(value, dict):
        return {k: _toml(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_toml(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value
