"""report.html: one self-contained page that opens offline. The answer first, then what it rests on.

Everything that came from a file is escaped, and the page forbids itself (Content-Security-Policy) to load anything.
"""

import base64
import hashlib
import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from matplotlib.figure import Figure

from polyfed.core.errors import RunError
from polyfed.report import pairs, words
from polyfed.report.clients import client_table, gain_table, lead
from polyfed.report.figures import FEW, POINTS, client_figure, gain_figure, metric_figure, representative, spread_figure
from polyfed.report.pictures import cluster_figure, mixing_figure, partition_figure
from polyfed.report.read import ALONE, RunFiles, Study, read
from polyfed.report.style import to_svg, write_atomically
from polyfed.report.summary import answer
from polyfed.report.table import Cell, Table
from polyfed.report.tables import NAMED, compare_table, cost_table, rand_index

LISTED = 500  # clients up to which the page holds a row for each


def write_report(paths: str | Path | Iterable[str | Path], out: str | Path | None = None) -> Path:
    """Write report.html for run and comparison folders, and return its path.

    With more than 500 clients the table of all of them is report-clients.csv beside it.

    out: the file, or a folder to put it in; None: into the first folder given
    Raises RunError when a folder cannot be read or the file cannot be written.
    """
    study = read(paths)
    target = Path(out) if out is not None else study.paths[0] / "report.html"
    if target.is_dir():
        target = target / "report.html"
    listed = target.with_name(f"{target.stem}-clients.csv") if len(study.names) > LISTED else None
    page = render(study, listed.name if listed else "")
    try:
        if listed:
            write_atomically(listed, client_table(study, "csv", every=True).encode())
        write_atomically(target, page.encode())
    except OSError as e:
        raise RunError(f"cannot write {target}: {e.strerror or e}") from None
    return target


def render(study: Study, listed: str = "") -> str:
    """The page as text. listed: the file beside it that holds the table of all clients, where they are too many."""
    sections = [
        ("Methods", compare_table(study).to("html")),
        ("Clients", _clients(study, listed)),
        ("Figures", _figures(study)),
        ("Costs", cost_table(study).to("html")),
        ("The data", _data(study)),
        ("Settings", _settings(study)),
    ]
    return shell(_title(study), _what(study), answer(study), _caveats(study), sections, _versions(study))


