"""The tables about methods: what they reach, how many clients gain, and what it costs."""

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from polyfed.base.arguments import checked
from polyfed.metrics.metric import Metric
from polyfed.report import words
from polyfed.report.intervals import half_width
from polyfed.report.pairs import Interval, mean_of, sample_std
from polyfed.report.table import Cell, Table
from polyfed.report.verdicts import ALONE, Study
from polyfed.runs.numbers import Numbers

NAMED = 15  # with more clients, the client table shows only both ends
ENDS = 5


@checked
def results(study: Study) -> pd.DataFrame:
    """All measured numbers, for your own analysis.

    Parameters
    ----------
    study : Study
        From `read`.

    Returns
    -------
    DataFrame
        A row per method, seed and client: method, role ("own", "common" or "personalised"), seed, status, then the
        columns of the runs' clients.csv: client, samples per split, metrics (shares between 0 and 1), bytes.
    """
    frames = []
    for r in study.runs:
        if r.clients is not None:
            about = {"method": r.label, "role": study.role(r.label), "seed": r.seed, "status": r.status}
            frames.append(pd.DataFrame([about] * len(r.clients), index=r.clients.index).join(r.clients))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


@checked
def compare_table(study: Study) -> Table:
    """The methods, the best first.

    Parameters
    ----------
    study : Study
        From `read`.

    Returns
    -------
    Table
        A row per method: the leading metric (mean over clients, ± sample standard deviation over seeds), the worst
        client, further metrics, numbers of clients that clearly gain and lose, bytes, time, rounds, clusters.
    """
    scale = words.Scale(study.metric)
    means = {k: m for k, m in study.verdicts.means.items() if study.role(k) != "oracle"}
    best = max(means, key=lambda k: means[k]) if len(means) > 1 else None
    reference = next((v.reference for v in study.verdicts.clients.values() if v.reference), None)
    own = reference if reference and study.role(reference) in ALONE else None
    clustered = any(r.findings.clusters for r in study.runs)
    scored = any(r.findings.clusters and r.about.clusters for r in study.runs)
    partial, others = bool(_partial(study, study.metric)), [words.Scale(m) for m in study.metrics[1:]]
    header = scale.mean if study.split != "train" else f"{scale.mean} in training"
    everywhere = ["global file"] * (_of_all(study) > 0)
    columns = ["method<", header, *everywhere, *["clients"] * partial, "worst client", *(s.mean for s in others)]
    columns += ["gain / lose"] * (own is not None) + ["bytes per client", "time", "rounds", "steps/round", "seeds"]
    columns += ["clusters"] * clustered + ["ARI"] * scored
    rows = []
    for label in study.verdicts.ranked:
        shown = (runs := study.counted(label)) or study.of(label)
        cells = [_method(study, label), _metric(study, label, scale, label == best), *_everywhere(study, shown, scale)]
        if partial:
            counts, most = _having(study, runs, study.metric)
            cells.append(Cell(_over(study, runs, study.metric) or f"all {most}", {"clients": mean_of(counts)}))
        cells.append(_worst(study, runs, scale))
        cells += [_further(study, runs, s) for s in others]
        if own is not None:
            cells.append(_gainers(study, label, own))
        cells += [
            _bytes(shown),
            _amount("seconds", [r.summary.seconds for r in shown], words.duration),
            _amount("rounds", [float(r.summary.rounds) for r in shown], lambda v: f"{v:.0f}"),
            _amount("steps_per_round", [r.summary.steps for r in shown], _steps),
            Cell(str(len(runs)), {"seeds": len(runs)}),
        ]
        if clustered:
            cells += _clusters(shown)[: 1 + scored]
        rows.append(tuple(cells))
    return Table("Methods", tuple(columns), tuple(rows), tuple(_compare_notes(study, own)))


