"""Kept features: what frozen modules make of every sample, computed once and kept in the run's folder, as private there
as the samples are. Runs beside it, those of a comparison, have the same file under another name."""

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from polyfed.base.checkpoint import reason
from polyfed.base.errors import RunError
from polyfed.base.system import cores
from polyfed.compute.kept import Kept
from polyfed.compute.split import Split
from polyfed.runs import ownership as files

MAPPED = 1 << 28  # bytes of features above which they stay in their file
_loaded = WeakValueDictionary[str, Tensor]()  # those of this process


def features(kept: Kept, data: Mapping[str, Split], folder: Path | None) -> dict[str, Split]:
    """The same splits with features as inputs.

    kept: the model, cut     data: on its device     folder: of the run; without one, large features are in a file that
    has no name
    Raises RunError where they cannot be written.
    """
    return {name: replace(split, x=_features(kept, split, folder)) for name, split in data.items()}


def _features(kept: Kept, split: Split, folder: Path | None) -> Tensor:
    key, shape = kept.key(split), (len(split.x), *kept.shape)
    size = prod(shape) * kept.task.w0.element_size()
    path = None if folder is None else folder / "features" / f"{key}.npy"
    inputs = _loaded.get(key)
    if inputs is None and folder is not None and path is not None and files.linked(folder, f"features/{path.name}"):
        inputs = _read(path, shape, kept)
    if inputs is None:
        inputs = _made(kept, split, shape, path, size)
    _loaded[key] = inputs
    return inputs


def _made(kept: Kept, split: Split, shape: tuple[int, ...], path: Path | None, size: int) -> Tensor:
    """Compute them, into the file if there is one."""
    dtype = kept.task.dtype
    if path is None and size <= MAPPED:
        out = torch.empty(shape, dtype=dtype, device=kept.task.device)
        kept.features_(out, split.x, cores())
        return out

    def write(draft: Path) -> None:
        like = torch.empty(0, dtype=dtype).numpy().dtype
        array = np.lib.format.open_memmap(draft, "w+", dtype=like, shape=shape)
        draft.chmod(0o600)
        kept.features_(torch.as_tensor(array), split.x, cores())
        array.flush()

    with tempfile.TemporaryDirectory() if path is None else contextlib.nullcontext() as place:
        file = path or Path(str(place)) / "features.npy"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            files.put(file, write)
        except OSError as e:
            raise RunError(f"cannot write {file}: {reason(e)}") from None
        inputs = _read(file, shape, kept)
        assert inputs is not None, "it was just written"
        return inputs


def _read(path: Path, shape: tuple[int, ...], kept: Kept) -> Tensor | None:
    """The features of a file; None where there is none, or another's."""
    like = torch.empty(0, dtype=kept.task.dtype).numpy().dtype
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if array.shape != shape or array.dtype != like:
        return None
    large = array.nbytes > MAPPED and kept.task.device.type == "cpu"
    return torch.as_tensor(array if large else np.array(array)).to(kept.task.device)
