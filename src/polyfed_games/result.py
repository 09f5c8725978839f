"""Result of a folder of coalitions, and what is written of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from polyfed import report
from polyfed.base.arguments import checked
from polyfed.base.errors import RunError
from polyfed.report import Table
from polyfed.runs import schema as reading
from polyfed.runs.folder import RunFolder, csv_text
from polyfed_games import show
from polyfed_games.found import Found
from polyfed_games.gains import Gains, gains_of


@checked
@dataclass(frozen=True, eq=False)
class Coalitions(Gains):
    """Result of `coalitions`: each client's gain from the others.

    Parameters
    ----------
    names : tuple of str
        [n] the clients.
    seeds : tuple of int
        The splits and starts.
    metric : Metric
        The leading metric.
    method : str
        Label of the coalitions' method.
    sampled : int or None
        Joinings of each pair in the coalitions drawn, on average; None: every coalition was trained.
    trainings : int
        Runs in the folder.
    seconds : float
        Seconds of training in all runs.
    values : DataFrame
        One row per seed, coalition and member: seed, coalition, size, client, validation, test, gain (over the own
        model, positive when better), run (its folder).
    help : DataFrame
        One row per pair: client (receives), from, shapley, low, high, clear (jointly over all pairs), error and drawn
        (standard error of the sampling and its samples), leave_one_out (the loss when only the other is left out) and
        its limits.
    clients : DataFrame
        One row per client: its tested samples, its own score and that with all; the coalition most often chosen by
        validation, the number of those seeds, the score after choosing in every seed; gains with limits; the best
        coalition in hindsight.
    partitions : DataFrame
        One row per partition: its name and coalitions, stability, the share of seeds with it, who would move.
    agreement : DataFrame
        One row per method compared with the coalitions.
    folder : Path or None
        Folder of the runs and results.
    split : str
        The split measured.
    notes : tuple of str
        Caveats of the data.
    """

    def __repr__(self) -> str:
        return f"<Coalitions of {', '.join(self.names)}: {self.method}, {len(self.seeds)} seeds, {self.trainings} runs>"

    @staticmethod
    def open(folder: str | Path) -> "Coalitions":
        """The results of a folder, from its runs.

        Parameters
        ----------
        folder : str or Path
            A folder that `coalitions` wrote.

        Returns
        -------
        Coalitions
            The results.
        """
        return gains_of(Found.read(Path(folder)), Coalitions)

    def tables(self) -> list[Table]:
        """Tables as they are printed: who helps whom, the clients, the partitions and the methods held against them."""
        return show.tables(self)

    def figure(self) -> Figure:
        """The matrix as a picture."""
        return show.figure(self)

    def save(self) -> Path:
        """Write the tables, the picture and the page into the folder; returns the page, report.html."""
        if self.folder is None:
            raise RunError("these coalitions have no folder; give one with out=...")
        out = RunFolder(self.folder)
        with out.locked():
            for name in ("values", "help", "clients", "partitions", "agreement"):
                out.write(f"coalitions-{name}.csv", csv_text(getattr(self, name)))
            for form in ("png", "svg", "pdf"):
                report.save(self.figure(), self.folder / f"coalitions.{form}")
            out.write("coalitions.json", json.dumps(reading.finite(self._json()), indent=1))
            out.write("report.html", show.page(self))
        return self.folder / "report.html"

    def _json(self) -> dict[str, Any]:
        keys = ("names", "seeds", "method", "sampled", "trainings", "seconds", "split", "notes")
        tables = ("help", "clients", "partitions", "agreement")
        return {
            **{k: list(v) if isinstance(v := getattr(self, k), tuple) else v for k in keys},
            "metric": self.metric.name,
            **{k: json.loads(getattr(self, k).to_json(orient="records")) for k in tables},
        }
