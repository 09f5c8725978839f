"""Cost of a leaving for those who stay, as a table and as a page."""

import math
from html import escape
from typing import TYPE_CHECKING

from polyfed.report import words
from polyfed.report.table import Cell, Table

MEAN = "mean"  # the row that is no client
SLOPE = "A line per client that stays; in colour: clear jointly over the clients."

if TYPE_CHECKING:
    from polyfed.studies.leave import Departure


def departure_table(found: "Departure") -> Table:
    """One row per client that stays: its score and its bytes before and after; methods that send messages first."""
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
    order, rows = _ranked(found), []
    for r in sorted(found.table.to_dict("records"), key=lambda r: order.index(r["method"])):
        mark = ("gain" if r["change"] > 0 else "loss") if r["clear"] else ""
        limits = scale.range(r["low"], r["high"]) if math.isfinite(r["low"]) else "–"
        texts = (scale.number(r["before"]), scale.number(r["after"]))
        rows.append((
            Cell(str(r["client"])), *[Cell(str(r["method"]))] * several, *map(Cell, texts),
            Cell(scale.signed(r["change"]), {"change": r["change"]}, mark),
            Cell(limits, {"low": r["low"], "high": r["high"]}),
            *(Cell(_size(r[f"bytes_{k}"]), {f"bytes_{k}": r[f"bytes_{k}"]}) for k in ("before", "after")),
        ))  # fmt: skip
    who = words.listed(list(found.left))
    seeds = int(found.table["seeds"].max())
    over = f"Paired over {words.count(seeds, 'seed')}" if seeds > 1 else "One seed: paired over the test samples"
    notes = (
        f"{found.split.capitalize()} {scale.header}; change: without {who}, positive when better. {over}; "
        "colour: clear jointly over the clients.",
        f"Before: trained with {who}. After: trained anew without, from the initial model; polyfed verify repeats it.",
    )
    return Table(f"What the leaving of {who} costs", columns, tuple(rows), notes)


def departure_page(found: "Departure") -> str:
    """The page: what changes for those who stay, on average and for whom clearly, then the table."""
    from polyfed.report.figures import slope_figure
    from polyfed.report.page import Drawing, figure, page, table

    scale, who, said = words.Scale(found.metric), words.listed(list(found.left)), dict[str, str]()
    rows = found.table.to_dict("records")
    for method in dict.fromkeys(r["method"] for r in rows):
        of = [r for r in rows if r["method"] == method]
        mean = next(r for r in of if r["client"] == MEAN)
        limits = f" (95 % interval {scale.range(mean['low'], mean['high'])})" if math.isfinite(mean["low"]) else ""
        text = f"{method}: without {who}, the mean of those who stay changes by {scale.signed(mean['change'])}"
        gain, lose = ([r["client"] for r in of if r["clear"] and r["client"] != MEAN and s * r["change"] > 0]
                      for s in (1, -1))  # fmt: skip
        each = [f"{words.listed(names)} clearly {verb}{'s' * (len(names) == 1)}"
                for names, verb in ((gain, "gain"), (lose, "lose")) if names]  # fmt: skip
        said[method] = (
            f"{text}{scale.difference_unit}{limits}; {' and '.join(each) or 'no client clearly gains or loses'}."
        )
    lead = _ranked(found)[0]
    rest = "".join(f"<li>{escape(text)}</li>" for method, text in said.items() if method != lead)
    others = f'<details><summary>The other methods</summary><ul class="caveats">{rest}</ul></details>' if rest else ""
    top = f'<div class="answer"><p class="headline">{escape(said[lead])}</p>{others}</div>'
    shown = [r for r in rows if r["method"] == lead and r["client"] != MEAN and math.isfinite(r["before"] + r["after"])]
    drawn = Drawing("leave", slope_figure(shown, found.metric, found.split), f"Before and after, {lead}", SLOPE)
    stay, seeds = len({r["client"] for r in rows} - {MEAN}), int(found.table["seeds"].max())
    about = f"{words.count(stay, 'client')} {'stay' if stay > 1 else 'stays'} · {words.count(seeds, 'seed')}"
    body = (figure(drawn) if shown else "") + table(departure_table(found), "leave")
    sections = [("Those who stay", body)]
    return page(f"What does the leaving of {who} cost?", about, top, sections, "polyfed leave")


def _ranked(found: "Departure") -> list[str]:
    """The methods: the one in the lead, others that send messages, the rest, each by its mean before."""
    rows = found.table[found.table["client"] == MEAN]
    merit = {
        r["method"]: (r["method"] == found.lead, r["bytes_before"] > 0, found.metric.merit(r["before"]))
        for r in rows.to_dict("records")
    }
    return sorted(found.table["method"].unique(), key=lambda m: merit.get(m, (False, False, -math.inf)), reverse=True)


def _size(size: float) -> str:
    return words.size(size) if math.isfinite(size) else "–"
