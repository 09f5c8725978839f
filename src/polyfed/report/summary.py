"""The answer: whether federating pays here, in a sentence or two and a line per client, and then what it rests on."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polyfed.base.arguments import checked
from polyfed.report import pairs, words
from polyfed.report.caveats import caveats, doubts
from polyfed.report.pairs import Interval, Verdict
from polyfed.report.tables import tally
from polyfed.report.verdicts import ALONE, Study

LINES = 30  # clients up to which each has a line
EACH = 8  # beyond that: clients listed that gain, and that lose


class Line(NamedTuple):
    """One client's line: its name, `gains`, `loses`, `undecided` or "", by how much with which method, and the gain."""

    name: str
    verdict: str
    text: str
    gain: Interval | None = None

    @property
    def mark(self) -> str:
        """Mark of the verdict, as a cell of a table."""
        return {"gains": "gain", "loses": "loss"}.get(self.verdict, "quiet")


@checked
def answer(study: Study) -> str:
    """The answer in words: whether federating pays, for whom, with which method, at what price.

    A difference is claimed only where it is clear: where its interval leaves zero out, jointly over clients.

    Parameters
    ----------
    study : Study
        From `read`.

    Returns
    -------
    str
        A few plain sentences: the headline, what makes it doubtful, then its grounds.
    """
    return " ".join([headline(study), *doubts(study), *details(study)])


def headline(study: Study) -> str:
    """The result in a sentence or two that can be read aloud: does it pay, for whom, how sure."""
    values = study.verdicts.grids
    if not values:
        return _nothing(study)
    first = study.verdicts.lead
    if len(values) == 1:
        return _single(study, next(iter(values)))
    if first is None:
        return _unpaired(study) or _ranked(study, list(values))
    if study.role(first[1]) not in ALONE:
        return _without_own(study, study.verdicts.mean, *first)
    return _pays(study, study.verdicts.mean, *first)


def details(study: Study) -> list[str]:
    """Say what the headline rests on: levels and bytes, whom one common model harms, yardsticks, and caveats."""
    first, sentences = study.verdicts.lead, []
    if first is not None and study.role(first[1]) in ALONE:
        seeds = study.verdicts.paired(*first)
        one, other = _level(study, first[0], seeds), f"{_short(study, first[1], seeds)} of {first[1]}"
        price = f"{first[0]} reaches {one} against {other}, over {_seeds(study, *first)}, and moves "
        price += f"{_bytes(study, first[0])} per client."
        sentences = [price, *_weighted(study, *first, other=False), *_harm(study, *first)]
        sentences += _personalised(study)
    return sentences + _compared(study) + caveats(study)


def lines(study: Study) -> tuple[str, list[Line]]:
    """(the reference, a line per client by gain; beyond 30 clients only the clear ones and the number undecided)."""
    first = study.verdicts.lead
    if first is None or study.first.n < 2:
        return "", []
    own = study.role(first[1]) in ALONE
    name = _scale(study).name
    against = "each client's own model" if own else "the common model"
    title = f"{name[:1].upper()}{name[1:]} with {first[0]} against {against} ({first[1]}), with 95 % intervals"
    ranked = sorted(_each(study, *first), key=lambda x: -x[0] if math.isfinite(x[0]) else math.inf)
    every = [line for _, line in ranked]
    if len(every) <= LINES:
        return title, every
    parts = {v: [line for line in every if line.verdict == v] for v in ("gains", "loses")}
    shown = parts["gains"][:EACH] + parts["loses"][-EACH:]
    rest = len(every) - len(shown)
    more = [f"{len(of) - EACH} {v[:-1]}" for v, of in parts.items() if len(of) > EACH]
    undecided = len(every) - sum(map(len, parts.values()))
    clear = f"{undecided} without a clear difference" if undecided < len(every) else "none clearly gains or loses"
    more += [clear] * bool(undecided)
    name = f"{rest} more clients" if shown else f"all {rest} clients"
    return title, [*shown, *[Line(name, "", f"{words.listed(more)}; see the table of clients")] * bool(rest)]


