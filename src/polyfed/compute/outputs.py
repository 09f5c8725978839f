"""Outputs of clients' models on given samples, in evaluation mode, and what follows from them: losses, features."""

from contextlib import nullcontext

import torch
from torch import Tensor

from polyfed.base.errors import ModelError
from polyfed.compute.batches import Batch
from polyfed.compute.gradients import row_weight
from polyfed.compute.net import Net, model_input
from polyfed.compute.terms import Entering

AT_ONCE = 1 << 30  # bytes of activations when evaluating many models on their own samples


def outputs(net: Net, w: Tensor, x: Tensor) -> Tensor:
    """`Task.outputs`."""
    if x.is_floating_point() or not net.integers:
        x = x.to(w.dtype)
    blocks = [x[k : k + net.block] for k in range(0, max(len(x), 1), net.block)]
    with torch.no_grad(), net.exactly(), net.drawing(0) if net.stacked is None else nullcontext():
        if net.stacked is not None:
            out = [net.stacked.outputs(w[None], block[None])[0] for block in blocks]
        else:
            module, parameters = net.workspace(training=False)
            net.point(parameters, w)
            out = [module(model_input(block)) for block in blocks]
    return out[0] if len(out) == 1 else torch.cat(out)


def each_outputs(net: Net, w: Tensor, x: Tensor) -> Tensor:
    """[s, b, ...]: every model's outputs on its own samples x: [s, b, ...], computed together where `batched`."""
    if net.stacked is not None:
        return net.stacked.outputs(w, x)
    if net.vectorised:
        return _each_pass(net, w, x, None)[0]
    return torch.stack([outputs(net, mine, own) for mine, own in zip(w, x, strict=True)])


def _each_pass(net: Net, w: Tensor, x: Tensor, watch: Entering | None) -> list[Tensor]:
    """`stacked_pass` in evaluation mode, in parts that fit in memory."""
    module = net.workspace(training=False)[0]
    most = max(1, AT_ONCE // max(1, net.sample_bytes))
    rows, b = min(most, len(w)), max(1, most // len(w))
    with net.exactly():
        out = [
            [
                net.many_pass(module, net.layout, w[i : i + rows], x[i : i + rows, k : k + b], None, watch)
                for i in range(0, len(w), rows)
            ]
            for k in range(0, max(x.shape[1], 1), b)
        ]
    return [
        torch.cat([torch.cat([part[which] for part in some]) for some in out], 1) for which in range(len(out[0][0]))
    ]


@torch.no_grad()
def features(net: Net, w: Tensor, x: Tensor) -> Tensor:
    """`Task.features`."""
    net.layout.head(w)
    x = x.to(w.dtype) if x.is_floating_point() or not net.integers else x
    if net.stacked is not None:
        return net.stacked.features(w, x)
    watch = Entering(net.workspace(training=False)[0])
    if net.vectorised:
        return _each_pass(net, w, x, watch)[1]
    clients: list[Tensor] = []
    for mine, own in zip(w, x, strict=True):
        parts: list[Tensor] = []
        for k in range(0, max(len(own), 1), net.block):
            with watch:
                output = outputs(net, mine, own[k : k + net.block])
            left = watch.left()  # of a model that exploded NaN
            if output.shape != left.shape or not torch.allclose(output, left, 0, 0, equal_nan=True):
                raise ModelError(f"model: its outputs are not those of its last layer, {net.layout.end}")
            parts.append(watch.entered())
        clients.append(torch.cat(parts))
    return torch.stack(clients)


@torch.no_grad()
def loss_of(net: Net, w: Tensor, batch: Batch) -> Tensor:
    """`Task.loss_of`."""
    batch, many = net.cast(batch, w), w.view(len(w), -1, net.p)
    if net.stacked is not None:
        return net.stacked.losses(many, batch).view(w.shape[:-1])
    out: list[Tensor] = []
    for i, models in enumerate(many):
        b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
        x, y, weight = batch.x[i, :b], batch.y[i, :b], row_weight(batch, i, b)
        out += [net.criterion.mean(outputs(net, model, x), y, weight) for model in models]
    return torch.stack(out).view(w.shape[:-1])


@torch.no_grad()
def losses(net: Net, w: Tensor, batch: Batch) -> Tensor:
    """`Task.losses`."""
    batch, each = net.cast(batch, w), net.criterion.each
    if callable(net.loss):
        mean = net.criterion.mean

        def each(output: Tensor, target: Tensor) -> Tensor:
            means = [mean(output[0, k : k + 1], target[0, k : k + 1]) for k in range(target.shape[1])]
            return torch.stack(means)[None]

    rows = zip(w, batch.x, batch.y, strict=True)
    return torch.stack([
        torch.cat([each(outputs(net, model, x)[None], y[None]) for model in models]) for models, x, y in rows
    ])  # fmt: skip
