"""Result: what a run gives, whoever trained it: this process, real sites, a yardstick, or the folder that it is read
from. Tables are plain values; what needs models is loaded when it is asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pandas as pd
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.base.plugins import sibling
from polyfed.base.text import nfc
from polyfed.base.typed import plain
from polyfed.compute import evaluation
from polyfed.compute.check import check
from polyfed.core.algorithm import Algorithm, Contender, State
from polyfed.data.federation import Federation
from polyfed.data.shared import NAME
from polyfed.metrics.metric import Metric
from polyfed.runs.schema import Config, Record, Scores
from polyfed.runs.trained import Judged, Trained

if TYPE_CHECKING:
    lazy = property
else:
    lazy = cached_property  # which type checkers do not take for a property


class Kept(Protocol):
    """Source of what a result gives on request, see `Result`: memory for a run in this process, else a folder.

    judged: what the scores were measured on     by_client: [n] rounds, down_bytes and up_bytes of each client
    """

    @property
    def trained(self) -> Trained: ...
    @property
    def judged(self) -> Judged: ...
    @property
    def federation(self) -> Federation: ...
    @property
    def algorithm(self) -> Contender: ...
    @property
    def server(self) -> State: ...
    @property
    def findings(self) -> dict[str, Any]: ...
    @property
    def ledger(self) -> pd.DataFrame: ...
    def by_client(self) -> Mapping[str, np.ndarray]: ...


@dataclass(frozen=True, eq=False)
class Live:
    """Source of a result that was trained in this process."""

    trained: Trained
    federation: Federation
    judged: Judged
    algorithm: Contender

    @property
    def server(self) -> State:
        return self.trained.server

    @lazy
    def findings(self) -> dict[str, Any]:
        return {k: plain(v) for k, v in self.trained.algorithm.describe(self.server).found().items()}

    @property
    def ledger(self) -> pd.DataFrame:
        return self.trained.ledger.frame()

    def by_client(self) -> Mapping[str, np.ndarray]:
        return self.trained.ledger.by_client(self.trained.n)


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """Result of a run: how it was trained, its scores, its models and what was exchanged.

    Parameters
    ----------
    settings : Config
        Everything that determines the numbers, as written to config.toml.
    outline : Federation
        The clients: names, numbers of samples, shapes. The samples themselves are in `federation`.
    records : list of Record
        One per evaluated round and split.
    final : Scores
        Split -> metric -> [n], a number for each client, at the end.
    metrics : tuple of Metric
        What clients' models are judged by, the one that leads first; the loss is recorded beside them.
    status : str
        "finished", "interrupted" or "diverged"; "unfinished" of a folder whose run was killed.
    rounds : int
        Rounds done.
    seconds : float
        Time spent in training.
    ended : bool
        Whether a callback ended it; a run that is over stays so when it is resumed.
    folder : Path or None
        Where the run is kept.
    kept : Kept
        Its models, data and state, loaded when they are asked for.
    """

    settings: Config
    outline: Federation
    records: list[Record]
    final: Scores
    metrics: tuple[Metric, ...]
    status: str
    rounds: int
    seconds: float
    ended: bool
    folder: Path | None
    kept: Kept

    @property
    def trained(self) -> Trained:
        """State that training has reached: the model and loss, the method, the server's tensors, the private rows."""
        return self.kept.trained

    @property
    def federation(self) -> Federation:
        """The clients and their data."""
        return self.kept.federation

    @property
    def algorithm(self) -> Contender:
        """The method."""
        return self.kept.algorithm

    @property
    def server(self) -> State:
        """The server's tensors, as copies."""
        return {name: t.clone() for name, t in self.kept.server.items()}

    @property
    def plan(self) -> str | None:
        """Plan that the method made before the run: its solver and memory, for methods that have a choice."""
        return self.findings.get("plan")

    @property
    def personal(self) -> Tensor:
        """[n, p]: the model that each client would deploy."""
        models = self.trained.personal(np.arange(self.outline.n))
        return models[:1].clone().expand_as(models) if models.stride(0) == 0 else models.clone()

    @property
    def common(self) -> Tensor | None:
        """[p]: the model that all clients have in common (FedSLR's GKR, Ditto's global one); None: there is none."""
        method = self.algorithm
        w = method.describe(self.kept.server).common if isinstance(method, Algorithm) else None
        return None if w is None else w.clone()

    def answers(self) -> Iterator[tuple[int, Tensor]]:
        """(position, outputs [b, ...] in the targets' own units) of each client that has test samples, for these, from
        the model that it would deploy."""
        return self.kept.judged.answers(self.federation.test)

    @property
    def deploys(self) -> str:
        """Kind of model that clients deploy: "common", the one that the server sends all, "own", trained alone, or
        "personal"; of a yardstick "yardstick" or "oracle"."""
        return self.kept.judged.deploys

    @checked
    def evaluate(self, models: Tensor | None, split: str = "test") -> dict[str, np.ndarray]:
        """The metrics of any models on each client's samples.

        Callbacks may use it to follow a common model over the rounds.

        Parameters
        ----------
        models : Tensor or None
            One model [p] for all clients, or one for each [n, p]. None, which is what `common` may be, is refused.
        split : str
            "train", "validation", "test", or "global" for the rows of `data.with_global`.

        Returns
        -------
        dict
            Metric -> [n], a number for each client.

        Raises
        ------
        ConfigError
            There is no such split, or no model, or it is of another size.
        """
        by_name, n, task, rows = splits(self.federation), self.outline.n, self.trained.task, self.federation.shared
        by_name |= {} if rows is None else {NAME: rows}
        if split not in by_name:
            raise ConfigError(f"no split {split!r}{closest(split, by_name)}; the federation has {', '.join(by_name)}")
        if models is None:
            raise ConfigError(f"{self.algorithm.name} has no common model to evaluate")
        if models.shape[-1:] != (task.p,) or models.dim() > 2 or (models.dim() == 2 and len(models) != n):
            raise ConfigError(f"models: found shape {list(models.shape)}, expected [{task.p}] or [{n}, {task.p}]")
        if not task.settled:  # of a folder
            check(task, self.federation.train, self.federation.classes)
        task, data = self.trained.ready(split, by_name[split])
        models = models.to(task.device, task.dtype).expand(n, -1)
        if split == NAME:
            return evaluation.shared(task, models, data)
        return evaluation.metrics(task, models, data, np.arange(n))

    @property
    def parameters(self) -> np.ndarray:
        """[n]: numbers that describe each client's model, those of its structure where the method has one (FedSLR)."""
        return self.trained.parameters()

    @checked
    def model(
        self, client: int | str, factorised: bool = False, sparse: Literal["merged", "beside"] = "merged"
    ) -> nn.Module:
        """The nn.Module of one client, by position or name.

        Parameters
        ----------
        client : int or str
            Its position or name.
        factorised : bool
            Layers whose common part is of low rank become pairs of thin layers with the same outputs (FedSLR, GPGD).
        sparse : str
            What becomes of such a layer with a personal part: "merged" is one dense layer, as fast as ever; "beside" is
            the pair and a sparse matrix, smaller, but faster for large linear layers only.

        Returns
        -------
        nn.Module
            A copy of its own.

        Raises
        ------
        ConfigError
            There is no such client, or the method makes no low-rank model.
        """
        i = position(client, self.outline.names)
        w = self.trained.personal(np.array([i]))[0]
        if factorised:
            return sibling("polyfed_export.factorised", "factorised:").model_of(self, w, sparse)
        return self.trained.task.module(w)

    @property
    def history(self) -> pd.DataFrame:
        """One row per evaluated round and split: mean over clients, spread, worst client, bytes and seconds so far."""
        return pd.DataFrame([r.table() for r in self.records]).drop(columns="assigned", errors="ignore")

    @property
    def assignments(self) -> pd.DataFrame:
        """The groups over time: one row per evaluated round in which they changed, one column per client."""
        labels = {r.round: r.assigned for r in self.records if r.assigned is not None}
        return pd.DataFrame.from_dict(labels, orient="index", columns=list(self.outline.names)).rename_axis("round")

    @property
    def ledger(self) -> pd.DataFrame:
        """One row per round and participant: exchanges, bytes down and up, seconds."""
        return self.kept.ledger

    @property
    def findings(self) -> dict[str, Any]:
        """Findings of the method itself: clusters, mixing matrix, step sizes."""
        return self.kept.findings

    @property
    def clusters(self) -> np.ndarray | None:
        """[n] the group that the method found for each client, or None when it finds none."""
        groups = self.findings.get("clusters")
        return None if groups is None else np.asarray(groups)

    @property
    def metric(self) -> Metric:
        """The metric that leads: accuracy for classes, RMSE for numbers, or the loss where neither is defined."""
        return self.metrics[0]

    @property
    def clients(self) -> pd.DataFrame:
        """One row per client: sample counts, true and found cluster, final metrics per split, bytes, participations."""
        fed, n = self.outline, self.outline.n
        columns: dict[str, Any] = {"client": list(fed.names)}
        columns |= {f"{name}_samples": split.counts for name, split in splits(fed).items()}
        for key, groups in (("cluster", fed.clusters), ("assigned", self.clusters)):
            columns[key] = pd.array([pd.NA] * n if groups is None else list(groups), dtype="Int64")
        columns |= {f"{name}_{key}": v for name, metrics in self.final.items() for key, v in metrics.items()}
        return pd.DataFrame({**columns, **self.kept.by_client()})

    def place(self) -> Path:
        """The run's folder. Raises RunError where it has none."""
        if self.folder is None:
            raise RunError("this run has no folder; write it to one with run.save(folder)")
        return self.folder


def position(client: int | str, names: Sequence[str], kind: str = "client") -> int:
    """Where a client is, by position or name. Raises ConfigError, which calls it `what`, where there is none."""
    n, client = len(names), nfc(client) if isinstance(client, str) else client
    if client not in (names if isinstance(client, str) else range(-n, n)):
        raise ConfigError(f"no {kind} {client!r}{closest(str(client), names)}; there are {n} of them")
    return names.index(client) if isinstance(client, str) else range(n)[client]


def splits(federation: Federation) -> dict[str, Any]:
    """The federation's splits by name, those that hold samples."""
    by_name = {"train": federation.train, "validation": federation.validation, "test": federation.test}
    return {name: split for name, split in by_name.items() if split is not None and len(split.x)}
