"""A federation: the clients, and the samples that each of them trains, tunes and is tested on."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.arguments import checked
from polyfed.base.columns import STRATIFIED
from polyfed.base.errors import ConfigError, DataError, closest, few
from polyfed.base.plugins import sibling
from polyfed.base.settings import is_mapping
from polyfed.base.system import uncollected
from polyfed.base.text import nfc
from polyfed.base.values import Words, shown
from polyfed.compute.losses import IGNORED
from polyfed.compute.split import Split
from polyfed.data import prepare, readers
from polyfed.data.csv_files import WHOLE, canonical, in_order, matched, numbers_of, places
from polyfed.data.flat import Flat, Ragged
from polyfed.data.preparation import Settled

if TYPE_CHECKING:
    import pandas as pd

Pair = Any  # (x, y); what is none is refused with the name of its client
LEARNT = ("preparation", "scaling")  # entries of `meta` with what was learnt from training samples
SAID = (*LEARNT, "audit")  # entries of `meta` that a run folder keeps
ROWS = 20  # of clients that a notebook shows
AIM = "target "  # before what is predicted, in a note
PER_CLIENT = ("indices", "whose")  # entries of `meta` that are lists over clients; whose: of each test sample
WEIGHTED = "training samples have weights, on average 1 at every client; scores count every sample the same"
Ends = Annotated[tuple[Any, Any, Any], Words("(x, y, offsets)")]


@checked
@dataclass(frozen=True, eq=False)
class Federation:
    """`n` clients with their own samples.

    Parameters
    ----------
    train, test : Split
        Training samples, of which every client has some, and test samples.
    names : tuple of str
        [n] distinct: random draws are keyed by a client's name, not by its position.
    validation : Split or None
        Samples for tuning.
    classes : int or None
        Number of classes; None for a regression.
    clusters : array or None
        [n] int64 ground-truth groups, where known.
    meta : dict
        Data set, partition, seed and notes (caveats a user must see); where they exist, `indices` (n arrays, each
        client's samples), `split_indices` (the same by split) and arrays of a synthetic problem (`optimum`, ...).
    tokens : int or None
        Number of classes of each token, where targets are [N, T] and `classes` is None.
    shared : Split or None
        Further test rows, as of one client, on which all models are scored; see `data.with_global`.
    """

    train: Split
    test: Split
    names: tuple[str, ...]
    validation: Split | None = None
    classes: int | None = None
    clusters: np.ndarray | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    shared: Split | None = None

    def __post_init__(self) -> None:
        if (weight := self.train.weight) is None:
            return
        counts, each = self.train.counts, weight.cpu().numpy()
        owner = np.repeat(np.arange(self.n), counts)
        if len(bad := np.flatnonzero((np.bincount(owner, each > 0, self.n) == 0) & (counts > 0))):
            name = self.names[bad[0]]
            raise DataError(f"client {name!r}: found weight 0 on every training sample, expected one above 0")
        if (each == each[self.train.offsets[owner]]).all():  # which is no weighting, to the last bit
            object.__setattr__(self, "train", replace(self.train, weight=None))

    @property
    def n(self) -> int:
        """Number of clients."""
        return self.train.n

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        sizes = {"training": self.train, "validation": self.validation, "test": self.test}
        counts = ", ".join(f"{len(s.x):,} {k}" for k, s in sizes.items() if s is not None and len(s.x))
        target = f"{self.outputs} {'numbers to predict' if self.classes is None else 'classes'}"
        target = target if self.tokens is None else f"{self.tokens} classes at every token"
        shape = " x ".join(map(str, self.input_shape)) or "1"
        return f"<Federation of {self.n} clients ({few(self.names)}): {counts} samples; inputs {shape}; {target}>"

    def _repr_html_(self) -> str:
        """Show in a notebook what the federation is, a row per client, and the caveats of its data."""
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        rows = self.summary().to_html(index=False, max_rows=ROWS, border=0)
        return f"<div><p><b>{escape(repr(self)[1:-1])}</b></p>{rows}<ul>{notes}</ul></div>"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the sample axis."""
        return tuple(self.train.x.shape[1:])

    @property
    def outputs(self) -> int:
        """Numbers a model must put out per sample, or per token: the classes, or the width of the target."""
        classes = self.classes if self.tokens is None else self.tokens
        return classes if classes is not None else int(np.prod(self.train.y.shape[1:], dtype=int))

    @property
    def loss(self) -> Literal["cross-entropy", "mse", "tokens"]:
        """Name of the loss that fits the targets, for whoever names none."""
        return loss_for(self.classes, self.tokens)

    @property
    def aim(self) -> str:
        """The task as it was decided from all clients, in one line."""
        named = next((note for note in self.notes if note.startswith(AIM)), "")
        kind = "a regression" if self.classes is None else f"{self.classes} classes"
        return named or (kind if self.tokens is None else f"{self.tokens} classes at every token")

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats that belong with every result on this data."""
        return tuple(self.meta.get("notes", ()))

    def reorder(self, order: Sequence[int] | np.ndarray) -> "Federation":
        """The same federation with its clients, or some of them, in another order.

        Parameters
        ----------
        order : sequence of int
            Client `order[k]` moves to position k; a shorter order is a subset.

        Returns
        -------
        Federation
            With copies of the samples.
        """
        order = prepare.positions(order, self.n, "order")
        meta = dict(self.meta)
        for key in PER_CLIENT:
            if key in meta:
                meta[key] = [meta[key][i] for i in order]
        if "split_indices" in meta:
            meta["split_indices"] = {k: [v[i] for i in order] for k, v in meta["split_indices"].items()}
        return replace(
            self,
            train=self.train.select(order),
            test=self.test.select(order),
            validation=None if self.validation is None else self.validation.select(order),
            names=tuple(self.names[i] for i in order),
            clusters=None if self.clusters is None else self.clusters[order],
            meta=meta,
        )

    def without(self, names: Sequence[str]) -> "Federation":
        """The same federation without some of its clients; statistics computed from their samples stay as they are.

        Parameters
        ----------
        names : sequence of str
            Clients to leave out.

        Returns
        -------
        Federation
            The other clients, in their order.
        """
        names = [nfc(name) for name in names]
        for name in names:
            if name not in self.names:
                raise DataError(
                    f"no client {name!r}{closest(name, self.names)}; there are {', '.join(self.names[:20])}"
                )
        stay = [i for i, name in enumerate(self.names) if name not in names]
        if not stay:
            raise DataError("every client leaves, expected at least one to stay")
        return self.reorder(stay)

    def with_validation(self, fraction: float, seed: int = 0) -> "Federation":
        """The same federation with a share of each client's training samples moved to validation.

        Drawn per client, keyed by (seed, client name); at least one sample stays in training.

        Parameters
        ----------
        fraction : float
            Share of the training samples.
        seed : int
            Seed of the draw.

        Returns
        -------
        Federation
            A federation with a validation split.
        """
        fraction = prepare.check_fraction(fraction, "the validation fraction")
        if self.validation is not None:
            raise DataError("this federation has a validation split already")
        cut, uneven = prepare.Cut(seed, validation=fraction).each(self.names, _places(self.train), held=False)
        meta: dict[str, Any] = {**self.meta, "notes": [*self.notes, *uneven]}
        if "split_indices" in meta:
            whole = np.concatenate(meta["split_indices"]["train"])
            new = {part: [whole[at] for at in cut[part]] for part in ("train", "validation")}
            meta["split_indices"] = {**meta["split_indices"], **new}
        validation = replace(_rows(self.train, cut["validation"]), weight=None)
        return replace(self, train=_rows(self.train, cut["train"]), validation=validation, meta=meta)

    # looking at it

    def summary(self) -> "pd.DataFrame":
        """A table with one row per client: client, train, validation, test (samples), cluster (where known), and
        class_0, class_1, ... (training samples by class, for a classification).
        """
        import pandas as pd  # here, because it is slow to import

        table: dict[str, Any] = {
            "client": list(self.names),
            "train": self.train.counts,
            "validation": np.zeros(self.n, dtype=np.int64) if self.validation is None else self.validation.counts,
            "test": self.test.counts,
        }
        if self.clusters is not None:
            table["cluster"] = self.clusters
        labels = self._labels()
        if labels is not None:
            table |= {f"class_{k}": labels[:, k] for k in range(labels.shape[1])}
        return pd.DataFrame(table)

    def describe(self) -> dict[str, Any]:
        """The JSON-able description for a run folder.

        Keys: dataset, partition, seed, test, options, classes, inputs (shape of one), outputs, clients (name, train,
        validation, test, labels: training samples per class, None for a regression), clusters, notes, and where any
        exist tokens, shared (rows), the preparation of newcomers' data, and flags of the audit.
        """
        labels, none = self._labels(), np.zeros(self.n, dtype=np.int64)
        counts = [none if split is None else split.counts for split in (self.train, self.validation, self.test)]
        with uncollected():
            of_classes = [None] * self.n if labels is None else labels.tolist()
            rows = zip(self.names, *(each.tolist() for each in counts), of_classes, strict=True)
            clients = [
                {"name": name, "train": train, "validation": validation, "test": test, "labels": each}
                for name, train, validation, test, each in rows
            ]
        return (
            {
                **{key: self.meta.get(key) for key in ("dataset", "partition", "seed", "test")},
                "options": dict(self.meta.get("options", {})),
                "classes": self.classes,
                "inputs": list(self.input_shape),
                "outputs": self.outputs,
                "clients": clients,
                "clusters": None if self.clusters is None else [int(c) for c in self.clusters],
                "notes": list(self.notes),
            }
            | ({} if self.tokens is None else {"tokens": self.tokens})
            | ({} if self.shared is None else {"shared": len(self.shared.x)})
            | {k: self.meta[k] for k in SAID if k in self.meta}
        )

    def _labels(self) -> np.ndarray | None:
        """[n, classes] training samples per class, or None for regression."""
        if self.classes is None:
            return None
        owner = np.repeat(np.arange(self.n), self.train.counts)
        flat = owner * self.classes + self.train.y.cpu().numpy()
        return np.bincount(flat, minlength=self.n * self.classes).reshape(self.n, self.classes)

    # making one

    @classmethod
    def from_arrays(
        cls,
        train: Iterable[Pair] | Flat,
        test: Sequence[Pair | None] | Flat | None = None,
        validation: Sequence[Pair | None] | Flat | None = None,
        names: Sequence[str | int] | None = None,
        classes: int | None = None,
        clusters: Sequence[int] | np.ndarray | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        test_fraction: float = 0.2,
        validation_fraction: float = 0.0,
        seed: int = 0,
        task: str = "auto",
        integer_inputs: bool | None = None,
        weights: Sequence[Any] | None = None,
        split: str | None = None,
    ) -> "Federation":
        """A federation from one (x, y) pair per client: numpy arrays, tensors or lists.

        Parameters
        ----------
        train : sequence of pair
            One (x, y) per client. x: [N_i, ...] numbers, of one shape for all clients, or a dict or named tuple of such
            arrays (see `models.named`). y: [N_i] class labels, [N_i, ...] float targets of a regression, or with
            task="tokens" [N_i, T] a label for each token, -100 for those that do not count. Class labels are names (in
            the order of an ordered Categorical, else of the alphabet), integers, or floats with integer values if some
            client has integers or `classes` or `task` says so.
        test, validation : sequence of pair or None
            One entry per client; None or zero rows for a client without any.
        names : sequence of str or None
            Distinct; by default client-0, client-1, ...
        classes : int or None
            By default the largest label + 1. Without it, labels 1 to C, or -1 and 1, become 0 to C-1, with a note;
            meta["labels"] lists them, or the names of classes.
        clusters : sequence of int or None
            [n] ground-truth groups, where known.
        meta : dict or None
            More entries of `Federation.meta`.
        test_fraction : float
            Without `test`, this share of each client's samples is held out, at random, keyed by (seed, client name);
            at least one sample stays in training, and 0 leaves the test split empty.
        validation_fraction : float
            Without `validation`, likewise the share of the remaining training samples.
        seed : int
            Seed of the held-out samples.
        task : str
            "classification" or "regression" settles integers and whole floats; "auto" takes integers for labels,
            unless there are more than 20 with gaps; "binary" makes any two labels 0 and 1; "tokens": a label for each
            token, of `classes` classes, for the loss "tokens".
        integer_inputs : bool or None
            True keeps integer inputs as int64 (tokens), False makes them float32, unscaled. By default integers of 16
            bits or more are kept, and bytes and booleans become floats.
        weights : sequence or None
            Per client [N_i] weights, 0 or more, of samples in its training loss, scaled to be 1 on average: a loss over
            b samples is sum_j weight_j loss_j / b. A client still weighs as many samples as it has, and scores are
            unweighted.
        split : str or None
            "stratified": a share of each class is held out.

        Returns
        -------
        Federation
            The federation, with its samples in memory.

        Raises
        ------
        DataError
            Naming the client: NaN or infinite numbers, no samples, labels out of range, one class in the whole
            federation, duplicate names, shapes that differ, x and y of different length, arrays of objects.
        """
        flat, train = isinstance(train, Flat), train if isinstance(train, Flat) else list(train)
        n = len(train.offsets) - 1 if isinstance(train, Flat) else len(train)
        if n == 0:
            raise DataError("federation: found no client, expected at least one")
        who = names_of(names, n)
        test_fraction = prepare.check_fraction(test_fraction, "the test fraction")
        validation_fraction = prepare.check_fraction(validation_fraction, "the validation fraction")

        given = {"train": train, "test": test, "validation": validation}
        splits, facts = _checked(given, who, (integer_inputs, classes, task, weights))
        classes, tokens, labels, layout, notes = facts
        base: dict[str, Any] = {"dataset": "arrays", "partition": "natural", "seed": seed}
        base |= {"labels": labels} if labels is not None else {}
        meta = ({} if layout is None else {"layout": layout}) | dict(meta or {})
        meta["notes"] = [*meta.get("notes", ()), *notes]
        base["test"] = "given" if "test" in splits else f"own:{test_fraction:g}"
        whole, tested = splits["train"], "test" in splits
        cut = prepare.Cut(seed, test_fraction, 0.0 if "validation" in splits else validation_fraction)
        if (strata := strata_of(split, whole.y, classes)) is None:
            rows, uneven = cut.flat(who, whole.counts, not tested)
        else:
            rows, uneven = cut.each(who, _places(whole), not tested, strata=strata)
        meta["notes"] += uneven
        base |= {} if tested else {"split_indices": rows}
        train_split = whole if tested and not cut.validation and not flat else _rows(whole, rows["train"])
        held = {part: replace(_rows(whole, at), weight=None) for part, at in rows.items() if part not in splits}
        splits, clusters = held | splits, _clusters(clusters, n)
        parts = splits["test"], who, splits.get("validation"), classes, clusters, base | meta, tokens
        return cls(train_split, *parts)

    @classmethod
    def from_flat(
        cls,
        x: Any,
        y: Any,
        offsets: Any = None,
        test: Ends | None = None,
        validation: Ends | None = None,
        *,
        sites: Any = None,
        **options: Any,
    ) -> "Federation":
        """A federation of many clients from arrays that hold all their samples: bit for bit that of `from_arrays`.

        Parameters
        ----------
        x, y : array
            [N, ...] inputs and [N, ...] targets of all clients.
        offsets : array or None
            [n + 1] integers that rise from 0 to N: client i has the rows offsets[i] to offsets[i + 1].
        test, validation : tuple or None
            (x, y, offsets) of the same clients, who may have no rows there.
        sites : sequence or None
            In place of offsets, the site of each row, in any order, such as a column of a table: the clients' names,
            sorted.
        **options
            Options of `from_arrays`; `weights` is one array [N].

        Returns
        -------
        Federation
            The federation, with its samples in memory.
        """
        if (offsets is None) == (sites is None) or (sites is not None and not test is validation is None):
            raise DataError("from_flat: expected offsets, or sites without test and validation")
        train = Flat.of(x, y, offsets, "train") if sites is None else None
        if train is None:
            train, options["names"] = Flat.by(x, y, sites)
        train.check_fits()
        given = {"test": test, "validation": validation}
        others: dict[str, Any] = {key: None if of is None else Flat.of(*of, key) for key, of in given.items()}
        n = len(train.offsets)
        if wrong := next((of for of in others.values() if of is not None and len(of.offsets) != n), None):
            raise DataError(f"offsets: found {len(wrong.offsets)} numbers, expected {n} as in training")
        return cls.from_arrays(train, **others, **options)

    @classmethod
    def from_datasets(
        cls,
        train: Sequence[Any],
        test: Sequence[Any] | None = None,
        validation: Sequence[Any] | None = None,
        *,
        input: str | None = None,
        target: str | None = None,
        **options: Any,
    ) -> "Federation":
        """A federation from one torch data set per client, read once, into memory.

        Parameters
        ----------
        train : sequence of Dataset
            One torch data set per client, each item an (input, target) pair or a dict; or a Hugging Face data set.
            Labels with names (a ClassLabel; `classes` of a torch data set) are matched by name, in their order. A
            DataLoader stands for its data set, if it has no sampler and no collate_fn of its own.
        test, validation : sequence of Dataset or None
            One entry per client; None for a client without any.
        input, target : str or None
            Keys of items that are dicts, such as "image" and "label".
        **options
            Options of `from_arrays`.

        Returns
        -------
        Federation
            The federation, with its samples in memory.
        """
        who = names_of(options.get("names"), len(list(train)))

        def read(sets, split):
            return (
                None if sets is None else [_materialise(d, who[i], split, (input, target)) for i, d in enumerate(sets)]
            )

        pairs = read(train, "train")
        if not pairs:
            raise DataError("federation: found no client, expected at least one")
        return cls.from_arrays(pairs, read(test, "test"), read(validation, "validation"), **options)

    @classmethod
    def from_files(
        cls, paths: Sequence[str | Path], target: str | None = None, task: str = "auto", **options: Any
    ) -> "Federation":
        """A federation from one CSV or npz file per client; the file's stem is the client's name.

        CSV files may have texts, gaps and columns in any order; they are prepared from training rows alone. npz files
        hold x and y, and all or none of them x_test and y_test; nothing is unpickled. Images of uint8, [N, height,
        width] or [N, height, width, channels], become float32 in [0, 1], [N, channels, height, width].

        Parameters
        ----------
        paths : sequence of str or Path
            One file per client.
        target : str or None
            Target column of CSV files; None: the last one.
        task : str
            As in the table [columns]; "auto" takes texts, and targets all written as integers, for class labels.
        **options
            For CSV files names, options of the table [columns], such as drop, categories, missing, standardise and
            weights (see `polyfed config columns`), and of `Dataset.partition`, such as test_fraction and seed; for npz
            files options of `from_arrays`.

        Returns
        -------
        Federation
            The federation, with its samples in memory.
        """
        files = [Path(path) for path in paths]
        kinds = {file.suffix.lower() for file in files}
        if kinds and kinds <= READERS.keys():
            return READERS[min(kinds)](files, target, task, **options)
        if target is not None and kinds <= {".npz"}:
            raise DataError(f"target: found {target!r}, expected none for npz files, whose targets are y")
        return of_arrays(files, target, task, **options)

    @classmethod
    def from_folder(
        cls, path: str | Path, target: str | None = None, task: str = "auto", **options: Any
    ) -> "Federation":
        """A federation from a folder with one CSV or npz file per client, in the order of the file names.

        Parameters
        ----------
        path : str or Path
            The folder; see `from_files` for the formats.
        target : str or None
            Target column of CSV files; None: the last one.
        task : str
            As in `from_files`.
        **options
            Options of `from_files`.

        Returns
        -------
        Federation
            The federation, with its samples in memory.
        """
        paths = readers.client_files(path)
        if any(file.suffix.lower() == ".npz" for file in paths):
            options["meta"] = {"dataset": Path(path).name, **(options.get("meta") or {})}
        return cls.from_files(paths, target, task, **options)


def _checked(given: dict[str, Any], who: tuple[str, ...], how: tuple[Any, ...]) -> tuple[dict[str, Split], Any]:
    """The splits as `from_arrays` takes them, cast and checked; what is given end to end is checked as one client's."""
    integer_inputs, classes, task, weights = how
    offsets = {split: of.offsets for split, of in given.items() if isinstance(of, Flat)}
    given = given | {split: [(given[split].x, given[split].y)] for split in offsets}
    names = (f"{who[0]} to {who[-1]}",) if offsets else who
    named, class_names, label_notes = _by_name(given, names)
    classes = classes or (len(class_names) if class_names else None)
    parts, layout = _parts(named, names, integer_inputs)
    tokens = _tokens(parts, names, classes) if task == "tokens" else None
    classes, labels, notes = _targets(parts, names, classes, task) if tokens is None else (None, None, [])
    first = parts["train"][0]
    splits = {split: _split(pairs, first, names, split, offsets.get(split)) for split, pairs in parts.items()}
    counts = splits["train"].counts
    if not counts.all():
        raise DataError(f"client {who[int(counts.argmin())]!r} has no training samples")
    if weights is not None:
        each = ([weights], names, counts.sum(keepdims=True)) if offsets else (weights, who, counts)
        splits["train"] = replace(splits["train"], weight=_weights(*each))
        notes.append(WEIGHTED)
    return splits, (classes, tokens, class_names or labels, layout, [*label_notes, *notes])


def strata_of(split: str | None, y: Any, classes: int | None) -> np.ndarray | None:
    """[N] the classes of samples whose split is stratified, else None. Raises ConfigError for another split."""
    if split is not None and (split != STRATIFIED or classes is None):
        then = "none for a regression" if classes is None else f"{STRATIFIED} or none for arrays"
        raise ConfigError(f"columns.split: found {split!r}, expected {then}")
    return None if split is None else np.asarray(y)


READERS: dict[
    str, Callable[..., Federation]
] = {}  # of files that hold more than numbers, by ending; `tables` adds some


def of_arrays(paths: Sequence[Path], target: str | None = None, task: str = "auto", **options: Any) -> Federation:
    """A federation from files that hold numbers alone, taken as they are; the options are those of `from_arrays`."""
    clients = readers.read_clients(paths, target)
    tests = [c.test for c in clients] if any(c.test is not None for c in clients) else None
    options.setdefault("names", [c.name for c in clients])
    options["meta"] = {"dataset": "files", **(options.get("meta") or {})}
    return Federation.from_arrays([c.train for c in clients], tests, task=task, **options)


@dataclass(frozen=True, eq=False)
class Outline(Federation):
    """Clients that are elsewhere: names and numbers of samples, with zeros, which take no memory, for the samples."""

    labels: Sequence[Sequence[int]] | None = None  # [n][classes] training samples, where clients have said so
    digest: str = ""  # of the names, numbers and facts

    @classmethod
    def of(cls, names: Sequence[str], counts: Mapping[str, Sequence[int]], s: Settled, **facts: Any) -> "Outline":
        """From numbers of samples [n] by split, and what is settled."""
        split = {key: _hollow(each, s) for key, each in counts.items()}
        train, test, validation = split["train"], split["test"], split.get("validation")
        return cls(train, test, tuple(names), validation, s.classes, tokens=s.tokens, **facts)

    def _labels(self) -> np.ndarray | None:
        return None if self.labels is None else np.array(self.labels)


def loss_for(classes: int | None, tokens: int | None) -> Literal["cross-entropy", "mse", "tokens"]:
    """Name of the loss for targets of classes, of classes at every token, or of numbers."""
    return "tokens" if tokens is not None else "mse" if classes is None else "cross-entropy"


def _hollow(counts: Sequence[int], s: Settled) -> Split:
    total, shape = int(sum(counts)), s.inputs
    x = torch.zeros(1, dtype=torch.int64 if s.integers else torch.float32).view([1] * (1 + len(shape)))
    if s.tokens is not None:  # one for each number of a sample's last axis, as ids and mask are
        y = torch.zeros(1, 1).long().expand(total, shape[-1])
    else:
        y = torch.zeros(1, 1).expand(total, s.outputs) if s.classes is None else torch.arange(total) % s.classes
        y = y[:, 0] if s.classes is None and s.outputs == 1 else y
    return Split(x.expand(total, *shape), y, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))


