"""The papers' experiments as recipes: `polyfed reproduce fpfc/table1`. One folder per paper, one file per experiment.

A recipe is a function that takes a `Bench` and returns an `Outcome`: our figures beside the paper's, and for every
claim whether it holds here. See recipe.py for the parts it is made of.
"""

import importlib
import pkgutil

from polyfed.base.errors import ConfigError, closest
from polyfed.papers.recipe import RECIPES, Bench, Claim, Outcome, Recipe, recipe

PAPERS = ("fpfc", "fedslr", "fedacs", "fedcet", "pfllib", "flamby")

__all__ = ["PAPERS", "RECIPES", "Bench", "Claim", "Outcome", "Recipe", "find", "load", "recipe"]


def load() -> dict[str, Recipe]:
    """All recipes by name, in the order of the papers."""
    for paper in PAPERS:
        try:
            folder = importlib.import_module(f"polyfed.papers.{paper}")
        except ModuleNotFoundError as e:
            if e.name != f"polyfed.papers.{paper}":
                raise
            continue
        for module in pkgutil.iter_modules(folder.__path__):
            importlib.import_module(f"{folder.__name__}.{module.name}")
    return dict(sorted(RECIPES.items(), key=lambda item: (PAPERS.index(item[0].split("/")[0]), item[1].order)))


def find(name: str) -> Recipe:
    """One recipe, by its name or one that it also answers to. Raises ConfigError with the nearest name."""
    known = load()
    names = {n: r for r in known.values() for n in (r.name, *r.also)}
    if name not in names:
        raise ConfigError(f"unknown recipe {name!r}{closest(name, names)}; polyfed reproduce lists all {len(known)}")
    return names[name]
