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
from polyfed.data import prepare, readers
from polyfed.data.csv_files import IMAGE, LABEL
from polyfed.data.dataset import Dataset
from polyfed.data.federation import Federation, strata_of
from polyfed.data.readers import is_url
from polyfed.data.tables import load_tables

# the registry

Loader = Callable[..., Dataset]
ADDED = ("polyfed.data", "a function of data_dir and options that returns a polyfed.data.Dataset", callable)
LOADERS: Registry[Loader] = Registry("data.name", DataError, ADDED)
SEED = Annotated[int, Limits(ge=0, lt=2**32)]
Standardise = Literal["pooled", "client"] | None


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
        Options of the data set, see `options(name)`, also in kebab-case, and split="stratified"; for a path those of
        the table [columns], such as target, task, drop, categories and standardise (see `polyfed config columns`).

    Returns
    -------
    Dataset
        `partition` divides it, and prepares tables from training rows alone.
    """
    text = str(name)
    if not LOADERS.knows(text) and (isinstance(name, Path) or os.sep in text or "/" in text or os.path.exists(text)):
        columns = _columns(text, _snake(options), DataError)
        return replace(_place(text, columns, without), options=columns.given)
    loader, split = LOADERS.find(text), options.pop("split", None)
    checked = _options(loader, options, text)
    with plugins.blamed(LOADERS.origin(text), f"data.name: {text}", DataError):
        loaded = loader(Path(data_dir) if data_dir is not None else default_dir(), **checked)
        return replace(loaded, options=checked, strata=strata_of(split, loaded.y, loaded.classes))


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
    options = list(DEFAULTS)
    for key in given:
        if key not in options:
            raise refusal(
                f"data.options.{key}: a folder has no such option{closest(key, options)}; known: {', '.join(options)}"
            )
    return Columns(**given)


def tables_at(place: str, columns: Columns) -> tuple[Sequence[Path | str], Columns] | None:
    """The tables at a path or a URL, and what their columns are; None for arrays."""
    pictures = [] if is_url(place) else readers.picture_folders(Path(place))
    if pictures:
        return pictures, replace(columns, image=columns.image or IMAGE, target=columns.target or LABEL)
    paths = [place] if is_url(place) else readers.files_of(Path(place))
    return None if any(Path(path).suffix.lower() == ".npz" for path in paths) else (paths, columns)


def _place(place: str, columns: Columns, without: Sequence[str] = ()) -> Dataset:
    """The tables or npz files of a folder, one client each, or of one file; or the rows of a query."""
    if (found := tables_at(place, columns)) is not None:
        return load_tables(*found, len(found[0]) == 1 and columns.by is None, without)
    path = Path(place)
    there, gone = readers.files_of(path), {*map(nfc, without)}
    paths, single = [p for p in there if nfc(p.stem) not in gone], len(there) == 1
    if not paths:
        raise DataError(f"{path}: every client is left out, expected at least one to stay")
    if wrong := [key for key in columns.given if key not in ARRAYS]:
        raise ConfigError(f"columns.{wrong[0].replace('_', '-')}: {path} holds arrays; this is for tables alone")
    clients = readers.read_clients(paths)
    tests = [c.test for c in clients if c.test is not None] or None
    # from_arrays finds what is wrong with the values and names the client
    checked = Federation.from_arrays(
        [c.train for c in clients], tests, names=[c.name for c in clients], classes=columns.classes, test_fraction=0.0,
        task=columns.kind,
    )  # fmt: skip
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
        strata=strata_of(columns.split, checked.train.y, checked.classes),
        meta={k: checked.meta[k] for k in ("labels",) if k in checked.meta},
        groups=None if single else np.repeat(np.arange(checked.n), checked.train.counts),
        group_names=None if single else checked.names,
        test_groups=None if tests is None or single else np.repeat(np.arange(checked.n), checked.test.counts),
    )


def digits(data_dir: Path, flat: bool = False) -> Dataset:
    """Digits of scikit-learn: 1,797 grey images, [1, 8, 8] in [0, 1] (flat: [64]), 10 classes; no file needed."""
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    x = (bunch.images / 16).astype(np.float32)
    notes = ("digits: E. Alpaydin, C. Kaynak, UCI (test part of Optical Recognition of Handwritten Digits), CC BY 4.0",)
    x = x.reshape(len(x), -1) if flat else x[:, None]
    return Dataset("digits", x, bunch.target.astype(np.int64), classes=10, notes=notes)


HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def heart_disease(data_dir: Path, standardise: Standardise = "pooled") -> Dataset:
    """UCI Heart Disease, four hospitals, 303 + 261 + 46 + 130 patients, 10 inputs, 2 classes; ships with polyfed.

    Prepared as Fed-Heart-Disease of FLamby: slope, ca and thal dropped, then patients with a gap; target num > 0.
    standardise: "pooled" (default), "client" (each hospital by itself) or None; always by training rows only.
    """
    folder = Path(__file__).parent / "files" / "heart_disease"
    used = [*range(10), 13]  # of age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num
    xs, ys = [], []
    for hospital in HOSPITALS:
        lines = (folder / f"processed.{hospital}.data").read_text("utf-8").split()
        rows = [line.split(",") for line in lines]
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
    names = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"]
    return Dataset(
        "heart-disease", np.concatenate(xs), np.concatenate(ys), classes=2,
        groups=np.repeat(np.arange(4), [len(y) for y in ys]), group_names=HOSPITALS, standardise=standardise,
        notes=notes, meta={"columns": names},
    )  # fmt: skip


def synthetic(
    data_dir: Path,
    alpha: Annotated[float, Limits(ge=0, le=1e3)] = 1.0,
    beta: Annotated[float, Limits(ge=0, le=1e3)] = 1.0,
    clients: Annotated[int, Limits(ge=1, le=10000)] = 30,
    seed: SEED = 0,
) -> Dataset:
    """FedProx's Synthetic(alpha, beta): 60 inputs, 10 classes, a model and a law of inputs per client.

    alpha: how unlike the clients' models are; beta: how unlike their inputs; clients: their number; seed: the data's.
    """
    # arXiv 1812.06127, section 5.1: W_i, b_i ~ N(u_i, 1), u_i ~ N(0, alpha); x ~ N(v_i, diag(j^-1.2)), v_i ~ N(B_i, 1),
    # B_i ~ N(0, beta); y = argmax(W_i x + b_i). alpha and beta are deviations, as in the released code
    rng, C, d = prepare.keyed(seed, 24), 10, 60
    sizes = np.floor(rng.lognormal(4, 2, clients)).astype(np.int64) + 50
    u, B = alpha * rng.standard_normal(clients), beta * rng.standard_normal(clients)
    W = u[:, None, None] + rng.standard_normal((clients, C, d))
    b = u[:, None] + rng.standard_normal((clients, C))
    v = B[:, None] + rng.standard_normal((clients, d))
    groups, spread = np.repeat(np.arange(clients), sizes), np.arange(1, d + 1) ** -0.6
    x = v[groups] + spread * rng.standard_normal((len(groups), d))
    y = np.concatenate([(x[groups == i] @ W[i].T + b[i]).argmax(1) for i in range(clients)])
    return Dataset(
        "synthetic", x.astype(np.float32), y, classes=C, groups=groups,
        group_names=tuple(f"client-{i}" for i in range(clients)), meta={"weights": W, "biases": b},
    )  # fmt: skip


LOADERS.update({"digits": digits, "heart-disease": heart_disease, "synthetic": synthetic})
