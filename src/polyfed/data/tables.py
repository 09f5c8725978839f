"""A folder with one CSV file per site as a data set: which column is what, and what stands in the way, all at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.base.arguments import checked
from polyfed.base.arithmetic import word
from polyfed.base.columns import CLASSES, DEFAULTS, DROP_ROWS, EVERY, NEXT, STRATIFIED, Columns
from polyfed.base.errors import ConfigError, DataError, Fault, Faults, closest, few
from polyfed.base.part import CHECK, Audit, pasted
from polyfed.base.plugins import sibling
from polyfed.base.settings import is_mapping
from polyfed.base.text import nfc
from polyfed.data.csv_files import USABLE, Column, Sheet, declared, sheet_of, survey
from polyfed.data.dataset import Dataset
from polyfed.data.federation import AIM, READERS, Federation
from polyfed.data.intake import names_of
from polyfed.data.preparation import Input, Preparation, Settled
from polyfed.data.prepare import GIVEN, POOLED
from polyfed.data.raw import Text, raw_of
from polyfed.data.readers import TABLES, files_of, is_url
from polyfed.data.repairs import by_site, mended, plain, read, read_all

ROWS = "another value in every row, so it numbers or names the rows (columns.numbers or categories takes it in)"
OWN = "{what} standardised by each client with the mean and variance of its own training rows"
LISTED = 6  # names in a note
PARTS = {"train": 0, "training": 0, "validation": 1, "valid": 1, "val": 1, "dev": 1, "test": 2, "testing": 2}
EVENT = "1 (it happened) or 0 (censored)"
NAMING = (
    "drop", "numbers", "categories", "target", "time", "event", "weights", "group", "split", "limits", "text", "image",
)  # fmt: skip


def sheets_of(
    paths: Sequence[Path | str], columns: Columns, without: Sequence[str] = ()
) -> tuple[list[Sheet], list[Fault]]:
    """The sites' tables and what is wrong with others, as `read_all` has it; or one table by its column of sites.

    Files of sites in `without` are not opened.
    """
    stems, gone = [nfc(Path(path).stem) for path in paths], {*map(nfc, without)}
    if columns.query is not None and not is_url(paths[0]):
        raise ConfigError(f"columns.query: has no effect on {paths[0]}, which is no URL of a database")
    faults = list[Fault]()
    if columns.by is None:
        check_sites(columns, [*stems, *tests_of(columns)])
        sheets, faults = read_all([p for p, name in zip(paths, stems, strict=True) if name not in gone], columns)
    elif len(paths) > 1:
        raise ConfigError(f"columns.by: found {len(paths)} files, expected one table with the rows of all sites")
    else:
        sheets = by_site(plain(paths[0], columns), columns)
        check_sites(columns, [*(s.name for s in sheets), *tests_of(columns)])
        sheets = [s for s in sheets if s.name not in gone]
    if not (sheets or faults):
        raise DataError(f"{Path(paths[0]).parent}: every client is left out, expected at least one to stay")
    return sheets, faults


def tests_of(columns: Columns) -> dict[str, Path]:
    """The files of `test_file` by name."""
    return {} if columns.test_file is None else {nfc(p.stem): p for p in files_of(Path(columns.test_file))}


def tests_for(sheets: Sequence[Sheet], columns: Columns) -> list[Sheet]:
    """What `test_file` has for each site, in the columns that some site has: one table for all, or each its own."""
    there, each = tests_of(columns), columns.test_file is not None and Path(columns.test_file).is_dir()
    if each and (lack := [s.name for s in sheets if s.name not in there]):
        found = f"found no table of {few(lack)}, expected one of each site"
        raise DataError(f"columns.test-file: {columns.test_file}: {found}")
    tests = [read(path, columns) for path in ([there[s.name] for s in sheets] if each else there.values())]
    if empty := [test.where for test in tests if not test.lines]:
        raise DataError(f"columns.test-file: {empty[0]}: found a header and no rows")
    known = {name for sheet in sheets for name in sheet.columns}
    return [replace(test, columns={n: cells for n, cells in test.columns.items() if n in known}) for test in tests]


def load_tables(paths: Sequence[Path | str], columns: Columns, single: bool, without: Sequence[str] = ()) -> Dataset:
    """The files as a data set that `partition` prepares; a `single` file is of no client in particular."""
    sheets, faults = sheets_of(paths, columns, without)
    return judged(sheets, columns, faults, str(Path(paths[0]).parent if len(paths) > 1 else paths[0])).dataset(single)


def judged(sheets: Sequence[Sheet], columns: Columns, faults: Sequence[Fault] = (), where: str = "") -> "Table":
    """The table of some sheets. Raises Faults for all that stands in its way, `faults` of reading them among it."""
    table, found = surveyed(sheets, columns, faults)
    if found or table is None:
        raise Faults(where if table is None else table.where, found)
    return table


def surveyed(
    sheets: Sequence[Sheet], columns: Columns, faults: Sequence[Fault] = ()
) -> tuple["Table | None", list[Fault]]:
    """The table of those sheets that have rows, if any, and all that stands in its way, by file."""
    empty = "found a header and no rows, so {!r} has no training samples"
    faults = [*faults, *(Fault(f"{s.where}: {empty.format(s.name)}") for s in sheets if not s.lines)]
    there, table = [sheet for sheet in sheets if sheet.lines], None
    try:
        tests = tests_for(there, columns)
        each = tests * (len(there) // max(len(tests), 1))
        table = Table(there, survey([*there, *tests], columns), columns, each) if there else None
    except DataError:
        if not faults:  # else a column may be in a file that cannot be read
            raise
    found, names = [*faults, *(table.problems() if table else ())], [Path(s.where).name for s in sheets]
    files = [fault.partition(": ")[0] for fault in found]
    place = [next((k for k, name in enumerate(names) if name in file), len(names)) for file in files]
    return table, [found[k] for k in sorted(range(len(found)), key=place.__getitem__)]


def from_tables(paths: Sequence[Path], target: str | None, task: str, **options: Any) -> Federation:
    """A federation from one table per client, or one by its column of sites; options as of `Federation.from_files`."""
    names, columns = options.pop("names", None), _asked(target, task, options)
    data = load_tables(paths, columns, single=False)
    there = data.group_names or ()
    return replace(data, group_names=names_of(names or there, len(there))).partition(**options)


READERS |= dict.fromkeys(TABLES, from_tables)


@checked
def from_frames(frames: Any, target: str | None = None, task: str = "auto", **options: Any) -> Federation:
    """A federation from one DataFrame per client, or from one with a column of sites, prepared as CSV files are.

    Parameters
    ----------
    frames : mapping or table
        Each client's name and its table, columns matched by name: a DataFrame of pandas or polars, a Table of pyarrow
        or what else speaks Arrow, or a Hugging Face data set. Or one table, with `site="COLUMN"` (or `by`).
    target : str or None
        Target column; None: the last one of the first frame.
    task : str
        As in the table [columns] of an experiment file.
    **options
        Options of the table [columns], such as drop, categories and site, and of `Dataset.partition`, such as
        test_fraction and seed.

    Returns
    -------
    Federation
        The federation, with its samples in memory.
    """
    if isinstance(options.get("site"), str):
        options["by"] = options.pop("site")
    columns, several = _asked(target, task, options), is_mapping(frames)
    if several != (columns.by is None):
        found, then = ("tables by name", "one table, for by") if several else ("one table", 'site="COLUMN" beside it')
        raise ConfigError(f"frames: found {found}, expected {then}")
    if several and not frames:
        raise DataError("frames: found none, expected one for each client")
    if several:
        each = zip(who := names_of([*frames], len(frames)), frames.values(), strict=True)
        check_sites(columns, [*who, *tests_of(columns)])
        sheets = [mended(sheet_of(f, f"client {n!r}", n, columns.drop, columns.image), columns, n) for n, f in each]
    else:
        sheets = by_site(sheet_of(frames, "rows", "", columns.drop, columns.image), columns)
        check_sites(columns, [*(s.name for s in sheets), *tests_of(columns)])
    return replace(judged(sheets, columns).dataset(single=False), name="frames").partition(**options)


def _asked(target: str | None, task: str, options: dict[str, Any]) -> Columns:
    """The table [columns]; its keys are taken out of the options."""
    given = {key: options.pop(key) for key in [*options] if key in DEFAULTS}
    return Columns(target=target, task=task, **given)  # pyrefly: ignore[bad-argument-type]


def check_sites(columns: Columns, names: Sequence[str]) -> None:
    """Raise ConfigError for repairs of a site that there is not."""
    names = [*map(nfc, names)]
    for site in columns.site:
        if site not in (*names, EVERY):
            hint = f"{closest(site, names)}; there are {few(names)}"
            raise ConfigError(f"columns.site: found repairs of {site!r}, expected those of a site{hint}")


class Table:
    """The files of all sites with their columns' contents (`found`), and what becomes of the columns."""

    advice = 'missing = "median" fills gaps'  # to those whose data have some

    def __init__(
        self, sheets: Sequence[Sheet], surveyed: Mapping[str, Column], columns: Columns, tests: Sequence[Sheet] = ()
    ):
        self.sheets, self.survey, self.columns = sheets, surveyed, columns
        self.every = [*sheets, *tests]  # of each site those to train on, then those it is tested on, where some are
        one = len({sheet.where for sheet in sheets}) == 1
        self.where = sheets[0].where if one else str(Path(sheets[0].where).parent)
        left = [name for name in sheets[0].columns if name not in columns.apart]
        self.outcome = columns.outcome or tuple(left[-1:])
        if columns.task == "tokens":
            raise ConfigError("columns.task: found tokens, expected npz files, whose y has a label for every token")
        for key in NAMING:
            value = getattr(columns, key)
            for name in [value] if isinstance(value, str) else value or ():
                if key == "split" and name == STRATIFIED:
                    continue
                if name not in surveyed:
                    hint = f"{closest(name, surveyed)}; the files have {', '.join(surveyed)}"
                    raise DataError(f"{self.where}: no column {name!r}, which columns.{key} names{hint}")
                if key != "drop" and name in columns.drop:
                    raise ConfigError(f"columns.drop: found {name!r}, which columns.{key} names too")

    @property
    def inputs(self) -> list[Column]:
        """The columns that go in, if nothing stands in the way."""
        if self.columns.raw is not None:
            return []
        out = {*self.columns.apart, *self.outcome}
        left = [c for c in self.survey.values() if c.name not in out and not c.numbers_rows]
        return [c for c in left if c.kind not in ("constant", "empty")]

    def becomes(self, column: Column) -> str:
        """Describe a column in one line."""
        if column.name in self.columns.drop:
            return "left out, as asked"
        if column.name == self.columns.raw:
            c = self.columns
            return f"text, {c.length} tokens" if c.image is None else f"images, {c.size} x {c.size}"
        if column.name == self.columns.weights:
            return "weight of the row in training"
        if column.name == self.columns.group:
            return "whose the row is: no split parts rows of one"
        if column.name == self.columns.parts:
            return "says which rows are for training, validation and test"
        if column.name in self.outcome:
            which = "time" if self.columns.time == column.name else "event"
            return which if self.columns.task == "survival" else "target"
        if self.columns.raw is not None:
            return f"left out: {self.columns.raw} goes in alone"
        if column.numbers_rows:
            return f"left out: {ROWS}"
        if column.lacking:
            return f"refused: not in {', '.join(s.where for s in column.lacking[:3])}"
        if column.kind in ("constant", "empty"):
            return "left out: one value" if column.kind == "constant" else "left out: no value"
        if column.kind not in USABLE:
            return f"refused: {column.hint}"
        gap = ", and one that says missing" if column.gaps else ""
        if column.kind == "category":
            return f"{len(column.values)} inputs, one per value{gap}"
        return f"input{gap}"

    def problems(self) -> list[Fault]:
        """List what stands in the way, a line each, and what would mend it."""
        lines = [line for name in self.outcome for line in self._of_target(self.survey[name])]
        lines += [line for c in self.inputs for line in self._of_input(c)]
        if drop := [c.name for c in self.inputs if c.kind not in USABLE]:
            listed = ", ".join(f'"{name}"' for name in drop)
            lines.append(f"leave columns out with drop = [{listed}] in [columns], or --drop {','.join(drop)}")
        if not self.inputs and self.columns.raw is None:
            lines.append("found no column to learn from, expected one or more beside the target")
        return [line if isinstance(line, Fault) else Fault(line) for line in lines]

    def _lacking(self, c: Column, role: str = "") -> Iterator[str]:
        """Sites without a column; whether they have it under another name, a package beside the core says."""
        try:
            yield from sibling("polyfed_audit.names", "names of columns:").lacking(self, c, role)
        except ConfigError:
            yield from (sheet.lacks(c.name, role) for sheet in c.lacking)

    def _of_input(self, c: Column) -> Iterator[str]:
        if c.lacking:
            yield from self._lacking(c)
        if c.kind not in USABLE:
            held, semicolon, then = c.hint.partition(";")
            yield f"column {c.name!r} holds {held}{_odd(c)}{semicolon and ','}{then}"
        elif c.gap and self.columns.missing == "refuse":
            where, cell = c.gap
            yield f"{where}: found {cell!r}, a gap ({c.gaps} of {c.cells} cells); {self.advice}"

    def _of_target(self, c: Column) -> Iterator[str]:
        """Say what is wrong with the column of the target, or of times or events."""
        task, labels = self.columns.task, self.columns.labels
        if task == NEXT and not c.lacking:  # a text of no token is found where it is read
            return
        if c.lacking:
            yield from self._lacking(c, ", the target")
        elif c.gap:
            where, cell = c.gap
            line = f"{where}: found {cell!r}, expected a target ({c.gaps} of {c.cells} rows have none; leave them out"
            then = (
                ', as missing-target = "drop" does)' if self.columns.outcome else "); name another column with --target"
            )
            yield Fault(f"{line}{then}", {"missing-target": "drop"} if self.columns.outcome else None)
        elif labels is not None and c.name != self.columns.time:
            for sheet in self.every:
                if len(wrong := np.flatnonzero(sheet.positions(c.name, labels) < 0)):
                    cell = sheet.columns[c.name][wrong[0]]
                    near = f"{closest(cell, labels)}, expected one of {', '.join(labels)}"
                    yield f"{sheet.at(wrong[0], c.name)}: found {cell[:40]!r}{near}"
        elif task in ("regression", "survival") and c.odd is not None:
            expected = EVENT if c.name == self.columns.event else "a number"
            yield f"{c.odd[0]}: found {c.odd[1]!r}, expected {expected}"
        elif task == "survival":
            yield from self._impossible(c)
        elif task == "binary" and len(c.values) != 2:
            yield f"target {c.name!r}: found {len(c.values)} different values ({c.shown}), expected two"
        elif c.kind == "constant" and task in ("auto", *CLASSES) and (c.range is None or c.whole):
            yield f"target {c.name!r}: found {c.shown} in every row of every file, expected two classes or more"
        elif c.kind not in USABLE and c.kind != "constant" and task not in CLASSES:
            hint, odd = c.hint.partition(";")[0], _odd(c)
            yield f"target {c.name!r} holds {hint}{odd}; name another column with --target, or state the task"
        elif (classes := self.labels) is not None and self.columns.classes not in (None, len(classes)):
            expected = f"{self.columns.classes}, as columns.classes says"
            yield f"target {c.name!r}: found {len(classes)} classes ({c.shown}), expected {expected}"

    def _impossible(self, c: Column) -> Iterator[Fault]:
        """Times below 0, and events that are not 0 or 1, by site."""
        event = c.name == self.columns.event
        for sheet in self.sheets:
            values = sheet.numbers(c.name)
            wrong = ~np.isin(values, (0, 1)) if event else values < 0
            if wrong.any():
                row, rows = int(wrong.argmax()), f"{wrong.sum()} of {len(values)} rows"
                how: dict[str, Any] = {c.name: {"1": "0", "2": "1"}} if event else {DROP_ROWS: f"{word(c.name)} < 0"}
                repair = {"site": {sheet.name: how}} if not event or np.isin(values, (1, 2)).all() else {}
                expected = EVENT if event else "a time of 0 or more"
                line = f"{sheet.at(row, c.name)}: found {values[row]:g}, expected {expected} ({rows})"
                yield Fault(pasted(line, repair), repair)

    @property
    def labels(self) -> list[str] | None:
        """The classes in their order, where they are stated or texts; None for numbers."""
        c, columns = self.survey[self.outcome[-1]], self.columns
        numeric = not c.order and c.range is not None and c.kind in ("number", "binary", "constant")
        if columns.labels is not None or numeric or columns.task in ("regression", "survival", NEXT):
            return columns.labels
        return list(c.values)

    @cached_property
    def audit(self) -> Audit:
        """Differences between the sites, by a package beside the core; none for files whose rows are elsewhere."""
        if self.columns.raw is not None or not any(sheet.lines for sheet in self.sheets):
            return Audit()
        try:
            return sibling("polyfed_audit.findings", "the audit between sites is skipped: it").audit(self)
        except ConfigError as e:
            return Audit(skipped=str(e))

    # as a data set

    def preparation(self) -> Preparation:
        """Preparation of the rows before anything is learnt."""
        inputs = tuple(
            Input(
                c.name, c.values if c.kind == "category" else None, declared=declared(self.columns, c.name) is not None
            )
            for c in self.inputs
        )
        c = self.columns
        standardise = "none" if c.raw is not None else c.standardise or "pooled"
        return Preparation(
            inputs, ", ".join(self.outcome), None, c.missing or "median", c.unseen, standardise, tuple(c.gaps),
            c.task == "survival", repairs=c.site, limits=tuple(c.limits), raw=raw_of(c),
        )  # fmt: skip

    def settled(self, targets: Mapping[str, np.ndarray]) -> tuple[Settled, np.ndarray]:
        """What clients with these targets [N] have in common, and the targets end to end, their classes numbered."""
        blank, c = self.preparation(), self.columns
        labels = None if c.task == "survival" else self.labels
        if blank.tokens is not None:
            settled = Settled(blank.shape, blank.tokens, None, True, tokens=blank.tokens, preparation=blank)
            return replace(settled, notes=self.notes(blank, None)), np.zeros(0)
        checked = Federation.from_arrays(
            [(np.zeros((len(y), 1)), y) for y in targets.values()],
            names=[*targets], classes=len(labels) if labels else c.classes, test_fraction=0.0, task=c.kind,
        )  # fmt: skip
        classes, numbered = checked.classes, checked.meta.get("labels")
        if classes is None and c.split == STRATIFIED:
            raise ConfigError("columns.split: found stratified, expected a column or none for a regression")
        if labels is None and classes is not None:
            labels = [str(v) for v in numbered or range(classes)]
        prepared = blank if labels is None else replace(blank, labels=tuple(labels))
        settled = Settled(
            prepared.shape, classes or 1, classes, isinstance(prepared.raw, Text), numbered and tuple(numbered),
            (*self.notes(prepared, classes), *checked.notes), preparation=prepared,
        )  # fmt: skip
        return settled, checked.train.y.numpy()

    def dataset(self, single: bool) -> Dataset:
        """The data set; a `single` file is of no client in particular. Raises DataError for wrong targets."""
        blank, c = self.preparation(), self.columns
        if single and len(self.every) > 1:
            raise ConfigError("columns.test-file: found one, expected a table for each site, or columns.by")
        texts = [text_ids(s, blank.raw) for s in self.every] if isinstance(blank.raw, Text) and blank.tokens else None
        # values that differ from site to site are all known here; those of test rows alone are forgotten in `fitted`
        codes = [*map(blank.codes, self.every)] if texts is None else [np.zeros((len(of), 1)) for of in texts]
        names, sizes = [sheet.name for sheet in self.sheets], [len(sheet.lines) for sheet in self.every]
        if len(set(names)) < len(names):
            raise DataError(f"{self.where}: two files are called {next(n for n in names if names.count(n) > 1)!r}")
        who = [*names, *(f"{name}, test" for name in names)][: len(sizes)]
        settled, y = self.settled({} if texts else dict(zip(who, self.targets(), strict=True)))
        by = self._cut(sizes)
        meta: dict[str, Any] = {"columns": [i.name for i in blank.inputs] if c.raw is None else [c.raw]}
        meta |= {} if settled.numbered is None else {"labels": [*settled.numbered]}
        meta |= {"audit": kept} if (kept := self.audit.kept) else {}
        return Dataset(
            name=Path(self.where).stem if single else Path(self.where).name,
            x=np.concatenate(codes),
            y=y if texts is None else np.zeros(sum(map(len, texts))),
            classes=settled.classes,
            notes=settled.notes,
            meta=meta,
            weights=None if c.weights is None else np.concatenate([weights_of(s, c.weights) for s in self.every]),
            groups=None if single else np.repeat(np.arange(len(sizes)) % len(names), sizes),
            group_names=None if single else names_of(names, len(names)),
            preparation=settled.preparation,
            whose=by["whose"],
            strata=by["strata"],
            parts=by["given"],
            texts=None if texts is None else [*chain.from_iterable(texts)],
            tokens=settled.tokens,
        )

    def _cut(self, sizes: Sequence[int]) -> dict[str, Any]:
        """What `split_of` says of all rows."""
        cuts, n = [split_of(s, self.columns, self.outcome[-1]) for s in self.every], len(self.sheets)
        for k, cut in enumerate(cuts) if len(cuts) > n else ():
            cut["given"] = np.full(sizes[k], GIVEN.index("test" if k >= n else "train"))
        for sheet, test in zip(self.sheets, self.every[n:], strict=False):
            keys = [
                {*map(s.texts(g).key, s.texts(g).all)} for s in (sheet, test) if (g := self.columns.group) is not None
            ]
            if keys and (both := keys[0] & keys[1]):
                raise DataError(
                    f"{test.where}: found {min(both)!r}, whose rows {sheet.name} trains on", self.columns.group or ""
                )
        return {key: None if cuts[0][key] is None else np.concatenate([cut[key] for cut in cuts]) for key in cuts[0]}

    def targets(self) -> list[np.ndarray]:
        """The targets of every table; of classes that are texts their positions."""
        c, columns, labels = self.survey[self.outcome[-1]], self.columns, self.labels
        if columns.task == "survival":
            return [self._survival(sheet) for sheet in self.every]
        if labels is not None:
            return [s.positions(c.name, labels) for s in self.every]
        whole = c.whole and columns.task != "regression"
        return [s.numbers(c.name).astype(np.int64 if whole else np.float64, copy=False) for s in self.every]

    def _survival(self, sheet: Sheet) -> np.ndarray:
        assert self.columns.time is not None
        assert self.columns.event is not None
        time, event = sheet.numbers(self.columns.time), sheet.numbers(self.columns.event)
        if self.columns.labels is not None:
            event = sheet.positions(self.columns.event, self.columns.labels).astype(np.float64)
        return np.stack([time, event], 1)

    def notes(self, prepared: Preparation, classes: int | None) -> tuple[str, ...]:
        """Decisions, for the report."""
        c, notes = self.columns, self._aim(prepared, classes)
        if prepared.raw is not None:
            notes.append(str(prepared.raw))
        notes += [repairs_said(site, columns) for site, columns in c.site.items()]
        if c.limits:
            where = few(c.limits, LISTED)
            notes.append(f"below a limit of detection, <a stands for a/√2, and above one >a for a: {where}")
        if gone := {sheet.name: sheet.dropped for sheet in self.sheets if sheet.dropped}:
            notes.append(f"rows without a target are left out: {few([f'{s} {n}' for s, n in gone.items()], LISTED)}")
        if gone := {sheet.name: sheet.removed for sheet in self.sheets if sheet.removed}:
            notes.append(f"rows left out by drop-rows: {few([f'{s} {n}' for s, n in gone.items()], LISTED)}")
        if c.group is not None:
            notes.append(f"rows of one {c.group} are held out together, and count as one in the intervals")
        gaps = {i.name: i.gaps for i in self.inputs if i.gaps}
        if gaps:
            cells = sum(i.cells for i in self.inputs)
            whose = "all clients'" if prepared.standardise == "pooled" else "the client's own"
            notes.append(
                f"{sum(gaps.values())} of {cells} cells are missing ({few(gaps, LISTED)}): numbers are filled with the "
                f"median of {whose} training rows, and an input says which were missing"
            )
        if lost := [f"{i.name} {i.unmatched} of {i.cells}" for i in self.inputs if i.unmatched]:
            notes.append(f"cells that match none of the declared values: {few(lost, LISTED)}")
        outs = [n for n, i in self.survey.items() if i.kind in ("constant", "empty") and n not in self.outcome]
        for names, why in (([n for n in outs if n not in c.drop], "with one value at most"), (c.drop, "as asked")):
            if names:
                notes.append(f"left out {why}: {few(names, LISTED)}")
        notes += [f"{CHECK}{i.name} is left out: {ROWS}" for i in self.survey.values() if ROWS in self.becomes(i)]
        if any(i.values is not None for i in prepared.inputs):
            then = "is refused" if c.unseen == "refuse" else "counts as none of the known ones"
            notes.append(f"a category that no training row has {then}")
        if prepared.standardise != "none":
            target = " and the target are" if classes is None and c.task != "survival" else " are"
            notes.append({"pooled": POOLED, "client": OWN}[prepared.standardise].format(what=f"inputs{target}"))
        elif c.raw is None:
            notes.append("inputs are not standardised")
        notes += self.audit.lines
        for i in (*self.inputs, *(self.survey[name] for name in self.outcome)):
            notes += self._odd_values(i)
        return tuple(notes)

    def _aim(self, prepared: Preparation, classes: int | None) -> list[str]:
        """What is predicted, and how its classes are matched."""
        c, target, free = self.columns, prepared.target, self.columns.labels is None and classes is not None
        if prepared.tokens is not None:
            return [f"{AIM}{target}, the token that follows each, of {prepared.tokens}"]
        last = "" if c.outcome else " (the last column)"
        kind = "survival" if c.task == "survival" else "a regression" if classes is None else f"{classes} classes"
        named = f": {', '.join(prepared.labels)}" if prepared.labels and len(prepared.labels) <= 10 else ""
        order = self.survey[self.outcome[-1]].order if free else None
        notes = [f"{AIM}{target}{last}, {kind}{named}{', in the order of the data' if order else ''}"]
        match = f"sites have the classes of {target} in different orders; they match by name, see labels"
        return [*notes, match] if order == () else notes

    def _odd_values(self, i: Column) -> Iterator[str]:
        """What a reader may want to correct in a column's values."""
        folded = [v.casefold() for v in i.values] if i.kind == "category" else []
        if len(set(folded)) < len(folded):
            twice = [v for v in i.values if folded.count(v.casefold()) > 1]
            yield f"values of {i.name} that differ in case alone are taken for different: {few(twice, LISTED)}"
        if i.kind == "category" and i.respelt:
            yield f"values of {i.name} that a site writes in several ways (as 1 and 1.0) are taken for one"
        if i.kind == "number" and i.whole and len(i.texts) == i.cells - i.gaps > 30 and i.name not in self.outcome:
            yield f"{i.name} holds a different whole number in every row: drop it if it numbers the rows"


