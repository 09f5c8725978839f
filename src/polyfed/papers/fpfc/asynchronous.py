"""Figure 8, asyncFPFC (Algorithm 3): accuracy against virtual time, replies taken as they come or once a round."""

from functools import cache

import numpy as np
from scipy import stats

from polyfed.algorithms.fedasync import FedAsync
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedbuff import FedBuff
from polyfed.algorithms.fpfc import FPFC
from polyfed.core.schedule import Asynchronous, Delays, Timed, Uniform
from polyfed.experiment.compare import Comparison
from polyfed.papers.fpfc import (
    EPOCHS,
    HBF_CAVEAT,
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
    told_by,
)
from polyfed.papers.recipe import Bench, Claim, Outcome, Setting, Size, curve_figure, curves, joined, ours, recipe
from polyfed.report.table import Cell

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
        Setting("lambda", "0.7 (S1); 4, nu 4 (H&BF)", "ours"),
        Setting("rounds", f"{count} synchronous ones, and as long in virtual time", "ours"),
        sizes("small"),
        *(s for s in SYNTHETIC if s.key != "participation"),
    )


def slowest(delays: Delays, k: int) -> float:
    """The mean of the largest of k delays, seconds."""
    u = ((np.arange(4096) + 0.5) / 4096) ** (1 / k)  # quantiles of the largest of k uniform numbers
    if delays.kind == "uniform":
        return float(np.mean(delays.low + (delays.high - delays.low) * u))
    return float(np.mean(delays.low * np.exp(delays.high * stats.norm.ppf(u))))


