"""The pages of the site that are made from the code: one per method, the settings, the reference, and files of the
repository's root; and tables in pages: of results from the CSV files of docs/tables, of the code from the code.

mkdocs calls `on_files` and `on_page_markdown` (mkdocs.yml names this file as a hook); `pages` needs no mkdocs, so that
the tests can check every link without it.
"""

import csv
import importlib
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any

import polyfed as pf
from polyfed.base.settings import kebab, settings_of
from polyfed.cli import command_line, describe
from polyfed.cli.config import keys
from polyfed.compute.batches import Batch, Batches
from polyfed.compute.layout import Layout
from polyfed.core.algorithm import REGISTRY
from polyfed.runs.rehearsal import counted
from polyfed.runs.released import RELEASED
from polyfed.runs.result import Result
from polyfed.runs.trainer import Trainer, prepare
from polyfed.studies.compare import Comparison
from polyfed_members.admission import Admission
from polyfed_papers.recipes import load as recipes
from polyfed_papers.recipes.said import Setting
from polyfed_papers.window import WindowAdvice, window_for
from polyfed_sites.policy import Policy
from polyfed_testing.table import check_method
from polyfed_tuning.tuned import Tuned

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
rooms = importlib.import_module("rooms")
notebooks = importlib.import_module("notebooks")
chosen = importlib.import_module("chosen")
ideas = importlib.import_module("ideas")

GROUPS = {  # title of a reference page: the modules whose names it shows
    "Training": ("polyfed.face", "polyfed.runs", "polyfed.studies", "polyfed_games", "polyfed_members"),
    "scikit-learn": ("polyfed_estimators.estimators",),
    "Writing a method": (
        "polyfed.core.algorithm",
        "polyfed.core.stated",
        "polyfed.core.messages",
        "polyfed.core.uplinks",
        "polyfed.base.settings",
        "polyfed.compute",
        "polyfed_testing.table",
    ),
    "Who takes part": ("polyfed.core.schedule",),
    "Data": ("polyfed.data",),
    "Models": ("polyfed.models", "polyfed_adapters"),
    "Attacks and robust rules": ("polyfed_threats",),
    "Reports": ("polyfed.report",),
    "Yardsticks": ("polyfed.yardsticks",),
    "Other": ("polyfed",),
}
ALSO = (
    Result,
    Trainer,
    prepare,
    Admission,
    Comparison,
    Tuned,
    WindowAdvice,
    window_for,
    Batch,
    Batches,
    Layout,
    check_method,
)  # public in their rooms alone


def pages() -> dict[str, str]:
    """{path of a page in the site: its Markdown} of all pages that are not files of docs/."""
    made = {"commands.md": commands(), "settings.md": settings(), "experiments/settings.md": experiments()}
    return methods() | made | reference() | gallery() | copied()


# gallery


def gallery() -> dict[str, str]:
    """A page without outputs and a notebook for each file of the gallery."""
    made = {"gallery/index.md": notebooks.index()}
    for file in notebooks.files():
        page = f"gallery/{notebooks.page(file)}"
        made |= {page: notebooks.markdown(file), page.replace(".md", ".ipynb"): notebooks.ipynb(file)}
    return made


# commands


def commands() -> str:
    """The page of the command line: what each command's help says first, and its examples."""
    parts = ["# Commands", "`polyfed COMMAND --help` lists a command's options."]
    for name, command in sorted(command_line().commands.items()):
        parts.append(f"## polyfed {name}")
        subs = getattr(command, "commands", {})
        for title, text in [("", command.help), *((f"`polyfed {name} {k}`: ", c.help) for k, c in subs.items())]:
            said, _, examples = (text or "").partition("[dim]")
            parts.append(prose(title + " ".join(said.replace("[bold]", "`").replace("[/bold]", "`").split())))
            if examples:
                lines = examples.removesuffix("[/dim]").splitlines()
                parts.append("\n".join(["```text", *(line.strip() for line in lines), "```"]))
    return "\n\n".join(parts) + "\n"