def text_ids(sheet: Sheet, raw: Text) -> list[np.ndarray]:
    """The ids of each of a site's texts. Raises DataError for a text of no token."""
    sheet.need(raw.column)
    return raw.ids(sheet.columns[raw.column], lambda k: sheet.at(k, raw.column))


def repairs_said(site: str, columns: Mapping[str, Any]) -> str:
    """A site's repairs in one line."""

    def said(how: Any) -> str:
        texts = [f"{a} -> {b}" for a, b in how.items()] if isinstance(how, Mapping) else how
        return texts if isinstance(texts, str) else ", ".join(texts)

    repairs = "; ".join(f"{name} = {said(how)}" for name, how in columns.items())
    return f"repaired at {'every site' if site == EVERY else site}: {repairs}"


def whose_of(sheet: Sheet, column: str, role: str = "the groups", expected: str = "whose the row is") -> np.ndarray:
    """[N] the number of each row's group within its site, cells matched as labels are: 00001 and 1 are one group."""
    sheet.need(column, f", {role}")
    if (gone := sheet.missing(column)).any():
        raise DataError(f"{sheet.at(int(gone.argmax()), column)}: found a gap, expected {expected}", column)
    texts, groups = sheet.texts(column), dict[str, int]()
    return np.array([groups.setdefault(texts.key(t), len(groups)) for t in texts.all], dtype=np.int64)[texts.at]


