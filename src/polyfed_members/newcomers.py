"""New clients of a finished run, from files, typed, prepared and scaled as its own were."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.base.errors import ConfigError, DataError, few
from polyfed.data import prepare
from polyfed.data.dataset import Dataset
from polyfed.data.federation import Federation, of_arrays
from polyfed.data.preparation import Preparation
from polyfed.data.raw import Text
from polyfed.data.readers import files_of
from polyfed.data.repairs import read
from polyfed.data.tables import split_of, text_ids, weights_of
from polyfed.runs.config import Where, read_table
from polyfed.runs.result import Result
from polyfed.runs.training import Columns


def fits(old: Federation, new: Federation) -> None:
    """Raise ConfigError or DataError, in one line, for newcomers that cannot join the clients of `old`."""
    if taken := [name for name in new.names if name in old.names]:
        raise ConfigError(f"newcomers: found the name {taken[0]!r}, which a client of the run has; expected a new one")
    if new.input_shape != old.input_shape:
        found, wanted = (list(f.input_shape) for f in (new, old))
        raise DataError(
            f"newcomers: found inputs of shape {found} for {new.names[0]!r}, expected {wanted} as in the run"
        )
    kinds = ["numbers" if f.classes is None else "class labels" for f in (new, old)]
    if kinds[0] != kinds[1]:
        raise DataError(
            f"newcomers: found {kinds[0]} as the targets of {new.names[0]!r}, expected {kinds[1]} as in the run"
        )
    if new.outputs > old.outputs:
        kind = "classes" if old.classes is not None else "numbers per target"
        raise DataError(f"newcomers: {new.outputs} {kind}, the run's model has {old.outputs}")


def newcomers(run: Result, data: str | Path, target: str | None = None) -> Federation:
    """New clients from a CSV or npz file, or a folder of them."""
    place, of, old = Path(data), run.settings.data, run.outline
    if not place.exists():
        raise DataError(f"{place}: no such file or folder")
    if "preparation" in old.meta:
        federation = _prepared(run, files_of(place), target)
    else:
        federation = of_arrays(
            files_of(place),
            target or of.options.get("target"),
            "tokens" if old.tokens is not None else "regression" if old.classes is None else "classification",
            classes=old.classes if old.tokens is None else old.tokens,
            test_fraction=of.test_fraction,
            seed=run.settings.seed,
        )
        labels = federation.meta.get("labels", ())
        if any(isinstance(label, str) for label in labels):
            raise DataError(f"newcomers: found labels {few(labels)}, expected their numbers in the run")
    fits(old, federation)
    return _scaled(federation, old.meta["scaling"], str(run.place())) if "scaling" in old.meta else federation


def _prepared(run: Result, paths: Sequence[Path], target: str | None) -> Federation:
    """New clients from CSV files, their columns prepared as the run's were; what is each client's own is learnt."""
    old, columns = run.outline, read_table(Columns, run.settings.columns, Where(None, {}, {}))
    prep = Preparation.read(old.meta["preparation"], str(run.place()))
    sheets = [read(path, columns) for path in paths]
    more: Any = {}
    if isinstance(raw := prep.raw, Text) and raw.following:
        texts = [text_ids(sheet, raw) for sheet in sheets]
        counts = [*map(len, texts)]
        x, y = np.zeros((sum(counts), 1)), np.zeros(sum(counts))
        more = {"texts": [ids for of in texts for ids in of], "tokens": prep.tokens}
    else:
        counts = [len(sheet.lines) for sheet in sheets]
        x = np.concatenate([prep.codes(sheet) for sheet in sheets])
        y = np.concatenate([prep.targets(sheet, target) for sheet in sheets])
        more["weights"] = (w := columns.weights) and np.concatenate([weights_of(sheet, w) for sheet in sheets])
        cuts = [split_of(sheet, columns, prep.target) for sheet in sheets]
        for key, name in (("whose", "whose"), ("strata", "strata"), ("parts", "given")):
            more[key] = None if cuts[0][name] is None else np.concatenate([cut[name] for cut in cuts])
    data = Dataset(
        "newcomers", x, y, classes=old.classes, groups=np.repeat(np.arange(len(sheets)), counts),
        group_names=tuple(sheet.name for sheet in sheets), preparation=prep, **more,
    )  # fmt: skip
    return data.partition(seed=run.settings.seed, test_fraction=run.settings.data.test_fraction)


def _scaled(federation: Federation, stats: Mapping[str, Any], where: str) -> Federation:
    """Newcomers' inputs, scaled in place by the `stats` that the earlier clients' meta holds."""
    parts = [s for s in (federation.train, federation.validation, federation.test) if s is not None]
    try:
        scope, shape = stats["scope"], federation.input_shape
        if scope == "pooled":
            shift, scale = (torch.tensor(stats[key], dtype=torch.float64).reshape(shape) for key in ("shift", "scale"))
            for split in parts:
                prepare.scale_with(split.x, shift, scale)
        elif scope == "client":
            constant = np.array(stats["constant"], dtype=bool).reshape(shape)
            for i in range(federation.n):
                mine, *others = (split.client(i)[0] for split in parts)
                prepare.standardise(mine, others, constant, stats["method"])
        else:
            raise DataError(
                f"client {federation.names[0]!r}: the inputs of {where} are scaled within true clusters, and a "
                "newcomer's is not known"
            )
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        raise DataError(f"{where}: its scaling is damaged ({type(e).__name__}: {e})") from None
    return federation