def names_of(names: Sequence[Any] | None, n: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"client-{i}" for i in range(n))
    names = [nfc(str(name)) for name in names]
    if len(names) != n:
        raise DataError(f"names: found {len(names)} for {n} clients, expected one for each")
    for i, name in enumerate(names):
        if not name.strip() or not name.isprintable():
            raise DataError(f"client {i}: found the name {name!r}, expected a printable, non-empty one")
    if len(set(names)) < n:
        twice = next(name for name, often in Counter(names).items() if often > 1)
        raise DataError(f"two clients are called {twice!r}; names must be distinct")
    return tuple(names)


class Named(NamedTuple):
    """Labels that have names; `order` lists all that there are, where the data set has an order."""

    texts: list[str]
    order: tuple[str, ...] | None = None

    @classmethod
    def of(cls, y: Any, where: str) -> "Named | None":
        """The names among labels; None for numbers. Raises DataError for a label that is neither."""
        if isinstance(y, Named | Tensor):
            return y if isinstance(y, Named) else None
        dtype = getattr(y, "dtype", None)
        order = tuple(map(str, dtype.categories)) if getattr(dtype, "ordered", False) else None  # pyrefly: ignore[missing-attribute]
        try:
            cells = [*y] if order or np.asarray(y).dtype.kind in "OUS" else []
        except (TypeError, ValueError):  # ragged, or a single number, which is refused later
            return None
        if not order and not any(isinstance(v, str) for v in cells):
            return None
        for v in cells:
            if not (isinstance(v, str | int | np.integer | np.bool_) or (order and v == v)):
                raise DataError(f"{where}: found {shown(v)} among the labels, expected a name for every sample")
        return cls([nfc(str(v).strip()) for v in cells], order)


