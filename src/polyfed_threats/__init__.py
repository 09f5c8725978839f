"""Clients that attack and servers that defend themselves; both compose with any method: attackers forge their
uplinks, and a robust rule takes the place of every mean that a method asks its `Uplinks` for."""

from typing import Any

from polyfed.base import arguments
from polyfed_threats.aggregation import RULES, GeometricMedian, Krum, Median, MultiKrum, NormClipping, Rule, TrimmedMean
from polyfed_threats.attacks import (
    ATTACKS,
    Attack,
    GaussianNoise,
    LabelFlip,
    SameValue,
    ScaledUpdate,
    SignFlip,
    flip_labels,
)
from polyfed_threats.forging import Forging, summary

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


@arguments.checked
def make_attack(name: str, /, **settings: Any) -> Attack:
    """An attack by its name.

    Parameters
    ----------
    name : str
        Such as "sign-flip".
    **settings
        Its settings.

    Returns
    -------
    Attack
        With these settings.
    """
    return ATTACKS.make(name, settings)


@arguments.checked
def make_rule(name: str, /, **settings: Any) -> Rule:
    """A robust rule by its name.

    Parameters
    ----------
    name : str
        Such as "median".
    **settings
        Its settings.

    Returns
    -------
    Rule
        With these settings.
    """
    return RULES.make(name, settings)
