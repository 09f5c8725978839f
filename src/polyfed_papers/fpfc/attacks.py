"""Clients that attack (section 6), from none to four in five: Figures 7, E.2 and E.3; and FedAvg with robust rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure

from polyfed import FPFC, Algorithm, Federation, Local, threats
from polyfed.base.randomness import client_keys
from polyfed.report.table import Cell, Table
from polyfed.studies.compare import Comparison
from polyfed_papers.fpfc import Problem, images, synthetic
from polyfed_papers.fpfc.methods import IMAGE_LAMBDAS, LG, METHODS, RIVALS, chosen, tuned_nine
from polyfed_papers.fpfc.stated import GRID, SYNTHETIC, image_settings, rounds_of, sizes
from polyfed_papers.recipes.drawing import Panel, curve_panels
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, grouping_of, joined, metric_of, recipe
from polyfed_papers.recipes.said import Claim, Setting, listed, ours, points, told_by

ATTACKS = {
    "same value": threats.SameValue(100.0),
    "sign flip": threats.SignFlip(10.0),
    "Gaussian noise": threats.GaussianNoise(100.0),
}
THREATS = (
    Setting("same value", "c (1, ..., 1), c ~ N(0, 100^2)", "paper"),
    Setting("sign flip", "-|c| w, c ~ N(0, 10^2)", "paper"),
    Setting("Gaussian noise", "N(0, 100^2 I)", "paper"),
    Setting("draws", "c and the noise anew for every upload; who attacks once, for all rounds", "ours"),
)
OTHERS = {"label flip": threats.LabelFlip(1.0), "scaled update": threats.ScaledUpdate(10.0)}  # not in the paper
RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8)
FEW = (0.0, 0.4)  # for attacks that the paper does not have
GUARDED = (0.0, 0.2, 0.4)  # for robust rules: no more than the share that they are told
RULES = {
    "median": threats.Median(),
    "trimmed mean": threats.TrimmedMean(0.4),
    "Krum": threats.Krum(0.4),
    "multi-Krum": threats.MultiKrum(0.4),
    "geometric median": threats.GeometricMedian(),
    "norm clipping": threats.NormClipping(),
}
CLOSE = 0.03  # of the accuracy without attackers
Curve = dict[float, np.ndarray]
CUT = 1e15
ANEW = (0.725, 0.9, 1.05, 1.2)  # of lambda: the tables' choice, and more of it


def settings(scale: Size):
    return (
        sizes(scale),
        rounds_of(scale, 200, 2000),
        Setting("FPFC: lambda from", ", ".join(map(str, GRID)), "ours"),
        *RIVALS,
        Setting("tuned on", "runs without attackers", "ours"),
        *THREATS,
        Setting("label flip, scaled update", "labels y -> 9 - y; ten times the update; 40 % of attackers", "ours"),
        Setting("attackers", "0 to 80 % of the devices in steps of 20 %", "paper"),
        Setting("robust rules", "for FedAvg; assumed share of false uploads 0.4, so up to 40 % of attackers", "ours"),
        Setting("robust rules, seeds", "one at small size", "ours"),
        Setting("precision", "float64: sign-flipped models grow tenfold with every upload of an attacker", "ours"),
        *SYNTHETIC,
    )


def curve(bench: Bench, problem: Problem, label: str, method, attack: str, seeds, shares, rule=None, **forged) -> Curve:
    """ratio -> [seeds] mean accuracy of the benign devices; -1: unattacked, of those that are benign at 40 %."""
    runs = {}
    for ratio in shares:
        threat = replace((ATTACKS | OTHERS)[attack], ratio=ratio, **forged) if ratio else None
        name = f"{label}-{attack}-{ratio:g}" if ratio else f"{label}-none"
        runs[ratio] = problem.compare(bench, _plain(name), {_plain(label): method}, seeds=seeds, attack=threat,
                                       robust=rule, dtype=torch.float64)  # fmt: skip
    return {ratio: benign(runs[ratio], seeds) for ratio in runs} | {-1.0: unattacked(runs, seeds)}


def _plain(label: str) -> str:
    return label.replace(",", "").replace(" ", "-")


def benign(runs: Comparison, seeds, column: str = "test_accuracy") -> np.ndarray:
    """[seeds] mean accuracy over the devices that do not attack; 0 for a run that diverged: it has no model to use."""
    frame = runs.clients
    if not len(frame):
        return np.zeros(len(seeds))
    values, of = frame[column].to_numpy(dtype=float), frame["seed"].to_numpy()
    return np.array([np.nanmean(values[of == s]) if (of == s).any() else 0.0 for s in seeds])


def unattacked(runs: Mapping[float, Comparison], seeds) -> np.ndarray:
    """[seeds] accuracy without attackers of the devices that are benign at 40 %."""
    before, after = (
        {r.seed: np.asarray(r.clients["test_accuracy"], dtype=float) for r in f.results if r.clients is not None}
        for f in (runs[0.0], runs[0.4])
    )
    kept = {s: ~np.isnan(after[s]) if s in after else np.ones(len(before[s]), dtype=bool) for s in seeds}
    return np.array([before[s][kept[s]].mean() for s in seeds])


@recipe("fpfc/attacks", "Figure E.2: clients that attack on S1, and robust rules", minutes=(9, 2500),
        settings=settings, also=("fpfc/figure-e2",))  # fmt: skip
def attacks(bench: Bench) -> Outcome:
    """Does fusion shut attackers out, without a rule made for that?"""
    shares = (0.0, 0.4) if bench.rehearse else RATIOS
    problem = replace(synthetic(bench), rounds=bench.rounds(200, 2000))
    methods, first = tuned_nine(bench, "choice", problem, GRID), ["FPFC", "FedAvg"]
    order = [*first, *(label for label in methods if label not in first)][: 3 if bench.rehearse else None]
    curves: dict[str, dict[str, Curve]] = {}
    for attack in ATTACKS | OTHERS:
        labels, some = (order, shares) if attack in ATTACKS else (first, FEW)
        curves[attack] = {m: curve(bench, problem, m, methods[m], attack, bench.seeds, some) for m in labels}
        rules, few = RULES if attack in ATTACKS else {}, bench.seeds[: 1 if bench.small else None]
        for label, rule in list(rules.items())[: 1 if bench.rehearse else None]:
            some = shares if bench.rehearse else GUARDED
            curves[attack][label] = curve(bench, problem, label, methods["FedAvg"], attack, few, some, rule)
    tables, claims = summarised(curves)
    claims += [best(problem, attack, curves[attack]) for attack in ATTACKS]
    notes = [
        chosen(methods),
        LG,
        "a vector of one value is invisible to a single softmax layer: it shifts all logits alike and cancels. Under "
        "it FedAvg loses only the attackers' share of the mean; for deeper models it is an attack",
        "robust rules keep one common model, which on four clusters is poor with or without attackers",
        "0: the run ended with values that are not finite",
        "no seed of the paper's figures is known; attackers are a fixed random subset per seed",
    ]
    return Outcome(tables, {"figure-e2": panels(curves, METHODS), "robust-rules": panels(curves, ("FPFC", *RULES))},
                   claims, notes)  # fmt: skip


def settings_anew(scale: Size):
    shares = "0 to 60 % of the devices in steps of 20 %" if scale == "paper" else "none, 40 % with noise"
    return (
        sizes(scale),
        rounds_of(scale, 100, 2000),
        Setting("FPFC: lambda from", f"{', '.join(map(str, ANEW))}, anew for every attack and share", "ours"),
        Setting("chosen by", "validation data of the benign devices, of the other seeds or its own", "ours"),
        *THREATS,
        Setting("attackers", shares, "paper"),
        Setting("sign flips", f"cut at {CUT:g} in every number: each upload makes them three times larger", "ours"),
        *SYNTHETIC,
    )


@dataclass(frozen=True)
class Cut(threats.SignFlip, name="cut-sign-flip"):
    """Sign flips that stay finite over thousands of uploads; so far away the penalty does not ask how far."""

    def forge(self, value: torch.Tensor, received: torch.Tensor | None, rng: np.random.Generator) -> torch.Tensor:
        return super().forge(value, received, rng).clamp(-CUT, CUT)


@recipe("fpfc/attacks-anew", "Figure E.2 with lambda chosen anew for every share of attackers", minutes=(0.5, 200),
        settings=settings_anew, seeds=5)  # fmt: skip
def attacks_anew(bench: Bench) -> Outcome:
    """Is what clustering gains over training alone kept under attack, if lambda is chosen for it?"""
    problem = replace(synthetic(bench), rounds=bench.rounds(100, 2000))
    lambdas, shares = ANEW[: 2 if bench.rehearse else None], bench.pick((0.4,), (0.2, 0.4, 0.6))
    cells = [("none", 0.0), *((attack, share) for attack in list(ATTACKS)[bench.pick(2, 0) :] for share in shares)]
    runs = {(attack, share, lam): attacked(problem, attack, share, replace(problem.fpfc, lam=lam))
            for attack, share in cells for lam in lambdas}  # fmt: skip
    runs["local", 0.0, 0.0] = attacked(problem, "local", 0.0, Local(problem.fpfc.lr))
    keys = [(key, seed) for key in runs for seed in bench.seeds]
    done = bench.all_of([(f"{key[0]} {key[1]:g}, lambda {key[2]:g}", seed, partial(runs[key], bench, seed))
                         for key, seed in keys])  # fmt: skip
    comparisons = {key: joined(d for (k, _), d in zip(keys, done, strict=True) if k == key) for key in runs}
    tables, claims = [], []
    for attack, share in cells:
        title = f"{attack}, {share:.0%} of attackers" if share else "no attackers"
        of = {lam: honest(comparisons[attack, share, lam], share) for lam in lambdas}
        table, own = kept(problem, title, of, honest(comparisons["local", 0.0, 0.0], share), bench.seeds)
        tables.append(table)
        claims += own
    notes = ["all figures are of the benign devices; Local's are those of a run without attackers, which reach nobody "
             "there; a row of a chosen lambda has each seed's"]  # fmt: skip
    return Outcome(tables, claims=claims, notes=notes)


def attacked(problem: Problem, attack: str, share: float, method: Algorithm) -> Callable[[Bench, int], Comparison]:
    """A run of a method under attack, by bench and seed, in a folder of its own."""
    label, lam = ("FPFC", f"-{share:g}-lambda-{method.lam:g}") if isinstance(method, FPFC) else ("Local", "")
    threat = replace((ATTACKS | {"sign flip": Cut(10.0)})[attack], ratio=share) if share else None
    return lambda bench, seed: problem.compare(
        bench, f"{_plain(attack)}{lam}/seed{seed}", {label: method}, seeds=[seed], attack=threat
    )


def honest(runs: Comparison, share: float) -> Comparison:
    """The runs with the devices alone that do not attack at this share."""
    who = threats.SignFlip(ratio=share)
    return Comparison([
        r if r.clients is None or not share
        else replace(r, clients=r.clients[~who.attackers(r.seed, client_keys(r.clients["client"].tolist()))])
        for r in runs.results
    ])  # fmt: skip


def kept(
    problem: Problem, title: str, runs: Mapping[float, Comparison], local: Comparison, seeds: Sequence[int]
) -> tuple[Table, list[Claim]]:
    """A row per lambda, two for chosen ones and one for Local; claims that the chosen are above Local."""
    columns = {lam: (benign(comparison, seeds), *grouping_of(comparison, "FPFC")) for lam, comparison in runs.items()}
    names, claims = {lam: f"FPFC, lambda {lam:g}" for lam in runs}, list[Claim]()
    for key, by in ((-1.0, "the other seeds"), (-2.0, "its own validation")):
        which = [[t for t in seeds if t != s] or [s] if key == -1 else [s] for s in seeds]
        chosen = [best_validated(runs, some) for some in which]
        accuracy, number, score = (np.array([columns[lam][k][i] for i, lam in enumerate(chosen)]) for k in range(3))
        columns[key] = accuracy, number, score
        names[key] = f"FPFC, lambda by {by}: {listed(chosen)}"
        claims.append(
            problem.better(f"{title}: FPFC, lambda by {by}, above Local", columns[key][0], benign(local, seeds))
        )
    rows = [(Cell(names[lam]), ours(values[0], 100), *map(ours, values[1:])) for lam, values in columns.items()]
    rows.append((Cell("Local"), ours(benign(local, seeds), 100), Cell("–"), Cell("–")))
    return told_by(title, ("method<", "accuracy, %", "clusters", "ARI"), rows), claims


def best_validated(runs: Mapping[float, Comparison], seeds: Sequence[int]) -> float:
    """The lambda whose benign devices have the best validation accuracy under these seeds."""
    return max(runs, key=lambda lam: benign(runs[lam], seeds, "validation_accuracy").mean())


def settings_of_images(scale: Size):
    return (
        Setting("attackers", "0 to 80 % in steps of 20 %", "paper"),
        Setting("FPFC, FPFC-l1", "the last layer is attacked", "paper"),
        Setting("FPFC: attackers' convolutions", "returned as received: the paper does not say", "ours"),
        Setting("FPFC, convolutions trained", "attackers train theirs beside the forged layer, the worst case", "ours"),
        Setting("FPFC, all layers", "the convolutions are forged too", "ours"),
        Setting("median", "coordinate-wise, of the shared layers in place of their mean", "ours"),
        Setting("the other methods", "the whole upload is attacked", "ours"),
        Setting("other readings", "one seed at small size", "ours"),
        Setting("precision", "float64", "ours"),
        *THREATS,
        Setting("FPFC: lambda from", ", ".join(map(str, IMAGE_LAMBDAS)), "ours"),
        *RIVALS,
        Setting("tuned on", "runs without attackers", "ours"),
        rounds_of(scale, 15, 200),
        *image_settings(scale, ("lambda, images", "rounds, images")),
    )


def on_images(bench: Bench, title: str, figure: str, variants: bool) -> Outcome:
    """The nine methods on one data set; variants: other readings of what an attacker's shared layers are."""
    shares, first = (0.0, 0.4) if bench.rehearse else RATIOS, bench.seeds[:1]
    few = first if bench.small else bench.seeds
    problem = replace(images(bench, title), rounds=bench.rounds(15, 200))
    methods = tuned_nine(bench, f"{problem.key}-choice", problem, IMAGE_LAMBDAS)
    fpfc = methods["FPFC"]
    own = {"tensors": ("w",), "others": "received"}
    cases = {m: (methods[m], bench.seeds, None, own if "FPFC" in m else {}) for m in reversed(methods)}
    if variants:
        cases |= {
            "FPFC, convolutions trained": (fpfc, few, None, {"tensors": ("w",)}),
            "FPFC, trained, median": (fpfc, few, threats.Median(), {"tensors": ("w",)}),
            "FPFC, all layers": (fpfc, few, None, {}),
        }
    curves = {
        attack: {
            label: curve(bench, problem, label, method, attack, seeds, shares, rule, **forged)
            for label, (method, seeds, rule, forged) in list(cases.items())[:: 4 if bench.rehearse else 1]
        }
        for attack in list(ATTACKS)[: 1 if bench.rehearse else None]
    }
    without = alone(bench, problem, fpfc)
    tables, claims = summarised(curves, "FPFC" if bench.rehearse else "FedAvg", without)
    claims += [best(problem, attack, of) for attack, of in curves.items()]
    tables.append(told_by("FPFC, the benign 60 % of the devices", ("trained<", "accuracy, %"),
                          [(Cell("without the attackers"), ours(without, 100))]))  # fmt: skip
    return Outcome(tables, {figure: panels(curves, METHODS)}, claims, [chosen(methods), *IMAGE_NOTES])