def _by_name(
    parts: Mapping[str, Sequence[Pair | None] | None], names: Sequence[str]
) -> tuple[dict[str, list[Pair | None] | None], list[str] | None, list[str]]:
    """(parts with numbers for labels, the classes in order if labels have names, notes).

    Names that are all numbers count as these numbers.
    """
    pairs = {split: None if given is None else [*given] for split, given in parts.items()}
    named: dict[tuple[str, int], Named] = {}
    plain: dict[str, Any] = {}  # labels that have no names
    for split, i, pair in ((s, i, p) for s, given in pairs.items() for i, p in enumerate(given or ())):
        if isinstance(pair, tuple | list) and len(pair) == 2:
            where = f"client {names[i] if i < len(names) else i!r}, {split}"
            if (labels := Named.of(pair[1], where)) is not None:
                named[split, i] = labels
            else:
                plain[where] = pair[1]
    if not named:
        return pairs, None, []
    texts = [*dict.fromkeys(t for labels in named.values() for t in (*(labels.order or ()), *labels.texts))]
    orders = [labels.order for labels in named.values() if labels.order]
    numbers = not orders and not np.isnan(numbers_of(texts)).any()
    classes, agreed = in_order(matched(texts), orders)
    if not numbers and not (orders and agreed) and (where := next((w for w, y in plain.items() if len(y)), "")):
        _, i = next(iter(named))
        raise DataError(f"{where}: labels are numbers, those of client {names[i]!r} are names; give names everywhere")
    at = places(classes)
    for (split, i), labels in named.items():
        y = [t if numbers else at[t] for t in map(canonical, labels.texts)]
        whole = not numbers or all(map(WHOLE.fullmatch, map(str, y)))
        pairs[split][i] = (pairs[split][i][0], np.array([int(v) if whole else float(v) for v in y]))  # pyrefly: ignore[unsupported-operation]
    if numbers:
        return pairs, None, []
    if len(classes) < 2:
        raise DataError(f"client {names[0]!r}: found label {classes[0]!r} alone, expected at least two classes")
    note = f"{len(classes)} classes by name: {few(classes, MANY)}"
    return pairs, classes, [note if agreed else f"{note}; their orders differ between data sets, so by the alphabet"]


