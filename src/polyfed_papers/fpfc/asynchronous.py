"""Figure 8, asyncFPFC (Algorithm 3): accuracy against virtual time, replies taken as they come or once a round."""

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
from scipy import stats

from polyfed import FPFC, Algorithm, Asynchronous, Delays, FedAsync, FedAvg, FedBuff, Timed, Uniform
from polyfed.compute.optimizers import step_sizes_of
from polyfed.report.table import Cell
from polyfed.studies.compare import Comparison
from polyfed_papers.fpfc import IMAGE_TITLES, Problem, hbf, images, lines, synthetic
from polyfed_papers.fpfc.stated import HBF_BESIDE, HBF_CAVEAT, SYNTHETIC, image_settings, sizes
from polyfed_papers.recipes.drawing import curve_figure
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, curves, joined, recipe
from polyfed_papers.recipes.said import Claim, Setting, ours, told_by, without

DELAYS = {
    "uniform": Delays("uniform", 0.0, 20.0),
    "log-normal": Delays("log-normal", 10 * np.exp(-0.5), 1.0),  # of the same mean, 10 s
    "images": Delays("uniform", 0.0, 800.0),
}
POINTS = 80  # evaluations of a run


def settings(scale: Size):
    count = 80 if scale == "small" else 600
    return (
        Setting("delays", "from being sent a model to the reply: uniform on [0, 20] s", "paper"),
        Setting("other delays, S1", "log-normal, mean 10 s, shape 1", "ours"),
        Setting("synchronous", "FPFC: 5 of 20 devices a round (S1), 3 of 8 (H&BF)", "paper"),
        Setting("synchronous, FPFC-all", "all devices in every round", "ours"),
        Setting("asynchronous", "all devices at work, every reply taken by itself", "paper"),
        Setting("FedAsync, FedBuff", "alpha 0.6, exponent 0.5, mu 0.005; buffer of 5 (S1), 3 (H&BF)", "ours"),
        Setting("lambda on S1", "0.7", "ours"),
        Setting("rounds", f"{count} synchronous ones, and as long in virtual time", "ours"),
        sizes("small"),
        *without(SYNTHETIC, "participation"),
        *without(HBF_BESIDE, "H&BF, participation", "H&BF, rounds"),
    )


def slowest(delays: Delays, k: int) -> float:
    """The mean of the largest of k delays, seconds."""
    u = ((np.arange(4096) + 0.5) / 4096) ** (1 / k)  # quantiles of the largest of k uniform numbers
    if delays.kind == "uniform":
        return float(np.mean(delays.low + (delays.high - delays.low) * u))
    return float(np.mean(delays.low * np.exp(delays.high * stats.norm.ppf(u))))


