"""admit: clients that come after training. Each is taken in by its method's rule, the others stay as they are; what
that is worth is told beside what the newcomer reaches alone.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from polyfed.algorithms.local import Local
from polyfed.core.algorithm import KNOWN, Algorithm, Down, Personal, Round, State
from polyfed.core.batches import padded
from polyfed.core.errors import ConfigError, DataError, Diverged, closest
from polyfed.core.ledger import down_bytes
from polyfed.core.metric import Metric
from polyfed.core.randomness import client_keys
from polyfed.core.rows import MemoryRows
from polyfed.core.split import Split
from polyfed.core.task import Task
from polyfed.core.uplinks import Tally
from polyfed.core.worker import Worker, expand
from polyfed.data.federation import Federation
from polyfed.data.readers import client_files
from polyfed.engines.local import LocalEngine, make_plan
from polyfed.experiment.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyfed.report import Table

MANY = 6  # newcomers with a column of their own
LINES = 12  # exchanges that the table shows


@dataclass(eq=False)
class Admission:
    """What `admit` found.

    table: one row per exchange and newcomer: exchange (0: at entry), client, the metric, alone (the same of Local after
        as many rounds of the same local work), down_bytes and up_bytes so far
    metric: the one that leads, on `split` ("test", or "train" where there are no test samples)
    personal: [m, p] the model that each newcomer deploys
    clusters: [m] the label, as in `run.clusters`, of the old clients that each newcomer is grouped with, -1: with none;
        None for a method that finds no clusters
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
        """The nn.Module of one newcomer, by position or name."""
        m = len(self.names)
        if client not in (self.names if isinstance(client, str) else range(-m, m)):
            raise ConfigError(f"no newcomer {client!r}{closest(str(client), self.names)}; there are {m} of them")
        i = self.names.index(client) if isinstance(client, str) else range(m)[client]
        return self.task.module(self.personal[i])

    @property
    def history(self) -> pd.DataFrame:
        """One row per exchange: the mean over newcomers of the metric and of `alone`, bytes of all of them so far."""
        columns = {self.metric.name: "mean", "alone": "mean", "down_bytes": "sum", "up_bytes": "sum"}
        return self.table.groupby("exchange").agg(columns).reset_index()

    def summary(self) -> "Table":
        """The metric after each exchange: each newcomer's (if few), their mean, and what they reach alone."""
        return admission_table(self)

    def figure(self) -> "Figure":
        """The metric against the number of exchanges: the mean, every newcomer as a thin line, and Local."""
        return admission_figure(self)

    def save(self, folder: str | Path) -> Path:
        """Write admission.csv, admission.svg and models/<name>.safetensors."""
        from polyfed.experiment.folder import RunFolder, csv_text, safe
        from polyfed.report.style import save

        out = RunFolder(Path(folder))
        with out.locked():
            (out.path / "models").mkdir(exist_ok=True)
            for name, w in zip(self.names, self.personal, strict=True):
                out.write_bytes(f"models/{safe(name)}.safetensors", self.task.layout.named(w))
            save(self.figure(), out.path / "admission.svg")
            out.write("admission.csv", csv_text(self.table))  # it says that all else is there
        return out.path


