"""A record: all that a recipe has found so far, in one small file, so that it goes on elsewhere and can be verified.

Gzipped lines of JSON: the recipe; every comparison with its settings, then its finished runs; values of `Bench.once`.
"""

import contextlib
import csv
import gzip
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, StringConstraints, ValidationError
from safetensors.numpy import save_file

from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.base.system import move
from polyfed.base.text import unmarked
from polyfed.report.style import write_atomically
from polyfed.runs import schema as reading
from polyfed.runs.numbers import Numbers
from polyfed.runs.ownership import MARK, sealed, unsealed
from polyfed.studies.compare import compare
from polyfed.studies.jobs import read_result, whole
from polyfed.studies.verify import RECORDED, Verdict, compared
from polyfed_papers.recipes import find
from polyfed_papers.recipes.recipe import Bench, Size, same_experiment

NAME = "record.jsonl.gz"
PART = r"[^./\\\x00][^/\\\x00]*"  # of a path that stays inside its folder
Table = dict[str, Any]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True)


class About(_Line):
    """The first line."""

    record: Literal[1]
    recipe: str
    scale: Size
    rehearsal: bool
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)]
    device: str
    portable: bool = False

    def __str__(self) -> str:
        return f"{self.recipe} {self.scale}{' rehearsal' * self.rehearsal}{' portable' * self.portable}"


class _Compared(_Line):
    comparison: Annotated[str, StringConstraints(pattern=f"^{PART}(/{PART})*$")]
    settings: Table


class _Run(_Line):
    run: Annotated[str, StringConstraints(pattern=f"^{PART}(/{PART})+$")]
    config: Table
    summary: Table
    history: list[Table]
    clients: dict[str, list[int | float | str | None]]
    common: list[Table] | None = None
    about: Table | None = None
    scores: dict[str, list[int | float]] | None = None


class _Kept(_Line):
    kept: Annotated[str, StringConstraints(pattern=f"^{PART}$")]
    value: Any


KINDS: dict[str, type[_Line]] = {"record": About, "comparison": _Compared, "run": _Run, "kept": _Kept}


class Record(NamedTuple):
    """A record that was read and checked."""

    path: Path
    about: About
    lines: Sequence[_Line]

    @property
    def runs(self) -> list[str]:
        """KEY/LABEL-seedK of every run."""
        return [line.run for line in self.lines if isinstance(line, _Run)]

    @property
    def values(self) -> list[str]:
        """Keys of all values of `Bench.once`."""
        return [line.kept for line in self.lines if isinstance(line, _Kept)]


def load(path: Path) -> Record:
    """Read a record. Raises RunError with the line and what is wrong in it."""
    try:
        texts = gzip.decompress(path.read_bytes()).decode().rstrip("\n").split("\n")
    except (OSError, EOFError, zlib.error, ValueError) as e:
        raise RunError(f"{path}: not a readable record of a recipe ({reason(e)})") from None
    first, *lines = [_line(path, number, text) for number, text in enumerate(texts, 1)]
    if not isinstance(first, About) or any(isinstance(line, About) for line in lines):
        raise RunError(f"{path}: not a record of a recipe: its first line, and no other, must say of which")
    return Record(path, first, lines)


def _line(path: Path, number: int, text: str) -> _Line:
    try:
        found = json.loads(text)
        return next(kind for key, kind in KINDS.items() if key in found).model_validate(found)
    except ValidationError as e:
        first = e.errors()[0]
        problem = "expected a path inside the folder" if first["type"] == "string_pattern_mismatch" else first["msg"]
        where = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: line {number}: {where}: {problem[:1].lower()}{problem[1:]}") from None
    except (ValueError, TypeError, StopIteration, RecursionError):
        raise RunError(f"{path}: line {number}: expected {' or '.join(KINDS)}, as JSON") from None


# ---- from a folder, and into one -------------------------------------------------------------------------------------


def pack(bench: Bench, recipe: str) -> Path:
    """Write the record of a bench's folder into it."""
    folder, lines, scored = bench.folder, list[Table](), find(recipe).scored
    about = About(record=1, recipe=recipe, scale=bench.scale, rehearsal=bench.rehearse, seeds=bench.seeds,
                  device=bench.device, portable=bench.portable)  # fmt: skip
    for path in sorted(folder.rglob("comparison.toml")):
        key = path.parent.relative_to(folder)
        if key.parts[0].startswith("."):  # results from before
            continue
        lines.append({"comparison": key.as_posix(), "settings": unsealed(path)})
        places = sorted(place for place in path.parent.glob("runs/*") if read_result(place, "", 0) is not None)
        lines += [{"run": f"{key.as_posix()}/{place.name}", **_numbers(place, scored)} for place in places]
    for path in sorted(folder.glob("kept/*.json")):
        lines.append({"kept": path.name.removesuffix(".json"), "value": json.loads(path.read_text("utf-8"))})
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (about.model_dump(), *lines))
    write_atomically(folder / NAME, gzip.compress(text.encode(), mtime=0))
    return folder / NAME


