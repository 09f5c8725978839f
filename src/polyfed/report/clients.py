"""The tables about clients: each under every method, and how many gain with which."""

import math
from collections.abc import Mapping

import numpy as np

from polyfed.base.arguments import checked
from polyfed.report import pairs, words
from polyfed.report.pairs import Interval, Verdict, mean_of, sample_std
from polyfed.report.table import Cell, Table
from polyfed.report.tables import ENDS, NAMED, oracles, tally
from polyfed.report.verdicts import Study

MARKS = {1: "gain", -1: "loss", 0: "", None: "quiet"}


@checked
def client_table(study: Study, every: bool | None = None) -> Table:
    """The clients, those that gain most first.

    Parameters
    ----------
    study : Study
        From `read`.
    every : bool or None
        True: all clients; False: the 5 that gain most and the 5 that gain least; None: all up to 15 clients.

    Returns
    -------
    Table
        A row per client: the leading method's verdict and gain over the client's own model (or the common one, where no
        run trains clients alone), paired over seeds, with its 95 % interval; test samples, the metric under every
        method (mean ± sample standard deviation over seeds), and the model that would clearly be better there.
    """
    return _compared(study, every) if len(study.verdicts.grids) > 1 else _single(study, every)


def _compared(study: Study, every: bool | None) -> Table:
    scale, grids = words.Scale(study.metric), study.verdicts.grids
    ranked = {k: grids[k] for k in study.verdicts.ranked if k in grids}
    verdicts = study.verdicts.clients
    samples = mean_samples(study, study.split)
    first, names = study.verdicts.lead, study.names
    ends = first is not None and (every is False or (every is None and len(names) > NAMED))
    if first:
        names = _by_gain(names, {n: v.gains[first[0]].mean for n, v in verdicts.items() if first[0] in v.gains}, ends)
    reference = first[1] if first else None
    against = (
        {"own": "own model", "yardstick": "own model", "common": "common model"}.get(study.role(reference), "")
        if reference
        else ""
    )
    columns = ["client<", *["verdict<", f"gain over {against}{scale.points}", "95 % interval"] * bool(reference)]
    columns += [f"{study.split} samples", *ranked, *["advice<"] * bool(reference)]
    rows = []
    for n in names:
        v = verdicts[n]
        cells = [Cell(n, {"client": n})]
        if first:
            cells += _gain(v, scale, first[0])
        cells.append(Cell(f"{samples[n]:.0f}", {"samples": samples[n]}))
        for label, grid in ranked.items():
            mean, std = mean_of(grid.of(n)), sample_std(grid.of(n))
            raw = {f"{label}_mean": mean, f"{label}_std": std}
            shown = scale.spread(mean, std) if math.isfinite(mean) or not samples[n] else "n/a"
            cells.append(Cell(shown, raw, "best" if label == v.best else ""))
        if first:
            mark = "quiet" if v.choice is None else "loss" if v.choice == v.reference else "gain"
            cells.append(Cell(v.text, {"advice": v.text, "best": v.best}, mark))
        rows.append(tuple(cells))
    title = (
        f"Clients: the {ENDS} that gain most and the {ENDS} that gain least"
        if len(names) < len(study.names)
        else "Clients"
    )
    return Table(title, tuple(columns), tuple(rows), tuple(_notes(study, verdicts, reference, first, ends)))


def _by_gain(names: list[str], gain: Mapping[str, float], ends: bool) -> list[str]:
    """The clients, the largest gain first, those without one last; with `ends` only those at both ends of many."""
    finite = [n for n in names if math.isfinite(gain.get(n, math.nan))]
    order = sorted(finite, key=lambda n: -gain[n])
    if ends and len(order) > 2 * ENDS:
        return order[:ENDS] + order[-ENDS:]
    return order + [n for n in names if n not in finite]


