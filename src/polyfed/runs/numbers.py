"""Numbers: a run as its folder says it, in plain values. Reports, comparisons and studies read a run here, without
torch; `opened` adds the models and the method.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from polyfed.base.errors import RunError
from polyfed.metrics.scores import leading
from polyfed.runs import schema

Added = tuple[np.ndarray, np.ndarray]  # ([m, 2] a client's test samples, number and class or -1, [m] what each adds)


@dataclass(frozen=True, eq=False)
class Numbers:
    """One run in numbers.

    label: the method (with its setting) that the run belongs to
    config, about, summary: config.toml, federation.json, summary.json; where the run was killed before it wrote a
    summary, one made from its last evaluation, with status "unfinished"
    records: one per evaluated round and split     clients: one row per client, or None for an unfinished run
    findings: report.json, what the method found
    """

    folder: Path
    label: str
    config: schema.Config
    about: schema.About
    records: list[schema.Record]
    summary: schema.Summary
    clients: pd.DataFrame | None
    findings: schema.Findings

    @classmethod
    def of(cls, folder: Path, label: str | None = None) -> "Numbers":
        """Read a run folder. Raises RunError, in one line that names the file, for one that is damaged."""
        config, about = schema.config(folder), schema.federation(folder)
        records = schema.metrics(folder)
        done = (folder / "summary.json").exists()
        summary = schema.summary(folder) if done else so_far(config, records)
        clients = schema.clients(folder, about.names) if done else None
        named = summary.algorithm if label is None else label
        return cls(folder, named, config, about, records, summary, clients, schema.report(folder))

    @property
    def seed(self) -> int:
        return self.summary.seed

    @property
    def status(self) -> str:
        return self.summary.status

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.about.clients)

    @property
    def split(self) -> str:
        """The split that the run is judged on: test, or else validation, or else train."""
        return self.summary.split

    @property
    def role(self) -> str:
        """Whose model a client deploys: "own" (trained alone), "common" (one for all) or "personalised"; "yardstick"
        for what a site has without a torch model, "oracle" for what is not available in practice.

        A method that moved no byte has trained every client alone, whatever it is called.
        """
        s = self.summary
        if s.deploys in ("yardstick", "oracle"):
            return s.deploys
        if s.deploys == "own" or (s.rounds and not s.down_bytes + s.up_bytes):
            return "own"
        return "common" if s.deploys == "common" else "personalised"

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """ledger.csv: one row per round and participant; read when first asked for."""
        return schema.ledger(self.folder)

    def values(self, split: str | None = None, metric: str | None = None) -> dict[str, float]:
        """A metric of every client, by name, the one that leads by default; NaN where a client does not have it."""
        if self.clients is None:
            return {}
        column = f"{split or self.split}_{metric or self.summary.metric}"
        if column not in self.clients:
            raise RunError(f"{self.folder / 'clients.csv'}: there is no column {column!r}")
        return dict(zip(self.about.names, map(finite, self.clients[column].tolist()), strict=True))

    @cached_property
    def added(self) -> Mapping[str, Added] | None:
        """{client: (its test samples, what each adds to the metric that leads, NaN where that is not known)}, of
        clients that have some; None where it was not written."""
        scores = schema.scores(self.folder)
        if scores is None or len(scores["counts"]) != self.n:
            return None
        metric, at, none = self.summary.leads, np.r_[0, np.cumsum(scores["counts"])], np.full(len(scores["id"]), -1)
        additive = metric.sign and metric.name in scores and ("class" in scores or not metric.classwise)
        ids = np.c_[scores["id"], scores.get("class", none)]
        each = scores[metric.name].astype(float) if additive else np.full(len(ids), math.nan)
        places = zip(self.about.names, at, at[1:], strict=False)
        parts = {name: (ids[a:b], each[a:b]) for name, a, b in places if b > a}
        if (whose := scores.get("whose")) is None:
            return parts
        groups = {name: whose[a:b] for name, a, b in zip(self.about.names, at, at[1:], strict=False)}
        return {name: clustered(*part, groups[name]) for name, part in parts.items()}

    def judged(self, split: str) -> dict[str, int]:
        """{client: its samples in a split}, as groups of test rows where those are known."""
        added = (self.added if split == "test" else None) or {}
        return {c.name: len(added[c.name][0]) if c.name in added else c.samples(split) for c in self.about.clients}

    @cached_property
    def probabilities(self) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        """{client: ([m] the probability of the second of two classes, [m] whether it is true)} of its test samples;
        empty where it was not written, and without those that are not finite."""
        scores = schema.scores(self.folder) or {}
        if "probability" not in scores or "class" not in scores or len(scores["counts"]) != self.n:
            return {}
        at = np.r_[0, np.cumsum(scores["counts"])]
        pairs = [
            (scores["probability"][a:b].astype(float), scores["class"][a:b] > 0) for a, b in itertools.pairwise(at)
        ]
        named = zip(self.about.names, pairs, strict=True)
        return {n: (p[ok], y[ok]) for n, (p, y) in named if (ok := np.isfinite(p)).any()}

    def shares(self, split: str = "test") -> dict[str, tuple[float, int]]:
        """{client: (share of its samples that is in a split, number of its samples)}."""
        return {c.name: (min(c.samples(split) / max(c.total, 1), 0.9), c.total) for c in self.about.clients}

    @cached_property
    def moved(self) -> dict[str, int]:
        """{client: bytes down and up}, of a run that is over."""
        assert self.clients is not None
        both = self.clients["down_bytes"] + self.clients["up_bytes"]
        return dict(zip(self.about.names, both.tolist(), strict=True))

    def samples(self, split: str) -> np.ndarray:
        """[n] samples per client in a split."""
        return np.array([c.samples(split) for c in self.about.clients])

    @property
    def labels(self) -> np.ndarray | None:
        """[n, classes] training samples per class, or None for regression."""
        rows = [c.labels for c in self.about.clients]
        return None if any(r is None for r in rows) else np.array(rows, dtype=float)


def finite(value: Any) -> float:
    """A number that may be absent: NaN for anything that is not a finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def so_far(config: schema.Config, records: Sequence[schema.Record]) -> schema.Summary:
    """A summary of a run that was killed: its last evaluation."""
    judges = config.judges
    lead = judges[0] if judges else leading(key for r in records for key in r.metrics)
    last: dict[str, schema.Table] = {}
    for record in records:
        last.setdefault(record.split, {}).update({k: v for k, v in record.table().items() if v == v})
    final = {
        split: {"mean": finite(r.get(lead.name)), "std": r.get("std"), "worst": r.get("worst")}
        for split, r in last.items()
    }
    cost = records[-1] if records else schema.Record.model_validate({"round": 0, "split": ""})
    size = config.model.get("parameters")
    return schema.Summary.model_validate({
        "status": "unfinished", "algorithm": config.method, "seed": config.seed, "rounds": cost.round,
        **schema.Judge.of(lead).model_dump(), "higher_is_better": lead.better == "higher", "final": final,
        "parameters": size if isinstance(size, int) else None, "seconds": cost.seconds,
        "down_bytes": cost.down_bytes, "up_bytes": cost.up_bytes,
    })  # fmt: skip


def described(about: Mapping[str, Any]) -> Numbers:
    """A federation, as `Federation.describe` has it, as a run that has not begun."""
    config, federation = schema.Config(), schema.About.model_validate(about)
    return Numbers(Path(), "", config, federation, [], so_far(config, []), None, schema.Findings())


def clustered(ids: np.ndarray, each: np.ndarray, whose: np.ndarray) -> Added:
    """Terms of samples as those of their groups, of the same mean: what a group's samples add is summed first.

    ids: [N, 2] samples and classes     each: [N] terms     whose: [N] the groups, which become the samples
    """
    groups, first, at = np.unique(whose, return_index=True, return_inverse=True)
    mean = each.mean()
    terms = mean + np.bincount(at, each - mean) * len(groups) / len(each)
    return np.c_[groups, ids[first, 1]], terms
