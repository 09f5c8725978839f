"""The face of polyfed: `Run` is a result with reports, exports, predictions and newcomers; `fit` and `compare` of the
rooms below give such runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import pandas as pd

from polyfed import report
from polyfed.base.arguments import checked
from polyfed.base.plugins import sibling
from polyfed.data.federation import Federation
from polyfed.models.start import PRESENT, Start
from polyfed.runs import opened, trainer
from polyfed.runs.folder import RunFolder
from polyfed.runs.result import Result
from polyfed.runs.watching import Callback
from polyfed.studies import compare as compares
from polyfed.studies.predict import predictor

if TYPE_CHECKING:
    from polyfed_members.admission import Admission
    from polyfed_members.departure import Departure

Form = Literal["dense", "factorised", "merged"]
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")


@checked
class Run(Result):
    """A training run: the result of `fit`, or of `Run.open` on a folder."""

    @classmethod
    def open(cls, folder: str | Path, federation: Federation | None = None, model: Start | None = None) -> "Run":
        """The run of a folder. Reading needs no data; `evaluate` and `resume` look for them where they were.

        Parameters
        ----------
        folder : str or Path
            The run's folder.
        federation : Federation or None
            The data of a run that was started from Python with its own.
        model : nn.Module, callable or None
            The model of a run that was started from Python with its own, as it was given at the start.

        Returns
        -------
        Run
            The run.
        """
        return opened.opened(folder, federation, model, cls)

    @classmethod
    def of(cls, result: Result) -> "Run":
        """The run of a result, such as of `prepare(...).run()`.

        Parameters
        ----------
        result : Result
            Result of a run.

        Returns
        -------
        Run
            The run.
        """
        return cls(**{f.name: getattr(result, f.name) for f in fields(Result)})

    def __repr__(self) -> str:
        name, clients = self.settings.method, self.outline.names
        sentence = report.sentence(name, self.status, self.rounds, clients, self.final, self.metric)
        start = self.settings.initial_weights
        return f"{sentence} (from {start})" if start == PRESENT else sentence

    def _repr_html_(self) -> str:
        """Show the answer, a table of the clients and the history in a notebook."""
        return report.cell(repr(self), self.outline.names, self.final, self.metric, self.history)

    def save(self, folder: str | Path) -> Path:
        """Write the run folder: configuration, metrics, clients, ledger, checkpoint, models.

        Parameters
        ----------
        folder : str or Path
            The folder, made if need be.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        RunError
            The folder holds a run already, or cannot be written.
        """
        out = RunFolder(Path(folder))
        with out.locked():
            out.refuse_used()
            out.begin(self, fresh=True)
            out.finish(self)
        return out.path

    def export(self, client: int | str, out: str | Path | None = None, form: Form = "dense") -> tuple[Path, Path]:
        """Copy one client's model from the run's folder to a safetensors file, with a JSON file about it.

        Parameters
        ----------
        client : int or str
            Position or name.
        out : str, Path or None
            The file; None: <client>.safetensors in the working folder.
        form : str
            "factorised": low-rank layers as two factors and a sparse rest (FedSLR, GPGD); "merged": the whole model,
            with the adapter's updates in its weights.

        Returns
        -------
        tuple of Path
            Both files.
        """
        module = sibling("polyfed_export.export", "export:")
        return module.export(self, client, None if out is None else Path(out), form)

    def peft(self, client: int | str, out: str | Path | None = None) -> Path:
        """Write one client's low-rank updates as a folder that peft opens.

        ``peft.PeftModel.from_pretrained(model, folder)`` gives the client's model, for the adapted `model` in
        evaluation mode.

        Parameters
        ----------
        client : int or str
            Position or name.
        out : str, Path or None
            The folder; None: <client>-peft in the working folder.

        Returns
        -------
        Path
            The folder, with adapter_config.json and adapter_model.safetensors.
        """
        return sibling("polyfed_export.peft", "peft:").export_peft(self, client, None if out is None else Path(out))

    def onnx(self, client: int | str, out: str | Path | None = None) -> Path:
        """Write one client's model as an ONNX file, which needs the extra `onnx`.

        For a run on CSV files the preparation is part of the graph. Inputs have the columns' names: [N] doubles, NaN
        where missing, for numbers and for categories whose values are all numbers; [N] strings for other categories.
        Outputs are `prediction` [N], and for classes `probabilities` [N, classes]; refused gaps and unseen categories
        come out as NaN. For any other run, prepared inputs `x` [N, ...] in float32 give the model's `output`.

        Parameters
        ----------
        client : int or str
            Position or name.
        out : str, Path or None
            The file; None: <client>.onnx in the working folder.

        Returns
        -------
        Path
            The file.
        """
        return sibling("polyfed_export.onnx", "onnx:").export_onnx(self, client, None if out is None else Path(out))

    def predict(self, client: int | str, rows: pd.DataFrame, strict: bool = False) -> pd.DataFrame:
        """Answers of one client's model for new rows, see `Predictor.predict`.

        Parameters
        ----------
        client : int or str
            Position or name.
        rows : DataFrame
            [N] rows with the columns of the training files.
        strict : bool
            As for `Predictor.predict`.

        Returns
        -------
        DataFrame
            [N] answers.
        """
        return predictor(self, client).predict(rows, strict)

    def newcomers(self, data: str | Path, target: str | None = None) -> Federation:
        """Clients to `admit`, from a CSV or npz file each: one file, or a folder of them. Inputs are not rescaled.

        Parameters
        ----------
        data : str or Path
            A file, or a folder with one for each client.
        target : str or None
            Target column of CSV files; None: the run's, else the last.

        Returns
        -------
        Federation
            The new clients.
        """
        return sibling("polyfed_members.newcomers", "newcomers:").newcomers(self, data, target)

    def admit(self, newcomers: Federation, exchanges: int = 10, **more: Any) -> "Admission":
        """Add new clients by the method's own rule: `polyfed.admit` of this run.

        Parameters
        ----------
        newcomers : Federation
            Data of the newcomers.
        exchanges : int
            Rounds of each newcomer.
        **more
            As for `polyfed.admit`.

        Returns
        -------
        Admission
            Each newcomer's model, and its scores after every exchange.
        """
        return sibling("polyfed_members.admit", "admit:").admit(self, newcomers, exchanges, **more)

    def leave(
        self, *clients: int | str, out: str | Path | None = None, callbacks: Sequence[Callback] = ()
    ) -> "Departure":
        """Train the run again without some of its clients, with the same draws for the others; the run stays as it is.

        The result is, bit for bit, the run of a federation that never had them. For a federation that was made in
        Python, the program redoes what it computed from all clients itself (scaling, a vocabulary).

        Parameters
        ----------
        *clients : int or str
            Positions or names of the clients that leave.
        out : str, Path or None
            Folder of the new run; None: beside the run's, named after the clients that left.
        callbacks : sequence of callable
            As for `fit`.

        Returns
        -------
        Departure
            The cost for those who stay, in scores and bytes, and the `folder` of the new run.

        Raises
        ------
        ConfigError
            There is no such client, none would stay, or the run started from another one.
        RunError
            The run is not finished, or its data cannot be read or have changed.
        """
        module = sibling("polyfed_members.leave", "leave:")
        return module.leave(self, clients, None if out is None else Path(out), callbacks)

    def resume(self, rounds: int | None = None, callbacks: Sequence[Callback] = ()) -> "Run":
        """Train on from the last checkpoint, as if the run had never been interrupted, and write the folder.

        Parameters
        ----------
        rounds : int or None
            Rounds in all; None: those of the settings.
        callbacks : sequence of callable
            As for `fit`.

        Returns
        -------
        Run
            The run, trained on.

        Raises
        ------
        RunError
            The data cannot be read, or have changed.
        ConfigError
            A setting was an object of Python, which no file holds.
        """
        return Run.of(opened.resume(self, rounds, callbacks))

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
        return report.write_report(self.place(), out)


def _faced(function: Callable[P, T], face: Callable[[T], S]) -> Callable[P, S]:
    """A function that gives what `face` makes of its result."""

    @wraps(function)
    def faced(*args: P.args, **given: P.kwargs) -> S:
        return face(function(*args, **given))

    return faced


def _compared(found: compares.Comparison) -> compares.Comparison:
    found.results = [r if r.run is None else replace(r, run=Run.of(r.run)) for r in found.results]
    return found


fit = _faced(trainer.fit, Run.of)
compare = _faced(compares.compare, _compared)
