"""Deployed: the models that clients would deploy at the server's state, and how well they do, while a loop runs and
after."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import Diverged
from polyfed.compute.task import Task
from polyfed.core import contract
from polyfed.core.algorithm import Algorithm, Down, Personal, Round, State
from polyfed.core.engine import Engine
from polyfed.core.explosion import Exploded, guarded
from polyfed.metrics.metric import diverged


class Deployed:
    """The clients' models as of a server's state, in a live loop and after it."""

    task: Task
    algorithm: Algorithm
    names: Sequence[str]
    samples: Tensor  # [n] training samples
    server: State
    marks: set[str]  # names of the server's tensors that begin with infinities
    engine: Engine
    t: int
    seed: int

    @property
    def n(self) -> int:
        return len(self.names)

    def round(self, ids: np.ndarray | Tensor, phase: int = 0, sent: np.ndarray | None = None) -> Round:
        """Facts about one exchange with `ids` that both sides know."""
        at = torch.as_tensor(ids, device=self.task.device)
        when = torch.full_like(at, self.t) if sent is None else torch.as_tensor(sent, device=at.device)
        return Round(self.t, self.n, phase, at, self.samples[at], when, self.seed)

    def deployment(self) -> Down:
        """Messages that every client would receive now; empty for methods that do not need them to deploy."""
        if isinstance(self.algorithm, Personal):
            return Down()
        sent = guarded(partial(self.algorithm.deployment, self.server, self.round(np.arange(self.n))))
        return contract.downlink(self.algorithm, "deployment", sent, self.n)

    def personal(self, ids: np.ndarray) -> Tensor:
        """[s, p]: the models that `ids` would deploy now, where the engine may see them."""
        return self.engine.personal(self.algorithm, self.deployment(), np.asarray(ids))

    def refuse_diverged(self, values: Mapping[str, np.ndarray], split: str) -> None:
        """Raise Diverged, with the client's name, where the scores of some model are not finite."""
        if (first := diverged(values)) is not None:
            who = f"client {self.names[first[1]]!r}, whose {split} {first[0]} is not finite,"
            raise Diverged(f"round {self.t}: {who} diverged (NaN or infinity); try a smaller lr")

    def scored(self, split: str) -> dict[str, np.ndarray]:
        """The metrics [n] of the models that every client would deploy now; nothing is billed."""
        try:
            return self.engine.evaluate(self.algorithm, self.deployment(), split)
        except Exploded as e:
            raise Diverged(self.exploded()) from e

    @property
    def finite(self) -> bool:
        """True where the server's state is finite, in all tensors that were so before the first round."""
        return all(all_finite(t) for name, t in self.server.items() if name not in self.marks)

    def exploded(self) -> str:
        """The reason that ends a run whose server's state or models are not finite."""
        return f"round {self.t}: the server's state or a model diverged (NaN or infinity); try a smaller lr"


def all_finite(t: Tensor) -> bool:
    """True where a tensor holds no NaN and no infinity."""
    return not t.is_floating_point() or bool(t.sum().isfinite()) or bool(t.isfinite().all())