def _each(study: Study, method: str, reference: str) -> list[tuple[float, Line]]:
    """(gain, line) of every client, with the method that would be deployed; another that is clearly better is named."""
    scale, common = _scale(study), _common(study, reference)
    harm = study.verdicts.gains(common, reference) if common else {}
    each = []
    for name, v in study.verdicts.clients.items():
        g = v.gains.get(method)
        if g is None or not math.isfinite(g.mean):
            each.append((math.nan, Line(name, "", v.text)))
            continue
        text = _gained(g, scale)
        if g.known:
            text += f" ({scale.range(g.low, g.high)}){f'; a verdict would take {g.enough}' if g.enough else ''}"
        else:
            text += f"; {g.why}"
        other = None if v.choice in (None, method) else v.gains.get(v.choice)  # pyrefly: ignore[bad-argument-type]
        if other is not None:
            text += f"; {v.choice} clearly gains {_signed(other.mean, scale)} there"
        if common and common != method and (h := harm[name]).high < 0 and not h.same:
            text += f"; {common} {'costs it' if h.sign else 'may cost it'} {_loss(h, scale)}"
        each.append((g.mean, Line(name, g.word, text, g)))
    return each


def _common(study: Study, reference: str) -> str | None:
    """The best of the common models, where it is not what the others are held against."""
    means, role = study.verdicts.means, study.verdicts.roles
    common = [k for k in means if role[k] == "common" and k != reference]
    return max(common, key=lambda k: means[k]) if common else None


def _pays(study: Study, mean: Verdict, method: str, own: str) -> str:
    scale, gain = _scale(study), mean.gains[method]
    head = {
        1: "Federating pays on average: ",
        -1: "Federating does not pay here: ",
        0: "No clear difference on average between federating and training alone: ",
        None: f"{_unknown(study, gain, method, own)}, so this is a hint and no finding: ",
    }[gain.sign]
    if gain.sign == -1 and mean.choice is None:
        head = "Federating does not pay with the best method here: "
    name = method if gain.sign == 1 or len(mean.gains) == 1 else f"{method}, the best shared method,"
    limits = f" (95 % interval {scale.range(gain.low, gain.high)})" if gain.known else ""
    if gain.same:
        gained = f"{study.split} {scale.name} is {scale.same} with {name} and with"
    elif scale.percent:
        gained = f"{_signed(gain.mean, scale)} of {study.split} {scale.name} with {name} over"
    else:
        gained = f"{study.split} {scale.name} is {_signed(gain.mean, scale)} with {name} than with"
    gained = gained.replace("is no difference", "is no better")
    apart = "".join(_weighted(study, method, own, other=True))
    return f"{head}{gained} the clients' own models{limits}. {apart}{_whom(study, method, own)}"


def _weighted(study: Study, method: str, own: str, other: bool) -> list[str]:
    """The mean in which every sample counts the same; `other`: where it says something else than that over clients."""
    v, scale = study.verdicts, _scale(study)
    mean, each = v.mean.gains[method], v.sample_gain(method, own, len(v.mean.gains))
    if not each.known or len({v.shares[n][1] for n, k in study.tested.items() if k > 0}) < 2:
        return []
    if other != (each.sign != mean.sign or (each.sign and each.mean * mean.mean < 0)):
        return []
    if not other:
        return [f"Weighted by samples it is {_difference(each, scale)}."]
    worse = sum(v.shares[n][1] for n, g in v.gains(method, own).items() if g.mean < 0)
    part = f"{100 * worse / sum(v.shares[n][1] for n in study.names):.0f} % of them are at clients that are worse off"
    verdict = {1: "it pays", -1: "it does not pay", 0: "there is no clear difference"}.get(each.sign or 0)
    return [f"Weighted by samples {verdict}: {_difference(each, scale)}; {part}. "]


def _unknown(study: Study, gain: Interval, method: str, own: str) -> str:
    """The reason why the mean has no interval."""
    if gain.enough:
        return f"{pairs.FEW.capitalize()} (it would take {gain.enough})"
    alone = [n for n, e in study.verdicts.evidence(method, own)[0].items() if e.why == pairs.LONE]
    if alone:
        return f"{words.listed(alone)} {'has' if len(alone) == 1 else 'have'} one test sample, which shows no spread"
    return {
        pairs.BLIND: "All seeds test the same samples and do not show the chance in them",
        pairs.SAME: "The difference is the same under every seed and shows no spread",
    }.get(gain.why, "With one seed no spread can be given")