# methods


def methods() -> dict[str, str]:
    """The overview, how to choose, and a page per method, by idea."""
    by_name = {c.name: c for c in classes()}
    parts = [
        "# Methods",
        "By idea. [How to choose](choose.md) says where to begin. Every page is made from the method's class when the "
        "site is built: when to use it, equations, settings, traffic counted in a short run, the board's results, and "
        "the tests that prove it right. `polyfed algorithms NAME` prints the same.",
    ]
    for idea in ideas.IDEAS:
        found = [by_name[name] for name in idea.methods]
        rows = [
            [f"[{c.__name__}]({c.name}.md)", f"`{c.name}`", cell(describe.sections(c)["summary"]), proofs(c)]
            for c in found
        ]
        heads = ["method", "name", "what it does", "what proves it right"]
        parts += [f"## {idea.title}", f"When {idea.when}.", markdown(heads, [":--"] * 4, rows, escaped=True)]
    made = {"methods/index.md": "\n\n".join(parts) + "\n", "methods/choose.md": choose()}
    return made | {f"methods/{c.name}.md": method(c) for c in classes()}


def choose() -> str:
    """How to choose a method: an idea by what is known of the sites, and the first of it by the board."""
    rows, over = [], board()[0]
    for idea in ideas.IDEAS[1:]:
        ranked = [m for m in idea.methods if m in over]
        gains = {m: float(over[m][GAIN].partition(" ")[0].replace("–", "0")) for m in ranked}
        first = max(gains, key=lambda m: gains[m]) if ranked else idea.methods[0]
        word = f"{gains[first]:+.1f} points" if ranked else "not on the board"
        rows.append(
            [f"{upper(idea.when)}.", idea.title, f"[`{first}`]({first}.md): {word}", f"{upper(idea.not_when)}."]
        )
    return CHOOSE.format(table=markdown(["when", "idea", "first", "not when"], [":--"] * 4, rows, escaped=True))


FIRST, GAIN = "in the first group", "mean gain over local"
CHOOSE = """---
hide: [toc]
---

# How to choose

Federating has to beat what a site has alone, and a simple method what is harder to explain. So run these four first, on
your own data:

```sh
polyfed compare local fedavg fedavg-ft recalibrated --data FOLDER --target COLUMN
```

If none of the last three is clearly better than `local`, other methods seldom are: [the board](../experiments/board.md)
has every method in ten settings, with the same gradients and trials. Where you know more of your sites, take a line of
this table; "first" is the one of its kind with the largest mean gain over own models on the board.

{table}

What also decides: whether the server may see a site's own uplink, whether sites answer late, and what a round may cost.
Each method's page says so under "When to use it", and a site can [refuse methods](../security.md) by its policy.
"""


def upper(text: str) -> str:
    return text[:1].upper() + text[1:]


@cache
def board() -> tuple[dict[str, dict[str, str]], dict[str, list[list[str]]]]:
    """({method: its row over the settings, the best first}, {method: a row per setting}) of the full board."""
    folder, sites = ROOT / "docs/tables/board-full", dict[str, list[list[str]]]()
    for file in sorted(folder.glob("*-clients.csv")):
        setting, number = file.stem.removesuffix("-clients").rsplit("-", 1)
        with file.open(newline="") as lines:
            for r in csv.DictReader(lines):
                row = [f"{setting}, {number} clients", r["accuracy, %"], r["gain over local"], r["gain over fedavg-ft"]]
                sites.setdefault(r["method<"], []).append(row)
    with (folder / "over-10-settings.csv").open(newline="") as lines:
        return {r["method<"]: r for r in csv.DictReader(lines)}, sites


def proofs(cls: Any) -> str:
    """What a method's certificates state, without the tests' names."""
    return cell("; ".join(dict.fromkeys(line.partition(": ")[2] for line in describe.certificates(cls))))


