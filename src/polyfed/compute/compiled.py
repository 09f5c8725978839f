"""Local training by the compiled kernel (`native/`): for which tasks, data and steps, and how it is called."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.compute import chains
from polyfed.compute.batches import Batch, Batches, Work
from polyfed.compute.losses import LOSSES
from polyfed.compute.net import Net
from polyfed.compute.split import Split
from polyfed.compute.stacked import Affine, Drift
from polyfed.compute.terms import Distillation
from polyfed.native import Kernel, Layer, kernel, lament

PATH = "native"
NO_KEYS = np.empty(0, dtype=np.uint64)
FEW = 32  # rows up to which the kernel multiplies with many faster than torch


def path_of(net: Net, work: Work | None = None, split: Split | None = None) -> str:
    """Path of plain local steps on these samples: "native", "closed form", "vectorised" or "client by client"."""
    plain = (work is None or work.augment is None) and (split is None or split.weight is None)
    layers = layers_of(net, None if split is None else split.x.shape[1:]) if plain else None
    if layers is not None and (split is None or not net.integers or _reads(layers, split.x.dtype)):
        if kernel() is not None:
            return PATH
        lament()
    return "closed form" if net.stacked is not None else "vectorised" if net.vectorised else "client by client"


def dense(net: Net, path: str, split: Split) -> bool:
    """True where a step has about as many products as samples times parameters: with convolutions it has many more."""
    layers = layers_of(net, split.x.shape[1:]) if path == PATH else None
    return net.batched if layers is None else not any(prod(n.window) for n in layers)


def unknown(net: Net, sample: torch.Size) -> str:
    """The plan's line where a layer that the kernel does not know leaves the whole model to torch, else ""."""
    layer = (
        ""
        if kernel() is None or layers_of(net, sample) is not None
        else _known.get(net, {}).get((sample, net.integers))
    )
    return f"plan: torch trains the whole model, as the kernel does not know {layer}" if layer else ""


_known = WeakKeyDictionary[Net, dict[tuple[torch.Size | None, bool], tuple[Layer, ...] | str]]()


def layers_of(net: Net, sample: torch.Size | None) -> tuple[Layer, ...] | None:
    """The model as the kernel takes it, or None; a chain of linear layers needs no shape of a sample."""
    if (
        net.loss not in LOSSES
        or net.criterion.class_weights is not None
        or net.bf16
        or not net.optimizer.plain
        or net.device.type != "cpu"
        or net.dtype not in (torch.float32, torch.float64)
    ):
        return None
    cache, key = _known.setdefault(net, {}), (sample, net.integers)
    if key not in cache:
        layers: Sequence[Layer] | str = ""
        if net.stacked is not None:
            layers = _chained(net.stacked.layers) or ""
        elif sample is not None:
            layers = chains.known(net, sample)
        cache[key] = layers if isinstance(layers, str) else tuple(layers)
    found = cache[key]
    return None if isinstance(found, str) else found


def _chained(modules: list[nn.Module]) -> list[Layer] | None:
    """The layers of a chain with at most one activation behind each linear layer."""
    layers: list[Layer] = []
    for m in modules:
        if isinstance(m, nn.Linear):
            layers.append(Layer(m.in_features, m.out_features, len([*m.parameters()]) == 2))
        elif layers[-1].activation:
            return None
        else:
            layers[-1] = layers[-1]._replace(activation=type(m).__name__)
    return layers


def train(
    net: Net,
    start: Tensor,
    data: Batches,
    lr: float | Tensor,
    drift: Affine,
    only: Tensor | None = None,
    curvature: Tensor | None = None,
    toward: tuple[float | Tensor, Tensor] | None = None,
    teacher: tuple[Tensor, Distillation] | None = None,
) -> Tensor | None:
    """The models [s, p] after all steps w <- keep w + add - lr gradient; None, and nothing done, where it cannot."""
    # only: [p] or [s, p], 1 where trained; curvature: [s] float64 zeros, set to the largest change of a gradient by the
    # length of its step
    split = data.split
    layers = _fitting(net, start, split.x, split.y, split.x.shape[1:], drift) if data.native else None
    if layers is None or data.work.augment is not None or split.weight is not None:
        return None
    if curvature is not None and (net.weight_decay or any(n.window != (0, 0) or n.columns[2] for n in layers)):
        return None
    w, batch = start.new_empty(start.shape), data.work.batch_size
    data.repeat()
    _steps(
        net, layers, w, start, lr, drift, split.x, split.targets, split.offsets[data.clients],
        split.counts[data.clients], data.steps.numpy(), batch, NO_KEYS if batch is None else data.order_keys(),
        data.step_seeds if net.random else None, only, curvature, toward, teacher,
    )  # fmt: skip
    return w


def descend_(net: Net, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift, steps: int = 1) -> bool:
    """Take steps w <- keep w + add - lr gradient on one batch, in place; False, and nothing done, where it cannot."""
    summed = Affine(drift.keep, [] if drift.add is None else [(1.0, drift.add)])
    return w.is_contiguous() and _on(net, w, w, batch, lr, summed, steps)


def gradient(net: Net, w: Tensor, batch: Batch) -> Tensor | None:
    """[s, p]: each client's gradient of the mean loss, without weight decay; None where the kernel cannot."""
    g = w.new_empty(w.shape if batch.native else 0)
    return g if _on(net, g, w, batch, -1.0, Affine(0.0, []), 1) else None  # a step of length -1 that keeps nothing


