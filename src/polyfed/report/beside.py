"""Several reports on one page, side by side: answers and first charts on one axis, then the same sites and methods."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from polyfed.base.errors import RunError
from polyfed.report import words
from polyfed.report.forest import limits
from polyfed.report.page import about, answer, differing, page, sites, table, titled
from polyfed.report.pairs import Interval
from polyfed.report.read import read
from polyfed.report.style import write_atomically
from polyfed.report.summary import details, headline, lines
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
    means = [s.verdicts.mean.gains[s.verdicts.lead[0]] for s in studies.values() if s.verdicts.lead]
    ends = limits([g for of in gains.values() for g in of.values()], means)
    order = [x.name for x in lines(next(iter(studies.values())))[1]]
    cards = "".join(
        f"<section><h2>{escape(name)}</h2><p class='what'>{escape(f'{titled(s)} {about(s)}')}</p>"
        f"{answer(headline(s), sites(s, ends, order), [' '.join(details(s))])}</section>"
        for name, s in studies.items()
    )
    parts = [
        ("Site by site", table(_sites(studies, gains), "sites")),
        ("Methods", table(_methods(studies), "methods")),
        ("What differs", differing({k: s.of(s.labels[0])[0].config.table() for k, s in studies.items()})),
    ]
    told = f"{words.count(len(studies), 'report')}; the charts share one axis"
    return page(" beside ".join(studies), told, f'<div class="twins">{cards}</div>', parts, "polyfed report")


def _gains(study: Study) -> dict[str, Interval]:
    return study.verdicts.gains(*study.verdicts.lead) if study.verdicts.lead else {}


def _sites(studies: dict[str, Study], gains: dict[str, dict[str, Interval]]) -> Table:
    scale, rows = words.Scale(next(iter(studies.values())).metric), []
    none = Cell("–", {}, "quiet")
    for site in dict.fromkeys(n for s in studies.values() for n in s.names):
        cells = [Cell(site)]
        for name in studies:
            g = gains[name].get(site)
            known = g is not None and g.known
            cells += [
                Cell(scale.signed(g.mean), {f"{name}: gain": g.mean}, {1: "gain", -1: "loss"}.get(g.sign or 0, ""))
                if g is not None else none,
                Cell(scale.range(g.low, g.high)) if g is not None and known else none,
                Cell(g.word or "–", {}, "quiet") if g is not None else none,
            ]  # fmt: skip
        rows.append(tuple(cells))
    lead = (f"{k}: {' over '.join(s.verdicts.lead)}" for k, s in studies.items() if s.verdicts.lead)
    note = f"Gain in {scale.gained(next(iter(studies.values())).split)}; {'; '.join(lead)}. Each by its own runs: "
    note += "differences between the reports are not tested."
    columns = ("site<", *(c for _ in studies for c in ("gain", "95 % interval", "verdict<")))
    return Table("Site by site", columns, tuple(rows), (note,), (("", 1), *((name, 3) for name in studies)))


def _methods(studies: dict[str, Study]) -> Table:
    scale, rows = words.Scale(next(iter(studies.values())).metric), []
    for label in dict.fromkeys(k for s in studies.values() for k in s.verdicts.ranked):
        grids = {name: s.verdicts.grids.get(label) for name, s in studies.items()}
        values = {name: grid.mean() for name, grid in grids.items() if grid is not None}
        shown = (
            Cell(scale.number(values[k]), {k: values[k]}) if k in values else Cell("–", {}, "quiet") for k in studies
        )
        rows.append((Cell(label), *shown))
    columns = ("method<", *(f"{name}: {scale.header}" for name in studies))
    return Table("Methods", columns, tuple(rows), ("Mean over clients and seeds; –: not in that report.",))
