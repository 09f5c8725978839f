"""Sums of row gradients, each clipped to a length: Abadi et al., "Deep Learning with Differential Privacy" (CCS
2016). In a chain of linear layers ||g||^2 = sum over layers of ||e||^2 (||x||^2 + 1), and no row's gradient is
written out; other models derive row by row, by vmap where torch has rules for them, else in a pass each."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from polyfed.base.errors import ModelError
from polyfed.base.typed import BatchNorm, row_norms, weighted_sum
from polyfed.compute.batches import Batch
from polyfed.compute.batchnorm import Statistics
from polyfed.compute.gradients import undecayed
from polyfed.compute.net import model_input
from polyfed.compute.stacked import shrink
from polyfed.compute.task import Task

AT_ONCE = 1 << 24  # numbers of row gradients that are there at a time
TRIED = 4  # rows that the two ways to derive them are compared on
NEAR = 1e-4  # share of a gradient that rounding, in float32 too, stays below


def clipped_sum(task: Task, w: Tensor, batch: Batch, clip: float) -> Tensor:
    """[s, p] float64: each client's sum over its rows of gradients, without weight decay, cut to length `clip`."""
    # a row's gradient is that of its loss times its weight, of a model without random numbers such as dropout's:
    # replacing a row by nothing changes a client's sum by at most `clip`
    batch = task.net.cast(batch, w)
    if task.net.stacked is not None:
        return task.net.stacked.clipped(w, batch, clip)
    return torch.stack([_row_by_row(task, w[i], *_rows(batch, i), clip) for i in range(len(w))])


def sizes_of(batch: Batch) -> Tensor:
    """[s] float64: each client's number of real rows, the divisor of a mean whatever the rows hold."""
    s, b = batch.x.shape[:2]
    return torch.as_tensor([b] * s if batch.sizes is None else batch.sizes, dtype=torch.float64, device=batch.x.device)


def _rows(batch: Batch, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """Client i's rows, targets and [b] factors on their losses, 1 but for sample weights."""
    b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
    factor = batch.x.new_ones(b, dtype=torch.float64) if batch.weight is None else b * batch.weight[i, :b].double()
    return batch.x[i, :b], batch.y[i, :b], factor


def _row_by_row(task: Task, w: Tensor, x: Tensor, y: Tensor, factor: Tensor, clip: float) -> Tensor:
    total, size = w.new_zeros(w.shape, dtype=torch.float64), max(1, AT_ONCE // task.p)
    into, gradients = task.layout.views(total), _together if _at_once(task, w, x, y) else _looped
    for k in range(0, len(x), size):
        at = slice(k, k + size)
        each = gradients(task, w, x[at], y[at])
        squares = sum(g.double().flatten(1).square().sum(1) for g in each)
        assert isinstance(squares, Tensor)
        scale = shrink(factor[at] * squares.sqrt(), clip) * factor[at]
        for view, g in zip(into, each, strict=True):
            view.add_(weighted_sum(scale, g.double().nan_to_num(0, 0, 0)))  # 0 times infinity is NaN
    return total


def _together(task: Task, w: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """Gradients [b, ...] of each row's loss by every parameter, of all rows at once."""
    module, _ = task.net.workspace(training=True)
    named = {e.name: v.detach() for e, v in zip(task.layout.entries, task.layout.views(w), strict=True)}
    func: Any = torch.func

    def loss(parameters: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        output: Tensor = func.functional_call(module, parameters, (model_input(one[None]),))
        return task.net.criterion.mean(output, target[None])

    by_name: dict[str, Tensor] = func.vmap(func.grad(loss), in_dims=(None, 0, 0))(named, x, y)
    return [by_name[e.name] for e in task.layout.entries]


def _looped(task: Task, w: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """`_together` by a pass for each row, as a client of one sample."""
    return task.layout.views(undecayed(task.net, w.expand(len(x), -1), Batch(x[:, None], y[:, None]))[0])


_settled = WeakKeyDictionary[Task, bool]()


def _at_once(task: Task, w: Tensor, x: Tensor, y: Tensor) -> bool:
    """True where deriving some rows at once gives the gradients of a pass for each."""
    if task not in _settled and len(x):
        try:
            one, many = (_flat(of(task, w, x[:TRIED], y[:TRIED])).nan_to_num() for of in (_looped, _together))
            _settled[task] = bool((row_norms(many - one) <= NEAR * row_norms(one)).all())
        except Exception:  # an operation without a rule for it; a pass for each reports any other error
            _settled[task] = False
    return _settled.get(task, False)


def _flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in gradients], 1)


def check_rows(task: Task, x: Tensor, y: Tensor) -> None:
    """Raise ModelError for a model or loss that gives rows x, y: [b, ...] no gradients of their own."""
    if task.net.stacked is not None or len(x) < 2:
        return
    w = task.w0[None]
    batch = task.net.cast(Batch(x[None].to(task.device), y[None].to(task.device)), w)
    alone, together = _flat(_looped(task, task.w0, batch.x[0], batch.y[0])), undecayed(task.net, w, batch)[0]
    gaps = [row_norms(n * together - alone.sum(0)) for n in (1, len(x))]  # of a sum, or a mean
    if not any(bool(gap <= NEAR * row_norms(alone).sum()) for gap in gaps):
        mixing = next((m for m in task.model.modules() if isinstance(m, Statistics | BatchNorm)), task.model)
        raise ModelError(
            f"privacy.unit: found row with {type(mixing).__name__}, or a loss, by which rows of a batch depend on each "
            "other, so that none has a gradient of its own; expected site, or GroupNorm in the place of BatchNorm"
        )