def _weights(weights: Sequence[Any], names: tuple[str, ...], counts: np.ndarray) -> Tensor:
    if len(weights) != len(names):
        raise DataError(f"weights: found {len(weights)} entries for {len(names)} clients, expected one for each")
    tensors = [_tensor(w, f"client {name!r}", "weights").double() for w, name in zip(weights, names, strict=True)]
    for w, name, count in zip(tensors, names, counts, strict=True):
        if w.shape != (count,):
            raise DataError(f"client {name!r}: found weights of shape {list(w.shape)}, expected [{count}]")
        if bad := w[~(w >= 0) | w.isinf()].tolist():
            raise DataError(f"client {name!r}: found the weight {bad[0]:g}, expected numbers of 0 or more")
    return torch.cat(tensors)


def _clusters(clusters: Sequence[int] | np.ndarray | None, n: int) -> np.ndarray | None:
    if clusters is None:
        return None
    out = np.asarray(clusters)
    if out.shape != (n,) or not np.issubdtype(out.dtype, np.integer) or (out < 0).any():
        raise DataError(
            f"clusters: found shape {list(out.shape)}, expected {n} integers of at least 0, one for each client"
        )
    return out.astype(np.int64)


def _tensor(value: Any, where: str, role: str, integers: bool | None = True) -> Tensor:
    """`value` as a tensor of floats or int64, unscaled; see `from_arrays` for what becomes of integers."""
    if isinstance(value, Tensor):
        t = value.detach().cpu()
    else:
        if np.ma.is_masked(value):
            raise DataError(f"{where}: {np.ma.count_masked(value)} numbers in the {role} are masked; fill them first")
        try:
            array = np.asarray(value)
        except ValueError:
            raise DataError(f"{where}: found ragged {role}, expected the same shape for every sample") from None
        if array.dtype.kind not in "fiub":
            raise DataError(f"{where}: found {role} of dtype {array.dtype}, expected numbers")
        if array.dtype.kind == "f":
            array = array.astype(np.float64 if array.dtype.itemsize >= 8 else np.float32, copy=False)
        elif array.dtype.kind == "b":
            array = array.astype(np.uint8)
        t = torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))
    if t.is_complex():
        raise DataError(f"{where}: found complex {role}, expected real numbers")
    if not t.is_floating_point():
        whole = t.long()
        if t.dtype == torch.uint64 and (whole < 0).any():
            largest = int(whole[whole < 0].flatten()[0]) + 2**64
            raise DataError(f"{where}: found {largest} in the {role}, expected integers below 2^63")
        small = t.dtype in (torch.uint8, torch.int8, torch.bool)
        return whole if integers or (integers is None and not small) else whole.float()
    return t if t.dtype == torch.float64 else t.float()


