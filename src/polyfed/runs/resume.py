"""A run that is continued: its checkpoint has to belong to the same experiment on the same data."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.base.errors import RunError
from polyfed.data.federation import Federation, Outline
from polyfed.runs.result import splits


def check_same(folder: Path, now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Raise RunError where a checkpoint in `folder` has another fingerprint than the run that goes on from it."""
    for key, before in then.items():
        if now.get(key) != before:
            raise RunError(f"cannot resume {folder}: {_changed(key, now.get(key), before)}")


def _changed(key: str, now: Any, then: Any) -> str:
    """What differs between a run and its continuation."""
    if key == "data":
        a, b = ({k: v for k, _, v in (part.partition(":") for part in str(d).split())} for d in (then, now))
        return f"the data have changed since it began ({', '.join(k for k in a | b if a.get(k) != b.get(k))})"
    if key == "plan" and isinstance(then, dict) and now["path"] != then["path"]:
        return (
            f"its clients were trained by the path {then['path']!r}, here it is {now['path']!r}, which gives other "
            "last bits; the compiled kernel has to be built, and not switched off by POLYFED_NATIVE=0"
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
