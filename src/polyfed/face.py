"""The face: what `polyfed` gives its users. `Run` is a result with doors to what is done with one: reports, exports,
predictions, newcomers; `fit`, `compare` and `tune` are those of the rooms below, and give such runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import pandas as pd
from torch import nn

from polyfed import report
from polyfed.base.arguments import checked
from polyfed.data.federation import Federation
from polyfed.runs import opened, trainer
from polyfed.runs.folder import RunFolder
from polyfed.runs.result import Result
from polyfed.runs.watching import Callback
from polyfed.studies import admit as admits
from polyfed.studies import compare as compares
from polyfed.studies import export as exports
from polyfed.studies import leave as leaves
from polyfed.studies import onnx, peft
from polyfed.studies import tune as tunes
from polyfed.studies.predict import predictor

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")


@checked
class Run(Result):
    """A training run: what `fit` returns, or what `Run.open` reads from a folder."""

    @classmethod
    def open(cls, folder: str | Path, federation: Federation | None = None, model: nn.Module | None = None) -> "Run":
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
        Run
            The run.

        Raises
        ------
        RunError
            The folder is missing, damaged or not of a run.
        """
        return opened.opened(folder, federation, model, cls)

    @classmethod
    def of(cls, result: Result) -> "Run":
        """A result with what a user does with one, such as of `prepare(...).run()`.

        Parameters
        ----------
        result : Result
            What a run gave.

        Returns
        -------
        Run
            The same.
        """
        return cls(**{f.name: getattr(result, f.name) for f in fields(Result)})

    def __repr__(self) -> str:
        name, clients = self.settings.method, self.outline.names
        return report.sentence(name, self.status, self.rounds, clients, self.final, self.metric)

    def _repr_html_(self) -> str:
        """Show the answer, a table of the clients and the history in a notebook."""
        return report.cell(repr(self), self.outline.names, self.final, self.metric, self.history)

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
        out = RunFolder(Path(folder))
        with out.locked():
            out.refuse_used()
            out.begin(self, fresh=True)
            out.finish(self)
        return out.path

    def export(
        self, client: int | str, out: str | Path | None = None, factorised: bool = False, merged: bool = False
    ) -> tuple[Path, Path]:
        """Copy one client's model from the run's folder to a safetensors file, with a JSON file that says what it is.

        Parameters
        ----------
        client : int or str
            Its position or name.
        out : str, Path or None
            The file; None: <client>.safetensors in the working folder.
        factorised : bool
            Low-rank layers as two factors and what is sparse beside them (FedSLR, GPGD).
        merged : bool
            Of a model with an adapter, the whole model as it was before, with the adapter's updates in its weights.

        Returns
        -------
        tuple of Path
            Both files.

        Raises
        ------
        ConfigError
            There is no such client, the file has another ending, the method makes no low-rank model, or the model has
            no adapter.
        RunError
            The run has no folder, or no models yet.
        """
        return exports.export(self, client, None if out is None else Path(out), factorised, merged)

    def peft(self, client: int | str, out: str | Path | None = None) -> Path:
        """Write one client's low-rank updates as a folder that peft opens.

        ``peft.PeftModel.from_pretrained(model, folder)`` gives the client's model, where `model` is the one that was
        adapted, in evaluation mode.

        Parameters
        ----------
        client : int or str
            Its position or name.
        out : str, Path or None
            The folder; None: <client>-peft in the working folder.

        Returns
        -------
        Path
            The folder, with adapter_config.json and adapter_model.safetensors.

        Raises
        ------
        ConfigError
            There is no such client, or its model has no adapter `lora`.
        RunError
            The folder cannot be written.
        """
        return peft.export_peft(self, client, None if out is None else Path(out))

    def onnx(self, client: int | str, out: str | Path | None = None) -> Path:
        """Write one client's model as an ONNX file, which needs the extra `onnx`.

        Of a run on CSV files the preparation is part of the graph. Inputs have the columns' names: [N] doubles, NaN
        where missing, for numbers and for categories whose values are all numbers; [N] strings for other categories.
        Outputs are `prediction` [N], and for classes `probabilities` [N, classes]. What the columns refuse (a gap, an
        unseen category) comes out as NaN. Of any other run, `x` [N, ...] is a prepared input in float32, and `output`
        what the model makes of it.

        Parameters
        ----------
        client : int or str
            Its position or name.
        out : str, Path or None
            The file; None: <client>.onnx in the working folder.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        ConfigError
            There is no such client, onnx is not installed, or torch cannot export the model.
        """
        return onnx.export_onnx(self, client, None if out is None else Path(out))

    def predict(self, client: int | str, rows: pd.DataFrame, strict: bool = False) -> pd.DataFrame:
        """Answers of one client's model for new rows, as `Predictor.predict` gives them.

        Parameters
        ----------
        client : int or str
            Its position or name.
        rows : DataFrame
            [N] rows with the columns that the run was trained on.
        strict : bool
            As of `Predictor.predict`.

        Returns
        -------
        DataFrame
            [N], see `Predictor.predict`.

        Raises
        ------
        ConfigError
            There is no such client, or the run was not trained on CSV files.
        """
        return predictor(self, client).predict(rows, strict)

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
        return admits.newcomers(self, data, target)

    admit = admits.admit

    def leave(
        self, *clients: int | str, out: str | Path | None = None, callbacks: Sequence[Callback] = ()
    ) -> leaves.Departure:
        """Train the run again without some of its clients, every other draw the same; the run stays as it is.

        The result is, bit for bit, the run of a federation that never had them: whatever follows from all clients is
        worked out anew. In a federation that was made in Python, what the program computed from all clients before
        (scaling, a vocabulary) is its own to redo.

        Parameters
        ----------
        *clients : int or str
            Who leaves, by position or name.
        out : str, Path or None
            Folder of the new run; None: beside the run's, under a name that says who left.
        callbacks : sequence of callable
            As for `fit`.

        Returns
        -------
        Departure
            What it costs those who stay, in scores and bytes; its `folder` is the new run's.

        Raises
        ------
        ConfigError
            There is no such client, none would stay, or the run started from another one.
        RunError
            The run is not finished, or its data cannot be read or have changed.
        """
        return leaves.leave(self, clients, None if out is None else Path(out), callbacks)

    def resume(self, rounds: int | None = None, callbacks: Sequence[Callback] = ()) -> "Run":
        """Train on from the last checkpoint, to the numbers of a run that was never interrupted, and write the folder.

        Parameters
        ----------
        rounds : int or None
            In all; None: as many as the run was to have.
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


def _tuned(found: tunes.Tuned) -> tunes.Tuned:
    found.run = found.run and Run.of(found.run)
    return found


fit = _faced(trainer.fit, Run.of)
compare = _faced(compares.compare, _compared)
tune = _faced(tunes.tune, _tuned)
