"""The cost of privacy: a comparison of runs without it and at several epsilons, in a line per site."""

from polyfed.report import words
from polyfed.report.pairs import Interval
from polyfed.report.verdicts import Study

OPEN, AT = "open", "epsilon-"


def label_of(epsilon: float) -> str:
    """The label of a method at an epsilon."""
    return f"{AT}{epsilon:g}"


def epsilons(study: Study) -> list[float]:
    """The epsilons that are compared with a run without one, the largest first; none in other studies."""
    if OPEN not in study.labels:
        return []
    return sorted((float(label.removeprefix(AT)) for label in study.labels if label.startswith(AT)), reverse=True)


# study: of the labels "open", "epsilon-8", ...
def sentences(study: Study) -> list[str]:
    """The cost of privacy on average, then at each site, with paired 95 % intervals."""
    levels, scale, v = epsilons(study), words.Scale(study.metric), study.verdicts
    sites = {"mean over sites": [v.mean_gain(label_of(e), OPEN) for e in levels]}
    for name in study.names:
        sites[name] = [v.gains(label_of(e), OPEN)[name] for e in levels]
    return [
        f"{name}: " + ", ".join(said(e, g, scale) for e, g in zip(levels, gains, strict=True))
        for name, gains in sites.items()
    ]


def said(epsilon: float, gain: Interval, scale: words.Scale) -> str:
    """Say what an epsilon changes."""
    limits = f" ({scale.range(gain.low, gain.high)})" if gain.known else ""
    return f"epsilon {epsilon:g} {scale.signed(gain.mean)}{scale.difference_unit}{limits}"
