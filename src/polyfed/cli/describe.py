"""polyfed algorithms: a method in words: the docstring (numpydoc), the dataclass fields, what a short rehearsal counts,
and of its package references.bib and certificates.json.
"""

import dataclasses
import inspect
import json
import re
import sys
import typing
from functools import cache
from importlib.resources import files

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import polyfed.algorithms  # noqa: F401  (registers the methods)
from polyfed.base.plugins import OURS, Plugin, ours
from polyfed.base.settings import kebab, settings_of
from polyfed.cli.commands import Algorithms
from polyfed.cli.screen import grid, stdout
from polyfed.core.algorithm import REGISTRY, Algorithm, Contender
from polyfed.runs.rehearsal import counted
from polyfed.runs.released import RELEASED
from polyfed.yardsticks import Yardstick


def algorithms(o: Algorithms) -> None:
    stdout.print(overview() if o.name is None else portrait(o.name))


def overview() -> RenderableType:
    """All methods: name, one line, what is sent; and the yardsticks, which send nothing."""
    methods = grid("name", "what it does", "sent per round, in vectors of p numbers", tight=("name",))
    yards = grid("name", "", tight=("name",))
    yards.show_header = False
    refused = REGISTRY.gather()
    for name, cls in sorted(REGISTRY.items()):
        row = Text(name, "cyan"), Text.assemble(sections(cls)["summary"], package(REGISTRY.origin(name)))
        if issubclass(cls, Algorithm):
            methods.add_row(*row, Text(counted(cls()).words()))
        else:
            yards.add_row(*row)
    head = Text("\nYardsticks: rows of a comparison like any method, which send nothing\n", "bold")
    lines = [Text(f"\n{line}", "red") for line in refused]
    return Group(methods, head, yards, *lines, Text("\nMore on one of them: polyfed algorithms NAME", "dim"))


def package(plugin: Plugin | None) -> tuple[str, str]:
    """The installed package that brings a row of a listing, behind what it is; nothing where it is polyfed."""
    return ("" if plugin is None else f"  ({plugin})", "dim")


def portrait(name: str) -> RenderableType:
    """One method in full."""
    cls = REGISTRY.find(name)
    docs = sections(cls)
    parts: list[RenderableType] = [Text(f"{cls.__name__}  ({name})", "bold"), Text(docs["summary"])]
    if (plugin := REGISTRY.origin(name)) is not None:
        parts.append(Text(f"From the installed package {plugin}.", "dim"))
    if docs["body"]:
        parts += [Text(), Text(docs["body"])]
    parts += [Text("\nSettings", "bold"), settings(cls)]
    if issubclass(cls, Yardstick):
        kind = "an oracle" if cls.role == "oracle" else "a yardstick"
        parts += [Text("\nSent", "bold"), Text(f"Nothing: it is {kind}.")]
    if issubclass(cls, Algorithm):
        sent = counted(cls())
        words = f"{sent.words()}, in vectors of p = {sent.p} numbers"
        parts += [Text("\nSent per client and round", "bold"), Text(words), Text(sent.needs())]
        parts += [Text("\nLocal steps", "bold"), Text(steps(cls))]
        parts += [Text("\nAdapters", "bold"), Text(adapters(cls))] if cls.linear_claims or cls.adapter_train else []
    if row := RELEASED.get(cls.name):
        parts += [Text("\nAs released  (--as-released)", "bold"), Text(row.words())]
    if proofs := certificates(cls):
        parts += [Text("\nCertificates", "bold"), *(Text(f"- {line}") for line in proofs)]
    if docs["Notes"]:
        parts += [Text("\nNotes", "bold"), Text(docs["Notes"])]
    if entry := citation(cls):
        parts += [Text("\nCite", "bold"), Text(entry)]
    return Group(*parts)


def citation(cls: type[Contender]) -> str:
    """The BibTeX entry of a method: the one in `references.bib` of its package under a line with the method's name."""
    entries = re.findall(r"^([^@\n]+)\n(@.+?\n\})$", _beside(cls, "references.bib"), re.M | re.S)
    return next((entry for names, entry in entries if cls.name in names.split(", ")), "")


def certificates(cls: type[Contender]) -> list[str]:
    """Tests that prove a method right, as "test: what it compares with", from `certificates.json` of its package."""
    return json.loads(_beside(cls, "certificates.json") or "{}").get(cls.name, [])


@cache
def _text(package: str, file: str) -> str:
    path = files(package) / file
    return path.read_text("utf-8") if path.is_file() else ""


def _beside(cls: type, file: str) -> str:
    """The text of a file of the package that a class is from; empty where there is none."""
    package = OURS if ours(cls.__module__) else cls.__module__.partition(".")[0]
    return _text(package, file) if hasattr(sys.modules[package], "__path__") else ""


def settings(cls: type[Contender]) -> Table:
    """A row for every setting."""
    table = grid("key", "default", "from", "takes", "meaning", tight=("key", "default"))
    for s in settings_of(cls):
        missing = s.default is dataclasses.MISSING
        default = "" if missing else "none" if s.default is None else _toml(s.default)
        table.add_row(Text(kebab(s.name), "cyan"), default, s.source, s.takes, Text(s.doc))
    return table


def steps(cls: type[Algorithm]) -> str:
    """Which local optimisers a method takes."""
    why = cls().needs.plain_sgd
    return f"Plain SGD only: {why}." if why else "Any local optimiser."


def adapters(cls: type[Algorithm]) -> str:
    """The adapter that it is for, or under which parametrisation of one its guarantee holds."""
    if cls.adapter_train:
        return f"For adapters of two trained factors alone: --adapter lora:r=8,train={cls.adapter_train}."
    return (
        f"With the model's own parameters and on a chart (--adapter lora) {cls.linear_claims} are those of the updates "
        f"themselves; with train=factors they are not, {'and dora is refused' if cls.linear_only else 'nor with dora'}."
    )


def _toml(value: typing.Any) -> str:
    return str(value).lower() if isinstance(value, bool) else '""' if value == "" else str(value)


def sections(cls: type) -> dict[str, str]:
    """A numpydoc docstring as {"summary", "body", "Notes"}, and what other sections it has; absent ones are empty."""
    text = inspect.cleandoc(cls.__doc__ or "")
    parts = re.split(r"^(\w+)\n-{3,}\n", text, flags=re.M)
    summary, _, body = parts[0].partition("\n\n")
    named = {"summary": " ".join(summary.split()), "body": body.strip("\n"), "Notes": ""}
    return named | {head: rest.strip("\n") for head, rest in zip(parts[1::2], parts[2::2], strict=True)}
