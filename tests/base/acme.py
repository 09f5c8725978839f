"""The package of docs/packages.md, installed as pip would leave it; the fixture `put` does it for one test."""

import re
import sys
import tomllib
from pathlib import Path

from polyfed.core.algorithm import REGISTRY
from polyfed.data.datasets import LOADERS
from polyfed.metrics.scores import KNOWN
from polyfed.models import MODELS

PAGE = (Path(__file__).parents[2] / "docs" / "packages.md").read_text()
FILES = dict(re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```$', PAGE, flags=re.M | re.S))


def install(place, files=FILES, version=None):
    """A folder as `pip install --target` leaves it: the package's modules and its metadata."""
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = place / f"{project['name'].replace('-', '_')}.dist-info"
    info.mkdir(parents=True)
    number = version or project["version"]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {number}\n")
    groups = project["entry-points"].items()
    text = "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in groups)
    (info / "entry_points.txt").write_text(text)
    for name in files.keys() - {"pyproject.toml"}:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(files[name])
    return place


def changed(name="acme-fed", **texts):
    """The page's package with other texts in its files, under another name. texts: file's ending -> (old, new)"""
    package = name.replace("-", "_")
    files = {path: text.replace("acme-fed", name).replace("acme_fed", package) for path, text in FILES.items()}
    for ending, (old, new) in texts.items():
        (path,) = (path for path in files if path.endswith(f"{ending}.py") or path == f"{ending}.toml")
        assert old in files[path]
        files[path] = files[path].replace(old, new)
    return {path.replace("acme_fed", package): text for path, text in files.items()}


def forget():
    """Drop what was loaded of packages, as if this process had begun anew."""
    modules = [name for name in sys.modules if name.startswith("acme_")]
    for registry in (REGISTRY, LOADERS, MODELS, KNOWN):
        theirs = [name for name, thing in registry.items() if thing.__module__.startswith("acme_")]
        for name in {*registry._added, *theirs}:
            registry._added.pop(name, None)
            registry.pop(name, None)
    if recipes := sys.modules.get("polyfed_papers.recipes"):
        recipes.RECIPES.pop("acme/moons", None)
    for name in modules:
        del sys.modules[name]
