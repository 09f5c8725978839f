"""Style of figures, and their files: inline SVG with CSS variables for light and dark pages, or SVG, PDF and PNG."""

import contextlib
import errno
import io
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from polyfed.base.arguments import checked
from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.system import move

NAMED = 30  # most clients that are named on an axis
INK, QUIET, GRID, PAPER = "#1b1f23", "#5a626b", "#dfe3e8", "#fefefe"
# After Okabe and Ito's colours for the colour-blind, three of them darkened to a contrast of 3:1 on white; page.css has
# the same six for dark ground.
BLUE, VERMILLION, GREEN, BROWN, PINK, SKY = "#0064a8", "#d55e00", "#009e73", "#7d5a00", "#d070a8", "#3a9bd9"
SERIES = (BLUE, VERMILLION, GREEN, BROWN, PINK, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHED = (5, 1.5), (1.5, 1.2), (5, 1.2, 1.2, 1.2), (3, 1, 1, 1, 1, 1), (2.5, 2.5)
DASHES: tuple[Any, ...] = ("-", *((0, dashes) for dashes in DASHED))
VARIABLES = {
    INK: "--ink", QUIET: "--quiet", GRID: "--grid", PAPER: "--paper", BLUE: "--blue", VERMILLION: "--vermillion",
    GREEN: "--green", BROWN: "--brown", PINK: "--pink", SKY: "--sky",
}  # fmt: skip
GREYS = LinearSegmentedColormap.from_list("greys", ["#e8eaed", "#41484f"])  # of a matrix without verdicts

STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.titlesize": 9.5, "axes.labelsize": 9.5,
    "xtick.labelsize": 8.8, "ytick.labelsize": 8.8, "legend.fontsize": 8.8, "text.parse_math": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": QUIET, "xtick.color": QUIET, "ytick.color": QUIET,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.8, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True,
    "lines.linewidth": 1.6, "lines.markersize": 4, "legend.frameon": False, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "svg.fonttype": "none", "svg.hashsalt": "polyfed",
    "pdf.fonttype": 42, "image.interpolation": "nearest",
}  # fmt: skip


