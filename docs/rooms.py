"""The picture of the rooms: which folder of the package imports which, as an SVG drawn from the imports themselves.

A folder stands above all that it imports. An arrow that follows from others (a imports b, b imports c, a imports c) is
left out. What is imported for types alone does not count; what a function imports when it is called does.
"""

import ast
from pathlib import Path

WIDTH, BOX, TALL, STEP = 760, 120, 46, 92


def imports(package: Path) -> dict[str, set[str]]:
    """{folder or top-level file: those that it imports}."""
    rooms = {p.stem for p in package.iterdir() if p.is_dir() or p.suffix == ".py"} - {"__init__", "__pycache__"}
    rooms = {r for r in rooms if list(_files(package, r))}
    return {room: {n for f in _files(package, room) for n in _imported(f, package)} & rooms - {room} for room in rooms}


def _files(package: Path, room: str) -> list[Path]:
    return sorted((package / room).rglob("*.py")) or [f for f in [package / f"{room}.py"] if f.exists()]


def _imported(path: Path, package: Path) -> set[str]:
    tree, names = ast.parse(path.read_text()), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith(f"{package.name}.")}


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """How high each room stands: above all that it imports. Raises ValueError for rooms that import each other."""
    found: dict[str, int] = {}
    while len(found) < len(graph):
        ready = [room for room in graph if room not in found and graph[room] <= found.keys()]
        if not ready:
            raise ValueError(f"rooms import each other: {', '.join(sorted(graph.keys() - found.keys()))}")
        found |= {room: 1 + max((found[r] for r in graph[room]), default=-1) for room in ready}
    return found


def needed(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that do not follow from others."""

    def below(room: str) -> set[str]:
        return graph[room] | {deep for r in graph[room] for deep in below(r)}

    return [(a, b) for a in sorted(graph) for b in sorted(graph[a]) if not any(b in below(c) for c in graph[a] - {b})]


def svg(package: Path) -> str:
    """The picture; colours are those of the page (docs/stylesheets/extra.css)."""
    graph = imports(package)
    level = levels(graph)
    top = max(level.values())
    rows = [sorted(r for r in graph if level[r] == k) for k in range(top + 1)]
    at = {
        room: ((i + 0.5) * WIDTH / len(row), (top - k) * STEP + TALL / 2 + 4)
        for k, row in enumerate(rows)
        for i, room in enumerate(row)
    }
    out = [
        f'<svg viewBox="0 0 {WIDTH} {top * STEP + TALL + 8}" role="img" aria-label="Folders and their imports">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for a, b in needed(graph):
        (x1, y1), (x2, y2) = at[a], at[b]
        y1, y2 = y1 + TALL / 2, y2 - TALL / 2
        bend = (y2 - y1) / 2
        out.append(
            f'<path d="M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}" marker-end="url(#tip)"/>'
        )
    for room, (x, y) in at.items():
        files = _files(package, room)
        lines = sum(len(f.read_text().splitlines()) for f in files)
        size = f"{lines:,} lines" + (f", {len(files)} files" if len(files) > 1 else "")
        out += [
            f'<rect x="{x - BOX / 2:g}" y="{y - TALL / 2:g}" width="{BOX}" height="{TALL}" rx="6"/>',
            f'<text x="{x:g}" y="{y - 3:g}">{room}</text><text class="small" x="{x:g}" y="{y + 14:g}">{size}</text>',
        ]
    return "\n".join([*out, "</svg>"])
