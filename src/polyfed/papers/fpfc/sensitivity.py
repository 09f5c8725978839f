"""How much FPFC's settings matter: lambda (Figure E.4), local work (E.5) and xi (E.6); rho and nu, in no figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from polyfed.algorithms.fpfc import FPFC
from polyfed.data.federation import Federation
from polyfed.experiment.compare import Comparison
from polyfed.papers.fpfc import (
    HBF,
    HBF_CAVEAT,
    HBF_GRID,
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
    rounds_of,
    scenario,
    sizes,
    softmax,
    told_by,
)
from polyfed.papers.fpfc.panels import Panel, curve_panels
from polyfed.papers.recipe import Bench, Claim, Outcome, Setting, Size, grouping_of, metric_of, ordered, ours, recipe
from polyfed.report.table import Cell, Table

LAMBDAS = {"S1": (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0), "H&BF": HBF_GRID, "images": (0.0, 0.2, 0.4, 0.7, 1.0, 1.5)}
TS = {"S1": (1, 2, 5, 10), "H&BF": (1, 5, 10, 20), "images": (1, 2, 5)}
EPOCH = {"small": 8, "paper": 24}  # batches that the images of an average device make
XIS, RHOS, NUS = (1e-6, 1e-4, 1e-2, 1e-1), (0.5, 1.0, 2.0, 5.0), (1e-4, 0.1, 0.5, 3.0)
TABLES, IMAGES = ("S1", "H&BF"), ("MNIST", "Fashion-MNIST")
Found = dict[float, tuple[np.ndarray, np.ndarray, np.ndarray]]  # value -> metric, clusters, ARI: [seeds] each


class Part(NamedTuple):
    """One data set: model and federation by seed, FPFC's base settings, and how it is trained."""

    model: Callable[[int], nn.Module]
    federation: Callable[[int], Federation]
    base: FPFC
    rounds: int
    work: dict[str, Any]
    grid: str
    factor: float = 100.0
    metric: str = "accuracy, %"

    @property
    def better(self) -> int:
        return 1 if self.factor == 100 else -1

    @property
    def share(self) -> float:
        return 0.0 if self.factor == 100 else HBF_TESTED


def part_of(bench: Bench, title: str) -> Part:
    if title == "S1":
        return Part(softmax, scenario(bench), FPFC(0.1, lam=0.7), bench.rounds(600, 2000), WORK, title)
    if title == "H&BF":
        base = FPFC(0.01, lam=4.0, nu=4.0)
        return Part(linear, hbf(bench), base, bench.rounds(100, 100), HBF_WORK, title, 1.0, "RMSE")
    base = FPFC(IMAGE_LR[bench.scale], lam=IMAGE_LAMBDA[bench.scale], shared_layers="body")
    work = image_work(bench) | {"local_epochs": bench.pick(5, 10)}
    return Part(lenet, images(bench, title.lower()), base, bench.rounds(15, 200), work, "images")


def plain(title: str) -> str:
    return title.lower().replace("&", "")


def vary(bench: Bench, title: str, key: str, values: Sequence[float]) -> Found:
    """One setting of FPFC on one data set."""
    part = part_of(bench, title)
    methods = {f"{key}-{v:g}": replace(part.base, **{key: v}) for v in (values[:2] if bench.rehearse else values)}
    found = bench.compare(
        f"{plain(title)}-{key}", part.model, part.federation, methods, rounds=part.rounds, evaluate_every=0, **part.work
    )
    return {v: read(found, label) for v, label in zip(values, methods, strict=False)}


def vary_work(bench: Bench, title: str, values: Sequence[int], uneven: bool) -> Found:
    """T steps (passes on images) for every device, or T_i uniform on 1, ..., T for every device and round."""
    part, out = part_of(bench, title), {}
    work = {k: v for k, v in part.work.items() if k not in ("local_steps", "local_epochs")}
    unit = EPOCH[bench.scale] if part.grid == "images" and not bench.rehearse else 1
    for most in values[:2] if bench.rehearse else values:
        rule = f"{unit} * uniform(1, {most})" if uneven else unit * most
        found = bench.compare(
            f"{plain(title)}-{'uneven' if uneven else 'equal'}-{most}", part.model, part.federation,
            {"FPFC": part.base}, rounds=part.rounds, local_steps=rule, evaluate_every=0, **work,
        )  # fmt: skip
        out[float(most)] = read(found, "FPFC")
    return out


