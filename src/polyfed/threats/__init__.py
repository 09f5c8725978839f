"""Clients that attack and servers that defend themselves; both compose with any method: attackers forge what they
send, and a robust rule takes the place of every mean that a method asks its `Uplinks` for.
"""

import dataclasses
from typing import Any

from polyfed.core.errors import ConfigError, closest
from polyfed.threats.aggregation import (
    RULES,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormClipping,
    Rule,
    TrimmedMean,
)
from polyfed.threats.attacks import (
    ATTACKS,
    Attack,
    GaussianNoise,
    LabelFlip,
    SameValue,
    ScaledUpdate,
    SignFlip,
    flip_labels,
)
from polyfed.threats.forging import Forging, summary

__all__ = [
    "ATTACKS",
    "RULES",
    "Attack",
    "Forging",
    "GaussianNoise",
    "GeometricMedian",
    "Krum",
    "LabelFlip",
    "Median",
    "MultiKrum",
    "NormClipping",
    "Rule",
    "SameValue",
    "ScaledUpdate",
    "SignFlip",
    "TrimmedMean",
    "flip_labels",
    "make_attack",
    "make_rule",
    "summary",
]


def make_attack(name: str, /, **settings: Any) -> Attack:
    """An attack by its name ("sign-flip", ...). Raises ConfigError naming what is wrong."""
    return _make("attack", ATTACKS, name, settings)


def make_rule(name: str, /, **settings: Any) -> Rule:
    """A robust rule by its name ("median", ...). Raises ConfigError naming what is wrong."""
    return _make("robust", RULES, name, settings)


def _make(table: str, known: dict[str, Any], name: str, settings: dict[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(f"{table}.name: unknown {name!r}{closest(name, known)}; known: {', '.join(sorted(known))}")
    fields = {f.name for f in dataclasses.fields(known[name])}
    for key in settings:
        if key not in fields:
            has = ", ".join(sorted(fields)) or "none"
            raise ConfigError(f"{table}.{key}: {name} has no such setting{closest(key, fields)}; it has {has}")
    return known[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})
