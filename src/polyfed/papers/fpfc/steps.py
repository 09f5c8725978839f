"""How much a device does in a round: growing with the rounds (Figure 9), and different between devices."""

import numpy as np

from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.experiment.compare import Comparison
from polyfed.papers.fpfc import (
    IMAGE_LAMBDA,
    IMAGE_LR,
    SYNTHETIC,
    WORK,
    image_settings,
    image_work,
    images,
    lenet,
    lines,
    rounds_of,
    scenario,
    sizes,
    softmax,
)
from polyfed.papers.recipe import (
    Bench,
    Outcome,
    Setting,
    Size,
    beside,
    curve_figure,
    grouping_of,
    metric_of,
    ordered,
    ours,
    recipe,
)

EPOCH = {"small": 8, "paper": 24}  # batches that the images of an average device make
PRINTED = {"mnist": ("86.62", "85.31", "77.05"), "fashion-mnist": ("68.28", "65.62", "59.34")}


def total(every: int, rounds: int) -> int:
    """sum of ceil(k / every), k = 1, ..., rounds."""
    return sum(-(-k // every) for k in range(1, rounds + 1))


def growing_settings(scale: Size):
    if scale == "small":
        own = (
            Setting("S1", "T = ceil(k/20) in 280 rounds: as many steps as 10 in 210 and 5 in 420 rounds", "ours"),
            Setting("images", "T = ceil(k/2) passes in 16 rounds, as many as 10 in 7 and 5 in 14", "ours"),
        )
    else:
        own = (
            Setting("S1", "T = ceil(k/20) in 623 rounds: about 1e4 steps, as many as 10 in 1001, 5 in 2003", "paper"),
            Setting("images", "T = ceil(k/2) passes in 63 rounds: about 1e3 passes, as 10 in 102, 5 in 204", "paper"),
        )
    passes = Setting("a pass", f"{EPOCH[scale]} batches for every device, those of an average one", "ours")
    lam = Setting("lambda on S1", "0.7", "ours")
    return (sizes(scale), *own, passes, lam, *SYNTHETIC, *image_settings(scale))


def three(bench: Bench, key: str, model, federation, fpfc: FPFC, every: int, rounds: int, unit: int, work):
    """T growing, 10 and 5 for the same total; unit: steps that T counts."""
    steps, found = total(every, rounds), []
    growing, ten, five = f"{unit} * ceil(k/{every})", 10 * unit, 5 * unit
    for label, count, rule in (("growing", rounds, growing), ("T-10", steps // 10, ten), ("T-5", steps // 5, five)):
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


@recipe("fpfc/figure9", "Figure 9: local work that grows with the rounds", minutes=(3, 900), settings=growing_settings,
        machine="two cores", data=("mnist", "fashion_mnist"))  # fmt: skip
def figure9(bench: Bench) -> Outcome:
    """Is it better to do little at first and more later, for the same total of local work?"""
    tables, figures, claims = [], {}, []
    s1 = {k: v for k, v in WORK.items() if k != "local_steps"}
    parts = {"s1": (softmax, scenario(bench), FPFC(0.1, lam=0.7), 20, bench.pick(280, 623), 1, s1)}
    for name in ("mnist", "fashion-mnist"):
        method = FPFC(IMAGE_LR[bench.scale], lam=IMAGE_LAMBDA[bench.scale], shared_layers="body")
        unit = 1 if bench.rehearse else EPOCH[bench.scale]
        parts[name] = (lenet, images(bench, name), method, 2, bench.pick(16, 63), unit, image_work(bench))
    for name, part in parts.items():
        found, early = three(bench, name, *part)
        rounds = part[4]
        printed, rows, series = PRINTED.get(name, (None, None, None)), {}, {}
        for f, value in zip(found, printed, strict=True):
            label = f.results[0].label
            rows[label] = [(value, ours(early[label], 100)), (None, ours(metric_of(f, label), 100))]
            series |= lines(f)
        tables.append(beside(name, (f"accuracy by round {rounds}, %", "at the end, %"), rows, first="T"))
        figures[f"growing-{name}"] = curve_figure(series, "round", "test accuracy, %")
        for other in ("T-10", "T-5"):
            text = f"{name}: growing T is better than {other} by round {rounds}"
            claims.append(ordered(text, early["growing"], early[other], 100, " points"))
    notes = [
        "by the growing rule's last round, T = 10 and T = 5 have done less local work; at the end all have done the "
        "same, in more rounds"
    ]
    return Outcome(tables, figures, claims, notes)


def uneven_settings(scale: Size):
    uneven = Setting("uneven", "T_i uniform on 1, ..., 10 for every device and round", "paper")
    return (sizes(scale), rounds_of(scale, 600, 2000), Setting("lambda", "0.7", "ours"), uneven, *SYNTHETIC)


@recipe(
    "fpfc/uneven-steps", "Devices that do different amounts of local work", minutes=(1, 20), settings=uneven_settings
)
def uneven_steps(bench: Bench) -> Outcome:
    """Does it matter if the devices of a round do not do the same amount of work?"""
    methods = {"FPFC": FPFC(0.1, lam=0.7), "FedAvg": FedAvg(0.1)}
    work = {k: v for k, v in WORK.items() if k != "local_steps"}
    rounds = bench.rounds(600, 2000)
    rules = {"T = 10": 10, "T uniform on 1 to 10": "uniform(1, 10)", "T = 5": 5}
    rows, series, values = {}, {}, {}
    for text, rule in rules.items():
        found = bench.compare(
            text.replace(" ", "-").replace("=", "is"), softmax, scenario(bench), methods, rounds=rounds,
            local_steps=rule, evaluate_every=20, **work,
        )  # fmt: skip
        for label in methods:
            number, score = grouping_of(found, label)
            value = metric_of(found, label)
            rows[f"{label}, {text}"] = [(None, ours(value, 100)), (None, ours(number)), (None, ours(score))]
            values[label, text] = value
        series[f"FPFC, {text}"] = lines(found)["FPFC"]
    claims = [
        ordered("FPFC: uneven work costs accuracy against T = 10", values["FPFC", "T = 10"],
                values["FPFC", "T uniform on 1 to 10"], 100, " points"),
        ordered("FPFC is better than FedAvg with uneven work", values["FPFC", "T uniform on 1 to 10"],
                values["FedAvg", "T uniform on 1 to 10"], 100, " points"),
    ]  # fmt: skip
    notes = ["T = 5 is what uneven devices do on average (5.5)", "the paper shows curves without figures"]
    table = beside("Uneven local work, S1", ("accuracy, %", "clusters", "ARI"), rows)
    return Outcome([table], {"uneven": curve_figure(series, "round", "test accuracy, %")}, claims, notes)
