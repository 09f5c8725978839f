"""Run: what `fit` returns. The trained state and everything that was measured on the way."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.base.typed import pieces, plain
from polyfed.compute import evaluation
from polyfed.compute.split import restored
from polyfed.core.algorithm import Algorithm, State
from polyfed.core.ledger import Ledger
from polyfed.core.rounds import Loop
from polyfed.core.uplinks import rows_of
from polyfed.core.worker import expand
from polyfed.data.federation import Federation
from polyfed.metrics.metric import Metric
from polyfed.models.factorised import factorised as factorised_model
from polyfed.models.factorised import pack

if TYPE_CHECKING:
    from polyfed.runs.opened import Opened
    from polyfed.studies.admit import Admission


@checked
@dataclass(eq=False, repr=False)
class Run:
    """A training run: what `fit` returns, or what `Run.open` reads from a folder.

    Parameters
    ----------
    loop : Loop
        The event loop: the server's state, the clients' states and the ledger.
    federation : Federation
        The clients and their data.
    settings : dict
        Everything that determines the numbers, as written to config.toml.
    records : list of dict
        One per evaluated round and split.
    status : str
        "finished", "interrupted" or "diverged"; "unfinished" of a folder whose run was killed.
    seconds : float
        Time spent in training.
    final : dict
        Split -> metric -> [n], a number for each client, at the end.
    folder : Path or None
        Where the run is kept.
    ended : bool
        Whether a callback ended it; a run that is over stays so when it is resumed.
    """

    loop: Loop
    federation: Federation
    settings: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    status: str = "finished"
    seconds: float = 0.0
    final: dict[str, Mapping[str, np.ndarray]] = field(default_factory=dict[str, Mapping[str, np.ndarray]])
    folder: Path | None = None
    ended: bool = False

    @staticmethod
    def open(folder: str | Path, federation: Federation | None = None, model: nn.Module | None = None) -> "Opened":
        """The run of a folder. Reading needs no data; what does (`evaluate`, `resume`) looks for them where they were.

        Parameters
        ----------
        folder : str or Path
            The run's folder.
        federation : Federation or None
            For a run that was started from Python with data of its own: the same data.
        model : nn.Module or None
            For a run that was started from Python with a model of its own: the model as it was when the run began.

        Returns
        -------
        Opened
            The run.

        Raises
        ------
        RunError
            The folder is missing, damaged or not of a run.
        """
        from polyfed.runs.opened import Opened

        return Opened(folder, federation, model)

    @property
    def algorithm(self) -> Algorithm:
        """The method."""
        return self.loop.algorithm

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return self.loop.t

    @property
    def outline(self) -> Federation:
        """The clients: names, numbers of samples, shapes. The samples themselves are in `federation`."""
        return self.federation

    @property
    def server(self) -> State:
        """The server's tensors."""
        return self.loop.server

    @property
    def plan(self) -> str | None:
        """What the method decided before the run: its solver and memory, for methods that have a choice."""
        return self.algorithm.plan(self.loop.task, self.loop.n)

    @property
    def personal(self) -> Tensor:
        """[n, p]: the model that each client would deploy."""
        return self.loop.personal(np.arange(self.loop.n))

    @property
    def here(self) -> bool:
        """Whether the clients' samples and models are in reach of this process; at real sites they are not."""
        return self.loop.engine.here

    @property
    def common(self) -> Tensor | None:
        """[p]: the model that all clients have in common (FedSLR's GKR, Ditto's global one); None: there is none."""
        return self.algorithm.common(self.server)

    def scored(self, name: str) -> dict[str, np.ndarray]:
        """The metrics of what every client would deploy now.

        Parameters
        ----------
        name : str
            "train", "validation" or "test".

        Returns
        -------
        dict
            Metric -> [n].

        Raises
        ------
        ConfigError
            There is no such split.
        """
        return self.loop.evaluate(self._split(name))

    def _split(self, name: str) -> str:
        """The name of a split that there is. Raises ConfigError for any other."""
        known = splits(self.outline)
        if name not in known:
            raise ConfigError(f"no split {name!r}{closest(name, known)}; the federation has {', '.join(known)}")
        return name

    def answers(self, block: int = 1 << 28) -> Iterator[tuple[int, Tensor]]:
        """What the model that each client would deploy now puts out for its test samples.

        Parameters
        ----------
        block : int
            Bytes of models at a time.

        Returns
        -------
        iterator
            Of (a client's position, outputs [b, ...] in the targets' own units); clients without test samples are left
            out.
        """
        loop, task = self.loop, self.loop.task
        test = self.federation.test.to(task.device, task.dtype)
        for ids in np.array_split(np.arange(loop.n), -(-loop.n * task.p * task.w0.element_size() // block)):
            for i, w in zip(ids, loop.personal(ids), strict=True):
                if len(x := test.client(int(i))[0]):
                    yield int(i), restored(task.outputs(w, x), test.units([int(i)]))

    @property
    def deploys(self) -> str:
        """What clients deploy: "common", the one model that the server sends all, "own", trained alone, or "personal";
        of a yardstick "yardstick" or "oracle"."""
        loop, everyone = self.loop, self.loop.round(np.arange(self.loop.n))
        if type(loop.algorithm).personal is Algorithm.personal:
            return "common" if "w" in loop.algorithm.deployment(loop.server, everyone).shared else "personal"
        sends = sum(loop.ledger.totals()) or any(loop.algorithm.downlink(loop.server, everyone))
        return "personal" if sends else "own"

    def digest_of_models(self, block: int = 1 << 28) -> str:
        """Digest of the clients' models.

        Parameters
        ----------
        block : int
            Bytes of models at a time.

        Returns
        -------
        str
            sha256.
        """
        found, loop = hashlib.sha256(), self.loop
        size = max(1, block // (loop.task.p * loop.task.w0.element_size()))
        for k in range(0, loop.n, size):
            found.update(raw(loop.personal(np.arange(k, min(k + size, loop.n)))))
        return found.hexdigest()

    def evaluate(self, models: Tensor | None, split: str = "test") -> dict[str, np.ndarray]:
        """The metrics of any models on each client's samples.

        Callbacks may use it to follow a common model over the rounds.

        Parameters
        ----------
        models : Tensor or None
            One model [p] for all clients, or one for each [n, p]. None, which is what `common` may be, is refused.
        split : str
            "train", "validation" or "test".

        Returns
        -------
        dict
            Metric -> [n], a number for each client.

        Raises
        ------
        ConfigError
            There is no such split, or no model, or it is of another size.
        """
        data, n, task = splits(self.federation)[self._split(split)], self.loop.n, self.loop.task
        if models is None:
            raise ConfigError(f"{self.algorithm.name} has no common model to evaluate")
        if models.shape[-1:] != (task.p,) or models.dim() > 2 or (models.dim() == 2 and len(models) != n):
            raise ConfigError(f"models: found shape {list(models.shape)}, expected [{task.p}] or [{n}, {task.p}]")
        data = data.to(task.device, task.dtype)
        return evaluation.metrics(task, models.to(task.device, task.dtype).expand(n, -1), data, np.arange(n))

    @property
    def parameters(self) -> np.ndarray:
        """[n]: numbers that describe each client's model, those of its structure where the method has one (FedSLR)."""
        loop, counts = self.loop, np.full(self.loop.n, self.loop.task.p, dtype=np.int64)
        if not loop.engine.here:
            for i, found in loop.engine.parameters.items():
                counts[i] = found
            return counts
        if type(loop.algorithm).parameters is Algorithm.parameters:
            return counts
        down = expand(loop.deployment(), loop.n)
        for ids in pieces(torch.arange(loop.n, device=loop.task.device), 16):
            received = {name: rows_of(t, ids) for name, t in down.items()}
            found = loop.algorithm.parameters(loop.engine.private(ids), received)
            counts[ids.cpu().numpy()] = loop.task.p if found is None else torch.as_tensor(found).cpu().numpy()
        return counts

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
        task, w = self.loop.task, self.loop.personal(np.array([i]))[0]
        if not factorised:
            return task.module(w)
        factors, common = self.loop.algorithm.factors(self.server), self.common
        if factors is None or common is None:
            name = self.loop.algorithm.name
            raise ConfigError(
                f"factorised: {name} does not make low-rank models; fedslr (structure LR+S or LR+LR) and gpgd do"
            )
        named = task.layout.named
        return factorised_model(task.model, pack(named(w), named(common), factors), sparse)

    def __repr__(self) -> str:
        from polyfed.report.notebook import sentence

        name, clients = self.settings["algorithm"]["name"], self.outline.names
        return sentence(name, self.status, self.rounds, clients, self.final, self.metric)

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer, a table of the clients, the history."""
        from polyfed.report.notebook import page

        return page(repr(self), self.outline.names, self.final, self.metric, self.history)

    @property
    def history(self) -> pd.DataFrame:
        """One row per evaluated round and split: mean over clients, spread, worst client, bytes and seconds so far."""
        return pd.DataFrame(self.records).drop(columns="assigned", errors="ignore")

    @property
    def assignments(self) -> pd.DataFrame:
        """The groups over time: one row per evaluated round in which they changed, one column per client."""
        found = {r["round"]: r["assigned"] for r in self.records if "assigned" in r}
        return pd.DataFrame.from_dict(found, orient="index", columns=list(self.outline.names)).rename_axis("round")

    @property
    def ledger(self) -> pd.DataFrame:
        """One row per round and participant: exchanges, bytes down and up, seconds."""
        return self._billed().frame()

    def _billed(self) -> Ledger:
        return self.loop.ledger

    @property
    def findings(self) -> dict[str, Any]:
        """What the method itself found: clusters, mixing matrix, step sizes."""
        return {k: plain(v) for k, v in self.algorithm.report(self.server).items()}

    @property
    def clusters(self) -> np.ndarray | None:
        """[n] the group that the method found for each client, or None when it finds none."""
        found = self.findings.get("clusters")
        return None if found is None else np.asarray(found)

    @property
    def metric(self) -> Metric:
        """The metric that leads: accuracy for classes, RMSE for numbers, or the loss where neither is defined."""
        return self.metrics[0]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What clients' models are judged by, the one that leads first; the loss is recorded beside them."""
        return self.loop.task.scores

    @property
    def clients(self) -> pd.DataFrame:
        """One row per client: sample counts, true and found cluster, final metrics per split, bytes, participations."""
        fed, n = self.outline, self.outline.n
        frame = pd.DataFrame({"client": list(fed.names)})
        for name, split in splits(fed).items():
            frame[f"{name}_samples"] = split.counts
        frame["cluster"] = pd.array([pd.NA] * n if fed.clusters is None else list(fed.clusters), dtype="Int64")
        frame["assigned"] = pd.array([pd.NA] * n if self.clusters is None else list(self.clusters), dtype="Int64")
        for name, metrics in self.final.items():
            for key, values in metrics.items():
                frame[f"{name}_{key}"] = values
        return frame.assign(**self._billed().by_client(n))

    def save(self, folder: str | Path) -> Path:
        """Write the run folder: configuration, metrics, clients, ledger, checkpoint, models.

        Parameters
        ----------
        folder : str or Path
            Made if it is not there.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        RunError
            The folder holds a run already, or cannot be written.
        """
        from polyfed.runs.folder import RunFolder

        out = RunFolder(Path(folder))
        with out.locked():
            out.refuse_used()
            out.begin(self, fresh=True)
            out.finish(self)
        return out.path

    def export(self, client: int | str, out: str | Path | None = None, factorised: bool = False) -> tuple[Path, Path]:
        """Copy one client's model from the run's folder to a safetensors file, with a JSON file that says what it is.

        Parameters
        ----------
        client : int or str
            Its position or name.
        out : str, Path or None
            The file; None: <client>.safetensors in the working folder.
        factorised : bool
            Low-rank layers as two factors and what is sparse beside them (FedSLR, GPGD).

        Returns
        -------
        tuple of Path
            Both files.

        Raises
        ------
        ConfigError
            There is no such client, the file has another ending, or the method makes no low-rank model.
        RunError
            The run has no folder, or no models yet.
        """
        from polyfed.studies.export import export

        return export(self, client, None if out is None else Path(out), factorised)

    def predict(self, client: int | str, rows: pd.DataFrame) -> pd.DataFrame:
        """Answers of one client's model for new rows, as they are in a file: texts, gaps and all.

        Gaps, and categories that no training row had, are warnings.

        Parameters
        ----------
        client : int or str
            Its position or name.
        rows : DataFrame
            [N] rows with the columns that the run was trained on, in any order; others are not used.

        Returns
        -------
        DataFrame
            [N]: row (from 1), prediction (a class, or a number in the unit of the target), and for classes one column
            of probabilities each, such as probability_ill.

        Raises
        ------
        DataError
            A column is missing, or a cell is not what it was in training, as for training data.
        ConfigError
            There is no such client, or the run was not trained on CSV files.
        """
        from polyfed.studies.predict import predictor

        return predictor(self, client).predict(rows)

    def newcomers(self, data: str | Path, target: str | None = None) -> Federation:
        """Clients to `admit`, from a CSV or npz file each: one file, or a folder of them. Inputs are not rescaled.

        Parameters
        ----------
        data : str or Path
            A file, or a folder with one for each client.
        target : str or None
            The target column of CSV files; None: the run's, else the last.

        Returns
        -------
        Federation
            The new clients.

        Raises
        ------
        DataError
            A file cannot be read, or does not fit the run's model.
        """
        from polyfed.studies.admit import newcomers

        return newcomers(self, data, target)

    def admit(
        self, newcomers: Federation, exchanges: int = 10, start: Literal["offered", "common"] = "offered"
    ) -> "Admission":
        """Add new clients by the method's own rule, as `polyfed.admit` does; the run stays as it is.

        Parameters
        ----------
        newcomers : Federation
            Their data, under names that the run does not have, with inputs as the run's clients have theirs: scaled.
        exchanges : int
            Rounds that every newcomer takes part in.
        start : {"offered", "common"}
            As for `polyfed.admit`.

        Returns
        -------
        Admission
            Each newcomer's model, and its scores after every exchange.
        """
        from polyfed.studies.admit import admit

        return admit(self, newcomers, exchanges, start=start)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the page of this run.

        Parameters
        ----------
        out : str, Path or None
            The file; None: report.html in the run's folder.

        Returns
        -------
        Path
            The file.
        """
        from polyfed.report import write_report

        return write_report(self.place(), out)

    def place(self) -> Path:
        """The run's folder. Raises RunError where it has none."""
        if self.folder is None:
            raise RunError("this run has no folder; write it to one with run.save(folder)")
        return self.folder


def position(client: int | str, names: Sequence[str], what: str = "client") -> int:
    """Where a client is, by position or name. Raises ConfigError, which calls it `what`, where there is none."""
    n = len(names)
    if client not in (names if isinstance(client, str) else range(-n, n)):
        raise ConfigError(f"no {what} {client!r}{closest(str(client), names)}; there are {n} of them")
    return names.index(client) if isinstance(client, str) else range(n)[client]


def raw(t: Tensor) -> bytes:
    """The bytes of a tensor."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def splits(federation: Federation) -> dict[str, Any]:
    """The federation's splits by name, those that hold samples."""
    found = {"train": federation.train, "validation": federation.validation, "test": federation.test}
    return {name: split for name, split in found.items() if split is not None and len(split.x)}
