"""Named tables whose clients are patients, schools or studies."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from polyfed.base.errors import DataError
from polyfed.data import prepare
from polyfed.data.dataset import Dataset
from polyfed.data.datasets import SEED, Standardise
from polyfed.data.readers import read_csv, read_npz
from polyfed_papers.files import there


def _numbers(name: str, x: np.ndarray, y: np.ndarray, notes: tuple[str, ...], **more: Any) -> Dataset:
    """A regression whose clients are natural."""
    if more["standardise"] == "pooled":
        notes = (*notes, prepare.POOLED.format(what="inputs are"))
    return Dataset(name, x.astype(np.float32), y.astype(np.float32), notes=notes, **more)


def parkinsons(
    data_dir: Path, target: Literal["total", "motor"] = "total", standardise: Standardise = "pooled"
) -> Dataset:
    """UCI Parkinsons Telemonitoring: 42 patients, 5,875 recordings; regression of the UPDRS score (points).

    19 inputs: age, sex, test_time (days) and 16 voice measures. target: "total" or "motor" UPDRS; the other one is no
    input. Held-out samples are a patient's last ones in time; recordings of one session stay together.
    standardise: "pooled" (default), "client" or None.
    """
    path = there(data_dir, "parkinsons", ("parkinsons_updrs.data",), "parkinsons_updrs.data")
    header, values = read_csv(path)
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
    return _numbers(
        "parkinsons", values[:, [1, 2, 3, *range(6, 22)]], values[:, 5 if target == "total" else 4], notes,
        groups=groups, group_names=tuple(f"patient-{p}" for p in patients), times=np.cumsum(gap),
        standardise=standardise,
    )  # fmt: skip


def school(data_dir: Path, standardise: Standardise = "pooled") -> Dataset:
    """ILEA School: 139 schools, 15,362 pupils, 28 inputs (the last is constant 1); regression of the exam score.

    standardise: "pooled" (default), "client" or None; the constant column is left as it is.
    """
    path = there(data_dir, "school", ("school.npz",), "school.npz")
    z = read_npz(path, ["X", "y", "school"])
    if z["X"].ndim != 2 or not len(z["X"]) == len(z["y"]) == len(z["school"]):
        raise DataError(f"{path}: X, y and school must have one row per pupil")
    schools, groups = np.unique(z["school"], return_inverse=True)
    notes = (
        "School: Inner London Education Authority, 1985 to 1987; no formal licence known for the data",
        "the inputs explain little of the variance linearly: a low R2 is normal",
    )
    names = tuple(f"school-{s}" for s in schools)
    return _numbers("school", z["X"], z["y"], notes, groups=groups, group_names=names, standardise=standardise)


def housing_bodyfat(
    data_dir: Path, scale: Literal["minmax", "unit", "z-score"] | None = "minmax", seed: SEED = 0
) -> Dataset:
    """FPFC's H&BF: Boston Housing on 6 clients, with a 14th input N(0, 1), and Body fat on 2; regression, 2 clusters.

    scale: inputs, per data set, by training rows: "minmax" to [-1, 1] (default), "unit" to [0, 1], "z-score" or None;
    the paper does not state its own. seed: of the extra input and of the rows' random assignment, in equal parts.
    """
    name, folders, found = "housing-bodyfat", ("housing_bodyfat", "housing-bodyfat"), list[np.ndarray]()
    for file, width in (("boston_housing.csv", 14), ("bodyfat.csv", 15)):
        path = there(data_dir, name, (file,), file, folders)
        found.append(read_csv(path)[1])
        if found[-1].shape[1] != width:
            raise DataError(f"{path}: found {found[-1].shape[1]} columns, expected {width}")
    (housing, bodyfat), rng = found, prepare.keyed(seed, 31)
    x = np.concatenate([np.column_stack([housing[:, :-1], rng.standard_normal(len(housing))]), bodyfat[:, :-1]])
    groups = [rng.permutation(np.arange(len(housing)) % 6), 6 + rng.permutation(np.arange(len(bodyfat)) % 2)]
    notes = (
        "Boston Housing has an ethical problem: its variable B was built on the assumption that racial "
        "self-segregation raises house prices; scikit-learn removed the data for that, and strongly discourages its "
        "use. It is here only to compare with the FPFC paper: say so with every result",
        "Body fat: A. G. Fisher, StatLib; BodyFat is computed from Density, one of its inputs; some rows are known bad",
    )
    return _numbers(
        name, x, np.concatenate([housing[:, -1], bodyfat[:, -1]]), notes, groups=np.concatenate(groups),
        group_names=(*(f"housing-{i}" for i in range(6)), "bodyfat-0", "bodyfat-1"),
        group_clusters=np.array([0] * 6 + [1] * 2), standardise=None if scale is None else "cluster",
        scaling=scale or "z-score",
    )  # fmt: skip