@contextmanager
def styled() -> Iterator[None]:
    """The figure style, for as long as a figure is drawn or saved. Missing glyphs do not warn."""
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def canvas(width: float = 4.7, height: float = 3.3, rows: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """A figure with `rows` stacked axes; sizes in inches. pyplot does not know it, so it need not be closed."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, **grid)
    return figure, list(axes[:, 0])


class Look(NamedTuple):
    """Style of one method in every figure of a study."""

    color: str
    marker: str
    linestyle: Any


def looks(labels: Sequence[str], roles: dict[str, str]) -> dict[str, Look]:
    """A colour, marker and line per method, the best first: six in colour; own models and yardsticks dashed."""
    alone = ("own", "yardstick", "oracle")
    shared = [label for label in labels if roles[label] not in alone]
    look = {}
    for i, label in enumerate(shared):
        colour = SERIES[i] if i < len(SERIES) else QUIET
        look[label] = Look(colour, MARKERS[i % len(MARKERS)], DASHES[max(0, i + 1 - len(SERIES)) % len(DASHES)])
    own = (label for label in labels if roles[label] in alone)
    for label, marker in zip(own, cycle(("x", "+", "1", "2", "3", "4")), strict=False):
        look[label] = Look(INK if roles[label] == "own" else QUIET, marker, (0, (3, 2)))
    return look


def categories(n: int) -> list[str]:
    """n colours for n clusters; repeated beyond the palette."""
    return list(islice(cycle((*SERIES, QUIET)), n))


def legend_name(label: str) -> str:
    """matplotlib hides labels that begin with an underscore."""
    return "\u200b" + label if label.startswith("_") else label


def short(name: str, limit: int = 22) -> str:
    return legend_name(name if len(name) <= limit else name[: limit - 1] + "…")


def legend(figure: Figure, axes: Axes, look: dict[str, Look]) -> None:
    """A key of the methods; those in grey share an entry where they are several."""
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    grey = [k for label, of in look.items() if of.color == QUIET and (k := legend_name(label)) in entries]
    if len(grey) > 1:
        entries[f"{len(grey)} others"] = entries[grey[0]]
        entries = {k: v for k, v in entries.items() if k not in grey}
    if len(entries) > 1:
        names = [short(k, 26) for k in entries]
        columns = min(len(names), 4, max(1, 56 // (5 + max(map(len, names)))))
        figure.legend(
            entries.values(), names, loc="outside upper left", ncols=columns, handlelength=2.4, columnspacing=1.2
        )


_HOVERED = WeakKeyDictionary[Figure, dict[str, list[str]]]()  # what the points of a figure say, by group


def hover(axes: Axes, x: Iterable[Any], y: Iterable[Any], texts: Iterable[str]) -> None:
    """Name points (data coordinates) of an inline figure under the pointer; those that are not finite are left out."""
    points = [(a, b, t) for a, b, t in zip(x, y, texts, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not points or not isinstance(figure := axes.figure, Figure):
        return
    hovered = _HOVERED.setdefault(figure, {})
    name = f"hover-{len(hovered)}"
    hovered[name] = [text for *_, text in points]
    xs, ys = ([point[k] for point in points] for k in (0, 1))
    axes.scatter(xs, ys, s=90, c=PAPER, alpha=0.004, linewidth=0, zorder=9, gid=name)


def to_svg(figure: Figure, name: str, title: str, description: str = "") -> str:
    """A figure as inline SVG with ids prefixed by `name`; the same figure gives the same text, without a date."""
    out, dpi = io.StringIO(), figure.dpi
    with styled():  # savefig would draw all of it once more, for the layout
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    figure.dpi = dpi  # which print_svg changes
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="([^"]+)"', head)
    body = re.sub(r'(\sid=")', rf"\g<1>{name}-", body)
    body = body.replace("xlink:href=", "href=").replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    body = re.sub(r"\s*<style type=\"text/css\">.*?</style>", "", body, flags=re.S)
    body = re.sub(r"#[0-9a-f]{6}(?=[;\"])", _themed, body)
    for group, texts in _HOVERED.get(figure, {}).items():
        start = body.index(f'id="{name}-{group}"')
        titles = iter(texts)
        points = re.compile(r"<defs>.*?</defs>|<(path|use)\b[^>]*/>", re.S)
        body = body[:start] + points.sub(lambda m, titles=titles: _titled(m, titles), body[start:], len(texts) + 1)
    return (
        f'<svg viewBox="{box[1] if box else "0 0 1 1"}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description or title)}</desc>'
        f"{body}"
    )


def _titled(match: re.Match[str], texts: Iterator[str]) -> str:
    """A point with what it says, the next of the texts; definitions and what follows the last are as they are."""
    text = next(texts, None) if match[1] else None
    return match[0] if text is None else f"{match[0][:-2]}><title>{escape(text)}</title></{match[1]}>"


def _themed(match: re.Match[str]) -> str:
    variable = VARIABLES.get(match[0])
    return f"var({variable})" if variable else match[0]


@checked
def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure for a paper, on white.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    path : path
        A file ending in .pdf, .svg or .png (300 dots per inch), replaced in one step.

    Returns
    -------
    Path
        The file.
    """
    path = Path(path)
    form = path.suffix.lower().lstrip(".")
    if form not in ("pdf", "svg", "png"):
        raise ConfigError(f"{path}: expected a name ending in .pdf, .svg or .png")
    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
    out = io.BytesIO()
    with styled():
        figure.savefig(out, format=form, dpi=300, facecolor="white", metadata=dates[form])
    try:
        write_atomically(path, out.getvalue())
    except OSError as e:
        raise RunError(f"{path}: cannot be written ({reason(e)})") from None
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step, so that a reader finds the old one or the new one."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        move(draft, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            draft.unlink()
        if isinstance(e, OSError):
            number = errno.ENOTDIR if isinstance(e, FileExistsError) else e.errno  # a file where a folder is to be
            raise OSError(number, os.strerror(number or 0), str(path)) from None
        raise
