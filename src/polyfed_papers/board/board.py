"""The board's recipes: a table per setting, what holds over all of them, and pictures."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from polyfed.base.errors import DataError
from polyfed.core.algorithm import Algorithm
from polyfed.report import read, words
from polyfed.report.intervals import Spread
from polyfed.report.pairs import Evidence, Interval, mean_of, sample_std
from polyfed.report.style import GREEN, INK, QUIET, VERMILLION, canvas, hover, styled
from polyfed.report.table import Cell, Table
from polyfed.report.verdicts import Study
from polyfed.studies.compare import Comparison
from polyfed_papers import board as common
from polyfed_papers.pfllib import PRINTED
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, case, curves, grouping_of, recipe
from polyfed_papers.recipes.said import Setting as Said

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MINUTES = {"small": (25, 110), "full": (160, 960)}


class Budget(NamedTuple):
    """Work of every method: gradients per client, and trials of settings."""

    gradients: int
    trials: int


BUDGETS: Mapping[Size, Budget] = {"small": Budget(300, 10), "paper": Budget(1000, 12)}


def settings(
    board: Mapping[str, common.Setting], scale: Size, budgets: Mapping[Size, Budget] = BUDGETS,
    some: Sequence[str] = (),
) -> tuple[Said, ...]:  # fmt: skip
    # some: the methods, if not all that are shipped
    budget, draws, first = budgets[scale], len(common.DRAWS), next(iter(board.values()))
    work = common.work(first)  # that all settings share
    tested = " or ".join(f"{100 * of:.0f} %" for of in sorted({setting.tested for setting in board.values()}))
    second = sum(common.SECOND[name][0] not in common.fixed(name, first) for name in some or common.SECOND
                 if name in common.SECOND)  # fmt: skip
    other = "; ".join(f"{name} {k} {v}" for name in some or common.OTHER for k, v in common.fixed(name, first).items())
    other += "; fine-tuning in the last round alone; FedPAC's features, three to a gradient" * first.long
    apart = "; ".join(f"{name} ({why})" for name, why in common.APART.items())
    return (
        *(Said(name, setting.said, "ours") for name, setting in board.items()),
        Said("budget", f"{budget.gradients} gradients a client, counted by the engine, all models together", "ours"),
        Said("local work", f"{work['local_steps']} steps a round, batches of {work['batch_size']}, plain SGD", "ours"),
        Said("trials", f"{budget.trials} of every method: step size, and of {second} methods a second "
             f"setting; by {100 * common.HELD:.0f} % of the training samples of {draws} draws that do not count; "
             f"all methods of a setting get {common.MORE} more while a choice is at an edge", "ours"),
        Said("deployed", f"the model of the last round; tested on {tested} of each client's samples, or on "
             "its test set where it has one", "ours"),
        Said("not at defaults", other, "ours"),
        Said("methods", ", ".join(some), "ours") if some else Said("left out", apart, "ours"),
    )  # fmt: skip


def board(bench: Bench, places: Mapping[str, common.Setting], some: Sequence[str] = ()) -> Outcome:
    """Train `some` methods (None: all) as far as missing, and make tables and pictures of all."""
    if bench.rehearse:
        places = dict(islice(places.items(), 1))
    outcome = compared(bench, places, BUDGETS[bench.pick("small", "paper")], common.contenders(bench, some))
    notes = [*outcome.notes, "FL-bench's page prints no figures."]
    return replace(outcome, tables=[*outcome.tables, printed()], notes=notes)


MADE = {  # recipe -> its settings and methods, title, minutes, question
    "small": ((common.SMALL,), "Every method on digits, hospitals and synthetic clients", MINUTES["small"],
              "Which methods are told apart when all have the same gradients and the same trials, and which of them is "
              "better than a client's own model?"),
    "full": ((common.FULL,), "Every method in ten settings", MINUTES["full"],
             "Which methods are told apart over ten kinds of clients when all have the same gradients and the same "
             "trials, and where is none of them better than a client's own model?"),
    "clusters": ((common.SHIFTS, common.CLUSTERED), "Clustered methods under three shifts with known groups", (20, 80),
                 "Which clustered methods find the groups when clients differ in their labels, their inputs, their "
                 "concepts or all of them, on one protocol, and does that make better models than FedAvg with "
                 "fine-tuning?"),
}  # fmt: skip
for name, (given, title, minutes, about) in MADE.items():
    recipe(f"board/{name}", title, minutes=minutes, settings=partial(settings, given[0]), seeds=10, scored=True,
           joins=True)(case(about, board, *given))  # fmt: skip


@recipe("board/natural", "Every method on people, writers, roles and sources, of the user's files",
        minutes=MINUTES["full"], settings=partial(settings, common.NATURAL), data=tuple(common.NATURAL), seeds=5,
        scored=True, joins=True)  # fmt: skip
def natural(bench: Bench) -> Outcome:
    """Which methods are told apart on clients that nobody made: people, writers, roles of plays and sources of images?
    Of the data sets named, those that the folder of data has; the others are named with what is missing.
    """
    here, absent = dict[str, common.Setting](), dict[str, str]()
    for name, setting in common.NATURAL.items():
        setting = replace(setting, folder=None if bench.data_dir is None else str(bench.data_dir))
        try:
            setting.federation(common.UNCOUNTED)
            here[name] = setting
        except DataError as e:
            absent[name] = f"{name}: {str(e).removeprefix(f'{name}: ')}"
    outcome = board(bench, here)
    return replace(outcome, notes=[*outcome.notes, *(f"Left out: {why}" for why in absent.values())])


def compared(
    bench: Bench, places: Mapping[str, common.Setting], budget: Budget, methods: Mapping[str, type[Algorithm]]
) -> Outcome:
    """Train what is missing of these methods, and make tables and pictures: over all places, and of each."""
    refused = dict[str, str]()
    tables, figures, captions, studies = [], {}, {}, {}
    wanted = {name: setting for name, setting in places.items() if bench.wants(name)}
    for name, setting in wanted.items():  # one after the other, so that a record that was cut off has whole tables
        every = {**methods, **common.BESIDE.get(name, {})}
        if setting.only:
            every = {label: cls for label, cls in every.items() if label in (*setting.only, *bench.joining)}
        why = {label: common.refusal(setting, cls) for label, cls in every.items()}
        able = {label: cls for label, cls in every.items() if not why[label]}
        refused |= {label: text for label, text in why.items() if text}
        shipped = [cls for label, cls in able.items() if label in methods and label not in bench.joining]
        trials = 1 if bench.rehearse else common.agreed(bench, name, setting, shipped, *budget)
        some = {k: cls for k, cls in able.items() if bench.wants(f"{name}/{k}")} or able
        work = {k: partial(common.cell, bench, name, setting, cls, trials, budget.gradients) for k, cls in some.items()}
        found = bench.all_of([(f"{name}/{label}", common.UNCOUNTED, task) for label, task in work.items()])
        parts = dict(zip(work, found, strict=True))
        study = read([r.folder for part in parts.values() for r in part.results if r.folder is not None])
        studies[name] = study
        tables.append(one(bench, name, study, every, parts, setting))
        figures[f"{name}-gain"], captions[f"{name}-gain"] = dots(study), f"{name}: gain over a client's own model"
        figures[f"{name}-bytes"], captions[f"{name}-bytes"] = costs(study), f"{name}: accuracy and bytes"
    notes = [
        "Groups: the best method and all that are not clearly below it are A; the best of the others and all that are "
        "not clearly below it B; and so on. Intervals hold jointly over the methods of a setting (Bonferroni).",
        "Gains: paired over seeds and test samples, in points of accuracy. Settings were chosen under other draws; of "
        "what is one data set, such as digits, a draw is another split.",
        "Cell: what `polyfed verify record.jsonl.gz --run CELL` trains again. Digest: of the models of all seeds, the "
        "same if the cell is trained again.",
        "Best round: the largest mean of any evaluated round, chosen by test accuracy, as PFLlib reports; beside, and "
        "nothing is decided by it.",
        "Gradients: of batches, as the engine counts them; what some methods take of a batch besides, and of all "
        "samples as many as they make batches, is added (a test counts both). Losses that choose or weigh are no "
        "gradients, but they are in the time.",
        *(f"Not trained: {label}: {why}" for label, why in refused.items()),
    ]
    tested = max(setting.tested for setting in places.values())
    return Outcome([over_all(studies, tested), *tables], figures, notes=notes, captions=captions)


# ---- one setting -----------------------------------------------------------------------------------------------------


def gain(study: Study, label: str, reference: str) -> Interval:
    """Gain in the mean over clients, jointly over all methods of the setting."""
    return study.verdicts.mean_gain(label, reference, max(len(study.verdicts.means) - 1, 1))


def groups(study: Study) -> dict[str, str]:
    """{method: its group}, which the best of those left leads; whoever is not clearly below it is in it."""
    left, letters = [k for k in study.verdicts.ranked if k in study.verdicts.means], dict[str, str]()
    while left:
        head, letter = left[0], _letter(len(set(letters.values())))
        beside = [k for k in left if k == head or not gain(study, k, head).high < 0]
        letters |= dict.fromkeys(beside, letter)
        left = [k for k in left if k not in beside]
    return letters


def _letter(k: int) -> str:
    return chr(ord("A") + k) if k < 26 else f"Z{k - 25}"


def worst_decile(values: Sequence[float]) -> float:
    """Mean of the tenth of the clients that are served worst, at least one of them."""
    finite = sorted(v for v in values if math.isfinite(v))
    return mean_of(finite[: math.ceil(len(finite) / 10)])


def below(study: Study, label: str) -> float:
    """Share of the clients, over seeds, that are below their own model."""
    one, own = (study.verdicts.merits[k] for k in (label, common.OWN))
    seeds = study.verdicts.paired(label, common.OWN)
    gaps = [one.values[one.seeds.index(s)] - own.values[own.seeds.index(s)] for s in seeds]
    gaps = np.concatenate(gaps) if gaps else np.array([])
    finite = gaps[np.isfinite(gaps)]
    return float((finite < 0).mean()) if len(finite) else math.nan


def digest(part: Comparison) -> str:
    """Eight digits of the digests of the models of all seeds."""
    models = [(r.seed, (r.summary.digest or {}).get("models", "")) for r in part.results if r.summary is not None]
    return hashlib.sha256(repr(sorted(models)).encode()).hexdigest()[:8]


def one(
    bench: Bench, name: str, study: Study, methods: Mapping[str, type[Algorithm]], parts: Mapping[str, Comparison],
    setting: common.Setting | None = None,
) -> Table:  # fmt: skip
    """The table of a setting, the best first; where groups are known, with those that were found."""
    grouped = {k: tuple(map(mean_of, grouping_of(part, k))) for k, part in parts.items()}
    shown = any(math.isfinite(score) for _, score in grouped.values())
    order, letters, unit = study.verdicts.ranked, groups(study), unit_of(study)
    rows = []
    for label in order:
        runs = study.counted(label)
        at, edges = common.tuned_to(bench, name, methods[label], setting)
        tuned = Cell(", ".join(f"{k} {v:.3g}" for k, v in at.items()) + " (edge)" * bool(edges), {}, "quiet")
        place = Cell(f"{name}/{label}/{label}-seed{bench.seeds[0]}", {}, "quiet")
        last = tuned, place, Cell(digest(parts[label]), {}, "quiet")
        if not runs:
            nothing = [Cell("–")] * (8 + 2 * shown)
            rows.append((Cell(label), Cell("–"), Cell("diverged", {unit.name: None}, "loss"), *nothing, *last))
            continue
        of_seed, sign = study.verdicts.grids[label].per_seed(), study.metric.sign
        means = [*of_seed.values()]
        tenth = sign * mean_of([worst_decile([sign * v for v in r.values().values()]) for r in runs])
        _, work = bench.once(f"{name}-{label}-rounds", tuple)
        moved = mean_of([(r.summary.down_bytes + r.summary.up_bytes) / r.n for r in runs])
        rows.append((
            Cell(label, {"method": label}),
            Cell(letters.get(label, "–"), {"group": letters.get(label)}),
            unit.cell(mean_of(means), sample_std(means), unit.name, "best" if letters.get(label) == "A" else ""),
            unit.cell(tenth, math.nan, "worst_decile"),
            PERCENT.cell(below(study, label), math.nan, "below_own", decimals=0),
            unit.gained(gain(study, label, common.OWN) if label != common.OWN else None, "over_local"),
            unit.gained(gain(study, label, common.TUNED) if label != common.TUNED else None, "over_fedavg_ft"),
            Cell(words.size(moved), {"bytes_per_client": moved}),
            Cell(f"{work:.0f}", {"gradients": work}),
            Cell(words.duration(t := mean_of([r.summary.seconds for r in runs])), {"seconds": t}),
            unit.cell(mean_of(_best_rounds(parts[label], of_seed)), math.nan, "best_round", "quiet"),
            *(_grouped(*grouped[label]) if shown else ()),
            *last,
        ))  # fmt: skip
    heads = (
        "method<", "group", unit.head, f"worst tenth{unit.suffix}", "below own, % of clients", "gain over local",
        "gain over fedavg-ft", "bytes per client", "gradients", "time", f"best round by test{unit.suffix}",
        *(("groups", "ARI") if shown else ()), "tuned<", "cell<", "digest<",
    )  # fmt: skip
    return Table(f"{name}: {len(study.names)} clients", heads, tuple(rows))


def _best_rounds(part: Comparison, seeds: Iterable[int]) -> list[float]:
    """The best accuracy of any round, per seed; of these seeds, without those of runs that diverged."""
    curve, sign = curves(part), part.metric.sign
    best = {} if curve.empty else (sign * curve[part.metric.name]).groupby(curve["seed"]).max()
    return [sign * best[seed] for seed in seeds if seed in best]


def _grouped(count: float, score: float) -> tuple[Cell, Cell]:
    finite = math.isfinite(count)
    return (
        Cell(f"{count:.1f}" if finite else "–", {"groups": count}),
        Cell(f"{score:.2f}" if finite else "–", {"ari": score}),
    )


class Unit(NamedTuple):
    """How a table says its metric."""

    name: str = "accuracy"
    factor: float = 100.0
    suffix: str = ", %"

    @property
    def head(self) -> str:
        return self.name + self.suffix

    def cell(self, mean: float, spread: float, key: str, mark: str = "", decimals: int = 1) -> Cell:
        text = f"{self.factor * mean:.{decimals}f}"
        text += f" ± {self.factor * spread:.{decimals}f}" if math.isfinite(spread) else ""
        return Cell(text if math.isfinite(mean) else "–", {key: mean}, mark)

    def gained(self, g: Interval | None, key: str) -> Cell:
        if g is None or not g.known:
            return Cell("–", {key: None if g is None else g.mean})
        mean, low, high = (f"{self.factor * v:+.1f}" for v in (g.mean, g.low, g.high))
        mark = "gain" if g.low > 0 else "loss" if g.high < 0 else ""
        return Cell(f"{mean} ({low} to {high})", {key: g.mean, f"{key}_low": g.low, f"{key}_high": g.high}, mark)


PERCENT = Unit()


def unit_of(study: Study) -> Unit:
    return PERCENT if study.metric.name == "accuracy" else Unit(study.metric.name, common.TENS, ", points")


# ---- over all settings -----------------------------------------------------------------------------------------------


def over_all(studies: Mapping[str, Study], tested: float = common.Setting.tested) -> Table:
    """Mean gains over the settings, the largest first; numbers of settings clearly above, below, in the first group."""
    letters = {name: groups(study) for name, study in studies.items()}
    labels, rows = dict.fromkeys(k for study in studies.values() for k in study.labels), []
    for label in labels:
        where = [name for name in studies if label in letters[name]]
        first = sum(letters[name][label] == "A" for name in where)
        gained, cells = over(studies, label, common.OWN, len(labels) - 1, tested), []
        for reference in (common.OWN, common.TUNED):
            gains = [gain(studies[name], label, reference) for name in where if label != reference]
            up, down = sum(g.low > 0 for g in gains), sum(g.high < 0 for g in gains)
            mean = gained if reference == common.OWN else over(studies, label, reference, len(labels) - 1, tested)
            cells += [
                PERCENT.gained(mean if label != reference else None, f"over_{reference}"),
                Cell(f"{up} / {down}" if gains else "–", {f"above_{reference}": up, f"below_{reference}": down}),
            ]
        cells.append(Cell(f"{first} of {len(where)}", {"first_group": first}, "quiet"))
        rows.append((0.0 if label == common.OWN else gained.mean, (Cell(label, {"method": label}), *cells)))
    rows.sort(key=lambda row: -row[0] if math.isfinite(row[0]) else math.inf)
    heads = ("method<", "mean gain over local", "above / below", "mean gain over fedavg-ft", "above / below",
             "in the first group")  # fmt: skip
    note = (
        "Mean gains: over these settings, those of accuracy that both methods were trained in; intervals hold jointly "
        "over the methods. Above / below: settings in which the gain is clear, jointly over the methods."
    )
    return Table(f"Over {words.count(len(studies), 'setting')}", heads, tuple(row for _, row in rows), (note,))


def over(studies: Mapping[str, Study], label: str, reference: str, comparisons: int, tested: float) -> Interval:
    """Gain in the mean over clients and settings, from one mean per seed; the same samples are tested again."""
    grids = [study.verdicts.grids for study in studies.values() if unit_of(study) == PERCENT]
    pairs = [(of[label].per_seed(), of[reference].per_seed()) for of in grids if label in of and reference in of]
    seeds = sorted(set.intersection(*({*one} & {*other} for one, other in pairs))) if pairs else []
    gains = [np.mean([one[seed] - other[seed] for one, other in pairs]) for seed in seeds]
    return Evidence(Spread(np.array(gains)), tested).interval(max(comparisons, 1))


def printed() -> Table:
    """PFLlib's figures, which stand beside and enter nothing."""
    rows = tuple((Cell(name), *(Cell(text, {}, "quiet") for text in both)) for name, both in PRINTED.items())
    note = (
        "Other data, other models, defaults, and the best round by test accuracy: they enter no group. What of that "
        "protocol comes out here is polyfed reproduce pfllib/fashion-mnist-dirichlet."
    )
    return Table("Printed by PFLlib, Fashion-MNIST", ("method<", "two classes, %", "Dirichlet(0.1), %"), rows, (note,))


