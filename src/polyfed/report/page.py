"""report.html: one self-contained page that opens offline, the answer first.

Everything from a file is escaped, and the page's Content-Security-Policy forbids it to load anything.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from matplotlib.figure import Figure

from polyfed.base.arguments import checked
from polyfed.base.errors import RunError
from polyfed.base.part import CHECK
from polyfed.base.plugins import sibling
from polyfed.report import words
from polyfed.report.caveats import brier_scores, doubts
from polyfed.report.clients import client_table, gain_table
from polyfed.report.curves import BANDS, metric_figure
from polyfed.report.figures import FEW, POINTS, client_figure, gain_figure, spread_figure
from polyfed.report.forest import Row, chart, prose, said
from polyfed.report.maps import cluster_figure, mixing_figure, partition_figure, representative
from polyfed.report.pairs import Interval, reason
from polyfed.report.probabilities import benefit_figure, calibration_figure, told
from polyfed.report.read import read
from polyfed.report.style import NAMED as DRAWN
from polyfed.report.style import save, to_svg, write_atomically
from polyfed.report.summary import LINES, details, headline, lines
from polyfed.report.table import Cell, Table
from polyfed.report.tables import NAMED, compare_table, cost_table, quantile_table, rand_index, results
from polyfed.report.verdicts import ALONE, Study
from polyfed.runs.numbers import Numbers
from polyfed.runs.schema import CROWD

LISTED = 500  # most clients for which the page holds a row each
FORMS = ("svg", "pdf", "png")
FILES = '<p class="notes"><code>polyfed report FOLDER --figures</code> writes them as SVG, PDF and PNG.</p>'


class Drawing(NamedTuple):
    """A figure of the page: what its files are called, and what stands under it."""

    name: str
    figure: Figure
    title: str
    caption: str


@checked
def write_report(
    paths: str | Path | Iterable[str | Path] | Study, out: str | Path | None = None, figures: bool = False
) -> Path:
    """Write report.html for run and comparison folders.

    Beside it: results.csv with every measured number (see `results`) if there are several runs, and report-clients.csv
    with all clients if there are more than 500.

    Parameters
    ----------
    paths : path, iterable of paths or Study
        Run or comparison folders, or a study from `read`.
    out : path or None
        The file, or a folder for it; None: the first folder given. Files beside a page of another name begin with that
        name.
    figures : bool
        Write every figure as SVG, PDF and PNG too, into the folder report-figures. Where that folder exists they are
        always written, so that they belong to the page.

    Returns
    -------
    Path
        The page.
    """
    study = paths if isinstance(paths, Study) else read(paths)
    target = Path(out) if out is not None else study.paths[0] / "report.html"
    if os.path.isdir(target):
        target = target / "report.html"
    if study.first.n > CROWD:
        shown = [("Clients", table(quantile_table(study), "quantiles")), ("Settings", _settings(study))]
        notes = "".join(f"<p>{escape(note)}</p>" for note in study.first.about.notes)
        write_atomically(target, page(titled(study), about(study), notes, shown, "").encode())
        return target
    listed = target.with_name(f"{target.stem}-clients.csv") if len(study.names) > LISTED else None
    drawn = {"figures": _figures(study), "data": _data_figure(study)}
    folder = target.with_name(f"{target.stem}-figures")
    figures = figures or os.path.isdir(folder)
    try:
        if figures:
            for d in [*drawn["figures"], *drawn["data"]]:
                for form in FORMS:
                    save(d.figure, folder / f"{d.name}.{form}")
        if listed:
            write_atomically(listed, client_table(study, every=True).to("csv").encode())
        if len(study.runs) > 1:
            beside = "results.csv" if target.name == "report.html" else f"{target.stem}-results.csv"
            write_atomically(target.with_name(beside), results(study).to_csv(index=False, lineterminator="\n").encode())
        write_atomically(target, render(study, drawn, listed.name if listed else "", folder.name * figures).encode())
    except OSError as e:
        raise RunError(f"cannot write {target}: {e.strerror or e}") from None
    return target


def render(study: Study, drawn: dict[str, list[Drawing]], listed: str = "", beside: str = "") -> str:
    """The page as text; `listed` is the file with the table of too many clients, `beside` the folder of figures."""
    first = [d for d in drawn["figures"] if d.name == "gain" and len(study.names) <= LINES]  # its rows are the chart's
    figures, data = ("".join(figure(d, beside) for d in drawn[key] if d not in first) for key in ("figures", "data"))
    sections = [
        (f"Clients: {study.split} {words.Scale(study.metric).header}", _clients(study, listed)),
        ("Methods", table(compare_table(study), "methods")),
        ("Figures", f'<div class="figures">{figures}</div>{"" if beside else FILES}' if figures else ""),
        ("Costs", table(cost_table(study), "costs")),
        ("The data", f'<div class="beside facts">{table(_data(study), "data")}{data}</div>'),
        ("Privacy", _privacy(study)),
        ("Settings", _settings(study)),
    ]
    shown = sites(study)
    if first:
        shown = figure(first[0], beside, shown)
    top = first_words(study, shown) + _caveats(study)
    return page(titled(study), about(study), top, sections, _versions(study))


def page(title: str, subtitle: str, top: str, sections: Iterable[tuple[str, str]], footer: str) -> str:
    """A whole page. `top` and the sections are HTML, the rest is text; sections without content are left out."""
    css, script = _part("page.css"), _part("page.js")
    code = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{code}'"
    body = "".join(
        f"<section>{f'<h2>{name}</h2>' if name else ''}\n{content}</section>\n" for name, content in sections if content
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="what">{escape(subtitle)}</p>
</header>
<main>
{top}
{body}</main>
<footer>{escape(footer)}</footer>
<script>{script}</script>
</body>
</html>
"""


