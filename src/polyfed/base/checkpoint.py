"""Atomic save and exact resume: safetensors for numbers, JSON for the rest, nothing ever unpickled.

A checkpoint is written elsewhere, flushed and renamed into place; the last two are kept, in case one is damaged. The
ledger only grows: its rows are in one file beside them, which each checkpoint makes longer, and of which it says how
much is its own.
"""

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyfed.base.errors import RunError
from polyfed.base.system import alive, flush, move

KEEP = 2
LEDGER = "ledger"


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
        if LEDGER in tensors:
            tensors, rows = dict(tensors), tensors[LEDGER].numpy()
            meta = {**meta, LEDGER: _grow(folder, rows)}
            del tensors[LEDGER]
        save_file(_apart(tensors), draft / "tensors.safetensors")
        text = json.dumps({**meta, "round": t})
        seal = _digest(draft / "tensors.safetensors", text)
        (draft / "meta.json").write_bytes(json.dumps({**json.loads(text), "sha256": seal}).encode())
        flush(draft / "tensors.safetensors", draft / "meta.json", draft, *folder.glob(f"{LEDGER}.rows"))
        move(draft, final)
        flush(folder, folder.parent)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunError(
            f"cannot write the checkpoint of round {t} in {folder}: {reason(e)}; earlier ones are kept"
        ) from e
    for old in former + [path for path in checkpoints(folder) if path not in former][:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def _grow(folder: Path, rows: np.ndarray) -> dict[str, int]:
    """Append the rows [m, 8] that the newest checkpoint has not; the part of the file that is this one's."""
    last = [json.loads((path / "meta.json").read_text("utf-8")) for path in checkpoints(folder)[-1:]]
    before = last[0].get(LEDGER) if last else None
    of = before or {"rows": 0, "columns": rows.shape[1], "bytes": 0, "sum": 0}
    if before and before["rows"] == len(rows):
        return of
    # column by column, where a round's numbers are alike
    block = zlib.compress(np.ascontiguousarray(rows[of["rows"] :].T).tobytes(), 1)
    block = len(block).to_bytes(8, "little") + block
    path = folder / f"{LEDGER}.rows"
    path.touch()
    with path.open("r+b") as f:
        f.truncate(of["bytes"])  # what a checkpoint that was never finished has left
        f.seek(of["bytes"])
        f.write(block)
    return of | {"rows": len(rows), "bytes": of["bytes"] + len(block), "sum": zlib.crc32(block, of["sum"])}


def _grown(folder: Path, of: dict[str, int]) -> Tensor:
    """The rows of a checkpoint's part of the file."""
    with (folder / f"{LEDGER}.rows").open("rb") as f:
        whole = f.read(of["bytes"])
    if len(whole) != of["bytes"] or zlib.crc32(whole) != of["sum"]:
        raise ValueError(f"the checksum of {LEDGER}.rows does not match")
    parts, at = [np.zeros((0, of["columns"]))], 0
    while at < len(whole):
        end = at + 8 + int.from_bytes(whole[at : at + 8], "little")
        parts.append(np.frombuffer(zlib.decompress(whole[at + 8 : end])).reshape(of["columns"], -1).T)
        at = end
    return torch.from_numpy(np.concatenate(parts))


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
            if LEDGER in meta:
                tensors[LEDGER] = _grown(folder, meta.pop(LEDGER))
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