def _gain(v: Verdict, scale: words.Scale, lead: str) -> list[Cell]:
    g = v.gains.get(lead)
    if g is None or not math.isfinite(g.mean):
        nothing = {"gain": None, "gain_of": None}
        return [Cell(v.text, {"verdict": v.text}, "quiet"), Cell("–", nothing), Cell("–", {"low": None, "high": None})]
    span = scale.range(g.low, g.high) if g.known else "–"
    word = g.word or v.text
    return [
        Cell(word, {"verdict": word}, MARKS[g.sign] or "quiet"),
        Cell(scale.signed(g.mean), {"gain": g.mean, "gain_of": lead}, MARKS[g.sign]),
        Cell(span, {"low": g.low, "high": g.high}),
    ]


def _notes(
    study: Study, verdicts: dict[str, Verdict], reference: str | None, first: tuple[str, str] | None, ends: bool
) -> list[str]:
    notes = oracles(study)
    if reference and first:
        tally = ", ".join(f"{t}: {k}" for t, k in study.verdicts.choices().items())
        notes.append(f"Verdict, gain and interval: of {first[0]} over {reference}.")
        notes.append(
            f"Advice, where one model is clearly best: over all {words.count(len(verdicts), 'client')}, {tally}."
        )
        if ends:
            notes.append(f"Shown are the {ENDS} clients that gain most and the {ENDS} that gain least.")
        many = max(len(v.gains) for v in verdicts.values())
        seeds = max((g.seeds for v in verdicts.values() for g in v.gains.values()), default=0)
        bounded = any(g.known for v in verdicts.values() for g in v.gains.values())
        if bounded:
            joint = f", jointly over the {many} methods compared" if many > 1 else ""
            over = {"models": "these trained models", "sets": "these training sets, seeds"}
            over = over.get(study.verdicts.of(*first), "training sets of this size, splits")
            notes.append(
                f"Differences are paired over {words.count(seeds, 'seed')} (same seed, same split). The interval is of "
                f"the gain on new samples of the client, over {over} and test samples, at 95 %{joint}; verdicts hold "
                "jointly over all clients (Holm), so that an interval may leave zero out without one."
            )
        elif seeds < 2:
            notes.append("One seed: differences are given, but no spread and so no verdict.")
        elif why := {g.why for v in verdicts.values() for g in v.gains.values()} - {"", pairs.UNPAIRED}:
            notes.append(f"Differences are given, but no interval: {'; '.join(map(pairs.reason, sorted(why)))}.")
        if bounded and all(e.spread.sampling is None for e in study.verdicts.evidence(*first)[0].values()):
            notes.append(
                "What each sample adds to the score is not known, so the intervals are Nadeau and Bengio's, which are "
                "longer."
            )
        own = [k for k, role in study.verdicts.roles.items() if role == study.role(reference)]
        if len(own) > 1:
            notes.append(f"Every client is held against {reference}, of {words.listed(own)} the best in the mean.")
    if study.redrawn:
        notes.append(
            "The clients' data were drawn anew for every seed: a row is a position in the federation, not one client. "
            "Read the counts, not single rows."
        )
    return notes


def _single(study: Study, every: bool | None) -> Table:
    """With nothing to compare: the clients by their metric."""
    scale, grids = words.Scale(study.metric), study.verdicts.grids
    label, grid = next(iter(grids.items()), (study.labels[0], None))
    value = grid.per_client() if grid else {}
    samples = {s: mean_samples(study, s) for s in dict.fromkeys(("train", study.split))}
    names = [n for n in study.names if math.isfinite(value.get(n, math.nan))]
    ends = every is False or (every is None and len(names) > NAMED)
    names.sort(key=lambda n: -study.metric.merit(value[n]))
    if ends and len(names) > 2 * ENDS:
        names = names[:ENDS] + names[-ENDS:]
    lacking = [n for n in study.names if grid and samples[study.split][n] and not math.isfinite(value[n])]
    names += lacking[:ENDS]
    rows = []
    for n in names:
        mean, std = value[n], sample_std(grid.of(n)) if grid else math.nan
        counts = [Cell(f"{s[n]:.0f}", {f"{split}_samples": s[n]}) for split, s in samples.items()]
        raw = {f"{label}_mean": mean, f"{label}_std": std}
        shown = scale.spread(mean, std) if math.isfinite(mean) else "n/a"
        rows.append((Cell(n, {"client": n}), *counts, Cell(shown, raw)))
    title = f"Clients: the {ENDS} best and the {ENDS} worst" if len(names) < len(study.names) and ends else "Clients"
    none = "Nothing was held out" if study.split == "train" else "The run ended before it wrote results per client"
    notes = [] if rows else [f"{none}."]
    if lacking:
        notes.append(f"n/a: {study.metric.lacks} ({words.count(len(lacking), 'client')}).")
    if len(names) < len(study.names) and ends:
        notes.append(f"Shown are the {ENDS} clients with the best results and the {ENDS} with the worst.")
    columns = ("client<", *(f"{s} samples" for s in samples), f"{label}: {scale.header}")
    return Table(title, columns, tuple(rows), tuple(notes + _notes(study, {}, None, None, False)))