def split_of(sheet: Sheet, columns: Columns, outcome: str) -> dict[str, Any]:
    """What decides the parts of a site's rows, [N] each: whose they are, their class, the part that they are given."""
    strata = whose_of(sheet, outcome, "the classes", "a class") if columns.split == STRATIFIED else None
    whose = None if columns.group is None else whose_of(sheet, columns.group)
    if (column := columns.parts) is None:
        return {"whose": whose, "strata": strata, "given": None}
    sheet.need(column, ", the split")
    texts = sheet.texts(column)
    given = np.array([PARTS.get(text.lower(), -1) for text in texts.all])[texts.at]
    if (wrong := given < 0).any():
        row = int(wrong.argmax())
        found = f"found {sheet.columns[column][row][:40]!r}, expected {', '.join(GIVEN)}"
        raise DataError(f"{sheet.at(row, column)}: {found}", column)
    if whose is not None and len({*zip(whose.tolist(), given.tolist(), strict=True)}) > whose.max() + 1:
        raise DataError(f"{sheet.where}: rows of one {columns.group} are in several parts of {column}", column)
    return {"whose": whose, "strata": strata, "given": given}


def _odd(c: Column) -> str:
    """The first cell that is no number, and its place."""
    return f" ({c.odd[1]!r} in {c.odd[0].partition(', column')[0]})" if c.odd is not None else ""


def weights_of(sheet: Sheet, column: str) -> np.ndarray:
    """[N] the weights of a site's rows. Raises DataError for one that is no number of 0 or more."""
    sheet.need(column, ", the weights")
    weights = sheet.numbers(column)
    if len(wrong := np.flatnonzero(~(weights >= 0))):
        cell = sheet.columns[column][wrong[0]][:40]
        raise DataError(f"{sheet.at(wrong[0], column)}: found {cell!r}, expected a weight of 0 or more", column)
    return weights
