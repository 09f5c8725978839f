"""Named data sets: `load("fashion-mnist").partition("dirichlet:0.5", clients=100)` gives a Federation."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from polyfed.base import plugins, settings
from polyfed.base.arguments import checked
from polyfed.base.columns import ARRAYS, DEFAULTS, Columns
from polyfed.base.errors import ConfigError, DataError, PolyfedError, closest
from polyfed.base.registry import Registry
from polyfed.base.text import nfc
from polyfed.base.values import Limits
from polyfed.data import prepare, readers, synthetic
from polyfed.data.csv_files import IMAGE, LABEL
from polyfed.data.dataset import Dataset
from polyfed.data.federation import Federation
from polyfed.data.tables import check_sites, load_tables
from polyfed.data.tiny_imagenet import read_folder

# the registry

Loader = Callable[..., Dataset]
ADDED = ("polyfed.data", "a function of data_dir and options that returns a polyfed.data.Dataset", callable)
LOADERS: Registry[Loader] = Registry("data.name", DataError, ADDED)
SEED = Annotated[int, Limits(ge=0, lt=2**32)]
Normalise = bool | Literal["half"]
Standardise = Literal["pooled", "client"] | None


def dataset(name: str) -> Callable[[Loader], Loader]:
    """Register a loader: a function of `data_dir` and keyword options that returns a Dataset."""

    def register(loader: Loader) -> Loader:
        return LOADERS.add(name, loader)

    return register


def names() -> tuple[str, ...]:
    """The names that `load` knows, in the order of registration."""
    return tuple(LOADERS.names())


@checked
def about(name: str) -> str:
    """Describe a named data set, by the docstring of its loader.

    Parameters
    ----------
    name : str
        The data set.

    Returns
    -------
    str
        One line, and more where there is more to say.
    """
    return inspect.getdoc(LOADERS.find(name)) or name


@checked
def options(name: str) -> dict[str, Any]:
    """The options of a named data set and their defaults.

    Parameters
    ----------
    name : str
        The data set.

    Returns
    -------
    dict
        Option -> default.
    """
    return {p.name: p.default for p in list(inspect.signature(LOADERS.find(name)).parameters.values())[1:]}


def default_dir() -> Path:
    """Folder of data files, which need not exist: $POLYFED_DATA, else .cache/polyfed in the home folder."""
    return Path(os.environ.get("POLYFED_DATA") or Path.home() / ".cache" / "polyfed")


@checked
def load(
    name: str | Path, data_dir: str | Path | None = None, *, without: Sequence[str] = (), **options: Any
) -> Dataset:
    """A data set by name, or the CSV or npz files of a folder (one client per file), or one such file.

    Parameters
    ----------
    name : str or Path
        One of `names()`, or a path.
    data_dir : str, Path or None
        Folder of downloaded files; None: `default_dir()`.
    without : sequence of str
        Clients whose files in a folder are not opened; for a named data set, `Dataset.partition` leaves them out.
    **options
        Options of the data set, see `options(name)`, also in kebab-case; for a path those of the table [columns], such
        as target, task, drop, labels, categories, missing and standardise (see `polyfed config columns`).

    Returns
    -------
    Dataset
        `partition` divides it, and prepares tables from training rows alone.
    """
    text = str(name)
    if not LOADERS.knows(text) and (isinstance(name, Path) or os.sep in text or "/" in text or os.path.exists(text)):
        columns = _columns(text, _snake(options), DataError)
        return replace(_folder(Path(text), columns, without), options=columns.given)
    loader = LOADERS.find(text)
    checked = _options(loader, options, text)
    with plugins.blamed(LOADERS.origin(text), f"data.name: {text}", DataError):
        loaded = loader(Path(data_dir) if data_dir is not None else default_dir(), **checked)
        return replace(loaded, options=checked)


def check_options(name: str, options: Mapping[str, Any], refusal: type[PolyfedError] = DataError) -> None:
    """Raise `refusal` for the first option that a named data set, or a folder, does not take."""
    if LOADERS.knows(name):
        _options(LOADERS.find(name), options, name, refusal)
    else:
        _columns(name, _snake(options), refusal)


def _options(
    loader: Loader, given: Mapping[str, Any], name: str, refusal: type[PolyfedError] = DataError
) -> dict[str, Any]:
    return settings.options(loader, _snake(given), 1, "data.options.", name, refusal)


def _snake(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in given.items()}


def _columns(path: str | Path, given: Mapping[str, Any], refusal: type[PolyfedError]) -> Columns:
    """The settings of `Columns` among a folder's options. Raises `refusal` for an unknown one, ConfigError else."""
    known = list(DEFAULTS)
    for key in given:
        if key not in known:
            raise refusal(
                f"data.options.{key}: a folder has no such option{closest(key, known)}; known: {', '.join(known)}"
            )
    return Columns(**given)


