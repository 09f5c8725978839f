"""Every recipe: importing this registers them. The entry point of this package in the group `polyfed.recipes`."""

import importlib
import pkgutil

import polyfed_papers

for module in pkgutil.walk_packages(polyfed_papers.__path__, "polyfed_papers."):
    if module.name != __name__:
        importlib.import_module(module.name)