def _on(net: Net, w: Tensor, start: Tensor, batch: Batch, lr: float | Tensor, drift: Affine, steps: int) -> bool:
    """Take steps from `start` on a batch of s clients whose samples all count the same, into `w`."""
    x, sizes = batch.x, batch.sizes
    if not batch.native or batch.weighted or (sizes is not None and 0 in sizes):
        return False
    layers, (s, b) = _fitting(net, start, x, batch.y, x.shape[2:], drift), x.shape[:2]
    if layers is None:
        return False
    count = np.full(s, b) if sizes is None else np.array(sizes)
    seeds = partial(_same_seeds, batch, s, steps) if net.random else None
    _steps(net, layers, w, start, lr, drift, x, batch.y, b * np.arange(s), count, np.full(s, steps), seeds=seeds)
    return True


def _same_seeds(batch: Batch, s: int, steps: int) -> np.ndarray:
    """[s, steps]: the batch's seeds in every step."""
    one = batch.seed() if batch.seed else np.zeros(s, dtype=np.uint64)
    return np.repeat(one[:, None], steps, 1)


def _fitting(net: Net, w: Tensor, x: Tensor, y: Tensor, sample: torch.Size, drift: Affine) -> tuple[Layer, ...] | None:
    """The layers, where the kernel has this loss of these models on such samples, and such steps."""
    layers = layers_of(net, sample) if kernel() is not None and net.guard is None else None
    kind, keep = torch.int64 if net.loss == "cross-entropy" else w.dtype, drift.keep
    fits = (
        layers is not None
        and y.dtype == kind
        and (x.dtype == w.dtype or (x.dtype == torch.int64 and _reads(layers, x.dtype)))
        and w.shape[-1] == net.p
        and prod(sample) == layers[0].sample
        and (not isinstance(keep, Tensor) or (keep.dim() == 2 and keep.shape[1] in (1, net.p)))
    )
    return layers if fits else None


def _reads(layers: tuple[Layer, ...], dtype: torch.dtype) -> bool:
    """True for floats, and for integers that only pick rows of tables."""
    tables = layers[0].operation == "table" and all(n.operation != "columns" for n in layers)
    return dtype.is_floating_point or (dtype == torch.int64 and tables)


def _steps(
    net: Net, layers: tuple[Layer, ...], w: Tensor, start: Tensor, lr: float | Tensor, drift: Affine, x: Tensor,
    y: Tensor, first: np.ndarray, count: np.ndarray, steps: np.ndarray, batch: int | None = None,
    keys: np.ndarray = NO_KEYS, seeds: Callable[[], np.ndarray] | None = None, only: Tensor | None = None,
    curvature: Tensor | None = None, toward: tuple[float | Tensor, Tensor] | None = None,
    teacher: tuple[Tensor, Distillation] | None = None,
) -> None:  # fmt: skip
    """Call the kernel, see `Kernel.train`."""
    (s, p), x, y, run = start.shape, x.contiguous(), y.contiguous(), kernel()
    assert run is not None, "see _fitting"
    keep, terms = drift.keep, [_by_client(by, v) for by, v in drift.terms]
    kept = keep if isinstance(keep, Tensor) and keep.shape[1] > 1 else None

    def row(vector: Tensor) -> tuple[int, int]:
        held.append(vector.to(w.dtype).expand(s, p))  # one that all clients share stays one row
        if p > 1 and held[-1].stride(1) != 1:
            held[-1] = held[-1].contiguous()
        return held[-1].data_ptr(), held[-1].stride(0)

    held = list[Tensor]()
    pulls = None
    if toward is not None:
        to = toward[1].to(w.dtype)
        to = to if to[0].is_contiguous() else to.contiguous()  # one that all clients share stays one
        strength = torch.as_tensor(toward[0], dtype=w.dtype).expand(s, to.shape[1]).contiguous()
        pulls = (strength.data_ptr(), strength.stride(0)), (to.data_ptr(), to.stride(0))
    run.train(
        layers, str(net.loss), w.data_ptr(), row(start), s, w.element_size(), x.data_ptr(), y.data_ptr(),
        x.dtype == torch.int64, first, count,
        steps, batch, keys, _each(lr, s), _each(keep, s) if kept is None else row(kept),
        seeds() if seeds is not None and any(n.drop for n in layers) else None,
        [(_each(by, s), row(v)) for by, v in terms], None if only is None else row(only),
        0 if curvature is None else curvature.data_ptr(), pulls,
        None if teacher is None else (row(teacher[0]), teacher[1].strength, teacher[1].temperature, teacher[1].true),
    )  # fmt: skip


def renewed(w: Tensor, i: Tensor, j: Tensor, delta: Tensor, row: Tensor, keep: Tensor) -> Tensor | None:
    """Norms [k] of w[i] - w[j] + keep delta[row], written into rows that are not below 0; None, and nothing done,
    where it cannot."""
    if (run := _for_rows(w, delta, keep)) is None:
        return None
    squares = w.new_zeros(len(i), dtype=torch.float64)
    # every number of the vectors as torch rounds it
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


def _by_client(by: float | Tensor, vector: Tensor) -> tuple[float | Tensor, Tensor]:
    """A factor, one per client, and a vector; one factor per number is multiplied into the vector."""
    whole = isinstance(by, Tensor) and by.dim() and by.shape[-1] == vector.shape[-1] != 1
    return (1.0, by * vector) if whole else (by, vector)


def _each(value: float | Tensor, s: int) -> np.ndarray:
    """A number, or a tensor [s, 1], as an array [s]."""
    one = value.reshape(-1).double().numpy() if isinstance(value, Tensor) else np.float64(value)
    return np.broadcast_to(one, s)
