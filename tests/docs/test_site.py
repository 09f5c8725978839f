"""The documentation: every walk of a tutorial goes as printed, and the site builds, where every link leads somewhere.

A walk starts in an empty folder. A block with a title is a file and is written; other Python blocks are run, one after
another; lines of sh blocks that begin with polyfed are commands and must succeed. `<!-- long -->` before a block: `make
test-long` runs the walk with it, the usual tests leave that block out."""

import csv
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch

import polyfed as pf
import polyfed.algorithms  # now, so that a walk takes back its own methods only
from polyfed.base.settings import kebab, settings_of
from polyfed.cli import command_line, describe
from polyfed.cli.config import keys
from polyfed.core.algorithm import REGISTRY
from polyfed.metrics.scores import KNOWN
from polyfed.runs.released import RELEASED
from polyfed_papers.recipes import load as recipes
from polyfed_sites.policy import Policy

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WALKS = [
    "index.md", "authors.md", "released.md", "scores.md", "clinical.md", "how-to/tables.md", "how-to/tools.md",
    *sorted(p.relative_to(DOCS).as_posix() for p in (DOCS / "tutorials").glob("*.md")),
]  # fmt: skip
BLOCK = re.compile(r'(<!-- long -->\n)?```(python|sh|toml)(?: title="([^"]+)")?\n(.*?)```', re.S)


