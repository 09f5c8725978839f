"""Figure of the audit: every column of numbers at every site, with the sites that are flagged in another colour."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from polyfed.data.audit import Parts
from polyfed.report.style import BLUE, VERMILLION, styled

MOST, ACROSS = 24, 4  # columns that are drawn, and in a row


def distribution_figure(parts: Parts, flagged: Sequence[str] = ()) -> Figure | None:
    """Draw the distribution of each column of numbers, one line per site.

    Parameters
    ----------
    parts : mapping
        Columns, and in each the sites with their quantiles.
    flagged : sequence of str
        Sentences of the audit; what they name is drawn in another colour.

    Returns
    -------
    Figure or None
        Dot: median; thick: the middle half; thin: the middle nine tenths. None where no column holds numbers. Of many
        columns the first 24 are drawn, flagged ones first.
    """

    def odd(name: str, site: str) -> bool:
        return any(line.startswith(f"{site}: ") and f" {name}" in line for line in flagged)

    drawn = {n: at for n, at in parts.items() if any(p.quantiles is not None and p.distinct > 2 for p in at.values())}
    names = sorted(drawn, key=lambda n: not any(odd(n, site) for site in drawn[n]))[:MOST]
    if not names:
        return None
    rows, sites = -(-len(names) // ACROSS), list(dict.fromkeys(site for n in names for site in drawn[n]))
    with styled():
        figure = Figure(figsize=(9.6, rows * (0.75 + 0.2 * len(sites))), layout="constrained")
        axes = figure.subplots(rows, ACROSS, squeeze=False, sharey=True)
        for k, ax in enumerate(axes.flat):
            if k >= len(names):
                ax.set_axis_off()
                continue
            for y, site in enumerate(sites):
                part = drawn[names[k]].get(site)
                if part is None or part.quantiles is None:
                    continue
                low, first, middle, third, high = part.quantiles
                colour = VERMILLION if odd(names[k], site) else BLUE
                ax.plot([low, high], [y, y], color=colour, linewidth=0.8)
                ax.plot([first, third], [y, y], color=colour, linewidth=3, solid_capstyle="butt")
                ax.plot(middle, y, "o", color=colour, markersize=4)
            ax.set_title(names[k], loc="left")
            ax.set_yticks(range(len(sites)), sites)
            ax.set_ylim(len(sites) - 0.5, -0.5)
            ax.grid(False, axis="y")
    return figure
