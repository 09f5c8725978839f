"""Models by name, for `--model` and for scripts: `build("cnn", (1, 28, 28), 10)`. Any nn.Module can be trained;
these are the ones that the papers use."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyfed.base import arguments, plugins, settings
from polyfed.base.errors import ModelError
from polyfed.base.registry import Registry
from polyfed.models.cnn import cnn, lenet
from polyfed.models.groupnorm import replace_batchnorm, with_statistics
from polyfed.models.memory import memory
from polyfed.models.mixture import mixture
from polyfed.models.mlp import linear, mlp
from polyfed.models.named import named
from polyfed.models.resnet import resnet18

if TYPE_CHECKING:
    from polyfed.data.federation import Federation
    from polyfed_adapters.adapters import adapted, merged
    from polyfed_adapters.adapters import is_adapted as is_adapted
    from polyfed_adapters.backbone import digest_of as digest_of
    from polyfed_adapters.backbone import pretrained

__all__ = [
    "about",
    "adapted",
    "build",
    "default",
    "merged",
    "named",
    "names",
    "options",
    "pretrained",
    "replace_batchnorm",
    "with_statistics",
]

ADDED = ("polyfed.models", "a function of input_shape, outputs and options that returns an nn.Module", callable)
MODELS: Registry[Callable[..., nn.Module]] = Registry("model.name", group=ADDED)
for _maker in (linear, mlp, cnn, lenet, resnet18, mixture, memory):
    MODELS.add(_maker.__name__, _maker)
MODELS.offer({"transformers": "polyfed_adapters.backbone"})
_BESIDE = {"adapted": "adapters", "is_adapted": "adapters", "merged": "adapters"}
_BESIDE |= {"digest_of": "backbone", "pretrained": "backbone"}


def __getattr__(name: str) -> Any:
    if name not in _BESIDE:
        raise AttributeError(f"module 'polyfed.models' has no attribute {name!r}")
    return getattr(plugins.sibling(f"polyfed_adapters.{_BESIDE[name]}", f"polyfed.models.{name}"), name)


def names() -> tuple[str, ...]:
    """The names that `build` knows."""
    return tuple(MODELS.names())


@arguments.checked
def about(name: str) -> str:
    """One line on a model.

    Parameters
    ----------
    name : str
        One of `names()`.

    Returns
    -------
    str
        The first line of its docstring.
    """
    return (MODELS.find(name).__doc__ or name).strip().partition("\n")[0]


@arguments.checked
def options(name: str) -> dict[str, Any]:
    """A model's options and their defaults.

    Parameters
    ----------
    name : str
        One of `names()`.

    Returns
    -------
    dict
        Option -> default.
    """
    parameters = list(inspect.signature(MODELS.find(name)).parameters.values())[2:]
    return {q.name: q.default for q in parameters}


@arguments.checked
def build(name: str, input_shape: tuple[int, ...], outputs: int, seed: int = 0, **options: Any) -> nn.Module:
    """A model by name, its parameters drawn from `seed` (the global generator is left as it was).

    Parameters
    ----------
    name : str
        One of `names()`.
    input_shape : tuple of int
        Of one sample, without the sample axis.
    outputs, seed : int
        Numbers per sample (classes, or targets), and the seed of the parameters.
    **options
        The model's own, see `options(name)`.

    Returns
    -------
    nn.Module
        On the CPU.
    """
    maker = MODELS.find(name)
    checked = settings.options(maker, options, 2, "model.", name)
    shape = tuple(int(k) for k in input_shape)
    if not shape or min(shape) < 1:
        raise ModelError(f"model {name!r} needs inputs with at least one feature; these have shape {list(shape)}")
    if outputs < 1:
        raise ModelError(f"model {name!r} needs at least one output, found {outputs}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        with plugins.blamed(MODELS.origin(name), f"model.name: {name}", ModelError):
            made = maker(shape, outputs, **checked)
    if not isinstance(made, nn.Module):
        raise ModelError(f"model.name: {name} made a {type(made).__name__}, expected an nn.Module")
    return made


@arguments.checked
def default(federation: "Federation") -> str:
    """The model to begin with: "lenet" for images [C, H, W] or [H, W] of 12x12 and more, "linear" for everything else.

    Parameters
    ----------
    federation : Federation
        The data.

    Returns
    -------
    str
        A name that `build` knows.
    """
    # the lenet trains in seconds a round, larger nets in minutes: a first answer should not need patience
    return default_for(federation.input_shape)


@arguments.checked
def default_for(shape: tuple[int, ...]) -> str:
    """`default`, by the shape of one sample."""
    return "lenet" if len(shape) in (2, 3) and min(shape[-2:]) >= 12 else "linear"
