"""A run that starts from another: the whole state of one of the same method, the clients' models of another's."""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError
from polyfed.base.typed import pieces
from polyfed.compute.task import Task
from polyfed.core.algorithm import KNOWN, State
from polyfed.core.rounds import Loop
from polyfed.runs.result import Result
from polyfed.runs.trained import Trained

# of a method: task, the clients' models [n, p], their samples [n] -> the server's state, the private rows [n, ...]
Warm = Callable[[Task, Tensor, Tensor], tuple[State, State]]


def start_from(loop: Loop, start: Result) -> None:
    """Give a fresh loop the state of another run, or its clients' models, each billed as one upload of round -1."""
    before, task, everyone = start.trained, loop.task, torch.arange(loop.n, device=loop.task.device)
    if list(before.names) != list(loop.names) or before.task.layout.entries != task.layout.entries:
        raise ConfigError("start: the run has other clients or another model, expected the same")
    if type(before.algorithm) is type(loop.algorithm):
        _take_over(loop, before)
        return
    begin: Warm | None = getattr(loop.algorithm, "warm_start", None)
    if begin is None:
        raise ConfigError(f"start: {loop.algorithm.name} cannot be warm-started from another method's models")
    models = start.personal.to(task.device, task.dtype)
    server, rows = begin(task, models, loop.samples)
    loop.server = server | {KNOWN: loop.samples.clone()}
    loop.engine.place(everyone, rows)
    zero = np.zeros(loop.n)
    size = np.full(loop.n, models[0].numel() * models.element_size())
    loop.ledger.record(-1, np.arange(loop.n), zero, zero, size, zero, zero)


def _take_over(loop: Loop, before: Trained) -> None:
    """The state of a run of the same method."""
    shapes = [
        {k: None if k in loop.free else t.shape for k, t in x.server.items()}
        | dict.fromkeys(x.algorithm.init_client(x.task, x.task.w0))
        for x in (before, loop)
    ]
    if shapes[0] != shapes[1]:
        raise ConfigError(f"start: the run's state has another form than that of {loop.algorithm}")
    device = loop.task.device
    loop.t, loop.clock = before.t, before.clock
    loop.server = {k: v.to(device, copy=True) for k, v in before.server.items()}
    loop.flights = [dataclasses.replace(f) for f in before.flights]
    for at in pieces(torch.arange(loop.n, device=device), 64):
        rows = {k: t.to(device) for k, t in before.engine.private(at.to(before.task.device)).items()}
        loop.engine.place(at, rows)
