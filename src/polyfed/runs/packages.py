"""The installed packages beside polyfed that a run is made of: config.toml has their names under `packages`, without
which it is not resumed or verified, and their versions under [versions].
"""

from collections.abc import Iterable
from typing import Any

from polyfed.base import plugins
from polyfed.base.errors import ConfigError
from polyfed.base.registry import Registry
from polyfed.base.settings import found, is_list
from polyfed.core.algorithm import REGISTRY, Contender
from polyfed.data.datasets import LOADERS
from polyfed.metrics.scores import KNOWN, Metrics, metrics_of
from polyfed.models import MODELS


def packages(
    methods: Iterable[Contender], data: str | None, model: str | None, metrics: Metrics | None
) -> dict[str, str]:
    """{package: version} of what goes by these names; None: given in Python."""
    used: list[tuple[Registry[Any], str]] = [(REGISTRY, m.name) for m in methods]
    used += [(KNOWN, m.name) for m in metrics_of(metrics)]
    used += [(registry, name) for registry, name in ((LOADERS, data), (MODELS, model)) if name is not None]
    plugs = [plugin for registry, name in used if (plugin := registry.origin(name)) is not None]
    return {p.package: p.version for p in sorted(plugs, key=str)}


def installed(value: object, where: str) -> None:
    """Raise ConfigError where a package that a file names is not installed. where: the file and the key"""
    if not is_list(value) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}: {found(value, 'a list of installed packages')}")
    plugins.require(value, where)
