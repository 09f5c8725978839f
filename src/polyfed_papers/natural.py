"""Named data sets whose clients are people, writers, roles or sources, read as their authors left the files.

Nothing is unpickled. A published checksum is compared; LEAF's scripts make files anew, so their structure is checked.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch.nn.functional import interpolate

from polyfed.base.errors import DataError, few
from polyfed.base.values import COUNT, Limits
from polyfed.data import prepare, readers
from polyfed.data.dataset import Dataset
from polyfed.data.datasets import SEED
from polyfed.data.raw import Images
from polyfed.data.readers import inside
from polyfed_papers.files import there
from polyfed_papers.images import md5
from polyfed_papers.matlab import read_mat

Part = tuple[np.ndarray, np.ndarray]  # inputs and labels
Samples = Annotated[int, Limits(ge=1)] | None
DRAWN = 33  # purpose of the draws


def _line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"


def _natural(name: str, clients: Mapping[str, Part], tests: Mapping[str, Part] | None = None, **more: Any) -> Dataset:
    """The samples of named clients, one client after the other; `tests` are those of their own test sets."""

    def joined(parts: Iterable[Part]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        xs, ys = zip(*parts, strict=True)
        groups = np.repeat(np.arange(len(ys)), [len(y) for y in ys])
        return np.concatenate(xs), np.concatenate(ys).astype(np.int64), groups

    x, y, groups = joined(clients.values())
    if tests is not None:
        held = joined(tests[client] for client in clients)
        more |= dict(zip(("x_test", "y_test", "test_groups"), held, strict=True))
    return Dataset(name, x, y, groups=groups, group_names=tuple(clients), **more)


# people

HAR = "UCI HAR Dataset"
HAR_SHA256 = "2045e435c955214b38145fb5fa00776c72814f01b203fec405152dac7d5bfeb0"  # as Julia packages (DataDeps) pin it


def _table(place: Path, member: str, width: int) -> np.ndarray:
    """[N, width] the numbers of one of HAR's text files, in its folder or its zip."""
    where = f"{place}: {member}"
    try:
        if place.is_dir():
            text = readers.read_bytes(place / member)
        else:
            with zipfile.ZipFile(place) as z:
                info = z.getinfo(f"{HAR}/{member}")
                if info.file_size > readers.unpacked_at_most(place.stat().st_size):
                    raise DataError(f"{where}: unpacks to {info.file_size:,} bytes, which no data set does")
                text = z.read(info)
        numbers = np.loadtxt(BytesIO(text), ndmin=2)
    except DataError:
        raise
    except Exception as e:  # zipfile, the decompressors and numpy raise a dozen kinds for damaged bytes
        raise DataError(f"{where}: cannot be read ({_line(e)})") from None
    if numbers.shape[1] != width or not np.isfinite(numbers).all():
        raise DataError(f"{where}: found {list(numbers.shape)} numbers, expected {width} a line, all of them finite")
    return numbers


def har(data_dir: Path) -> Dataset:
    """UCI HAR: 30 people with a telephone at the waist, 10,299 windows, 561 inputs in [-1, 1], 6 activities.

    From UCI HAR Dataset.zip, or the folder that it unpacks to. A person is a client. The official split is between
    people, so both of its parts are read, and some windows of every person are held out.
    """
    place, parts = there(data_dir, "har", (f"{HAR}.zip", HAR), f"{HAR}.zip or its folder"), []
    for split in ("train", "test"):
        widths = {"X": 561, "y": 1, "subject": 1}
        parts.append([_table(place, f"{split}/{kind}_{split}.txt", width) for kind, width in widths.items()])
        if len({len(rows) for rows in parts[-1]}) > 1:
            counts = [len(rows) for rows in parts[-1]]
            raise DataError(f"{place}: {split}: found {counts} lines of X, y and subject, expected equally many")
    x, y, people = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if not np.isin(y, range(1, 7)).all():
        raise DataError(f"{place}: found labels from {y.min():g} to {y.max():g}, expected 1 to 6")
    notes = (
        "Human Activity Recognition Using Smartphones: UCI, CC BY 4.0; cite Anguita and others, ESANN 2013",
        "neighbouring windows share half of their readings: held-out ones are not independent of the others",
    )
    if place.is_dir():
        notes = (*notes, f"{HAR}: read from its folder; a checksum is published for the zip alone")
    elif hashlib.sha256(place.read_bytes()).hexdigest() != HAR_SHA256:
        notes = (*notes, f"{place.name} is not the published file (its SHA-256 differs)")
    rows = {f"person-{p:02.0f}": people[:, 0] == p for p in np.unique(people)}
    clients = {person: (x[at].astype(np.float32), y[at, 0] - 1) for person, at in rows.items()}
    return _natural("har", clients, classes=6, notes=notes)


