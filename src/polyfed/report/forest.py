"""The chart that every page begins with: a row per site with its verdict, its interval and its numbers, as HTML.

A share of its width is all that a bar depends on, so the type is the page's at every width.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator

from polyfed.report import words
from polyfed.report.pairs import Interval

NBSP = "\N{NO-BREAK SPACE}"
CUT = 4.0  # an axis is at most so many times longer than the usual interval


def prose(text: str) -> str:
    """Text as HTML, with its numbers and units kept on one line."""
    for unit in (" %", " points", " to +", f" to {words.MINUS}"):
        text = text.replace(unit, unit.replace(" ", NBSP))
    return escape(text)


class Row(NamedTuple):
    """name: of a site     word: its verdict     gain: with its interval     text: its numbers; more     whole: mean"""

    name: str
    word: str
    gain: Interval
    text: str
    whole: bool = False

    @property
    def mark(self) -> str:
        """Mark of what is clear, as a cell of a table."""
        return {1: "gain", -1: "loss"}.get(self.gain.sign or 0, "quiet")


def said(gain: Interval, scale: words.Scale) -> str:
    """`+3.2 points (−0.4 to +6.8)`."""
    limits = f" ({scale.range(gain.low, gain.high)})" if gain.known else ""
    return f"{scale.signed(gain.mean)}{scale.difference_unit}{limits}"


def limits(gains: Sequence[Interval], whole: Sequence[Interval] = ()) -> tuple[float, float]:
    """The ends of an axis: all of `whole` is within, and so is any interval but those far longer than the usual one."""
    ends = [(g.low, g.high) if g.known else (g.mean, g.mean) for g in gains if math.isfinite(g.mean)]
    kept = [x for g in whole for x in (g.mean, g.low, g.high) if math.isfinite(x)]
    reach = CUT * float(np.median([max(map(abs, pair)) for pair in ends] or [0.0]))
    reach = max([reach, *map(abs, kept), 1e-12])
    low, high = (f([0.0, *kept, *(x for pair in ends for x in pair)]) for f in (min, max))
    low, high = max(low, -reach), min(high, reach)
    pad = 0.04 * (high - low or 1.0)
    return low - pad, high + pad


def chart(rows: Sequence[Row], scale: words.Scale, axis: str, ends: tuple[float, float] | None = None) -> str:
    """The rows over one axis, which `ends` sets where another chart shares it; those called whole are never cut."""
    drawn = [r for r in rows if math.isfinite(r.gain.mean)]
    left, right = ends or limits([r.gain for r in drawn if not r.whole], [r.gain for r in drawn if r.whole])
    ticks = [float(t) for t in MaxNLocator(5).tick_values(left, right) if left <= t <= right]

    def at(value: float) -> str:
        return f"{100 * (value - left) / (right - left):.2f}%"

    grid = "".join(f'<line x1="{at(t)}" x2="{at(t)}" y2="100%" class="{"" if t else "zero"}"/>' for t in ticks)
    cut, lines = False, []
    for r in rows:
        g, bar = r.gain, ""
        if math.isfinite(g.mean):
            low, high = (g.low, g.high) if g.known else (g.mean, g.mean)
            one, two = (at(min(max(x, left), right)) for x in (low, high))
            bar = f'<line class="bar" x1="{one}" x2="{two}" y1="50%" y2="50%"/>'
            for beyond, end, tip in ((low < left, left, "M-5 0 4-5V5z"), (high > right, right, "M5 0-4-5V5z")):
                cut |= beyond
                bar += f'<svg x="{at(end)}" y="50%"><path class="cut" d="{tip}"/></svg>' if beyond else ""
            shape = '<path d="M-6 0 0-6 6 0 0 6z"/>' if r.whole else '<circle r="4.5"/>'
            bar += f'<svg x="{at(g.mean)}" y="50%">{shape}</svg>' if left <= g.mean <= right else ""
        numbers, _, more = r.text.partition("; ")
        more = f"<small>{prose(more)}</small>" if more else ""
        lines.append(
            f'<li class="{r.mark}{" whole" * r.whole}"><b>{escape(r.name)}</b><span>{escape(r.word)}</span>'
            f'<svg aria-hidden="true">{grid}{bar}</svg><i>{prose(numbers)}{more}</i></li>'
        )
    numbers = "".join(f'<text x="{at(t)}" y="1em">{escape(_tick(t, scale))}</text>' for t in ticks)
    note = escape(f"{axis}; an arrow: the interval goes on" if cut else axis)
    lines.append(f'<li class="axis" aria-hidden="true"><svg>{numbers}</svg></li><li class="axis"><em>{note}</em></li>')
    return f'<ul class="forest">{"".join(lines)}</ul>\n'


def _tick(value: float, scale: words.Scale) -> str:
    text = f"{abs(scale.factor * value):.6g}"
    return text if value == 0 else ("+" if value > 0 else words.MINUS) + text