def classes() -> list[Any]:
    """The classes of all methods."""
    return [getattr(pf, name) for name in pf.algorithms.__all__]


def _name(cls: Any) -> str:
    return cls.__name__.lower()


def method(cls: Any) -> str:
    """The page of one method."""
    found = describe.sections(cls)
    table = describe.settings(cls)
    heads = [str(c.header) for c in table.columns]
    rows = list(zip(*([cell(str(v)) for v in c.cells] for c in table.columns), strict=True))
    parts = ["---\nhide: [toc]\n---", f"# {cls.__name__}", prose(found["summary"]), formulas(found["body"])]
    parts += ["## When to use it", *uses(cls), "## Example", example(cls)]
    if cls.name in board()[0]:
        parts += ["## What the board says", *boarded(cls.name)]
    if rows:
        lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(":--" for _ in heads) + " |"]
        parts += ["## Settings", "\n".join(lines + [f"| `{r[0]}` | " + " | ".join(r[1:]) + " |" for r in rows])]
    parts += ["## What it sends", traffic(cls), "## Local steps", prose(describe.steps(cls))]
    parts += ["## Adapters", prose(describe.adapters(cls))] if cls.linear_claims or cls.adapter_train else []
    if proving := describe.certificates(cls):
        parts += ["## Certificates", "What proves the implementation right, independently of itself:"]
        certificates = (line.partition(": ")[::2] for line in proving)
        parts += ["\n".join(f"- {prose(what)}  \n  `{test}`" for test, what in certificates)]
    if found["Notes"]:
        parts += ["## Notes", prose(found["Notes"])]
    return "\n\n".join([*parts, "## Cite", f"```bibtex\n{describe.citation(cls)}\n```", ""])


def uses(cls: Any) -> list[str]:
    """When to use a method and when not: its idea's, and what its needs and its traffic rule out."""
    idea, sent, needs = ideas.OF[cls.name], sent_by(cls), cls().needs
    others = ", ".join(f"[`{m}`]({m}.md)" for m in idea.methods if m != cls.name)
    most, never = max(*sent.first, *sent.later), [f"{idea.not_when}"]
    if any("rows" in kinds for kinds in sent.kinds.values()):
        never.append("the server must not see a site's own uplink: it needs more than sums")
    if needs.discloses:
        never.append(f"nothing made of samples may leave a site ({'; '.join(needs.discloses.values())})")
    if why := needs.in_step(10):
        never.append(f"sites answer late: it {why}")
    if needs.everyone:
        never.append("sites stay away from some rounds")
    if most > 1.5:
        never.append(f"bytes are dear: up to {most:.2g} times a model in one direction and round")
    if cls.adapter_train:
        never.append("the model has no low-rank adapter")
    lines = "\n".join(f"- {upper(prose(line))}." for line in never)
    same = f" Of the same kind: {others}." if others else ""
    return [f"**{idea.title}**: {idea.when}.{same}", f"**Not when**\n\n{lines}"]


@cache
def sent_by(cls: Any) -> Any:
    """What `counted` says of a method with its defaults."""
    return counted(cls())


def example(cls: Any) -> str:
    """A script that runs as it stands, and the command."""
    net, more = ideas.MODELS.get(cls.name, ideas.NET), ""
    if cls.adapter_train:
        more = f', adapter="lora:r=2,train={cls.adapter_train}"'
    code = f"""```python
import polyfed as pf
from torch import nn

sites = pf.data.load("heart-disease").partition("natural", seed=0)
model = {net}
run = pf.fit(model, sites, pf.{cls.__name__}(), rounds=20, seed=0{more})
print(run)
```"""
    if more or cls.name in ideas.MODELS:
        return code
    return f"{code}\n\n`polyfed compare local {cls.name}` asks whether it pays; settings follow, as in `ifca:k=2`."


