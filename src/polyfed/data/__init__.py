"""Data: federations, named data sets, partitions and synthetic problems."""

from polyfed.data.dataset import Dataset
from polyfed.data.datasets import about, default_dir, load, names, options
from polyfed.data.federation import Federation
from polyfed.data.fetch import fetch
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
from polyfed.data.synthetic import diagonal_quadratics, fedcet_quadratics, fpfc, heterogeneous_quadratics, least_squares
from polyfed.data.tables import from_frames
from polyfed.data.texts import from_texts

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
]
