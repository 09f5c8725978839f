"""Settings of a site's table: [columns] of an experiment file, keywords of `data.load(folder, ...)`, and options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from polyfed.base.arithmetic import arithmetic, condition
from polyfed.base.errors import ConfigError
from polyfed.base.settings import Configured, is_mapping, setting, settings_of
from polyfed.base.text import nfc
from polyfed.base.values import Limits, Words, shown

NAMES = Annotated[list[str], Words("a list of columns")]
VALUES = Annotated[Mapping[str, list[str]], Words("a table with the values of each")]
TEXTS = Annotated[list[str], Words("a list of texts")]
REPAIRS = Annotated[
    Mapping[str, Mapping[str, str | list[str] | Mapping[str, str | float]]],
    Words("a table for each site: arithmetic of x, units, or a table of texts, by column; rename, missing, drop-rows"),
]
CLASSES = ("binary", "classes", "classification")
NEXT = "next-token"  # the task of a language model
# in a site's table of repairs: of its file, and names of columns that are repaired otherwise
ENCODING, RENAME, MISSING, DROP_ROWS = "encoding", "rename", "missing", "drop-rows"
EVERY = "*"  # whose repairs are for all sites
Repairs = Mapping[str, Any]  # a site's
STRATIFIED = "stratified"  # a split by classes
ARRAYS = ("task", "classes", "standardise", "split")  # what is for npz files too


@dataclass(frozen=True)
class Columns(Configured):
    """The columns of CSV files and how they become a model's inputs."""

    table: ClassVar[str] = "columns"

    target: str | None = setting(None, doc="Column to predict. Default: the last one of the first file.")
    task: Literal["auto", "binary", "classes", "classification", "regression", "survival", "tokens", "next-token"] = (
        setting(
            "auto",
            doc="What the target is. Default: classes for texts and whole numbers, else regression. tokens: of npz "
            "files a class for every token, -100 where none counts. next-token: of a column text, what follows each.",
        )
    )
    time: str | None = setting(None, doc="Column of times, for survival.")
    event: str | None = setting(None, doc="Column of events (1: it happened, 0: censored), for survival.")
    labels: TEXTS | None = setting(
        None, doc="Classes in their order; of two, the second is the positive one. Default: alphabetical order."
    )
    classes: Annotated[int, Limits(ge=2, le=10**6)] | None = setting(
        None, doc="Number of classes, where labels are numbers from 0 and some may not occur."
    )
    text: str | None = setting(None, doc="Column of texts, which alone go in, as tokens and a mask: [2, length].")
    tokenizer: str | None = setting(None, doc="Tokenizer of the texts: a tokenizer.json, as pretrained models have it.")
    length: Annotated[int, Limits(ge=1, le=1 << 20)] = setting(
        128, doc="Tokens of a text; longer ones are cut, shorter ones padded and masked."
    )
    pack: bool = setting(
        False,
        doc="For next-token: a client's texts follow each other and are cut into full rows, so that none is padded.",
    )
    end: str | None = setting(
        None, doc="For next-token: the token that closes a text, as the tokenizer spells it. Packing needs one."
    )
    image: str | None = setting(
        None,
        doc="Column of images, which alone go in: [3, size, size]. JPEG or PNG files, named from the CSV's folder.",
    )
    size: Annotated[int, Limits(ge=1, le=1 << 12)] = setting(64, doc="Height and width that images are resized to.")
    pixels: Literal["unit", "half", "imagenet"] = setting(
        "unit", doc="Scale of pixels: [0, 1], [-1, 1], or ImageNet's means and deviations."
    )
    weights: str | None = setting(
        None, doc="Column of sample weights: how much a row counts in its client's training loss. Default: all alike."
    )
    by: str | None = setting(
        None, doc="Column that says whose site a row is of, where one table, or the rows of a query, holds all sites."
    )
    query: str | None = setting(None, doc="What to ask a database for, in SQL, where data.name is its URL.")
    split: str | None = setting(
        None,
        doc="Column whose cells say train, validation or test; or stratified: a share of each class is held out, by "
        "test-fraction. Default: rows are held out at random.",
    )
    test_file: str | None = setting(
        None,
        doc="Table of test rows for all clients, or folder with a table for each, whose own rows are all trained on.",
    )
    drop: NAMES = setting(factory=list, doc="Columns to leave out.")
    numbers: NAMES = setting(factory=list, doc="Columns that must be numbers.")
    categories: NAMES | VALUES = setting(
        factory=list, doc="Columns of categories, whatever they look like; a table gives the values of each."
    )
    missing: Literal["median", "mean", "refuse"] | None = setting(
        None,
        doc="Gaps in inputs: median or mean of the training part, with an input that says so; or refuse them. "
        "Default: median; at real sites that standardise by pooled sums mean, which sums alone give.",
    )
    gaps: TEXTS = setting(factory=list, doc="Further texts that stand for a missing value, such as -999.")
    encoding: str | None = setting(
        None, doc="Encoding of the CSV files that are not in UTF-8, such as cp1252, latin-1 or utf-16."
    )
    site: REPAIRS = setting(
        factory=dict,
        doc='Repairs by site ("*": all), in this order: encoding = "cp1252", rename = {haemoglobin = "hb"}, missing = '
        '["lactate"] (all gaps), sex = {männlich = "m"}, limits, weight = "lb -> kg" or "x / 2.2", bmi = "weight / '
        'height ** 2", drop-rows = "time < 0".',
    )
    limits: NAMES = setting(
        factory=list, doc="Columns in which a limit of detection is a value: <5 stands for 5/√2, >200 for 200."
    )
    group: str | None = setting(
        None, doc="Column that says whose a row is, such as the patient's number: no split parts rows of one group."
    )
    missing_target: Literal["refuse", "drop"] = setting(
        "refuse", doc="Rows without a target: refuse them, or drop them, where the target is named."
    )
    unseen: Literal["zeros", "refuse"] = setting(
        "zeros", doc="A category that no training part has: zeros, none of the known ones; or refuse it."
    )
    standardise: Literal["client", "pooled", "none"] | None = setting(
        None,
        doc="Scale numbers, and the target of a regression, with training rows: pooled over clients, each client its "
        "own, or none. Default: pooled for CSV files, none for npz files.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for f in fields(self):
            if f.name not in ("tokenizer", "test_file"):  # paths
                object.__setattr__(self, f.name, _nfc(getattr(self, f.name)))
        self.require(self.labels is None or len(set(self.labels)) == len(self.labels) > 1, "labels", "distinct classes")
        two = self.task == "binary"
        self.require(not two or self.labels is None or len(self.labels) == 2, "labels", "two, for task = binary")
        self.require(not two or self.classes in (None, 2), "classes", "2 or none, for task = binary")
        if self.labels is not None:
            self.require(self.classes in (None, len(self.labels)), "classes", f"{len(self.labels)}, as many as labels")
        survival = self.task == "survival"
        for key in ("time", "event"):
            value = getattr(self, key)
            self.require(not survival or value is not None, key, "a column, for task = survival")
            self.require(survival or value is None, key, "none, or task = survival")
        self.require(not survival or self.time != self.event, "event", "another column than the time")
        self.require(not survival or self.target is None, "target", "none; survival has time and event")
        self.require(self.encoding is None or is_encoding(self.encoding), "encoding", "one such as cp1252 or utf-16")
        self.require(self.weights not in self.outcome, "weights", "another column than the target")
        self.require(
            self.group not in (*self.outcome, self.weights) or self.group is None, "group", "a column of its own"
        )
        self.require((self.text is None) == (self.tokenizer is None), "tokenizer", "one with a column text, else none")
        self.require(self.text is None or self.image is None, "image", "none, with a column text")
        self._check_tokens()
        self.require(self.by is None or self.by not in {*self.outcome, *self.apart}, "by", "a column of its own")
        self.require(self.parts is None or self.parts not in self.outcome, "split", "another column than the target")
        self.require(self.parts is None or self.test_file is None, "test_file", "none, with a column for split")
        for key in ("text", "image"):
            value = getattr(self, key)
            self.require(value is None or not survival, key, "none, for task = survival")
            self.require(value is None or value not in {self.target, *self.apart}, key, "a column of its own")
        self.require(
            self.raw is None or self.standardise in (None, "none"), "standardise", "none, for texts and images"
        )
        named = bool(self.outcome) or self.missing_target == "refuse"
        self.require(named, "missing_target", "refuse, or a target that is named")
        for site, columns in self.site.items():
            for column, repair in columns.items():
                self._check_repair(f"{self.table}.site.{site}.{column}", column, repair)

    def _check_tokens(self) -> None:
        following = self.task == NEXT
        self.require(following or not self.pack, "pack", "false, or task = next-token")
        self.require(following or self.end is None, "end", "none, or task = next-token")
        self.require(not self.pack or self.end is not None, "end", "the token that closes a text, for pack = true")
        self.require(self.task != "tokens" or self.raw is None, "task", "no tokens, with a column of texts or images")
        if following:
            self.require(self.text is not None, "text", "a column of texts, for task = next-token")
            self.require(self.length > 1, "length", "2 or more, for task = next-token")
            for key in ("target", "weights", "labels", "classes"):
                self.require(getattr(self, key) is None, key, "none, for task = next-token, whose target is the text")

    def _check_repair(self, where: str, column: str, repair: Any) -> None:
        kinds = {ENCODING: str, RENAME: Mapping, MISSING: list, DROP_ROWS: str | list}
        words = {
            ENCODING: "an encoding such as cp1252 or utf-16", RENAME: 'a table of other names, as {haemoglobin = "hb"}',
            MISSING: "a list of columns", DROP_ROWS: "a condition or a list of them",
        }  # fmt: skip
        fits = isinstance(repair, kinds.get(column, str | Mapping))
        if column == RENAME and is_mapping(repair):
            fits = len({*repair.values()}) == len(repair) and all(isinstance(v, str) for v in repair.values())
        if not fits or (column == ENCODING and not is_encoding(repair)):
            raise ConfigError(f"{where}: found {shown(repair)}, expected {words.get(column, 'arithmetic or a table')}")
        try:
            if column == DROP_ROWS:
                [*map(condition, conditions(repair))]
            elif isinstance(repair, str) and column != ENCODING:
                arithmetic(repair, column)
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from None

    @property
    def outcome(self) -> tuple[str, ...]:
        """The columns that are no inputs, as far as they are named; of a language model its texts."""
        if self.task == NEXT and self.text is not None:
            return (self.text,)
        return tuple(name for name in (self.target, self.time, self.event) if name is not None)

    @property
    def raw(self) -> str | None:
        """The column that goes in alone, of texts or images."""
        return self.text if self.image is None else self.image

    @property
    def apart(self) -> set[str]:
        """The columns that are neither inputs nor the target."""
        return {name for name in (*self.drop, self.weights, self.group, self.parts) if name is not None}

    @property
    def parts(self) -> str | None:
        """The column that says which part a row is of."""
        return None if self.split == STRATIFIED else self.split

    @property
    def kind(self) -> str:
        """The task as `Federation.from_arrays` names it."""
        names = {"classes": "classification", "survival": "regression"}
        return names.get(self.task, self.task)

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not at their defaults."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != DEFAULTS[f.name]}


def for_site(site: Mapping[str, Repairs], name: str) -> dict[str, Repairs]:
    """The tables of repairs that are for a site: its own, and that of all."""
    return {key: site[key] for key in (name, EVERY) if key in site}


def together(site: Mapping[str, Repairs], name: str) -> dict[str, Any]:
    """The repairs of a site's own table and of that of all sites; a column's own one comes first."""
    own, every = site.get(name, {}), site.get(EVERY, {})
    both = {**every, **own}
    both |= {RENAME: {**every.get(RENAME, {}), **own.get(RENAME, {})}} if RENAME in both else {}
    both |= {MISSING: [*own.get(MISSING, ()), *every.get(MISSING, ())]} if MISSING in both else {}
    dropped = [c for table in (own, every) for c in conditions(table.get(DROP_ROWS, ()))]
    return both | ({DROP_ROWS: dropped} if dropped else {})


def conditions(repair: str | Sequence[str]) -> list[str]:
    """Conditions of drop-rows."""
    return [repair] if isinstance(repair, str) else [*repair]


def _nfc(value: Any) -> Any:
    """A setting with its names of columns, sites and values in NFC."""
    if isinstance(value, Mapping):
        return {_nfc(k): _nfc(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_nfc(v) for v in value]
    return nfc(value) if isinstance(value, str) else value


def is_encoding(name: str) -> bool:
    """True for the name of a text encoding that Python knows."""
    try:
        "".encode(name)
    except (LookupError, ValueError):
        return False
    return True


DEFAULTS: dict[str, Any] = {s.name: s.default for s in settings_of(Columns)}
