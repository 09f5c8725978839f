"""Move the large tables of a page's Markdown to CSV files in docs/tables, which the site's build makes tables of.

    python tools/tables.py docs/experiments/board-full.md

Paste a table of an outcome.md over its line [Table](...), or let a benchmark write it with --docs, then run this. A
file is named after the heading above its table. Tables of sentences stay in the page.
"""

import csv
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
LARGE, SENTENCE, LONGEST = 60, 5, 25  # words: of a table that moves; a cell on average, and at most


def slug(heading: str) -> str:
    """A short file name of a heading."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)|`[^`]*`", "", heading).lower())
    words = words or re.findall(r"[a-z0-9]+", heading.lower())
    name = words[0]
    for word in words[1:]:
        if len(name) + len(word) > 32:
            break
        name += f"-{word}"
    return name


def cells(line: str) -> list[str]:
    parts = re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    return [part.strip().replace(r"\|", "|") for part in parts]


def numeric(rows: list[list[str]]) -> bool:
    """Whether a table is large and its cells are no sentences."""
    lengths = [len(re.findall(r"\w\S*", cell)) for row in rows[2:] for cell in row]  # a + b | c is no sentence
    total = sum(len(cell.split()) + 1 for row in rows for cell in row)
    return total >= LARGE and sum(lengths) <= SENTENCE * len(lengths) and max(lengths) <= LONGEST


def moved(text: str, page: Path) -> tuple[str, dict[Path, list[list[str]]]]:
    """The page with links for its tables, and the rows of each file."""
    folder = DOCS / "tables" / "-".join(page.relative_to(DOCS).with_suffix("").parts).removeprefix("experiments-")
    up = "../" * (len(page.relative_to(DOCS).parts) - 1)
    files: dict[Path, list[list[str]]] = {}
    count: dict[str, int] = {}
    heading = page.stem

    def turn(block: re.Match[str]) -> str:
        nonlocal heading
        if block["heading"]:
            heading = block["heading"]
        if not (block["table"] or block["link"]):
            return block[0]
        rows = [cells(line) for line in (block["table"] or "").splitlines()]
        if rows and not numeric(rows):
            return block[0]
        count[slug(heading)] = number = count.get(slug(heading), 0) + 1
        file = folder / f"{slug(heading)}{f'-{number}' * (number > 1)}.csv"
        if rows:
            left = ["" if mark.endswith(":") else "<" for mark in rows[1]]
            files[file] = [[head + mark for head, mark in zip(rows[0], left, strict=True)], *rows[2:]]
        return f"[Table]({up}{file.relative_to(DOCS).as_posix()})" + "\n" * bool(rows)

    kinds = r"^```(?s:.*?)^```|^#+ +(?P<heading>.*)$|^\[Table\]\((?P<link>\S+)\)$|(?P<table>(?:^\|.*\n){3,})"
    return re.sub(kinds, turn, text if text.endswith("\n") else f"{text}\n", flags=re.M), files


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        page_text, found = moved(path.read_text(), path)
        for csv_file, table in found.items():
            csv_file.parent.mkdir(parents=True, exist_ok=True)
            with csv_file.open("w", newline="") as out:
                csv.writer(out, lineterminator="\n").writerows(table)
        path.write_text(page_text)
