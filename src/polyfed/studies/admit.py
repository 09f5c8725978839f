"""admit: clients that come after training, added by the method's rule while the others stay as they are, and compared
with training alone.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from polyfed import report
from polyfed.algorithms.local import Local
from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, DataError, few
from polyfed.base.randomness import client_keys
from polyfed.base.values import COUNTED, Limits
from polyfed.compute.batches import padded
from polyfed.compute.check import check
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import KNOWN, Algorithm, State
from polyfed.core.ledger import COLUMNS
from polyfed.core.newcomer import Apart, Newcomer, newcomer
from polyfed.core.rounds import Loop
from polyfed.core.rows import MemoryRows
from polyfed.core.schedule import Uniform
from polyfed.data.csv_files import Sheet, read
from polyfed.data.dataset import Dataset, scaled
from polyfed.data.federation import Federation, of_arrays
from polyfed.data.preparation import Preparation
from polyfed.data.raw import Text
from polyfed.data.readers import files_of
from polyfed.data.tables import text_ids, weights_of, whose_of
from polyfed.engines.local import LocalEngine, here, make_plan
from polyfed.metrics.metric import Metric
from polyfed.runs.config import Where, read_table
from polyfed.runs.folder import RunFolder, csv_text, safe
from polyfed.runs.result import Result, position
from polyfed.runs.trained import Trained
from polyfed.runs.training import Columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyfed.report import Table


@checked
@dataclass(eq=False)
class Admission:
    """Result of `admit`.

    Parameters
    ----------
    names : tuple of str
        [m] the newcomers.
    table : DataFrame
        One row per exchange and newcomer: exchange (0: at entry), client, the metric, alone (the metric of Local after
        as many rounds of the same local work), down_bytes and up_bytes so far.
    metric : Metric
        The leading metric.
    split : str
        The split measured: "test", or "train" without test samples.
    personal : Tensor
        [m, p] the newcomers' models.
    clusters : array or None
        [m] the label in `run.clusters` of each newcomer's group, -1 without one; None for a method without clusters.
    task : Task
        The run's model and loss.
    label : str
        The method's name.
    """

    names: tuple[str, ...]
    table: pd.DataFrame
    metric: Metric
    split: str
    personal: Tensor
    clusters: np.ndarray | None
    task: Task
    label: str

    def model(self, client: int | str) -> nn.Module:
        """One newcomer's model.

        Parameters
        ----------
        client : int or str
            Position or name.

        Returns
        -------
        nn.Module
            A copy of the model.
        """
        return self.task.module(self.personal[position(client, self.names, "newcomer")])

    @property
    def history(self) -> pd.DataFrame:
        """One row per exchange: the mean over newcomers of the metric and of `alone`, bytes of all of them so far."""
        columns = {self.metric.name: "mean", "alone": "mean", "down_bytes": "sum", "up_bytes": "sum"}
        return self.table.groupby("exchange").agg(columns).reset_index()

    def summary(self) -> "Table":
        """The metric after each exchange: each newcomer's (if few), their mean, and what they reach alone."""
        from polyfed.report.admission import admission_table

        return admission_table(self)

    def figure(self) -> "Figure":
        """The metric against the number of exchanges: the mean, every newcomer as a thin line, and Local."""
        from polyfed.report.admission import admission_figure

        return admission_figure(self)

    def save(self, folder: str | Path) -> Path:
        """Write admission.csv, admission.svg and models/<name>.safetensors.

        Parameters
        ----------
        folder : str or Path
            The folder, made if need be.

        Returns
        -------
        Path
            The folder.
        """
        out = RunFolder(Path(folder))
        with out.locked():
            (out.path / "models").mkdir(exist_ok=True)
            for name, w in zip(self.names, self.personal, strict=True):
                out.write_bytes(f"models/{safe(name)}.safetensors", self.task.layout.named(w))
            report.save(self.figure(), out.path / "admission.svg")
            out.write("admission.csv", csv_text(self.table))  # it says that all else is there
        return out.path


