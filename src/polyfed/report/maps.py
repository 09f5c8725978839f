"""The clients' samples and a method's view of them: the partition, clusters, mixing weights."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from polyfed.base.arguments import checked
from polyfed.report.style import BLUE, GREYS, INK, NAMED, VERMILLION, canvas, categories, short, styled
from polyfed.report.verdicts import Study
from polyfed.runs.numbers import Numbers

BUBBLES = 700  # most bubbles, one per client and class that it holds; more become a heat map
BARS = 400  # most clients with a bar each; more are drawn as one outline


def representative(study: Study, key: str) -> Numbers | None:
    """The run to show one of: the leading method's first counted run whose report holds `key`, else any that does."""
    first = study.verdicts.lead
    order = sorted(study.labels, key=lambda k: first is None or k != first[0])
    return next(
        (r for label in order for r in study.counted(label) or study.of(label) if getattr(r.findings, key)), None
    )


@checked
def partition_figure(study: Study, seed: int | None = None) -> Figure | None:
    """Each client's training samples per class, under all its samples; for regression those alone.

    Parameters
    ----------
    study : Study
        From `read`.
    seed : int or None
        Seed of the split; None: the first run's.

    Returns
    -------
    Figure or None
        A bubble per client and class whose area is the number of samples, or a heat map for more than 700 of them.
    """
    run = next((r for r in study.runs if seed is None or r.seed == seed), study.first)
    counts, train, test = run.labels, run.samples("train"), run.samples("test")
    x, names = np.arange(run.n), run.about.names
    with styled():
        if counts is None:
            figure, (top,) = canvas(height=2.9)
            last = top
        else:
            tall = min(0.17 * counts.shape[1] + 0.7, 3.2)
            figure, (top, last) = canvas(height=1.2 + tall + 0.4, rows=2, sharex=True, height_ratios=[1.2, tall])
            _classes(figure, last, counts)
        parts = [(train, 0 * train, BLUE, "train"), (test, train, VERMILLION, "test")]
        for height, bottom, color, label in parts[: 1 + test.any()]:
            if run.n <= BARS:
                top.bar(x, height, width=0.85, bottom=bottom, color=color, label=label, linewidth=0)
            else:
                look = {"color": color, "label": label, "linewidth": 0, "rasterized": True}
                top.fill_between(x, bottom, bottom + height, step="mid", **look)
        if test.any():
            figure.legend(*top.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        top.set_ylabel("samples")
        top.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        top.grid(axis="x", visible=False)
        top.set_xlim(-0.7, run.n - 0.3)
        if run.n <= NAMED:
            turned = run.n > 5 or max(map(len, names)) > 8
            last.set_xticks(x, [short(n, 16) for n in names], rotation=90 if turned else 0)
        else:
            last.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        last.set_xlabel("client" if run.n <= NAMED else f"client, by position ({run.n})")
    return figure


def _classes(figure: Figure, axes, counts: np.ndarray) -> None:
    n, classes = counts.shape
    if np.count_nonzero(counts) <= BUBBLES:
        who, label = np.nonzero(counts)
        biggest = min(4.2 * 72 / n, 14.0) * 1.05  # points: a bubble may just touch its neighbour
        axes.scatter(who, label, s=counts[who, label] / counts.max() * biggest**2, color=BLUE, linewidth=0, alpha=0.85)
        axes.set_ylim(classes - 0.3, -0.7)
    else:
        shown = axes.imshow(counts.T, aspect="auto", cmap=GREYS, vmin=0)
        figure.colorbar(shown, ax=axes, label="samples", pad=0.02, aspect=12).outline.set_visible(False)
        axes.grid(visible=False)
    if classes <= 12:
        axes.set_yticks(range(classes))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel("class")


def cluster_figure(run: Numbers) -> Figure | None:
    """The clusters that a method found: counted against the true ones, or their sizes where those are unknown."""
    clusters, true = run.findings.clusters, run.about.clusters
    if not clusters or len(clusters) != run.n:
        return None
    columns, assigned = np.unique(np.array(clusters), return_inverse=True)
    with styled():
        if not true or len(true) != len(clusters):
            sizes = np.bincount(assigned)
            figure, (axes,) = canvas(height=2.6)
            axes.bar(np.arange(len(sizes)), sizes, color=categories(len(sizes)) if len(sizes) <= 6 else BLUE, width=0.8)
            axes.set_ylabel("clients")
            axes.set_xlabel("cluster found")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="x", visible=False)
            return figure
        rows, actual = np.unique(np.array(true), return_inverse=True)
        table = np.zeros((len(rows), len(columns)), dtype=int)
        np.add.at(table, (actual, assigned), 1)
        order = np.argsort(table.argmax(0), kind="stable")  # found clusters beside the true one they hold most of
        table = table[:, order]
        figure, (axes,) = canvas(height=min(1.3 + 0.36 * len(rows), 4.5))
        axes.imshow(table, cmap=GREYS, aspect="auto", vmin=0)
        if table.size <= 200:
            for (i, j), k in np.ndenumerate(table):
                if k:
                    axes.text(j, i, str(k), ha="center", va="center", color="white" if k > table.max() / 2 else "black")
        axes.set_xticks(*_ticks([str(columns[k]) for k in order]))
        axes.set_yticks(*_ticks([str(r) for r in rows]))
        axes.set_xlabel("cluster found (number: clients)")
        axes.set_ylabel("true cluster")
        axes.grid(visible=False)
    return figure


def mixing_figure(run: Numbers) -> Figure | None:
    """The mixing matrix: weight of client j (column) in i (row); rows sum to one. None for equal weights."""
    mixing = run.findings.mixing
    if not mixing:
        return None
    m = np.array(mixing, dtype=float)
    if m.ndim != 2 or m.shape[0] != m.shape[1] or not np.isfinite(m).any() or np.nanmax(m) - np.nanmin(m) < 1e-3:
        return None
    true = run.about.clusters
    order = np.argsort(true, kind="stable") if true and len(true) == len(m) else np.arange(len(m))
    names = [run.about.names[i] for i in order] if len(m) == run.n else [str(i) for i in order]
    m = m[np.ix_(order, order)]
    with styled():
        figure, (axes,) = canvas(height=4.2)
        shown = axes.imshow(m, cmap=GREYS, vmin=0)
        figure.colorbar(shown, ax=axes, label="weight", pad=0.02, aspect=24).outline.set_visible(False)
        if true and len(true) == len(m):
            for edge in np.flatnonzero(np.diff(np.array(true)[order])) + 0.5:
                axes.axhline(edge, color=BLUE, linewidth=0.8)
                axes.axvline(edge, color=BLUE, linewidth=0.8)
        if len(m) <= NAMED:
            axes.set_xticks(np.arange(len(m)), [short(n, 12) for n in names], rotation=90)
            axes.set_yticks(np.arange(len(m)), [short(n, 12) for n in names])
        tail = ", by true cluster" if true else ""
        axes.set_xlabel(f"from client{tail}")
        axes.set_ylabel(f"into the model of client{tail}")
        axes.grid(visible=False)
        axes.tick_params(colors=INK)
    return figure


def _ticks(names: list[str]) -> tuple[list[int], list[str]]:
    step = -(-len(names) // 16)
    return list(range(0, len(names), step)), names[::step]
