"""Clients that attack (section 6): FPFC, FedAvg, and FedAvg with robust rules, from no attacker to four in five."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from matplotlib.figure import Figure

from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.experiment.compare import Comparison
from polyfed.papers.fpfc import (
    EPOCHS,
    IMAGE_LAMBDA,
    IMAGE_LR,
    SYNTHETIC,
    WORK,
    image_settings,
    image_work,
    images,
    lenet,
    rounds_of,
    scenario,
    sizes,
    softmax,
    told_by,
)
from polyfed.papers.recipe import Bench, Claim, Outcome, Setting, Size, ordered, ours, recipe
from polyfed.report.table import Cell, Table
from polyfed.threats import (
    GaussianNoise,
    GeometricMedian,
    Krum,
    LabelFlip,
    Median,
    MultiKrum,
    NormClipping,
    SameValue,
    ScaledUpdate,
    SignFlip,
    TrimmedMean,
)

ATTACKS = {"same value": SameValue(100.0), "sign flip": SignFlip(10.0), "Gaussian noise": GaussianNoise(100.0)}
THREATS = (
    Setting("same value", "c (1, ..., 1), c ~ N(0, 100^2), drawn anew for every upload", "paper"),
    Setting("sign flip", "-|c| w, c ~ N(0, 10^2)", "paper"),
    Setting("Gaussian noise", "N(0, 100^2 I)", "paper"),
)
OTHERS = {"label flip": LabelFlip(1.0), "scaled update": ScaledUpdate(10.0)}  # not in the paper
RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8)
RULES = {
    "median": Median(),
    "trimmed mean": TrimmedMean(0.4),
    "Krum": Krum(0.4),
    "multi-Krum": MultiKrum(0.4),
    "geometric median": GeometricMedian(),
    "norm clipping": NormClipping(),
}
CLOSE = 0.03  # of the accuracy without attackers
Curve = dict[float, np.ndarray]


def settings(scale: Size):
    return (
        sizes(scale),
        rounds_of(scale, 200, 2000),
        Setting("lambda", "0.7", "ours"),
        *THREATS,
        Setting("label flip, scaled update", "labels y -> 9 - y; ten times the update", "ours"),
        Setting("attackers", "0 to 80 % of the devices in steps of 20 %, the same in every round", "paper"),
        Setting("robust rules", "for FedAvg; assumed share of false uploads 0.4; one seed at small size", "ours"),
        Setting("precision", "float64: sign-flipped models grow tenfold with every upload of an attacker", "ours"),
        *SYNTHETIC,
    )


def curve(bench: Bench, label: str, method, attack: str, seeds, part, rule=None, tensors=()) -> Curve:
    """ratio -> [seeds] mean accuracy of the benign devices at that ratio, less that of the same devices unattacked."""
    model, federation, rounds, shares, work = part
    found = {}
    for ratio in shares:
        threat = threat_of(attack, ratio, tensors) if ratio else None
        name = f"{label}-{attack}-{ratio:g}" if ratio else f"{label}-none"
        found[ratio] = bench.compare(
            _plain(name), model, federation, {_plain(label): method}, seeds=seeds, rounds=rounds, evaluate_every=0,
            attack=threat, robust=rule, dtype=torch.float64, **work,
        )  # fmt: skip
    return {ratio: benign(found[ratio], seeds) for ratio in found} | {-1.0: unattacked(found, seeds)}


def threat_of(attack: str, ratio: float, tensors=()):
    """An attack by so large a share of the devices."""
    return replace((ATTACKS | OTHERS)[attack], ratio=ratio, tensors=tensors)


def _plain(label: str) -> str:
    return label.replace(",", "").replace(" ", "-")


def benign(found: Comparison, seeds) -> np.ndarray:
    """[seeds] mean accuracy over the devices that do not attack; 0 for a run that diverged: it has no model to use."""
    frame = found.clients
    if not len(frame):
        return np.zeros(len(seeds))
    values, of = frame["test_accuracy"].to_numpy(dtype=float), frame["seed"].to_numpy()
    return np.array([np.nanmean(values[of == s]) if (of == s).any() else 0.0 for s in seeds])


def unattacked(found: Mapping[float, Comparison], seeds) -> np.ndarray:
    """[seeds] accuracy without attackers of the devices that are benign at 40 %."""
    before, after = (
        {r.seed: np.asarray(r.clients["test_accuracy"], dtype=float) for r in f.results if r.clients is not None}
        for f in (found[0.0], found[0.4])
    )
    kept = {s: ~np.isnan(after[s]) if s in after else np.ones(len(before[s]), dtype=bool) for s in seeds}
    return np.array([before[s][kept[s]].mean() for s in seeds])


@recipe("fpfc/attacks", "Clients that attack: accuracy of the others", minutes=(10, 750), settings=settings)
def attacks(bench: Bench) -> Outcome:
    """Does fusion shut attackers out, without a rule made for that?"""
    few = bench.seeds[:1] if bench.small else bench.seeds
    part = (softmax, scenario(bench), bench.rounds(200, 2000), (0.0, 0.4) if bench.rehearse else RATIOS, WORK)
    found: dict[str, dict[str, Curve]] = {}
    for attack in ATTACKS | OTHERS:
        found[attack] = {
            "FPFC": curve(bench, "FPFC", FPFC(0.1, lam=0.7), attack, bench.seeds, part),
            "FedAvg": curve(bench, "FedAvg", FedAvg(0.1), attack, bench.seeds, part),
        }
        rules = RULES if attack in ATTACKS else {}
        for label, rule in list(rules.items())[: 1 if bench.rehearse else None]:
            found[attack][label] = curve(bench, label, FedAvg(0.1), attack, few, part, rule)
    tables, claims = summarised(found)
    notes = [
        "a vector of one value is invisible to a single softmax layer: it shifts all logits alike and cancels. Under "
        "it FedAvg loses only the attackers' share of the mean; for deeper models it is an attack",
        "robust rules keep one common model, which on four clusters is poor with or without attackers",
        "0: the run ended with values that are not finite",
        "no seed of the paper's figures is known; attackers are a fixed random subset per seed",
    ]
    printed = {attack: found[attack] for attack in ATTACKS}
    return Outcome(tables, {"attacks": panels(printed)}, claims, notes)


def settings_of_images(scale: Size):
    shares = ("0 and 40 %", "ours") if scale == "small" else ("0 to 80 % in steps of 20 %", "paper")
    return (
        rounds_of(scale, 15, 200),
        EPOCHS[scale],
        Setting("attackers", *shares),
        Setting("FPFC", "the last layer is fused, and attacked", "paper"),
        Setting("FPFC, all layers", "the same, and the shared convolutions attacked too", "ours"),
        Setting("median", "coordinate-wise, of the shared layers in place of their mean", "ours"),
        Setting("FedAvg", "the whole upload is attacked", "ours"),
        *THREATS,
        *image_settings(scale),
    )


@recipe("fpfc/attacks-images", "Clients that attack, on label-swapped MNIST", minutes=(12, 9000),
        settings=settings_of_images, machine="two cores", data=("mnist",))  # fmt: skip
def attacks_images(bench: Bench) -> Outcome:
    """What is left of it where layers are shared, and averaged?"""
    lr, shares = IMAGE_LR[bench.scale], (0.0, 0.4) if bench.small else RATIOS
    work = image_work(bench) | {"local_epochs": bench.pick(5, 10)}
    part = (lenet, images(bench, "mnist"), bench.rounds(15, 200), shares, work)
    fpfc = FPFC(lr, lam=IMAGE_LAMBDA[bench.scale], shared_layers="body")
    methods = {
        "FPFC": (fpfc, ("w",), None),
        "FPFC, median of the shared": (fpfc, ("w",), Median()),
        "FPFC, all layers": (fpfc, (), None),
        "FPFC, all layers, median": (fpfc, (), Median()),
        "FedAvg": (FedAvg(lr), (), None),
    }
    found = {
        attack: {
            label: curve(bench, label, method, attack, bench.seeds, part, rule, tensors)
            for label, (method, tensors, rule) in methods.items()
        }
        for attack in list(ATTACKS)[: 1 if bench.rehearse else None]
    }
    tables, claims = summarised(found)
    notes = [
        "no penalty protects the mean of the shared layers: not from false convolutions, and not from those that an "
        "attacker trains beside the false last layer that zeta sends back to it",
        "a median of the shared layers, the only mean there is, is a defence while attackers are few in a round",
        "0: the run ended with values that are not finite",
    ]
    return Outcome(tables, {"attacks-images": panels(found)}, claims, notes)


def summarised(found: Mapping[str, Mapping[str, Curve]]) -> tuple[list[Table], list[Claim]]:
    """A table for every attack, and the claims."""
    tables, claims = [], []
    for attack, methods in found.items():
        shares = [r for r in methods["FPFC"] if r >= 0]
        rows = [(Cell(label), *(ours(c[r], 100) for r in shares)) for label, c in methods.items()]
        heads = ("method<", *(f"{r:.0%} attackers" for r in shares))
        tables.append(told_by(f"{attack}: accuracy of the benign devices, %", heads, rows))
        claims += [stands("FPFC", methods["FPFC"], attack), falls(methods, attack)]
    return tables, claims


def stands(label: str, c: Curve, attack: str) -> Claim:
    """Within CLOSE of the same devices' accuracy without attackers, at 40 %."""
    gap = c[0.4] - c[-1.0]
    text = f"{label}, {attack} by 40 %: within {CLOSE:g} of no attack"
    return Claim(text, bool((gap > -CLOSE).all()), "difference per seed " + ", ".join(f"{g:+.3f}" for g in gap))


def falls(methods: Mapping[str, Curve], attack: str) -> Claim:
    """FedAvg is worse under attack than without."""
    c = methods["FedAvg"]
    return ordered(f"FedAvg, {attack} by 40 %: worse than without", c[-1.0], c[0.4], 100, " points")


def panels(found: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """A panel per attack, a line per method: accuracy against the share of attackers."""
    from polyfed.report.style import looks, styled

    labels = list(next(iter(found.values())))
    look = looks(labels, dict.fromkeys(labels, "method"))
    with styled():
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for ax, (attack, methods) in zip(axes, found.items(), strict=True):
            for label, c in methods.items():
                colour, marker, line = look[label]
                at = [r for r in c if r >= 0]
                y = [100 * np.nanmean(c[r]) if np.isfinite(c[r]).any() else np.nan for r in at]
                ax.plot([100 * r for r in at], y, color=colour, marker=marker, linestyle=line, label=label)
            ax.set_title(attack)
            ax.set_xlabel("attackers, %")
        axes[0].set_ylabel("accuracy of the others, %")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return figure