# writers and roles: LEAF (Caldas and others 2018, arXiv 1812.01097)

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's, in its order
NUMBERS = np.array([LETTERS.find(chr(k)) for k in range(128)])
WINDOW = 80
STEPS = ("train", "rem_user_data", "sampled_data", "all_data", ".")  # what preprocess.sh makes, the last step first

Read = Callable[[Any, Any], Part]


def _digits(x: Any, y: Any, flat: bool) -> Part:
    pixels, labels = np.array(x, dtype=np.float32), np.array(y)
    if pixels.shape != (len(x), 784) or not ((pixels >= 0) & (pixels <= 1)).all():
        raise ValueError("x must be 784 pixels from 0 to 1 each")
    if labels.shape != (len(y),) or labels.dtype.kind not in "iu" or not ((labels >= 0) & (labels < 62)).all():
        raise ValueError("y must be labels from 0 to 61")
    return (pixels if flat else pixels.reshape(-1, 1, 28, 28)), labels


def _letters(x: Any, y: Any) -> Part:
    """The samples all of whose characters LEAF's alphabet has."""
    if {len(text) for text in x} - {WINDOW} or {len(letter) for letter in y} - {1}:
        raise ValueError(f"x must be {WINDOW} characters each, and y one")
    codes = [np.array(texts, dtype=f"U{k}").view(np.uint32).reshape(-1, k) for texts, k in ((x, WINDOW), (y, 1))]
    numbers, labels = (NUMBERS[np.minimum(code, 127)] for code in codes)
    listed = (numbers >= 0).all(1) & (labels >= 0).all(1)
    return numbers[listed], labels[listed, 0]


def _users(files: Sequence[Path], read: Read) -> tuple[dict[str, Part], int]:
    """The samples of LEAF's users, and how many samples were left out."""
    parts, left = dict[str, Part](), 0
    for path in files:
        try:
            table = json.loads(readers.read_bytes(path))
            rows, data = list(zip(table["users"], table["num_samples"], strict=True)), table["user_data"]
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise DataError(f"{path}: expected JSON with LEAF's users, num_samples, user_data ({_line(e)})") from None
        for user, count in rows:
            try:
                x, y = data[user]["x"], data[user]["y"]
                if not len(x) == len(y) == count:
                    raise ValueError(f"{len(x)} of x and {len(y)} of y, where num_samples says {count}")
                part = read(x, y)
            except (ValueError, TypeError, KeyError, OverflowError) as e:
                raise DataError(f"{path}: user {user!r}: not as LEAF writes it ({_line(e)})") from None
            if user in parts:
                raise DataError(f"{path}: user {user!r} is there twice")
            left += count - len(part[1])
            if len(part[1]):
                parts[user] = part
    return parts, left


def _leaf(data_dir: Path, name: str, read: Read, samples: int | None, seed: int, **more: Any) -> Dataset:
    """LEAF's users from its last step (both parts of its split by user), at most `samples` training samples of each."""
    places = [data_dir / name / inside / step for inside in ("data", ".") for step in STEPS]
    folder = next((place for place in places if any(place.glob("*.json"))), None)
    if folder is None:
        where = f"{data_dir / name / 'data/all_data'} or {data_dir / name}"
        raise DataError(f"{name}: no all_data_*.json in {where}; LEAF's preprocess.sh makes it, or set POLYFED_DATA")
    of = [folder, folder.parent / "test"] if folder.name == "train" else [folder]
    files = [sorted(place.glob("*.json")) for place in of]
    (clients, left), *rest = [_users(paths, read) for paths in files if paths]
    tests, left = (rest[0][0], left + rest[0][1]) if rest else (None, left)
    notes = (*more.pop("notes"), f"LEAF's {folder.name}: {len(clients)} users", *_unlike(data_dir / name, files))
    if left:
        notes = (*notes, f"{left} samples with characters that LEAF's alphabet lacks are left out")
    if tests is not None and clients.keys() != tests.keys():
        if both := clients.keys() & tests.keys():
            raise DataError(f"{folder}: {few(both)}: in test as well, expected all users there or none of them")
        clients, tests, notes = (
            clients | tests,
            None,
            (*notes, "LEAF's split is by user: its test users are clients too"),
        )
    if not clients:
        raise DataError(f"{folder}: found no user with a sample")
    for user, (x, y) in clients.items():
        if samples is not None and samples < len(y):
            at = np.sort(prepare.keyed(seed, DRAWN, user).permutation(len(y))[:samples])
            clients[user] = x[at], y[at]
    return _natural(name, clients, tests, notes=notes, **more)