@cache
def generator() -> types.ModuleType:
    """docs/pages.py, as mkdocs loads it."""
    spec = importlib.util.spec_from_file_location("docs_pages", DOCS / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def site() -> dict[str, str]:
    """{path: Markdown} of every page."""
    names = [p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md") if "notes" not in p.parts]
    written = {name: generator().tabled((DOCS / name).read_text(), name) for name in names}
    made = generator().pages()
    assert not written.keys() & made.keys()
    return written | made


def test_every_method_has_a_page_with_all_its_settings():
    for name in polyfed.algorithms.__all__:
        cls = getattr(polyfed.algorithms, name)
        text = site()[f"methods/{cls.name}.md"]
        for f in fields(cls):
            assert f"| `{f.name.replace('_', '-')}` |" in text, (name, f.name)
        assert describe.citation(cls) in text


def test_every_method_is_of_one_idea_and_its_page_says_when_to_use_it_and_what_the_board_says():
    ideas, made = importlib.import_module("ideas"), site()
    names = {getattr(polyfed.algorithms, name).name for name in polyfed.algorithms.__all__}
    listed = [m for idea in ideas.IDEAS for m in idea.methods]
    assert (sorted(listed), len(listed)) == (sorted(names), len(names))
    rows = {row[0]: row for row in csv.reader((DOCS / "tables/board-full/over-10-settings.csv").open())}
    for name in names:
        text = made[f"methods/{name}.md"]
        heads = re.findall("^## (.*)$", text, re.M)
        assert heads[:2] == ["When to use it", "Example"], name
        assert "**Not when**" in text, name
        assert ("What the board says" in heads) == (name in rows)
        if name in rows:
            assert f"in the first group in {rows[name][-1].split()[0]}" in text, name
            assert text.count(" clients | ") == int(rows[name][-1].split()[-1]), name
        assert f"({name}.md)" in made["methods/index.md"]
    assert "The server must not see a site's own uplink" in made["methods/ifca.md"]
    assert "The server must not" not in made["methods/fedavg.md"]
    assert all(f"({name}.md)" in made["methods/choose.md"] for name in ("fedacs", "flexcfl", "fedslr", "fedem"))


def examples(names: Sequence[str]) -> None:
    for name in names:
        code = re.search(r"```python\n(.*?)```", site()[f"methods/{name}.md"], re.S)[1]
        exec(compile(code.replace("rounds=20", "rounds=1"), name, "exec"), {})


def test_an_example_of_a_methods_page_runs_as_it_stands(capsys):
    examples(["fedavg-ft", "fedem", "flora", "fedbn"])
    assert "fedem" in capsys.readouterr().out


@pytest.mark.long
def test_the_example_of_every_methods_page_runs_as_it_stands(capsys):
    examples([c.name for c in generator().classes()])


def test_every_setting_of_every_recipe_is_in_its_table_with_whose_it_is():
    tables = site()["experiments/settings.md"].split("\n## ")[1:]
    found = recipes()
    assert [table.split("\n")[0] for table in tables] == list(found)
    cell = generator().cell
    for table, r in zip(tables, found.values(), strict=True):
        for size in r.sizes:
            for s in r.settings(size):
                row = rf"^\| {re.escape(f'{cell(s.key)} | {cell(s.value)}')} \| (every|.*{size}.*) \| {s.source} \|$"
                assert re.search(row, table, re.M), (r.name, s)


def test_every_file_of_a_table_stands_on_one_page_and_has_whole_rows():
    linked = [
        page.parent.joinpath(target).resolve()
        for page in (*DOCS.rglob("*.md"), DOCS.parent / "benchmarks/README.md")
        for target in re.findall(r"^\[Table\]\((\S+)\)$", page.read_text(), re.M)
    ]
    assert sorted(linked) == sorted((DOCS / "tables").rglob("*.csv"))
    for file in linked:
        with file.open(newline="") as lines:
            heads, *rows = csv.reader(lines)
        assert rows, file
        assert {len(row) for row in rows} == {len(heads)}, file


def test_tables_of_the_code_have_every_row():
    """A policy's keys, what a server may choose, and the settings of authors' code: nothing is typed a second time."""
    for name, page in {"policy": "security.md", "fields": "security.md", "released": "released.md"}.items():
        assert generator().OF_CODE[name]() in site()[page]
    for s in settings_of(Policy):
        assert re.search(rf"^\| `{kebab(s.name)}` \|.* \| {re.escape(s.doc)} \|$", site()["security.md"], re.M)
    for name, row in RELEASED.items():
        assert re.search(
            rf"^\| {name} \|.* \| {re.escape(f'{row.source} | {row.apart}')} \|$", site()["released.md"], re.M
        )


def test_prose_of_a_docstring_shows_every_character():
    """Markdown knows no backslash before <, so that one is an entity; brackets and stars are escaped."""
    assert generator().prose("a[i] <= b * c") == r"a\[i\] &lt;= b \* c"
    assert all(r"\<" not in text for text in site().values())


def test_the_page_of_settings_has_every_key_once_per_table():
    text = site()["settings.md"]
    for key in keys():
        assert f"| `{key.name}` | {f'`{key.value()}`' if key.value() else ''} |" in text
    assert text.count("\n| `") == len(keys())


def shorter(line: str) -> str:
    """The same command with fewer seeds and rounds: it has to work, its numbers are not looked at."""
    return re.sub(r"--rounds \d+", "--rounds 3", re.sub(r"--seeds \d+", "--seeds 2", line))


def walk(page: str, cli, folder: Path, long: bool) -> None:
    """Do what a page says, in `folder`."""
    text = generator().included((DOCS / page).read_text())
    known, module = set(REGISTRY), types.ModuleType("walk")
    sys.modules["walk"] = module  # dataclasses look their module up
    sys.path.insert(0, str(folder))
    try:
        for slow, kind, title, body in BLOCK.findall(text):
            if slow and not long:
                continue
            if title:
                (folder / title).write_text(body)
            elif kind == "python":
                exec(compile(body, page, "exec"), module.__dict__)
            elif kind == "sh":
                for line in body.splitlines():
                    if line.startswith("polyfed "):
                        said = cli(*(line if long else shorter(line)).split()[1:])
                        assert said.status == 0, f"{page}: {line}\n{said.out}{said.err}"
    finally:
        sys.path.remove(str(folder))
        for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(folder))]:
            del sys.modules[name]
        del sys.modules["walk"]
        for name in set(REGISTRY) - known:
            del REGISTRY[name]


@pytest.mark.parametrize("page", WALKS)
def test_a_walk_goes_as_printed(page, cli, tmp_path, capsys):
    walk(page, cli, tmp_path, long=False)


@pytest.mark.long
@pytest.mark.parametrize("page", WALKS)
def test_a_long_walk_goes_as_printed(page, cli, tmp_path):
    walk(page, cli, tmp_path, long=True)


ELSEWHERE = {"packages.md": "tests/base/acme.py installs its files"}  # pages whose Python is run by other tests


def blocks(kind: str) -> list[tuple[str, str]]:
    """(page, text) of every block of a language, the README's too."""
    pages = {p.relative_to(ROOT).as_posix(): p.read_text() for p in [ROOT / "README.md", *DOCS.rglob("*.md")]}
    return [(page, body) for page, text in pages.items() for k, _, body in re.findall(FENCE, text, re.S) if k == kind]


FENCE = r"```(python|sh|toml)( title=\"[^\"]+\")?\n(.*?)```"


def test_every_page_with_python_is_run_and_every_toml_is_valid():
    for page, body in blocks("toml"):
        assert tomllib.loads(body), page
    pages = {page.removeprefix("docs/") for page, _ in blocks("python")} - {"README.md"}  # which test_readme.py runs
    assert pages <= {*WALKS, *ELSEWHERE}
    assert pages >= ELSEWHERE.keys()


