"""Weights of classes: from a setting to one number per class, which multiplies the loss of that class's samples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyfed.base.errors import ConfigError, closest
from polyfed.base.settings import is_list, is_mapping
from polyfed.data.federation import Federation


def weights_of(
    given: str | Sequence[float] | Mapping[str, float] | None, loss: Any, about: Mapping[str, Any]
) -> list[float] | None:
    """One number per class, or None where none are asked for. about: what `Federation.describe` says.

    balanced: N / (C n_c), with n_c of all clients' N training rows in class c; so they are 1 on average over the rows.
    Raises ConfigError where the weights do not fit the classes, or the loss takes none.
    """
    classes = about["classes"]
    if given is None:
        return None
    if classes is None:
        raise ConfigError("class-weights: the targets are numbers, expected classes")
    if loss != "cross-entropy":
        raise ConfigError("class-weights: for the loss cross-entropy alone; a loss of your own weighs classes itself")
    prepared: dict[str, Any] = about.get("preparation") or {}
    labels: list[str] = prepared.get("labels") or [str(k) for k in range(classes)]
    if is_mapping(given):
        for key in given:
            if key not in labels:
                choices = f"{closest(key, labels)}; known: {', '.join(labels)}"
                raise ConfigError(f"class-weights: unknown class {key!r}{choices}")
        if missing := [label for label in labels if label not in given]:
            raise ConfigError(f"class-weights: found none for the class {missing[0]!r}, expected one for each class")
        return [float(given[label]) for label in labels]
    if is_list(given):
        if len(given) != classes:
            raise ConfigError(f"class-weights: found {len(given)} numbers, expected one for each of {classes} classes")
        return [float(w) for w in given]
    counts = [sum(client["labels"][k] for client in about["clients"]) for k in range(classes)]
    if none := [label for label, n in zip(labels, counts, strict=True) if n == 0]:
        raise ConfigError(f"class-weights: balanced, but no training row has the class {none[0]!r}; give numbers")
    return [sum(counts) / (classes * n) for n in counts]


def noted(federation: Federation, given: str | Sequence[float] | Mapping[str, float]) -> Federation:
    """The federation with a note that the loss weighs classes."""
    how = "inversely to their share of all clients' training rows" if given == "balanced" else f"by {given}"
    note = f"the loss weighs classes {how}"
    return replace(federation, meta={**federation.meta, "notes": [*federation.notes, note]})
