"""asyncFPFC (Algorithm 3): accuracy against virtual time, replies taken as they come or once a round."""

import numpy as np

from polyfed.algorithms.fedasync import FedAsync
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedbuff import FedBuff
from polyfed.algorithms.fpfc import FPFC
from polyfed.core.schedule import Asynchronous, Delays, Timed, Uniform
from polyfed.experiment.compare import Comparison
from polyfed.papers.fpfc import (
    HBF_CAVEAT,
    HBF_WORK,
    SYNTHETIC,
    WORK,
    hbf,
    joined,
    linear,
    lines,
    scenario,
    sizes,
    softmax,
)
from polyfed.papers.recipe import Bench, Outcome, Setting, Size, curve_figure, ordered, ours, recipe
from polyfed.report.table import Cell, Table

DELAYS = Delays("uniform", 0.0, 20.0)


def settings(scale: Size):
    rounds = Setting("rounds", "120 synchronous ones, and as long in virtual time", "ours")
    if scale == "paper":
        rounds = Setting("rounds", "600 synchronous ones, and as long in virtual time", "ours")
    return (
        Setting("delays", "from being sent a model to the reply: uniform on [0, 20] s", "paper"),
        Setting("synchronous", "5 of 20 devices a round (S1), 3 of 8 (H&BF)", "paper"),
        Setting("asynchronous", "all devices at work, every reply taken by itself", "paper"),
        Setting("FedAsync, FedBuff", "alpha 0.6, exponent 0.5, mu 0.005; buffer of 5 (S1), 3 (H&BF)", "ours"),
        Setting("lambda", "0.7 (S1); 4, nu 4 (H&BF)", "ours"),
        rounds,
        sizes("small"),
        *(s for s in SYNTHETIC if s.key != "participation"),
    )


def both(bench: Bench, key: str, model, federation, fpfc: FPFC, n: int, active: int, work) -> Comparison:
    """FPFC and FedAvg once a round, FPFC, FedAsync and FedBuff reply by reply, for the same virtual time."""
    lr, rounds = fpfc.lr, bench.rounds(120, 600)
    per_round = 20 * active / (active + 1)  # seconds: the mean of the slowest of the round
    turns = min(4, rounds) if bench.rehearse else round(rounds * per_round * n / 10)
    settings = {k: v for k, v in work.items() if k != "fraction"}
    once = bench.compare(
        f"{key}-rounds", model, federation, {"FPFC": fpfc, "FedAvg": FedAvg(lr)}, rounds=rounds,
        schedule=Timed(Uniform(active / n), DELAYS), evaluate_every=max(1, rounds // 40), **settings,
    )  # fmt: skip
    methods = {"asyncFPFC": fpfc, "FedAsync": FedAsync(lr), "FedBuff": FedBuff(lr, buffer=active)}
    late = bench.compare(
        f"{key}-replies", model, federation, methods, rounds=turns, schedule=Asynchronous(DELAYS),
        evaluate_every=max(1, turns // 40), **settings,
    )  # fmt: skip
    return joined([once, late])


@recipe("fpfc/asynchronous", "asyncFPFC: accuracy against time, synchronous and asynchronous", minutes=(3, 15),
        settings=settings, data=("housing_bodyfat",))  # fmt: skip
def asynchronous(bench: Bench) -> Outcome:
    """What is waiting for the slowest device worth?"""

    def small_s1(seed):
        return scenario(Bench(bench.folder, "small"))(seed)

    parts = {
        "S1": (both(bench, "s1", softmax, small_s1, FPFC(0.1, lam=0.7), 20, 5, WORK), 100.0, "test accuracy, %"),
        "H&BF": (both(bench, "hbf", linear, hbf(bench), FPFC(0.01, lam=4.0, nu=4.0), 8, 3, HBF_WORK), 1.0, "test RMSE"),
    }
    tables, figures, claims = [], {}, []
    for name, (found, factor, unit) in parts.items():
        series = lines(found, "virtual_time", factor)
        figures[name.lower().replace("&", "")] = curve_figure(series, "virtual time, s", unit)
        at = next(iter(series.values()))[0]
        marks = [len(at) // 4, len(at) // 2, len(at) - 1]
        heads = ("method<", *(f"after {at[k]:.0f} s" for k in marks), "replies taken")
        replies: dict[str, list[int]] = {r.label: [] for r in found.results}
        for r in found.results:
            if r.clients is not None:
                replies[r.label].append(sum(r.clients["rounds"].tolist()))
        rows = [
            (Cell(label), *(ours([v[k] for v in values]) for k in marks), ours(replies[label], decimals=0))
            for label, (_, values) in series.items()
        ]
        tables.append(Table(f"{name}: {unit} reached", heads, tuple(rows)))
        sign, k = 1 if factor == 100 else -1, marks[0]
        fast, slow = (np.array([v[k] for v in series[label][1]]) for label in ("asyncFPFC", "FPFC"))
        claims.append(ordered(f"{name}: asyncFPFC is ahead of FPFC after {at[k]:.0f} s", sign * fast, sign * slow))
    notes = [
        HBF_CAVEAT,
        "FedAsync and FedBuff train one common model, as FedAvg does: on clusters they are no rivals, but show what "
        "asynchrony alone brings",
        "a virtual second takes no account of the server's own work",
    ]
    return Outcome(tables, figures, claims, notes)
