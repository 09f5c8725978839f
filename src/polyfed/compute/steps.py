"""Local steps: a gradient step with what a method adds to it, a pull, a shift, weight decay, in place."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from polyfed.base.typed import add_
from polyfed.compute import compiled
from polyfed.compute.batches import Batch
from polyfed.compute.gradients import losses_of, slopes, statistics_, undecayed
from polyfed.compute.net import Net
from polyfed.compute.stacked import Affine, Drift


def affine(
    net: Net,
    w: Tensor,
    lr: float | Tensor,
    pull: tuple[float | Tensor, Tensor] | None = None,
    shift: Tensor | None = None,
    minus: Tensor | None = None,
) -> Affine:
    """The effect of a pull, a shift and weight decay (`local_sgd`) on w in a step of size lr, a number or [s, 1].

    `summed` makes a `Drift` of it.
    """
    strength, anchor = pull if pull is not None else (0.0, None)
    rate = lr * (strength + net.weight_decay)
    keep: float | Tensor = 1.0
    terms: list[tuple[float | Tensor, Tensor]] = []
    if isinstance(rate, Tensor) or rate:
        # a number stays one: to read it back from an accelerator would be to wait for it
        each = (1 - torch.as_tensor(rate, dtype=torch.float64)).to(w.dtype)
        if anchor is not None:
            # by the rounded rest of `keep`: a model at its anchor stays there
            share = strength / (strength + net.weight_decay) if net.weight_decay else 1.0
            by = ((1 - each.double()) * share).to(w.dtype)
            terms.append((by if by.dim() else float(by.numpy()), anchor))
        keep = each.expand(len(w), -1) if each.dim() else float(each.numpy())
    terms += [(by, v) for by, v in ((-lr, shift), (lr, minus)) if v is not None]
    return Affine(keep, terms)


def descend_(net: Net, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift | None = None, steps: int = 1) -> None:
    """`Task.descend_`: w <- keep * w + add - lr * gradient of the loss, without weight decay."""
    drift = drift or affine(net, w, lr).summed()
    if batch.live is None and compiled.descend_(net, w, net.cast(batch, w), lr, drift, steps):
        return
    descend = descent_on(net, w, batch, lr, drift) or partial(_descend_, net, w, batch, lr, drift)
    for _ in range(steps):
        descend()


def descent_on(net: Net, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift) -> Callable[[], None] | None:
    """() -> None: a step of `descend_` at each call; None where many steps on one batch gain nothing by it."""
    if net.stacked is None or net.guard is not None or batch.live is not None:
        return None
    return net.stacked.descent_on(w, net.cast(batch, w), lr, drift)


def _descend_(net: Net, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift) -> None:
    """One step, where nothing is set up for many."""
    batch = net.cast(batch, w)
    if not net.batched and net.guard is None and net.statistics is None:
        empty = [] if batch.sizes is None else [i for i, b in enumerate(batch.sizes) if b == 0]
        for i in empty:
            if batch.live is None or batch.live[i]:
                drift.row(i)(w[i])
        for i, views, parameters, loss in losses_of(net, w, batch):
            if batch.live is None or batch.live[i]:
                g = slopes(loss, parameters)
                drift.row(i)(w[i])
                add_(views, g, alpha=-float(lr[i] if isinstance(lr, Tensor) and lr.dim() else lr))
        return
    g = undecayed(net, w, batch, need_loss=False)[0]
    moves = None if net.statistics is None else g.index_select(-1, net.statistics)
    new = statistics_(net, drift(w.clone()).sub_(g.mul_(lr)), w, moves)
    w.copy_(new if batch.live is None else torch.where(batch.live > 0, new, w))
