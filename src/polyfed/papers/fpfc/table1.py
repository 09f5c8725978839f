"""Table 1 and Tables E.1 to E.4: nine methods on the synthetic scenarios S1 to S5."""

from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.algorithms.local import Local
from polyfed.papers.fpfc import SYNTHETIC, WORK, scenario, sizes, softmax
from polyfed.papers.recipe import Bench, Outcome, Setting, beside, grouping_of, metric_of, ordered, ours, recipe


def settings(scale):
    rounds = Setting("rounds", "600", "ours") if scale == "small" else Setting("rounds", "2000", "paper")
    return (sizes(scale), rounds, Setting("lambda", "0.7", "ours"), *SYNTHETIC)


@recipe("fpfc/table1", "Table 1: nine methods on S1", minutes=(1, 30), settings=settings)
def table1(bench: Bench) -> Outcome:
    """Do clusters that are found beat one common model, and models trained alone?"""
    methods = {"Local": Local(lr=0.1), "FedAvg": FedAvg(lr=0.1), "FPFC": FPFC(lr=0.1, lam=0.7)}
    found = bench.compare(
        "s1", softmax, scenario(bench), methods, rounds=bench.rounds(600, 2000), evaluate_every=0, **WORK
    )
    printed = {"Local": ("84.97", None, None), "FedAvg": ("30.35", None, None), "FPFC": ("89.46", "4.00", "1.00")}
    rows = {}
    for label, (accuracy, number, ari) in printed.items():
        numbers, scores = grouping_of(found, label)
        mine = ours(metric_of(found, label), 100)
        rows[label] = [(accuracy, mine), (number, ours(numbers)), (ari, ours(scores))]
    claims = [ordered("FPFC beats Local", metric_of(found, "FPFC"), metric_of(found, "Local"), 100, " points")]
    return Outcome([beside("Table 1, S1", ("accuracy, %", "clusters", "ARI"), rows)], claims=claims)
