"""Caveats of the answer: worse probabilities, one seed, methods apart, clients without a score, the effort it takes."""

import math

from polyfed.base.part import pasted
from polyfed.metrics.scores import AUC
from polyfed.metrics.terms import ranking
from polyfed.report import pairs, words
from polyfed.report.intervals import HEAVY
from polyfed.report.verdicts import LEAST, Study

ERRORS = 2.0  # standard errors from an AUC of a half: of a common model below, of an own one above


def brier_scores(study: Study, label: str) -> dict[int, float]:
    """{seed: the Brier score, mean over clients}, as runs were judged, or of two classes by the probabilities."""
    if "brier" in {m.name for m in study.metrics}:
        return {r.seed: pairs.mean_of(r.values(metric="brier").values()) for r in study.counted(label)}
    each = {r.seed: [float(((p - y) ** 2).mean()) for p, y in r.probabilities.values()] for r in study.counted(label)}
    return {seed: pairs.mean_of(scores) for seed, scores in each.items() if scores}


def calibration(study: Study, method: str) -> list[str]:
    """Warn where a method's Brier score is a tenth or more worse, in every seed, than another's."""
    if study.metric.name == "brier":
        return []
    shared = [*study.verdicts.mean.gains, *([study.verdicts.mean.reference] if study.verdicts.mean.reference else [])]
    brier = {k: scores for k in shared if (scores := brier_scores(study, k))}
    if method not in brier:
        return []
    worse = {}
    for other in brier:
        both = [(brier[method][s], brier[other][s]) for s in brier[method].keys() & brier[other].keys()]
        if both and all(mine > 1.1 * theirs for mine, theirs in both):
            worse[other] = tuple(pairs.mean_of(of) for of in zip(*both, strict=True))
    if not worse:
        return []
    other = min(worse, key=lambda k: worse[k][1])
    mine, theirs = map(words.figures, worse[other])
    often = "in every seed" if len(study.seeds) > 1 else "in the one seed"
    return [
        f"Check the calibration of {method}: its Brier score is {mine}, against {theirs} with {other}, worse {often}."
    ]


def doubts(study: Study) -> list[str]:
    """What makes the answer itself doubtful, which stands open under it as the checks of the data do."""
    lines, first = _turned(study), study.verdicts.lead
    if first is not None:
        lines += calibration(study, first[0])
        lines += _tails(study, *first) if study.verdicts.mean_gain(*first).known else []
    diverged = [label for label in study.labels if any(r.status == "diverged" for r in study.of(label))]
    if diverged:
        lines.append(f"Runs of {words.listed(diverged)} diverged and are left out.")
    partial = [r for label in study.labels for r in study.counted(label) if r.status != "finished"]
    if partial:
        lines.append(f"{words.count(len(partial), 'run')} did not finish; what is shown is its last evaluation.")
    return lines


def caveats(study: Study) -> list[str]:
    lines, first = list[str](), study.verdicts.lead
    if len(study.seeds) == 1 and first is None:
        lines.append("One seed: no spread can be given.")
    lacking = _lacking(study)
    if lacking:
        lines.append(
            f"Means leave out {words.listed(lacking)}: no {words.Scale(study.metric).name} ({study.metric.lacks})."
        )
    lines += _counted(study)
    if first is not None and study.verdicts.mean_gain(*first).known:
        lines += [OF[of]] if (of := study.verdicts.of(*first)) in OF else []
        lines += _best_of(study, *first)
    if first is not None:
        lines += _effort(study, *first)
        apart = [k for k, g in study.verdicts.mean.gains.items() if not g.seeds]
        if apart:
            verb = "has no seed" if len(apart) == 1 else "have no seeds"
            lines.append(f"{words.listed(apart)} {verb} in common with {first[1]}: not compared.")
    return lines + _stopped(study)


def _turned(study: Study) -> list[str]:
    """Ask about classes where the common model ranks a client's samples the other way round, and its own does not."""
    common, own = ([k for k in study.labels if study.role(k) == of] for of in ("common", "own"))
    ranked = {k: _ranking(study, k) for k in (*common, *own)}
    about, lines = study.first.about, list[str]()
    classes = (about.preparation or {}).get("labels") or ()
    for name in study.names:
        both = [[ranked[k][name] for k in of if name in ranked[k]] for of in (common, own)]
        sure = ERRORS if both[1] else ERRORS + 1
        if not both[0] or any(auc + sure * error >= 0.5 for auc, error in both[0]):
            continue
        if any(auc - ERRORS * error <= 0.5 for auc, error in both[1]):
            continue
        said = f"the common model has an AUC of {both[0][0][0]:.2f} there"
        said += f", its own {both[1][0][0]:.2f}" if both[1] else ""
        target = (about.preparation or {}).get("target")
        swap = (
            {"site": {name: {target: dict(zip(classes, reversed(classes), strict=True))}}} if len(classes) == 2 else {}
        )
        lines.append(pasted(f"Check the outcome of {name}: {said}; are its classes coded the other way round?", swap))
    return lines


