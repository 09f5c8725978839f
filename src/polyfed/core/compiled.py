"""Local training by the compiled kernel (`native/`): for which tasks, data and steps, and how it is called."""

from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.core.batches import Batches, Work
from polyfed.core.split import Split
from polyfed.core.stacked import Drift
from polyfed.core.task import Task
from polyfed.native import Layer, kernel

PATH = "native"


def path_of(task: Task, work: Work | None = None, split: Split | None = None) -> str:
    """How plain local steps on these samples are made: "native", "closed form", "vectorised" or "client by client"."""
    if task.stacked is None:
        return "vectorised" if task.vectorised else "client by client"
    plain = work is None or work.augment is None
    weighed = split is not None and split.weight is not None
    return PATH if plain and not weighed and kernel() is not None and chain_of(task) else "closed form"


def chain_of(task: Task) -> list[Layer] | None:
    """The model as the kernel takes it: linear layers, at most one activation behind each, on the CPU."""
    if (
        task.stacked is None
        or task.stacked.class_weights is not None
        or not task.optimizer.plain
        or task.device.type != "cpu"
        or task.dtype not in (torch.float32, torch.float64)
    ):
        return None
    layers: list[Layer] = []
    for m in task.stacked.layers:
        if isinstance(m, nn.Linear):
            layers.append(Layer(m.in_features, m.out_features, len([*m.parameters()]) == 2, ""))
        elif layers[-1].activation:
            return None
        else:
            layers[-1] = layers[-1]._replace(activation=type(m).__name__)
    return layers


def train(task: Task, w: Tensor, data: Batches, lr: float | Tensor, drift: Drift, only: Tensor | None = None) -> bool:
    """All of `data`'s steps in place, w <- keep w + add - lr gradient; False, and nothing done, where it cannot.

    w: [s, p], without gaps     only: [p] or [s, p], ones and zeros: what is trained
    """
    split, run, layers = data.split, kernel() if data.native else None, chain_of(task)
    if run is None or layers is None or data.work.augment is not None or split.weight is not None:
        return False
    kind = torch.int64 if task.loss == "cross-entropy" else w.dtype
    keep = drift.keep
    if (
        split.x.dtype != w.dtype
        or split.y.dtype != kind
        or prod(split.x.shape[1:]) != layers[0].inputs
        or (isinstance(keep, Tensor) and (keep.dim() != 2 or keep.stride(1) not in (0, 1) or keep.shape[1] != 1))
    ):
        return False
    x, y = split.x.contiguous(), split.targets.contiguous()
    add = None if drift.add is None else drift.add.to(w.dtype).expand_as(w).contiguous()
    if only is not None:
        only = only[0] if only.dim() == 2 and only.stride(0) == 0 else only
        only = only.to(w.dtype).contiguous()
    keys = np.zeros((len(w), 2), np.uint64) if data.full_batch else data.order_keys()
    data.repeat()
    run.train(
        layers, str(task.loss), w.data_ptr(), len(w), w.element_size(), x.data_ptr(), y.data_ptr(),
        split.offsets[data.clients], split.counts[data.clients], data.steps.numpy(), data.work.batch_size,
        keys, _each(lr, len(w)), _each(keep, len(w)), None if add is None else add.data_ptr(),
        None if only is None else only.data_ptr(), only is not None and only.dim() == 2,
    )  # fmt: skip
    return True


def _each(value: float | Tensor, s: int) -> np.ndarray:
    """A number, or a tensor [s, 1], as one number per client."""
    one = value.reshape(-1).double().numpy() if isinstance(value, Tensor) else np.float64(value)
    return np.broadcast_to(one, s)
