"""Several reports on one page, side by side: answers and first charts on one axis, then the same sites and methods."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from polyfed.base.errors import RunError
from polyfed.report import words
from polyfed.report.forest import limits, said
from polyfed.report.page import about, differing, first_words, page, sites, table, titled
from polyfed.report.pairs import Interval
from polyfed.report.read import read
from polyfed.report.style import write_atomically
from polyfed.report.summary import lines
from polyfed.report.table import Cell, Table
from polyfed.report.verdicts import Study


def write_beside(paths: Sequence[Path], out: Path | None = None) -> tuple[list[Study], Path]:
    """(the studies, their page); `out` None: beside-NAME.html in the first folder. Raises RunError for one line."""
    studies = [read(path) for path in paths]
    for path, study in zip(paths[1:], studies[1:], strict=True):
        one, other = (f"{s.split} {words.Scale(s.metric).name}" for s in (studies[0], study))
        if one != other:
            raise RunError(f"{paths[0]} is judged by {one} and {path} by {other}: they cannot stand side by side")
        if not {*study.names, *study.labels} & {*studies[0].names, *studies[0].labels}:
            raise RunError(f"{paths[0]} and {path} have neither a site nor a method in common")
    target = out if out is not None else paths[0] / f"beside-{paths[1].resolve().name}.html"
    names = _names(paths)
    try:
        write_atomically(target, _page(dict(zip(names, studies, strict=True))).encode())
    except OSError as e:
        raise RunError(f"cannot write {target}: {e.strerror or e}") from None
    return studies, target


def _names(paths: Sequence[Path]) -> list[str]:
    last = [path.resolve().name for path in paths]
    return last if len({*last}) == len(last) else [str(path) for path in paths]


def _page(studies: dict[str, Study]) -> str:
    gains = {name: _gains(study) for name, study in studies.items()}
    overall = [s.verdicts.mean.gains[s.verdicts.lead[0]] for s in studies.values() if s.verdicts.lead]
    ends = limits([g for of in gains.values() for g in of.values()], overall)
    order = [x.name for x in lines(next(iter(studies.values())))[1]]
    cards = "".join(
        f"<section><h2>{escape(name)}</h2><p class='what'>{escape(f'{titled(s)} {about(s)}')}</p>"
        f"{first_words(s, sites(s, ends, order))}</section>"
        for name, s in studies.items()
    )
    scale, first = words.Scale(next(iter(studies.values())).metric), next(iter(studies.values()))
    each = {k: {n: _site(k, g, scale) for n, g in of.items()} for k, of in gains.items()}
    means = {
        k: {m: Cell(scale.number(v.mean()), {k: v.mean()}) for m, v in s.verdicts.grids.items()}
        for k, s in studies.items()
    }
    lead = (f"{k}: {' over '.join(s.verdicts.lead)}" for k, s in studies.items() if s.verdicts.lead)
    note = f"Gain in {scale.gained(first.split)}; {'; '.join(lead)}. Differences between the reports are not tested."
    parts = [
        ("Site by site", table(_told("Site by site", studies, each, note), "sites")),
        (
            f"Methods: {scale.mean}",
            table(_told("Method by method", studies, means, f"{scale.mean}, mean over clients."), "methods"),
        ),
        ("What differs", differing({k: s.of(s.labels[0])[0].config.table() for k, s in studies.items()})),
    ]
    told = f"{words.count(len(studies), 'report')}; the charts share one axis"
    return page(" beside ".join(studies), told, f'<div class="twins">{cards}</div>', parts, "polyfed report")


def _gains(study: Study) -> dict[str, Interval]:
    return study.verdicts.gains(*study.verdicts.lead) if study.verdicts.lead else {}


def _told(title: str, studies: dict[str, Study], cells: dict[str, dict[str, Cell]], note: str) -> Table:
    """A row per site or method, a column per report."""
    names = dict.fromkeys(name for of in cells.values() for name in of)
    rows = tuple((Cell(n), *(cells[k].get(n, Cell("–", {}, "quiet")) for k in studies)) for n in names)
    return Table(title, (f"{title.split()[0].lower()}<", *studies), rows, (note,))


def _site(name: str, gain: Interval, scale: words.Scale) -> Cell:
    verdict = f", {gain.word}" if gain.word else ""
    values = {name: gain.mean, f"{name}_low": gain.low, f"{name}_high": gain.high}
    return Cell(f"{said(gain, scale)}{verdict}", values, {1: "gain", -1: "loss"}.get(gain.sign or 0, ""))