def _whom(study: Study, method: str, own: str) -> str:
    """Clients that gain and lose with a method, by name where they are few."""
    gains, up, down = _sides(study, method, own)
    counts = tally(gains.values())
    if counts is None:
        some = next((f"{pairs.FEW}; for {n} it would take {g.enough}" for n, g in gains.items() if g.enough), "")
        why = some or next((pairs.reason(g.why) for g in gains.values()), "no results")
        return f"Which clients gain and lose cannot be said ({why})."
    if not up and not down:
        return "No client clearly gains or loses."
    gaining = f"{len(up) or 'None'} of {words.count(len(gains), 'client')} clearly {'gain' if len(up) > 1 else 'gains'}"
    if up and len(up) <= 3 and len(gains) > 1:
        gaining += f" ({words.listed(up)})"
    losing = f"{len(down)} {'lose' if len(down) > 1 else 'loses'}{_most(study, down, gains)}" if down else "none loses"
    rest = f", and {counts[2]} {'is' if counts[2] == 1 else 'are'} undecided" if counts[2] else ""
    return f"{gaining}, {losing}{rest}."


def _harm(study: Study, method: str, own: str) -> list[str]:
    """Whom one model for all harms; of the method in the lead, only what `_whom` has not said."""
    common = _common(study, own)
    if common is None:
        return []
    gains, up, down = _sides(study, common, own)
    if tally(gains.values()) is None:
        return []
    sentences = []
    if common != method:
        few = f"{len(down)} of {words.count(len(gains), 'client')}"
        harms = f"{few}{_most(study, down, gains)}" if down else "no client"
        helps = f" and helps {len(up) if len(up) > 1 else up[0]}" if up else ""
        sentences.append(f"One common model ({common}) clearly harms {harms}{helps}.")
    worst = min((n for n in gains if gains[n].sign is not None), key=lambda n: gains[n].mean)
    if gains[worst].high < 0 and not down and not gains[worst].same:
        loss = _loss(gains[worst], _scale(study), "; clear by itself, but not jointly over all clients")
        sentences = [f"One common model ({common}) may cost {worst} {loss}."]
    return sentences


def _sides(study: Study, method: str, own: str) -> tuple[dict[str, Interval], list[str], list[str]]:
    """(every client's gain, the clients that clearly gain, those that clearly lose), the largest difference first."""
    gains = {n: g for n, g in study.verdicts.gains(method, own).items() if math.isfinite(g.mean)}
    order = sorted(gains, key=lambda n: -abs(gains[n].mean))
    return gains, [n for n in order if gains[n].sign == 1], [n for n in order if gains[n].sign == -1]


def _most(study: Study, down: list[str], gains: dict[str, Interval]) -> str:
    """` (most: va, −4.0 points)`."""
    return f" ({'most: ' * (len(down) > 1)}{down[0]}, {_signed(gains[down[0]].mean, _scale(study))})"


def _personalised(study: Study) -> list[str]:
    """Say whether a model per client is worth it over one for all."""
    values, role, mean = study.verdicts.merits, study.verdicts.roles, study.verdicts.mean
    kinds: dict[str, list[str]] = {"common": [], "personalised": []}
    for label in mean.gains:
        kinds[role[label]].append(label)
    if not kinds["common"] or not kinds["personalised"]:
        return []
    centre = {k: values[k].mean() for k in mean.gains}
    common, special = (max(kinds[k], key=lambda x: centre[x]) for k in ("common", "personalised"))
    gap, scale = study.verdicts.mean_gain(special, common, len(kinds["personalised"])), _scale(study)
    if not gap.seeds:
        return []
    verb = {1: "is better than", -1: "is worse than", 0: "is not clearly different from", None: "against"}[gap.sign]
    return [f"Personalising ({special}) {verb} one common model ({common}): {_difference(gap, scale)}."]


def _compared(study: Study) -> list[str]:
    """Say which methods do not beat what costs no message, and what all data in one place would give; jointly."""
    return [*_free(study), *_everybody(study)]


