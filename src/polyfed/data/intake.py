"""What a federation is made of, as it is given: names, arrays, pairs and data sets, cast and checked. All ways to make
one from samples lead through here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import DataError, closest, few
from polyfed.base.plugins import sibling
from polyfed.base.settings import is_mapping
from polyfed.base.text import nfc
from polyfed.base.values import shown
from polyfed.compute.losses import IGNORED
from polyfed.compute.split import Split
from polyfed.data import readers
from polyfed.data.csv_files import WHOLE, canonical, in_order, matched, numbers_of, places
from polyfed.data.flat import Flat

WEIGHTED = "training samples have weights, on average 1 at every client; scores count every sample the same"
Pair = Any  # (x, y); what is none is refused with the name of its client
Layout = dict[str, tuple[tuple[int, ...], bool]]  # of named inputs: shape, and whether they are whole numbers


def checked_splits(given: dict[str, Any], who: tuple[str, ...], how: tuple[Any, ...]) -> tuple[dict[str, Split], Any]:
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


def clusters_of(clusters: Sequence[int] | np.ndarray | None, n: int) -> np.ndarray | None:
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


def materialised(dataset: Any, name: str, split: str, keys: tuple[str | None, str | None]) -> Any:
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
