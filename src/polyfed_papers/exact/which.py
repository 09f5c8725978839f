"""Which exact method? All of them at equal bytes, at their best steps and at provable settings."""

from functools import partial
from itertools import product

import numpy as np
from matplotlib.patches import Rectangle

from polyfed import FedCET, FedLin, FedTrack, Scaffold
from polyfed.report.style import INK, PAPER, QUIET, looks
from polyfed.report.table import Cell, Table
from polyfed_exact.compressedscaffnew import CompressedScaffnew
from polyfed_exact.led import LED
from polyfed_exact.locodl import LoCoDL
from polyfed_exact.scaffnew import Scaffnew
from polyfed_exact.tamuna import TAMUNA
from polyfed_papers.exact import KINDS, STEPS, TRIALS, TUNERS, Case, Ends, Make, Work, all_ends, problem
from polyfed_papers.fedcet import UNCOUNTED
from polyfed_papers.recipes.drawing import panes
from polyfed_papers.recipes.recipe import Bench, Outcome, recipe
from polyfed_papers.recipes.said import Claim, Setting, listed, ordered, ours

LOSSES = {"least squares": "quadratic", "logistic": "logistic"}
KAPPAS, TAUS, TAU, VECTORS = (10, 100, 1000, 10_000), (1, 5, 50), 5, 100
MANY, KEEP, BATCH, LAST = 32, 0.25, 4, 0.1
STEPS_OF: dict[str, Make] = {
    "Scaffnew": lambda p, a: Scaffnew(a / p.smoothness),
    "LED": lambda p, a: LED(a / p.smoothness),
    "FedCET": lambda p, a: FedCET(a / p.smoothness),
    "SCAFFOLD": lambda p, a: Scaffold(a / p.smoothness),
    "FedTrack": lambda p, a: FedTrack(a / p.smoothness),
}
HALF: dict[str, Make] = {
    "TAMUNA": lambda p, a: TAMUNA(a / p.smoothness),
    **{m: STEPS_OF[m] for m in ("FedCET", "SCAFFOLD", "FedTrack")},
}
PACKED: dict[str, Make] = {
    "CompressedScaffnew": lambda p, a: CompressedScaffnew(a / p.smoothness, keep=KEEP),
    "LoCoDL, rand": lambda p, a: LoCoDL(a / p.smoothness, keep=KEEP, m=p.convexity / 2),
    "LoCoDL, natural": lambda p, a: LoCoDL(a / p.smoothness, compressor="natural", m=p.convexity / 2),
    "FedLin, sparse down": lambda p, a: FedLin(TAU * a / p.smoothness, keep_down=KEEP),
    **{m: STEPS_OF[m] for m in ("Scaffnew", "LED", "FedCET")},
}


PROVABLE: dict[str, Make] = {
    "Scaffnew": lambda p, _: Scaffnew.theory(p.smoothness, p.convexity),
    "LED": lambda p, _: LED.theory(p.smoothness, p.convexity, TAU),
    "FedCET": lambda p, _: FedCET("paper", smoothness=p.smoothness, convexity=p.convexity),
    "SCAFFOLD": lambda p, _: Scaffold(LED.theory(p.smoothness, p.convexity, TAU).lr),
    "FedTrack": lambda p, _: FedTrack(1 / (18 * TAU * p.smoothness)),
}
ONE_STEP: dict[str, Make] = {"LED": lambda p, _: LED.theory(p.smoothness, p.convexity)}
PACKED_PROVABLE: dict[str, Make] = {
    "CompressedScaffnew": lambda p, _: CompressedScaffnew.theory(p.smoothness, p.convexity, MANY, KEEP),
    "LoCoDL, rand": lambda p, _: LoCoDL.theory(p.smoothness, p.convexity, MANY, KEEP),
    "Scaffnew": PROVABLE["Scaffnew"],
}


def cases() -> dict[str, Case]:
    """All cells by their names."""
    found: dict[str, Case] = {}
    for (loss, formula), kind in product(LOSSES.items(), KINDS):
        for kappa, tau in product(KAPPAS, TAUS):
            proven = {1: ONE_STEP, TAU: PROVABLE}.get(tau, {})
            of = partial(problem, formula, kind, kappa)
            found[_name(loss, kind, kappa, tau)] = Case(of, Work(tau, VECTORS), STEPS_OF, proven)
        at = partial(problem, formula, kind)
        found[f"{loss}, {kind}, half"] = Case(partial(at, 100), Work(TAU, VECTORS, fraction=0.5), HALF)
        found[f"{loss}, {kind}, noisy"] = Case(partial(at, 10), Work(TAU, VECTORS, batch=BATCH, last=LAST), STEPS_OF)
    for kind, uploads in (("shared", False), ("shared", True), ("rotated", False)):
        of = partial(problem, "quadratic", kind, 100, clients=MANY, dim=MANY)
        key = f"packed, {kind}, {'uploads' if uploads else 'both ways'}"
        found[key] = Case(of, Work(TAU, VECTORS, uploads=uploads), PACKED, PACKED_PROVABLE)
    return found