def _folder(path: Path, columns: Columns, without: Sequence[str] = ()) -> Dataset:
    """The CSV or npz files of a folder, one client each, or of one file."""
    pictures = readers.picture_folders(path)
    there = pictures or readers.files_of(path)
    if pictures:
        columns = replace(columns, image=columns.image or IMAGE, target=columns.target or LABEL)
    gone = {*map(nfc, without)}
    paths, single = [p for p in there if nfc(p.stem) not in gone], len(there) == 1
    if not paths:
        raise DataError(f"{path}: every client is left out, expected at least one to stay")
    if pictures or all(p.suffix.lower() == ".csv" for p in paths):
        check_sites(columns, [p.stem for p in there])
        return load_tables(paths, columns, single)
    if wrong := [key for key in columns.given if key not in ARRAYS]:
        raise ConfigError(f"columns.{wrong[0].replace('_', '-')}: {path} holds arrays; this is for CSV files alone")
    clients = readers.read_clients(paths)
    tests = [c.test for c in clients if c.test is not None] or None
    # from_arrays finds what is wrong with the values and names the client
    checked = Federation.from_arrays(
        [c.train for c in clients],
        tests,
        names=[c.name for c in clients],
        classes=columns.classes,
        test_fraction=0.0,
        task=columns.kind,
    )
    return Dataset(
        name=path.stem if path.is_file() else path.name,
        x=checked.train.x.numpy(),
        y=checked.train.y.numpy(),
        x_test=None if tests is None else checked.test.x.numpy(),
        y_test=None if tests is None else checked.test.y.numpy(),
        classes=checked.classes,
        tokens=checked.tokens,
        notes=checked.notes,
        standardise=None if columns.standardise == "none" else columns.standardise,
        meta={k: checked.meta[k] for k in ("labels",) if k in checked.meta},
        groups=None if single else np.repeat(np.arange(checked.n), checked.train.counts),
        group_names=None if single else checked.names,
        test_groups=None if tests is None or single else np.repeat(np.arange(checked.n), checked.test.counts),
    )


def _find(data_dir: Path, folders: Sequence[str], file: str, name: str) -> Path:
    """The first of data_dir/<folder>/file that exists, with or without its .gz; or DataError with what to do."""
    for folder in folders:
        for candidate in (file, file.removesuffix(".gz")):
            if (path := data_dir / folder / candidate).is_file():
                return path
    fetched = f", or run: polyfed data fetch {name} --data-dir {data_dir}" if name in IDX_MD5 else ""
    there = f"put it there, set POLYFED_DATA{fetched}" if fetched else "put it there, or set POLYFED_DATA"
    raise DataError(f"{name}: no {file} in {data_dir} or {data_dir / folders[0]}; {there}")


# images

IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
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