def _unlike(folder: Path, files: Sequence[Sequence[Path]]) -> tuple[str, ...]:
    """A note on files that differ from LEAF's list of checksums, or that there is none."""
    listed = folder / "meta" / "dir-checksum.md5"
    if not listed.is_file():
        return ("LEAF's scripts make these files, so no checksum is published, and meta/dir-checksum.md5 is not there",)
    lines = (line.split() for line in readers.read_bytes(listed).decode(errors="replace").splitlines())
    sums = {Path(words[1]).parts[-2:]: words[0] for words in lines if len(words) == 2}
    unlike = [p.name for paths in files for p in paths if sums.get((p.parent.name, p.name)) != md5(p)]
    return (f"not the files that {listed.name} lists (their MD5 differs): {few(unlike)}",) if unlike else ()


def femnist(data_dir: Path, flat: bool = False, samples: Samples = None, seed: SEED = 0) -> Dataset:
    """FEMNIST of LEAF: digits and letters by hand, [1, 28, 28] (flat: [784]), 62 classes; writers are clients.

    From the JSON files of LEAF's preprocess.sh. Labels: digits 0 to 9, capitals from 10, small letters from 36; pixels
    in [0, 1], of which paper is 1. samples: at most so many training samples of a writer, drawn by seed; None: all.
    """
    notes = ("FEMNIST: made of NIST Special Database 19",)
    return _leaf(data_dir, "femnist", partial(_digits, flat=flat), samples, seed, classes=62, notes=notes)


def shakespeare(data_dir: Path, samples: Samples = None, seed: SEED = 0) -> Dataset:
    """Shakespeare of LEAF: 80 letters, as numbers from 0 to 79, and the letter after them; roles are clients.

    From the JSON files of LEAF's preprocess.sh. samples: at most so many training samples of a role, drawn by seed;
    None: all. Held-out samples are a role's last ones. A model needs letters=80, which mlp and mixture have.
    """
    notes = ("Shakespeare: Project Gutenberg; samples of a role overlap, also across the cut between its two parts",)
    roles = _leaf(data_dir, "shakespeare", _letters, samples, seed, classes=len(LETTERS), notes=notes)
    return replace(roles, times=np.arange(len(roles)))


SPEECH = 5000  # characters of a speaker, at least


def tiny_shakespeare(data_dir: Path, window: COUNT = 20, samples: Samples = None, seed: SEED = 0) -> Dataset:
    """Speeches of Shakespeare's plays: `window` letters, numbered as in LEAF's Shakespeare, and the letter after them.

    The 64 speakers with 5,000 characters or more are clients. samples: at most so many training samples of a speaker,
    drawn by seed; None: all. Held-out samples are a speaker's last ones. A model needs letters=80, which mlp and
    mixture have.
    """
    path = there(data_dir, "tiny-shakespeare", ("input.txt",), "input.txt", ("tiny_shakespeare", "tiny-shakespeare"))
    speeches = dict[str, list[str]]()
    for speech in readers.read_bytes(path).decode("utf-8", "replace").split("\n\n"):
        who, _, words = speech.strip("\n").partition(":\n")
        if words:
            speeches.setdefault(who, []).append(words)
    texts = {who: text for who, some in sorted(speeches.items()) if len(text := "\n".join(some)) >= SPEECH}
    if not texts:
        raise DataError(f"{path}: found no speaker with {SPEECH} characters, expected speeches headed by NAME: lines")
    clients = dict[str, Part]()
    for who, text in texts.items():
        numbers = NUMBERS[np.minimum(np.array([text]).view(np.uint32), 127)]
        rows = np.lib.stride_tricks.sliding_window_view(numbers[numbers >= 0], window + 1)
        if samples is not None and samples < len(rows):
            rows = rows[np.sort(prepare.keyed(seed, DRAWN, who).permutation(len(rows))[:samples])]
        clients[who] = rows[:, :-1].copy(), rows[:, -1].copy()
    notes = (
        "Shakespeare, in the public domain; samples of a speaker overlap, also across the cut to the held-out ones",
    )
    data = _natural("tiny-shakespeare", clients, classes=len(LETTERS), notes=notes)
    return replace(data, times=np.arange(len(data)))