Layout = dict[str, tuple[tuple[int, ...], bool]]  # of named inputs: shape, and whether they are whole numbers


def _unnamed(
    pairs: Sequence[Pair | None], names: Sequence[str], split: str, default: Layout | None
) -> tuple[list[Pair | None], Layout | None]:
    """Inputs given by name, side by side in one array, and its layout: None without names, `default` without any."""
    plain: list[Pair | None] = []
    layouts: list[Layout | None] = []
    for pair, name in zip(pairs, names, strict=True):
        if isinstance(pair, tuple | list) and len(pair) == 2:
            x, layout = _side_by_side(pair[0], f"client {name!r}, {split}")
            pair = (x, pair[1])
            layouts.append(layout)
            if layout != layouts[0]:
                which = f"those of client {names[0]!r} {_named(layouts[0])}"
                raise DataError(f"client {name!r}, {split}: inputs are {_named(layout)}, {which}")
        plain.append(pair)
    return plain, layouts[0] if layouts else default


def _parts(
    named: Mapping[str, Sequence[Pair | None] | None], who: tuple[str, ...], integer_inputs: bool | None
) -> tuple[dict[str, list[tuple[Tensor, Tensor]]], Layout | None]:
    """Every client's pair in each split that is given, and the layout of inputs that have names, one for all splits."""
    train, layout = _unnamed(named["train"] or [], who, "train", None)
    parts = {"train": [pair_of(pair, name, "train", integer_inputs) for pair, name in zip(train, who, strict=True)]}
    for (x, _), name in zip(parts["train"], who, strict=True):
        if len(x) == 0:
            raise DataError(f"client {name!r} has no training samples")
    x, y = parts["train"][0]
    for split in ("test", "validation"):
        if (given := named[split]) is not None:
            if len(given) != len(who):
                raise DataError(f"{split}: found {len(given)} entries for {len(who)} clients, expected one for each")
            given, other = _unnamed(given, who, split, layout)
            if other != layout:
                raise DataError(f"{split}: the inputs are {_named(other)}, those of training {_named(layout)}")
            each = zip(given, who, strict=True)
            parts[split] = [
                (x[:0], y[:0]) if p is None else pair_of(p, name, split, integer_inputs) for p, name in each
            ]
    return parts, layout