Channels = tuple[tuple[float, ...], tuple[float, ...]]
CHANNELS: dict[str, Channels] = {  # mean and deviation of the official training pixels / 255, as usually rounded
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "tiny-imagenet": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


def _channels(name: str, normalise: Normalise) -> Channels | None:
    """Read the option `normalise`: False, True (the data set's usual constants) or "half" (to [-1, 1])."""
    mean, deviation = CHANNELS[name]
    return None if normalise is False else (mean, deviation) if normalise is True else ((0.5,), (0.5,))


def _idx(
    data_dir: Path, name: str, folders: Sequence[str], flat: bool, normalise: Normalise, notes: tuple[str, ...]
) -> Dataset:
    channels = _channels(name, normalise)
    paths = [_find(data_dir, folders, file, name) for file in IDX_FILES]
    arrays = [readers.read_idx(path) for path in paths]
    for images, labels, i in ((arrays[0], arrays[1], 0), (arrays[2], arrays[3], 2)):
        if images.ndim != 3 or images.dtype != np.uint8:
            raise DataError(
                f"{paths[i]}: found images of shape {list(images.shape)}, {images.dtype}, expected [N, 28, 28] of uint8"
            )
        if labels.ndim != 1 or len(labels) != len(images) or not len(labels):
            raise DataError(
                f"{paths[i + 1]}: found labels {list(labels.shape)} for {len(images)} images, expected one each"
            )
        if labels.max() > 9:
            raise DataError(f"{paths[i + 1]}: found label {labels.max()}, expected 0 to 9")
    for path, expected in zip(paths, IDX_MD5[name], strict=True):
        if path.suffix == ".gz" and readers.md5(path) != expected:
            notes = (*notes, f"{path.name} is not the published file (its MD5 differs)")
    x, y, x_test, y_test = arrays

    def shaped(a: np.ndarray) -> np.ndarray:
        return a.reshape(len(a), -1) if flat else a[:, None]

    x, x_test = shaped(x), shaped(x_test)
    return Dataset(name, x, y.astype(np.int64), x_test, y_test.astype(np.int64), 10, normalise=channels, notes=notes)


@dataset("mnist")
def mnist(data_dir: Path, flat: bool = False, normalise: Normalise = False) -> Dataset:
    """MNIST: 60,000 + 10,000 grey images of handwritten digits, [1, 28, 28] (flat: [784]), 10 classes.

    normalise: False (pixels in [0, 1]), True (mean 0.1307, deviation 0.3081) or "half" (0.5 and 0.5: to [-1, 1]).
    """
    notes = ("MNIST: Y. LeCun, C. Cortes, C. Burges; commonly stated as CC BY-SA 3.0; nearly solved",)
    return _idx(data_dir, "mnist", ("mnist", "", "MNIST/raw"), flat, normalise, notes)


@dataset("fashion-mnist")
def fashion_mnist(data_dir: Path, flat: bool = False, normalise: Normalise = False) -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 grey images of clothing, [1, 28, 28] (flat: [784]), 10 classes.

    normalise: False (pixels in [0, 1]), True (mean 0.2860, deviation 0.3530) or "half" (0.5 and 0.5: to [-1, 1]).
    """
    notes = ("Fashion-MNIST: Zalando SE, MIT licence (Xiao, Rasul, Vollgraf 2017, arXiv 1708.07747)",)
    folders = ("fashion_mnist", "fashion-mnist", "", "FashionMNIST/raw")
    return _idx(data_dir, "fashion-mnist", folders, flat, normalise, notes)


@dataset("hybrid")
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


@dataset("digits")
def digits(data_dir: Path, flat: bool = False) -> Dataset:
    """Digits of scikit-learn: 1,797 grey images, [1, 8, 8] in [0, 1] (flat: [64]), 10 classes; no file needed."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    x = (found.images / 16).astype(np.float32)
    notes = ("digits: E. Alpaydin, C. Kaynak, UCI (test part of Optical Recognition of Handwritten Digits), CC BY 4.0",)
    x = x.reshape(len(x), -1) if flat else x[:, None]
    return Dataset("digits", x, found.target.astype(np.int64), classes=10, notes=notes)


CIFAR_NOTES = (
    "CIFAR: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; no formal licence",
    "CIFAR comes from the 80 Million Tiny Images, which their authors withdrew for offensive categories; it has known "
    "near-duplicates between train and test, and a few wrong labels",
)


def _image_npz(path: Path, key: str, side: int, classes: int) -> list[np.ndarray]:
    """[x, y, x_test, y_test] of an npz of colour images: x_train uint8 [N, side, side, 3], labels `key` + train, ..."""
    z = readers.read_npz(path, ["x_train", "y_train", "x_test", "y_test"])
    if f"{key}train" not in z or f"{key}test" not in z:
        raise DataError(f"{path}: no coarse_train and coarse_test in it; use labels='fine'")
    parts = []
    for split in ("train", "test"):
        x, y = z[f"x_{split}"], z[f"{key}{split}"]
        if x.dtype != np.uint8 or x.shape[1:] != (side, side, 3) or y.shape != (len(x),) or y.dtype.kind not in "iu":
            raise DataError(
                f"{path}: found x_{split} {x.dtype} {list(x.shape)}, expected uint8 [N, {side}, {side}, 3] and N labels"
            )
        if len(y) and not 0 <= y.min() <= y.max() < classes:
            raise DataError(f"{path}: found labels from {y.min()} to {y.max()}, expected 0 to {classes - 1}")
        parts += [np.ascontiguousarray(np.moveaxis(x, -1, 1)), y.astype(np.int64)]
    return parts


def _subset(name: str, train: int, test: int, full: int) -> tuple[str, ...]:
    """The note for fewer training images than the official set has."""
    if train >= full:
        return ()
    return (f"{name}: a subset of {train} + {test} images; not comparable with the full set",)


def _cifar(
    data_dir: Path,
    name: str,
    batches: str,
    train: Sequence[str],
    test: str,
    column: int,
    classes: int,
    normalise: Normalise,
) -> Dataset:
    """CIFAR from an npz (x_train, y_train, x_test, y_test) or from the binary version, whichever is there."""
    channels = _channels(name, normalise)
    folders = [data_dir / name, data_dir, data_dir / name / batches, data_dir / batches]
    found = [f for folder in folders[:2] for f in sorted(folder.glob(f"{name}*.npz"))]
    notes = CIFAR_NOTES
    if found:
        x, y, x_test, y_test = _image_npz(found[0], "coarse_" if classes == 20 else "y_", 32, classes)
        notes += _subset(name, len(x), len(x_test), 50_000)
        return Dataset(name, x, y, x_test, y_test, classes, normalise=channels, notes=notes)
    for folder in folders:
        if (folder / test).is_file():
            read = [readers.read_cifar(folder / file, 1 if name == "cifar10" else 2) for file in train]
            x, y = np.concatenate([r[0] for r in read]), np.concatenate([r[1] for r in read])[:, column]
            x_test, y_test = readers.read_cifar(folder / test, 1 if name == "cifar10" else 2)
            y, y_test = y.astype(np.int64), y_test[:, column].astype(np.int64)
            return Dataset(name, x, y, x_test, y_test, classes, normalise=channels, notes=notes)
    official = "cifar-10" if name == "cifar10" else "cifar-100"
    for pickled in (f"{official}-python.tar.gz", f"{official}-batches-py", f"{official}-python"):
        if any((folder / pickled).exists() for folder in folders[:2]):
            raise DataError(
                f"{name}: {pickled} holds pickles, which are never read; take the binary version "
                f"({official}-binary.tar.gz, unpacked) or an npz with x_train, y_train, x_test, y_test"
            )
    raise DataError(
        f"{name}: neither {name}*.npz nor {test} (binary version) in {data_dir} or {data_dir / name}; "
        f"put it there, set POLYFED_DATA, or run: polyfed data fetch {name} --data-dir {data_dir}"
    )


@dataset("cifar10")
def cifar10(data_dir: Path, normalise: Normalise = False) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour images (or a subset in an npz), [3, 32, 32], 10 classes.

    normalise: False (pixels in [0, 1]), True (means .491 .482 .447, deviations .247 .243 .262) or "half" (to [-1, 1]).
    """
    train = [f"data_batch_{k}.bin" for k in range(1, 6)]
    return _cifar(data_dir, "cifar10", "cifar-10-batches-bin", train, "test_batch.bin", 0, 10, normalise)


@dataset("cifar100")
def cifar100(data_dir: Path, labels: Literal["fine", "coarse"] = "fine", normalise: Normalise = False) -> Dataset:
    """CIFAR-100: 50,000 + 10,000 colour images (or a subset in an npz), [3, 32, 32], 100 fine or 20 coarse classes.

    normalise: False (pixels in [0, 1]), True (means .5071 .4867 .4408, deviations .2675 .2565 .2761) or "half".
    """
    classes, column = (100, 1) if labels == "fine" else (20, 0)
    return _cifar(data_dir, "cifar100", "cifar-100-binary", ["train.bin"], "test.bin", column, classes, normalise)


@dataset("tiny-imagenet")
def tiny_imagenet(data_dir: Path, normalise: Normalise = False) -> Dataset:
    """Tiny ImageNet: 100,000 + 10,000 colour images, [3, 64, 64], 200 classes; the validation images are the test set.

    From the unpacked folder tiny-imagenet-200, or an npz (x_train uint8 [N, 64, 64, 3], y_train, x_test, y_test), which
    is read much faster. normalise: False (pixels in [0, 1]) or True (0.5 and 0.5 per channel: to [-1, 1]).
    """
    name, channels = "tiny-imagenet", _channels("tiny-imagenet", normalise)
    places = [data_dir / "tiny-imagenet", data_dir / "tiny_imagenet", data_dir]
    found = [f for place in places for f in sorted(place.glob("tiny[-_]imagenet*.npz"))]
    folders = [f for place in places for f in (place, place / "tiny-imagenet-200") if (f / "wnids.txt").is_file()]
    if found:
        x, y, x_test, y_test = _image_npz(found[0], "y_", 64, 200)
    elif folders:
        x, y, x_test, y_test = read_folder(folders[0])
    else:
        raise DataError(
            f"{name}: no folder tiny-imagenet-200 and no tiny-imagenet*.npz in {data_dir} or {places[0]}; unpack "
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip there, or set POLYFED_DATA"
        )
    notes = (
        "Tiny ImageNet: Stanford CS231n; a part of ImageNet, for non-commercial research and education",
        "its official test labels are not public: the validation images are the test set",
        *_subset(name, len(x), len(x_test), 100_000),
    )
    return Dataset(name, x, y, x_test, y_test, 200, normalise=channels, notes=notes)


# tables with natural clients

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


@dataset("heart-disease")
def heart_disease(data_dir: Path, standardise: Standardise = "pooled") -> Dataset:
    """UCI Heart Disease, four hospitals, 303 + 261 + 46 + 130 patients, 10 inputs, 2 classes; ships with polyfed.

    Prepared as Fed-Heart-Disease of FLamby: slope, ca and thal dropped, then patients with a gap; target num > 0.
    standardise: "pooled" (default), "client" (each hospital by itself) or None; always by training rows only.
    """
    folder = Path(__file__).parent / "files" / "heart_disease"
    used = [*range(10), 13]  # of age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num
    xs, ys = [], []
    for hospital in HOSPITALS:
        rows = [line.split(",") for line in (folder / f"processed.{hospital}.data").read_text().splitlines() if line]
        cells = [[row[k] for k in used] for row in rows]
        values = np.array([row for row in cells if "?" not in row], dtype=np.str_).astype(np.float64)
        xs.append(values[:, :-1].astype(np.float32))
        ys.append((values[:, -1] > 0).astype(np.int64))
    notes = (
        "Heart Disease: UCI, CC BY 4.0; principal investigators A. Janosi (Budapest), W. Steinbrunn (Zurich), "
        "M. Pfisterer (Basel), R. Detrano (Long Beach and Cleveland)",
        "strongly heterogeneous and small (46 patients in Switzerland): give intervals; chol = 0 means missing there "
        "and for part of Long Beach",
    )
    if standardise == "pooled":
        notes = (*notes, prepare.POOLED.format(what="inputs are"))
    return Dataset(
        "heart-disease",
        np.concatenate(xs),
        np.concatenate(ys),
        classes=2,
        groups=np.repeat(np.arange(4), [len(y) for y in ys]),
        group_names=HOSPITALS,
        standardise=standardise,
        notes=notes,
        meta={"columns": ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"]},
    )


@dataset("parkinsons")
def parkinsons(
    data_dir: Path, target: Literal["total", "motor"] = "total", standardise: Standardise = "pooled"
) -> Dataset:
    """UCI Parkinsons Telemonitoring: 42 patients, 5,875 recordings; regression of the UPDRS score (points).

    19 inputs: age, sex, test_time (days) and 16 voice measures. target: "total" or "motor" UPDRS; the other one is no
    input. Held-out samples are a patient's last ones in time; recordings of one session stay together.
    standardise: "pooled" (default), "client" or None.
    """
    path = _find(data_dir, ("parkinsons", ""), "parkinsons_updrs.data", "parkinsons")
    header, values = readers.read_csv(path)
    if len(header) != 22 or header[0] != "subject#":
        raise DataError(
            f"{path}: 22 columns starting with subject# are expected, found {len(header)}: {header[0]}, ..."
        )
    patients, groups = np.unique(values[:, 0].astype(np.int64), return_inverse=True)
    order = np.lexsort((values[:, 3], groups))
    values, groups = values[order], groups[order]
    gap = np.diff(values[:, 3], prepend=-np.inf) > 0.5  # days; recordings of one session lie within minutes
    gap[1:] |= groups[1:] != groups[:-1]
    notes = (
        "Parkinsons Telemonitoring: UCI, CC BY 4.0; cite Tsanas, Little, McSharry, Ramig, IEEE TBME 2009",
        "repeated measures of 42 patients, split by time; UPDRS was interpolated linearly between clinic visits",
    )
    if standardise == "pooled":
        notes = (*notes, prepare.POOLED.format(what="inputs are"))
    return Dataset(
        "parkinsons",
        values[:, [1, 2, 3, *range(6, 22)]].astype(np.float32),
        values[:, 5 if target == "total" else 4].astype(np.float32),
        groups=groups,
        group_names=tuple(f"patient-{p}" for p in patients),
        times=np.cumsum(gap),
        standardise=standardise,
        notes=notes,
    )


@dataset("school")
def school(data_dir: Path, standardise: Standardise = "pooled") -> Dataset:
    """ILEA School: 139 schools, 15,362 pupils, 28 inputs (the last is constant 1); regression of the exam score.

    standardise: "pooled" (default), "client" or None; the constant column is left as it is.
    """
    path = _find(data_dir, ("school", ""), "school.npz", "school")
    z = readers.read_npz(path, ["X", "y", "school"])
    if z["X"].ndim != 2 or not len(z["X"]) == len(z["y"]) == len(z["school"]):
        raise DataError(f"{path}: X, y and school must have one row per pupil")
    schools, groups = np.unique(z["school"], return_inverse=True)
    notes = (
        "School: Inner London Education Authority, 1985 to 1987; no formal licence known for the data",
        "the inputs explain little of the variance linearly: a low R2 is normal",
    )
    if standardise == "pooled":
        notes = (*notes, prepare.POOLED.format(what="inputs are"))
    return Dataset(
        "school",
        z["X"].astype(np.float32),
        z["y"].astype(np.float32),
        groups=groups,
        group_names=tuple(f"school-{s}" for s in schools),
        standardise=standardise,
        notes=notes,
    )


@dataset("housing-bodyfat")
def housing_bodyfat(
    data_dir: Path, scale: Literal["minmax", "unit", "z-score"] | None = "minmax", seed: SEED = 0
) -> Dataset:
    """FPFC's H&BF: Boston Housing on 6 clients, with a 14th input N(0, 1), and Body fat on 2; regression, 2 clusters.

    scale: inputs, per data set, by training rows: "minmax" to [-1, 1] (default), "unit" to [0, 1], "z-score" or None;
    the paper does not state its own. seed: of the extra input and of the rows' random assignment, in equal parts.
    """
    folders = ("housing_bodyfat", "housing-bodyfat", "")
    housing_path = _find(data_dir, folders, "boston_housing.csv", "housing-bodyfat")
    bodyfat_path = _find(data_dir, folders, "bodyfat.csv", "housing-bodyfat")
    housing, bodyfat = readers.read_csv(housing_path)[1], readers.read_csv(bodyfat_path)[1]
    for path, table, width in ((housing_path, housing, 14), (bodyfat_path, bodyfat, 15)):
        if table.shape[1] != width:
            raise DataError(f"{path}: found {table.shape[1]} columns, expected {width}")
    rng = prepare.keyed(seed, 31)
    x = np.concatenate([np.column_stack([housing[:, :-1], rng.standard_normal(len(housing))]), bodyfat[:, :-1]])
    groups = np.concatenate(
        [rng.permutation(np.arange(len(housing)) % 6), 6 + rng.permutation(np.arange(len(bodyfat)) % 2)]
    )
    notes = (
        "Boston Housing has an ethical problem: its variable B was built on the assumption that racial "
        "self-segregation raises house prices; scikit-learn removed the data for that, and strongly discourages its "
        "use. It is here only to compare with the FPFC paper: say so with every result",
        "Body fat: A. G. Fisher, StatLib; BodyFat is computed from Density, one of its inputs; some rows are known bad",
    )
    return Dataset(
        "housing-bodyfat",
        x.astype(np.float32),
        np.concatenate([housing[:, -1], bodyfat[:, -1]]).astype(np.float32),
        groups=groups,
        group_names=(*(f"housing-{i}" for i in range(6)), "bodyfat-0", "bodyfat-1"),
        group_clusters=np.array([0] * 6 + [1] * 2),
        standardise=None if scale is None else "cluster",
        scaling=scale or "z-score",
        notes=notes,
    )


@dataset("synthetic")
def synthetic_alpha_beta(
    data_dir: Path,
    alpha: Annotated[float, Limits(ge=0, le=1e3)] = 1.0,
    beta: Annotated[float, Limits(ge=0, le=1e3)] = 1.0,
    clients: Annotated[int, Limits(ge=1, le=10000)] = 30,
    seed: SEED = 0,
) -> Dataset:
    """FedProx's Synthetic(alpha, beta): 60 inputs, 10 classes, a model and a law of inputs per client.

    alpha: how unlike the clients' models are; beta: how unlike their inputs; clients: their number; seed: the data's.
    """
    x, y, groups, W, b = synthetic.synthetic(alpha, beta, clients, seed)
    return _generated("synthetic", x, y, 10, groups, meta={"weights": W, "biases": b})


@dataset("fcube")
def fcube(data_dir: Path, seed: SEED = 0) -> Dataset:
    """FCUBE of NIID-Bench: 5000 points of a cube, two classes, four clients that see other octants of it.

    seed: the data's. The classes are those of one linear model at every client.
    """
    x, y, groups = synthetic.fcube(5000, seed)
    return _generated("fcube", x, y, 2, groups, np.zeros(4, dtype=np.int64))


@dataset("mixtures")
def mixtures(
    data_dir: Path,
    shares: Literal["10:90", "30:70", "linear"] = "10:90",
    clients: Annotated[int, Limits(ge=2, le=10000)] = 100,
    seed: SEED = 0,
) -> Dataset:
    """Clients with samples of two sources in known shares, as FedSoft mixes them: 20 inputs, 5 classes.

    shares: "10:90", "30:70" or "linear"; clients: their number; seed: the data's. A client's cluster is the source that
    it has more of; meta has the shares.
    """
    x, y, groups, source, found, models = synthetic.mixtures(shares, clients, seed)
    meta = {"weights": models, "shares": found, "source": source}
    return _generated("mixtures", x, y, 5, groups, found.argmax(1), meta)


def _generated(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    classes: int,
    groups: np.ndarray,
    clusters: np.ndarray | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Dataset:
    """Samples of natural clients from a formula."""
    names = tuple(f"client-{i}" for i in range(int(groups.max()) + 1))
    return Dataset(
        name, x.astype(np.float32), y.astype(np.int64), classes=classes, groups=groups, group_names=names,
        group_clusters=clusters, meta=meta or {},
    )  # fmt: skip


def _fpfc_loader(scenario: str) -> Loader:
    def load_fpfc(
        data_dir: Path,
        features: Literal["uniform", "normal"] = "uniform",
        scale: Literal["small", "full"] = "full",
        seed: SEED = 0,
    ) -> Dataset:
        d = synthetic.fpfc(scenario, seed=seed, features=features, scale=scale)
        notes = (
            ("normal features: the FPFC paper's text; its tables used uniform ones",) if features == "normal" else ()
        )
        return Dataset(
            f"fpfc-{scenario}",
            d.x.astype(np.float32),
            d.y.astype(np.int64),
            classes=10,
            groups=d.groups,
            group_names=tuple(f"client-{i}" for i in range(len(d.sizes))),
            group_clusters=d.clusters,
            validation_fraction=0.2,
            notes=notes,
            meta={"weights": d.weights, "biases": d.biases},
        )

    blocks = synthetic.FPFC_SCENARIOS[scenario]["full"]
    sizes = (
        f"{len(blocks)} clusters of {blocks[0]}"
        if len(set(blocks)) == 1
        else f"clusters of {', '.join(map(str, blocks))}"
    )
    load_fpfc.__doc__ = (
        f"FPFC's synthetic scenario {scenario.upper()}: {sum(blocks)} clients, {sizes}; 60 inputs, 10 classes.\n\n"
        'features: "uniform" (as the tables) or "normal" (as the text); scale: "full" or "small"; seed: the data\'s.\n'
        "Cut 64 % train, 16 % validation, 20 % test. See `synthetic.fpfc`."
    )
    return load_fpfc


for _scenario in synthetic.FPFC_SCENARIOS:
    dataset(f"fpfc-{_scenario}")(_fpfc_loader(_scenario))