@checked
def gain_table(study: Study) -> Table | None:
    """The clients that gain over their own models (or the common one), method by method, the best first.

    Parameters
    ----------
    study : Study
        From `read`.

    Returns
    -------
    Table or None
        A row per method: numbers of clients that clearly gain, clearly lose, or are undecided ("–": no client can have
        a verdict); the least and the largest gain, and from 20 clients on quantiles. None without a comparison.
    """
    first = study.verdicts.lead
    if first is None:
        return None
    scale, reference = words.Scale(study.metric), first[1]
    rows = []
    for label in (k for k in study.verdicts.ranked if k != reference and study.role(k) != "own"):
        gains = [g for g in study.verdicts.gains(label, reference).values() if math.isfinite(g.mean)]
        if gains:
            quantiles = _quantiles(gains, scale, len(study.names) >= QUANTILES)
            rows.append((Cell(label, {"method": label}), *_counts(gains), *quantiles))
    note = f"Gain: {scale.name} minus that of {reference}, paired over seeds, positive when better."
    if study.metric.sign < 0:
        note = f"Gain: {scale.name} of {reference} minus that of the method, paired over seeds, positive when better."
    if not study.metric.sign:
        note = f"Gain: how much nearer to {study.metric.aim:g} {scale.name} is than that of {reference}, over seeds."
    cut = CUT if len(study.names) >= QUANTILES else CUT[:1] + CUT[-1:]
    columns = ("method<", "gain", "lose", "undecided", *(f"{header}{scale.points}" for header, _, _ in cut))
    counts = "Gain, lose: clearly, jointly over clients; –: too few seeds or samples for a verdict on any client."
    return Table(f"Gain over {reference}, client by client", columns, tuple(rows), (counts, note, *oracles(study)))


QUANTILES = 20  # clients from which on quantiles say more than the ends
CUT = (
    ("least", "least", 0.0),
    ("10 %", "q10", 0.1),
    ("median", "median", 0.5),
    ("90 %", "q90", 0.9),
    ("most", "most", 1.0),
)


def _counts(gains: list[Interval]) -> list[Cell]:
    counts, names = tally(gains) or (None,) * 3, ("gain", "lose", "undecided")
    return [
        Cell("–" if k is None else str(k), {name: k}, mark if k else "")
        for k, name, mark in zip(counts, names, ("gain", "loss", ""), strict=True)
    ]


def _quantiles(gains: list[Interval], scale: words.Scale, whole: bool) -> list[Cell]:
    cut = np.quantile([g.mean for g in gains], [q for _, _, q in CUT])
    cells = [Cell(scale.signed(float(v)), {name: float(v)}) for (_, name, _), v in zip(CUT, cut, strict=True)]
    return cells if whole else [cells[0], cells[-1]]


def mean_samples(study: Study, split: str) -> dict[str, float]:
    """{client: samples in a split, mean over seeds}."""
    counts: dict[str, list[float]] = {n: [] for n in study.names}
    for r in {r.seed: r for r in study.runs}.values():
        for c in r.about.clients:
            counts[c.name].append(float(c.samples(split)))
    return {n: mean_of(k) for n, k in counts.items()}