def admit(
    run: Run,
    newcomers: Federation,
    exchanges: int = 10,
    *,
    start: Literal["offered", "common"] = "offered",
    alone: Algorithm | None = None,
) -> Admission:
    """Take clients in that were not there in training, by the method's own rule.

    run: stays as it is, bit for bit: the old clients and every model that is not a newcomer's own are frozen
    newcomers: their data, with names that the run does not have
    exchanges: rounds that every newcomer takes part in, with the run's amount of local work. A newcomer's rounds count
        from its entry: batches, decaying step sizes and growing numbers of steps are those of a client's first rounds.
    start: where a method offers models to begin with (FPFC those of its clusters), "offered" takes the one with the
        least training loss, "common" leaves them and begins where training began
    alone: what the newcomers are compared with; Local with the method's step size by default

    One common model is there with exchange 0, and more exchanges are not made. A method that adapts the model to a
    client (Ditto, FedRep, ...) does so against the frozen common part. Methods with one model per cluster place the
    newcomer. Where the server keeps every client's model, the newcomer's is added after its first local training.
    Every newcomer is taken in as if it were the only one.

    Bytes: of every exchange, and at entry of models that are downloaded to stay or to choose from.

    Raises ConfigError for a setting, a name that is taken or a method that cannot grow, DataError for samples that do
    not fit the run's model, Diverged for a value that is not finite.
    """
    if not isinstance(exchanges, int) or isinstance(exchanges, bool) or exchanges < 0:
        raise ConfigError(f"exchanges: found {exchanges!r}, expected an integer of at least 0")
    if start not in ("offered", "common"):
        raise ConfigError(f"start: found {start!r}, expected offered or common")
    fits(run.outline, newcomers)
    loop = run.loop
    task = loop.task
    task.check(newcomers.train, run.outline.classes)
    splits = {k: s.to(task.device, task.dtype) for k, s in (("train", newcomers.train), ("test", newcomers.test))}
    split = "test" if len(newcomers.test.x) else "train"
    lr = getattr(loop.algorithm, "lr", None)
    alone = alone or (Local(float(lr)) if isinstance(lr, int | float) else Local())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        told = [
            _Taking(run, algorithm, server, newcomers, splits["train"], start).told(exchanges, splits[split])
            for algorithm, server in ((loop.algorithm, loop.server), (alone, {KNOWN: loop.server[KNOWN]}))
        ]
    finally:
        torch.set_num_threads(threads)
    (records, personal, clusters), (other, _, _) = told
    metric = task.scores[0]
    table = pd.DataFrame(records)
    table = table[["exchange", "client", metric.name]].assign(
        alone=[r[metric.name] for r in other], down_bytes=table["down_bytes"], up_bytes=table["up_bytes"]
    )
    return Admission(newcomers.names, table, metric, split, personal, clusters, task, loop.algorithm.name)


def fits(old: Federation, new: Federation) -> None:
    """Raise ConfigError or DataError, in one line, for newcomers that are no further clients of `old`."""
    if not isinstance(new, Federation):
        raise ConfigError(f"newcomers: found a {type(new).__name__}, expected a polyfed.Federation")
    for name in new.names:
        if name in old.names:
            raise ConfigError(f"newcomers: {name!r} is the name of a client of the run; give another")
    if new.input_shape != old.input_shape:
        found, wanted = list(new.input_shape), list(old.input_shape)
        raise DataError(f"newcomers: inputs of {new.names[0]!r} have shape {found}, the run's have {wanted}")
    if (new.classes is None) != (old.classes is None):
        kinds = ["numbers" if f.classes is None else "class labels" for f in (new, old)]
        raise DataError(f"newcomers: the targets of {new.names[0]!r} are {kinds[0]}, the run's are {kinds[1]}")
    if new.outputs > old.outputs:
        what = "classes" if old.classes is not None else "numbers per target"
        raise DataError(f"newcomers: {new.outputs} {what}, the run's model has {old.outputs}")


def newcomers(run: Run, data: str | Path, target: str | None = None) -> Federation:
    """New clients from a CSV or npz file, or a folder with one for each, typed as the run's data are.

    target: target column of CSV files; None: the run's own, else the last
    """
    place, of, old = Path(data), run.settings["data"], run.outline
    if not place.exists():
        raise DataError(f"{place}: there is no such file or folder")
    found = Federation.from_files(
        client_files(place) if place.is_dir() else [place],
        target or of.get("options", {}).get("target"),
        "regression" if old.classes is None else "classification",
        classes=old.classes,
        test_fraction=of.get("test-fraction", 0.2),
        seed=run.settings["seed"],
    )
    fits(old, found)
    return found