def alone(bench: Bench, problem: Problem, method: Algorithm) -> np.ndarray:
    """[seeds] accuracy of the devices that are benign at 40 %, trained without the attackers and their data."""

    def benign(seed: int) -> Federation:
        everyone = problem.federation(seed)
        who = threats.SignFlip(ratio=0.4).attackers(seed, client_keys(everyone.names))
        return everyone.reorder(np.flatnonzero(~who))

    rest = replace(problem, federation=benign)
    return metric_of(rest.compare(bench, "FPFC-without-attackers", {"FPFC": method}, dtype=torch.float64), "FPFC")


def best(problem: Problem, attack: str, methods: Mapping[str, Curve]) -> Claim:
    """FPFC above every other method at 40 %."""
    others = [m for m in METHODS if m in methods and "FPFC" not in m]
    decided = {m: problem.better("", methods["FPFC"][0.4], methods[m][0.4]) for m in others}
    sides = {
        word: [f"{m} ({100 * (methods['FPFC'][0.4] - methods[m][0.4]).mean():+.1f})" for m, c in decided.items()
               if c.holds is holds]
        for word, holds in (("above", True), ("undecided", None), ("below", False))
    }  # fmt: skip
    evidence = "; ".join(f"{word} {', '.join(which)}" for word, which in sides.items() if which)
    holds = False if sides["below"] else None if sides["undecided"] else True
    return Claim(f"FPFC is the best under {attack} by 40 %", holds, evidence)