def shell(title: str, what: str, lead: str, caveats: str, sections: Iterable[tuple[str, str]], footer: str) -> str:
    """A page: title, what it is about, the answer, what to keep in mind (HTML), sections (name, HTML), a last line."""
    css = files("polyfed.report").joinpath("page.css").read_text(encoding="utf-8")
    script = files("polyfed.report").joinpath("page.js").read_text(encoding="utf-8")
    code = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{code}'"
    body = "".join(f"<section><h2>{name}</h2>\n{content}</section>\n" for name, content in sections if content)
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
<p class="what">{escape(what)}</p>
</header>
<main>
<p class="answer">{escape(lead)}</p>
{caveats}
{body}</main>
<footer>{escape(footer)}</footer>
<script>{script}</script>
</body>
</html>
"""


def _title(study: Study) -> str:
    data = str(study.first.federation.get("dataset") or study.first.config.get("data", {}).get("name") or "own data")
    if len(study.labels) == 1:
        return f"{study.labels[0]} on {data}"
    own = any(study.role(label) in ALONE for label in study.labels)
    return f"Does federating pay on {data}?" if own else f"{len(study.labels)} methods on {data}"


def _what(study: Study) -> str:
    f, seeds = study.first.federation, study.seeds
    seed = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    parts = [words.count(study.first.n, "client"), str(f.get("partition") or ""), seed]
    if len(study.labels) > 1:
        parts.append(f"{len(study.labels)} methods")
    if study.first.config.get("model", {}).get("name"):
        size = study.first.summary.get("parameters")
        parts.append(f"model {study.first.config['model']['name']}" + (f" ({size:,} parameters)" if size else ""))
    return " · ".join(p for p in parts if p)


def _notes(study: Study) -> list[str]:
    return list(dict.fromkeys(str(n) for r in study.runs for n in r.federation.get("notes") or []))


def _caveats(study: Study) -> str:
    notes = _notes(study)
    if not notes:
        return ""
    items = "".join(f"<li>{escape(n)}</li>" for n in notes)
    return f'<p class="notes">Keep in mind about these data:</p><ul class="caveats notes">{items}</ul>'


def _clients(study: Study, listed: str) -> str:
    parts = [t.to("html") for t in (gain_table(study) if study.first.n > 1 else None, client_table(study)) if t]
    if listed:
        parts.append(f'<p>All {len(study.names):,} clients: <a href="{quote(listed)}">{escape(listed)}</a></p>')
    elif len(study.names) > NAMED:
        table = client_table(study, every=True)
        bare = Table("All clients", table.columns, table.rows)
        parts.append(f"<details><summary>All {len(study.names)} clients</summary>{bare.to('html')}</details>")
    return '<div style="height:1rem"></div>\n'.join(parts)


def _figures(study: Study) -> str:
    metric, first = _upper(words.Scale(study.metric).name), lead(study)
    seeds = "mean over seeds, band: ± one standard deviation" if len(study.seeds) > 1 else "one seed"
    level = " A method that sends nothing is a level line." if any(r.role == "own" for r in study.runs) else ""
    box = "; box: the quartiles" if len(study.names) > FEW else ""
    dots = f"One dot per client (mean over seeds); thick line: the median{box}."
    drawn: list[tuple[str, Figure | None, str, str]] = [
        ("rounds", metric_figure(study), f"{metric} against rounds", f"Mean over clients; {seeds}."),
        ("bytes", metric_figure(study, "bytes"), f"{metric} against bytes", f"Messages per client; {seeds}.{level}"),
        ("virtual", metric_figure(study, "virtual-time"), f"{metric} against virtual time", f"{_upper(seeds)}."),
        ("spread", spread_figure(study), "Spread over clients", dots),
        ("clients", client_figure(study), "Client by client", "Every method, mean over seeds."),
    ]
    if first:
        how = (
            "95 % interval, paired over seeds; filled: clear jointly over clients."
            if len(study.seeds) > 1
            else "One seed: no intervals."
        )
        if len(study.seeds) > 1 and len(study.names) > POINTS:
            how = "Mean over seeds; filled: clear at 95 %, paired over seeds, jointly over clients."
        drawn.append(("gain", gain_figure(study), f"Gain of {first[0]} over {first[1]}", how))
    for key, draw, title in (("clusters", cluster_figure, "Clusters"), ("mixing", mixing_figure, "Mixing")):
        run = representative(study, key)
        if run is not None:
            drawn.append((key, draw(run), f"{title}, {run.label}", _about(run, key)))
    shown = "".join(_figure(*d) for d in drawn if d[1] is not None)
    return f'<div class="figures">{shown}</div>' if shown else ""


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _about(run: RunFiles, key: str) -> str:
    score = rand_index(run) if key == "clusters" else None
    text = f"Seed {run.seed}."
    if key == "mixing":
        text += " Row i: the weights with which client i takes the models of the others."
    return text + (f" Adjusted Rand index against the truth: {score:.2f}." if score is not None else "")


def _figure(name: str, figure: Any, title: str, caption: str) -> str:
    svg = to_svg(figure, f"figure-{name}", title, caption)
    return f"<figure>{svg}<figcaption><b>{escape(title)}.</b> {escape(caption)}</figcaption></figure>\n"


def _data(study: Study) -> str:
    f = study.first.federation
    total = {s: int(study.first.samples(s).sum()) for s in ("train", "validation", "test")}
    facts = {
        "data set": f.get("dataset"),
        "partition": f.get("partition"),
        "classes": f.get("classes"),
        "clients": study.first.n,
        "samples": ", ".join(f"{v:,} {s}" for s, v in total.items() if v),
        "true clusters": len(set(f["clusters"])) if f.get("clusters") else None,
    }
    rows = tuple((Cell(k), Cell(str(v))) for k, v in facts.items() if v is not None)
    table = Table("The data", ("property<", "value<"), rows).to("html")
    which = "Training samples per class, by size or shade, under all samples of the client."
    if f.get("classes") is None:
        which = "Samples of every client."
    if len(study.seeds) > 1:
        which += f" Seed {study.first.seed}; the split differs between seeds."
    figure = partition_figure(study)
    return (
        f'<div class="figures"><div>{table}</div>{_figure("partition", figure, "What each client holds", which)}</div>'
    )


def _settings(study: Study) -> str:
    """What differs between the runs as a table, then every method's whole configuration folded away."""
    flat = {label: _flat(study.of(label)[0].config) for label in study.labels}
    keys = dict.fromkeys(k for f in flat.values() for k in f)
    differ = [k for k in keys if len({json.dumps(f.get(k), default=str) for f in flat.values()}) > 1]
    differ = [k for k in differ if k != "seed" and not k.startswith(("plan.", "versions."))]
    parts = []
    if differ:
        rows = tuple((Cell(k), *(Cell(_value(f.get(k))) for f in flat.values())) for k in differ)
        parts.append(Table("What differs", ("setting<", *(f"{label}<" for label in flat)), rows).to("html"))
    seeds = {label: [r.seed for r in study.of(label)] for label in study.labels}
    for label in study.labels:
        text = (study.of(label)[0].folder / "config.toml").read_text(encoding="utf-8")
        told = f"{label}: full configuration (seed {seeds[label][0]})"
        parts.append(f"<details><summary>{escape(told)}</summary><pre>{escape(text)}</pre></details>")
    return "\n".join(parts)


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _value(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _versions(study: Study) -> str:
    found = [r.config.get("versions", {}) for r in study.runs]
    keys = dict.fromkeys(k for v in found for k in v)
    told = [f"{k} {' / '.join(dict.fromkeys(str(v[k]) for v in found if k in v))}" for k in keys]
    runs = words.count(len(study.runs), "run")
    methods = len(pairs.grids(study))
    return " · ".join([f"{runs}, {words.count(methods, 'method')} with results", *told])
