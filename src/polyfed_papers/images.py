"""Named data sets of images: MNIST, Fashion-MNIST, a hybrid of both, CIFAR and Tiny ImageNet, from published files."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from polyfed.base.errors import DataError
from polyfed.base.values import Limits
from polyfed.data import prepare
from polyfed.data.dataset import Dataset
from polyfed.data.datasets import SEED
from polyfed.data.readers import read_bytes, read_npz
from polyfed_papers.files import missing, there

Normalise = bool | Literal["half"]
Arrays = Sequence[np.ndarray]  # x, y, x_test, y_test
Channels = tuple[tuple[float, ...], tuple[float, ...]]
CHANNELS: dict[str, Channels] = {  # mean and deviation of the official training pixels / 255, as usually rounded
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "tiny-imagenet": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


def md5(path: Path) -> str:
    """MD5 of a file, as hexadecimal digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _made(name: str, arrays: Arrays, classes: int, normalise: Normalise, notes: tuple[str, ...]) -> Dataset:
    """A data set; normalise: False, True (its usual constants) or "half" (to [-1, 1])."""
    x, y, x_test, y_test = arrays
    channels = None if normalise is False else CHANNELS[name] if normalise is True else ((0.5,), (0.5,))
    y, y_test = y.astype(np.int64), y_test.astype(np.int64)
    return Dataset(name, x, y, x_test, y_test, classes, normalise=channels, notes=notes)