IMAGE_NOTES = (
    "the paper attacks 'the personalization layers' and does not say what an attacker's convolutions are; returned as "
    "received they do no harm",
    "where attackers train their convolutions beside the false last layer that zeta sends back to them, no penalty "
    "protects the mean of the shared layers; a median of them is a defence while attackers are few in a round",
    "0: the run ended with values that are not finite",
)


@recipe("fpfc/figure7", "Figure 7: clients that attack on label-swapped Fashion-MNIST", minutes=(3, 20000),
        settings=settings_of_images, data=("fashion_mnist",))  # fmt: skip
def figure7(bench: Bench) -> Outcome:
    """What is left of FPFC's robustness where layers are shared, and averaged?"""
    return on_images(bench, "Fashion-MNIST", "figure7", variants=False)


@recipe("fpfc/attacks-images", "Figure E.3: clients that attack on label-swapped MNIST", minutes=(3, 25000),
        settings=settings_of_images, data=("mnist",), also=("fpfc/figure-e3",))  # fmt: skip
def attacks_images(bench: Bench) -> Outcome:
    """The same on digits, with other readings of what an attacker sends besides its last layer."""
    return on_images(bench, "MNIST", "figure-e3", variants=True)


def summarised(
    curves: Mapping[str, Mapping[str, Curve]], fragile: str = "FedAvg", without: np.ndarray | None = None
) -> tuple[list[Table], list[Claim]]:
    """A table for every attack, and the claims; `without` [seeds] is FPFC's accuracy with the attackers left out."""
    tables, claims = [], []
    for attack, methods in curves.items():
        shares = [r for r in methods["FPFC"] if r >= 0]
        rows = [(Cell(label), *(ours(c.get(r, ()), 100) for r in shares)) for label, c in methods.items()]
        heads = ("method<", *(f"{r:.0%} attackers" for r in shares))
        tables.append(told_by(f"{attack}: accuracy of the benign devices, %", heads, rows))
        claims += [stands("FPFC", methods["FPFC"], attack, without), falls(fragile, methods[fragile], attack)]
    return tables, claims


