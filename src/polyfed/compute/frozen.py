"""Local steps that leave the lowest layers as they are: their outputs are computed once, and only those above train."""

import itertools
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyfed.base.typed import plain
from polyfed.compute.batches import Batches
from polyfed.compute.net import model_input, trainable
from polyfed.compute.task import Task, part_of


class Upper(NamedTuple):
    """The layers above the frozen ones."""

    task: Task
    start: int  # of their part of the vector
    data: Batches  # their inputs


_above = WeakKeyDictionary[Task, dict[int, Task]]()


def upper(task: Task, w: Tensor, data: Batches, only: Tensor) -> Upper | None:
    """The part to train, where `only` is not 0, on these clients' samples of models `w: [s, p]`.

    None where the lowest layers are trained too, the model is no sequence of modules, or their outputs would be needed
    less than once: inputs are augmented, or fewer samples seen than there are.
    """
    below = cut(task, only)
    if below is None or data.work.augment is not None or data.seen < data.split.counts[data.clients].sum():
        return None
    x = through(task, w, [data.split.client(int(c))[0] for c in data.clients], below)
    top = above(task, below)
    return Upper(top, task.p - top.p, data.on(x))


def cut(task: Task, only: Tensor) -> int | None:
    """Count the modules below the first with a trained parameter (only: [..., p]); None: no cut is possible there."""
    mixes = task.net.statistics is not None  # a batch's samples  # a batch's samples
    if type(task.model) is not nn.Sequential or mixes or (task.net.stacked is None and task.net.random):
        return None
    # read back at once: an accelerator is waited for
    trained: list[bool] = plain(torch.stack([v.any() for v in only.split_with_sizes(task.layout.sizes, -1)]))
    place = {id(q): k for k, q in enumerate(trainable(task.model))}
    mine = [[place[id(q)] for q in trainable(module)] for module in _sequence(task.model)]
    for k, entries in enumerate(mine):
        if any(trained[e] for e in entries):
            first = min(itertools.chain(*mine[k:]))
            return k if max(itertools.chain(*mine[:k]), default=first) < first else None
    return None


def above(task: Task, cut: int) -> Task:
    """The same loss and optimiser for the modules from `cut` on, whose parameters end the vector."""
    tasks = _above.setdefault(task, {})
    if cut not in tasks:
        tasks[cut] = part_of(task, nn.Sequential(*_sequence(task.model)[cut:]))
    tasks[cut].net.optimizer = task.net.optimizer  # which a rehearsal replaces
    return tasks[cut]


def through(task: Task, w: Tensor, clients: list[Tensor], cut: int) -> Tensor:
    """Pass clients' inputs [b, ...] through the modules below `cut`, in training: [N, ...], client by client."""
    module, parameters = task.net.workspace(training=True)
    below, out = nn.Sequential(*_sequence(module)[:cut]), list[Tensor]()
    for row, x in zip(w, clients, strict=True):
        task.net.point(parameters, row)
        x = x.to(w.dtype) if x.is_floating_point() or not task.net.integers else x
        with torch.no_grad(), task.net.precision():
            out.append(below(model_input(x.flatten(1) if task.net.of_rows else x)).to(w.dtype))
    return torch.cat(out)


def _sequence(model: nn.Module) -> list[nn.Module]:
    """The modules of a `Sequential`, with repeats."""
    return [*cast("nn.Sequential", model)]