def _named(layout: Layout | None) -> str:
    return "one array" if layout is None else ", ".join(f"{k} {[*shape]}" for k, (shape, _) in layout.items())


def _side_by_side(x: Any, where: str) -> tuple[Any, Layout | None]:
    """[N, numbers of all inputs] and their layout, or what was given, of one array."""
    x = x._asdict() if hasattr(x, "_asdict") else x
    if not is_mapping(x):
        return x, None
    arrays = {str(name): _tensor(a, where, f"inputs {name!r}") for name, a in x.items()}
    if not arrays or any(a.dim() == 0 for a in arrays.values()):
        raise DataError(f"{where}: found {'no inputs' if not arrays else 'a single number'}, expected arrays by name")
    if len({len(a) for a in arrays.values()}) > 1:
        raise DataError(f"{where}: inputs differ in length: {', '.join(f'{k} {len(a)}' for k, a in arrays.items())}")
    layout = {name: (tuple(a.shape[1:]), not a.is_floating_point()) for name, a in arrays.items()}
    kinds = {a.dtype for a in arrays.values()}
    dtype = max(kinds - {torch.int64}, key=lambda d: d.itemsize, default=torch.int64)
    for name, a in arrays.items():
        if dtype == torch.float32 and not a.is_floating_point() and a.numel() and a.abs().max() > 2**24:
            raise DataError(f"{where}: found {int(a.abs().max())} in the inputs {name!r}, expected at most 2^24")
    return torch.cat([a.to(dtype).reshape(len(a), -1) for a in arrays.values()], 1), layout


def pair_of(pair: Any, name: str, split: str, integer_inputs: bool | None = None) -> tuple[Tensor, Tensor]:
    """One client's samples as `from_arrays` takes them. Raises DataError, naming the client."""
    where = f"client {name!r}, {split}"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{where}: found a {type(pair).__name__}, expected a pair (x, y)")
    x, y = _tensor(pair[0], where, "inputs", integer_inputs), _tensor(pair[1], where, "targets")
    if x.dim() < 1 or y.dim() < 1 or len(x) != len(y):
        length = [len(t) if t.dim() else "a single number" for t in (x, y)]
        raise DataError(f"{where}: x and y differ in length: {length[0]} against {length[1]}")
    if x.dim() == 1 and len(x):
        raise DataError(f"{where}: found inputs of shape {list(x.shape)}, expected [samples, features, ...]")
    for t, role in ((x, "inputs"), (y, "targets")):
        bad = int((~torch.isfinite(t)).sum()) if t.is_floating_point() and not t.sum().isfinite() else 0
        if bad:
            raise DataError(f"{where}: {bad} of {t.numel()} numbers in the {role} are NaN or infinite")
    return x, y


MANY = 20  # classes that a data set may have, gaps and all, without saying so
MOST = 10**6  # classes that any may have