def _name(loss: str, kind: str, kappa: float, tau: int) -> str:
    return f"{loss}, {kind}, kappa {kappa:g}, tau {tau}"


SETTINGS = (
    Setting("problems", "8 clients, 16 samples, dimension 8; own solutions N(0, I) from a common one; L = 1, mu = "
            "1/kappa at every client; shared: all have one weak direction; rotated: directions of their own", "ours"),
    Setting("losses", "least squares; logistic regression with l2 = 1/kappa, as a softmax over two classes", "ours"),
    Setting("kappa", listed(KAPPAS) + "; half the clients and compressed: 100; noisy: 10", "ours"),
    Setting("tau", listed(TAUS) + "; half, noisy and compressed: 5. Scaffnew, TAMUNA, LoCoDL: on average", "ours"),
    Setting("budget", f"{VECTORS} vectors per client, up and down together; of uploads alone, {VECTORS // 2}", "ours"),
    Setting("half", "four of the eight clients in every round; vectors per client on average", "ours"),
    Setting("noisy", f"batches of {BATCH} of 16 samples; the last tenth of the budget is judged", "ours"),
    Setting("compressed", f"{MANY} clients, dimension {MANY}; a quarter of the entries, or two bytes each", "ours"),
    Setting("tuned", f"a L from {listed(STEPS)}, {TRIALS} trials, twice and four times as many at an edge, under seeds "
            f"{UNCOUNTED} to {UNCOUNTED + TUNERS - 1}, which do not count; all else is the method's default", "ours"),
    Setting("provable", f"tau {TAU}, `theory` of each; FedCET: Algorithm 1; SCAFFOLD: as LED; FedTrack: "
            "1/(18 tau L)", "paper"),
    Setting("not apart", "FedLin, all sent, is FedTrack; Scafflix with alpha 1 is Scaffnew, and so are "
            "CompressedScaffnew and TAMUNA of all clients with keep 1", "ours"),
)  # fmt: skip


@recipe("exact/which", "Which exact method?", minutes=(10, 10), settings=SETTINGS, seeds=10)
def which(bench: Bench) -> Outcome:
    """Which exact method ends nearest to the optimum for the same bytes, and where?"""
    found = all_ends(bench, cases())
    tables = [_main(found), _provable(found), *(_side(found, part) for part in ("half", "noisy", "packed"))]
    return Outcome(tables, {"which": _map(found)}, _claims(found), NOTES)


NOTES = [
    "log10 of ||mean_i x_i - x*|| / ||x*|| at the end of the budget, over seeds; start: 0; –: diverged",
    "with all clients SCAFFOLD is LED, for twice the vectors; with one step LED and Scaffnew are gradient descent",
    "nearest: the lowest mean, and all from which it is not told apart by the 95 % interval of paired differences",
    "FedTrack and FedLin compute one full gradient more per round than the others",
]


def _told(mine: dict[str, Ends], provable: bool = False) -> dict[str, Ends]:
    """The methods of a case, tuned or provable."""
    return {label.removesuffix(", provable"): e for label, e in mine.items() if label.endswith("provable") == provable}


def _nearest(mine: dict[str, Ends]) -> list[str]:
    """The method of the lowest mean, and those that the interval does not tell from it."""
    whole = {label: e.errors for label, e in mine.items() if np.isfinite(e.errors).all()}
    first = min(whole, key=lambda label: whole[label].mean())
    level = [m for m in whole if m != first and ordered("", whole[m], whole[first]).holds is not True]
    return [first, *level]


def _row(heads: tuple[str, ...], mine: dict[str, Ends], labels: list[str]) -> tuple[Cell, ...]:
    near = _nearest(mine)
    cells = [ours(mine[m].errors, mark="gain" if m in near else "") if m in mine else Cell("") for m in labels]
    return (*(Cell(h) for h in heads), *cells, Cell(", ".join(near)))