def parsed(words: list[str]) -> None:
    """Raise what the command line says of a command that is not one, before it is run."""
    command, name = command_line(), "polyfed"
    context = command.make_context(name, [*words])
    while (left := [*context._protected_args, *context.args]) and hasattr(command, "get_command"):
        name, command = left[0], command.get_command(context, left[0])
        assert command is not None, name
        context = command.make_context(name, left[1:], parent=context)


def test_every_command_of_every_page_is_one():
    """Also those with FOLDER, RUN or HOST in them, which no test can run."""
    found = 0
    for page, body in blocks("sh"):
        for line in re.sub(r"\\\n", " ", body).splitlines():
            for part in re.split(r"&&", line):
                if (words := shlex.split(part, comments=True))[:1] == ["polyfed"]:
                    try:
                        parsed(words[1:])
                    except Exception as e:  # of click, or of the one that newer typer brings
                        pytest.fail(f"{page}: {part}: {e}")
                    found += 1
    assert found > 40
    with pytest.raises(Exception, match="No such option"):
        parsed(["run", "--rouns", "3"])


@pytest.mark.long  # `make docs` builds it too
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; `make docs` installs it")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed; `make docs` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "methods" / "scaffold.html").is_file()
    training = re.sub("<[^>]+>", "", (tmp_path / "site" / "reference" / "training.html").read_text())
    assert "Communication rounds." in training  # from its field, see docs/fields.py
    assert "setting(" not in training
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="https?:', page.read_text()), (
            f"{page.name} loads from elsewhere"
        )


def test_every_score_that_is_known_by_name_is_documented_with_its_direction():
    rows = {row[0]: row for row in re.findall(r"^\| `([\w-]+)` \| ([\w ,]+) \| ([\w ]+) \|", site()["scores.md"], re.M)}
    better = {name: m.better.replace(":", " ") for name, m in KNOWN.items()}
    assert {name: row[2] for name, row in rows.items()} == better
    kinds = {None: "any", "survival": "time, event"}
    assert {name: row[1] for name, row in rows.items()} == {n: kinds.get(m.kind, m.kind) for n, m in KNOWN.items()}


def test_what_the_page_for_authors_names_is_what_a_method_is_given():
    """One page of at most 60 lines; every member is there, and takes what the page says."""
    text, given = (ROOT / "docs" / "authors.md").read_text(), {}

    class Looking(pf.FedAvg, abstract=True):
        def local_update(self, task, client, down, data, round):
            given.update(task=task, data=data, batch=next(iter(data)), round=round)
            return super().local_update(task, client, down, data, round)

        def aggregate(self, server, up, round):
            given["up"] = up
            return super().aggregate(server, up, round)

    x = [(torch.zeros(3, 2), torch.arange(3) % 2)] * 2
    pf.fit(torch.nn.Linear(2, 2), pf.Federation.from_arrays(x, x), Looking(), rounds=1)
    heads = re.findall(r"^\| (`.+?`) \|", text, re.M)
    named = [re.fullmatch(r"(\w+)((?:\.\w+)*)(?:\((.*)\))?(?:\[name\])?", item).groups()
             for head in heads for item in re.findall(r"`(.+?)`", head)]  # fmt: skip
    assert {owner for owner, *_ in named} == given.keys()
    for owner, path, takes in named:
        member = given[owner]
        for name in filter(None, path.split(".")):
            member = getattr(member, name)
        assert callable(member) == (takes is not None), (owner, path)
        if takes:
            assert takes.split(", ") == list(inspect.signature(member).parameters)[: takes.count(",") + 1]
    assert len(text.splitlines()) <= 60


def test_the_contract_of_the_tutorial_is_the_codes():
    """Every row's function takes what it says, and the default that the text shows is what the code gives back."""
    text = (ROOT / "docs" / "tutorials" / "own-method.md").read_text()
    rows = re.findall(r"^\| `(\w+)\(([\w, ]+)\)` \| (.+?) \|", text, re.M)
    assert [name for name, *_ in rows] == ["init_server", "downlink", "local_update", "aggregate"]
    for name, takes, _ in rows:
        assert takes.split(", ") == list(inspect.signature(getattr(pf.Algorithm, name)).parameters)[1:]
    shown = {name: re.search(r"by default `(.+)`", what) for name, _, what in rows}
    server = {"w": torch.ones(3)}
    found = eval(shown["downlink"][1], {"Down": pf.Down, "server": server})
    assert isinstance(found, pf.Down)
    assert found == pf.FedAvg().downlink(server, None)