def _targets(
    parts: dict[str, list[tuple[Tensor, Tensor]]], names: tuple[str, ...], classes: int | None, task: str
) -> tuple[int | None, list[int] | None, list[str]]:
    """Cast, check and number the labels in `parts`: (classes or None, the labels that became 0, 1, ..., notes)."""
    if task not in readers.TASKS:
        raise DataError(f"task: found {task!r}, expected one of {', '.join(readers.TASKS)}")
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 2):
        raise DataError(f"classes: found {classes!r}, expected an integer of at least 2 (None for regression)")
    if classes is not None and task == "regression":
        raise DataError(f"classes: found {classes} with task='regression', expected None")
    every = [y for pairs in parts.values() for _, y in pairs if len(y)]
    to_labels = classes is not None or task in ("binary", "classification")
    if task == "auto" and not all(y.is_floating_point() for y in every):  # 1.0 is 1 where someone has integers
        to_labels = to_labels or all((y == y.round()).all() for y in every)
    integers = to_labels or not parts["train"][0][1].is_floating_point()
    for split, pairs in parts.items():
        for i, (x, y) in enumerate(pairs):
            where = f"client {names[i]!r}, {split}"
            y = whole_labels(y, where, classes) if to_labels else y
            if task == "regression" and not y.is_floating_point():
                y = y.float()
            if not len(y):
                pairs[i] = (x, y)
                continue
            if task == "auto" and classes is None and integers == y.is_floating_point():
                kinds = ("integers", "floats") if integers else ("floats", "integers")
                raise DataError(
                    f"{where}: targets are {kinds[1]}, those of client {names[0]!r} are {kinds[0]}; "
                    "give integers everywhere for classes, floats everywhere for regression"
                )
            if not y.is_floating_point():
                if y.dim() == 2 and y.shape[1] == 1:
                    y = y[:, 0]
                if y.dim() != 1:
                    then = "; task='tokens' takes one for every token" if y.dim() == 2 else ""
                    raise DataError(
                        f"{where}: found labels of shape {list(y.shape)}, expected one integer per sample{then}"
                    )
            pairs[i] = (x, y)
    if parts["train"][0][1].is_floating_point():
        return None, None, _whole(torch.cat([y.flatten() for _, y in parts["train"]])) if task == "auto" else []
    return _labels(parts, names, classes, task)


def whole_labels(y: Tensor, where: str, classes: int | None = None) -> Tensor:
    """Labels as integers. Raises DataError for one that is none."""
    if not y.is_floating_point():
        return y
    if (y != y.round()).any():
        value = float(y[y != y.round()].flatten()[0])
        allowed = "integers are expected" if classes is None else f"labels 0 to {classes - 1} are allowed"
        raise DataError(f"{where}: label {value:g} is not an integer; {allowed}")
    if (y.abs() > readers.LARGEST).any():
        value = float(y[y.abs() > readers.LARGEST][0])
        raise DataError(f"{where}: label {value:g} is out of range; classes are numbered from 0")
    return y.long()


def _tokens(parts: dict[str, list[tuple[Tensor, Tensor]]], names: tuple[str, ...], classes: int | None) -> int:
    """Check and cast the labels of tokens in `parts`. Returns how many classes there are."""
    for split, pairs in parts.items():
        pairs[:] = [
            (x, token_labels(y, classes, f"client {name!r}, {split}"))
            for name, (x, y) in zip(names, pairs, strict=True)
        ]
    return classes or max(int(y.max()) for pairs in parts.values() for _, y in pairs if y.numel()) + 1


def token_labels(y: Tensor, classes: int | None, where: str) -> Tensor:
    """Targets [N, T] as int64. Raises DataError for another shape, and a label that is none of the classes."""
    if not len(y):
        return y.long()
    whole = y.long()
    if y.dim() != 2 or (whole != y).any():
        odd = f"of shape {list(y.shape)}" if y.dim() != 2 else "that are no integers"
        raise DataError(f"{where}: found targets {odd}, expected integers [{len(y)}, tokens]")
    highest = classes or MOST
    if len(wrong := whole[((whole < 0) & (whole != IGNORED)) | (whole >= highest)]):
        allowed = f"0 to {highest - 1}, or {IGNORED} for a token that does not count"
        raise DataError(f"{where}: found label {int(wrong[0])}, expected {allowed}")
    return whole


def _whole(y: Tensor) -> list[str]:
    """A note on float targets that look like labels."""
    values = y.unique()
    few = 1 < len(values) <= MANY and bool((values == torch.arange(len(values))).all())
    note = f"targets 0 to {len(values) - 1} are floats and taken as numbers; task='classification' makes them labels"
    return [note] if few else []


def _labels(
    parts: dict[str, list[tuple[Tensor, Tensor]]], names: tuple[str, ...], classes: int | None, task: str
) -> tuple[int, list[int] | None, list[str]]:
    """Number the labels 0 to C-1 and check them; what `_targets` returns."""
    used = np.unique(np.concatenate([y.unique().numpy() for _, y in parts["train"]])).tolist()
    if len(used) < 2:
        raise DataError(f"found label {used[0]} on every training sample, expected at least two classes")
    if task == "binary" and (len(used) != 2 or classes not in (None, 2)):
        raise DataError(f"found {len(used)} different labels, from {used[0]} to {used[-1]}, expected two")
    labels, notes = None, []
    pair = task == "binary" and used != [0, 1]
    codes = used[-1] >= readers.LARGEST and len(used) <= MANY
    if pair or codes or (classes is None and used in (list(range(1, len(used) + 1)), [-1, 1])):
        labels = used
        shown = few(used) if codes else f"{used[0]} and {used[1]}" if pair or used[0] < 0 else f"1 to {len(used)}"
        notes.append(f"labels {shown} are numbered 0 to {len(used) - 1}")
    highest = len(used) if labels else int(classes) if classes is not None else used[-1] + 1
    stated = classes is not None or task in ("binary", "classification")
    if not stated and highest > max(MANY, len(used)):
        who = next(name for name, (_, y) in zip(names, parts["train"], strict=True) if (y == used[-1]).any())
        raise DataError(
            f"client {who!r}, train: target {used[-1]}, in all {len(used)} different integers from {used[0]} to "
            f"{used[-1]}; expected labels 0 to C-1, or task='regression' (numbers) or task='classification' (labels)"
        )
    if highest > MOST:
        raise DataError(f"found labels up to {highest - 1}, so {highest} classes, expected labels 0 to C-1")
    if not stated and highest > MANY:
        notes.append(f"integer targets are taken for labels of {highest} classes; task='regression' makes them numbers")
    for split, pairs in parts.items():
        for i, (x, y) in enumerate(pairs):
            pairs[i] = (x, numbered(y, labels, highest, f"client {names[i]!r}, {split}"))
    empty = [] if labels else sorted(set(range(highest)) - set(used))
    if empty:
        notes.append(f"no training sample has label {few(empty)}, of {highest} classes")
    return highest, labels, notes


