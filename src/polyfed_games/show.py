"""Coalitions on the screen, as a picture and as a page."""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from polyfed.data.validation import LEAKED
from polyfed.report import page as pages
from polyfed.report import words
from polyfed.report.forest import Row, chart, said
from polyfed.report.pairs import Interval
from polyfed.report.style import GREEN, GREYS, VERMILLION, canvas, styled
from polyfed.report.table import Cell, Table
from polyfed.report.verdicts import LEAST, bearing
from polyfed.runs import ownership as files
from polyfed_games.gains import Gains
from polyfed_games.values import FEWEST

NAMED = 30  # clients up to which the axes name them
WRITTEN = 12  # clients up to which the picture's cells hold numbers
LISTED = 16  # clients up to which the matrix is a table too; beyond, only the largest values are listed
HARM, NONE, HELP = VERMILLION, "#e8eaed", GREEN
DARK = "#1d1f21"  # on the cells, whose colours are the same on a dark page


def tables(gains: Gains) -> list[Table]:
    """The matrix (or, of many clients, its largest entries), the clients, the partitions, the agreement."""
    parts = [_matrix(gains), _clients(gains), _partitions(gains)]
    return [*parts, _agreement(gains)] if len(gains.agreement) else parts


def answer(gains: Gains) -> str:
    """Who gains from being together, and which groups hold, in two sentences."""
    scale, who = words.Scale(gains.metric), gains.clients
    up, down = (who[who.all_clear & (s * who.all_gain > 0)]["client"].tolist() for s in (1, -1))
    if up or down:
        each = [
            f"{words.listed(of)} clearly {verb}{'s' * (len(of) == 1)}"
            for of, verb in ((up, "gain"), (down, "lose"))
            if of
        ]
        first = " and ".join(each)
    else:
        first = "nobody clearly gains or loses"
    best: Mapping[Any, Any] = gains.partitions.iloc[0].to_dict()
    first = f"With all {len(who)} together under {gains.method}, {first} {gains.split} {scale.name} over the own model."
    return f"{first} The groups that hold best are {_groups(best['coalitions'])}: {_held(best, len(gains.seeds))}."


def details(gains: Gains) -> list[str]:
    """What a client is worth to another, and what choosing by validation data gains."""
    scale, who, clear = words.Scale(gains.metric), gains.clients, gains.help[gains.help.clear]
    up, down = int((clear.shapley > 0).sum()), int((clear.shapley < 0).sum())
    after = who[who.chosen_clear & (who.chosen_gain > 0)]["client"].tolist()
    counted = who[who.client.isin(bearing(dict(zip(who.client, who.tested, strict=True))))]
    mean = f"{scale.signed(float(counted.chosen_gain.mean()))}{scale.difference_unit or f' of {scale.name}'}"
    apart = [n for n in who.client if n not in set(counted.client)]
    few = f"; means leave out {words.listed(apart)}: fewer than {LEAST} samples are tested" if apart else ""
    return [
        f"Of {len(gains.help)} values of one client for another, {up} are clearly positive, {down} clearly negative.",
        f"Choosing a group by validation data changes the score by {mean} on average over the own model, "
        f"clearly upwards for {words.listed(after) if after else 'nobody'}{few}.",
    ]


def _groups(partition: str) -> str:
    """`a + b | c` as `a + b, with c alone`."""
    groups = partition.split(" | ")
    together, alone = ([g for g in groups if ("+" in g) == k] for k in (True, False))
    if not together:
        return "each alone"
    apart = f", with {words.listed(alone)} {'each ' * (len(alone) > 1)}alone" if alone else ""
    return ("all together" if len(groups) == 1 else " and ".join(together)) + apart


def _held(row: Mapping[Any, Any], seeds: int) -> str:
    """How well a partition holds, without the terms of games."""
    if not isinstance(row.get("nash"), bool | np.bool_):
        return "whether somebody would rather be elsewhere is not known, as some groups were not trained"
    if not row["individual"]:
        return "but somebody would rather be elsewhere"
    text = "nobody would rather be elsewhere" if row["nash"] else "nobody could move without another's loss"
    share = row.get("individual_share", math.nan)
    if seeds < 2 or not math.isfinite(share):
        return text
    return f"{text} on average over {seeds} splits, and in {round(share * seeds) or 'none'} of them taken alone"


