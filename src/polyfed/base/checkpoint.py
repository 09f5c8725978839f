"""Atomic save and exact resume: safetensors for numbers, JSON for the rest, nothing ever unpickled.

A checkpoint is written elsewhere, flushed and renamed into place; the last two are kept, in case one is damaged.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyfed.base.errors import RunError
from polyfed.base.system import alive, flush, move

KEEP = 2


def save(folder: Path, t: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write the state after `t` rounds under `folder`. Raises RunError when the disk is full or not writable."""
    draft, final = folder / f".writing-{os.getpid()}", folder / f"round-{t:08d}"
    # a round that is saved again stays under its former names until the new one is in place
    former = [path for path in checkpoints(folder) if path.name.startswith(final.name)]
    while final in former:
        final = final.with_name(f"{final.name}-again")
    try:
        for path in folder.glob(".writing-*"):
            if path == draft or not alive(path.name.removeprefix(".writing-")):
                shutil.rmtree(path, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file(_apart(tensors), draft / "tensors.safetensors")
        text = json.dumps({**meta, "round": t})
        seal = _digest(draft / "tensors.safetensors", text)
        (draft / "meta.json").write_bytes(json.dumps({**json.loads(text), "sha256": seal}).encode())
        for path in (draft / "tensors.safetensors", draft / "meta.json", draft):
            flush(path)
        move(draft, final)
        for path in (folder, folder.parent):
            flush(path)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunError(
            f"cannot write the checkpoint of round {t} in {folder}: {reason(e)}; earlier ones are kept"
        ) from e
    for old in former + [path for path in checkpoints(folder) if path not in former][:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def forget(folder: Path, newest: int) -> None:
    """Remove the newest checkpoints, which `load` passed over: damaged, they must not count among the last two."""
    for path in checkpoints(folder)[::-1][:newest]:
        shutil.rmtree(path, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints under `folder`, oldest first."""
    return sorted(folder.glob("round-*")) if folder.is_dir() else []


def load(
    folder: Path, check: Callable[[dict[str, Tensor]], None] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """The newest sound checkpoint: (tensors, meta, one warning per damaged one that was passed over)."""
    warnings: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            meta = json.loads((path / "meta.json").read_text("utf-8"))
            if meta.pop("sha256") != _digest(path / "tensors.safetensors", json.dumps(meta)):
                raise ValueError("its checksum does not match")
            tensors = load_file(path / "tensors.safetensors")
            if check is not None:
                check(tensors)
            return tensors, meta, warnings
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            SafetensorError,
            RunError,
        ) as e:
            warnings.append(f"checkpoint {path.name} is damaged ({reason(e)}); trying the one before")
    detail = f" ({'; '.join(warnings)})" if warnings else ""
    raise RunError(f"no usable checkpoint in {folder}{detail}")


def reason(error: Exception) -> str:
    """One line on why a file operation failed."""
    full = f"os error {errno.ENOSPC}"  # as safetensors says it
    if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or full in str(error):
        return "the disk is full"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: on the CPU, contiguous, no two in the same memory."""
    out: dict[str, Tensor] = {}
    homes: set[int] = set()
    for name, t in tensors.items():
        out[name] = t.detach().cpu().contiguous()
        if out[name].untyped_storage().data_ptr() in homes:
            out[name] = out[name].clone()
        homes.add(out[name].untyped_storage().data_ptr())
    return out


def _digest(tensors: Path, meta: str) -> str:
    """One checksum over both files of a checkpoint."""
    with tensors.open("rb") as f:
        whole = hashlib.file_digest(f, "sha256")
    whole.update(meta.encode())
    return whole.hexdigest()