@cache
def _part(name: str) -> str:
    return files("polyfed.report").joinpath(name).read_text("utf-8")


def table(shown: Table, name: str) -> str:
    """A table with its CSV and LaTeX, for the buttons that the script puts under it; `name` is the file's."""
    kept = "".join(f'<template class="{f}">{escape(shown.to(f), quote=False)}</template>' for f in ("csv", "latex"))
    return f'<div class="table" data-name="{name}">{shown.to("html")}{kept}</div>\n'


def figure(d: Drawing, beside: str = "", chart: str = "") -> str:
    """A figure with its title, caption and links to its files; one with a `chart` of HTML is there to be downloaded."""
    svg = to_svg(d.figure, f"figure-{d.name}", d.title, d.caption)
    links = [f'<a href="{quote(f"{beside}/{d.name}.{form}")}">{form.upper()}</a>' for form in FORMS if beside]
    title = f"<b>{escape(d.title)}{'' if d.title.endswith('?') else '.'}</b>"
    told = f'{title} {escape(d.caption)} <span class="files">{" ".join(links)}</span>'
    shown = f"{chart}<template>{svg}</template>" if chart else svg
    return f'<figure data-name="{escape(d.name)}">{shown}<figcaption>{told}</figcaption></figure>\n'


def answer(sentence: str, chart: str = "", rest: Iterable[str] = ()) -> str:
    """What a page says first: a sentence, the chart whose title it is, and what it rests on, folded."""
    more = "".join(f"<p>{prose(text)}</p>" for text in rest if text)
    more = f"<details><summary>What this rests on</summary>{more}</details>" if more else ""
    return f'<div class="answer"><p class="headline">{prose(sentence)}</p>\n{chart}{more}</div>\n'


def first_words(study: Study, shown: str) -> str:
    """A study's answer: what it rests on is folded, what makes it doubtful stands open under it."""
    checks = [n for n in _notes(study) if n.startswith(CHECK)]
    more = [d for d in doubts(study) if not any(d.rpartition("? ")[2] in n for n in checks)]  # no repair twice
    listed = "".join(f"<li>{prose(line)}</li>" for line in (*more, *checks))
    doubtful = f'<ul class="caveats notes check">{listed}</ul>\n' if listed else ""
    return answer(headline(study), shown, [" ".join(details(study))]) + doubtful