def _compare_notes(study: Study, own: str | None) -> list[str]:
    when = "best round by validation" if any(r.config.stop for r in study.runs) else "last round"
    score = f"{study.split.capitalize()} {words.Scale(study.metric).name}"
    notes = [f"{score} at the {when}, unweighted mean over {study.whom}."]
    for metric in study.metrics:
        if over := _partial(study, metric):
            notes.append(f"{words.Scale(metric).name}: over {over} clients; the others have none ({metric.lacks}).")
    if len(study.seeds) > 1:
        notes[0] += " ±: sample standard deviation over seeds."
    else:
        notes[0] += f" One seed ({study.seeds[0]}): no spread over seeds can be given."
    if rows := _of_all(study):
        notes.append(
            f"Global file: {words.Scale(study.metric).name} of every client's model on the same "
            f"{words.count(rows, 'row')}, mean over clients; in brackets its 95 % interval over seeds (splits and "
            "starts; the rows stay)."
        )
    if own is not None:
        notes.append(
            f"Gain / lose: clients that are clearly better / worse off than with their own model ({own}), paired over "
            "seeds, at 95 % jointly over clients; –: too few seeds or samples for a verdict on any client."
        )
    if any("steps" in r.summary.model_fields_set for r in study.runs):
        notes.append("Steps/round: batches a client trains on in a round it takes part in, all its models together.")
    notes += oracles(study) + _beside(study)
    done = {r.summary.rounds for r in study.runs if r.role != "yardstick"}
    if len(done) > 1:
        notes.append("The methods trained for different numbers of rounds.")
    for status in ("interrupted", "unfinished", "diverged"):
        names = [r.folder.name for r in study.runs if r.status == status]
        if names:
            left = " It counts as it stands." if len(study.runs) == 1 and status != "diverged" else ""
            notes.append(f"{status.capitalize()}: {words.listed(names)}.{left}")
    if len(study.runs) > 1 and any(r.status != "finished" for r in study.runs):
        notes.append("Unfinished runs are left out of the means of methods that have finished ones.")
    return notes


def oracles(study: Study) -> list[str]:
    """Note under every table with an oracle in it."""
    labels = [label for label in study.labels if study.role(label) == "oracle"]
    if not labels:
        return []
    return [f"{words.listed(labels)}: trained on everybody's data in one place; not available in practice."]


def _beside(study: Study) -> list[str]:
    """Say how good common models are that no client deploys, and how many numbers describe a structured model."""
    notes, scale = [], words.Scale(study.metric)
    for label in study.labels:
        summaries = [r.summary for r in study.counted(label)]
        common = [(s.common or {}).get(study.split, math.nan) for s in summaries]
        if common and all(map(math.isfinite, common)):
            notes.append(
                f"{label}: its common model alone has {scale.spread(float(np.mean(common)), sample_std(common))}."
            )
        numbers, dense = [s.described_by for s in summaries], [float(s.parameters or math.nan) for s in summaries]
        if numbers and all(map(math.isfinite, numbers)) and numbers != dense:
            notes.append(
                f"{label}: a client's model is {np.mean(numbers):,.0f} numbers, of {dense[0]:,.0f} parameters."
            )
    return notes


def _having(study: Study, runs: list[Numbers], metric: Metric) -> tuple[list[int], int]:
    """([runs] how many clients have a metric, how many have samples)."""
    counts, most = [], 0
    for r in runs:
        tested = {c.name for c in r.about.clients if c.samples(study.split)}
        counts.append(sum(math.isfinite(v) for n, v in r.values(metric=metric.name).items() if n in tested))
        most = max(most, len(tested))
    return counts, most


def _over(study: Study, runs: list[Numbers], metric: Metric) -> str:
    """`3 of 4` or `3 to 4 of 4`; "" if every client with samples has the metric."""
    counts, most = _having(study, runs, metric)
    if not counts or min(counts) == most:
        return ""
    return f"{'' if min(counts) == max(counts) else f'{min(counts)} to '}{max(counts)} of {most}"


def _partial(study: Study, metric: Metric) -> str:
    return _over(study, [r for label in study.labels for r in study.counted(label)], metric)


def _further(study: Study, runs: list[Numbers], scale: words.Scale) -> Cell:
    """A metric other than the one that leads."""
    name = scale.metric.name
    values = np.array([mean_of(study.verdicts.levels(r, scale.metric)) for r in runs])
    mean, std = mean_of(values), sample_std(values)
    return Cell(scale.spread(mean, std), {f"{name}_mean": mean, f"{name}_std": std})


def _method(study: Study, label: str) -> Cell:
    runs = study.of(label)
    bad = {s: sum(r.status == s for r in runs) for s in ("diverged", "interrupted", "unfinished")}
    told = ", ".join(s if k == len(runs) else f"{s} {k} of {len(runs)}" for s, k in bad.items() if k)
    return Cell(label + (f" ({told})" if told else ""), {"method": label, "status": told or "finished"})


