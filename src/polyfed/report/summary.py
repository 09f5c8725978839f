"""The answer in a sentence or two: does federating pay here, for whom, with which method, how much, at what bytes."""

import math

import numpy as np

from polyfed.report import pairs, words, yardsticks
from polyfed.report.clients import lead
from polyfed.report.pairs import Interval, Verdict
from polyfed.report.read import ALONE, Study


def answer(study: Study) -> str:
    """A few plain sentences that claim a difference only where it is clear: its interval, and jointly over clients."""
    values = pairs.grids(study)
    if not values:
        return _nothing(study)
    mean = pairs.mean_verdict(study)
    first = lead(study)
    if len(values) == 1 or first is None:
        text = _single(study, next(iter(values))) if len(values) == 1 else _ranked(study, list(values))
    elif study.role(first[1]) in ALONE:
        text = _pays(study, mean, *first)
    else:
        text = _without_own(study, mean, *first)
    return " ".join([text, *yardsticks.compared(study), *_caveats(study)])


def _pays(study: Study, mean: Verdict, method: str, own: str) -> str:
    scale, gain = words.Scale(study.metric), mean.gains[method]
    level = f"{_level(study, method)} against {_short(study, own)} for the clients' own models ({own})"
    head = {
        1: "Federating pays on average: ",
        -1: "Federating does not pay here: ",
        0: "No clear difference on average between federating and training alone: ",
        None: "With one seed no spread can be given, so this is a hint and no finding: "
        if not gain.enough
        else f"{pairs.FEW.capitalize()} ({gain.enough} would do), so this is a hint and no finding: ",
    }[gain.sign]
    name = method if gain.sign == 1 or len(mean.gains) == 1 else f"{method}, the best shared method,"
    text = f"{head}{name} reaches {level}, {_difference(gain, scale)}, at {_bytes(study, method)} per client."
    if gain.sign == -1 and mean.choice is None:
        text = text.replace(head, "Federating does not pay with the best method here: ")
    return " ".join([text, _whom(study, method, own), *_personalised(study, mean, own)])


def _whom(study: Study, method: str, own: str) -> str:
    """Which clients gain and lose, by name where they are few."""
    scale = words.Scale(study.metric)
    found = {n: g for n, g in pairs.gains(study, method, own).items() if math.isfinite(g.mean)}
    if all(g.sign is None for g in found.values()):
        up, down = sum(g.mean > 0 for g in found.values()), sum(g.mean < 0 for g in found.values())
        return f"With it, {up} of {words.count(len(found), 'client')} do better than alone and {down} worse."
    up = [n for n, g in found.items() if g.sign == 1]
    down = sorted((n for n, g in found.items() if g.sign == -1), key=lambda n: found[n].mean)
    rest = len(found) - len(up) - len(down)
    losing = f"{len(down) or 'none'} {'lose' if len(down) > 1 else 'loses'}"
    if down:
        most = f"{scale.signed(found[down[0]].mean)}{scale.difference_unit}"
        losing += f" ({down[0]}, {most})" if len(down) == 1 else f" (most: {down[0]}, {most})"
    gaining = f"{len(up) or 'none'} {'gain' if len(up) > 1 else 'gains'} clearly"
    if up and len(up) <= 3 and len(found) > 1:
        gaining += f" ({words.listed(up)})"
    return f"Of {words.count(len(found), 'client')}, {gaining}, {losing}, and for {rest} there is no clear difference."


def _personalised(study: Study, mean: Verdict, own: str) -> list[str]:
    """Whether a model per client is worth it over one for all."""
    values, role = pairs.merits(study), pairs.roles(study)
    kinds: dict[str, list[str]] = {"common": [], "personalised": []}
    for label in mean.gains:
        kinds[role[label]].append(label)
    if not kinds["common"] or not kinds["personalised"]:
        return []
    centre = {k: values[k].mean() for k in mean.gains}
    common, special = (max(kinds[k], key=lambda x: centre[x]) for k in ("common", "personalised"))
    gap, scale = pairs.mean_gain(study, special, common, len(kinds["personalised"])), words.Scale(study.metric)
    verb = {1: "is better than", -1: "is worse than", 0: "is not clearly different from", None: "against"}[gap.sign]
    return [f"Personalising ({special}) {verb} one common model ({common}): {_difference(gap, scale)}."]


def _without_own(study: Study, mean: Verdict, method: str, reference: str) -> str:
    scale, gain = words.Scale(study.metric), mean.gains[method]
    head = "Whether federating pays cannot be said: no run trains the clients alone (compare with 'local'). "
    verb = {1: "is better than", -1: "is worse than", 0: "is not clearly different from", None: "against"}[gain.sign]
    return (
        f"{head}Among the shared methods, {method} reaches {_level(study, method)} and {verb} {reference} "
        f"({_short(study, reference)}): {_difference(gain, scale)}, at {_bytes(study, method)} per client."
        if gain.sign is not None
        else f"{head}{method} reaches {_level(study, method)}, {reference} {_short(study, reference)} "
        f"({_difference(gain, scale)}), at {_bytes(study, method)} per client."
    )