def sites(study: Study, ends: tuple[float, float] | None = None, order: Sequence[str] = ()) -> str:
    """Every client with its verdict beside its interval, and their mean; of many, those with a clear difference."""
    place, first = {name: k for k, name in enumerate(order)}, study.verdicts.lead
    clients = sorted(lines(study)[1], key=lambda x: place.get(x.name, len(place)))
    if not clients or first is None:
        return ""
    none, scale, mean = Interval(math.nan, math.nan, math.nan, 0), words.Scale(study.metric), study.verdicts.mean
    rows = []
    for x in clients:
        text = x.text + "; not in the mean" * (x.name in study.needs)
        if x.gain and x.gain.known and not x.gain.same:  # signed, as the mean is
            text = "; ".join([said(x.gain, scale), *text.split("; ")[1:]])
        rows.append(Row(x.name, x.verdict, x.gain or none, text))
    gain = mean.gains[first[0]]
    rows.append(Row(f"mean over {study.whom}", gain.word, gain, said(gain, scale), whole=True))
    other = "the own model" if study.role(first[1]) in ALONE else first[1]
    return chart(rows, scale, f"{scale.gained(study.split)}; positive: {first[0]} is better than {other}", ends)


def titled(study: Study) -> str:
    data = str(study.first.about.dataset or study.first.config.data.name or "own data")
    if len(study.labels) == 1:
        return f"{study.labels[0]} on {data}"
    own = any(study.role(label) in ALONE for label in study.labels)
    return f"Does federating pay on {data}?" if own else f"{len(study.labels)} methods on {data}"


def about(study: Study) -> str:
    f, seeds = study.first.about, study.seeds
    seed = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    parts = [words.count(study.first.n, "client"), f.partition or "", seed]
    if len(study.labels) > 1:
        parts.append(f"{len(study.labels)} methods")
    if name := study.first.config.model.get("name"):
        summary = study.first.summary
        size, frozen, own = summary.parameters, summary.frozen_bytes, summary.trained_bytes or 0
        whole = f" trained, {words.size(own)} of {words.size(own + frozen)}" if frozen else ""
        parts.append(f"model {name}" + (f" ({size:,} parameters{whole})" if size else ""))
    return " · ".join(p for p in parts if p)


def _notes(study: Study) -> list[str]:
    return [*dict.fromkeys(n for r in study.runs for n in r.about.notes)]


def _caveats(study: Study) -> str:
    listed = "".join(f"<li>{escape(n)}</li>" for n in _notes(study) if not n.startswith(CHECK))
    fold = "<summary>Keep in mind about these data</summary>"
    return f'<details class="notes">{fold}<ul class="caveats">{listed}</ul></details>' if listed else ""


def _privacy(study: Study) -> str:
    """The privacy of the runs, whom one has to trust and what is not covered; a simulation is called one."""
    labels_of: dict[tuple[str, ...], list[str]] = {}
    for run in study.runs:
        if claims := run.config.privacy_says:
            labels_of.setdefault(tuple(map(str, claims)), []).append(run.label)
    parts = [
        f"<p><b>{escape(', '.join(dict.fromkeys(labels)))}</b></p><ul>"
        + "".join(f"<li>{prose(line)}</li>" for line in lines)
        + "</ul>"
        for lines, labels in labels_of.items()
    ]
    return "<p>A simulation on one machine.</p>" + "".join(parts) if parts else ""


def _clients(study: Study, listed: str) -> str:
    gains = gain_table(study) if study.first.n > 1 else None
    by_method = table(gains, "gains") if gains else ""
    whole = client_table(study, every=not listed)
    shown = table(whole, "clients")
    if listed:
        link = f'<p>All {len(study.names):,} clients: <a href="{quote(listed)}">{escape(listed)}</a></p>'
        return by_method + shown + link
    if len(study.names) <= NAMED:
        return shown + by_method
    return f"{by_method}<details><summary>All {len(study.names)} clients</summary>{shown}</details>"