# grey images

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
IDX_FILES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
IDX_MD5 = {
    "mnist": (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion-mnist": (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
}


def read_idx(path: str | Path) -> np.ndarray:
    """The array of an IDX file (the format of MNIST), gzipped or not. Raises DataError if the header does not fit."""
    b = read_bytes(path)
    if len(b) < 4 or b[:2] != b"\0\0" or b[2] not in IDX_TYPES or not 1 <= b[3] <= 8:
        raise DataError(f"{path}: not an IDX file (first bytes {b[:4].hex(' ') or 'missing'})")
    dtype, start = np.dtype(IDX_TYPES[b[2]]), 4 + 4 * b[3]
    shape = tuple(int.from_bytes(b[k : k + 4], "big") for k in range(4, start, 4))
    expected = start + prod(shape) * dtype.itemsize
    if len(b) != expected or len(b) < start or 0 in shape:
        raise DataError(f"{path}: found {len(b)} bytes, expected {expected} for the shape {list(shape)} in its header")
    return np.frombuffer(b, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _grey(data_dir: Path, name: str, folders: Sequence[str], flat: bool, normalise: Normalise, note: str) -> Dataset:
    paths = [there(data_dir, name, (f, f.removesuffix(".gz")), f, folders) for f in IDX_FILES]
    arrays, notes = [read_idx(path) for path in paths], (note,)
    for k in (0, 2):
        images, labels = arrays[k : k + 2]
        if images.ndim != 3 or images.dtype != np.uint8:
            raise DataError(
                f"{paths[k]}: found images of shape {list(images.shape)}, {images.dtype}, expected [N, 28, 28] of uint8"
            )
        if labels.ndim != 1 or len(labels) != len(images) or not len(labels):
            raise DataError(
                f"{paths[k + 1]}: found labels {list(labels.shape)} for {len(images)} images, expected one each"
            )
        if labels.max() > 9:
            raise DataError(f"{paths[k + 1]}: found label {labels.max()}, expected 0 to 9")
        arrays[k] = images.reshape(len(images), -1) if flat else images[:, None]
    for path, expected in zip(paths, IDX_MD5[name], strict=True):
        if path.suffix == ".gz" and md5(path) != expected:
            notes = (*notes, f"{path.name} is not the published file (its MD5 differs)")
    return _made(name, arrays, 10, normalise, notes)


def mnist(data_dir: Path, flat: bool = False, normalise: Normalise = False) -> Dataset:
    """MNIST: 60,000 + 10,000 grey images of handwritten digits, [1, 28, 28] (flat: [784]), 10 classes. Fetchable.

    normalise: False (pixels in [0, 1]), True (mean 0.1307, deviation 0.3081) or "half" (0.5 and 0.5: to [-1, 1]).
    """
    note = "MNIST: Y. LeCun, C. Cortes, C. Burges; commonly stated as CC BY-SA 3.0; nearly solved"
    return _grey(data_dir, "mnist", ("mnist", "MNIST/raw"), flat, normalise, note)


def fashion_mnist(data_dir: Path, flat: bool = False, normalise: Normalise = False) -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 grey images of clothing, [1, 28, 28] (flat: [784]), 10 classes. Fetchable.

    normalise: False (pixels in [0, 1]), True (mean 0.2860, deviation 0.3530) or "half" (0.5 and 0.5: to [-1, 1]).
    """
    note = "Fashion-MNIST: Zalando SE, MIT licence (Xiao, Rasul, Vollgraf 2017, arXiv 1708.07747)"
    folders = ("fashion_mnist", "fashion-mnist", "FashionMNIST/raw")
    return _grey(data_dir, "fashion-mnist", folders, flat, normalise, note)


def hybrid(
    data_dir: Path,
    clients: Annotated[int, Limits(ge=2, le=10000)] = 20,
    samples: Annotated[int, Limits(ge=1, le=60000)] = 500,
    flat: bool = False,
    seed: SEED = 0,
) -> Dataset:
    """Clients with images of MNIST or of Fashion-MNIST, each of which numbers its own ten classes from 0 to 9.

    clients: their number, the first half of them with digits; samples: of each client, no image twice; seed: the
    draw's. A client's cluster is its source.
    """
    parts, rng = [mnist(data_dir, flat), fashion_mnist(data_dir, flat)], prepare.keyed(seed, 27)
    counts = [(clients + 1) // 2, clients // 2]
    if (most := min(len(part.x) for part in parts) // counts[0]) < samples:
        raise DataError(f"samples: found {samples}, expected at most {most} for {counts[0]} clients of one source")
    taken = [rng.permutation(len(part.x))[: n * samples] for part, n in zip(parts, counts, strict=True)]
    x, y = (np.concatenate([getattr(p, k)[at] for p, at in zip(parts, taken, strict=True)]) for k in ("x", "y"))
    return Dataset(
        "hybrid", x, y, classes=10, groups=np.repeat(np.arange(clients), samples),
        group_names=tuple(f"client-{i}" for i in range(clients)), group_clusters=np.repeat([0, 1], counts),
        notes=tuple(note for part in parts for note in part.notes),
    )  # fmt: skip


# colour images

CIFAR_NOTES = (
    "CIFAR: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; no formal licence",
    "CIFAR comes from the 80 Million Tiny Images, which their authors withdrew for offensive categories; it has known "
    "near-duplicates between train and test, and a few wrong labels",
)


def _from_npz(path: Path, key: str, side: int, classes: int) -> Arrays:
    """From an npz of colour images: x_train uint8 [N, side, side, 3], labels `key` + train, ..."""
    z, parts = read_npz(path, ["x_train", "y_train", "x_test", "y_test"]), list[np.ndarray]()
    if f"{key}train" not in z or f"{key}test" not in z:
        raise DataError(f"{path}: no coarse_train and coarse_test in it; use labels='fine'")
    for split in ("train", "test"):
        x, y = z[f"x_{split}"], z[f"{key}{split}"]
        if x.dtype != np.uint8 or x.shape[1:] != (side, side, 3) or y.shape != (len(x),) or y.dtype.kind not in "iu":
            raise DataError(
                f"{path}: found x_{split} {x.dtype} {list(x.shape)}, expected uint8 [N, {side}, {side}, 3] and N labels"
            )
        if len(y) and not 0 <= y.min() <= y.max() < classes:
            raise DataError(f"{path}: found labels from {y.min()} to {y.max()}, expected 0 to {classes - 1}")
        parts += [np.ascontiguousarray(np.moveaxis(x, -1, 1)), y]
    return parts


def _subset(name: str, arrays: Arrays, full: int) -> tuple[str, ...]:
    """A note on fewer training images than the official set has."""
    train, test = len(arrays[0]), len(arrays[2])
    text = f"{name}: a subset of {train} + {test} images; not comparable with the full set"
    return (text,) if train < full else ()


def read_cifar(path: str | Path, label_bytes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """One file of CIFAR's binary version: (images [N, 3, 32, 32] uint8, labels [N, label_bytes] uint8).

    CIFAR-10 has 1 byte of labels, CIFAR-100 has 2 (coarse, fine).
    """
    b, record = read_bytes(path), label_bytes + 3072
    if not b or len(b) % record:
        raise DataError(
            f"{path}: found {len(b)} bytes, expected a multiple of {record}, one record (CIFAR binary version)"
        )
    rows = np.frombuffer(b, np.uint8).reshape(-1, record)
    labels = rows[:, :label_bytes].copy()
    for column, allowed in enumerate([10] if label_bytes == 1 else [20, 100]):
        if labels[:, column].max() >= allowed:
            raise DataError(f"{path}: found label {labels[:, column].max()}, expected 0 to {allowed - 1}")
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32).copy(), labels


def _cifar(data_dir: Path, name: str, official: str, files: Sequence[str], classes: int, how: Normalise) -> Dataset:
    """From an npz, or from the binary version, whichever is there; files: of training, then the one of testing."""
    batches = f"{official}-b{'atches-bin' if name == 'cifar10' else 'inary'}"
    folders = [data_dir / name, data_dir, data_dir / name / batches, data_dir / batches]
    if found := [f for folder in folders[:2] for f in sorted(folder.glob(f"{name}*.npz"))]:
        arrays = _from_npz(found[0], "coarse_" if classes == 20 else "y_", 32, classes)
        return _made(name, arrays, classes, how, CIFAR_NOTES + _subset(name, arrays, 50_000))
    for folder in folders:
        if (folder / files[-1]).is_file():
            read = [read_cifar(folder / file, 1 if name == "cifar10" else 2) for file in files]
            parts = [np.concatenate(part) for some in (read[:-1], read[-1:]) for part in zip(*some, strict=True)]
            arrays = [a if a.ndim > 2 else a[:, int(classes == 100)] for a in parts]
            return _made(name, arrays, classes, how, CIFAR_NOTES)
    for pickled in (f"{official}-python.tar.gz", f"{official}-batches-py", f"{official}-python"):
        if any((folder / pickled).exists() for folder in folders[:2]):
            raise DataError(
                f"{name}: {pickled} holds pickles, which are never read; take the binary version "
                f"({official}-binary.tar.gz, unpacked) or an npz with x_train, y_train, x_test, y_test"
            )
    places = f"in {data_dir} or {data_dir / name}"
    raise missing(name, f"neither {name}*.npz nor {files[-1]} (binary version) {places}", data_dir)


def cifar10(data_dir: Path, normalise: Normalise = False) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour images (or a subset in an npz), [3, 32, 32], 10 classes. Fetchable.

    normalise: False (pixels in [0, 1]), True (means .491 .482 .447, deviations .247 .243 .262) or "half" (to [-1, 1]).
    """
    files = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    return _cifar(data_dir, "cifar10", "cifar-10", files, 10, normalise)


def cifar100(data_dir: Path, labels: Literal["fine", "coarse"] = "fine", normalise: Normalise = False) -> Dataset:
    """CIFAR-100: 50,000 + 10,000 colour images (or a subset in an npz), [3, 32, 32], 100 or 20 classes. Fetchable.

    labels: "fine" or "coarse". normalise: False (pixels in [0, 1]), True (means .5071 .4867 .4408, deviations .2675
    .2565 .2761) or "half".
    """
    classes = 100 if labels == "fine" else 20
    return _cifar(data_dir, "cifar100", "cifar-100", ["train.bin", "test.bin"], classes, normalise)


# labels of Tiny ImageNet's official test images were never published: the validation images are the test set everywhere

SIDE = 64


def tiny_imagenet(data_dir: Path, normalise: Normalise = False) -> Dataset:
    """Tiny ImageNet: 100,000 + 10,000 colour images, [3, 64, 64], 200 classes; the validation images are the test set.

    From the unpacked folder tiny-imagenet-200, or an npz (x_train uint8 [N, 64, 64, 3], y_train, x_test, y_test), which
    is read much faster. normalise: False (pixels in [0, 1]) or True (0.5 and 0.5 per channel: to [-1, 1]).
    """
    name = "tiny-imagenet"
    places = [data_dir / "tiny-imagenet", data_dir / "tiny_imagenet", data_dir]
    found = [f for place in places for f in sorted(place.glob("tiny[-_]imagenet*.npz"))]
    folders = [f for place in places for f in (place, place / "tiny-imagenet-200") if (f / "wnids.txt").is_file()]
    if not found and not folders:
        raise DataError(
            f"{name}: no folder tiny-imagenet-200 and no tiny-imagenet*.npz in {data_dir} or {places[0]}; unpack "
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip there, or set POLYFED_DATA"
        )
    arrays = _from_npz(found[0], "y_", SIDE, 200) if found else read_folder(folders[0])
    notes = (
        "Tiny ImageNet: Stanford CS231n; a part of ImageNet, for non-commercial research and education",
        "its official test labels are not public: the validation images are the test set",
        *_subset(name, arrays, 100_000),
    )
    return _made(name, arrays, 200, normalise, notes)


def read_folder(folder: Path) -> Arrays:
    """From the folder tiny-imagenet-200: grey images as RGB; classes are sorted by their wnids."""
    # wnids.txt: a class a line; train/CLASS/images/*.JPEG; val/images/*.JPEG
    # val/val_annotations.txt: file, class and a box, with tabs between
    classes = sorted(line.strip() for line in _lines(folder / "wnids.txt") if line.strip())
    number = {wnid: k for k, wnid in enumerate(classes)}
    train = [(path, number[w]) for w in classes for path in sorted((folder / "train" / w / "images").glob("*.JPEG"))]
    annotations, validation = folder / "val" / "val_annotations.txt", []
    for k, line in enumerate(_lines(annotations), start=1):
        file, wnid, *_ = (*line.split("\t"), "")
        if wnid.strip() not in number:
            raise DataError(f"{annotations}, line {k}: class {wnid.strip()!r} is not in wnids.txt")
        validation.append((folder / "val" / "images" / file, number[wnid.strip()]))
    if not train or not validation:
        raise DataError(f"{folder}: no images in train/CLASS/images, or none listed in val/val_annotations.txt")
    arrays: list[np.ndarray] = []
    with ThreadPoolExecutor(4) as pool:
        for part in (train, validation):
            x = np.empty((len(part), 3, SIDE, SIDE), dtype=np.uint8)
            for k, image in enumerate(pool.map(_image, [path for path, _ in part])):
                x[k] = image
            arrays += [x, np.array([label for _, label in part])]
    return arrays


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from None


def _image(path: Path) -> np.ndarray:
    """[3, 64, 64] uint8. Only the JPEG decoder is ever tried, and only after the size was seen."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("tiny-imagenet: its folder of JPEG files needs pillow (pip install pillow)") from None
    try:
        with Image.open(path, formats=["JPEG"]) as image:
            if image.size != (SIDE, SIDE):
                width, height = image.size
                raise DataError(f"{path}: found an image of {width} x {height}, expected {SIDE} x {SIDE}")
            return np.moveaxis(np.asarray(image.convert("RGB")), -1, 0)
    except UnidentifiedImageError:
        raise DataError(f"{path}: not a JPEG file") from None
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror or str(e).splitlines()[0]})") from None
