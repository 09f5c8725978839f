"""Figure of the audit: columns at every site, with the sites that are flagged in another colour."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polyfed.base.part import Part, Parts
from polyfed.report.style import BLUE, INK, NAMED, VERMILLION, hover, short, styled

MOST = 24  # columns that are drawn
LEGIBLE = 0.14  # least share of rows whose value is written on its bar


def distribution_figure(parts: Parts, flagged: Mapping[str, Sequence[str]], across: int = 4) -> Figure | None:
    """The distribution of each column, one line per site; those that the audit flags are in another colour.

    Numbers: the median, the middle half (thick) and the middle nine tenths (thin); other values: shares of the rows. Of
    many columns the first 24 are drawn, of many sites 30, flagged ones first.
    """
    drawn = {name: at for name, at in parts.items() if any(map(_spread, at.values())) or _shared(at)}
    names = sorted(drawn, key=lambda name: name not in flagged)[:MOST]
    if not names:
        return None
    every = list(dict.fromkeys(site for name in names for site in drawn[name]))
    first = sorted(every, key=lambda site: not any(site in flagged.get(name, ()) for name in names))[:NAMED]
    sites = [site for site in every if site in first]
    across = min(across, len(names))
    rows = -(-len(names) // across)
    with styled():
        figure = Figure(figsize=(2.4 * max(across, 2), rows * (0.75 + 0.2 * len(sites))), layout="constrained")
        axes = figure.subplots(rows, across, squeeze=False, sharey=True)
        for ax, name in zip(axes.flat, names, strict=False):
            colours = [VERMILLION if site in flagged.get(name, ()) else BLUE for site in sites]
            each = [drawn[name].get(site) for site in sites]
            _bars(ax, each, colours) if _shared(drawn[name]) else _lines(ax, each, colours)
            texts = [
                f"{site}: {part.shown}" if part is not None else site for site, part in zip(sites, each, strict=True)
            ]
            hover(ax, [sum(ax.get_xlim()) / 2] * len(sites), range(len(sites)), texts)
            ax.set_title(short(name, 30), loc="left")
            ax.set_yticks(range(len(sites)), [short(site) for site in sites])
            ax.set_ylim(len(sites) - 0.5, -0.5)
            ax.grid(False, axis="y")
        for ax in axes.flat[len(names) :]:
            ax.set_axis_off()
    return figure


def _spread(part: Part) -> bool:
    return part.quantiles is not None and part.distinct > 2


def _shared(at: Mapping[str, Part]) -> bool:
    """True for a column drawn as shares: every site has few values, and none has more than two numbers."""
    return all(part.values for part in at.values()) and not any(map(_spread, at.values()))


def _lines(ax: Axes, parts: Sequence[Part | None], colours: Sequence[str]) -> None:
    for y, (part, colour) in enumerate(zip(parts, colours, strict=True)):
        if part is None or part.quantiles is None:
            continue
        low, first, middle, third, high = part.quantiles
        ax.plot([low, high], [y, y], color=colour, linewidth=0.8)
        ax.plot([first, third], [y, y], color=colour, linewidth=3, solid_capstyle="butt")
        ax.plot(middle, y, "o", color=colour, markersize=4)


def _bars(ax: Axes, parts: Sequence[Part | None], colours: Sequence[str]) -> None:
    """Shares of each value, the same value at the same place of the order at every site."""
    total: dict[str, int] = {}
    for part in parts:
        for text, rows in (part.values or {} if part is not None else {}).items():
            total[text] = total.get(text, 0) + rows
    order = sorted(total, key=lambda text: -total[text])
    for y, (part, colour) in enumerate(zip(parts, colours, strict=True)):
        left, values = 0.0, (part.values or {}) if part is not None else {}
        for k, text in enumerate(order):
            share = values.get(text, 0) / max(1, sum(values.values()))
            ax.barh(y, share, left=left, height=0.7, color=colour, alpha=(0.5, 0.2)[k % 2], linewidth=0)
            if share >= LEGIBLE:
                ax.text(
                    left + share / 2, y, short(text, int(18 * share) + 1), color=INK, size=7.5, ha="center", va="center"
                )
            left += share
    ax.set_xlim(0, 1)
    ax.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    ax.grid(False)
