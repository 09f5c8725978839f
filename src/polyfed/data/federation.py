"""A federation: the clients, and the samples that each of them trains, tunes and is tested on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch

from polyfed.base.arguments import checked
from polyfed.base.columns import STRATIFIED
from polyfed.base.errors import ConfigError, DataError, closest, few
from polyfed.base.system import uncollected
from polyfed.base.text import nfc
from polyfed.base.values import Words
from polyfed.compute.split import Split
from polyfed.data import prepare, readers
from polyfed.data.flat import Flat, Ragged
from polyfed.data.intake import Pair, checked_splits, clusters_of, materialised, names_of
from polyfed.data.preparation import Settled

if TYPE_CHECKING:
    import pandas as pd

LEARNT = ("preparation", "scaling")  # entries of `meta` with what was learnt from training samples
SAID = (*LEARNT, "audit")  # entries of `meta` that a run folder keeps
ROWS = 20  # of clients that a notebook shows
AIM = "target "  # before what is predicted, in a note
PER_CLIENT = ("indices", "whose")  # entries of `meta` that are lists over clients; whose: of each test sample
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
        splits, facts = checked_splits(given, who, (integer_inputs, classes, task, weights))
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
        splits, clusters = held | splits, clusters_of(clusters, n)
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
                None if sets is None else [materialised(d, who[i], split, (input, target)) for i, d in enumerate(sets)]
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


def _places(split: Split) -> list[np.ndarray]:
    return [np.arange(a, b) for a, b in pairwise(split.offsets)]


def _rows(split: Split, rows: Sequence[np.ndarray]) -> Split:
    """Only these rows, by client."""
    rows = rows if isinstance(rows, Ragged) else Ragged(np.concatenate(rows), np.array([*map(len, rows)]))
    index, offsets = torch.from_numpy(rows.flat), rows.offsets
    weight = None if split.weight is None else split.weight[index]
    return Split(split.x.index_select(0, index), split.y.index_select(0, index), offsets, split.unit, weight)
