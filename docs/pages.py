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
from pathlib import Path
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
    "Models": ("polyfed.models",),
    "Attacks and robust rules": ("polyfed.threats",),
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
    """The overview and a page per method."""
    found = sorted(classes(), key=_name)
    rows = [
        f"| [{c.__name__}]({c.name}.md) | `{c.name}` | {cell(describe.sections(c)['summary'])} | {proofs(c)} |"
        for c in found
    ]
    index = "\n".join(
        [
            "# Methods",
            "Every page is made from the method's class when the site is built: equations, settings, the traffic "
            "counted in a short run, and the tests that prove it right. `polyfed algorithms NAME` prints the same.",
            "",
            "| method | name | what it does | what proves it right |",
            "| :-- | :-- | :-- | :-- |",
            *rows,
        ]
    )
    return {"methods/index.md": index} | {f"methods/{c.name}.md": method(c) for c in found}


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
    parts = [f"# {cls.__name__}", prose(found["summary"]), prose(found["body"])]
    parts += ["## Use", f"```sh\npolyfed run --data digits --algorithm {cls.name}\n```"]
    parts += [f"```python\nrun = pf.fit(model, federation, pf.{cls.__name__}(), rounds=20)\n```"]
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


def traffic(cls: Any) -> str:
    """What the ledger counted in three rounds of the method on a small network, and what its server asked for."""
    sent = counted(cls())
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


def markdown(heads: list[str], marks: list[str], rows: list[list[str]]) -> str:
    """A table; marks: the alignment of each column."""
    lines = [heads, marks, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def prose(text: str) -> str:
    """Plain text of a docstring as Markdown: what is indented is code, in the rest no character has a meaning."""
    lines = (
        t if t.startswith("    ") else re.sub(r"([*\[\]])", r"\\\1", t).replace("<", "&lt;") for t in text.splitlines()
    )
    return "\n".join(lines)


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