def _stable(row: Mapping[Any, Any]) -> str:
    if not isinstance(row.get("nash"), bool | np.bool_):
        return "not judged: some coalitions were not trained"
    names = {
        "nash": "nobody would rather be elsewhere (Nash stable)",
        "individual": "nobody could move without another's loss (individually stable)",
        "core": "no group would rather be on its own (core stable)",
    }
    holds = [key for key in names if row.get(key) is not None and row[key] == True]  # noqa: E712
    told = [names[key] for key in holds if key != "individual" or "nash" not in holds]  # which Nash's includes
    return "; ".join(told) if told else "not stable"


def _limits(scale: words.Scale, low: float, high: float) -> str:
    return f" ({scale.range(low, high)})" if math.isfinite(low) else ""


def _mark(value: float, clear: Any) -> str:
    return ("gain" if value > 0 else "loss") if clear and math.isfinite(value) else ""


def _gain(scale: words.Scale, row: Mapping[Any, Any], key: str, prefix: str) -> Cell:
    value = row[key]
    text = scale.signed(value) + _limits(scale, row[f"{prefix}low"], row[f"{prefix}high"])
    values = {key: value, f"{key}_low": row[f"{prefix}low"], f"{key}_high": row[f"{prefix}high"]}
    return Cell(text, values, _mark(value, row[f"{prefix}clear"]))


def _about(gains: Gains) -> str:
    seeds = words.count(len(gains.seeds), "seed")
    how = "every coalition" if gains.sampled is None else f"{gains.sampled} sampled joinings per pair on average"
    return f"{gains.method}, {how}, {seeds}, {words.count(gains.trainings, 'training')}."


def _matrix(gains: Gains) -> Table:
    scale, n = words.Scale(gains.metric), len(gains.names)
    unit = "points" if scale.percent else scale.name
    sums = " A row adds up to the client's gain with all together." if gains.sampled is None else ""
    few = f"Sampled values: no interval where fewer than {FEWEST} joinings were drawn, or all changed the score alike."
    notes = (
        f"Row: who receives; column: from whom. Shapley value in {unit} of {gains.split} {scale.name}, with 95 % "
        f"intervals; colour: clear jointly over all pairs (Holm).{sums}",
        *((few,) if gains.sampled is not None else ()),
        _about(gains),
    )
    if n > LISTED:
        largest = gains.help.shapley.abs().sort_values(ascending=False).index[:20]
        cells = [
            (Cell(r["client"]), Cell(r["from"]), _gain(scale, r, "shapley", ""), Cell(str(r.get("drawn", ""))))
            for r in gains.help.reindex(largest).to_dict("records")
        ]
        about = ("The 20 largest values; coalitions-help.csv has all.", *notes[1:])
        return Table("Who helps whom", ("client<", "from<", f"Shapley value, {unit}", "samples"), tuple(cells), about)
    at = {(r["client"], r["from"]): r for r in gains.help.to_dict("records")}
    rows = [
        (Cell(i), *(Cell("") if i == j else _gain(scale, at[i, j], "shapley", "") for j in gains.names))
        for i in gains.names
    ]
    rows = [tuple(Cell(c.text, {}, c.mark) if k else c for k, c in enumerate(row)) for row in rows]
    return Table("Who helps whom", ("client<", *gains.names), tuple(rows), notes)


def _clients(gains: Gains) -> Table:
    scale = words.Scale(gains.metric)
    unit = ", %" if scale.percent else ""
    rows = tuple(
        (
            Cell(r["client"]), Cell(scale.number(r["own"]), {"own": r["own"]}),
            Cell(scale.number(r["all"]), {"all": r["all"]}), _gain(scale, r, "all_gain", "all_"),
            Cell(f"{r['chosen']} ({r['chosen_in']}/{len(gains.seeds)})"),
            Cell(scale.number(r["after_choice"]), {"after_choice": r["after_choice"]}),
            _gain(scale, r, "chosen_gain", "chosen_"), Cell(f"{r['hindsight']} ({scale.signed(r['hindsight_gain'])})"),
        )
        for r in gains.clients.to_dict("records")
    )  # fmt: skip
    columns = (
        "client<", f"own{unit}", f"all{unit}", f"gain with all{scale.points}", "chosen by validation<",
        f"after choice{unit}", f"gain after choice{scale.points}", f"best in hindsight{scale.points}<",
    )  # fmt: skip
    notes = (
        f"{gains.split.capitalize()} {scale.header}. Chosen: the coalition with the best validation score in each "
        "seed, the smallest of equals; shown is the most frequent, the score is after every seed's choice. Best in "
        f"hindsight: by the {gains.split} score itself, so its gain is too good to be true.",
        *(f"Keep in mind: {n}." for n in gains.notes if n == LEAKED),
    )
    return Table("What each client should do", columns, rows, notes)


