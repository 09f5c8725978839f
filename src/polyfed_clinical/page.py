"""A federated regression as one HTML page, in the style of the reports: the answer, the coefficients, the sites."""

from pathlib import Path

import numpy as np

from polyfed.base.errors import RunError
from polyfed.report import Table, words
from polyfed.report.page import Drawing, answer, figure, page, table
from polyfed.report.style import write_atomically
from polyfed.report.table import Cell
from polyfed_clinical.figures import curve_figure, forest_figure, site_figure
from polyfed_clinical.summary import ClinicalFit

FORESTS = 12  # most coefficients that have a forest plot, those first on which sites disagree most


def write_page(fit: ClinicalFit, path: str | Path) -> Path:
    """Write a regression as an HTML page, replaced in one step."""
    title = f"{fit.model[:1].upper()}{fit.model[1:]} regression over {words.count(len(fit.sites), 'site')}"
    patients, rounds = f"{fit.totals['patients']:,} patients", words.count(fit.rounds, "exchange")
    caption = (
        f"{100 * fit.level:g} % intervals; the meta-analysis combines the sites' own fits by their inverse variances."
    )
    name = f"{fit.ratio[:1].upper()}{fit.ratio[1:]}s" if fit.ratio else "Coefficients"
    drawn = [Drawing("forest", all_of_them, name, caption) for all_of_them in [forest_figure(fit)] if all_of_them]
    told = f"Against the value at the middle knot, with {100 * fit.level:g} % intervals; triangles: the knots."
    drawn += [
        Drawing(f"curve-{k}", curve_figure(fit, column), f"The curve of {column}", told)
        for k, column in enumerate(fit.knots)
    ]
    sections = [
        (name, f'<div class="beside">{"".join(map(figure, drawn))}{table(fit.table(), "coefficients")}</div>'),
        ("Site by site", _grid(_forests(fit))),
        ("Sites", table(_sites(fit), "sites")),
    ]
    top = answer(headline(fit))
    text = page(title, f"{patients} · {fit.method} · {rounds}", top, sections, "polyfed regress")
    try:
        write_atomically(Path(path), text.encode())
    except OSError as e:
        raise RunError(f"cannot write {path}: {(e.strerror or str(e)).lower()}") from None
    return Path(path)


def headline(fit: ClinicalFit) -> str:
    """Coefficients that differ from none, one by one, and those on which the sites disagree; "" before convergence."""
    if not fit.arrived:
        return f"{fit.unfinished[:1].upper()}{fit.unfinished[1:]}."
    effect, null = (fit.ratio, 1) if fit.ratio else ("coefficient", 0)
    rows = fit.coefficients.loc[fit.single]
    clear = rows[(rows["lower"] > 0) | (rows["upper"] < 0)].sort_values("p")
    keys = ("ratio", "ratio_lower", "ratio_upper") if fit.ratio else ("estimate", "lower", "upper")
    each = []
    for coefficient, row in clear.to_dict("index").items():
        value, low, high = (words.figures(row[k]) for k in keys)
        each.append(f"{coefficient} {value} ({low} to {high})")
    several = "s differ" if len(rows) != 1 else " differs"
    text = (
        f"{len(clear) or 'None'} of {len(rows)} {effect}{several} from {null} at {100 * fit.level:g} %, each on its own"
    )
    text += f": {words.listed(each, 5)}." if each else "."
    beside = [name for name in fit.coefficients.index if name == "intercept"]  # of sites', the likelihood ratio speaks
    differ = fit.heterogeneity.loc[[*beside, *fit.single], "p"] < 0.05
    if differ.any():
        text += (
            f" The sites disagree on {words.listed([str(x) for x in differ.index[differ]], 5)} (Cochran's Q, p < 0.05)."
        )
    return text


def _grid(drawn: list[Drawing]) -> str:
    return f'<div class="figures">{"".join(map(figure, drawn))}</div>' if drawn else ""


def _forests(fit: ClinicalFit) -> list[Drawing]:
    """A forest plot per coefficient, those first on which the sites disagree most."""
    differ = fit.heterogeneity.loc[fit.single].to_dict("index")
    order = sorted(differ, key=lambda name: differ[name]["p"])[: 0 if fit.own.empty else FORESTS]
    more = f" Of {len(differ)} coefficients, those {FORESTS} on which sites differ most." * (len(differ) > FORESTS)
    drawings = []
    for k, name in enumerate(order):
        drawn, row = site_figure(fit, str(name)), differ[name]
        if drawn is not None:
            between = f"I² {100 * row['I2']:.0f} %, p of Q {row['p']:.3f}." if np.isfinite(row["I2"]) else ""
            told = f"{between} Sites by their own fits (patients).{more * (k == 0)}"
            drawings.append(Drawing(f"forest-{k}", drawn, str(name), told))
    return drawings


def _sites(fit: ClinicalFit) -> Table:
    rows, price = [], fit.bytes.to_dict("index")
    head = [k for k in ("patients", "events", "left_out") if k in fit.sites]
    baseline = {"logistic": "baseline risk", "poisson": "baseline rate", "linear": "baseline"}.get(fit.model, "")
    for name, row in fit.sites.to_dict("index").items():
        cells = [Cell(f"{row[k]:,}", {k: row[k]}) for k in head]
        if "baseline" in row:
            shown = f"{100 * row['baseline']:.1f} %" if fit.model == "logistic" else words.figures(row["baseline"])
            cells.append(Cell(shown if np.isfinite(row["baseline"]) else "left out", {"baseline": row["baseline"]}))
            cells.append(Cell(words.figures(row["intercept"]), {k: row[k] for k in ("intercept", "intercept_se")}))
        own = (
            Cell("yes" if row["meta"] else f"no: {row['why']}", {"own_fit": bool(row["meta"])})
            if "meta" in row
            else Cell("not known")
        )
        moved = [Cell(words.size(v), {f"{way}_bytes": v}) for way, v in price[name].items()]
        rows.append((Cell(str(name), {"site": name}), *cells, own, *moved))
    base = (baseline, "intercept") if "baseline" in fit.sites else ()
    notes = ("Baseline: expected at the site for a patient at the means of all columns.",) if base else ()
    columns = ("site<", *(k.replace("_", " ") for k in head), *base, "fit of its own<", "down", "up")
    return Table("Sites", columns, tuple(rows), notes)
