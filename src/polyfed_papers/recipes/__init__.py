"""Recipes: experiments of papers, functions from a `Bench` to an `Outcome`; ours stands beside the printed figures.

Other packages bring recipes by the entry point group `polyfed.recipes`: modules that register them on import.
"""

from importlib import import_module

from polyfed.base import plugins
from polyfed.base.errors import ConfigError, PolyfedError, closest
from polyfed_papers.recipes.recipe import RECIPES, Bench, Outcome, Recipe, recipe
from polyfed_papers.recipes.said import Claim, Setting

__all__ = ["RECIPES", "Bench", "Claim", "Outcome", "Recipe", "Setting", "find", "gather", "load", "origin", "recipe"]

GROUP = "polyfed.recipes"


def gather() -> tuple[dict[str, Recipe], list[str]]:
    """All recipes by name, paper by paper; and a line for each package that cannot be loaded."""
    broken = list[str]()
    import_module("polyfed_papers.all")
    for plugin in plugins.of(GROUP):
        try:
            plugin.load()
        except PolyfedError as e:
            broken.append(str(e))
    return dict(sorted(RECIPES.items(), key=lambda item: (item[0].split("/")[0], item[1].order))), broken


def load() -> dict[str, Recipe]:
    """All recipes by name, paper by paper."""
    return gather()[0]


def origin(r: Recipe) -> plugins.Plugin | None:
    """The installed package that a recipe is from; None for one that comes with polyfed."""
    root = r.run.__module__.partition(".")[0]
    return next((p for p in plugins.of(GROUP) if p.root == root and p.package != plugins.OURS), None)


def find(name: str) -> Recipe:
    """One recipe, by its name or one that it also answers to. Raises ConfigError with the nearest name."""
    recipes, broken = gather()
    names = {n: r for r in recipes.values() for n in (r.name, *r.also)}
    if name not in names:
        text = f"unknown recipe {name!r}{closest(name, names)}; polyfed reproduce lists all {len(recipes)}"
        raise ConfigError("; ".join([text, *broken]))
    return names[name]