def _metric(study: Study, label: str, scale: words.Scale, best: bool) -> Cell:
    values = [mean_of(study.verdicts.levels(r, study.metric)) for r in study.counted(label)]
    if not values:  # killed before it wrote its clients: take the last evaluation
        last = [
            r.summary.final[study.split].mean if study.split in r.summary.final else math.nan for r in study.of(label)
        ]
        if all(r.status == "diverged" for r in study.of(label)):
            return Cell("diverged", {f"{study.metric}_mean": None, f"{study.metric}_std": None}, "loss")
        values = [v for v in last if math.isfinite(v)]
    mean, std = mean_of(values), sample_std(values)
    raw = {f"{study.metric}_mean": mean, f"{study.metric}_std": std}
    return Cell(scale.spread(mean, std), raw, "best" if best else "")


def _of_all(study: Study) -> int:
    """Number of rows that all models are scored on."""
    return max(r.about.shared or 0 for r in study.runs)


def _everywhere(study: Study, runs: list[Numbers], scale: words.Scale) -> list[Cell]:
    """The mean on the rows that all models are scored on, if there are some, and its interval over seeds."""
    if not _of_all(study):
        return []
    values = [r.summary.final["global"].mean for r in runs if "global" in r.summary.final]
    mean, std, n = mean_of(values), sample_std(values), len(values)
    half = half_width(std**2 / n, n - 1) if n > 1 else math.nan
    low, high = np.clip([mean - half, mean + half], *((0, 1) if scale.percent else (-math.inf, math.inf))).tolist()
    text = scale.number(mean) + (f" ({scale.number(low)} to {scale.number(high)})" if n > 1 else "")
    return [Cell(text, {"global_mean": mean, "global_low": low, "global_high": high})]


def _worst(study: Study, runs: list[Numbers], scale: words.Scale) -> Cell:
    values = [worst(v, study.metric) for r in runs if (v := study.verdicts.levels(r, study.metric))]
    mean, std = mean_of(values), sample_std(values)
    return Cell(scale.spread(mean, std), {"worst_mean": mean, "worst_std": std})


def worst(levels: Iterable[float], metric: Metric) -> float:
    """The worst of some scores, or of some distances from the best."""
    return min(levels) if metric.sign > 0 else max(levels)


def tally(gains: Iterable[Interval]) -> tuple[int, int, int] | None:
    """(gain, lose, undecided): how many clients; None where no client has an interval, and so none a verdict."""
    signs = [g.sign for g in gains if math.isfinite(g.mean)]
    if all(s is None for s in signs):
        return None
    return signs.count(1), signs.count(-1), len(signs) - signs.count(1) - signs.count(-1)


def _gainers(study: Study, label: str, own: str) -> Cell:
    counts = None if label == own else tally(study.verdicts.gains(label, own).values())
    if counts is None:
        return Cell("–", {"gain": None, "lose": None})
    return Cell(f"{counts[0]} / {counts[1]}", {"gain": counts[0], "lose": counts[1]})


def _bytes(runs: list[Numbers]) -> Cell:
    if runs[0].role == "oracle":  # it has everybody's data, and moves them for nothing only on paper
        return Cell("–", dict.fromkeys(("bytes_per_client", "down_per_client", "up_per_client")))
    down, up = (float(np.mean([getattr(r.summary, k) / r.n for r in runs])) for k in ("down_bytes", "up_bytes"))
    return Cell(words.size(down + up), {"bytes_per_client": down + up, "down_per_client": down, "up_per_client": up})


def _amount(key: str, values: list[float], write: Any) -> Cell:
    mean = float(np.mean(values))
    return Cell(write(mean), {key: mean})


def _steps(mean: float) -> str:
    return "–" if not math.isfinite(mean) else f"{mean:.0f}" if mean == round(mean) else f"{mean:.1f}"


