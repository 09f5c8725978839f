"""Figure 9: how much a device does in a round, growing with the rounds."""

from dataclasses import dataclass

import numpy as np

from polyfed.compute.batches import Each
from polyfed.studies.compare import Comparison
from polyfed_papers.fpfc import (
    HBF_BESIDE,
    HBF_CAVEAT,
    IMAGE_TITLES,
    SYNTHETIC,
    Problem,
    hbf,
    image_settings,
    images,
    lines,
    sizes,
    synthetic,
)
from polyfed_papers.fpfc.panels import Panel, curve_panels
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, metric_of, recipe
from polyfed_papers.recipes.said import Setting, beside, ours, without

PRINTED = {"MNIST": ("86.62", "85.31", "77.05"), "Fashion-MNIST": ("68.28", "65.62", "59.34")}


@dataclass(frozen=True)
class Growing(Each):
    """ceil(k / every) local steps in round k = 1, 2, ..."""

    every: int

    @property
    def equal(self) -> bool:
        return True

    def __call__(self, seed: int, round: int, keys: np.ndarray) -> np.ndarray:
        return np.full(len(keys), -(-(round + 1) // self.every))

    def __str__(self) -> str:
        return f"ceil(k/{self.every})"


def total(every: int, rounds: int) -> int:
    """sum of ceil(k / every), k = 1, ..., rounds."""
    return sum(-(-k // every) for k in range(1, rounds + 1))


def growing_settings(scale: Size):
    if scale == "small":
        s1 = Setting("S1", "T = ceil(k/6) in 156 rounds: as many steps as 10 in 210 and 5 in 421 rounds", "ours")
    else:
        s1 = Setting("S1", "T = ceil(k/20) in 623 rounds: about 1e4 steps, as many as 10 in 1001, 5 in 2003", "paper")
    return (
        sizes(scale),
        s1,
        Setting("H&BF", "T = k in 40 rounds: about 800 steps, as many as 10 in 82 rounds, 5 in 164", "paper"),
        Setting(
            "images", "T = ceil(k/2) in 63 rounds: about 1e3 steps, as many as 10 in 102 rounds, 5 in 204", "paper"
        ),
        Setting("T on images", "counts mini-batch steps (the text: 'the total number of local iterations')", "ours"),
        Setting("lambda on S1", "0.7", "ours"),
        *without(SYNTHETIC, "local work"),
        Setting("lr on S1", "0.1", "paper"),
        *without(HBF_BESIDE, "H&BF, work", "H&BF, rounds"),
        Setting("H&BF, lr", "0.01", "paper"),
        *image_settings(scale, ("rounds, images", "epochs")),
    )


def three(bench: Bench, problem: Problem, every: int, rounds: int):
    """T growing, 10 and 5 for the same total, all looked at in the growing rule's last round."""
    steps, found = total(every, rounds), []
    look = max(k for k in range(1, max(1, rounds // 20) + 1) if rounds % k == 0)
    for label, count, rule in (("growing", rounds, Growing(every)), ("T=10", steps // 10, 10), ("T=5", steps // 5, 5)):
        found.append(bench.compare(
            f"{problem.key}-{label}", problem.model, problem.federation, {label: problem.fpfc},
            rounds=bench.rounds(count, count), evaluate_every=look, **problem.work_of(rule),
        ))  # fmt: skip
    return found, by_round(found, rounds)


def by_round(found: list[Comparison], rounds: int) -> dict[str, np.ndarray]:
    """label -> [seeds] the metric in that round; in a rehearsal, in the last one."""
    out = {}
    for part in found:
        for label, (at, values) in lines(part, factor=1.0).items():
            out[label] = np.array([v[np.searchsorted(at, rounds, side="right") - 1] for v in values])
    return out


@recipe("fpfc/figure9", "Figure 9: local work that grows with the rounds", minutes=(1, 120), settings=growing_settings,
        machine="two cores", data=("housing_bodyfat", "mnist", "fashion_mnist"))  # fmt: skip
def figure9(bench: Bench) -> Outcome:
    """Is it better to do little at first and more later, for the same total of local work?"""
    tables, panels, claims = [], [], []
    parts = [(synthetic(bench), *bench.pick((6, 156), (20, 623))), (hbf(bench), 1, 40)]
    parts += [(images(bench, title), 2, 63) for title in IMAGE_TITLES]
    for problem, every, rounds in parts:
        found, early = three(bench, problem, every, rounds)
        rows, series, factor = {}, {}, problem.factor
        for f, value in zip(found, PRINTED.get(problem.title, (None, None, None)), strict=True):
            label = f.results[0].label
            rows[label] = [(value, ours(early[label], factor)), (None, ours(metric_of(f, label), factor))]
            series |= lines(f, factor=factor)
        tables.append(beside(problem.title, (f"{problem.metric} by round {rounds}", "at the end"), rows, first="T"))
        panels.append(Panel(problem.title, "round", f"test {problem.metric}", series))
        claims += [
            problem.better(f"growing T is better than {other} by round {rounds}", early["growing"], early[other])
            for other in ("T=10", "T=5")
        ]
    notes = [
        HBF_CAVEAT,
        "by the growing rule's last round, T = 10 and T = 5 have done less local work; at the end all have done the "
        "same, in more rounds",
    ]
    return Outcome(tables, {"figure9": curve_panels(panels, 2)}, claims, notes)
