"""Figure 9: how much a device does in a round, growing with the rounds."""

import numpy as np

from polyfed.algorithms.fpfc import FPFC
from polyfed.experiment.compare import Comparison
from polyfed.papers.fpfc import (
    HBF,
    HBF_CAVEAT,
    HBF_TESTED,
    HBF_WORK,
    IMAGE_LAMBDA,
    IMAGE_LR,
    SYNTHETIC,
    WORK,
    hbf,
    image_settings,
    image_work,
    images,
    lenet,
    linear,
    lines,
    scenario,
    sizes,
    softmax,
)
from polyfed.papers.fpfc.panels import Panel, curve_panels
from polyfed.papers.recipe import Bench, Outcome, Setting, Size, beside, metric_of, ordered, ours, recipe

PRINTED = {"MNIST": ("86.62", "85.31", "77.05"), "Fashion-MNIST": ("68.28", "65.62", "59.34")}


def total(every: int, rounds: int) -> int:
    """sum of ceil(k / every), k = 1, ..., rounds."""
    return sum(-(-k // every) for k in range(1, rounds + 1))


def growing_settings(scale: Size):
    if scale == "small":
        s1 = Setting("S1", "T = ceil(k/20) in 280 rounds: as many steps as 10 in 210 and 5 in 420 rounds", "ours")
    else:
        s1 = Setting("S1", "T = ceil(k/20) in 623 rounds: about 1e4 steps, as many as 10 in 1001, 5 in 2003", "paper")
    return (
        sizes(scale),
        s1,
        Setting("H&BF", "T = k in 40 rounds: about 800 steps, as many as 10 in 82 rounds, 5 in 164", "paper"),
        Setting(
            "images", "T = ceil(k/2) in 63 rounds: about 1e3 steps, as many as 10 in 102 rounds, 5 in 204", "paper"
        ),
        Setting("T on images", "counts mini-batch steps ('the total number of local iterations')", "paper"),
        Setting("lambda on S1", "0.7", "ours"),
        *SYNTHETIC,
        *(Setting(f"H&BF, {s.key}", s.value, s.source) for s in HBF),
        *image_settings(scale),
    )


def three(bench: Bench, key: str, model, federation, fpfc: FPFC, every: int, rounds: int, work):
    """T growing, 10 and 5 for the same total."""
    steps, found = total(every, rounds), []
    for label, count, rule in (
        ("growing", rounds, f"ceil(k/{every})"),
        ("T=10", steps // 10, 10),
        ("T=5", steps // 5, 5),
    ):
        settings = {**work, "rounds": bench.rounds(count, count), "evaluate_every": max(1, count // 30)}
        found.append(bench.compare(f"{key}-{label}", model, federation, {label: fpfc}, local_steps=rule, **settings))
    return found, by_round(found, rounds)


def by_round(found: list[Comparison], rounds: int) -> dict[str, np.ndarray]:
    """label -> [seeds] the metric at the last evaluation up to `rounds`."""
    out = {}
    for part in found:
        for label, (at, values) in lines(part, factor=1.0).items():
            out[label] = np.array([v[np.searchsorted(at, rounds, side="right") - 1] for v in values])
    return out


@recipe("fpfc/figure9", "Figure 9: local work that grows with the rounds", minutes=(6, 120), settings=growing_settings,
        machine="two cores", data=("housing_bodyfat", "mnist", "fashion_mnist"))  # fmt: skip
def figure9(bench: Bench) -> Outcome:
    """Is it better to do little at first and more later, for the same total of local work?"""
    tables, panels, claims = [], [], []
    s1, pair = ({k: v for k, v in work.items() if k != "local_steps"} for work in (WORK, HBF_WORK))
    parts = {
        "S1": (softmax, scenario(bench), FPFC(0.1, lam=0.7), 20, bench.pick(280, 623), s1),
        "H&BF": (linear, hbf(bench), FPFC(0.01, lam=4.0, nu=4.0), 1, 40, pair),
    }
    for name, title in (("mnist", "MNIST"), ("fashion-mnist", "Fashion-MNIST")):
        method = FPFC(IMAGE_LR[bench.scale], lam=IMAGE_LAMBDA[bench.scale], shared_layers="body")
        parts[title] = (lenet, images(bench, name), method, 2, 63, image_work(bench))
    for title, part in parts.items():
        error = title == "H&BF"
        factor, sign, unit, metric = (1.0, -1, "", "RMSE") if error else (100.0, 1, " points", "accuracy, %")
        found, early = three(bench, title.lower().replace("&", ""), *part)
        rounds, rows, series = part[4], {}, {}
        for f, value in zip(found, PRINTED.get(title, (None, None, None)), strict=True):
            label = f.results[0].label
            rows[label] = [(value, ours(early[label], factor)), (None, ours(metric_of(f, label), factor))]
            series |= lines(f, factor=factor)
        tables.append(beside(title, (f"{metric} by round {rounds}", "at the end"), rows, first="T"))
        panels.append(Panel(title, "round", f"test {metric}", series))
        for other in ("T=10", "T=5"):
            text = f"{title}: growing T is better than {other} by round {rounds}"
            share = HBF_TESTED if error else 0.0
            claims.append(ordered(text, sign * early["growing"], sign * early[other], factor, unit, share))
    notes = [
        HBF_CAVEAT,
        "by the growing rule's last round, T = 10 and T = 5 have done less local work; at the end all have done the "
        "same, in more rounds",
    ]
    return Outcome(tables, {"figure9": curve_panels(panels, 2)}, claims, notes)
