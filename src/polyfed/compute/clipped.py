"""Sums of row gradients, each clipped to a length: Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016).

For chains of linear layers the length of a row's gradient follows from its factors, ||g||^2 = sum over layers of
||e||^2 (||x||^2 + 1), and no row's gradient is written out; any other model derives row by row.
"""

from typing import Any

import torch
from torch import Tensor

from polyfed.base.typed import weighted_sum
from polyfed.compute.batches import Batch
from polyfed.compute.stacked import shrink
from polyfed.compute.task import Task

AT_ONCE = 1 << 24  # numbers of row gradients that are there at a time


def clipped_sum(task: Task, w: Tensor, batch: Batch, clip: float) -> Tensor:
    """Each client's sum over its rows of gradients scaled down to length `clip`.

    Parameters
    ----------
    task : Task
        The model and loss; weight decay is left out.
    w : Tensor
        [s, p] the clients' models.
    batch : Batch
        s rows. A row's gradient is that of its loss times its weight.
    clip : float
        Longest gradient of a row. Of a model without random numbers, such as dropout draws.

    Returns
    -------
    Tensor
        [s, p] float64. Replacing one row by nothing changes a client's sum by at most `clip`.

    """
    batch = task.cast(batch, w)
    if task.stacked is not None:
        return task.stacked.clipped(w, batch, clip)
    return torch.stack([_row_by_row(task, w[i], *_rows(batch, i), clip) for i in range(len(w))])


def sizes_of(batch: Batch) -> Tensor:
    """[s] float64 number of real rows of each client: what a mean divides by, whatever the rows hold."""
    s, b = batch.x.shape[:2]
    return torch.as_tensor([b] * s if batch.sizes is None else batch.sizes, dtype=torch.float64, device=batch.x.device)


def _rows(batch: Batch, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """Client i's rows, targets and [b] factors on their losses, 1 but for sample weights."""
    b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
    factor = batch.x.new_ones(b, dtype=torch.float64) if batch.weight is None else b * batch.weight[i, :b].double()
    return batch.x[i, :b], batch.y[i, :b], factor


def _row_by_row(task: Task, w: Tensor, x: Tensor, y: Tensor, factor: Tensor, clip: float) -> Tensor:
    module, _ = task.workspace(training=True)
    named = {e.name: v.detach() for e, v in zip(task.layout.entries, task.layout.views(w), strict=True)}
    func: Any = torch.func

    def loss(parameters: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        output: Tensor = func.functional_call(module, parameters, (one[None],))
        return task.criterion.mean(output, target[None])

    each = func.vmap(func.grad(loss), in_dims=(None, 0, 0))
    total, size = w.new_zeros(w.shape, dtype=torch.float64), max(1, AT_ONCE // task.p)
    into = task.layout.views(total)
    for k in range(0, len(x), size):
        at = slice(k, k + size)
        found: dict[str, Tensor] = each(named, x[at], y[at])
        squares = sum(g.double().flatten(1).square().sum(1) for g in found.values())
        assert isinstance(squares, Tensor)
        scale = shrink(factor[at] * squares.sqrt(), clip) * factor[at]
        for view, entry in zip(into, task.layout.entries, strict=True):
            view.add_(weighted_sum(scale, found[entry.name].double().nan_to_num(0, 0, 0)))
    return total
