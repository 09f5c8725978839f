"""The model that a run starts from: as it is, or as a class or a function makes it under the run's seed."""

import inspect
from collections.abc import Callable
from functools import partial

from torch import nn

from polyfed.base.arguments import answer
from polyfed.base.typed import seeded

Start = nn.Module | Callable[..., nn.Module]
PRESENT = "the model's present weights"


def drawn(model: Start, seed: int) -> nn.Module:
    """The model itself, or the one that a class or a function makes under the seed, which it gets where it takes one.

    torch's global generator stays as it was. Raises ConfigError where no module is made.
    """
    if isinstance(model, nn.Module):
        return model
    try:
        takes = inspect.signature(model).parameters
        needed = any(
            p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in takes.values()
        )
    except ValueError:  # it tells none, such as int, or a dict's __getitem__
        takes, needed = {}, True
    make, given = (partial(model, seed=seed), ()) if "seed" in takes else (model, (seed,) * needed)
    with seeded(seed):
        return under(answer("model", make, *given, takes=nn.Module), seed)


def under(made: nn.Module, seed: int) -> nn.Module:
    """A module that remembers the seed under which it was drawn."""
    object.__setattr__(made, "drawn_under", seed)
    return made


def words(model: nn.Module) -> str:
    """The start of a run, as its first line says it."""
    seed = getattr(model, "drawn_under", None)
    return PRESENT if seed is None else f"weights drawn under seed {seed}"
