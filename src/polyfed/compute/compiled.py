"""Local training by the compiled kernel (`native/`): for which tasks, data and steps, and how it is called."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.compute.batches import Batch, Batches, Work
from polyfed.compute.losses import LOSSES
from polyfed.compute.split import Split
from polyfed.compute.stacked import ACTIVATIONS, Affine, Drift, chain, flat, flattens
from polyfed.compute.terms import Distillation
from polyfed.native import Kernel, Layer, Pair, kernel

if TYPE_CHECKING:
    from polyfed.compute.task import Task

PATH = "native"
NO_KEYS = np.empty(0, dtype=np.uint64)
FEW = 32  # rows up to which the kernel multiplies with many faster than torch


def path_of(task: "Task", work: Work | None = None, split: Split | None = None) -> str:
    """Path of plain local steps on these samples: "native", "closed form", "vectorised" or "client by client"."""
    plain = (work is None or work.augment is None) and (split is None or split.weight is None)
    if plain and kernel() is not None and layers_of(task, None if split is None else split.x.shape[1:]) is not None:
        return PATH
    return "closed form" if task.stacked is not None else "vectorised" if task.vectorised else "client by client"


_known = WeakKeyDictionary["Task", dict[torch.Size | None, tuple[Layer, ...] | None]]()


def layers_of(task: "Task", sample: torch.Size | None) -> tuple[Layer, ...] | None:
    """The model as the kernel takes it, on the CPU: convolutions, each pooled or not, then linear layers, at most one
    activation behind each.

    sample: shape of one, which a model with convolutions needs
    """
    if (
        task.loss not in LOSSES
        or task.class_weights is not None
        or task.bf16
        or not task.optimizer.plain
        or task.device.type != "cpu"
        or task.dtype not in (torch.float32, torch.float64)
    ):
        return None
    known = _known.setdefault(task, {})
    if sample not in known:
        found = _layers(task, sample) if task.stacked is None else _chained([], task.stacked.layers)
        known[sample] = None if found is None else tuple(found)
    return known[sample]


def _layers(task: "Task", sample: torch.Size | None) -> list[Layer] | None:
    """Layers of a model with convolutions."""
    modules = flat(task.model)
    at = next((k for k, m in enumerate(modules) if type(m) is nn.Linear), 0)
    if sample is None or not at or not all(q.requires_grad for q in task.model.parameters()):
        return None
    linear = chain(nn.Sequential(*modules[at:]))
    seen = _convolutions(modules[:at], sample)
    if linear is None or seen is None or seen[-1].outputs * prod(seen[-1].places) != linear[0].in_features:
        return None
    layers = _chained(seen, linear)
    return layers if layers is not None and sum(n.numbers for n in layers) == task.p else None


def _chained(layers: list[Layer], modules: list[nn.Module]) -> list[Layer] | None:
    """With these linear layers and activations behind them."""
    for m in modules:
        if isinstance(m, nn.Linear):
            layers.append(Layer(m.in_features, m.out_features, _biased(m)))
        elif layers[-1].activation:
            return None
        else:
            layers[-1] = layers[-1]._replace(activation=type(m).__name__)
    return layers


def _convolutions(modules: list[nn.Module], sample: torch.Size) -> list[Layer] | None:
    """Modules that take images and give rows, as layers of the kernel."""
    *modules, last = modules
    if not flattens(last):
        return None
    shape = [*sample]
    if modules and type(modules[0]) is nn.Unflatten and modules[0].dim == 1:
        shape = [*modules.pop(0)(torch.empty(1, *sample, device="meta")).shape[1:]]
    if len(shape) != 3:
        return None
    layers: list[Layer] = []
    channels, image = shape[0], _pair(shape[1:])
    for m in modules:
        before = layers[-1] if layers else None
        if type(m) is nn.Conv2d and m.padding_mode == "zeros" and (m.groups, m.in_channels) == (1, channels):
            window, around = _pair(m.kernel_size), m.padding
            even = around == "same" and not all(n % 2 for n in window)
            if even or _pair(m.stride) != (1, 1) or _pair(m.dilation) != (1, 1):
                return None
            if isinstance(around, str):
                around = [n // 2 for n in window] if around == "same" else 0
            layers.append(Layer(m.in_channels, m.out_channels, _biased(m), "", window, _pair(around), image))
            channels = m.out_channels
        elif before is not None and type(m) in ACTIVATIONS and not before.activation:
            layers[-1] = before._replace(activation=type(m).__name__)
        elif before is not None and type(m) is nn.MaxPool2d and before.pool == (1, 1):
            pool = _pair(m.kernel_size)
            plain = not m.ceil_mode and not m.return_indices and _pair(m.stride) == pool
            if not plain or _pair(m.padding) != (0, 0) or _pair(m.dilation) != (1, 1):
                return None
            layers[-1] = before._replace(pool=pool)
        elif type(m) is not nn.Identity:
            return None
        image = layers[-1].places if layers else image
        if min(image) < 1:
            return None
    return layers or None


def _biased(layer: nn.Module) -> bool:
    return len([*layer.parameters()]) == 2


def _pair(value: int | Sequence[int]) -> Pair:
    high, wide = (value, value) if isinstance(value, int) else value
    return high, wide


def train(
    task: "Task",
    start: Tensor,
    data: Batches,
    lr: float | Tensor,
    drift: Affine,
    only: Tensor | None = None,
    curvature: Tensor | None = None,
    toward: tuple[float | Tensor, Tensor] | None = None,
    teacher: tuple[Tensor, Distillation] | None = None,
) -> Tensor | None:
    """The models after all of `data`'s steps w <- keep w + add - lr gradient; None, and nothing done, where it cannot.

    start: [s, p]     only: [p] or [s, p], ones and zeros: what is trained
    curvature: [s] float64 zeros, which become the largest change of a gradient by the length of the step that made it
    """  # fmt: skip
    split = data.split
    layers = _fitting(task, start, split.x, split.y, split.x.shape[1:], drift) if data.native else None
    if layers is None or data.work.augment is not None or split.weight is not None:
        return None
    if curvature is not None and (task.weight_decay or any(n.window != (0, 0) for n in layers)):
        return None
    w, batch = start.new_empty(start.shape), data.work.batch_size
    data.repeat()
    _steps(
        task, layers, w, start, lr, drift, split.x, split.targets, split.offsets[data.clients],
        split.counts[data.clients], data.steps.numpy(), batch, NO_KEYS if batch is None else data.order_keys(), only,
        curvature, toward, teacher,
    )  # fmt: skip
    return w


def descend_(task: "Task", w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift, steps: int = 1) -> bool:
    """`steps` times w <- keep w + add - lr gradient on one batch, in place; False, and nothing done, where it cannot.

    w: [s, p]     lr: a number or [s, 1]
    """
    summed = Affine(drift.keep, [] if drift.add is None else [(1.0, drift.add)])
    return w.is_contiguous() and _on(task, w, w, batch, lr, summed, steps)


def gradient(task: "Task", w: Tensor, batch: Batch) -> Tensor | None:
    """[s, p]: each client's gradient of the mean loss, without weight decay; None where the kernel cannot.

    It is what a step of length -1 leaves that keeps nothing of the model.
    """
    g = w.new_empty(w.shape if batch.native else 0)
    return g if _on(task, g, w, batch, -1.0, Affine(0.0, []), 1) else None


def _on(task: "Task", w: Tensor, start: Tensor, batch: Batch, lr: float | Tensor, drift: Affine, steps: int) -> bool:
    """Steps from `start` on a batch of s clients whose samples all count the same, into `w`."""
    x, sizes = batch.x, batch.sizes
    if not batch.native or batch.weighted or (sizes is not None and 0 in sizes):
        return False
    layers, (s, b) = _fitting(task, start, x, batch.y, x.shape[2:], drift), x.shape[:2]
    if layers is None:
        return False
    count = np.full(s, b) if sizes is None else np.array(sizes)
    _steps(task, layers, w, start, lr, drift, x, batch.y, b * np.arange(s), count, np.full(s, steps))
    return True


def _fitting(
    task: "Task", w: Tensor, x: Tensor, y: Tensor, sample: torch.Size, drift: Affine
) -> tuple[Layer, ...] | None:
    """The layers, where the kernel computes this loss of these models on such samples, and such steps."""
    layers = layers_of(task, sample) if kernel() is not None and task.guard is None else None
    kind, keep = torch.int64 if task.loss == "cross-entropy" else w.dtype, drift.keep
    fits = (
        layers is not None
        and (x.dtype, y.dtype) == (w.dtype, kind)
        and w.shape[-1] == task.p
        and prod(sample) == layers[0].inputs * max(1, prod(layers[0].image))
        and (not isinstance(keep, Tensor) or (keep.dim() == 2 and keep.shape[1] == 1))
    )
    return layers if fits else None


def _steps(
    task: "Task", layers: tuple[Layer, ...], w: Tensor, start: Tensor, lr: float | Tensor, drift: Affine, x: Tensor,
    y: Tensor, first: np.ndarray, count: np.ndarray, steps: np.ndarray, batch: int | None = None,
    keys: np.ndarray = NO_KEYS, only: Tensor | None = None, curvature: Tensor | None = None,
    toward: tuple[float | Tensor, Tensor] | None = None, teacher: tuple[Tensor, Distillation] | None = None,
) -> None:  # fmt: skip
    """The kernel's call; see `Kernel.train`."""
    (s, p), x, y, run = start.shape, x.contiguous(), y.contiguous(), kernel()
    assert run is not None, "see _fitting"
    given = [start, *(v for _, v in drift.terms), *([] if only is None else [only]), *(teacher or ())[:1]]
    vectors = [t.to(w.dtype).expand(s, p) for t in given]  # one that all clients share stays one row
    vectors = [t if p == 1 or t.stride(1) == 1 else t.contiguous() for t in vectors]
    rows = [(t.data_ptr(), t.stride(0)) for t in vectors]
    pulls = None
    if toward is not None:
        to = toward[1].to(w.dtype)
        to = to if to[0].is_contiguous() else to.contiguous()  # what all clients share stays one
        strength = torch.as_tensor(toward[0], dtype=w.dtype).expand(s, to.shape[1]).contiguous()
        pulls = (strength.data_ptr(), strength.stride(0)), (to.data_ptr(), to.stride(0))
    run.train(
        layers, str(task.loss), w.data_ptr(), rows[0], s, w.element_size(), x.data_ptr(), y.data_ptr(), first, count,
        steps, batch, keys, _each(lr, s), _each(drift.keep, s),
        [(_each(by, s), at) for (by, _), at in zip(drift.terms, rows[1:], strict=False)],
        None if only is None else rows[len(drift.terms) + 1], 0 if curvature is None else curvature.data_ptr(), pulls,
        None if teacher is None else (rows[-1], teacher[1].strength, teacher[1].temperature, teacher[1].true),
    )  # fmt: skip