def _partitions(gains: Gains) -> Table:
    scale, rows = words.Scale(gains.metric), []
    for r in gains.partitions.to_dict("records"):
        move = ""
        if isinstance(r.get("movers"), str):
            sure = "clear" if r["mover_clear"] else "not clear"
            where = "alone" if r["movers"] == r["to"] and "+" not in r["to"] else f"in {r['to']}"
            move = f"{r['movers']}: {where} (at least {scale.signed(r['mover_gain'])}{scale.difference_unit}, {sure})"
        share = r.get("individual_share", math.nan)
        share = "–" if not isinstance(share, float) or math.isnan(share) else f"{100 * share:.0f} %"
        gain = scale.signed(r.get("gain", math.nan))
        rows.append(tuple(map(Cell, (r["partition"], r["coalitions"], gain, _stable(r), share, move))))
    columns = ("partition<", "coalitions<", f"mean gain{scale.points}", "stable<", "in seeds", "who would rather<")
    first = (
        "most stable of all partitions" if gains.sampled is None else "one that moves from the Shapley values lead to"
    )
    notes = (
        "By mean gains over seeds. Elsewhere: alone, or in another of the partition's coalitions. In seeds: how often "
        f"it is individually stable in one seed. The first row is the {first}.",
    )
    return Table("Which coalitions hold", columns, tuple(rows), notes)


def _agreement(gains: Gains) -> Table:
    rows = []
    for r in gains.agreement.to_dict("records"):
        texts = [
            "–" if not isinstance(r.get(k), float) or math.isnan(r[k]) else f"{r[k]:.2f}"
            for k in ("clusters", "rand_index", "rank_correlation")
        ]
        rows.append((Cell(r["method"]), *map(Cell, texts)))
    notes = (
        "Mean over seeds. Rand index: adjusted, of the method's clusters with the first partition above (1: the same, "
        "0: as by chance). Rank correlation: Spearman's, of the method's mixing weights with the Shapley values.",
    )
    columns = ("method<", "clusters", "Rand index", "rank correlation")
    return Table("Do other methods agree?", columns, tuple(rows), notes)


def figure(gains: Gains) -> Figure:
    """The matrix of Shapley values: green where one clearly helps, orange where it clearly harms, else grey."""
    scale, m, n = words.Scale(gains.metric), gains.matrix.to_numpy(float), len(gains.names)
    most = float(np.nanmax(np.abs(m))) * scale.factor if np.isfinite(m).any() else 1.0
    clear = {(r["client"], r["from"]): r["clear"] for r in gains.help.to_dict("records")}
    colours = LinearSegmentedColormap.from_list("help", [HARM, NONE, HELP], N=257)  # zero is in the middle
    with styled():
        told = np.array([[clear.get((i, j), False) for j in gains.names] for i in gains.names], dtype=bool)
        shades = told.any() or n > WRITTEN  # of grey where there is no room for numbers
        picture, (axes,) = canvas(width=(6.0 if n > 6 else 5.3) - 0.9 * (not shades), height=4.6 if n > 6 else 3.7)
        span = {"vmin": -most or -1, "vmax": most or 1}
        rest = axes.imshow(scale.factor * m if n > WRITTEN else np.where(np.isfinite(m), -most, m), cmap=GREYS, **span)
        shown = axes.imshow(np.where(told, scale.factor * m, math.nan), cmap=colours, **span)
        if shades:
            label = f"Shapley value, {'points' if scale.percent else scale.name}{'' if told.any() else ', none clear'}"
            bar = picture.colorbar(shown if told.any() else rest, ax=axes, label=label, pad=0.02, aspect=24)
            bar.outline.set_visible(False)
        for i, receiver in enumerate(gains.names):
            for j, giver in enumerate(gains.names):
                if i != j and n <= WRITTEN and np.isfinite(m[i, j]):
                    strong = (
                        told[i, j] and abs(scale.factor * m[i, j]) > 0.85 * most
                    )  # white is readable on nothing lighter
                    weight = "bold" if clear[receiver, giver] else "normal"
                    colour = "white" if strong else DARK
                    axes.text(
                        j, i, scale.signed(m[i, j]), ha="center", va="center", color=colour, weight=weight, size=8
                    )
                elif i != j and clear[receiver, giver] and n > WRITTEN:
                    axes.plot(j, i, ".", color=DARK, markersize=2.5)
        if n <= NAMED:
            short = [name if len(name) <= 12 else f"{name[:11]}…" for name in gains.names]
            axes.set_xticks(np.arange(n), short, rotation=90 if n > 4 else 0)
            axes.set_yticks(np.arange(n), short)
        axes.set_xlabel("what this client gives")
        axes.set_ylabel("to this one")
        axes.grid(visible=False)
    return picture