def _free(study: Study) -> list[str]:
    mean, role = study.verdicts.mean, study.verdicts.roles
    if mean.reference is None or role[mean.reference] not in ALONE:
        return []
    special = [k for k in mean.gains if role[k] == "personalised"]
    simple = [k for k in special if study.of(k)[0].summary.algorithm == "recalibrated"]
    yards = {k: [m for m in special if m not in simple] for k in simple}
    yards |= {k: special or list(mean.gains) for k in role if role[k] == "yardstick" and k != mean.reference}
    many = sum(map(len, yards.values()))
    parts = [_beaten(study, yard, methods, many) for yard, methods in yards.items() if methods]
    text = "; ".join(p for p in parts if p)
    return [f"Against what costs no message of its own: {text}."] if text else []


def _beaten(study: Study, yard: str, methods: list[str], many: int) -> str:
    """One clause: the methods that do not beat a yardstick, with the interval of the best of them, or that all do."""
    scale = _scale(study)
    gains = {m: study.verdicts.mean_gain(m, yard, many) for m in methods}
    decided = {m: g for m, g in gains.items() if g.sign is not None and math.isfinite(g.mean)}
    below = {m: g for m, g in decided.items() if g.sign != 1}
    if not decided:
        return ""
    if not below:
        verb = "beats" if len(decided) == 1 else "beat"
        return f"{words.listed(list(decided))} {verb} {yard}"
    best = max(below, key=lambda m: below[m].mean)
    g, name = below[best], f"{best}: " if len(below) > 1 else ""
    verb = f"{'does' if len(below) == 1 else 'do'} not{' clearly' if g.mean > 0 else ''} beat"
    gap = f"{scale.signed(g.mean)}{scale.difference_unit}, 95 % interval {scale.range(g.low, g.high)}"
    return f"{words.listed(list(below))} {verb} {yard} ({name}{gap})"


def _everybody(study: Study) -> list[str]:
    scale, sentences = _scale(study), []
    for label, grid in study.verdicts.grids.items():
        if study.role(label) == "oracle":
            each = list(grid.per_seed().values())
            level = f"{scale.spread(pairs.mean_of(each), pairs.sample_std(each))}{scale.unit}"
            sentences.append(
                f"With everybody's data in one place, which is not available in practice, one model ({label}) reaches "
                f"{level}."
            )
    return sentences


def _without_own(study: Study, mean: Verdict, method: str, reference: str) -> str:
    scale, gain, seeds = _scale(study), mean.gains[method], study.verdicts.paired(method, reference)
    level, other = _level(study, method, seeds), _short(study, reference, seeds)
    head = "Whether federating pays cannot be said: no run trains the clients alone (compare with 'local'). "
    verb = {1: "is better than", -1: "is worse than", 0: "is not clearly different from", None: "against"}[gain.sign]
    return (
        f"{head}Among the shared methods, {method} reaches {level} and {verb} {reference} "
        f"({other}): {_difference(gain, scale)}, at {_bytes(study, method)} per client."
        if gain.sign is not None
        else f"{head}{method} reaches {level}, {reference} {other} "
        f"({_difference(gain, scale)}), at {_bytes(study, method)} per client."
    )


def _unpaired(study: Study) -> str:
    """A sentence where no method has a seed in common with its reference; else ""."""
    mean = study.verdicts.mean
    if not mean.gains or any(g.seeds for g in mean.gains.values()):
        return ""
    levels = [
        f"{k} reaches {_level(study, k)} ({words.count(len(study.verdicts.grids[k].seeds), 'seed')})"
        for k in (*mean.gains, mean.reference)
        if k
    ]
    return f"Nothing can be compared: no method has a seed in common with {mean.reference}. {'; '.join(levels)}."


def _ranked(study: Study, labels: list[str]) -> str:
    """Several personalised methods and nothing to hold them against: the best and the next."""
    scale = _scale(study)
    order = sorted(labels, key=lambda k: -study.verdicts.means.get(k, -math.inf))
    best, second = order[:2]
    seeds = study.verdicts.paired(best, second)
    if not seeds:
        return f"Nothing can be compared: {best} and {second} have no seed in common."
    gap = study.verdicts.mean_gain(best, second, len(labels) - 1)
    clear = {1: "clearly ahead of", 0: "not clearly ahead of", None: "ahead of"}.get(gap.sign, "ahead of")
    if all(study.role(k) in ALONE for k in labels):
        return (
            f"Only the clients' own models were trained; {best} reaches {_level(study, best, seeds)}, {clear} {second}."
        )
    return (
        "Whether federating pays cannot be said: no run trains the clients alone (compare with 'local'). "
        f"{best} reaches {_level(study, best, seeds)}, {clear} {second} ({_difference(gap, scale)}), "
        f"at {_bytes(study, best)} per client."
    )


