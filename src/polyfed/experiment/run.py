"""Run: what `fit` returns. The trained state and everything that was measured on the way."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from polyfed.core.algorithm import State
from polyfed.core.errors import ConfigError, closest
from polyfed.core.rounds import Loop
from polyfed.data.federation import Federation


@dataclass(eq=False)
class Run:
    """A finished (or interrupted) training run.

    status: "finished", "interrupted" or "diverged"
    settings: everything that determines the numbers, as written to config.toml
    """

    loop: Loop
    federation: Federation
    settings: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    status: str = "finished"
    seconds: float = 0.0
    final: dict[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def server(self) -> State:
        """The server's tensors."""
        return self.loop.server

    @property
    def personal(self) -> Tensor:
        """[n, p]: the model that each client would deploy."""
        return self.loop.personal(np.arange(self.loop.n))

    def model(self, client: int | str) -> nn.Module:
        """The nn.Module of one client, by position or name."""
        names = self.federation.names
        if client not in (names if isinstance(client, str) else range(-self.loop.n, self.loop.n)):
            raise ConfigError(f"no client {client!r}{closest(str(client), names)}; there are {self.loop.n} of them")
        i = names.index(client) if isinstance(client, str) else range(self.loop.n)[client]
        return self.loop.task.module(self.loop.personal(np.array([i]))[0])

    @property
    def history(self) -> pd.DataFrame:
        """One row per evaluated round and split: mean over clients, spread, worst client, bytes and seconds so far."""
        return pd.DataFrame(self.records).drop(columns="assigned", errors="ignore")

    @property
    def assignments(self) -> pd.DataFrame:
        """The groups over time: one row per evaluated round in which they changed, one column per client."""
        found = {r["round"]: r["assigned"] for r in self.records if "assigned" in r}
        return pd.DataFrame.from_dict(found, orient="index", columns=list(self.federation.names)).rename_axis("round")

    @property
    def ledger(self) -> pd.DataFrame:
        """One row per round and participant: exchanges, bytes down and up, seconds."""
        return self.loop.ledger.frame()

    @property
    def report(self) -> dict[str, Any]:
        """What the method itself reports: clusters, mixing matrix, step sizes."""
        return {k: _plain(v) for k, v in self.loop.algorithm.report(self.loop.server).items()}

    @property
    def clusters(self) -> np.ndarray | None:
        """[n] the group that the method found for each client, or None when it finds none."""
        found = self.report.get("clusters")
        return None if found is None else np.asarray(found)

    @property
    def metric(self) -> str:
        """The main metric: "accuracy", "rmse", or "loss" where neither is defined."""
        keys = next(iter(self.final.values()), {})
        return next((k for k in ("accuracy", "rmse") if k in keys), "loss")

    @property
    def clients(self) -> pd.DataFrame:
        """One row per client: sample counts, true and found cluster, final metrics per split, bytes, participations."""
        fed, n = self.federation, self.loop.n
        frame = pd.DataFrame({"client": list(fed.names)})
        for name, split in splits(fed).items():
            frame[f"{name}_samples"] = split.counts
        frame["cluster"] = pd.array([pd.NA] * n if fed.clusters is None else list(fed.clusters), dtype="Int64")
        frame["assigned"] = pd.array([pd.NA] * n if self.clusters is None else list(self.clusters), dtype="Int64")
        for name, metrics in self.final.items():
            for key, values in metrics.items():
                frame[f"{name}_{key}"] = values
        return frame.assign(**self.loop.ledger.by_client(n))

    def save(self, folder: str | Path) -> Path:
        """Write the run folder: configuration, metrics, clients, ledger, checkpoint, models. Refuses a used folder."""
        from polyfed.experiment.folder import RunFolder

        out = RunFolder(Path(folder))
        out.refuse_used()
        out.begin(self, fresh=True)
        out.finish(self)
        return out.path


def splits(federation: Federation) -> dict[str, Any]:
    """The federation's splits by name, those that hold samples."""
    found = {"train": federation.train, "validation": federation.validation, "test": federation.test}
    return {name: split for name, split in found.items() if split is not None and len(split.x)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