def stands(label: str, c: Curve, attack: str, without: np.ndarray | None = None) -> Claim:
    """Within CLOSE of the same devices' accuracy, at 40 %: without attack, or without the attackers."""
    gap = c[0.4] - (c[-1.0] if without is None else without)
    text = f"{label}, {attack} by 40 %: within {CLOSE:g} of " + ("no attack" if without is None else "no attackers")
    return Claim(text, bool((gap > -CLOSE).all()), "difference per seed " + ", ".join(f"{g:+.3f}" for g in gap))


def falls(label: str, c: Curve, attack: str) -> Claim:
    """Worse under attack than without."""
    return points(f"{label}, {attack} by 40 %: worse than without", c[-1.0], c[0.4])


def panels(curves: Mapping[str, Mapping[str, Curve]], labels: Sequence[str]) -> Figure:
    """A panel per attack of the paper, a line per method: accuracy against the share of attackers."""
    parts = []
    for attack in (a for a in ATTACKS if a in curves):
        series = {}
        for label in (m for m in labels if m in curves[attack]):
            c = {r: v for r, v in curves[attack][label].items() if r >= 0}
            series[label] = ([100 * r for r in c], (100 * np.array(list(c.values()))).T.tolist())
        parts.append(Panel(attack, "attackers, %", "accuracy of the others, %", series))
    return curve_panels(parts, len(parts), 2.9)
