"""Over the rounds: accuracy of the common and the mixed model, ranks, sizes and downlink."""

import numpy as np

from polyfed import Algorithm, FedAvg, FedDyn
from polyfed.report.table import Cell, Table
from polyfed.studies.compare import Comparison
from polyfed_papers.fedslr import followed, lam, last, method, train
from polyfed_papers.fedslr.stated import NOTES, RUNS, settings, several
from polyfed_papers.recipes.drawing import curve_figure
from polyfed_papers.recipes.recipe import Bench, Outcome, curves, metric_of, recipe
from polyfed_papers.recipes.said import Setting, ordered, ours, points

Series = tuple[list[float], list[list[float]]]


def over_rounds(found: Comparison, label: str, key: str, factor: float = 1.0) -> Series:
    """(rounds, [seed][evaluated round]) of a followed value; key "rank:<layer>" is that layer's rank."""
    runs = followed(found, label)
    at = [float(row["round"]) for row in runs[0]]
    layer = key.removeprefix("rank:")
    values = [[factor * (row["ranks"][layer] if layer != key else row[key]) for row in run] for run in runs]
    return at, values


def column(runs: Comparison, label: str, name: str) -> Series:
    """(rounds, [seed][evaluated round]) of a column of `Run.history`."""
    frame = curves(runs)
    at, values = frame["round"].to_numpy(dtype=float), frame[name].to_numpy(dtype=float)
    own = [((frame["label"] == label) & (frame["seed"] == r.seed)).to_numpy() for r in runs.results if r.label == label]
    return at[own[0]].tolist(), [values[mine].tolist() for mine in own]


def mixed_over_rounds(runs: Comparison, label: str) -> Series:
    """(rounds, [seed][evaluated round]) accuracy of the deployed models in per cent."""
    at, values = column(runs, label, runs.metric.name)
    return at, (100 * np.array(values)).tolist()


def downlink(runs: Comparison, label: str) -> Series:
    """(rounds, [seed][evaluated round]) bytes down since the last evaluation, in per cent of FedAvg's."""
    at, sent = column(runs, label, "down_bytes")
    _, dense = column(runs, "FedAvg", "down_bytes")
    return at[1:], (100 * np.diff(sent) / np.diff(dense)).tolist()


@recipe("fedslr/curves", "Over the rounds: accuracy, ranks, sizes, downlink (no figure of the paper)",
        minutes=(1, several(5)), between=("middle",), **RUNS,
        settings=settings(Setting("lambda of FedSLR", "1/2, 1 and 5 times that below", "ours")))  # fmt: skip
def progress(bench: Bench) -> Outcome:
    """When do ranks and downlink fall, and is accuracy lost for it on the way?"""
    lams = [factor * lam(bench) for factor in (0.5, 1.0, 5.0)]
    middle = f"lam-{lams[1]:g}"
    slr = {f"lam-{v:g}": method(bench, lam=v) for v in lams}
    methods: dict[str, Algorithm] = {"FedAvg": FedAvg(0.1), "FedDyn": FedDyn(0.1, alpha=0.1), **slr}
    runs = train(bench, "runs", methods, evaluate_every=bench.pick(2, 10))
    names = {k: f"lambda {k[4:]}" for k in slr}
    layers = followed(runs, middle)[0][0]["ranks"]
    figures = {
        "accuracy": curve_figure(
            {
                "FedSLR, mixed": mixed_over_rounds(runs, middle),
                "FedSLR, GKR": over_rounds(runs, middle, "accuracy", 100),
                **{k: over_rounds(runs, k, "accuracy", 100) for k in ("FedDyn", "FedAvg")},
            },
            "round", "test accuracy, %",
        ),
        "parameters": curve_figure(
            {names[k]: over_rounds(runs, k, "gkr_parameters", 1e-3) for k in slr}, "round", "GKR, thousand numbers"
        ),
        "ranks": curve_figure(
            {f"layer {n}": over_rounds(runs, middle, f"rank:{name}") for n, name in enumerate(layers, 1)}
            if bench.small else {names[k]: over_rounds(runs, k, f"rank:{list(layers)[-2]}") for k in slr},
            "round", "rank",
        ),
        "downlink": curve_figure({names[k]: downlink(runs, k) for k in slr}, "round", "downlink, % of FedAvg's"),
    }  # fmt: skip
    rows = []
    claims = [
        points("the mixed model is better than the GKR", metric_of(runs, middle), last(runs, middle)),
        points("the GKR is better than FedAvg", last(runs, middle), last(runs, "FedAvg")),
    ]
    for k in slr:
        sent = np.array(downlink(runs, k)[1])
        half = sent[:, len(sent[0]) // 2]
        rows.append(
            (Cell(names[k]), ours(sent[:, 0], decimals=1), ours(half, decimals=1), ours(sent[:, -1], decimals=1),
             ours(last(runs, k), 100), ours(metric_of(runs, k), 100))
        )  # fmt: skip
        claims.append(
            ordered(f"{names[k]}: the downlink falls over the rounds", sent[:, 0], sent[:, -1], 1, " % of dense")
        )
    heads = ("FedSLR<", "downlink first, %", "half way, %", "last, %", "GKR, %", "mixed, %")
    table = Table("Downlink per round, of a dense model's", heads, tuple(rows))
    return Outcome([table], figures, claims, ["non-IID; the first downlink is dense, the uplink always", *NOTES])
