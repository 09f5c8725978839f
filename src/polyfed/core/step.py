"""Steps of the compiled kernel on a batch that is at hand, and its gradients, for methods that step themselves."""

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from torch import Tensor

from polyfed.core.batches import Batch
from polyfed.core.compiled import layers_of
from polyfed.core.stacked import Drift
from polyfed.core.task import Task
from polyfed.native import kernel


def gradient(task: Task, w: Tensor, batch: Batch) -> Tensor | None:
    """[s, p]: each client's gradient of the mean loss, without weight decay; None where the kernel cannot.

    It is what a step of length -1 leaves that keeps nothing of the model.
    """
    if not _fits(task, w, batch):
        return None
    g = w.clone(memory_format=torch.contiguous_format)
    _descent(task, g, batch, -1.0, Drift(0.0), 1)()
    return g


def descent_on(
    task: Task, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift, steps: int = 1
) -> Callable[[], None] | None:
    """`steps` times w <- keep w + add - lr gradient, in place, at every call; None where the kernel cannot.

    w: [s, p]     lr: a number or [s, 1]
    """
    keep = drift.keep
    each = not isinstance(keep, Tensor) or (keep.dim() == 2 and (keep.shape[1] == 1 or keep.stride(1) == 0))
    fits = each and w.is_contiguous() and _fits(task, w, batch)
    return _descent(task, w, batch, lr, drift, steps) if fits else None


def _descent(task: Task, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift, steps: int) -> Callable[[], None]:
    """`descent_on` for what the kernel can."""
    run, layers = kernel(), layers_of(task, batch.x.shape[2:])
    assert run is not None, "see _fits"
    assert layers is not None, "see _fits"
    (s, b), x, y = batch.x.shape[:2], batch.x.contiguous(), batch.y.contiguous()
    count = np.full(s, b) if batch.sizes is None else np.array(batch.sizes)
    add = None if drift.add is None else drift.add.to(w.dtype).expand_as(w).contiguous()
    rate, keep = _each(lr, s), _each(drift.keep, s)

    def descend() -> None:
        run.train(
            layers, str(task.loss), w.data_ptr(), s, w.element_size(), x.data_ptr(), y.data_ptr(),
            b * np.arange(s), count, np.full(s, steps), None, np.empty(0, np.uint64), rate, keep,
            None if add is None else add.data_ptr(),
        )  # fmt: skip

    return descend


def _fits(task: Task, w: Tensor, batch: Batch) -> bool:
    """Whether the kernel computes this loss of these models on samples of this kind, all of which count the same."""
    if not batch.native or batch.weighted or (batch.sizes is not None and 0 in batch.sizes):
        return False
    layers = layers_of(task, batch.x.shape[2:]) if kernel() is not None else None
    kind = torch.int64 if task.loss == "cross-entropy" else w.dtype
    return (
        layers is not None
        and (batch.x.dtype, batch.y.dtype) == (w.dtype, kind)
        and prod(batch.x.shape[2:]) == layers[0].inputs * max(1, prod(layers[0].image))
    )


def _each(value: float | Tensor, s: int) -> np.ndarray:
    """A number, or a tensor [s, 1], as one number per client."""
    return value[..., :1].flatten().double().numpy() if isinstance(value, Tensor) else np.full(s, value, np.float64)