def timed(
    bench: Bench, key: str, model, federation, fpfc: FPFC, n: int, active: int, delays, work, rivals=True,
    rounds=(80, 600),
):  # fmt: skip
    """FPFC a few or all devices at a time and reply by reply, and rivals, for the same virtual time."""
    lr, rounds = fpfc.lr, bench.rounds(*rounds)
    seconds = rounds * slowest(delays, active)
    every, turns = max(1, round(seconds / slowest(delays, n))), round(seconds * n / slowest(delays, 1))
    if bench.rehearse:
        every, turns = 2, 4
    settings = {k: v for k, v in work.items() if k != "fraction"}

    def part(name: str, methods, schedule, count: int) -> Comparison:
        if "lr_decay_every" in settings:  # by virtual time: a reply is a round of its own
            settings["lr_decay_every"] = max(1, round(work["lr_decay_every"] * count / rounds))
        return bench.compare(
            f"{key}-{name}", model, federation, methods, rounds=count, schedule=schedule,
            evaluate_every=max(1, count // POINTS), **settings,
        )  # fmt: skip

    once = {"FPFC": fpfc} | ({"FedAvg": FedAvg(lr)} if rivals else {})
    late = {"asyncFPFC": fpfc} | ({"FedAsync": FedAsync(lr), "FedBuff": FedBuff(lr, buffer=active)} if rivals else {})
    return joined(
        [
            part("rounds", once, Timed(Uniform(active / n), delays), rounds),
            part("all", {"FPFC-all": fpfc}, Timed(Uniform(1.0), delays), every),
            part("replies", late, Asynchronous(delays), turns),
        ]
    )


def first_time(found: Comparison, label: str, level: np.ndarray, sign: int) -> np.ndarray:
    """[seeds] virtual time of the first evaluation that is at the level or beyond; NaN if there is none."""
    frame, out = curves(found), []
    of_method = (frame["label"] == label).to_numpy()
    for k, seed in enumerate(dict.fromkeys(r.seed for r in found.results)):
        mine = of_method & (frame["seed"] == seed).to_numpy()
        value, at = (frame[c].to_numpy(dtype=float)[mine] for c in (found.metric.name, "virtual_time"))
        there = np.flatnonzero(sign * value >= sign * level[k])
        out.append(at[there[0]] if len(there) else np.nan)
    return np.array(out)


def last(found: Comparison, label: str) -> np.ndarray:
    """[seeds] the metric at the last evaluation."""
    return np.array([own[-1] for own in lines(found, factor=1.0)[label][1]])


def sooner(name: str, times: dict[str, np.ndarray], other: str, level: np.ndarray, factor: float) -> Claim:
    """asyncFPFC is where synchronous FPFC ends, before `other` is."""
    mine, its = times["asyncFPFC"], times[other]
    evidence = [
        f"{factor * v:.3g}: " + ("never" if np.isnan(a) else f"{a:.0f} s")
        + ", against " + ("never" if np.isnan(b) else f"{b:.0f} s")
        for v, a, b in zip(level, mine, its, strict=True)
    ]  # fmt: skip
    ahead = np.isfinite(mine) & ~(mine >= its)
    return Claim(f"{name}: asyncFPFC is where FPFC ends sooner than {other}", bool(ahead.all()), "; ".join(evidence))


@recipe("fpfc/asynchronous", "Figure 8: asyncFPFC against FPFC over time, S1 and H&BF", minutes=(3, 30),
        settings=settings, data=("housing_bodyfat",), also=("fpfc/figure8",))  # fmt: skip
def asynchronous(bench: Bench) -> Outcome:
    """What is waiting for the slowest device worth?"""
    s1 = cache(scenario(Bench(bench.folder, "small")))  # 20 devices at either size, as many as the paper's
    one, two = FPFC(0.1, lam=0.7), FPFC(0.01, lam=4.0, nu=4.0)
    uniform, heavy, _ = DELAYS.values()
    parts = {
        "S1": timed(bench, "s1", softmax, s1, one, 20, 5, uniform, WORK),
        "S1, log-normal": timed(bench, "s1-log-normal", softmax, s1, one, 20, 5, heavy, WORK, rivals=False),
        "H&BF": timed(bench, "hbf", linear, hbf(bench), two, 8, 3, uniform, HBF_WORK),
    }
    outcome = reported(parts)
    common = "FedAsync and FedBuff train one common model, as FedAvg does: they show what asynchrony alone brings"
    outcome.notes = [HBF_CAVEAT, *NOTES, common]
    return outcome


NOTES = (
    "asyncFPFC keeps all devices at work: in the same time they do more than the few of a round, and send more; "
    "FPFC-all has them all at work too, and waits for the slowest",
    "a virtual second takes no account of the server's own work; the paper shows curves without figures",
)


def reported(parts: dict[str, Comparison]) -> Outcome:
    """A table and a figure for each data set, and the claims."""
    tables, figures, claims = [], {}, []
    for name, found in parts.items():
        factor, unit, sign = (1.0, "test RMSE", -1) if name == "H&BF" else (100.0, "test accuracy, %", 1)
        series = lines(found, "virtual_time", factor)
        figures[name.lower().replace("&", "").replace(", ", "-")] = curve_figure(series, "virtual time, s", unit)
        level = last(found, "FPFC")
        times = {label: first_time(found, label, level, sign) for label in series}
        at = next(iter(series.values()))[0]
        marks = [len(at) // 4, len(at) // 2, len(at) - 1]
        heads = ("method<", *(f"after {at[k]:.0f} s" for k in marks), "s to FPFC's end", "replies taken")
        replies: dict[str, list[int]] = {r.label: [] for r in found.results}
        for r in found.results:
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
        tables.append(told_by(f"{name}: {unit} reached", heads, rows))
        claims += [sooner(name, times, other, level, factor) for other in ("FPFC", "FPFC-all")]
    return Outcome(tables, figures, claims)


def settings_of_images(scale: Size):
    small = scale == "small"
    return (
        Setting("delays", "from being sent a model to the reply: uniform on [0, 800] s", "paper"),
        Setting("synchronous", "FPFC: 5 of 20 devices a round", "paper"),
        Setting("asynchronous", "all devices at work, every reply taken by itself", "paper"),
        Setting("shared layers", "synchronous: the round's mean; asynchronous: those of the last reply", "ours"),
        Setting("step size", "decays by virtual time, as every 5 synchronous rounds", "ours"),
        Setting("rounds", f"{15 if small else 200} synchronous ones, and as long in virtual time", "ours"),
        EPOCHS[scale],
        *image_settings(scale),
    )


@recipe("fpfc/figure8-images", "Figure 8: the same on label-swapped images", minutes=(15, 4000),
        settings=settings_of_images, machine="two cores", data=("mnist", "fashion_mnist"))  # fmt: skip
def figure8_images(bench: Bench) -> Outcome:
    """Does asynchrony pay where layers are shared?"""
    work = image_work(bench) | {"local_epochs": bench.pick(5, 10)}
    fpfc = FPFC(IMAGE_LR[bench.scale], lam=IMAGE_LAMBDA[bench.scale], shared_layers="body")
    parts = {
        title: timed(bench, name, lenet, images(bench, name), fpfc, 20, 5, DELAYS["images"], work, False, (15, 200))
        for name, title in (("mnist", "MNIST"), ("fashion-mnist", "Fashion-MNIST"))
    }
    outcome = reported(parts)
    outcome.notes = [*NOTES, "Algorithm 3 takes one reply at a time: the mean of the shared layers is that reply's own"]
    return outcome
