"""Figure E.1, FPFC and IFCA from many random starts; Figure 9, local work that grows with the rounds."""

from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from polyfed.algorithms.ifca import IFCA
from polyfed.compute.batches import Each
from polyfed.report.style import BLUE, INK, VERMILLION
from polyfed.report.table import Cell
from polyfed.studies.compare import Comparison
from polyfed_papers.fpfc import IMAGE_TITLES, Problem, hbf, images, lines, synthetic
from polyfed_papers.fpfc.stated import HBF_BESIDE, HBF_CAVEAT, SYNTHETIC, image_settings, rounds_of, sizes
from polyfed_papers.recipes.drawing import Panel, curve_panels, panes
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, grouping_of, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, beside, ours, told_by, without

STARTS = 50
CASES = {"S1": 0.7, "S3": 0.6}  # lambda at small size


def settings(scale: Size):
    lam = Setting("lambda", "0.7 (S1), 0.6 (S3)", "ours") if scale == "small" else Setting("lambda", "0.6", "paper")
    return (
        *(sizes(scale, name.lower()) for name in CASES),
        Setting("starts", f"{STARTS}, on one draw of the data", "paper"),
        rounds_of(scale, 100, 2000),
        lam,
        *without(SYNTHETIC, "nu"),
        Setting("nu", "0.5, the largest value that Remark 2 allows", "ours"),
        Setting("IFCA", "k given; other starts w0 + N(0, I), drawn anew", "ours"),
    )


@recipe("fpfc/figure-e1", "Figure E.1: FPFC and IFCA from 50 random starts on S1 and S3", minutes=(3, 900),
        settings=settings, seeds=1)  # fmt: skip
def figure_e1(bench: Bench) -> Outcome:
    """Does what is found depend on where training starts?"""
    count = 2 if bench.rehearse else STARTS
    many = bench.under(range(count))
    rows, claims, values = [], [], {}
    for name, lam in CASES.items():
        problem = synthetic(bench, name.lower())
        fpfc, k = replace(problem.fpfc, lam=bench.pick(lam, 0.6), nu=0.5), problem.clusters
        runs = many.compare(
            problem.key, problem.model, problem.federation(bench.seeds[0]),
            lambda seed, k=k, fpfc=fpfc: {"FPFC": fpfc, "IFCA": IFCA(0.1, k=k, init_scale=1.0, seed=seed)},
            rounds=bench.rounds(100, 2000), evaluate_every=0, **problem.work,
        )  # fmt: skip
        values[name] = {m: (100 * metric_of(runs, m), grouping_of(runs, m)[1]) for m in ("FPFC", "IFCA")}
        for label, (accuracy, score) in values[name].items():
            middle = ", ".join(f"{q:.1f}" for q in np.quantile(accuracy, (0, 0.5, 1)))
            rows.append((Cell(name), Cell(label), ours(accuracy), Cell(middle), ours(score)))
        for k, (quantity, unit) in enumerate((("accuracy", " points"), ("ARI", ""))):
            mine, its = (values[name][m][k] for m in ("FPFC", "IFCA"))
            claims.append(steadier(f"{name}: FPFC's {quantity} varies less over starts than IFCA's", mine, its, unit))
    heads = ("scenario<", "method<", "accuracy, %", "least, median, most", "ARI")
    table = told_by(f"{count} random starts, mean and standard deviation over starts", heads, rows)
    return Outcome([table], {"figure-e1": boxes(values)}, claims, ["the paper shows distributions without figures"])


def steadier(text: str, mine: np.ndarray, its: np.ndarray, unit: str) -> Claim:
    """The claim that `mine` is spread less, by Brown and Forsythe's test at 5 %."""
    a, b = mine.std(ddof=1), its.std(ddof=1)
    p = float(stats.levene(mine, its).pvalue) if len(mine) > 2 and a + b > 0 else 1.0
    holds = None if not p < 0.05 else bool(a < b)
    return Claim(text, holds, f"standard deviations {a:.3g} and {b:.3g}{unit}, p = {p:.1g}")


def boxes(values: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]) -> Figure:
    """Accuracy left, ARI right, a row per scenario: every start, quartiles and median."""
    with panes(7.2, 4.2, len(values), 2, sharex="col") as (figure, axes):
        for row, (name, of) in zip(axes, values.items(), strict=True):
            for ax, k, x in zip(row, (0, 1), ("test accuracy, %", "ARI"), strict=True):
                parts = [v[k] for v in of.values()]
                ax.boxplot(parts, orientation="horizontal", widths=0.5, showfliers=False,
                           medianprops={"color": INK})  # fmt: skip
                rng = np.random.default_rng(0)
                for y, (v, colour) in enumerate(zip(parts, (VERMILLION, BLUE), strict=True), 1):
                    ax.plot(v, y + rng.uniform(-0.2, 0.2, len(v)), "o", color=colour, markersize=3, alpha=0.4)
                ax.set_yticks([1, 2], list(of))
                ax.invert_yaxis()
                ax.set_title(name)
                ax.set_xlabel(x)
    return figure


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
        Setting("images", "T = ceil(k/2) in 63 rounds: about 1e3 steps, as many as 10 in 102 rounds, 5 in 204",
                "paper"),
        Setting("T on images", "counts mini-batch steps (the text: 'the total number of local iterations')", "ours"),
        Setting("lambda on S1", "0.7", "ours"),
        *without(SYNTHETIC, "local work"),
        Setting("lr on S1", "0.1", "paper"),
        *without(HBF_BESIDE, "H&BF, work", "H&BF, rounds"),
        Setting("H&BF, lr", "0.01", "paper"),
        *image_settings(scale, ("rounds, images", "epochs")),
    )  # fmt: skip


def three(bench: Bench, problem: Problem, every: int, rounds: int):
    """T growing, 10 and 5 for the same total, all looked at in the growing rule's last round."""
    steps, parts = total(every, rounds), []
    look = max(k for k in range(1, max(1, rounds // 20) + 1) if rounds % k == 0)
    for label, count, rule in (("growing", rounds, Growing(every)), ("T=10", steps // 10, 10), ("T=5", steps // 5, 5)):
        parts.append(problem.of(rule).compare(bench, f"{problem.key}-{label}", {label: problem.fpfc},
                                              rounds=bench.rounds(count, count), evaluate_every=look))  # fmt: skip
    return parts, by_round(parts, rounds)


def by_round(parts: list[Comparison], rounds: int) -> dict[str, np.ndarray]:
    """label -> [seeds] the metric in that round; in a rehearsal, in the last one."""
    out = {}
    for part in parts:
        for label, (at, values) in lines(part, factor=1.0).items():
            out[label] = np.array([v[np.searchsorted(at, rounds, side="right") - 1] for v in values])
    return out


@recipe("fpfc/figure9", "Figure 9: local work that grows with the rounds", minutes=(1, 120), settings=growing_settings,
        data=("housing_bodyfat", "mnist", "fashion_mnist"))  # fmt: skip
def figure9(bench: Bench) -> Outcome:
    """Is it better to do little at first and more later, for the same total of local work?"""
    tables, panels, claims = [], [], []
    parts = [(synthetic(bench), *bench.pick((6, 156), (20, 623))), (hbf(bench), 1, 40)]
    parts += [(images(bench, title), 2, 63) for title in IMAGE_TITLES]
    for problem, every, rounds in parts:
        comparisons, early = three(bench, problem, every, rounds)
        rows, series, factor = {}, {}, problem.factor
        for f, value in zip(comparisons, PRINTED.get(problem.title, (None, None, None)), strict=True):
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
