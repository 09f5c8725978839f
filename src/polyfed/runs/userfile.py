"""The user's own Python files: methods and models that they define, imported once per content."""

import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from polyfed.base.errors import ConfigError, MethodError, ModelError, PolyfedError, closest
from polyfed.base.settings import kebab
from polyfed.base.typed import seeded
from polyfed.core.algorithm import REGISTRY

PREFIX = "polyfed_user_"  # of the modules that users' files become


def blamed(error: BaseException, own: str | tuple[str, ...] = PREFIX) -> MethodError | None:
    """The error, in one line, for a mistake in a user's own file; None for one that is not on the way to it.

    own: how the names of the user's modules begin
    """
    frames = traceback.walk_tb(error.__traceback__)
    mine = [(f.f_code, line) for f, line in frames if str(f.f_globals.get("__name__")).startswith(own)]
    argument = isinstance(error, ConfigError)  # that the file has given to one of our functions
    if not mine or (isinstance(error, PolyfedError) and not argument):
        return None
    code, line = mine[-1]
    reason = str(error) if argument else f"{code.co_qualname} failed with {_reason(error)}"
    return MethodError(f"{code.co_filename}, line {line}: {reason}")


def algorithms_of(path: Path) -> list[str]:
    """The names of the methods that a file defines; they are registered by importing it."""
    module = _import(path)
    return [name for name, cls in REGISTRY.items() if cls.__module__ == module.__name__]


def _import(path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({(e.strerror or str(e)).lower()})") from None
    return _execute(path, zlib.crc32(source))


@lru_cache
def _execute(path: Path, digest: int) -> ModuleType:
    """Import a file once per content. Raises ConfigError naming the line for whatever goes wrong in it."""
    name = f"{PREFIX}{path.stem}_{zlib.crc32(str(path).encode()):08x}_{digest:08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except PolyfedError:
        raise
    except (Exception, SystemExit) as e:
        raise ConfigError(f"{path}{_line(e, path)}: {_reason(e)}") from e
    return module


def _line(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f", line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _reason(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def only_model(path: Path) -> str:
    module = _import(path)
    nets = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, nn.Module) and _own(v, module)]
    if len(nets) != 1:
        raise ConfigError(f"model.name: is missing; {path} defines {', '.join(nets) or 'no nn.Module class'}")
    return nets[0]


def _own(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def model_from(path: Path, name: str, given: dict[str, Any], options: Mapping[str, Any]) -> nn.Module:
    """Call `name` of the file with what it takes of `given` (input_shape, outputs, seed), and its options."""
    module = _import(path)
    make: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(make):
        names = [n for n, v in vars(module).items() if callable(v) and _own(v, module)]
        raise ConfigError(f"model.name: {path} has no {name!r}{closest(name, names)}; it has {', '.join(names)}")
    takes = inspect.signature(make).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for key in options:
        if key not in takes and not every:
            raise ConfigError(f"model.{kebab(key)}: {name} takes no such argument{closest(key, takes)}")
    with seeded(given["seed"]):
        try:
            made = make(**{k: v for k, v in given.items() if k in takes}, **options)
        except PolyfedError:
            raise
        except (Exception, SystemExit) as e:
            raise ModelError(f"{path}{_line(e, path)}: {name} failed with {_reason(e)}") from e
    if not isinstance(made, nn.Module):
        raise ModelError(f"{path}: {name} made a {type(made).__name__}, expected an nn.Module")
    return made