def read(found: Comparison, label: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (metric_of(found, label), *grouping_of(found, label))


def table(title: str, key: str, found: Found, part: Part) -> Table:
    rows = [(Cell(f"{v:g}"), ours(a, part.factor), ours(n), ours(s)) for v, (a, n, s) in found.items()]
    return told_by(f"{key}, {title}", (key, part.metric, "clusters", "ARI"), rows)


def panel(title: str, x: str, part: Part, lines: Mapping[str, Found]) -> Panel:
    """The metric against a setting, a line per label; on a log scale where values span decades."""
    series = {
        label: (list(found), (part.factor * np.array([m for m, _, _ in found.values()])).T.tolist())
        for label, found in lines.items()
    }
    values = [v for found in lines.values() for v in found]
    return Panel(title, x, f"test {part.metric}", series, min(values) > 0 and max(values) / min(values) > 100)


def points(values: np.ndarray, part: Part | None = None) -> str:
    """Differences of the metric in a line."""
    if part is None or part.factor == 100:
        return ", ".join(f"{100 * v:.1f}" for v in values) + " points"
    return ", ".join(f"{v:.3f}" for v in values)


def spread(found: Found) -> np.ndarray:
    """[seeds] the best value's metric less the worst one's."""
    values = np.array([m for m, _, _ in found.values()])
    return values.max(0) - values.min(0)


def over_lambda(bench: Bench, titles: Sequence[str]) -> Outcome:
    """Figure E.4."""
    outcome, drawn = Outcome(), []
    for title in titles:
        part = part_of(bench, title)
        found = vary(bench, title, "lam", LAMBDAS[part.grid])
        outcome.tables.append(table(title, "lambda", found, part))
        drawn.append(panel(title, "lambda", part, {"FPFC": found}))
        best = [list(found)[int(k)] for k in (part.better * np.array([m for m, _, _ in found.values()])).argmax(0)]
        outcome.notes.append(f"{title}: best lambda per seed {best}")
        if title != "S1":
            continue
        right = [[v for v, (_, _, s) in found.items() if s[k] == 1] for k in range(len(bench.seeds))]
        inside = all(b in r for b, r in zip(best, right, strict=True))
        evidence = f"best lambda per seed {best}; ARI 1 at {right}"
        outcome.claims += [
            Claim("accuracy is best near lambda 0.6", all(0.5 <= b <= 0.7 for b in best), evidence),
            Claim("accuracy is best where the clusters are found", inside, evidence),
        ]
    outcome.figures["figure-e4"] = curve_panels(drawn, 2)
    return outcome


def over_work(bench: Bench, titles: Sequence[str]) -> Outcome:
    """Figure E.5."""
    outcome, drawn = Outcome(), []
    for title in titles:
        part = part_of(bench, title)
        values, lines = TS[part.grid], {}
        for label, uneven in (("T_i = T", False), ("T_i uniform on 1 to T", True)):
            lines[label] = vary_work(bench, title, values, uneven)
            outcome.tables.append(table(title, f"T, {label}", lines[label], part))
        drawn.append(panel(title, "T", part, lines))
        even, uneven = ({v: part.better * m for v, (m, _, _) in found.items()} for found in lines.values())
        low, top = min(even), max(even)
        unit = " points" if part.factor == 100 else ""
        outcome.claims += [
            ordered(f"{title}: {text}", a, b, part.factor, unit, part.share)
            for text, a, b in (
                (f"uneven work costs against T = {top:g} for all", even[top], uneven[top]),
                (f"uneven up to T = {top:g} is better than T = {low:g} for all", uneven[top], even[low]),
            )
        ]
    outcome.figures["figure-e5"] = curve_panels(drawn, 2)
    return outcome


def over_xi(bench: Bench, titles: Sequence[str]) -> Outcome:
    """Figure E.6."""
    outcome, drawn = Outcome(), []
    for title in titles:
        part = part_of(bench, title)
        found = vary(bench, title, "xi", XIS)
        outcome.tables.append(table(title, "xi", found, part))
        drawn.append(panel(title, "xi", part, {"FPFC": found}))
        bound, what = (0.01, "a point of accuracy") if part.factor == 100 else (0.05, "0.05 of RMSE")
        text = f"{title}: xi matters by less than {what}"
        outcome.claims.append(Claim(text, bool((spread(found) < bound).all()),
                                    "best less worst, per seed: " + points(spread(found), part)))  # fmt: skip
    outcome.figures["figure-e6"] = curve_panels(drawn, 2)
    return outcome


def settings(*own: Setting):
    def of(scale: Size):
        return (sizes(scale), rounds_of(scale, 600, 2000), *own, Setting("lambda on S1, where fixed", "0.7", "ours"),
                *SYNTHETIC, *(Setting(f"H&BF, {s.key}", s.value, s.source) for s in HBF))  # fmt: skip

    return of


@recipe("fpfc/figure-e4", "Figure E.4: lambda, on S1 and H&BF", minutes=(1, 80), settings=settings(),
        data=("housing_bodyfat",))  # fmt: skip
def figure_e4(bench: Bench) -> Outcome:
    """For which lambda are the clusters found, and is the accuracy best there?"""
    outcome = over_lambda(bench, TABLES)
    outcome.notes.append(HBF_CAVEAT)
    return outcome


@recipe("fpfc/figure-e5", "Figure E.5: different amounts of local work, on S1 and H&BF", minutes=(2, 60),
        settings=settings(Setting("uneven", "T_i uniform on 1, ..., T for every device and round", "paper")),
        data=("housing_bodyfat",), also=("fpfc/uneven-steps",))  # fmt: skip
def figure_e5(bench: Bench) -> Outcome:
    """Does it matter if the devices of a round do not do the same amount of work?"""
    outcome = over_work(bench, TABLES)
    outcome.notes += ["uneven devices do (T + 1) / 2 on average", HBF_CAVEAT]
    return outcome


@recipe("fpfc/figure-e6", "Figure E.6: xi, on S1 and H&BF", minutes=(1, 40), settings=settings(),
        data=("housing_bodyfat",))  # fmt: skip
def figure_e6(bench: Bench) -> Outcome:
    """Does the width of the smoothed tip matter?"""
    outcome = over_xi(bench, TABLES)
    outcome.notes.append(HBF_CAVEAT)
    return outcome


def settings_of_images(scale: Size):
    uneven = Setting("uneven", "T_i uniform on 1, ..., T for every device and round", "paper")
    passes = Setting(
        "a pass of Figure E.5", f"{EPOCH[scale]} batches for every device, those of an average one", "ours"
    )
    return (rounds_of(scale, 15, 200), uneven, passes, *image_settings(scale))


@recipe("fpfc/sensitivity-images", "Figures E.4, E.5 and E.6 on label-swapped images", minutes=(40, 9000),
        settings=settings_of_images, machine="two cores", data=("mnist", "fashion_mnist"),
        also=("fpfc/figure-e4-images", "fpfc/figure-e5-images", "fpfc/figure-e6-images"))  # fmt: skip
def sensitivity_images(bench: Bench) -> Outcome:
    """The same on images: lambda, local work and xi."""
    outcome = Outcome()
    for part in (over_lambda(bench, IMAGES), over_work(bench, IMAGES), over_xi(bench, IMAGES)):
        outcome.tables += part.tables
        outcome.figures |= part.figures
        outcome.claims += part.claims
        outcome.notes += part.notes
    return outcome


@recipe("fpfc/sensitivity", "Sensitivity to rho and nu on S1 (no figure of the paper)", minutes=(2, 60),
        settings=settings())  # fmt: skip
def sensitivity(bench: Bench) -> Outcome:
    """Which of the other settings need care?"""
    part = part_of(bench, "S1")
    found = {key: vary(bench, "S1", key, values) for key, values in (("rho", RHOS), ("nu", NUS))}
    groups = [found["nu"][v] for v in NUS if v in found["nu"] and v <= 0.5]
    same = np.ptp([n for _, n, _ in groups], axis=0) == 0
    counts = "; ".join(", ".join(f"{n:.0f}" for n in own) for own in np.array([n for _, n, _ in groups]).T)
    claims = [Claim("Remark 2: any nu from xi to 0.5 gives the same clusters", bool(same.all()),
                    f"clusters as nu rises, per seed: {counts}")]  # fmt: skip
    notes = [
        f"rho: the best accuracy less the worst, per seed: {points(spread(found['rho']))}",
        "nu does not act in training: it decides which devices are averaged at the end",
        "rho must exceed 1/(a-1) = 0.37, or rule (6) is not the proximal step; smaller values are refused",
        "an independent implementation of this scenario in NumPy (20 devices, 600 rounds, one seed) had 85.6, 83.8 and "
        "73.0 % for rho 0.5, 1 and 2, and 83.65 to 83.8 % for xi from 1e-6 to 0.1",
    ]
    figure = curve_panels([panel("S1", key, part, {"FPFC": f}) for key, f in found.items()], 2)
    return Outcome([table("S1", key, f, part) for key, f in found.items()], {"sensitivity": figure}, claims, notes)