def boarded(name: str) -> list[str]:
    """A method's rows of the full board."""
    over, sites = board()
    row, of = over[name], len(sites[name])

    def counts(key: str, other: str) -> str:
        up, _, down = row[key].partition(" / ")
        return "" if row[key] == "–" else f"; clearly above {other} in {up} and below in {down}"

    said = counts("above / below local", "own models") + counts("above / below fedavg-ft", "`fedavg-ft`")
    text = f"With the same gradients and trials for all, in [{of} settings](../experiments/board-full.md): "
    heads = ["setting", "accuracy, %", "gain over own models", "gain over fedavg-ft"]
    table = markdown(heads, [":--", "--:", "--:", "--:"], sites[name])
    return [
        f"{text}in the first group in {row[FIRST].partition(' ')[0]}{said}; mean gain over own models "
        f"{row[GAIN]} points.",
        table,
    ]


def traffic(cls: Any) -> str:
    """What the ledger counted in three rounds of the method on a small network, and what its server asked for."""
    sent = sent_by(cls)
    each = "{:.3g} p down and {:.3g} p up"
    text = f"Counted on a network of two layers and p = {sent.p} parameters, per client and round: "
    first = f" In a client's first round {each.format(*sent.first)}." if sent.first != sent.later else ""
    return f"{text}{each.format(*sent.later)}.{first} {sent.needs()}"


# settings

TABLES = {  # of an experiment file: what goes before the keys of each
    "": ("Run", "Keys at the top of an experiment file. `pf.fit` and `pf.Training` take them too, as `local_steps=5`."),
    "schedule": ("Schedule", "Keys of `[schedule]`: clients drawn one by one, asynchronous training, delays."),
    "attack": ("Attack", "Keys of `[attack]`. `pf.threats` has the classes."),
    "robust": ("Robust rule", "Keys of `[robust]`: what the server does in place of a mean."),
    "data": ("Data", "Keys of `[data]`."),
    "columns": (
        "Columns",
        "Keys of `[columns]`, for folders of CSV files; `pf.data.load(folder, target=...)` takes them too.",
    ),
    "model": ("Model", "Keys of `[model]`."),
}
HEAD = """# Settings

Every key of an experiment file. `polyfed config` prints the same, `polyfed config KEY` one of them, and
`polyfed config --toml` a file with all defaults. On the command line any key can be set with `--set`, such as
`--set data.test-fraction=0.3`. The command line beats the file, and the file beats the default.

The keys of `[algorithm]` are the settings of the [method](methods/index.md). [A tutorial](tutorials/own-model.md) has a
complete file.
"""


def settings() -> str:
    """The page of all keys of an experiment file, one table after another."""
    found, parts = keys(), [HEAD]
    for table, (title, text) in TABLES.items():
        own = [key for key in found if (key.name.partition(".")[0] if "." in key.name else "") == table]
        rows = [f"| `{key.name}` | {literal(key.value())} | {cell(key.says())} | {cell(key.takes)} |" for key in own]
        parts.append(
            "\n".join([f"## {title}\n\n{text}\n", "| key | default | meaning | takes |", "| :-- " * 4 + "|", *rows])
        )
    return "\n\n".join(parts) + "\n"


def experiments() -> str:
    """Every setting of every recipe and whose it is."""
    lines = [
        "# Settings of the experiments",
        "",
        "Every setting of every recipe and whose it is: the paper's text, the authors' released code, or ours. "
        "`polyfed reproduce NAME` prints the same before it starts.",
    ]
    for r in recipes().values():
        sizes: dict[Setting, list[str]] = {}
        for size in r.sizes:
            for s in r.settings(size):
                sizes.setdefault(s, []).append(size)
        order = list(dict.fromkeys(s.key for s in sizes))
        lines += [
            "",
            f"## {r.name}",
            "",
            f"{cell(r.title)}.",
            "",
            "| setting | value | size | whose |",
            "| :-- " * 4 + "|",
        ]
        for s in sorted(sizes, key=lambda s: order.index(s.key)):
            where = "every" if len(sizes[s]) == len(r.sizes) else ", ".join(sizes[s])
            lines.append(f"| {cell(s.key)} | {cell(s.value)} | {where} | {s.source} |")
    return "\n".join(lines) + "\n"


