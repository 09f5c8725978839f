"""What server and site make of the same messages, so that both train the same: versions, method, model, training."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from polyfed.base import plugins
from polyfed.base.errors import PolyfedError, Refusal
from polyfed.compute.task import Task
from polyfed.core.algorithm import REGISTRY, Algorithm, State
from polyfed.data.preparation import Settled
from polyfed.models import default_for, digest_of
from polyfed.runs.build import make_model
from polyfed.runs.config import TABLES, Where, model_of, read_table
from polyfed.runs.folder import version_of
from polyfed.runs.trained import raw
from polyfed.runs.training import Settings
from polyfed_sites.wire import Join, Table

OURS = ("polyfed", "torch")
SMALL = 4096  # numbers that each tensor counts for at least: layers take time
NOWHERE = Where(None, {}, {})


def versions(added: Iterable[str] = ()) -> dict[str, str]:
    """Of what must be the same at server and sites. added: packages of the method, the model and the metrics"""
    installed = plugins.versions() | {package: version_of(package) for package in OURS}
    return {package: installed.get(package, "not installed") for package in (*OURS, *added)}


def unlike(here: Mapping[str, str], there: Mapping[str, str], other: str) -> str:
    """The first package that `other` has not in the same version; "": none."""
    for package, mine in here.items():
        if there.get(package) != mine:
            has = f"has {package} {mine}" if mine != "not installed" else f"{package} is not installed"
            return f"{has}, {other} has {there.get(package)}; install the same"
    return ""


def digest(w: torch.Tensor) -> str:
    """sha256 of a vector."""
    return hashlib.sha256(raw(w)).hexdigest()


def frozen(task: Task) -> dict[str, str]:
    """Digests of what a model does not train, by name. Double precision counts as single: what is drawn and then made
    orthonormal may differ between processors in its last bits."""
    fixed = sorted(task.net.fixed.items())
    return {name: mark(tensors={"": t.float() if t.dtype == torch.float64 else t}) for name, t in fixed}


def mark(*parts: Any, tensors: State | None = None) -> str:
    """Sixteen hexadecimal digits that stand for what was agreed to, or asked. tensors: that came with it"""
    named = [f"{name} {digest(t)}" for name, t in sorted((tensors or {}).items())]
    return hashlib.sha256("\0".join(map(str, (*parts, *named))).encode()).hexdigest()[:16]


class Experiment(NamedTuple):
    """What a site has joined for. model: its table     start: makes the model as all sites start, see `counted`"""

    training: Settings
    method: Algorithm
    model: Table
    start: Callable[[Callable[[int], None]], torch.nn.Module]


@contextmanager
def counted(grown: Callable[[int], None]) -> Iterator[None]:
    """Call `grown` with the numbers of a model while it is built, a tensor's before it is filled."""
    total = 0

    def count(_: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        nonlocal total
        total += max(SMALL, parameter.numel())
        grown(total)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, PolyfedError):
            raise
        raise Refusal("is asked for a model that its memory does not hold") from None
    finally:
        handle.remove()


def experiment(join: Join, settled: Settled, loss: str | None = None, backbone: Path | None = None) -> Experiment:
    """The experiment of a message. loss: where joining has left it open     backbone: where the site has it"""
    training = read_table(Settings, {"loss": loss} | join.training, NOWHERE, TABLES)
    if training.privacy is not None and training.privacy.epsilon is not None and training.dtype is None:
        training = dataclasses.replace(training, dtype=torch.float64)  # as `prepare` does
    table = {key.replace("-", "_"): value for key, value in join.algorithm.items()}
    name = str(table.pop("name", ""))
    if not REGISTRY.knows(name):
        raise Refusal(f"is asked for the method {name[:64]!r}, which is not installed here")
    method = REGISTRY.make(name, table)
    if not isinstance(method, Algorithm):
        raise Refusal(f"{method.name} is a yardstick, which needs no sites")
    model = {"name": default_for(settled.inputs)} | join.model
    chosen = model_of(model, NOWHERE)
    if chosen.file is not None:
        raise Refusal("the model is in a file, which a site does not run; name one of polyfed's own")
    if chosen.backbone is not None:
        which = f"the backbone {chosen.backbone} with digest {chosen.backbone_digest}"
        if backbone is None or chosen.backbone_digest is None:
            raise Refusal(f"needs {which}, which is not sent; name its folder or file here with --backbone")
        if (here := digest_of(backbone.expanduser().resolve())) != chosen.backbone_digest:
            raise Refusal(f"needs {which}, and the one named with --backbone has {here}")
        chosen = dataclasses.replace(chosen, backbone=str(backbone))
        model["backbone"] = chosen.backbone

    def start(grown: Callable[[int], None]) -> torch.nn.Module:
        if chosen.backbone is None:
            with counted(grown):
                return make_model(chosen, settled.inputs, settled.outputs, training.seed)
        made = make_model(chosen, settled.inputs, settled.outputs, training.seed)  # the site's own, but what is trained
        grown(sum(p.numel() for p in made.parameters() if p.requires_grad))
        return made

    return Experiment(training, method, model, start)
