"""Gradients of clients' mean losses at their own models: in closed form (`stacked.py`), from the compiled kernel, from
one vectorised pass, or from the module itself, client after client."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from polyfed.base.errors import ConfigError
from polyfed.base.typed import copy_
from polyfed.compute import compiled
from polyfed.compute.batches import Batch
from polyfed.compute.net import Net, model_input
from polyfed.compute.recompute import Again, kept_short
from polyfed.compute.terms import Also, Entering
from polyfed.compute.trial import Keyed


def gradient(
    net: Net, w: Tensor, batch: Batch, need_loss: bool = True, also: Also | None = None
) -> tuple[Tensor, Tensor | None]:
    """`Task.gradient`."""
    return passed(net, w, batch, need_loss, also)[:2]


def passed(
    net: Net, w: Tensor, batch: Batch, need_loss: bool = False, also: Also | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`Task.gradient`, and what the pass takes off running statistics of BatchNorm: [s, k], or None without any."""
    at = net.statistics
    g, loss = undecayed(net, w, net.cast(batch, w), need_loss, also)
    moves = None if at is None else g.index_select(-1, at)
    g, w = bare(net, g), bare(net, w)
    if net.weight_decay:
        g.add_(w, alpha=net.weight_decay)
        if loss is not None:
            loss = loss + net.weight_decay / 2 * w.square().sum(-1)
    return g, loss, moves


def undecayed(
    net: Net, w: Tensor, batch: Batch, need_loss: bool = False, also: Also | None = None
) -> tuple[Tensor, Tensor | None]:
    """`gradient` of the loss alone; at running statistics of BatchNorm, what the pass takes off them."""
    if net.guard is not None and (g := net.guard(w, batch)) is not None:
        if also is not None:
            raise ConfigError("privacy: found a method that adds to the loss of a row, expected unit = 'site'")
        return g, None
    if not need_loss and also is None and (g := compiled.gradient(net, w, batch)) is not None:
        return g, None
    if net.stacked is not None:
        return net.stacked.gradient(w, batch, need_loss, also)
    if net.vectorised:
        return _vectorised(net, w, batch, also)
    return _one_by_one(net, w, batch, also)


def _one_by_one(net: Net, w: Tensor, batch: Batch, also: Also | None) -> tuple[Tensor, Tensor]:
    g, losses = torch.zeros_like(w, memory_format=torch.contiguous_format), w.new_zeros(len(w))
    for i, _, parameters, loss in losses_of(net, w, batch, also):
        copy_(net.layout.views(g[i]), slopes(loss, parameters))
        losses[i] = loss.detach()
    return g, losses


def losses_of(
    net: Net, w: Tensor, batch: Batch, also: Also | None = None
) -> Iterator[tuple[int, list[Tensor], list[nn.Parameter], Tensor]]:
    """Client by client through the module: (row, views of w[row], parameters, loss), without rows of no samples."""
    module, parameters = net.workspace(training=True, second=also is not None)  # which may evaluate models
    keys = net.keys(batch)

    def again(draws: object, key: int) -> Again:
        return lambda: partial(net.drawing, key, draws.count if isinstance(draws, Keyed) else 0)

    for i in range(len(w)):
        b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
        if b == 0:
            continue
        views = net.point(parameters, w[i])
        key = 0 if keys is None else int(keys[i])
        with torch.enable_grad(), net.drawing(key) as draws, kept_short(module, net.blocks, again(draws, key)):
            with net.precision(), nullcontext() if also is None else Entering(module) as watch:
                output = module(model_input(batch.x[i, :b]))
            loss = net.criterion.mean(output.to(w.dtype), batch.y[i, :b], row_weight(batch, i, b))
        if also is not None and watch is not None:
            f, z, one = watch.entered().to(w.dtype), output.to(w.dtype), batch.row(i, b)
            with torch.enable_grad():
                loss = loss + also(f[None], z[None], one, slice(i, i + 1))[0]
        yield i, views, parameters, loss


def _vectorised(net: Net, w: Tensor, batch: Batch, also: Also | None) -> tuple[Tensor, Tensor]:
    if batch.sizes is not None and not any(batch.sizes):
        return torch.zeros_like(w), w.new_zeros(len(w))
    module, _ = net.workspace(training=True)

    def run(w: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        given, w = batch._replace(x=x, y=y, weight=weight), w.detach().requires_grad_()
        with torch.enable_grad():
            with net.precision():
                watch = None if also is None else Entering(module)
                output, *features = net.many_pass(module, net.layout, w, x, keys, watch)
            loss = net.criterion.of_models(output.to(w.dtype), given)
            if also is not None:
                loss = loss + also(features[0].to(w.dtype), output.to(w.dtype), given, slice(0, len(w)))
            (g,) = slopes(loss.sum(), [w])
        return g, loss.detach()

    given = w, batch.x, batch.y, batch.weight, net.drawn(batch)
    if also is not None or (batch.sizes is not None and callable(net.loss)):  # which do as the numbers are
        return run(*given)
    rounding = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    g, loss = net.recorder(run, given, (net.grouped, *rounding))
    return g, loss


def gradient_on(net: Net, w: Tensor, batch: Batch) -> Callable[[], Tensor] | None:
    """() -> `gradient` at what `w` holds at each call, overwritten by the next; None where many steps gain nothing."""
    if net.stacked is None or net.guard is not None:
        return None
    gradient = net.stacked.gradient_on(w, net.cast(batch, w))
    decay = net.weight_decay
    return (lambda: gradient().add_(w, alpha=decay)) if decay else gradient


def hvp(net: Net, w: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """[s, p]: the Hessian of each client's mean loss times v: [s, p], by two backward passes, client after client."""
    out = torch.zeros_like(w, memory_format=torch.contiguous_format)
    for i, _, parameters, loss in losses_of(net, w, net.cast(batch, w)):
        with torch.enable_grad():
            grads = slopes(loss, parameters, create_graph=True)
            slope = torch.stack([(g * u).sum() for g, u in zip(grads, net.layout.views(v[i]), strict=True)]).sum()
            if slope.requires_grad:
                second = torch.autograd.grad(slope, parameters, materialize_grads=True)
                copy_(net.layout.views(out[i]), second)
    return out.add_(v, alpha=net.weight_decay) if net.weight_decay else out


def slopes(loss: Tensor, parameters: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    """Gradients, 0 for parameters that the pass has not used."""
    if not loss.requires_grad:
        return tuple(torch.zeros_like(q) for q in parameters)
    return torch.autograd.grad(loss, parameters, create_graph=create_graph, materialize_grads=True)


def bare(net: Net, v: Tensor) -> Tensor:
    """A direction [..., p] with 0 at running statistics of BatchNorm, which are no parameters."""
    return v if net.statistics is None else v.index_fill(-1, net.statistics, 0)


def statistics_(net: Net, w: Tensor, before: Tensor, moves: Tensor | None, live: Tensor | float | None = 1.0) -> Tensor:
    """Set running statistics of BatchNorm in `w` to those `before` less `moves` of a pass, where `live` is not 0."""
    if moves is not None and (at := net.statistics) is not None:
        part = live.index_select(-1, at) if isinstance(live, Tensor) and live.shape[-1] == net.p else live
        w.index_copy_(-1, at, before.index_select(-1, at) - moves * (1.0 if part is None else part))
    return w


def row_weight(batch: Batch, i: int, b: int) -> Tensor | None:
    """The weights of row i's samples, where they are not all the same."""
    return batch.weight[i, :b] if batch.weighted and batch.weight is not None else None