def timed(
    bench: Bench, problem: Problem, n: int, active: int, delays: Delays, rivals: bool = True
) -> tuple[Problem, Comparison]:
    """FPFC a few or all devices at a time and reply by reply, and rivals, for the same virtual time."""
    fpfc, lr, rounds, work = problem.fpfc, problem.fpfc.lr, problem.rounds, problem.work
    seconds = rounds * slowest(delays, active)
    every, turns = max(1, round(seconds / slowest(delays, n))), round(seconds * n / slowest(delays, 1))
    if bench.rehearse:
        every, turns = 2, 4
    settings = {k: v for k, v in work.items() if k != "fraction"}

    def part(name: str, methods, schedule, count: int) -> Comparison:
        if "lr_schedule" in settings:  # by virtual time: a reply is a round of its own
            decay: Any = step_sizes_of(work["lr_schedule"])
            every = max(1, round(decay.every * count / rounds))
            settings["lr_schedule"] = f"exponential:factor={decay.factor},every={every}"
        own = replace(problem, work=settings)
        often = max(1, count // POINTS)
        return own.compare(
            bench, f"{problem.key}-{name}", methods, rounds=count, schedule=schedule, evaluate_every=often
        )

    once = {"FPFC": fpfc} | ({"FedAvg": FedAvg(lr)} if rivals else {})
    late: dict[str, Algorithm] = {"asyncFPFC": fpfc}
    if fpfc.shared_layers:
        same = {f.name: getattr(fpfc, f.name) for f in fields(fpfc)}
        late = {"asyncFPFC": Blended(**same, part=1 / active)}
    late |= {"FedAsync": FedAsync(lr), "FedBuff": FedBuff(lr, buffer=active)} if rivals else {}
    parts = [
        part("rounds", once, Timed(Uniform(active / n), delays), rounds),
        part("all", {"FPFC-all": fpfc}, Timed(Uniform(1.0), delays), every),
        part("replies", late, Asynchronous(delays), turns),
    ]
    return problem, joined(parts)


def first_time(runs: Comparison, label: str, level: np.ndarray, sign: int) -> np.ndarray:
    """[seeds] virtual time of the first evaluation that is at the level or beyond; NaN if there is none."""
    frame, out = curves(runs), []
    of_method = (frame["label"] == label).to_numpy()
    for k, seed in enumerate(dict.fromkeys(r.seed for r in runs.results)):
        mine = of_method & (frame["seed"] == seed).to_numpy()
        value, at = (frame[c].to_numpy(dtype=float)[mine] for c in (runs.metric.name, "virtual_time"))
        there = np.flatnonzero(sign * value >= sign * level[k])
        out.append(at[there[0]] if len(there) else np.nan)
    return np.array(out)


def last(runs: Comparison, label: str) -> np.ndarray:
    """[seeds] the metric at the last evaluation."""
    return np.array([own[-1] for own in lines(runs, factor=1.0)[label][1]])


def sooner(problem: Problem, times: dict[str, np.ndarray], other: str, level: np.ndarray) -> Claim:
    """asyncFPFC is where synchronous FPFC ends, before `other` is."""
    mine, its = times["asyncFPFC"], times[other]
    evidence = [
        f"{problem.factor * v:.3g}: " + ("never" if np.isnan(a) else f"{a:.0f} s")
        + ", against " + ("never" if np.isnan(b) else f"{b:.0f} s")
        for v, a, b in zip(level, mine, its, strict=True)
    ]  # fmt: skip
    ahead = np.isfinite(mine) & ~(mine >= its)
    return Claim(
        f"{problem.title}: asyncFPFC is where FPFC ends sooner than {other}", bool(ahead.all()), "; ".join(evidence)
    )


@dataclass(frozen=True)
class Blended(FPFC, abstract=True):
    """FPFC whose server moves the shared layers part of the way to what arrives: alone, a reply would replace them."""

    name: ClassVar[str] = "fpfc-blended"

    part: float = 0.2

    def aggregate(self, server, up, round):
        before = server["common"].clone()
        after = super().aggregate(server, up, round)
        return after | {"common": before + self.part * (after["common"] - before)}


@recipe("fpfc/asynchronous", "Figure 8: asyncFPFC against FPFC over time, S1 and H&BF", minutes=(3, 30),
        settings=settings, data=("housing_bodyfat",), also=("fpfc/figure8",))  # fmt: skip
def asynchronous(bench: Bench) -> Outcome:
    """What is waiting for the slowest device worth?"""
    rounds = bench.rounds(80, 600)
    one = synthetic(Bench(bench.folder, "small"))  # 20 devices at either size, as many as the paper's
    one = replace(one, federation=cache(one.federation), rounds=rounds)
    uniform, heavy, _ = DELAYS.values()
    outcome = reported([
        timed(bench, one, 20, 5, uniform),
        timed(bench, replace(one, title="S1, log-normal"), 20, 5, heavy, rivals=False),
        timed(bench, replace(hbf(bench), rounds=rounds), 8, 3, uniform),
    ])  # fmt: skip
    common = "FedAsync and FedBuff train one common model, as FedAvg does: they show what asynchrony alone brings"
    outcome.notes = [HBF_CAVEAT, *NOTES, common]
    return outcome


NOTES = (
    "asyncFPFC keeps all devices at work: in the same time they do more than the few of a round, and send more; "
    "FPFC-all has them all at work too, and waits for the slowest",
    "a virtual second takes no account of the server's own work; the paper shows curves without figures",
)


def reported(parts: list[tuple[Problem, Comparison]]) -> Outcome:
    """A table and a figure for each data set, and the claims."""
    tables, figures, claims = [], {}, []
    for problem, comparison in parts:
        unit, sign = f"test {problem.metric}", problem.sign
        series = lines(comparison, "virtual_time", problem.factor)
        figures[problem.key] = curve_figure(series, "virtual time, s", unit)
        level = last(comparison, "FPFC")
        times = {label: first_time(comparison, label, level, sign) for label in series}
        at = next(iter(series.values()))[0]
        marks = [len(at) // 4, len(at) // 2, len(at) - 1]
        heads = ("method<", *(f"after {at[k]:.0f} s" for k in marks), "s to FPFC's end", "replies taken")
        replies: dict[str, list[int]] = {r.label: [] for r in comparison.results}
        for r in comparison.results:
            if r.clients is not None:
                replies[r.label].append(sum(r.clients["rounds"].tolist()))
        rows = [
            (
                Cell(label), *(ours([v[k] for v in values]) for k in marks),
                ours(times[label], decimals=0) if np.isfinite(times[label]).all() else Cell("not under every seed"),
                ours(replies[label], decimals=0),
            )
            for label, (_, values) in series.items()
        ]  # fmt: skip
        tables.append(told_by(f"{problem.title}: {unit} reached", heads, rows))
        claims += [sooner(problem, times, other, level) for other in ("FPFC", "FPFC-all")]
    return Outcome(tables, figures, claims)


def settings_of_images(scale: Size):
    return (
        Setting("delays", "from being sent a model to the reply: uniform on [0, 800] s", "paper"),
        Setting("synchronous", "FPFC: 5 of 20 devices a round", "paper"),
        Setting("asynchronous", "all devices at work, every reply taken by itself", "paper"),
        Setting("shared layers",
                "synchronous: the round's mean; asynchronous: a reply moves them a fifth of the way, "
                "as five make a round; the paper does not say", "ours"),
        Setting("step size", "decays by virtual time, as every 5 synchronous rounds", "ours"),
        Setting("rounds", "synchronous ones, and as long in virtual time", "ours"),
        *image_settings(scale, ("participation, images",)),
    )  # fmt: skip


@recipe("fpfc/figure8-images", "Figure 8: the same on label-swapped images", minutes=(2, 4000),
        settings=settings_of_images, data=("mnist", "fashion_mnist"))  # fmt: skip
def figure8_images(bench: Bench) -> Outcome:
    """Does asynchrony pay where layers are shared?"""
    parts = (timed(bench, images(bench, title), 20, 5, DELAYS["images"], rivals=False) for title in IMAGE_TITLES)
    outcome = reported(list(parts))
    shared = (
        "Algorithm 3 takes one reply at a time, and does not say what becomes of shared layers: replaced by the last "
    )
    outcome.notes = [*NOTES, shared + "reply's they are one device's after another's, and little is learnt"]
    return outcome