# ---- pictures --------------------------------------------------------------------------------------------------------


def dots(study: Study) -> "Figure":
    """A dot and its joint interval for every method's gain over the own models, the best on top."""
    order = [k for k in study.verdicts.ranked if k in study.verdicts.means and k != common.OWN]
    unit = unit_of(study)
    factor, what = unit.factor, "points" if unit == PERCENT else f"points of {unit.name}"
    with styled():
        figure, (axes,) = canvas(5.6, 1.0 + 0.16 * len(order))
        axes.axvline(0, color=INK, linewidth=0.9)
        for i, label in enumerate(order):
            g = gain(study, label, common.OWN)
            colour = GREEN if g.low > 0 else VERMILLION if g.high < 0 else QUIET
            if g.known:
                axes.plot([factor * g.low, factor * g.high], [i, i], color=colour, linewidth=1.2)
            axes.plot(factor * g.mean, i, "o", color=colour, markersize=3.5)
        axes.set_yticks(range(len(order)), order, fontsize=6)
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.set_xlabel(f"gain over local, {what}; 95 % jointly over the methods")
    return figure


def costs(study: Study) -> "Figure":
    """The metric against bytes, a dot per method; named are those that nothing cheaper equals."""
    unit, sign = unit_of(study), study.metric.sign
    spent = {
        k: (
            sum(r.summary.down_bytes + r.summary.up_bytes for r in runs) / sum(r.n for r in runs),
            study.verdicts.means[k],
        )
        for k in study.verdicts.ranked
        if k in study.verdicts.means and (runs := study.counted(k))
    }
    best, front = -math.inf, []
    for label, (_, mean) in sorted(spent.items(), key=lambda item: item[1]):
        if mean > best:
            best, front = mean, [*front, label]
    at = {label: (moved, unit.factor * sign * mean) for label, (moved, mean) in spent.items()}
    with styled():
        figure, (axes,) = canvas(5.6, 3.6)
        for label, place in at.items():
            axes.plot(*place, "o", color=GREEN if label in front else QUIET, markersize=4)
        texts = [f"{label}: {y:.1f}{unit.suffix[1:]}, {words.size(x)}" for label, (x, y) in at.items()]
        hover(axes, [x for x, _ in at.values()], [y for _, y in at.values()], texts)
        least = min((x for x, _ in at.values() if x), default=1.0)
        decade = (1 + 1e-9) * 10 ** math.floor(math.log10(least))  # which rounding may have one lower
        axes.set_xscale("symlog", linthresh=decade)
        axes.xaxis.set_major_formatter(lambda v, _: re.sub(r"\.0+ ", " ", words.size(v)))
        axes.set_xlabel("bytes per client, down and up")
        axes.set_ylabel(unit.head)
        axes.yaxis.set_inverted(sign < 0)  # better is higher up
        _named(figure, axes, {label: at[label] for label in front})
    return figure


def _named(figure: "Figure", axes: "Axes", front: Mapping[str, tuple[float, float]]) -> None:
    """Name points, ever dearer and better: above each to the left, where none is, one name over another."""
    figure.draw_without_rendering()
    heights: list[tuple[float, float]] = []
    for label, at in front.items():
        x, y = axes.transData.transform(at) * 72 / figure.dpi
        height = max([y + 3, *(h + 7 for other, h in heights if x - other < 60)])
        heights.append((x, height))
        right, away = x - axes.bbox.x0 * 72 / figure.dpi > 40, height - y
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": QUIET} if away > 9 else None
        axes.annotate(label, at, (-3 if right else 3, away), textcoords="offset points", fontsize=6,
                      ha="right" if right else "left", va="bottom", arrowprops=line)  # fmt: skip