def _ranked(study: Study, labels: list[str]) -> str:
    """Several personalised methods and nothing to hold them against: the best and the next."""
    scale = words.Scale(study.metric)
    order = sorted(labels, key=lambda k: -pairs.merits(study)[k].mean())
    best, second = order[:2]
    gap = pairs.mean_gain(study, best, second, len(labels) - 1)
    clear = {1: "clearly ahead of", 0: "not clearly ahead of", None: "ahead of"}.get(gap.sign, "ahead of")
    if all(study.role(k) in ALONE for k in labels):
        return f"Only the clients' own models were trained; {best} reaches {_level(study, best)}, {clear} {second}."
    return (
        "Whether federating pays cannot be said: no run trains the clients alone (compare with 'local'). "
        f"{best} reaches {_level(study, best)}, {clear} {second} ({_difference(gap, scale)}), "
        f"at {_bytes(study, best)} per client."
    )


def _single(study: Study, label: str) -> str:
    runs, scale = study.counted(label), words.Scale(study.metric)
    rounds = round(float(np.mean([r.summary["rounds"] for r in runs])))
    mean = {n: v for n, v in pairs.grids(study)[label].per_client().items() if math.isfinite(v)}
    worst = min(mean, key=lambda n: study.metric.merit(mean[n])) if len(mean) > 1 else None
    low = f" (worst: {worst}, {scale.number(mean[worst])}{scale.unit})" if worst else ""
    text = (
        f"{label} reaches {_level(study, label)} on average over {words.count(len(mean), 'client')}{low} "
        f"after {words.count(rounds, 'round')} and {_bytes(study, label)} per client."
    )
    other = "a federated method" if study.role(label) in ALONE else "'local'"
    return f"{text} To learn whether federating pays, compare it with {other}."


def _nothing(study: Study) -> str:
    text = "No run has finished, so nothing can be said yet."
    last = study.first.summary
    mean, scale = last["final"].get(study.split, {}).get("mean"), words.Scale(study.metric)
    if isinstance(mean, int | float) and study.first.status != "diverged":
        at = f"{scale.number(mean)}{scale.unit} {study.split} {scale.name}"
        text += f" After round {last['rounds']}, {study.first.label} was at {at}."
    return text + (" Every run diverged." if all(r.status == "diverged" for r in study.runs) else "")


def _caveats(study: Study) -> list[str]:
    found, first = [], lead(study)
    if len(study.seeds) == 1 and first is None:
        found.append("One seed: no spread can be given.")
    lacking = _lacking(study)
    if lacking:
        found.append(
            f"Means leave out {words.listed(lacking)}: no {words.Scale(study.metric).name} ({study.metric.lacks})."
        )
    elif len(study.seeds) == 1 and first is not None and pairs.mean_gain(study, *first).sign is not None:
        found.append(
            "One seed: the intervals are about these trained models on new samples, not about another training."
        )
    if first is not None:
        found += _effort(study, *first)
    diverged = [label for label in study.labels if any(r.status == "diverged" for r in study.of(label))]
    if diverged:
        found.append(f"Runs of {words.listed(diverged)} diverged and are left out.")
    partial = [r for label in study.labels for r in study.counted(label) if r.status != "finished"]
    if partial:
        found.append(f"{words.count(len(partial), 'run')} did not finish; what is given is the state it was left in.")
    return found


def _lacking(study: Study) -> list[str]:
    """The clients with samples that lack the metric that leads, with how often where not always."""
    runs = [(r, r.values()) for label in study.labels for r in study.counted(label)]
    found = []
    for name in study.names:
        mine = [
            v.get(name, math.nan)
            for r, v in runs
            if any(c["name"] == name and c.get(study.split) for c in r.federation["clients"])
        ]
        bad = sum(map(math.isnan, mine))
        if bad:
            found.append(name if bad == len(mine) else f"{name} ({bad} of {len(mine)} runs)")
    return found


def _effort(study: Study, method: str, reference: str) -> list[str]:
    """What it would take to see a small gain here."""
    found = pairs.effort(study, method, reference)
    if found is None:
        return []
    gain, seeds, times = found
    scale = words.Scale(study.metric)
    text = f"{scale.signed(gain).lstrip('+')}{scale.difference_unit}"
    text = f"A gain of {text.replace('.0 points', ' points')} in the mean"
    if seeds is not None and seeds <= len(study.seeds):
        return [f"{text} would be seen here four times in five."]
    if seeds is not None:
        return [f"{text} would take about {seeds} seeds to be seen four times in five."]
    more = f"about {words.figures(times, 2)} times as many samples"
    if len(study.seeds) == 1:
        return [f"{text} would take {more} to be seen four times in five."]
    return [f"{text} cannot be seen with these samples, however many the seeds: it would take {more}."]


def _level(study: Study, label: str) -> str:
    return f"{_short(study, label)} {study.split} {words.Scale(study.metric).name}"


def _short(study: Study, label: str) -> str:
    per_seed = list(pairs.grids(study)[label].per_seed().values())
    scale = words.Scale(study.metric)
    return f"{scale.spread(pairs.mean_of(per_seed), pairs.sample_std(per_seed))}{scale.unit}"


def _difference(gain: Interval, scale: words.Scale) -> str:
    text = f"{scale.signed(gain.mean)}{scale.difference_unit}"
    if not scale.percent:
        text = f"{scale.signed(abs(gain.mean)).removeprefix('+')} {'better' if gain.mean >= 0 else 'worse'}"
    if gain.sign is None:
        return text
    return f"{text} (95 % interval {scale.range(gain.low, gain.high)}, {words.count(gain.seeds, 'seed')})"


def _bytes(study: Study, label: str) -> str:
    total = [(r.summary.get("down_bytes", 0) + r.summary.get("up_bytes", 0)) / r.n for r in study.counted(label)]
    return words.size(float(np.mean(total)))