class _Taking:
    """All newcomers of one method, each with its own `Newcomer` at the server; they train in common chunks."""

    def __init__(self, run: Run, algorithm: Algorithm, server: State, federation: Federation, train: Split, start: str):
        loop = run.loop
        self.loop, self.algorithm, self.task, self.names = loop, algorithm, loop.task, federation.names
        self.m, self.everyone = federation.n, torch.arange(federation.n, device=loop.task.device)
        self.counts = torch.as_tensor(train.counts, dtype=loop.task.dtype, device=loop.task.device)
        self.moved = np.zeros((2, self.m), dtype=np.int64)
        first = algorithm.admit(loop.task, server, loop.samples)
        self.newcomers = [copy.copy(first) for _ in range(self.m)]
        engine = loop.engine
        assert isinstance(engine, LocalEngine)
        keys, work = client_keys(federation.names), engine.worker.work
        plan = make_plan(loop.task, self.m, work.per_step(train.counts))
        self.worker = Worker(loop.task, train, keys, work, loop.seed, plan)
        private = [self._enter(i, train, start) for i in range(self.m)]
        self.rows = MemoryRows(self.m, private[0])
        for i, state in enumerate(private):
            self.rows.scatter(self.everyone[i : i + 1], {k: t[None] for k, t in state.items()})

    def _enter(self, i: int, train: Split, start: str) -> State:
        newcomer, samples = self.newcomers[i], float(self.counts[i])
        offered = None if start == "common" and newcomer.trains else newcomer.offered()
        if offered is None:
            return newcomer.enter(-1, samples)
        self.moved[0, i] += offered.numel() * offered.element_size()
        data = padded(train, np.array([i]))
        loss = torch.cat([self.task.loss_of(w[None], data) for w in offered])
        return newcomer.enter(int(loss.argmin()), samples)

    def told(self, exchanges: int, split: Split) -> tuple[list[dict[str, Any]], Tensor, np.ndarray | None]:
        """(one record per exchange and newcomer, the models at the end, clusters)."""
        records: list[dict[str, Any]] = []
        try:
            for t in range(exchanges + 1):
                if t:
                    self._exchange(t - 1)
                found = self.task.metrics(self._models(t), split, np.arange(self.m))
                for i, name in enumerate(self.names):
                    sizes = {"down_bytes": int(self.moved[0, i]), "up_bytes": int(self.moved[1, i])}
                    records.append({"exchange": t, "client": name} | {k: float(v[i]) for k, v in found.items()} | sizes)
        finally:
            self.worker.close()
        return records, self._models(exchanges), self._clusters()

    def _round(self, t: int, phase: int, rows: Sequence[int] | None = None) -> Round:
        """Of the newcomers `rows` as the worker numbers them; None: of one newcomer, as its server does."""
        at = torch.tensor([self.loop.n]) if rows is None else torch.as_tensor(rows)
        at = at.to(self.task.device)
        counts = self.counts[:1] if rows is None else self.counts[at]
        return Round(t, self.loop.n + 1, phase, at, counts, torch.full_like(at, t))

    def _own(self, t: int, phase: int, i: int) -> Round:
        return self._round(t, phase)._replace(samples=self.counts[i : i + 1])

    def _exchange(self, t: int) -> None:
        algorithm = self.algorithm.decayed(self.loop.lr_decay ** (t // self.loop.lr_decay_every))
        for phase in range(algorithm.phases(t)):
            asked = [i for i, new in enumerate(self.newcomers) if new.trains and new.asked(self._own(t, phase, i))]
            if not asked:
                continue
            downs = [self.newcomers[i].downlink(self._own(t, phase, i)) for i in asked]
            round = self._round(t, phase, asked)
            tally = Tally(round, {})
            reply = self.worker.run(algorithm, self.rows, _stacked(downs), round, tally)
            if reply.bad is not None:
                who = self.names[asked[reply.bad]]
                raise Diverged(f"exchange {t + 1}: newcomer {who!r} diverged (NaN or infinity); try a smaller lr")
            sent = tally.uplinks()
            for row, i in enumerate(asked):
                up = {name: sent[name][row : row + 1] for name in sent}
                self.newcomers[i].aggregate(up, self._own(t, phase, i))
                self.moved[:, i] += down_bytes(downs[row]), tally.bytes
            self.rows.scatter(round.ids, reply.private)

    def _models(self, t: int) -> Tensor:
        """[m, p]: what each newcomer deploys after t exchanges."""
        down: State = {}
        if not isinstance(self.algorithm, Personal):
            down = _stacked([new.deployment(self._own(t, 0, i)) for i, new in enumerate(self.newcomers)])
        return self.algorithm.personal(self.rows.gather(self.everyone), down)

    def _clusters(self) -> np.ndarray | None:
        labels = (
            self.algorithm.report(self.loop.server).get("clusters") if self.loop.algorithm is self.algorithm else None
        )
        if labels is None:
            return None
        found = [new.cluster(torch.as_tensor(labels)) for new in self.newcomers]
        return None if None in found else np.array(found)


def _stacked(downs: list[Down]) -> State:
    """The newcomers' messages as rows; what all of them are sent from the same memory is not copied."""
    first, m = expand(downs[0], 1), len(downs)
    out: State = {}
    for name in first:
        one = downs[0].shared.get(name)
        if one is not None and all(d.shared[name] is one for d in downs):
            out[name] = one.expand(m, *one.shape)
        else:
            out[name] = torch.cat([expand(d, 1)[name] for d in downs])
    return out


def admission_figure(found: Admission) -> "Figure":
    """The metric against the number of exchanges: the mean, every newcomer as a thin line, and Local."""
    from matplotlib.ticker import MaxNLocator

    from polyfed.report import words
    from polyfed.report.style import BLUE, QUIET, canvas, legend_name, styled

    scale, history = words.Scale(found.metric), found.history
    with styled():
        figure, (axes,) = canvas()
        for _, rows in found.table.groupby("client"):
            axes.plot(rows["exchange"], scale.factor * rows[found.metric.name], color=BLUE, linewidth=0.7, alpha=0.35)
        x = history["exchange"]
        axes.plot(x, scale.factor * history[found.metric.name], "o-", color=BLUE, label=legend_name(found.label))
        axes.plot(x, scale.factor * history["alone"], "x--", color=QUIET, label="alone")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("exchanges")
        axes.set_ylabel(f"{found.split} {scale.header} of newcomers")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def admission_table(found: "Admission") -> "Table":
    """The metric after each exchange: every newcomer (where they are few), their mean, and what they reach alone."""
    from polyfed.report import Table, words
    from polyfed.report.table import Cell

    scale, history = words.Scale(found.metric), found.history.to_dict("records")
    each = found.names if 1 < len(found.names) <= MANY else ()
    own = {(r["exchange"], r["client"]): r for r in found.table.to_dict("records")}
    last = len(history) - 1
    step = -(-last // LINES) or 1
    rows = []
    for k in [*range(0, last, step), last]:
        row = history[k]
        texts = [
            str(k), *(scale.number(own[k, name][found.metric.name]) for name in each),
            scale.number(row[found.metric.name]), scale.number(row["alone"]),
            words.size(row["down_bytes"]), words.size(row["up_bytes"]),
        ]  # fmt: skip
        rows.append(tuple(Cell(text) for text in texts))
    merit, name = found.metric.merit, found.metric.name
    known = [n for n in found.names if np.isfinite(own[last, n][name] + own[last, n]["alone"])]
    better = sum(merit(own[last, n][name]) > merit(own[last, n]["alone"]) for n in known)
    notes = [
        "alone: as many rounds of the same local training without anybody",
        f"better off than alone after {words.count(last, 'exchange')}: {better} of {len(known)}",
    ]
    if lacking := [n for n in found.names if n not in known]:
        notes.append(f"no {scale.name}: {words.listed(lacking)} ({found.metric.lacks})")
    if found.clusters is not None:
        places = [f"{n}: {'with none' if c < 0 else c}" for n, c in zip(found.names, found.clusters, strict=True)]
        notes.append(f"cluster of the run: {', '.join(places[:20])}{', ...' if len(places) > 20 else ''}")
    columns = ("exchange", *each, found.label if len(each) < 2 else "mean", "alone", "down", "up")
    return Table(f"Newcomers to {found.label}, {found.split} {scale.header}", columns, tuple(rows), tuple(notes))
