"""Further test rows that every client's model is scored on: kept once, and nothing is learnt from them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.base.arguments import checked
from polyfed.base.columns import Columns
from polyfed.base.errors import ConfigError, DataError
from polyfed.compute.split import Split
from polyfed.data.csv_files import sheet_of
from polyfed.data.federation import Federation
from polyfed.data.intake import numbered, pair_of, token_labels, whole_labels
from polyfed.data.preparation import ALL, Preparation
from polyfed.data.readers import read_clients
from polyfed.data.repairs import plain, repaired, targeted

NAME = "global"


@checked
def with_global(federation: Federation, rows: Any, columns: Columns | None = None) -> Federation:
    """The same federation with further test rows, on which every client's model is scored beside its own rows.

    Scores are in `final["global"]` of a run and in the columns `global_...` of its clients.

    Parameters
    ----------
    federation : Federation
        Stays as it is.
    rows : pair, path or DataFrame
        (x, y) as of one client of `Federation.from_arrays`; an npz file with x and y; or for clients from tables a
        table with their columns.
    columns : Columns or None
        How a file is read, such as its encoding.

    Returns
    -------
    Federation
        With the rows as `shared`.

    Raises
    ------
    ConfigError, DataError
        Clients prepare rows each in its own way; a column is missing, a class unknown, a shape another one.
    """
    prepared, train, unit = federation.meta.get("preparation"), federation.train, None
    given = isinstance(rows, tuple | list)
    if prepared is not None and not given:
        x, y, unit = _of_table(Preparation.read(prepared, NAME), rows, columns or Columns())
    elif "scaling" in federation.meta:
        raise ConfigError(f"{NAME} rows: found inputs that the data set scales, expected tables, or arrays as they are")
    elif not isinstance(rows, tuple | list | str | Path):
        raise DataError(
            f"{NAME} rows: found {type(rows).__name__}, expected (x, y) or an npz file, as the clients' data"
        )
    else:
        x, y = pair_of(rows if given else read_clients([rows])[0].train, NAME, "rows", not train.x.is_floating_point())
        y = _targets(federation, y)
    if not len(x):
        raise DataError(f"{NAME} rows: found none, expected at least one")
    for t, like, role in ((x, train.x, "inputs"), (y, train.y, "targets")):
        if t.shape[1:] != like.shape[1:]:
            raise DataError(f"{NAME} rows: found {role} of shape {[*t.shape[1:]]}, expected {[*like.shape[1:]]}")
    split = Split(x.to(train.x.dtype), y.to(train.y.dtype), np.array([0, len(x)]), unit)
    return replace(federation, shared=split)


def _of_table(prep: Preparation, rows: Any, columns: Columns) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, targets and their unit of a table, by what was learnt from training rows."""
    if prep.tokens is not None or (ALL not in prep.sites and prep.standardise != "none" and prep.raw is None):
        each = "standardise = client" if prep.tokens is None else "task = next-token"
        raise ConfigError(f"{NAME} rows: found {each}, expected rows that all clients prepare alike")
    if isinstance(rows, str | Path):
        sheet = plain(Path(rows), columns, columns.encoding)
    else:
        sheet = sheet_of(rows, NAME, NAME, columns.drop, prep.raw.column if prep.raw is not None else None)
    sheet = targeted(repaired(sheet, prep.repairs, sheet.name, prep.limits, prep.gaps), columns)
    if not sheet.lines:
        raise DataError(f"{sheet.where}: found a header and no rows")
    site = next(iter(prep.sites), ALL)
    y, target = torch.from_numpy(prep.targets(sheet)), None if prep.raw is not None else prep.at(site).target
    unit = None if target is None else torch.tensor([target], dtype=torch.float64)
    return torch.from_numpy(prep.transform(prep.codes(sheet), site)), y, unit


def _targets(federation: Federation, y: Tensor) -> Tensor:
    if federation.tokens is not None:
        return token_labels(y, federation.tokens, NAME)
    if federation.classes is None:
        return y
    labels, y = federation.meta.get("labels"), whole_labels(y, NAME, federation.classes)
    return numbered(y, labels if labels and isinstance(labels[0], int) else None, federation.classes, NAME)