def _main(found: dict[str, dict[str, Ends]]) -> Table:
    labels = list(STEPS_OF)
    rows = [
        _row((loss, kind, f"{kappa:g}", str(tau)), _told(found[_name(loss, kind, kappa, tau)]), labels)
        for loss, kind, kappa, tau in product(LOSSES, KINDS, KAPPAS, TAUS)
    ]
    return Table("Tuned", ("loss<", "directions<", "kappa", "tau", *labels, "nearest<"), tuple(rows))


def _provable(found: dict[str, dict[str, Ends]]) -> Table:
    labels, rows = [*PROVABLE, "LED, one step"], []
    for loss, kind, kappa in product(LOSSES, KINDS, KAPPAS):
        one, some = (_told(found[_name(loss, kind, kappa, tau)], True) for tau in (1, TAU))
        rows.append(_row((loss, kind, f"{kappa:g}"), some | {"LED, one step": one["LED"]}, labels))
    return Table("Provable", ("loss<", "directions<", "kappa", *labels, "nearest<"), tuple(rows))


def _side(found: dict[str, dict[str, Ends]], part: str) -> Table:
    """The cells of half the clients, of noisy gradients or of compressors."""
    keys = [key for key in found if part in key]
    labels = [*found[keys[0]]]
    rows = [(*_row((key.replace(f", {part}", "").replace(f"{part}, ", ""),), found[key], labels),) for key in keys]
    title = {"half": "Half of the clients", "noisy": "Noisy gradients", "packed": "Compressed, 32 clients"}[part]
    return Table(title, ("cell<", *labels, "nearest<"), tuple(rows))


PAIRS = {
    "": (("LED", "Scaffnew"), ("FedCET", "Scaffnew"), ("FedCET", "LED"), ("LED", "FedTrack")),
    "half": (("FedCET", "TAMUNA"), ("SCAFFOLD", "TAMUNA"), ("SCAFFOLD", "FedCET")),
    "packed": (("CompressedScaffnew", "Scaffnew"), ("LoCoDL, rand", "Scaffnew"), ("LoCoDL, natural", "LED"),
               ("LoCoDL, rand, provable", "Scaffnew, provable"),
               ("CompressedScaffnew, provable", "Scaffnew, provable")),
}  # fmt: skip


def _claims(found: dict[str, dict[str, Ends]]) -> list[Claim]:
    """Which of two methods ends nearer, in every cell."""
    claims = []
    for key, mine in found.items():
        part = next((name for name in PAIRS if name and name in key), "")
        claims += [
            ordered(f"{key}: {a} ends nearer than {b}", mine[b].errors, mine[a].errors, unit=" decades")
            for a, b in PAIRS[part]
            if not key.endswith("tau 1") or "FedCET" in (a, b)
        ]
    return claims


def _map(found: dict[str, dict[str, Ends]]):
    """A cell per kappa and tau in the colour of the nearest method, pale where it is not told from the next."""
    labels = list(STEPS_OF)
    look = looks(labels, dict.fromkeys(labels, "method"))
    with panes(6.4, 5.2, 2, 2, sharex=True, sharey=True) as (figure, axes):
        for ax, (loss, kind) in zip(axes.flat, product(LOSSES, KINDS), strict=True):
            for (x, tau), (y, kappa) in product(enumerate(TAUS), enumerate(KAPPAS)):
                mine = _told(found[_name(loss, kind, kappa, tau)])
                near = _nearest(mine)
                colour = look[near[0]].color
                ax.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, facecolor=colour if len(near) == 1 else "none",
                                       edgecolor=colour, linewidth=1.6))  # fmt: skip
                text = " or ".join(near[:2]) if len(near) < 3 else f"{near[0]},\n{len(near) - 1} level"
                ax.text(x, y, f"{text}\n{mine[near[0]].errors.mean():.1f}".replace(" or ", "\nor "), ha="center",
                        va="center", fontsize=7, color=PAPER if len(near) == 1 else INK)  # fmt: skip
            ax.set(title=f"{loss}, {KINDS[kind]}", xlim=(-0.5, len(TAUS) - 0.5), ylim=(-0.5, len(KAPPAS) - 0.5))
            ax.set_xticks(range(len(TAUS)), [str(t) for t in TAUS])
            ax.set_yticks(range(len(KAPPAS)), [f"{k:g}" for k in KAPPAS])
            ax.grid(False)
            ax.tick_params(length=0, color=QUIET)
        for ax in axes[-1]:
            ax.set_xlabel("local steps")
        for ax in axes[:, 0]:
            ax.set_ylabel("kappa")
    return figure