def _figures(study: Study) -> list[Drawing]:
    metric, first = _upper(words.Scale(study.metric).name), study.verdicts.lead
    seeds = "mean over seeds" if len(study.seeds) > 1 else "one seed"
    if len(study.seeds) > 1 and len(study.labels) <= BANDS:
        seeds += ", band: ± one standard deviation"
    level = " A method that sends nothing is a level line." if any(r.role == "own" for r in study.runs) else ""
    start = " The axis starts where the curves differ; the first rounds may lie outside."
    box = "; box: the quartiles" if len(study.names) > FEW else ""
    dots = f"One dot per client (mean over seeds); thick line: the median{box}."
    figures: list[tuple[str, Figure | None, str, str]] = []
    if first:
        how = "95 % intervals, paired over seeds; in colour: clear jointly over clients, and for the mean."
        if len(study.names) > POINTS:
            how = "Mean over seeds; in colour: clear at 95 %, paired over seeds, jointly over clients."
        if not any(g.known for g in study.verdicts.gains(*first).values()):
            how = "Too few seeds or samples for intervals."
        how += _missing(study, *first)
        figures.append(("gain", gain_figure(study), f"Gain of {first[0]} over {first[1]}", how))
    figures += [*_of_privacy(study), *_of_probabilities(study)]
    figures += [
        ("clients", client_figure(study), "Client by client", "Every method, mean over seeds."),
        ("spread", spread_figure(study), "Spread over clients", dots),
        (
            "rounds",
            metric_figure(study),
            f"{metric} over rounds",
            f"Mean over {'all ' if study.needs else ''}clients; {seeds}.{start}",
        ),
        (
            "bytes",
            metric_figure(study, "bytes"),
            f"{metric} over bytes",
            f"Messages per client; {seeds}.{level}{start}",
        ),
        ("virtual", metric_figure(study, "virtual-time"), f"{metric} over virtual time", f"{_upper(seeds)}.{start}"),
    ]
    for key, draw, title in (("clusters", cluster_figure, "Clusters"), ("mixing", mixing_figure, "Mixing")):
        run = representative(study, key)
        if run is not None:
            figures.append((key, draw(run), f"{title}, {run.label}", _about(run, key)))
    return [Drawing(name, figure, title, text) for name, figure, title, text in figures if figure is not None]


def _of_privacy(study: Study) -> list[tuple[str, Figure | None, str, str]]:
    if not any(label.startswith("epsilon-") for label in study.labels):
        return []
    how = "Difference to the run without privacy: mean over sites with its paired 95 % interval, and each site."
    drawn = sibling("polyfed_privacy.cost", "the figure of privacy").privacy_figure(study)
    return [("privacy", drawn, "What does privacy cost?", how)]


def _of_probabilities(study: Study) -> list[tuple[str, Figure | None, str, str]]:
    """Calibration and decision curves, with what they rest on and the Brier scores in words."""
    curves = told(study)
    scores = {label: of.values() for label in curves if (of := brier_scores(study, label))}
    each = ", ".join(f"{label} {words.figures(float(np.mean([*of])))}" for label, of in scores.items())
    over = f"Test samples of all clients{' and seeds' if len(study.seeds) > 1 else ''}"
    lead = study.verdicts.lead[0] if study.verdicts.lead else next(iter(curves), "")
    tenths = f"{over}, in groups of about the same probability; on the line: as predicted. "
    tenths += f"Brier score (lower is better): {each}."
    if 1 < len(study.names) <= DRAWN:
        tenths += f" Diamonds: {lead} at every client."
    benefit = f"{over}. Right alarms less false ones, at the odds of the probability from which one would act; grey: "
    benefit += "acting on all. A curve that is the highest at your threshold is the one to decide by."
    return [
        ("calibration", calibration_figure(study), "Are the probabilities right?", tenths),
        ("benefit", benefit_figure(study), "Is deciding by them worth it?", benefit),
    ]