def index_rows(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """(paper, row) of the table of claims, without the papers' own lines."""
    table = text.split("| number | the claim |")[1].split("\n\n")[0].split("\n")[2:]
    rows, paper = [], ""
    for line in table:
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if any(cells[1:]):
            rows.append((paper, cells))
        else:
            paper = cells[0].strip("*").split("]")[0].strip("[")
    return rows


def wrong(row: tuple[str, ...], words: Sequence[str] = ()) -> str:
    """What a row of the index lacks: its paper's own words or "our words", a size, seeds; or a verdict beyond its size.

    words: the paper's, of this row"""
    _, claim, here, scale, _ = row
    quoted = re.findall(r'"([^"]*)"', claim)
    if claim.startswith("our words: ") and words:
        return "the paper's words"
    if [text for text in quoted if text not in words] or not (quoted or claim.startswith("our words: ")):
        return "a quotation"
    if not re.search(r"paper's size|small size|^a test|^none", scale):
        return "a size"
    if not re.search(r"\bseeds?\b|\bdraw\b|\brepeats\b", scale):
        return "seeds"
    bare = re.sub(r"(holds|does not hold),? (at small size|on|for|with)\b.*", "", here)
    if "hold" in bare and not scale.startswith(("paper's size", "a test")):
        return "at small size"
    return ""


def test_every_claim_of_the_index_has_its_words_size_and_seeds():
    """Quotations are those of quotations.toml, each at its own paper and number, and none there is left unused."""
    words = tomllib.loads((DOCS / "experiments/quotations.toml").read_text())
    rows = index_rows(site()["experiments/index.md"])
    assert len(rows) > 40
    known = [(paper, row, words.get(paper, {}).get(row[0], [])) for paper, row in rows]
    assert [(paper, row[0], wrong(row, said)) for paper, row, said in known if wrong(row, said)] == []
    assert {(paper, number) for paper, some in words.items() for number in some} <= {(p, row[0]) for p, row in rows}


FIGURES = (  # an interval, a number with a decimal point, a share
    re.compile(r"([+-]?\d*\.?\d+) to ([+-]?\d*\.?\d+)"),
    re.compile(r"(?<![\w.])([+-]?\d*\.\d+)"),
    re.compile(r"(?<![\d.])(\d+) of (\d+)(?!\.\d)"),
)


def says(page: tuple[str, ...], row: tuple[str, ...]) -> bool:
    """A page's figures are the row's, rounded as the row has them, whatever their signs."""
    unit = 10.0 ** -max(len(x.partition(".")[2]) for x in row)
    pairs = zip(sorted(abs(float(x)) for x in page), sorted(abs(float(x)) for x in row), strict=True)
    return all(abs(a - b) <= unit / 2 + 1e-9 for a, b in pairs)


def test_every_figure_of_the_index_stands_on_its_page():
    """Those of a test and the paper's own, which are "printed" or there "by rounding", do not have to."""
    pages, missing = site(), []
    for paper, (number, _, _, scale, why) in index_rows(pages["experiments/index.md"]):
        begin = "experiments/" + {"The board": "board", "Beyond the papers": "f"}.get(paper, paper.lower())
        linked = [f"experiments/{name}" for name in re.findall(r"\]\(([\w/-]+\.md)", why)]
        text = "\n".join(pages[name] for name in pages if name.startswith(begin) or name in (*linked, "released.md"))
        mine = "" if scale.startswith("a test") else re.sub(r"\([^)]* printed\)|[\d.]+ by rounding", "", why)
        for kind in FIGURES:
            have = {m.groups() for m in kind.finditer(text)}
            rows = [m.groups() for m in kind.finditer(mine)]
            missing += [(number, row) for row in rows if not any(says(page, row) for page in have)]
    assert missing == []


@pytest.mark.parametrize("paper", ["FPFC", "FedSLR", "FedACS", "FedCET"])
def test_a_papers_pages_quote_it_by_its_words_alone(paper):
    """What stands between quotation marks and is as long as a clause."""
    known = {said for some in tomllib.loads((DOCS / "experiments/quotations.toml").read_text()).values()
             for words in some.values() for said in words}  # fmt: skip
    pages = DOCS / "experiments"
    for page in (pages / f"{paper.lower()}.md", *pages.glob(f"{paper.lower()}/*.md")):
        text = " ".join(re.sub(r"```.*?```", "", page.read_text(), flags=re.S).split())
        assert {said for said in re.findall(r'"([^"]*)"', text) if len(said) >= 40} <= known, page.name
