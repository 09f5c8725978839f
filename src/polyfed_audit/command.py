"""polyfed data repair: what stands in the way and what differs between sites, as repairs in an experiment file."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from polyfed.base.columns import RENAME
from polyfed.base.errors import ConfigError, Fault, printable
from polyfed.base.part import Flag, pasted, toml, toml_key
from polyfed.base.settings import is_mapping, kebab
from polyfed.cli.data import tables_of
from polyfed.cli.given import collect
from polyfed.cli.screen import say
from polyfed.data.csv_files import USABLE
from polyfed.runs.config import Experiment, resolve
from polyfed.runs.ownership import put_out, spare
from polyfed.runs.training import Columns
from polyfed_audit.commands import DataRepair
from polyfed_audit.names import usable

LAYERS = 8  # of faults that show when others are repaired


class Proposal(NamedTuple):
    """One setting of [columns], where it belongs and why."""

    place: tuple[str, ...]  # keys from [columns] on
    value: Any
    why: str

    @property
    def lines(self) -> list[str]:
        """As a file has it, below what was found; the last keys of its place are its own."""
        own = self.place if self.place[0] != "site" else self.place[2:]
        why = [f"# {printable(line)}" for line in dict.fromkeys(self.why.splitlines())]
        return [*why, f"{'.'.join(map(toml_key, own))} = {toml(self.value)}"]


def data_repair(o: DataRepair) -> None:
    experiment = resolve(None, collect(o))
    place = Path(experiment.data.name)
    out = o.out or Path(f"{place.resolve().name}.toml")
    if out.exists():
        raise ConfigError(f"--out: {out} exists, and is not overwritten; name another file")
    if not place.is_dir() or tables_of(experiment) == (None, []):
        raise ConfigError(f"{place}: expected a folder of CSV files")
    spare(out, place)
    proposals, left = proposed(experiment)
    for line in left:
        say(f"no repair for: {line}")
    if not proposals:
        return say(f"{place}: nothing to repair")
    put_out(out, written(experiment, proposals, out).encode())
    then = f"read it, strike out what is wrong, then: polyfed data inspect {out}"
    return say(f"{len(proposals)} repairs proposed: {out}; {then}")


def proposed(experiment: Experiment) -> tuple[list[Proposal], list[str]]:
    """The repairs of one layer of faults after the other, and the faults that have none."""
    made: dict[tuple[str, ...], Proposal] = {}
    faults: list[Fault] = []
    for _ in range(LAYERS):
        table, faults = tables_of(experiment)
        found: list[Fault | Flag] = [*faults]
        for c in table.inputs if table is not None else ():
            if c.kind not in USABLE:
                found.append(Fault(f"{c.name} holds {c.hint}", usable(c)))
        if not any(finding.repair for finding in found) and table is not None:
            found += table.audit.flags
        columns = experiment.columns
        for finding in found:
            for place, value in _settings(finding.repair):
                try:
                    columns, changed = _with(columns, place, value), columns
                except ConfigError:
                    continue  # it does not go together with what is there
                if columns != changed:
                    why = str(finding).removesuffix(pasted("", finding.repair))
                    old = made.get(place)
                    value = [*dict.fromkeys((*old.value, *value))] if old else value
                    made[place] = Proposal(place, value, f"{old.why}\n{why}" if old else why)
        if columns == experiment.columns:
            break
        experiment = replace(experiment, columns=columns)
    return [*made.values()], [fault for fault in faults if not fault.repair]


def _settings(repair: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each setting of a repair; of other names each one."""
    yield from (((key,), value) for key, value in repair.items() if key != "site")
    for site, columns in repair.get("site", {}).items():
        for key, how in columns.items():
            each = [((key, before), after) for before, after in how.items()] if key == RENAME else [((key,), how)]
            yield from ((("site", site, *keys), value) for keys, value in each)


def _with(columns: Columns, place: tuple[str, ...], value: Any) -> Columns:
    """The columns with a setting more; of two the first stays, lists are joined. Raises ConfigError if it is wrong."""

    def joined(old: Any) -> Any:
        return [*dict.fromkeys((*(old or ()), *value))] if isinstance(value, list) else old or value

    if place[0] != "site":
        key = place[0].replace("-", "_")
        return replace(columns, **{key: joined(columns.given.get(key))})
    site: dict[str, Any] = {**columns.site.get(place[1], {})}
    old = site.get(place[2])
    site[place[2]] = joined(old) if len(place) == 3 else {place[3]: value} | (old or {})
    return replace(columns, site={**columns.site, place[1]: site})


def written(experiment: Experiment, proposals: list[Proposal], out: Path) -> str:
    """The experiment file."""
    folder, file = os.path.relpath(experiment.data.name, out.resolve().parent), printable(out.name)
    lines = [
        f"# Repairs that polyfed proposes for {printable(folder)}. Nothing is repaired before this file is used:",
        f"# strike out what is wrong, then look again with polyfed data inspect {file}, then polyfed run {file}.",
        "", "[data]", f"name = {toml(f'./{folder}')}", "", "[columns]",
    ]  # fmt: skip
    of_all = {p.place[0]: p for p in proposals if p.place[0] != "site"}
    given = {kebab(key): value for key, value in experiment.columns.given.items()}
    lines += [f"{key} = {toml(value)}" for key, value in given.items() if key not in of_all and not is_mapping(value)]
    lines += [line for p in of_all.values() for line in p.lines]
    for site in dict.fromkeys(p.place[1] for p in proposals if p.place[0] == "site"):
        mine = [p for p in proposals if p.place[:2] == ("site", site)]
        lines += ["", f"[columns.site.{toml_key(site)}]", *(line for p in mine for line in p.lines)]
    return "\n".join(lines) + "\n"