def _single(study: Study, label: str) -> str:
    runs, scale = study.counted(label), _scale(study)
    rounds = round(float(np.mean([r.summary.rounds for r in runs])))
    each = study.verdicts.grids[label].per_client()
    mean = {n: each[n] for n in study.bearing if math.isfinite(each[n])}
    worst = min(mean, key=lambda n: study.metric.merit(mean[n])) if len(mean) > 1 else None
    low = f" (worst: {worst}, {scale.number(mean[worst])}{scale.unit})" if worst else ""
    text = (
        f"{label} reaches {_level(study, label)} on average over {words.count(len(mean), 'client')}{low} "
        f"after {words.count(rounds, 'round')} and {_bytes(study, label)} per client."
    )
    other = "a federated method" if study.role(label) in ALONE else "'local'"
    return f"{text} To learn whether federating pays, compare it with {other}."


def _nothing(study: Study) -> str:
    if study.split == "train":
        return "Nothing was held out, so no method can be judged: what follows is of the training samples themselves."
    text = "No run has finished, so nothing can be said yet."
    last = study.first.summary
    mean, scale = last.final[study.split].mean if study.split in last.final else math.nan, _scale(study)
    if math.isfinite(mean) and study.first.status != "diverged":
        at = f"{scale.number(mean)}{scale.unit} {study.split} {scale.name}"
        text += f" After round {last.rounds}, {study.first.label} was at {at}."
    return text + (" Every run diverged." if all(r.status == "diverged" for r in study.runs) else "")


def _seeds(study: Study, method: str, reference: str) -> str:
    """`3 seeds`, with how many each has where they differ."""
    shared = len(study.verdicts.paired(method, reference))
    one, other = (len(study.verdicts.grids[k].seeds) for k in (reference, method))
    text = words.count(shared, "seed")
    return text if one == other == shared else f"{text} in common ({reference} has {one}, {method} {other})"


def _level(study: Study, label: str, seeds: Sequence[int] | None = None) -> str:
    short, name = _short(study, label, seeds), f"{study.split} {_scale(study).name}"
    return f"{short} {name}" if study.metric.sign else f"a distance from {study.metric.aim:g} of {short} in {name}"


def _short(study: Study, label: str, seeds: Sequence[int] | None = None) -> str:
    """A method's mean, over all its seeds or those given."""
    per_seed = [v for s, v in study.verdicts.grids[label].per_seed().items() if seeds is None or s in seeds]
    scale = _scale(study)
    return f"{scale.number(pairs.mean_of(per_seed))}{scale.unit}"


def _difference(gain: Interval, scale: words.Scale) -> str:
    text = _gained(gain, scale)
    if not gain.known:
        return text
    return f"{text} (95 % interval {scale.range(gain.low, gain.high)})"


def _scale(study: Study) -> words.Scale:
    return words.Scale(study.metric)


def _gained(gain: Interval, scale: words.Scale) -> str:
    return scale.same if gain.same else _signed(gain.mean, scale)


def _signed(gain: float, scale: words.Scale) -> str:
    """`+3.2 points`, or `0.032 better` where more may be worse, and `no difference` where the figures show none."""
    if scale.percent:
        return f"{scale.signed(gain)}{scale.difference_unit}"
    size = scale.signed(abs(gain))
    return f"{size[1:]} {'better' if gain > 0 else 'worse'}" if size[0] == "+" else "no difference"


def _loss(gain: Interval, scale: words.Scale, more: str = "") -> str:
    """`18.8 points (−31.9 to −5.6)`."""
    size = scale.signed(abs(gain.mean)).removeprefix("+")
    return f"{size}{scale.difference_unit} ({scale.range(gain.low, gain.high)}{more})"


def _bytes(study: Study, label: str) -> str:
    total = [(r.summary.down_bytes + r.summary.up_bytes) / r.n for r in study.counted(label)]
    return words.size(float(np.mean(total)))
