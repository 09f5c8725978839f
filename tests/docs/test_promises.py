"""Every sentence of the pages that promises something without exception has a test that holds it: promises.tsv.

A promise is a sentence with one of `WORDS`, outside of code and quotations. A line of the table is a page, words of the
sentence (which may stand in several of the page) and the tests that fail where it is not so. On pages of experiments
"no" and "only" tell what came out, which the records hold: there the other words count. A row that names its own test,
as all of traps.md do, needs no line."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from test_site import generator

ROOT = Path(__file__).resolve().parents[2]
STRONG = ("always", "never", "exactly", "same bits", "to the bit", "to the last bit", "bit for bit", "to the byte",
          "byte for byte")  # fmt: skip
WORDS = ("no", "only", *STRONG)
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "notes" not in p.parts)]
TEST = re.compile(r"(tests|src)/[\w/]+\.py::\w+")


def page_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix().removeprefix("docs/")


def sentences(text: str) -> list[str]:
    """The sentences of a page, with rows of tables, headings and items of lists as sentences of their own."""
    text = re.sub(r"^(```|~~~).*?^\1|<!--.*?-->|!\[[^]]*\]", "", text, flags=re.M | re.S)
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = re.sub(r"\n(?!\s*([|#]|[-*] |\d+\. ))", " ", block).splitlines()
        for line in lines:
            found += re.split(r"(?<=[.:!?])\s+(?=[A-Z`*([\"0-9])", " ".join(line.split()))
    return found


def promises(path: Path) -> list[str]:
    """The sentences that promise, but for those that name their test."""
    words = STRONG if "experiments" in path.parts else WORDS
    word = re.compile(rf"\b({'|'.join(words)})\b", re.I)

    def said(sentence: str) -> str:
        plain = re.sub(r"`[^`]*`|\"[^\"]*\"|\]\([^)]*\)", " ", sentence)  # not what others say
        return re.sub(r"\|\s*(no|yes)\b[^|]*(?=\|)", "|", plain) if plain.startswith("|") else plain  # an answer

    text = generator().tabled(path.read_text(), str(path))
    return [s for s in sentences(text) if word.search(said(s)) and not TEST.search(s)]


@cache
def table() -> list[tuple[str, str, tuple[str, ...]]]:
    lines = (Path(__file__).parent / "promises.tsv").read_text().splitlines()
    return [(page, phrase, tuple(tests.split())) for page, phrase, tests in (line.split("\t") for line in lines)]


@cache
def functions(file: str) -> set[str]:
    path = ROOT / file
    tree = ast.parse(path.read_text()) if path.is_file() and path.name.startswith("test_") else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", PAGES, ids=page_of)
def test_every_promise_of_a_page_names_its_test(path):
    phrases = [phrase for page, phrase, _ in table() if page == page_of(path)]
    bare = [s for s in promises(path) if not any(phrase in s for phrase in phrases)]
    assert not bare, "no test is named in promises.tsv for: " + "\n".join(bare)


def test_every_line_stands_for_a_promise_and_its_tests_exist():
    pages = {page_of(path): promises(path) for path in PAGES}
    for page, phrase, tests in table():
        assert any(phrase in sentence for sentence in pages[page]), f"{page} does not promise {phrase!r}"
        assert tests, f"{page}: {phrase!r} names no test"
        for test in tests:
            file, _, name = test.partition("::")
            assert name in functions(f"tests/{file}"), f"{page}: {phrase!r} names {test}, which is not there"
    assert len({line[:2] for line in table()}) == len(table())
