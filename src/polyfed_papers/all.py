"""Every recipe of this package: importing this registers them."""

import importlib
import pkgutil

import polyfed_papers

for folder in (m.name for m in pkgutil.iter_modules(polyfed_papers.__path__, "polyfed_papers.") if m.ispkg):
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__, f"{folder}."):
        importlib.import_module(module.name)
