"""Scores of models on clients' samples: the mean loss and every metric of a task, exactly, in few passes."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from polyfed.base.arguments import answer
from polyfed.compute.batches import alike, padded
from polyfed.compute.outputs import each_outputs
from polyfed.compute.split import Split, restored, trained
from polyfed.compute.stacked import BLOCK
from polyfed.compute.task import Task
from polyfed.metrics.metric import Predictions, marked


@torch.no_grad()
def metrics(task: Task, w: Tensor, split: Split, clients: np.ndarray) -> dict[str, np.ndarray]:
    """The mean loss and every metric that fits, [s] each, of models `w: [s, p]` on the samples of `clients: [s]`."""
    totals: dict[str, Tensor] = {}
    kept: list[tuple[Tensor, Predictions]] | None = [] if any(m.per == "client" for m in task.scores) else None
    for rows, values in _scored(task, w, split, clients, kept):
        for name, v in values.items():
            if name not in totals:
                totals[name] = torch.zeros(len(w), dtype=torch.float64, device=w.device)
            totals[name].index_add_(0, rows, v.double())
    counts = split.counts[clients]
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 of clients without samples
        means = {k: np.where(counts > 0, t.cpu().numpy() / counts, np.nan) for k, t in totals.items()}
    means |= {m.name: np.sqrt(means[m.name]) for m in task.scores if m.root and m.name in means}
    # NaN for a client without samples, or where a metric has no value
    return marked(means | (_whole(task, kept, counts) if kept else {}), counts, task.scores)


def shared(task: Task, w: Tensor, rows: Split) -> dict[str, np.ndarray]:
    """`metrics` of models `w: [s, p]` on the same rows, which are a split of one client; of one model once."""
    one = len(w) > 1 and w.stride(0) == 0
    each = [metrics(task, v[None], rows, np.array([0])) for v in (w[:1] if one else w)]
    return {name: np.concatenate([s[name] for s in each * (len(w) if one else 1)]) for name in each[0]}


def _whole(task: Task, kept: list[tuple[Tensor, Predictions]], counts: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics that need all samples of a client, in double precision: {name: [s]}."""
    rows, output, target = (
        torch.cat(parts).cpu() for parts in zip(*((r, s.output, s.target) for r, s in kept), strict=True)
    )
    order = rows.argsort(stable=True)
    output, target, cuts = output[order].double(), target[order], np.concatenate([[0], np.cumsum(counts)])
    clients = [Predictions(output[a:b], target[a:b], task.threshold) for a, b in itertools.pairwise(map(int, cuts))]
    return {m.name: np.array([m.of(s) for s in clients]) for m in task.scores if m.per == "client"}