# reference


def reference() -> dict[str, str]:
    """A page per group of public names."""
    public = {name: getattr(pf, name) for name in pf.__all__}
    folders = [v for v in public.values() if inspect.ismodule(v) and v.__name__ != "polyfed.algorithms"]
    for folder in folders:
        own = (n for n, v in vars(folder).items() if inspect.isclass(v) and v.__module__ == folder.__name__)
        names = getattr(folder, "__all__", None) or list(own)
        public |= {f"{folder.__name__}.{name}": getattr(folder, name) for name in names}
    methods = set(classes())
    yardsticks = [cls for cls in REGISTRY.values() if cls.__module__.startswith("polyfed.yardsticks")]
    public |= {thing.__name__: thing for thing in (*ALSO, *yardsticks)}
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for value in public.values():
        if (inspect.isclass(value) or inspect.isfunction(value)) and value not in methods:
            home = f"{value.__module__}.{value.__qualname__}"
            title = next(t for t, modules in GROUPS.items() if value.__module__.startswith(modules))
            if home not in groups[title]:
                groups[title].append(home)
    groups = {title: homes for title, homes in groups.items() if homes}
    made = {f"reference/{slug(title)}.md": entries(title, homes) for title, homes in groups.items()}
    names = {title: ", ".join(f"`{home.rpartition('.')[2]}`" for home in homes) for title, homes in groups.items()}
    links = [f"- [{title}]({slug(title)}.md): {text}" for title, text in names.items()]
    head = "# Reference\n\nThe public names. Methods have [pages of their own](../methods/index.md).\n"
    return {"reference/index.md": "\n".join([head, *links])} | made


def entries(title: str, homes: list[str]) -> str:
    return "\n\n".join([f"# {title}", *(f"::: {home}" for home in homes)]) + "\n"


# files of the repository's root


def copied() -> dict[str, str]:
    """Pages that are files elsewhere in the repository, with their links rewritten."""
    files = {
        "changelog.md": "CHANGELOG.md",
        "contributing.md": "CONTRIBUTING.md",
        "benchmarks.md": "benchmarks/README.md",
    }
    return {page: relinked((ROOT / file).read_text(), Path(file).parent) for page, file in files.items()}


def relinked(text: str, folder: Path) -> str:
    """Links into docs/ are relative to docs/; links to other files of the repository become their names."""

    def turn(found: re.Match[str]) -> str:
        bang, label, target = found.groups()
        if "://" in target or target.startswith("#"):
            return found[0]
        path = Path(*[p for p in (folder / target).parts if p != "."])
        while ".." in path.parts:
            at = path.parts.index("..")
            path = Path(*path.parts[: at - 1], *path.parts[at + 1 :])
        return f"{bang}[{label}]({path.relative_to('docs')})" if path.parts[0] == "docs" else f"`{path}`"

    return re.sub(r"(!?)\[([^]]*)\]\(([^)\s]+)\)", turn, text)


def design(text: str) -> str:
    """The page on the design, with the picture of the rooms."""
    picture = f'<div class="rooms">\n{rooms.svg(Path(inspect.getfile(pf)).parent)}\n</div>'
    return text.replace(
        "## The rooms\n",
        f"## The rooms\n{picture}\n\nAn arrow points to a folder that is imported.\n\n",
        1,
    )


def included(text: str) -> str:
    """With the files that comments of the form `<!-- file: examples/own_method.py -->` name, as titled blocks."""

    def block(found: re.Match[str]) -> str:
        path = ROOT / found[1]
        return f'```python title="{path.name}"\n{path.read_text().strip()}\n```'

    return re.sub(r"<!-- file: (\S+\.py) -->", block, text)


