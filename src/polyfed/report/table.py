"""The table that every report is made of: cells hold the text to read and the numbers behind it, in five forms."""

import csv
import html
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError
from polyfed.base.text import marked

FORMATS = ("rich", "html", "markdown", "latex", "csv")
NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?( ?±.*| ?%)?$")  # not a formula, whatever its sign
WIDE = 10  # columns beyond which a page sets a table tighter
STYLES = {"best": "bold", "gain": "green", "loss": "red", "quiet": "dim", "": ""}


@dataclass(frozen=True)
class Cell:
    """A cell as shown."""

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)  # columns of the CSV; rows are sorted by the first
    mark: str = ""  # best, gain, loss or quiet

    @property
    def key(self) -> Any:
        return next(iter(self.values.values()), self.text)


@checked
@dataclass(frozen=True)
class Table:
    """A table of text, with the numbers behind it.

    Parameters
    ----------
    title : str
        Caption.
    columns : tuple of str
        Headers. One that ends in "<" is left-aligned and shown without the mark; others are right-aligned.
    rows : tuple of tuple of Cell
        A cell per column.
    notes : tuple of str
        Notes under the table in every form but CSV.
    groups : tuple of (str, int)
        Headers over the columns, each with the number of columns it spans; "" for none.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    groups: tuple[tuple[str, int], ...] = ()

    def _repr_html_(self) -> str:
        return self.to("html")

    @overload
    def to(self, form: Literal["rich"]) -> RichTable: ...
    @overload
    def to(self, form: Literal["html", "markdown", "latex", "csv"]) -> str: ...
    @overload
    def to(self, form: str) -> RichTable | str: ...
    def to(self, form: str) -> RichTable | str:
        """The table in one of its forms.

        Parameters
        ----------
        form : str
            "rich", "html", "markdown", "latex" (needs booktabs) or "csv" (full precision, shares between 0 and 1).

        Returns
        -------
        rich.table.Table or str
            A table for the terminal, or text.
        """
        if form not in FORMATS:
            raise ConfigError(f"format {form!r}: expected one of {', '.join(FORMATS)}")
        return getattr(self, f"_{form}")()

    def __rich__(self) -> RichTable:
        return self._rich()

    @property
    def headers(self) -> list[str]:
        """The columns' headers as shown where groups cannot be: the group first."""
        over = [f"{title}: " if title else "" for title, span in self.groups for _ in range(span)]
        return [
            f"{g}{c.removesuffix('<')}" for g, c in zip(over or [""] * len(self.columns), self.columns, strict=True)
        ]

    def _left(self, column: int) -> bool:
        return self.columns[column].endswith("<")

    def _rich(self) -> RichTable:
        table = RichTable(title=Text(self.title), box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
        table.caption_justify, table.pad_edge = "left", False
        if self.notes:
            table.caption = Text("\n".join(self.notes))
        for i, header in enumerate(self.headers):
            broken = header.replace(" ", "\n", 1)  # so that more columns fit a narrow terminal
            table.add_column(Text(broken), justify="left" if self._left(i) else "right", no_wrap=i <= 1)
        for row in self.rows:
            table.add_row(*(Text(c.text, style=STYLES[c.mark]) for c in row))
        return table

    def _html(self) -> str:
        head = "".join(
            f'<th scope="col"{_class("left" if self._left(i) else "")}>{html.escape(h).replace(" %", "&nbsp;%")}</th>'
            for i, h in enumerate(self.headers)
        )
        body = "".join(
            "<tr>" + "".join(self._html_cell(i, cell) for i, cell in enumerate(row)) + "</tr>\n" for row in self.rows
        )
        notes = "".join(f"<p>{html.escape(n)}</p>" for n in self.notes)
        if len(self.notes) > 2:
            notes = f"<details><summary>How to read this table</summary>{notes}</details>"
        label, wide = html.escape(self.title), _class("wide" if len(self.columns) > WIDE else "")
        return (
            f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">'
            f"<table{wide}><caption>{label}</caption>"
            f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
            + (f'<div class="notes">{notes}</div>' if notes else "")
        )

    def _html_cell(self, column: int, cell: Cell) -> str:
        classes = " ".join(c for c in ("left" if self._left(column) else "", cell.mark) if c)
        tag = "th" if column == 0 else "td"
        scope = ' scope="row"' if column == 0 else ""
        value = html.escape(str(_plain(cell.key)))
        text = html.escape(cell.text).replace(" to ", " to " if self._left(column) else "&nbsp;to&nbsp;")
        return f'<{tag}{scope}{_class(classes)} data-v="{value}">{text}</{tag}>'

    def _markdown(self) -> str:
        rule = [":--" if self._left(i) else "--:" for i in range(len(self.columns))]
        rows = [[f"**{_md(c.text)}**" if c.mark == "best" else _md(c.text) for c in row] for row in self.rows]
        lines = ["| " + " | ".join(cells) + " |" for cells in ([_md(h) for h in self.headers], rule, *rows)]
        notes = [f"\n{_md(n)}" for n in self.notes]
        return "\n".join([f"**{_md(self.title)}**\n", *lines, *notes]) + "\n"

    def _latex(self) -> str:
        align = "".join("l" if self._left(i) else "r" for i in range(len(self.columns)))
        rows = [[rf"\textbf{{{_tex(c.text)}}}" if c.mark == "best" else _tex(c.text) for c in row] for row in self.rows]
        lines = [
            "% needs \\usepackage{booktabs}",
            *(f"% {' '.join(note.split())}" for note in (self.title, *self.notes)),
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            *self._latex_groups(),
            " & ".join(_tex(c.removesuffix("<")) for c in self.columns) + r" \\",
            r"\midrule",
            *(" & ".join(cells) + r" \\" for cells in rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join(lines) + "\n"

    def _latex_groups(self) -> list[str]:
        if not self.groups:
            return []
        ends = np.cumsum([span for _, span in self.groups])
        heads = " & ".join(rf"\multicolumn{{{span}}}{{c}}{{{_tex(title)}}}" for title, span in self.groups)
        rules = [
            rf"\cmidrule(lr){{{end - span + 1}-{end}}}" for (t, span), end in zip(self.groups, ends, strict=True) if t
        ]
        return [rf"{heads} \\", " ".join(rules)]

    def _csv(self) -> str:
        rows = []
        for row in self.rows:
            record: dict[str, Any] = {}
            for header, cell in zip(self.headers, row, strict=True):
                record |= cell.values or {header: cell.text}
            rows.append({_harmless(k): _harmless(_plain(v)) for k, v in record.items()})
        keys = list(dict.fromkeys(k for row in rows for k in row))
        out = io.StringIO()
        writer = csv.DictWriter(out, keys, restval="", lineterminator="\n")
        writer.writerow({k: marked(k) for k in keys})
        writer.writerows(rows)
        return out.getvalue()


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    if isinstance(value, str):
        return value if NUMBER.match(value) else marked(value)
    return "" if value is None else value


def _harmless(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula, made text again."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _md(text: str) -> str:
    for c in ("\\", "|", "*", "_", "`", "[", "]"):
        text = text.replace(c, "\\" + c)
    return html.escape(text, quote=False).replace("\n", " ")


TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "–": "--", "<": "$<$",
    ">": "$>$", "×": r"$\times$", "…": r"\ldots{}", "\n": " ",
}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(TEX.get(c, c) for c in text)
