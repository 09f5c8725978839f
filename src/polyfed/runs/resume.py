"""A run that is continued: its checkpoint is restored if it belongs to the same experiment on the same data."""

import hashlib
import json
from typing import Any

import numpy as np

from polyfed.base import checkpoint
from polyfed.base.errors import RunError
from polyfed.data.federation import Federation, Outline
from polyfed.runs.folder import RunFolder, fingerprint
from polyfed.runs.result import Run, splits


def continue_from(
    run: Run, store: RunFolder, tensors: dict[str, Any], meta: dict[str, Any], warnings: list[str]
) -> None:
    """Restore a checkpoint into a fresh run, after checking that it belongs to the same experiment."""
    for line in warnings:
        store.log(line)
    now = fingerprint(run)
    for key, then in ({"draws": None} | meta["fingerprint"]).items():
        if now.get(key) != then:
            raise RunError(f"cannot resume {store.path}: {_changed(key, now.get(key), then)}")
    run.loop.restore(tensors, meta)
    if run.loop.t > run.settings["rounds"]:
        done, asked = run.loop.t, run.settings["rounds"]
        raise RunError(f"cannot resume {store.path}: it has {done} rounds already, more than rounds = {asked}")
    checkpoint.forget(store.path / "checkpoint", len(warnings))
    run.records, run.seconds, run.ended = meta["records"], meta["seconds"], meta.get("ended", False)
    before = store.versions_before(meta)
    if run.ended or run.loop.t >= run.settings["rounds"]:
        run.settings["versions"] = before or run.settings["versions"]
        return
    run.settings["versions"] = _versions_since(before, run.settings["versions"], run.loop.t)
    for key in [k for k in run.settings["versions"] if before and k not in before]:
        name = key.partition("-from-round-")[0]
        was = [v for k, v in before.items() if k.partition("-from-round-")[0] == name][-1:]
        store.log(f"{name} {run.settings['versions'][key]} from round {run.loop.t}, before {', '.join(was) or 'none'}")


def _changed(key: str, now: Any, then: Any) -> str:
    """What differs between a run and its continuation."""
    if key == "data":
        a, b = ({k: v for k, _, v in (part.partition(":") for part in str(d).split())} for d in (then, now))
        if "train" not in a:
            return "it was begun by an older version of polyfed, which looked at other parts of the data"
        return f"the data have changed since it began ({', '.join(k for k in a | b if a.get(k) != b.get(k))})"
    if key == "plan" and isinstance(then, dict) and now["path"] != then["path"]:
        return (
            f"its clients were trained by the path {then['path']!r}, here it is {now['path']!r}, which gives other "
            "last bits; the compiled kernel has to be built, and not switched off by POLYFED_NATIVE=0"
        )
    if key == "draws":
        return "the model's random layers (dropout) drew other numbers in the version that it was begun with"
    if key == "fixed":
        return "the model's frozen parameters or buffers are not those it began with"
    return f"{key} is {now!r} here and was {then!r} in the checkpoint"


def _versions_since(before: dict[str, str], now: dict[str, str], t: int) -> dict[str, str]:
    """The versions that a run began with, and those it went on with: torch, torch-from-round-40."""
    if not before:
        return now
    last = {k.partition("-from-round-")[0]: v for k, v in before.items()}
    return before | {f"{k}-from-round-{t}": v for k, v in now.items() if last.get(k) != v}


def digest(federation: Federation) -> str:
    """A short fingerprint of every part of the data, to tell whether a run is resumed on what it began with."""
    if isinstance(federation, Outline):
        return federation.digest
    about = federation.describe()
    found = {
        "clients": _short([about["classes"], *federation.names]),
        "preparation": _short([about.get(k) for k in ("dataset", "partition", "test", "options", "preparation")]),
    }
    for name, split in splits(federation).items():
        whole = hashlib.blake2b(split.offsets.tobytes(), digest_size=8)
        for t in (split.x, split.y, *(() if split.weight is None else (split.weight,))):
            whole.update(f"{t.dtype} {list(t.shape)}".encode())
            whole.update(np.ascontiguousarray(t.cpu().numpy()).reshape(-1).view(np.uint8).data)
        found[name] = whole.hexdigest()
    return " ".join(f"{part}:{value}" for part, value in found.items())


def _short(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=8).hexdigest()