def _clusters(runs: list[Numbers]) -> list[Cell]:
    clusters = [r.findings.clusters for r in runs if r.findings.clusters]
    if not clusters:
        return [Cell("–", {"clusters": None}), Cell("–", {"ari": None})]
    sizes = [len(set(c)) for c in clusters]
    scores = [ari for r in runs if (ari := rand_index(r)) is not None]
    least, most = min(sizes), max(sizes)
    text = str(least) if least == most else f"{least} to {most}"
    score = float(np.mean(scores)) if scores else math.nan
    return [Cell(text, {"clusters": float(np.mean(sizes))}), Cell(f"{score:.2f}" if scores else "–", {"ari": score})]


def rand_index(run: Numbers) -> float | None:
    """Adjusted Rand index of the clusters found against the true ones; None if either is unknown."""
    true, clusters = run.about.clusters, run.findings.clusters
    if not true or not clusters or len(true) != len(clusters):
        return None
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(true, clusters))


@checked
def cost_table(study: Study) -> Table:
    """The cost of each method.

    Parameters
    ----------
    study : Study
        From `read`.

    Returns
    -------
    Table
        A row per method, in the order of `compare_table`: bytes down and up, in total, per client and of the busiest
        client; participations, round trips in each, time per round.
    """
    rows = []
    for label in study.verdicts.ranked:
        runs = study.counted(label) or study.of(label)
        s = [r.summary for r in runs]
        rounds = float(np.mean([x.rounds for x in s]))
        seconds = float(np.mean([x.seconds for x in s]))
        per_round = seconds / rounds if rounds else math.nan
        trips, parts = _trips(runs)
        busiest = _busiest(runs)
        rows.append(
            (
                Cell(label, {"method": label}),
                _amount("down_bytes", [float(x.down_bytes) for x in s], words.size),
                _amount("up_bytes", [float(x.up_bytes) for x in s], words.size),
                _bytes(runs),
                Cell(words.size(busiest), {"busiest_client_bytes": busiest}),
                Cell(f"{parts:.0f}" if math.isfinite(parts) else "–", {"participations": parts}),
                Cell(f"{trips:.2f}" if math.isfinite(trips) else "–", {"exchanges_per_participation": trips}),
                Cell(words.duration(per_round), {"seconds_per_round": per_round}),
            )
        )
    columns = (
        "method<",
        "down",
        "up",
        "per client",
        "busiest client",
        "participations",
        "round trips each",
        "per round",
    )
    note = (
        "Bytes of all messages over the whole run; decimal units (1 GB = 1e9 bytes). Time on the machine that ran it."
    )
    return Table("Costs", columns, tuple(rows), (note, *oracles(study)))


def _trips(runs: list[Numbers]) -> tuple[float, float]:
    """(exchanges per participation, participations per run) from the ledgers; NaN without one."""
    ledgers = [r.ledger for r in runs if (r.folder / "ledger.csv").exists()]
    parts = sum(len(x) for x in ledgers)
    if not ledgers or not parts:
        return math.nan, 0.0 if ledgers else math.nan
    return sum(sum(x["exchanges"].tolist()) for x in ledgers) / parts, parts / len(ledgers)


def _busiest(runs: list[Numbers]) -> float:
    most = [
        max(map(operator.add, r.clients["down_bytes"].tolist(), r.clients["up_bytes"].tolist()))
        for r in runs
        if r.clients is not None and {"down_bytes", "up_bytes"} <= set(r.clients)
    ]
    return float(np.mean(most)) if most else math.nan


QUANTILES = (0, 5, 25, 50, 75, 95, 100)


def quantile_table(study: Study) -> Table:
    """Each number of clients.csv over the clients that have it, run by run: mean and quantiles."""
    rows: list[tuple[Cell, ...]] = []
    for r in study.runs:
        table = pd.DataFrame() if r.clients is None else r.clients.drop(columns=["client", "cluster", "assigned"])
        for column in table.columns:
            values = table[column].to_numpy(dtype=float)
            if len(scored := values[~np.isnan(values)]):
                numbers = [float(scored.mean()), *np.percentile(scored, QUANTILES).tolist()]
                heads = f"{r.label} seed {r.seed}", str(column).replace("_", " "), f"{len(scored):,}"
                rows.append((*map(Cell, heads), *(Cell(f"{v:.4g}", {"value": v}) for v in numbers)))
    columns = ("run<", "number<", "clients", "mean", *(f"{q} %" for q in QUANTILES))
    return Table(f"{study.first.n:,} clients; clients.csv of a run's folder has a row for each", columns, tuple(rows))
