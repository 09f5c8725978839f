"""Data: federations, named data sets, partitions and synthetic problems."""

from typing import TYPE_CHECKING, Any

from polyfed.base.plugins import sibling
from polyfed.data.dataset import Dataset
from polyfed.data.datasets import about, default_dir, load, names, options
from polyfed.data.federation import Federation
from polyfed.data.partition import (
    IID,
    Assignment,
    Corruption,
    Dirichlet,
    DirichletPrior,
    LabelSwap,
    Natural,
    Noise,
    Partitioner,
    Pathological,
    QuantitySkew,
    Rotation,
    Shards,
    Source,
    parse,
)
from polyfed.data.shared import with_global
from polyfed.data.synthetic import diagonal_quadratics, heterogeneous_quadratics, least_squares
from polyfed.data.tables import from_frames
from polyfed.data.texts import from_texts

if TYPE_CHECKING:
    from polyfed_papers.fetch import fetch
    from polyfed_papers.generated import fedcet_quadratics, fpfc

_PAPERS = {"fetch": "fetch", "fedcet_quadratics": "generated", "fpfc": "generated"}


def __getattr__(name: str) -> Any:
    if name not in _PAPERS:
        raise AttributeError(f"module 'polyfed.data' has no attribute {name!r}")
    return getattr(sibling(f"polyfed_papers.{_PAPERS[name]}", f"polyfed.data.{name}"), name)


__all__ = [
    "IID",
    "Assignment",
    "Corruption",
    "Dataset",
    "Dirichlet",
    "DirichletPrior",
    "Federation",
    "LabelSwap",
    "Natural",
    "Noise",
    "Partitioner",
    "Pathological",
    "QuantitySkew",
    "Rotation",
    "Shards",
    "Source",
    "about",
    "default_dir",
    "diagonal_quadratics",
    "fedcet_quadratics",
    "fetch",
    "fpfc",
    "from_frames",
    "from_texts",
    "heterogeneous_quadratics",
    "least_squares",
    "load",
    "names",
    "options",
    "parse",
    "with_global",
]