def renewed(w: Tensor, i: Tensor, j: Tensor, delta: Tensor, row: Tensor, keep: Tensor) -> Tensor | None:
    """Norms [k] of w[i] - w[j] + keep delta[row], vectors that go into those rows; None, and nothing done, if not.

    Every number of the vectors as torch rounds it. Where row [k] is below 0 there is none.
    """
    if (run := _for_rows(w, delta, keep)) is None:
        return None
    squares = w.new_zeros(len(i), dtype=torch.float64)
    given = (w, i.contiguous(), j.contiguous(), delta, row.contiguous(), keep, squares)
    run.renew(w.element_size(), len(i), w.shape[1], *(t.data_ptr() for t in given))
    return squares.sqrt_().to(w.dtype)


def products(W: Tensor, ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """Inner products [m, n] of the rows `ids` with all rows of W: [n, p], and all squared lengths [n], in float64."""
    run = _for_rows(W) if len(ids) <= FEW else None
    if run is None:
        return None
    G, squares = (W.new_zeros(*shape, dtype=torch.float64) for shape in ((len(ids), len(W)), (len(W),)))
    ids = ids.contiguous()
    run.products(W.element_size(), *W.shape, W.data_ptr(), len(ids), *(t.data_ptr() for t in (ids, G, squares)))
    return G, squares


def mixed(weights: Tensor, table: Tensor, rows: Tensor | None = None) -> Tensor | None:
    """[m, p]: weights [m, k] @ table [k, p], or with rows [m, k] sum_k weights[i, k] table[rows[i, k]]."""
    (m, k), p, together = weights.shape, table.shape[1], len(weights) if rows is None else 1
    run = _for_rows(weights, table) if together <= FEW else None
    if run is None:
        return None
    rows = torch.arange(k) if rows is None else rows.contiguous()
    into = table.new_empty(m, p)
    run.mix(table.element_size(), p, m, k, together, *(t.data_ptr() for t in (weights, table, rows, into)))
    return into


def _for_rows(*tensors: Tensor) -> Kernel | None:
    """The kernel, if it takes the rows of these tensors."""
    first = tensors[0]
    exact = first.dtype in (torch.float32, torch.float64) and all(t.dtype == first.dtype for t in tensors)
    return kernel() if exact and all(t.is_contiguous() and t.device.type == "cpu" for t in tensors) else None


def _each(value: float | Tensor, s: int) -> np.ndarray:
    """A number, or a tensor [s, 1], as one number per client."""
    one = value.reshape(-1).double().numpy() if isinstance(value, Tensor) else np.float64(value)
    return np.broadcast_to(one, s)
