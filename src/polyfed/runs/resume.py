"""Starts of a run that goes on: from its own checkpoint, which has to belong to the same experiment on the same data;
or from another run, whose whole state it takes where the method is the same, and else the models of its clients.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, RunError
from polyfed.base.settings import is_table
from polyfed.base.typed import pieces
from polyfed.compute.task import Task
from polyfed.core.algorithm import KNOWN, State
from polyfed.core.rounds import Loop
from polyfed.data.federation import Federation, Outline
from polyfed.runs.result import Result, splits
from polyfed.runs.trained import Trained

# of a method: task, the clients' models [n, p], their samples [n] -> the server's state, the private rows [n, ...]
Warm = Callable[[Task, Tensor, Tensor], tuple[State, State]]


def check_same(folder: Path, now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Raise RunError where a checkpoint in `folder` has another fingerprint than the run that goes on from it."""
    for key, before in then.items():
        if now.get(key) != before:
            raise RunError(f"cannot resume {folder}: {_changed(key, now.get(key), before)}")


def _changed(key: str, now: Any, then: Any) -> str:
    """Say what differs between a run and its continuation."""
    if key == "data":
        a, b = ({k: v for k, _, v in (part.partition(":") for part in str(d).split())} for d in (then, now))
        return f"the data have changed since it began ({', '.join(k for k in a | b if a.get(k) != b.get(k))})"
    if key == "plan" and isinstance(then, dict) and now["path"] != then["path"]:
        return (
            f"its clients were trained by the path {then['path']!r}, here it is {now['path']!r}, which gives other "
            "last bits; the compiled kernel has to be built, and not switched off by POLYFED_NATIVE=0"
        )
    if key == "privacy-plan" and is_table(then):
        return (
            f"its noise was made for {then.get('rounds')} rounds, which spend its whole privacy budget; more rounds "
            "need a new run with a budget of its own"
        )
    if key == "fixed":
        return "the model's frozen parameters or buffers are not those it began with"
    return f"{key} is {now!r} here and was {then!r} in the checkpoint"


def versions_since(before: dict[str, str], now: dict[str, str], t: int) -> tuple[dict[str, str], list[str]]:
    """The versions of a run, those it went on with as torch-from-round-40, and lines on them for its log."""
    last = {k.partition("-from-round-")[0]: v for k, v in before.items()}
    changed = {k: v for k, v in now.items() if last.get(k) != v}
    lines = [f"{k} {v} from round {t}, before {last.get(k, 'none')}" for k, v in changed.items()]
    return before | {f"{k}-from-round-{t}": v for k, v in changed.items()}, lines


def digest(federation: Federation) -> str:
    """A short fingerprint of every part of the data, to tell whether a run is resumed on what it began with."""
    if isinstance(federation, Outline):
        return federation.digest
    about = {**federation.meta, "options": dict(federation.meta.get("options", {}))}
    if prepared := about.get("preparation"):  # without ranges, as runs had none before
        keys = ("fill", "shift", "scale", "target")
        sites = {name: {k: of[k] for k in keys} for name, of in prepared["sites"].items()}
        about["preparation"] = prepared | {"sites": sites}
    parts = {
        "clients": _short([federation.classes, *federation.names]),
        "preparation": _short([about.get(k) for k in ("dataset", "partition", "test", "options", "preparation")]),
    }
    for name, split in splits(federation).items():
        whole = hashlib.blake2b(split.offsets.tobytes(), digest_size=8)
        for t in (split.x, split.y, *(() if split.weight is None else (split.weight,))):
            whole.update(f"{t.dtype} {list(t.shape)}".encode())
            whole.update(np.ascontiguousarray(t.cpu().numpy()).reshape(-1).view(np.uint8).data)
        parts[name] = whole.hexdigest()
    return " ".join(f"{part}:{value}" for part, value in parts.items())


def _short(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=8).hexdigest()


def start_from(loop: Loop, start: Result) -> None:
    """Give a fresh loop the state of another run, or its clients' models, each billed as one upload of round -1."""
    before, task, everyone = start.trained, loop.task, torch.arange(loop.n, device=loop.task.device)
    if list(before.names) != list(loop.names) or before.task.layout.entries != task.layout.entries:
        raise ConfigError("start: the run has other clients or another model, expected the same")
    if type(before.algorithm) is type(loop.algorithm):
        _take_over(loop, before)
        return
    begin: Warm | None = getattr(loop.algorithm, "warm_start", None)
    if begin is None:
        raise ConfigError(f"start: {loop.algorithm.name} cannot be warm-started from another method's models")
    models = start.personal.to(task.device, task.dtype)
    server, rows = begin(task, models, loop.samples)
    loop.server = server | {KNOWN: loop.samples.clone()}
    loop.engine.place(everyone, rows)
    zero = np.zeros(loop.n)
    size = np.full(loop.n, models[0].numel() * models.element_size())
    loop.ledger.record(-1, np.arange(loop.n), zero, zero, size, zero, zero)


def _take_over(loop: Loop, before: Trained) -> None:
    """The state of a run of the same method."""
    shapes = [
        {k: None if k in loop.free else t.shape for k, t in x.server.items()}
        | dict.fromkeys(x.algorithm.init_client(x.task, x.task.w0))
        for x in (before, loop)
    ]
    if shapes[0] != shapes[1]:
        raise ConfigError(f"start: the run's state has another form than that of {loop.algorithm}")
    device = loop.task.device
    loop.t, loop.clock = before.t, before.clock
    loop.server = {k: v.to(device, copy=True) for k, v in before.server.items()}
    loop.flights = [dataclasses.replace(f) for f in before.flights]
    for at in pieces(torch.arange(loop.n, device=device), 64):
        rows = {k: t.to(device) for k, t in before.engine.private(at.to(before.task.device)).items()}
        loop.engine.place(at, rows)