def numbered(y: Tensor, labels: Sequence[int] | None, classes: int, where: str) -> Tensor:
    """Labels as numbers of classes: 0, 1, ... for the `labels`, in order, where there are some."""
    wrong = y[~torch.isin(y, torch.tensor(labels))] if labels else y[(y < 0) | (y >= classes)]
    if len(wrong):
        allowed = ", ".join(map(str, labels)) if labels else f"0 to {max(classes - 1, 0)}"
        raise DataError(f"{where}: found label {int(wrong[0])}, expected {allowed}")
    return torch.searchsorted(torch.tensor(labels), y) if labels else y


def _split(
    pairs: list[tuple[Tensor, Tensor]],
    first: tuple[Tensor, Tensor],
    names: tuple[str, ...],
    split: str,
    offsets: np.ndarray | None = None,
) -> Split:
    """Check that all clients agree with `first` in shape and lay them end to end. offsets: they are already"""
    out = []
    for (x, y), name in zip(pairs, names, strict=True):
        if not len(x):
            x, y = first[0][:0], first[1][:0]
        for t, wanted, role in ((x, first[0], "inputs"), (y, first[1], "targets")):
            if t.shape[1:] != wanted.shape[1:]:
                raise DataError(
                    f"client {name!r}, {split}: {role} are of shape {list(t.shape[1:])} per sample, "
                    f"those of client {names[0]!r} are {list(wanted.shape[1:])}"
                )
        out.append((x, y))
    return Split.of(out) if offsets is None else Split(*out[0], offsets)


def _places(split: Split) -> list[np.ndarray]:
    return [np.arange(a, b) for a, b in pairwise(split.offsets)]


def _rows(split: Split, rows: Sequence[np.ndarray]) -> Split:
    """Only these rows, by client."""
    rows = rows if isinstance(rows, Ragged) else Ragged(np.concatenate(rows), np.array([*map(len, rows)]))
    index, offsets = torch.from_numpy(rows.flat), rows.offsets
    weight = None if split.weight is None else split.weight[index]
    return Split(split.x.index_select(0, index), split.y.index_select(0, index), offsets, split.unit, weight)


def _keyed(item: Mapping[str, Any], keys: tuple[str | None, str | None], where: str) -> tuple[Any, Any]:
    """Input and target of a dict; an image becomes an array, channels first."""
    values = []
    for word, key in zip(("input", "target"), keys, strict=True):
        if key is None or key not in item:
            hint = f"{closest(key, item) if key else ''}; it has {', '.join(map(str, item))}"
            lack = f"no key {key!r}, which {word} names" if key else f"found a dict, expected {word}= to name its key"
            raise DataError(f"{where}: {lack}{hint}")
        value = item[key]
        values.append(readers.images(np.asarray(value)[None])[0] if hasattr(value, "getbands") else value)
    return values[0], values[1]


def _materialise(dataset: Any, name: str, split: str, keys: tuple[str | None, str | None]) -> Any:
    """(x, y) of a torch data set, of a DataLoader's, or of one of dicts with these keys, or None."""
    if dataset is None:
        return None
    if isinstance(dataset, torch.utils.data.DataLoader):
        dataset = sibling("polyfed_tables.readers", "a DataLoader").items(dataset, f"client {name!r}, {split}")
    if isinstance(dataset, torch.utils.data.TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors
    xs: list[Tensor] = []
    ys: list[Any] = []
    try:
        for i in range(len(dataset)):
            item = dataset[i]
            x, y = _keyed(item, keys, f"client {name!r}, {split}, item {i}") if isinstance(item, Mapping) else item
            xs.append(torch.as_tensor(x))
            ys.append(y if isinstance(y, str) else torch.as_tensor(y))
        labels = _class_names(dataset, keys[1], f"client {name!r}, {split}", ys)
        return (torch.stack(xs), labels or torch.stack(ys)) if xs else ([], [])
    except (TypeError, ValueError, RuntimeError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise DataError(
            f"client {name!r}, {split}, item {len(ys)}: a pair (input, target) of numbers, all of one shape, "
            f"is expected: {reason}"
        ) from None


def _class_names(dataset: Any, key: str | None, where: str, ys: list[Any]) -> Named | None:
    """Labels by the names that a data set has for them: of a ClassLabel, of a torch data set's `classes`, or texts."""
    if any(isinstance(y, str) for y in ys):
        return Named.of(ys, where)
    whole = dataset
    while isinstance(whole, torch.utils.data.Subset):
        whole = whole.dataset
    features = getattr(whole, "features", None)
    order = getattr(features.get(key or ""), "names", None) if is_mapping(features) else None
    if order is None and getattr(whole, "target_transform", None) is None:
        order = getattr(whole, "classes", None)
    if not ys or not isinstance(order, list | tuple) or not all(isinstance(v, str) for v in order):
        return None
    order, labels = tuple(map(nfc, order)), torch.stack(ys)
    if labels.dim() != 1 or labels.is_floating_point():
        return None
    if (wrong := labels[(labels < 0) | (labels >= len(order))]).numel():
        has = f"the data set names {len(order)} classes ({few(order)})"
        raise DataError(f"{where}: found label {int(wrong[0])}, where {has}")
    return Named([order[k] for k in labels.tolist()], order)
