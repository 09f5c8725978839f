"""A federated regression as one HTML page, in the style of the reports: the answer, the coefficients, the sites."""

from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from polyfed.base.errors import RunError
from polyfed.report import Table, words
from polyfed.report.page import Drawing, figure, page, table
from polyfed.report.style import BLUE, INK, QUIET, canvas, legend_name, styled, write_atomically
from polyfed.report.table import Cell
from polyfed_clinical.summary import ClinicalFit

DRAWN = 60  # most coefficients in the figure


def write_page(fit: ClinicalFit, path: str | Path) -> Path:
    """Write a regression as an HTML page.

    Parameters
    ----------
    fit : ClinicalFit
        From `fit`.
    path : path
        Of the page; what is there is replaced in one step.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    RunError
        The file cannot be written.
    """
    title = f"{fit.model[:1].upper()}{fit.model[1:]} regression over {words.count(len(fit.sites), 'site')}"
    patients, rounds = f"{fit.sites['patients'].sum():,} patients", words.count(fit.rounds, "exchange")
    drawn = forest_figure(fit)
    caption = (
        f"{100 * fit.level:g} % intervals; the meta-analysis combines the sites' own fits by their inverse variances."
    )
    name = f"{fit.ratio[:1].upper()}{fit.ratio[1:]}s" if fit.ratio else "Coefficients"
    sections = [
        (name, table(fit.table(), "coefficients")),
        ("", figure(Drawing("forest", drawn, name, caption)) if drawn is not None else ""),
        ("Sites", table(_sites(fit), "sites")),
    ]
    top = f'<div class="answer"><p class="headline">{escape(headline(fit))}</p></div>'
    text = page(title, f"{patients} · {fit.method} · {rounds}", top, sections, "polyfed regress")
    try:
        write_atomically(Path(path), text.encode())
    except OSError as e:
        raise RunError(f"cannot write {path}: {(e.strerror or str(e)).lower()}") from None
    return Path(path)


def headline(fit: ClinicalFit) -> str:
    """Which coefficients differ from none, one by one, and for which the sites disagree; nothing of a method that has
    not arrived."""
    if not fit.arrived:
        return f"{fit.unfinished[:1].upper()}{fit.unfinished[1:]}."
    what, null = (fit.ratio, 1) if fit.ratio else ("coefficient", 0)
    rows = fit.coefficients.drop(index="intercept", errors="ignore")
    clear = rows[(rows["lower"] > 0) | (rows["upper"] < 0)].sort_values("p")
    keys = ("ratio", "ratio_lower", "ratio_upper") if fit.ratio else ("estimate", "lower", "upper")
    each = []
    for coefficient, row in clear.to_dict("index").items():
        value, low, high = (words.figures(row[k]) for k in keys)
        each.append(f"{coefficient} {value} ({low} to {high})")
    several = "s differ" if len(rows) != 1 else " differs"
    text = (
        f"{len(clear) or 'None'} of {len(rows)} {what}{several} from {null} at {100 * fit.level:g} %, each on its own"
    )
    text += f": {words.listed(each, 5)}." if each else "."
    differ = fit.heterogeneity["p"] < 0.05
    if differ.any():
        text += (
            f" The sites disagree on {words.listed([str(x) for x in differ.index[differ]], 5)} (Cochran's Q, p < 0.05)."
        )
    return text


def forest_figure(fit: ClinicalFit) -> Figure | None:
    """Every coefficient, or ratio on a logarithmic axis, with its interval; beside it the meta-analysis. None for more
    than 60 coefficients, or none with a finite interval."""
    keys = ("ratio", "ratio_lower", "ratio_upper") if fit.ratio else ("estimate", "lower", "upper")
    found = [of.drop(index="intercept", errors="ignore")[list(keys)] for of in (fit.coefficients, fit.meta)]
    names = [str(n) for n in found[0].index]
    if not 0 < len(names) <= DRAWN or not _finite(found[0]).any():
        return None
    with styled():
        drawn, (axes,) = canvas(height=1.3 + 0.3 * len(names))
        for k, (of, colour, label, face) in enumerate(
            zip(found, (BLUE, QUIET), ("federated", "meta-analysis"), (BLUE, "none"), strict=True)
        ):
            shown = _finite(of)
            place = np.flatnonzero(shown) + (0.0 if k == 0 else 0.28)
            value, low, high = (of[key].to_numpy(dtype=float)[shown] for key in keys)
            axes.hlines(place, low, high, color=colour, linewidth=1.6 - 0.6 * k)
            axes.scatter(value, place, s=26 - 8 * k, color=colour, facecolor=face, label=label, zorder=3)
        axes.axvline(1 if fit.ratio else 0, color=INK, linewidth=0.9)
        if fit.ratio:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(names)), [legend_name(n) for n in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(fit.ratio or "coefficient")
        drawn.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return drawn


def _finite(of: Any) -> np.ndarray:
    values = of.to_numpy(dtype=float)
    return np.isfinite(values).all(1) & (np.abs(values) < 1e4).all(1) & (np.abs(values) > 1e-4).any(1)


def _sites(fit: ClinicalFit) -> Table:
    rows, price = [], fit.bytes.to_dict("index")
    for name, row in fit.sites.to_dict("index").items():
        counts = [Cell(f"{row[k]:,}", {k: row[k]}) for k in ("patients", "events") if k in row]
        own = Cell("yes" if row["meta"] else f"no: {row['why']}", {"own_fit": bool(row["meta"])})
        moved = [Cell(words.size(v), {f"{way}_bytes": v}) for way, v in price[name].items()]
        rows.append((Cell(str(name), {"site": name}), *counts, own, *moved))
    head = [k for k in ("patients", "events") if k in fit.sites]
    return Table("Sites", ("site<", *head, "fit of its own<", "down", "up"), tuple(rows))
