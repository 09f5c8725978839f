"""A model in two parts, the common layers and the clients' own; and `Partial`, the methods (FedRep, FedPer,
LG-FedAvg) that share one part and keep the other at the client."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, ModelError
from polyfed.compute.layout import Layout
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Portrait, Server, State


def part(layout: Layout, layers: str | tuple[str, ...], where: str = "algorithm") -> Tensor:
    """[p] bool: the named layers, separated by spaces; "head" is the last one, "" is none. where: for an error"""
    names = layers.split() if isinstance(layers, str) else layers
    if not names:
        return torch.zeros(layout.p, dtype=torch.bool)
    try:
        return layout.mask(*names)
    except KeyError as e:
        raise ConfigError(f"{where}: {e.args[0]}") from None


def without_statistics(task: Task, name: str) -> None:
    """Raise ModelError for a model with running statistics in its vector, for methods without a mean."""
    if task.net.statistics is not None:
        raise ModelError(
            f"model: found running statistics of BatchNorm in its vector, which {name} makes no means of; expected "
            "GroupNorm (polyfed.models.replace_batchnorm)"
        )


def spans(shared: Tensor) -> list[tuple[slice, bool]]:
    """`shared: [p]` as runs of neighbours that are all shared, or all not: slices cost a tenth of masks."""
    here = shared.cpu().numpy()
    edges = [0, *(np.flatnonzero(here[1:] != here[:-1]) + 1).tolist(), len(here)]
    return [(slice(a, b), bool(here[a])) for a, b in itertools.pairwise(edges)]


def split(shared: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """`w: [..., p]` at the shared positions and at the others."""
    pieces = spans(shared)
    common, own = (
        torch.cat([w[..., at] for at, here in pieces if here == kind] or [w[..., :0]], -1) for kind in (True, False)
    )
    return common, own


def assemble(shared: Tensor, common: Tensor, own: Tensor) -> Tensor:
    """`split` undone: [..., p] from the values of the shared positions and of the others."""
    w, taken = own.new_empty(*own.shape[:-1], len(shared)), [0, 0]
    for at, here in spans(shared):
        first, size = taken[here], at.stop - at.start
        w[..., at] = (own, common)[here][..., first : first + size]
        taken[here] += size
    return w


def some(shared: Tensor, algorithm: Algorithm, layout: Layout) -> Tensor:
    """`shared: [p]` unchanged; ConfigError if it is empty."""
    if shared.any():
        return shared
    names = ", ".join(e.name for e in layout.entries)
    raise ConfigError(
        f"algorithm: {algorithm.name} would share nothing of this model, all of it ({names}) stays with the client; "
        "expected a model with more layers, or 'local', which trains alone"
    )


@dataclass(frozen=True)
class Partial(Algorithm, abstract=True):
    """Base: the server averages the `shared` part, all that is ever sent; each client keeps its own rest."""

    def shared(self, layout: Layout) -> Tensor:
        """[p] bool: True for the numbers that are sent and averaged."""
        raise NotImplementedError

    def train(self, task, w: Tensor, shared: Tensor, data) -> Tensor:
        """[s, p]: the clients' models after local training from w. shared: [p], ones and zeros"""
        raise NotImplementedError

    def init_server(self, task, w0, n) -> State | Server:
        return {"w": split(some(self.shared(task.layout), self, task.layout), w0)[0]}

    def init_client(self, task, w0):
        return {"own": split(self.shared(task.layout), w0)[1]}

    def local_update(self, task, client, down, data, round):
        shared = self.shared(task.layout)
        w = assemble(shared, down["w"], client["own"])
        w = self.train(task, w, shared.to(w), data)
        common, own = split(shared, w)
        return {"own": own}, {"w": common}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w")}

    def personal(self, task, client, down):
        return assemble(self.shared(task.layout), down["w"], client["own"])

    def describe(self, server):
        return Portrait()  # the shared part alone is not a model