def _scored(
    task: Task, w: Tensor, split: Split, clients: np.ndarray, kept: list[tuple[Tensor, Predictions]] | None
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield (rows of w, values to add to those rows), together covering every sample once.

    kept: where a metric needs all samples of a client, receives (the row of every sample, what was seen).
    """
    counts = split.counts[clients]

    def made(rows: Tensor, output: Tensor, target: Tensor, unit: Tensor | None) -> Predictions:
        pred = Predictions(restored(output, unit), target, task.threshold)
        if kept is not None:
            kept.append((rows, pred))
        return pred

    if callable(task.loss):
        for i, c in enumerate(clients):
            x, y = split.client(int(c))
            output, unit = task.outputs(w[i], x), split.units([int(c)])
            loss = task.net.criterion.mean(output, trained(y, unit)) * len(x) if len(x) else output.sum() * 0
            loss = loss * torch.nan if bool(output.isnan().any()) else loss  # whatever a loss of the user's own says
            pred = made(torch.full((len(y),), i, device=w.device), output, y, unit)
            sums = {"loss": loss} | {k: v.sum() for k, v in _score(task, pred).items()}
            yield torch.tensor([i], device=w.device), {k: v[None] for k, v in sums.items()}
    elif len(w) > 1 and w.stride(0) == 0:
        # one model for all clients: a few large passes over all samples
        owner = np.repeat(np.arange(len(clients)), counts)
        x, y = split.of_all(clients)
        for k in range(0, max(len(owner), 1), BLOCK):
            some, who = slice(k, k + BLOCK), owner[k : k + BLOCK]
            output = task.outputs(w[0], x(some))
            rows, unit = torch.as_tensor(who, device=w.device), split.units(clients[who])
            yield rows, _per_sample(task, made(rows, output, y(some), unit), unit)
    elif task.net.batched:
        # models that can be computed together: chunks of similar clients
        for chunk in alike(counts, max(1, BLOCK // max(1, int(counts.max(initial=1)))), np.argsort(-counts)):
            batch = task.net.cast(padded(replace(split, unit=None, weight=None), clients[chunk]), w)
            rows, unit = torch.as_tensor(chunk, device=w.device), split.units(clients[chunk])
            output = each_outputs(task.net, w[rows], batch.x)
            each = None if unit is None else unit[:, None].expand(*batch.y.shape[:2], 2).flatten(0, 1)
            pred = Predictions(restored(output.flatten(0, 1), each), batch.y.flatten(0, 1), task.threshold)
            values = _per_sample(task, pred, each)
            real = 1.0 if batch.weight is None else batch.weight > 0
            if kept is not None:
                some = torch.ones_like(output[..., 0]) > 0 if batch.weight is None else batch.weight > 0
                at = rows[:, None].expand(some.shape)[some]
                made(at, output[some], batch.y[some], None if each is None else each[some.flatten()])
            yield rows, {k: (v.view(batch.y.shape[:2]) * real).sum(1) for k, v in values.items()}
    else:
        for i, c in enumerate(clients):
            for xb, yb in _blocks(*split.client(int(c))):
                rows, unit = torch.full((len(yb),), i, device=w.device), split.units([int(c)])
                yield rows, _per_sample(task, made(rows, task.outputs(w[i], xb), yb, unit), unit)


def terms(task: Task, output: Tensor, target: Tensor, unit: Tensor | None = None) -> dict[str, Tensor]:
    """[b] each sample's share of each metric: their mean is the metric. The loss is left out where it is a callable."""
    # in the targets' own units; unit: [1, 2] their shift and scale in training
    pred = Predictions(output, target, task.threshold)
    values = _score(task, pred) if callable(task.loss) else _per_sample(task, pred, unit)
    exact = Predictions(output.cpu().double(), target.cpu(), task.threshold)
    return values | {
        m.name: torch.as_tensor(answer(f"metrics: terms of {m.name}", m.terms, exact.copy()))
        for m in task.scores
        if m.terms and m.fits(exact)
    }


@torch.no_grad()
def judged(
    task: Task, outputs: Sequence[Tensor], targets: Sequence[Tensor], units: Sequence[Tensor | None]
) -> dict[str, np.ndarray]:
    """`metrics` of given outputs and targets [b, ...] of every client, on the CPU, in double precision."""
    # in the targets' own units; units: [1, 2] each, their shift and scale in training
    pairs = zip(outputs, targets, strict=True)
    exact = [(o.double(), y.double() if y.is_floating_point() else y) for o, y in pairs]
    clients = [Predictions(o, y, task.threshold) for o, y in exact]
    losses = [
        float(task.net.criterion.mean(trained(o, unit), trained(y, unit))) if len(y) else np.nan
        for (o, y), unit in zip(exact, units, strict=True)
    ]
    scores = {m.name: np.array([m.of(s) for s in clients]) for m in task.scores if m.compute}
    return marked({"loss": np.array(losses), **scores}, np.array([len(y) for y in targets]), task.scores)


def _per_sample(task: Task, pred: Predictions, unit: Tensor | None) -> dict[str, Tensor]:
    """[b] loss and score of every sample; the loss is that of the targets in training."""
    loss = task.net.criterion.each(pred.output[None], pred.target[None])[0]
    loss = loss if unit is None else (loss.double() / unit[..., 1].square()).to(loss.dtype)
    return {"loss": loss, **_score(task, pred)}


def _score(task: Task, pred: Predictions) -> dict[str, Tensor]:
    """{metric: [b]}: each sample's share of the metrics that are means over samples, where they fit."""
    mine = [m for m in task.scores if m.per == "sample" and m.compute and (task.settled or m.fits(pred))]
    return {m.name: torch.as_tensor(m.computed(pred), device=pred.output.device) for m in mine}


def _blocks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for k in range(0, max(len(x), 1), BLOCK):
        yield x[k : k + BLOCK], y[k : k + BLOCK]