def page(gains: Gains) -> str:
    """report.html of a folder of coalitions."""
    assert gains.folder is not None
    marks = "bold" if len(gains.names) <= WRITTEN else "a dot"
    unit = words.Scale(gains.metric).gained(gains.split)
    caption = f"Row: receives, column: gives (Shapley values, {unit}). "
    caption += f"In colour and {marks}: jointly clear; green helps, orange harms."
    picture = pages.figure(pages.Drawing("help", figure(gains), "Who helps whom", caption))
    kept = ("help", "clients", "partitions", "agreement")
    matrix, *others = (pages.table(t, name) for t, name in zip(tables(gains), kept, strict=False))
    names = ("What each client should do", "Which coalitions hold", "Do other methods agree?")
    config = (gains.folder / "coalitions.toml").read_text("utf-8")
    sections = [
        ("Who helps whom", f'<div class="beside cells">{picture}{matrix}</div>'),
        *zip(names, others, strict=False),
    ]
    if gains.notes:
        listed = "".join(f"<li>{escape(n)}</li>" for n in gains.notes)
        sections.append(("Keep in mind about these data", f'<ul class="caveats notes">{listed}</ul>'))
    sections.append(("Every number", _files(gains)))
    sections.append(("Settings", f"<details><summary>coalitions.toml</summary><pre>{escape(config)}</pre></details>"))
    n = len(gains.names)
    subtitle = f"{words.count(n, 'client')} · {_about(gains)} {words.duration(gains.seconds)} of training"
    top = pages.answer(answer(gains), _chart(gains), details(gains))
    return pages.page("Who gains from whom?", subtitle, top, sections, files.HEADER.lstrip("# ").split(";")[0])


def _chart(gains: Gains) -> str:
    """What each client gains with all together; of many those for whom it is clear."""
    scale, rows = words.Scale(gains.metric), []
    for r in gains.clients.to_dict("records"):
        g = Interval(r["all_gain"], r["all_low"], r["all_high"], len(gains.seeds), clear=bool(r["all_clear"]))
        if len(gains.names) <= NAMED or g.clear:
            levels = f"{said(g, scale)}; from {scale.number(r['own'])} to {scale.number(r['all'])}{scale.unit}"
            rows.append(Row(r["client"], g.word, g, levels))
    axis = f"{scale.gained(gains.split)}, all together under {gains.method}; positive: better than the own model"
    return chart(rows, scale, axis)


def _files(gains: Gains) -> str:
    told = {
        "coalitions-values.csv": "every score: seed, coalition, client, and the folder of its run",
        "coalitions-help.csv": "Shapley values and leave-one-out of every pair, with intervals",
        "coalitions.json": "all tables in one file",
        "coalitions.svg, coalitions.pdf, coalitions.png": "the picture",
    }
    rows = tuple((Cell(k), Cell(v)) for k, v in told.items())
    return Table("Files", ("file<", "holds<"), rows).to("html")