def _ranking(study: Study, label: str) -> dict[str, tuple[float, float]]:
    """{client: (AUC, its standard error near a half from one test set)}, means over seeds, of two classes; where no
    probabilities are known, as from real sites, as if a fifth of the samples were of the rarer class.
    """
    each: dict[str, list[tuple[float, float]]] = {}
    for run in study.counted(label):
        if not run.probabilities and AUC.name in {m.name for m in study.metrics}:
            for name, auc in run.values(metric=AUC.name).items():
                if math.isfinite(auc) and study.tested.get(name, 0):
                    each.setdefault(name, []).append((auc, 0.72 / math.sqrt(study.tested[name])))
        for name, (p, y) in run.probabilities.items():
            if 0 < y.sum() < len(y):
                each.setdefault(name, []).append(ranking(p, y))
    return {name: (pairs.mean_of(a for a, _ in of), pairs.mean_of(e for _, e in of)) for name, of in each.items()}


def _stopped(study: Study) -> list[str]:
    """Say which round's models are shown where validation chose it, and what was not sent; means over runs."""
    said = []
    for label in study.labels:
        runs = [(r.summary, r.config.rounds) for r in study.counted(label) if r.summary.best_round is not None]
        each = [(s.rounds, s.best_round or 0, of, s.unsent_bytes or 0) for s, of in runs]
        if each:
            after, best, of, unsent = (sum(values) / len(each) for values in zip(*each, strict=True))
            rest = f"; {words.size(unsent)} of {of:.0f} rounds' traffic not sent" if unsent else ""
            where = f"after round {after:.0f} of {of:.0f} with models of round {best:.0f}, the best by validation"
            said.append(f"{label} {'stopped' if after < of else 'ended'} {where}{rest}.")
    return said


SETS = "about these training sets on new samples, not about training sets drawn anew."
OF = {
    "models": "One seed: the intervals are about these trained models on new samples, not about another training.",
    "sets": f"Every seed tests the same samples: the intervals are {SETS}",
    "both": f"Where every seed tests the same samples, a client's interval is {SETS}",
}


def _counted(study: Study) -> list[str]:
    """Whom the mean leaves out, and what they would need."""
    if study.needs:
        each = [f"{n} ({k:.0f}; {total:,} samples in all would do)" for n, (k, total) in study.needs.items()]
        return [f"The mean is over {study.whom}; fewer than {LEAST} samples are tested at {words.listed(each)}."]
    few = any(0 < k < LEAST for k in study.tested.values()) and study.first.n > 1 and study.verdicts.grids
    return [f"Too few clients test {LEAST} samples for a mean of those alone: it is over all."] if few else []


def _tails(study: Study, method: str, reference: str) -> list[str]:
    """Heavy tails of the errors: a longer interval, which does not cure a score that does not see them."""
    if not study.verdicts.tails(method, reference) > HEAVY:
        return []
    text = "A few errors are far larger than the rest, and intervals are longer for it"
    if study.metric.sign < 0 and not study.metric.root:
        text += (
            f"; of {words.Scale(study.metric).name} they may be too short (85 to 90 % held the truth in simulations)"
        )
    return [f"{text}. If these are errors of the data, correct them, or train with a robust loss."]


def _best_of(study: Study, method: str, reference: str) -> list[str]:
    """Say what the best of several equal methods would show."""
    v, scale = study.verdicts, words.Scale(study.metric)
    if len(v.mean.gains) < 2 or v.mean.gains[method].sign or not v.best_by_chance >= scale.step(v.level(reference)):
        return []
    text = f"{scale.signed(v.best_by_chance).lstrip('+')}{scale.difference_unit or ' better'}"
    return [f"The best of {len(v.mean.gains)} methods that are all worth the same would look {text} by chance."]


def _lacking(study: Study) -> list[str]:
    """The clients with samples that lack the metric that leads, with how often where not always."""
    runs = [(r, r.values()) for label in study.labels for r in study.counted(label)]
    lacking = []
    for name in study.names:
        mine = [
            v.get(name, math.nan)
            for r, v in runs
            if any(c.name == name and c.samples(study.split) for c in r.about.clients)
        ]
        bad = sum(map(math.isnan, mine))
        if bad:
            lacking.append(name if bad == len(mine) else f"{name} ({bad} of {len(mine)} runs)")
    return lacking


def _effort(study: Study, method: str, reference: str) -> list[str]:
    """Say what it would take to see a small gain here."""
    needed = study.verdicts.effort(method, reference)
    if needed is None:
        return []
    gain, seeds, times = needed
    scale, now = words.Scale(study.metric), len(study.verdicts.paired(method, reference))
    text = f"{scale.signed(gain).lstrip('+')}{scale.difference_unit}"
    text = f"A gain of {text.replace('.0 points', ' points')} in the mean"
    if seeds is not None and seeds <= now:
        return [f"{text} would be seen here four times in five."]
    if not math.isfinite(times) and seeds is None:
        return [f"{text} would take {pairs.OTHERS}."]
    if seeds is not None:
        return [f"{text} would take about {seeds} seeds to be seen four times in five."]
    factor = words.figures(times, 2) if times < 10 else f"{pairs.round_up(times):,}"
    more = f"about {factor} times as many samples"
    if now == 1:
        return [f"{text} would take {more} to be seen four times in five."]
    there = f"with {now} seeds it would take {more}"
    return [f"{text} cannot be seen with these samples, however many the seeds: {there}."]