@checked
def admit(
    run: Result,
    newcomers: Federation,
    exchanges: Annotated[int, Limits(ge=0, le=COUNTED)] = 10,
    *,
    start: Literal["offered", "common"] = "offered",
    alone: Algorithm | None = None,
) -> Admission:
    """Add new clients to a finished run by the method's own rule.

    A common model needs no exchange beyond entry. A method that adapts the model to a client (Ditto, FedRep, ...) does
    so against the frozen common part, and a method with one model per cluster places the newcomer. Where the server
    keeps every client's model, the newcomer's is added after its first local training. Newcomers do not affect each
    other. Bytes count every exchange, and models downloaded at entry to keep or to choose from.

    Parameters
    ----------
    run : Result
        The run, which stays as it is, bit for bit.
    newcomers : Federation
        Data of the newcomers, under names that are new to the run.
    exchanges : int
        Rounds of each newcomer, with the run's amount of local work; batches, decaying step sizes and growing numbers
        of steps are those of a client's first rounds.
    start : {"offered", "common"}
        "offered": of the models that a method offers (FPFC those of its clusters), the one with the least training
        loss; "common": the start of the training.
    alone : Algorithm or None
        The comparison; None: Local with the method's step size.

    Returns
    -------
    Admission
        Each newcomer's model, and its scores after every exchange.
    """
    if run.settings.privacy:
        raise ConfigError("privacy: not with admit, whose exchanges no budget is kept for")
    fits(run.outline, newcomers)
    before = run.trained
    task = before.task
    check(task, newcomers.train, run.outline.classes)
    splits = {k: s.to(task.device, task.dtype) for k, s in (("train", newcomers.train), ("test", newcomers.test))}
    split = "test" if len(newcomers.test.x) else "train"
    lr = getattr(before.algorithm, "lr", None)
    alone = alone or (Local(float(lr)) if isinstance(lr, int | float) else Local())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        told = [
            _Admitting(before, algorithm, server, newcomers, splits, start).told(exchanges, split)
            for algorithm, server in ((before.algorithm, before.server), (alone, {KNOWN: before.server[KNOWN]}))
        ]
    finally:
        torch.set_num_threads(threads)
    (records, personal, clusters), (other, _, _) = told
    metric = task.scores[0]
    table = pd.DataFrame(records)
    table = table[["exchange", "client", metric.name]].assign(
        alone=[r[metric.name] for r in other], down_bytes=table["down_bytes"], up_bytes=table["up_bytes"]
    )
    return Admission(newcomers.names, table, metric, split, personal, clusters, task, before.algorithm.name)


def fits(old: Federation, new: Federation) -> None:
    """Raise ConfigError or DataError, in one line, for newcomers that cannot join the clients of `old`."""
    for name in new.names:
        if name in old.names:
            raise ConfigError(f"newcomers: found the name {name!r}, which a client of the run has; expected a new one")
    if new.input_shape != old.input_shape:
        found, wanted = list(new.input_shape), list(old.input_shape)
        raise DataError(
            f"newcomers: found inputs of shape {found} for {new.names[0]!r}, expected {wanted} as in the run"
        )
    if (new.classes is None) != (old.classes is None):
        kinds = ["numbers" if f.classes is None else "class labels" for f in (new, old)]
        raise DataError(
            f"newcomers: found {kinds[0]} as the targets of {new.names[0]!r}, expected {kinds[1]} as in the run"
        )
    if new.outputs > old.outputs:
        what = "classes" if old.classes is not None else "numbers per target"
        raise DataError(f"newcomers: {new.outputs} {what}, the run's model has {old.outputs}")


def newcomers(run: Result, data: str | Path, target: str | None = None) -> Federation:
    """New clients from a CSV or npz file, or a folder of them, typed, prepared and scaled as the run's are."""
    place, of, old = Path(data), run.settings.data, run.outline
    if not place.exists():
        raise DataError(f"{place}: no such file or folder")
    if "preparation" in old.meta:
        return _prepared(run, files_of(place), target)
    found = of_arrays(
        files_of(place),
        target or of.options.get("target"),
        "tokens" if old.tokens is not None else "regression" if old.classes is None else "classification",
        classes=old.classes if old.tokens is None else old.tokens,
        test_fraction=of.test_fraction,
        seed=run.settings.seed,
    )
    if any(isinstance(label, str) for label in found.meta.get("labels", ())):
        raise DataError(f"newcomers: found labels {few(found.meta['labels'])}, expected their numbers in the run")
    fits(old, found)
    return scaled(found, old.meta["scaling"], str(run.place())) if "scaling" in old.meta else found


def _prepared(run: Result, paths: Sequence[Path], target: str | None) -> Federation:
    """New clients from CSV files, their columns prepared as the run's were; what is each client's own is learnt."""
    of, old = run.settings.data, run.outline
    known = Preparation.read(old.meta["preparation"], str(run.place()))
    columns = read_table(Columns, run.settings.columns, Where(None, {}, {}))
    sheets, weighed = [read(path, columns) for path in paths], columns.weights
    if isinstance(known.raw, Text) and known.raw.following:
        return _texts(known, sheets, known.raw, run)
    data = Dataset(
        "newcomers",
        np.concatenate([known.codes(sheet) for sheet in sheets]),
        np.concatenate([known.targets(sheet, target) for sheet in sheets]),
        classes=old.classes,
        groups=np.repeat(np.arange(len(sheets)), [len(sheet.lines) for sheet in sheets]),
        group_names=tuple(sheet.name for sheet in sheets),
        preparation=known,
        weights=None if weighed is None else np.concatenate([weights_of(sheet, weighed) for sheet in sheets]),
        whose=None if (of_whom := columns.group) is None else np.concatenate([whose_of(s, of_whom) for s in sheets]),
    )
    found = data.partition(seed=run.settings.seed, test_fraction=of.test_fraction)
    fits(old, found)
    return found


