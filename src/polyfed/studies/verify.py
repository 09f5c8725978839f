"""verify: a run trained again from its folder alone, and compared with what the folder holds, bit for bit."""

import contextlib
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.base import checkpoint
from polyfed.base.errors import ConfigError, Diverged, RunError
from polyfed.base.settings import is_table
from polyfed.base.typed import norm
from polyfed.core.rounds import part
from polyfed.runs import schema as reading
from polyfed.runs.build import Parts
from polyfed.runs.config import resolve
from polyfed.runs.fit import fit
from polyfed.runs.folder import client_model
from polyfed.runs.ownership import unsealed

Differs = Callable[[Path, Path], str]  # how a run folder differs from another one, or nothing


@dataclass(frozen=True)
class Verdict:
    """parts: what is said of the server's state, the clients' models and the history, "equal" or how they differ
    versions: name -> (in the run, here), of those that differ
    """

    parts: dict[str, str]
    versions: dict[str, tuple[str, str]]

    @property
    def equal(self) -> bool:
        return all(text == "equal" for text in self.parts.values())


def verify(folder: Path) -> Verdict:
    """Train the run of `folder` again in a temporary folder and compare; nothing is written to `folder`.

    Raises ConfigError for a run that its folder does not describe whole (from Python with data or a model of its own,
    started from another run), RunError for one that is not over or damaged.
    """
    config = unsealed(folder / "config.toml")
    if "start" in config:
        raise ConfigError(f"{folder}: the run started from another run, which its folder does not hold")
    experiment = resolve(folder / "config.toml")
    found = reading.summary(folder)
    if found.status == "interrupted":
        raise RunError(f"{folder}: the run is not finished; finish it with: polyfed resume {folder}")
    parts, plan, seed = Parts(experiment), config.get("plan", {}), experiment.seeds[0]
    given: dict[str, Any] = {k: plan[k] for k in ("chunk", "workers") if k in plan} | {"checkpoint_every": None}
    if found.status == "finished":
        given["rounds"] = found.rounds
    training = replace(parts.training(seed), **given)
    method = experiment.methods[0]
    with tempfile.TemporaryDirectory() as name:
        again = Path(name)
        with contextlib.suppress(Diverged):
            run = fit(parts.model(seed), parts.federation(seed), method.algorithm, training, out=again)
            if run.status == "interrupted":
                raise KeyboardInterrupt
        return compared(folder, again, config, WHOLE)


def compared(folder: Path, again: Path, config: dict[str, Any], parts: Mapping[str, Differs]) -> Verdict:
    """What is said of each part of two run folders. config: of the first one"""
    before, now = reading.summary(folder).digest, reading.summary(again).digest or {}
    said: dict[str, str] = {}
    for name, differs in parts.items():
        same = before is None or before.get(name) == now.get(name)  # a recorded run may have none
        said[name] = differs(folder, again) or ("equal" if same else "differs from its digest in summary.json")
    return Verdict(said, _versions(config, again))


def _versions(config: dict[str, Any], again: Path) -> dict[str, tuple[str, str]]:
    """Those that differ between a run's config.toml and that of the run made again."""
    last = {k.partition("-from-round-")[0]: v for k, v in config.get("versions", {}).items()}
    here = tomllib.loads((again / "config.toml").read_text())["versions"]
    changed = {k: (last.get(k, "unknown"), here.get(k, "unknown")) for k in (*here, *last)}
    return {k: v for k, v in changed.items() if v[0] != v[1]}


def _summary(folder: Path, again: Path) -> str:
    """The first number of the summary that differs, seconds and digests aside."""

    def flat(value: dict[str, Any], name: str = "") -> dict[str, Any]:
        parts = (flat(v, f"{name}{k} ") if is_table(v) else {f"{name}{k}": v} for k, v in value.items())
        return {k: v for part in parts for k, v in part.items()}

    a, b = (
        flat({k: v for k, v in reading.summary(f).written().items() if k not in ("seconds", "digest")})
        for f in (folder, again)
    )
    return next((f"differs{_by(k, a.get(k), b.get(k))}" for k in {**a, **b} if a.get(k) != b.get(k)), "")


def _clients(folder: Path, again: Path) -> str:
    """The first of the columns in `folder` that differs."""
    a, b = reading.clients(folder), reading.clients(again)
    for column in a.columns:
        x, y = (f[column].tolist() if column in f else [] for f in (a, b))
        if len(x) != len(y):
            return f"differs in its {column}: {len(x)} in the run, {len(y)} here"
        for name, one, other in zip(a["client"], x, y, strict=True):
            if one != other and not (one != one and other != other):  # both NaN
                return f"differs{_by(f'{column} of client {name!r}', one, other)}"
    return ""


def _by(what: str, x: Any, y: Any) -> str:
    """What differs and by how much."""
    numbers = isinstance(x, int | float) and isinstance(y, int | float)
    return f" ({what}{f' by {abs(x - y) / max(abs(x), abs(y)):.1e}, relative' if numbers else ''})"


def _server(folder: Path, again: Path) -> str:
    a, b = (part(checkpoint.load(f / "checkpoint")[0], "server.") for f in (folder, again))
    return _apart(a, b)


def _models(folder: Path, again: Path) -> str:
    names = reading.federation(folder).names
    for i, name in enumerate(names):
        a, b = client_model(folder, i, name), client_model(again, i, name)
        if a is None or b is None:
            return "" if a is b else "are missing on one side"
        if text := _apart(a[0], b[0]):
            return f"{text} (client {name!r})"
    return ""


def _history(folder: Path, again: Path) -> str:
    a, b = reading.metrics(folder), reading.metrics(again)
    for one, other in zip(a, b, strict=False):
        for key in [k for k in one if k != "seconds"]:
            x: Any = one[key]
            y: Any = other.get(key)
            if x != y:
                what = f"{one['split']} {key}"
                return f"differs from round {one['round']} on{_by(what, x, y)}"
    return "" if len(a) == len(b) else f"differs: {len(a)} evaluations in the run, {len(b)} here"


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    """How two sets of tensors differ, or nothing."""
    if {k: t.shape for k, t in a.items()} != {k: t.shape for k, t in b.items()}:
        return "differs in form"
    worst = 0.0
    for k, t in a.items():
        if not torch.equal(t, b[k]) and not (t.isnan() == b[k].isnan()).all():
            return "differs in what is finite"
        x, y = t.double().nan_to_num(), b[k].double().nan_to_num()
        worst = max(worst, norm(x - y) / max(norm(x), norm(y), 1e-300))
    return f"differs by {worst:.1e}, relative" if worst else ""


def _unseen(folder: Path, again: Path) -> str:
    """Left to the digest."""
    return ""


WHOLE: dict[str, Differs] = {"server": _server, "models": _models, "history": _history}
RECORDED: dict[str, Differs] = {  # of a run whose checkpoint and models are not there
    "server": _unseen,
    "models": _unseen,
    "history": _history,
    "summary": _summary,
    "clients": _clients,
}