def _missing(study: Study, method: str, reference: str) -> str:
    """Clients of the gain figure without an interval, and the reason."""
    gains = {n: g for n, g in study.verdicts.gains(method, reference).items() if math.isfinite(g.mean)}
    if all(g.known for g in gains.values()) or not any(g.known for g in gains.values()):
        return ""
    whose = dict[str, list[str]]()
    for name, gain in gains.items():
        if gain.why:
            whose.setdefault(reason(gain.why), []).append(name)
    return f" No interval: {'; '.join(f'{words.listed(names)} ({why})' for why, names in whose.items())}."


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _about(run: Numbers, key: str) -> str:
    score = rand_index(run) if key == "clusters" else None
    text = f"Seed {run.seed}."
    if key == "mixing":
        text += " Row i: the weights of the other clients' models in client i's."
    return text + (f" Adjusted Rand index against the truth: {score:.2f}." if score is not None else "")


def _data(study: Study) -> Table:
    f = study.first.about
    total = {s: int(study.first.samples(s).sum()) for s in ("train", "validation", "test")}
    facts = {
        "data set": f.dataset,
        "partition": f.partition,
        "classes": f.classes,
        "clients": study.first.n,
        "samples": ", ".join(f"{v:,} {s}" for s, v in total.items() if v),
        "true clusters": len(set(f.clusters)) if f.clusters else None,
    }
    rows = tuple((Cell(k), Cell(str(v))) for k, v in facts.items() if v is not None)
    return Table("The data", ("property<", "value<"), rows)


def _data_figure(study: Study) -> list[Drawing]:
    which = "Training samples per class, by size or shade, under all samples of the client."
    if study.first.about.classes is None:
        which = "Samples of every client."
    if len(study.seeds) > 1:
        which += f" Seed {study.first.seed}; the split differs between seeds."
    drawn = [("partition", partition_figure(study), "What each client holds", which)]
    audit = study.first.about.audit
    columns, flagged = {n: a.sites for n, a in audit.items()}, {n: a.flagged for n, a in audit.items()}
    which = "Numbers: median, the middle half and the middle nine tenths; values: shares of rows. In orange: sites of "
    which += f"which the notes above say \u201c{CHECK.rstrip(': ')}\u201d."
    if audit:
        figure = sibling("polyfed_audit.figures", "the audit's figure").distribution_figure(columns, flagged, across=2)
        drawn.append(("audit", figure, "Columns that differ between sites", which))
    return [Drawing(name, figure, title, text) for name, figure, title, text in drawn if figure is not None]


def _settings(study: Study) -> str:
    """Show what differs between the runs as a table, then every method's whole configuration folded away."""
    parts = [differing({label: study.of(label)[0].config.table() for label in study.labels})]
    seeds = {label: [r.seed for r in study.of(label)] for label in study.labels}
    for label in study.labels:
        text = (study.of(label)[0].folder / "config.toml").read_text("utf-8")
        told = f"{label}: full configuration (seed {seeds[label][0]})"
        parts.append(f"<details><summary>{escape(told)}</summary><pre>{escape(text)}</pre></details>")
    return "\n".join(parts)


def differing(configs: dict[str, dict[str, Any]]) -> str:
    """A table of the settings that differ between configurations; "" without one."""
    flat = {name: _flat(config) for name, config in configs.items()}
    keys = dict.fromkeys(k for f in flat.values() for k in f)
    differ = [k for k in keys if len({json.dumps(f.get(k), default=str) for f in flat.values()}) > 1]
    differ = [k for k in differ if k != "seed" and not k.startswith(("plan.", "versions.", "packages", "privacy-says"))]
    rows = tuple((Cell(k), *(Cell(_value(f.get(k))) for f in flat.values())) for k in differ)
    return table(Table("What differs", ("setting<", *(f"{k}<" for k in flat)), rows), "settings") if rows else ""


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _value(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _versions(study: Study) -> str:
    versions = [r.config.versions for r in study.runs]
    keys = dict.fromkeys(k for v in versions for k in v)
    told = [f"{k} {' / '.join(dict.fromkeys(str(v[k]) for v in versions if k in v))}" for k in keys]
    runs = words.count(len(study.runs), "run")
    methods = len(study.verdicts.grids)
    return " · ".join([f"{runs}, {words.count(methods, 'method')} with results", *told])