def _numbers(place: Path, scored: bool) -> Table:
    """Lines of a run folder for a record, if `scored` with every test sample's: numbers, and digests of its models."""
    summary, rows = reading.summary(place), list(csv.reader(reading.text(place / "clients.csv").splitlines()))
    kept = ("samples", summary.metric)
    found: Table = {
        "config": unsealed(place / "config.toml"),
        "summary": json.loads(reading.text(place / "summary.json")),
        "history": [json.loads(line) for line in reading.text(place / "metrics.jsonl").splitlines()],
        "clients": {
            head: cells if head == "client" else [_number(cell) for cell in cells]
            for head, *cells in zip(*rows, strict=True)
            if not head.startswith(reading.OF_SPLIT) or head.partition("_")[2] in kept
        },
    }
    if (place / "common.jsonl").exists():
        found["common"] = [json.loads(line) for line in (place / "common.jsonl").read_text("utf-8").splitlines()]
    if scored and (scores := reading.scores(place)) is not None:
        found["about"] = json.loads(reading.text(place / "federation.json"))
        terms = {name: scores[name] for name in ("counts", "id", "class", summary.metric) if name in scores}
        found["scores"] = {name: values.tolist() for name, values in terms.items()}
    return found


def _number(cell: str) -> int | float | str | None:
    """A cell of a table; Python's text of a float gives the same float again, which pandas' reader does not promise."""
    try:
        return json.loads(cell) if cell else None
    except ValueError:
        return cell


def unpack(record: Record, folder: Path) -> None:
    """Put what a record has and the folder lacks into it, as if the recipe had computed it there."""
    for line in record.lines:
        _write(record, line, folder)


def _at(line: _Line, folder: Path) -> Path:
    """What a line becomes in a folder."""
    if isinstance(line, _Compared):
        return folder / line.comparison / "comparison.toml"
    if isinstance(line, _Run):
        return _place(folder, line.run)
    assert isinstance(line, _Kept)
    return folder / "kept" / f"{line.kept}.json"


def _write(record: Record, line: _Line, folder: Path) -> None:
    """Write what a line becomes, unless it is there."""
    path = _at(line, folder)
    if isinstance(line, _Compared):
        same_experiment(path.parent, line.settings)
    if path.exists():
        return
    if isinstance(line, _Compared):
        write_atomically(path, _toml(record, line.comparison, line.settings))
        (path.parent / MARK).touch()
    elif isinstance(line, _Run):
        _unpack(record, line, path)
    elif isinstance(line, _Kept):
        write_atomically(path, json.dumps(line.value, indent=1).encode())


def _place(folder: Path, run: str) -> Path:
    """The folder of a run, by its name in the record."""
    key, _, name = run.rpartition("/")
    return folder / key / "runs" / name


def _unpack(record: Record, line: _Run, place: Path) -> None:
    """A run folder with all that a recipe reads, checked as any other; it appears whole."""
    draft, columns = place.with_name(f".{place.name}.draft"), line.clients
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    names = [unmarked(str(name)) for name in columns.get("client", [])]
    (draft / "config.toml").write_bytes(_toml(record, line.run, line.config))
    about = line.about or {"clients": [{"name": n} for n in names], "classes": None}
    (draft / "federation.json").write_bytes(json.dumps(about).encode())
    if line.scores is not None:
        exact = {"counts": np.int64, "id": np.int64, "class": np.int64}
        terms = {name: np.array(values, exact.get(name, np.float32)) for name, values in line.scores.items()}
        save_file(terms, draft / "scores.safetensors")
    with (draft / "clients.csv").open("w", encoding="utf-8", newline="") as f:
        csv.writer(f, lineterminator="\n").writerows([list(columns), *zip(*columns.values(), strict=False)])
    for name, rows in (("metrics.jsonl", line.history), ("common.jsonl", line.common)):
        if rows is not None:
            (draft / name).write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())
    (draft / "summary.json").write_bytes(json.dumps(line.summary, indent=1).encode())
    try:
        if len({len(cells) for cells in columns.values()}) > 1:
            raise RunError("clients.csv: its columns differ in length")
        Numbers.of(draft)
    except RunError as e:
        shutil.rmtree(draft)
        raise RunError(f"{record.path}: {line.run}: {str(e).replace(f'{draft}{os.sep}', '')}") from None
    move(draft, place)


