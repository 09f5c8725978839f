"""What a leaving costs those who stay, as a table."""

import math
from typing import TYPE_CHECKING

from polyfed.report import words
from polyfed.report.table import Cell, Table

if TYPE_CHECKING:
    from polyfed.experiment.leave import Departure


def departure_table(found: "Departure") -> Table:
    """One row per client that stays: its score and its bytes before and after."""
    scale, several = words.Scale(found.metric), found.table["method"].nunique() > 1
    columns = (
        "client<",
        *["method<"] * several,
        "before",
        "after",
        "change",
        "95 % interval",
        "bytes before",
        "bytes after",
    )
    rows = []
    for r in found.table.to_dict("records"):
        mark = ("gain" if r["change"] > 0 else "loss") if r["clear"] else ""
        limits = scale.range(r["low"], r["high"]) if math.isfinite(r["low"]) else "–"
        texts = (scale.number(r["before"]), scale.number(r["after"]))
        rows.append((
            Cell(str(r["client"])), *[Cell(str(r["method"]))] * several, *map(Cell, texts),
            Cell(scale.signed(r["change"]), {"change": r["change"]}, mark),
            Cell(limits, {"low": r["low"], "high": r["high"]}),
            *(Cell(words.size(r[f"bytes_{k}"]), {f"bytes_{k}": r[f"bytes_{k}"]}) for k in ("before", "after")),
        ))  # fmt: skip
    who = words.listed(list(found.left))
    seeds = int(found.table["seeds"].max())
    over = f"Paired over {words.count(seeds, 'seed')}" if seeds > 1 else "One seed: paired over the test samples"
    notes = (
        f"{found.split.capitalize()} {scale.header}; change: without {who}, positive when better. {over}; "
        "colour: clear jointly over the clients.",
        f"Trained anew from the initial model, so nothing of {who} is in it; polyfed verify repeats it.",
    )
    return Table(f"What the leaving of {who} costs", columns, tuple(rows), notes)
