"""Figure E.1: FPFC and IFCA from many random starts, on one draw of the data."""

from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from polyfed.algorithms.ifca import IFCA
from polyfed.report.table import Cell
from polyfed_papers.fpfc import SYNTHETIC, rounds_of, sizes, synthetic, told_by
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, grouping_of, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, ours, without

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
        found = many.compare(
            problem.key, problem.model, problem.federation(bench.seeds[0]),
            lambda seed, k=k, fpfc=fpfc: {"FPFC": fpfc, "IFCA": IFCA(0.1, k=k, init_scale=1.0, seed=seed)},
            rounds=bench.rounds(100, 2000), evaluate_every=0, **problem.work,
        )  # fmt: skip
        values[name] = {m: (100 * metric_of(found, m), grouping_of(found, m)[1]) for m in ("FPFC", "IFCA")}
        for label, (accuracy, score) in values[name].items():
            middle = ", ".join(f"{q:.1f}" for q in np.quantile(accuracy, (0, 0.5, 1)))
            rows.append((Cell(name), Cell(label), ours(accuracy), Cell(middle), ours(score)))
        for k, (what, unit) in enumerate((("accuracy", " points"), ("ARI", ""))):
            mine, its = (values[name][m][k] for m in ("FPFC", "IFCA"))
            claims.append(steadier(f"{name}: FPFC's {what} varies less over starts than IFCA's", mine, its, unit))
    heads = ("scenario<", "method<", "accuracy, %", "least, median, most", "ARI")
    table = told_by(f"{count} random starts, mean and standard deviation over starts", heads, rows)
    return Outcome([table], {"figure-e1": boxes(values)}, claims, ["the paper shows distributions without figures"])


def steadier(text: str, mine: np.ndarray, its: np.ndarray, unit: str) -> Claim:
    """The claim that `mine` is spread less, by Brown and Forsythe's test at 5 %."""
    a, b = mine.std(ddof=1), its.std(ddof=1)
    p = float(stats.levene(mine, its).pvalue) if len(mine) > 2 and a + b > 0 else 1.0
    found = None if not p < 0.05 else bool(a < b)
    return Claim(text, found, f"standard deviations {a:.3g} and {b:.3g}{unit}, p = {p:.1g}")


def boxes(values: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]) -> Figure:
    """Accuracy left, ARI right, a row per scenario: every start, quartiles and median."""
    from polyfed.report.style import BLUE, INK, VERMILLION, styled

    with styled():
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots(len(values), 2, squeeze=False, sharex="col")
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