def _toml(record: Record, name: str, table: Table) -> bytes:
    try:
        return sealed(tomli_w.dumps(table)).encode()
    except TypeError as e:
        raise RunError(f"{record.path}: {name}: {e}") from None


# ---- one run again ---------------------------------------------------------------------------------------------------


class _Over(Exception):
    """All runs that were asked for have been trained."""


class Again(Bench):
    """A bench that reads a record and trains only the runs asked for, each beside its own.

    What the recipe reads is put into the folder when it is read: a record may have thousands of runs.
    """

    def __init__(
        self, record: Record, asked: Iterable[str], folder: Path, data_dir: str | Path | None,
        tell: Callable[[str, Verdict], None],
    ):  # fmt: skip
        about = record.about
        super().__init__(
            folder, about.scale, about.seeds, data_dir, about.device, None, about.rehearsal, record.path, about.portable
        )
        self.asked, self.tell, self.about = list(asked), tell, about
        self.source, self.lines = record, {_at(line, folder): line for line in record.lines}
        for name in self.asked:
            self._there(_place(folder, name))

    def wants(self, part):
        return any(name.startswith(f"{part}/") for name in self.asked)

    def compare(self, key, model, federation, algorithms, *, seeds=None, **settings):
        if not callable(algorithms):
            which = self.seeds if seeds is None else seeds
            self._there(self.folder / key / "comparison.toml")
            self.check(key, algorithms, which, settings)
            runs = {f"{key}/{label}-seed{seed}": (label, seed) for seed in which for label in algorithms}
            for name in [name for name in runs if name in self.asked]:
                label, seed = runs[name]
                self._train(name, model, federation, {label: algorithms[label]}, seed, settings)
            for name in runs:
                self._known(name, _place(self.folder, name))
        return super().compare(key, model, federation, algorithms, seeds=seeds, **settings)

    def _train(self, name, model, federation, method, seed, settings) -> None:
        """Train one run again, in chunks as large as then, and say what comes out."""
        before = _place(self.folder, name)
        config = unsealed(before / "config.toml")
        plan: Table = config.get("plan", {})
        given = self.where | settings | {k: plan[k] for k in ("chunk", "workers") if k in plan}
        with tempfile.TemporaryDirectory() as out:
            whole(compare(model, federation, method, seeds=[seed], out=out, keep=False, report=False, **given))
            self.tell(name, compared(before, Path(out) / "runs" / before.name, config, RECORDED))
        self.asked.remove(name)
        if not self.asked:
            raise _Over

    def _there(self, path: Path) -> bool:
        """True where the folder has this path, or the record, which then writes it."""
        if path in self.lines:
            _write(self.source, self.lines[path], self.folder)
        return path.exists()

    def _known(self, name: str, path: Path) -> None:
        if not self._there(path):
            raise RunError(
                f"{self.record}: has no {name}, which comes before {self.asked[0]}; complete it first with: "
                f"polyfed reproduce {self.about.recipe} --scale {self.about.scale} --from {self.record}"
            )

    def all_of(self, tasks):
        return [task() for _, _, task in tasks]

    def trial(self, key, compute):
        return compute()

    def once(self, key, compute):
        self._known(key, self.folder / "kept" / f"{key}.json")
        if key in self.asked:
            before, now = super().once(key, compute), super().once(f"{key}-again", compute)
            same = json.dumps(before) == json.dumps(now)
            self.tell(
                key, Verdict({"value": "equal" if same else f"{short(before)} in the record, {short(now)} here"}, {})
            )
            self.asked.remove(key)
            if not self.asked:
                raise _Over
        if any(name.startswith(f"{key}/") for name in self.asked):
            with contextlib.suppress(RunError):  # of a choice that was made otherwise: said at the end
                compute()  # the trials of a choice
        return super().once(key, compute)


def verify(path: Path, only: str | None, data_dir: str | Path | None, tell: Callable[[str, Verdict], None]) -> None:
    """Make recorded runs again by their recipe, one (only: KEY/LABEL-seedK) or all, and tell the verdicts.

    A record without runs has values, each of them by its key.
    """
    record = load(path)
    recipe, names = find(record.about.recipe), record.runs or record.values
    if only is not None and only not in names:
        form = "KEY/LABEL-seedK" if record.runs else "the key of a value"
        raise ConfigError(f"--run: found {only!r}{closest(only, names)}, expected {form} of {path}")
    if not names:
        raise RunError(f"{path}: a record without runs")
    with tempfile.TemporaryDirectory() as folder:
        bench = Again(record, names if only is None else [only], Path(folder), data_dir, tell)
        try:
            recipe.run(bench)
        except _Over:
            return
    raise RunError(f"{path}: {bench.asked[0]}: {recipe.name} trains no such run")