# sources

MD5 = {  # torchvision's of SVHN
    "svhn_train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "svhn_test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
FIVE = {  # of a source: axes that are samples, channels, height and width; of each part: file, images, labels, how many
    "mnist": ((0, 3, 1, 2), ("mnist_data.mat", "train_28", "label_train", 55_000),
              ("mnist_data.mat", "test_28", "label_test", 10_000)),
    "mnistm": ((0, 3, 1, 2), ("mnistm_with_label.mat", "train", "label_train", 55_000),
               ("mnistm_with_label.mat", "test", "label_test", 10_000)),
    "svhn": ((3, 2, 0, 1), ("svhn_train_32x32.mat", "X", "y", 73_257), ("svhn_test_32x32.mat", "X", "y", 26_032)),
    "usps": ((0, 1, 2, 3), ("usps_28x28.mat", "dataset 0 0", "dataset 0 1", 7_438),
             ("usps_28x28.mat", "dataset 1 0", "dataset 1 1", 1_860)),
    "syn": ((0, 3, 1, 2), ("syn_number.mat", "train_data", "train_label", 25_000),
            ("syn_number.mat", "test_data", "test_label", 9_000)),
}  # fmt: skip


def _mat(path: Path, *names: str) -> list[np.ndarray]:
    """Arrays of a MATLAB file, those in a cell by its name and place."""
    read, arrays = read_mat(path, [name.split()[0] for name in names]), list[np.ndarray]()
    for key, *at in (name.split() for name in names):
        array = read[key]
        if at and array.dtype == object and array.shape == (2, 2):
            array = array[tuple(map(int, at))]
        if not isinstance(array, np.ndarray) or array.dtype == object or not array.size:
            raise DataError(f"{path}: {' '.join((key, *at))} is empty, or no array of numbers")
        arrays.append(array)
    return arrays


def _coloured(x: np.ndarray, axes: tuple[int, ...], where: str) -> np.ndarray:
    """[N, 3, 28, 28] uint8 of images that may be grey, shares of 1, or 32 pixels wide."""
    x = x.transpose(axes) if x.ndim == 4 else x
    if x.dtype.kind == "f" and x.max() <= 1:
        x = x * 255
    if x.shape[1:] not in [(c, side, side) for c in (1, 3) for side in (28, 32)] or not 0 <= x.min() <= x.max() <= 255:
        raise DataError(f"{where}: found {list(x.shape)}, expected images of 28 or 32 pixels, from 0 to 255")
    pixels = torch.from_numpy(np.ascontiguousarray(np.rint(x), dtype=np.uint8))
    if pixels.shape[-1] != 28:
        pixels = interpolate(pixels, (28, 28), mode="bilinear", antialias=True)
    return pixels.expand(-1, 3, -1, -1).numpy()


def digit_five(data_dir: Path, clients: COUNT = 1, samples: Samples = None, seed: SEED = 0) -> Dataset:
    """Digit-5: MNIST, MNIST-M, SVHN, USPS and synthetic digits as clients, [3, 28, 28], 10 classes.

    From the .mat files of M3SDA's Digit-Five (Peng and others 2019); images of 32 pixels become smaller as in FedBN.
    clients: of each source, whose training and test images are dealt out by seed; samples: training images of each
    client; None: all. A client's cluster is its source.
    """
    found: tuple[dict[str, Part], dict[str, Part]] = {}, {}
    notes = ("Digit-Five: only SVHN's files have published checksums; of the others shapes and labels are checked",)
    for source, (axes, *parts) in FIVE.items():
        for into, (file, images, labels, whole) in zip(found, parts, strict=True):
            path = there(data_dir, "digit-5", [f"{folder}{file}" for folder in ("", "Digit-Five/")], file)
            x, y = _mat(path, images, labels)
            x, y = _coloured(x, axes, f"{path}: {images}"), y.argmax(1) if y.shape[1:] == (10,) else y.reshape(-1)
            if len(x) != len(y) or not np.isin(y, range(11)).all():  # SVHN's 10 is a zero
                raise DataError(f"{path}: {labels} are not {len(x)} labels from 0 to 10")
            most, wanted = len(y) // clients, samples if into is found[0] else None
            if (wanted or 1) > most:
                raise DataError(
                    f"samples: found {wanted or 1}, expected at most {most} for {clients} clients of {source}"
                )
            order = prepare.keyed(seed, DRAWN, f"{path.name} {images}").permutation(len(y))
            order = order if wanted is None else order[: wanted * clients]
            for k, at in enumerate(map(np.sort, np.array_split(order, clients))):
                into[source if clients == 1 else f"{source}-{k}"] = x[at], y[at] % 10
            if len(y) != whole:
                notes = (*notes, f"{source}: {len(y)} images of {whole} in {images}; not comparable with the full set")
            if file in MD5 and md5(path) != MD5[file]:
                notes = (*notes, f"{file} is not the published file (its MD5 differs)")
    return _natural("digit-5", *found, classes=10, notes=notes, group_clusters=np.repeat(np.arange(5), clients))


OFFICE = {"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295}  # images, as Gong and others counted (CVPR 2012)
FEATURES = {"surf": ("SURF_L10", "fts", 800), "decaf": ("decaf", "feas", 4096)}


def office_caltech10(
    data_dir: Path,
    features: Literal["images", "surf", "decaf"] = "images",
    size: Annotated[int, Limits(ge=1, le=1024)] = 32,
) -> Dataset:
    """Office-Caltech10: 10 kinds of things as Amazon, Caltech-256, a camera and a webcam show them; four clients.

    From folders SOURCE/CLASS or SOURCE/images/CLASS of images, squeezed to [3, size, size] in [0, 1]; or features that
    are published of them: "surf" (amazon_SURF_L10.mat, [800]) or "decaf" (amazon_decaf.mat, [4096]), standardised.
    """
    name, clients, first = "office-caltech10", dict[str, Part](), list[str]()
    roots = ("", "office_caltech_10/", "office_caltech10/", "OfficeCaltech10/")
    for source in OFFICE:
        if features == "images":
            folder = there(data_dir, name, [f"{root}{source}" for root in roots], f"folder {source}")
            folder = folder / "images" if (folder / "images").is_dir() else folder
            kinds = sorted(f.name for f in folder.iterdir() if f.is_dir() and f.name[0] != ".")
            first = first or kinds
            if kinds != first or len(kinds) != 10:
                raise DataError(f"{folder}: found the classes {few(kinds)}, expected the same ten in every source")
            files = [(f, k) for k, kind in enumerate(kinds) for f in inside(folder / kind, "*.*")]
            if not files:
                raise DataError(f"{folder}: no images in it")
            x = Images("", size, "unit").codes([f.relative_to(folder).as_posix() for f, _ in files], folder)
            clients[source] = x, np.array([k for _, k in files])
        else:
            ending, array, width = FEATURES[features]
            stem = "Caltech10" if (source, features) == ("caltech", "surf") else source
            path = there(data_dir, name, [f"{root}{stem}_{ending}.mat" for root in roots], f"{stem}_{ending}.mat")
            x, y = _mat(path, array, "labels")
            if x.shape != (y.size, width) or not np.isfinite(x).all() or not np.isin(y, range(1, 11)).all():
                raise DataError(f"{path}: found {list(x.shape)} and {y.size} labels, expected [N, {width}] and 1 to 10")
            clients[source] = x.astype(np.float32), y.reshape(-1) - 1
    counts = {source: len(y) for source, (_, y) in clients.items()}
    notes = ("Office-Caltech10: no checksum is published; classes and numbers of images are checked",)
    if counts != OFFICE:
        notes = (*notes, f"not the {sum(OFFICE.values())} published images: {counts} in place of {OFFICE}")
    if features != "images":
        notes = (*notes, prepare.POOLED.format(what="inputs are"))
    scale = None if features == "images" else "pooled"
    return _natural(name, clients, classes=10, notes=notes, standardise=scale)