def tabled(text: str, page: str) -> str:
    """With a table for every line [Table](FILE.csv), where a column whose name ends in < is aligned left, and for every
    comment `<!-- table: NAME -->`, from `OF_CODE`."""

    def table(link: re.Match[str]) -> str:
        with (ROOT / "docs" / page).parent.joinpath(link[1]).open(newline="") as file:
            heads, *rows = csv.reader(file)
        return markdown(
            [h.removesuffix("<") for h in heads], [":--" if h.endswith("<") else "--:" for h in heads], rows
        )

    text = re.sub(r"^\[Table\]\((\S+\.csv)\)$", table, text, flags=re.M)
    return re.sub(r"^<!-- table: (\w+) -->$", lambda name: OF_CODE[name[1]](), text, flags=re.M)


def policy() -> str:
    """The keys of a site's policy."""
    rows = [
        [f"`{kebab(s.name)}`", "–" if s.default is None else str(s.default).lower(), s.doc] for s in settings_of(Policy)
    ]
    return markdown(["key", "default", "meaning"], [":--"] * 3, rows)


def released() -> str:
    """The settings of authors' code, method by method."""

    def said(values: dict[str, Any]) -> str:
        return ", ".join(f"`{kebab(k)}` {f'{v:.4g}' if isinstance(v, float) else v}" for k, v in values.items())

    rows = [[name, said(r.method), said(r.training), r.source, r.apart] for name, r in RELEASED.items()]
    return markdown(["method", "its settings", "the run's", "read in", "not taken over"], [":--"] * 5, rows)


OF_CODE = {"policy": policy, "fields": chosen.rendered, "released": released}


# Markdown


def markdown(heads: list[str], marks: list[str], rows: list[list[str]], escaped: bool = False) -> str:
    """A table; marks: the alignment of each column; escaped: the cells are Markdown already."""
    lines = [heads, marks, *rows]
    texts = [[text if escaped else text.replace("|", r"\|") for text in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in texts)


def prose(text: str) -> str:
    """Plain text of a docstring as Markdown: what is indented is code, in the rest no character has a meaning."""
    lines = (
        t if t.startswith("    ") else re.sub(r"([*\[\]])", r"\\\1", t).replace("<", "&lt;") for t in text.splitlines()
    )
    return "\n".join(lines)


def formulas(text: str) -> str:
    """Prose, of which a paragraph of assignments is code: a line each."""
    each = text.split("\n\n")
    return prose("\n\n".join(indent(p, "    ") if " <- " in p else p for p in each))


def cell(text: str) -> str:
    return prose(text).replace("|", r"\|").replace("\n", " ")


def literal(text: str) -> str:
    return f"`{text}`" if text else ""


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


# what mkdocs calls


def on_config(config: Any) -> Any:
    """Put the generated pages where mkdocs.yml names their folder."""
    made = pages()

    def filled(nav: Any) -> Any:
        if nav == "methods/":
            groups = [{i.title: [f"methods/{m}.md" for m in i.methods]} for i in ideas.IDEAS]
            return ["methods/index.md", {"How to choose": "methods/choose.md"}, *groups]
        if isinstance(nav, str):
            folder = [page for page in made if page.startswith(nav) and page.endswith(".md")]
            return folder if nav.endswith("/") else nav
        if isinstance(nav, dict):
            return {title: filled(value) for title, value in nav.items()}
        return [filled(entry) for entry in nav]

    config["nav"] = filled(config["nav"])
    config["extra"]["made"] = made
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, text in config["extra"]["made"].items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri == "design.md":
        return design(markdown)
    markdown = tabled(markdown, page.file.src_uri)
    shown = {f"gallery/{notebooks.page(f)}": f for f in notebooks.files()}
    file = shown.get(page.file.src_uri)
    return (
        included(markdown)
        if file is None
        else notebooks.markdown(file, notebooks.outputs().get(file.name)).removeprefix(notebooks.WIDE)
    )