def _texts(known: Preparation, sheets: Sequence[Sheet], raw: Text, run: Result) -> Federation:
    """New clients of a language model."""
    texts = [text_ids(sheet, raw) for sheet in sheets]
    counts = [*map(len, texts)]
    data = Dataset(
        "newcomers",
        np.zeros((sum(counts), 1)),
        np.zeros(sum(counts)),
        groups=np.repeat(np.arange(len(sheets)), counts),
        group_names=tuple(sheet.name for sheet in sheets),
        preparation=known,
        texts=[ids for of in texts for ids in of],
        tokens=known.tokens,
    )
    found = data.partition(seed=run.settings.seed, test_fraction=run.settings.data.test_fraction)
    fits(run.outline, found)
    return found


class _Admitting:
    """All newcomers of one method, each with its own `Newcomer` at the server; the event loop trains them together."""

    def __init__(
        self,
        before: Trained,
        algorithm: Algorithm,
        server: State,
        federation: Federation,
        data: dict[str, Split],
        start: str,
    ):
        task, train, self.before, self.algorithm = before.task, data["train"], before, algorithm
        first = newcomer(algorithm, task, server, before.samples)
        self.newcomers = [copy.copy(first) for _ in range(federation.n)]
        keys, work = client_keys(federation.names), here(before.engine).worker.work
        plan = make_plan(task, federation.n, work.per_step(train.counts))
        counts = torch.as_tensor(train.counts, dtype=task.dtype, device=task.device)
        entered = [self._enter(new, i, train, float(counts[i]), start) for i, new in enumerate(self.newcomers)]
        rows = MemoryRows(federation.n, entered[0][0])
        engine = LocalEngine(task, data, rows, keys, work, before.seed, plan, before.step_sizes)
        self.loop = Loop(
            task, train.counts, federation.names, Apart(algorithm, self.newcomers), Uniform(), engine, before.seed,
            before.step_sizes,
        )  # fmt: skip
        everyone, zero = np.arange(federation.n), np.zeros(federation.n)
        rows.scatter(
            torch.as_tensor(everyone, device=task.device),
            {k: torch.stack([private[k] for private, _ in entered]) for k in entered[0][0]},
        )
        self.loop.ledger.record(-1, everyone, zero, np.array([size for _, size in entered]), zero, zero, zero)

    def _enter(self, new: Newcomer, i: int, train: Split, samples: float, start: str) -> tuple[State, int]:
        """(private state, bytes that it was offered) of a newcomer at entry."""
        offered = None if start == "common" and new.trains else new.offered()
        if offered is None:
            return new.enter(-1, samples), 0
        data = padded(train, np.array([i]))
        loss = torch.cat([self.before.task.loss_of(w[None], data) for w in offered])
        return new.enter(int(loss.argmin()), samples), offered.numel() * offered.element_size()

    def told(self, exchanges: int, split: str) -> tuple[list[dict[str, Any]], Tensor, np.ndarray | None]:
        """(one record per exchange and newcomer, the models at the end, clusters)."""
        records: list[dict[str, Any]] = []
        try:
            for t in range(exchanges + 1):
                if t and self.newcomers[0].trains:
                    self.loop.step()
                found = self.loop.scored(split)
                self.loop.refuse_diverged(found, split)
                down, up = self._moved()
                for i, name in enumerate(self.loop.names):
                    sizes = {"down_bytes": int(down[i]), "up_bytes": int(up[i])}
                    records.append({"exchange": t, "client": name} | {k: float(v[i]) for k, v in found.items()} | sizes)
            return records, self.loop.personal(np.arange(self.loop.n)), self._clusters()
        finally:
            self.loop.engine.close()

    def _moved(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes down and up of every newcomer so far."""
        book = self.loop.ledger.array()
        who = book[:, COLUMNS.index("client")].astype(int)
        down, up = (
            np.bincount(who, book[:, COLUMNS.index(key)], self.loop.n).astype(int) for key in ("down_bytes", "up_bytes")
        )
        return down, up

    def _clusters(self) -> np.ndarray | None:
        before = self.before
        labels = before.algorithm.describe(before.server).clusters if before.algorithm is self.algorithm else None
        if labels is None:
            return None
        found = [new.cluster(torch.as_tensor(labels)) for new in self.newcomers]
        return None if None in found else np.array(found)
