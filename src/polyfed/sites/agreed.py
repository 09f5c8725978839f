"""What server and site make of the same messages, so that both train the same: versions, method, model, training."""

import hashlib
from collections.abc import Iterable, Mapping

import torch

from polyfed.base import plugins
from polyfed.base.errors import Refusal
from polyfed.core.algorithm import REGISTRY, Algorithm
from polyfed.data.schema import Settled
from polyfed.models import default_for
from polyfed.runs.build import make_model
from polyfed.runs.check import Where, read_table
from polyfed.runs.config import TABLES, model_of
from polyfed.runs.folder import version_of
from polyfed.runs.rehearsal import Forms, forms
from polyfed.runs.trained import raw
from polyfed.runs.training import Settings
from polyfed.sites.message import Join, Table

NOWHERE = Where(None, {}, {})


def versions(added: Iterable[str] = ()) -> dict[str, str]:
    """Of what must be the same at server and sites. added: packages of the method, the model and the metrics"""
    known = plugins.versions()
    found = {package: version_of(package) for package in ("polyfed", "torch")}
    return found | {package: known.get(package, "not installed") for package in added}


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


def method_of(join: Join) -> Algorithm:
    """The method, with its settings."""
    table = {key.replace("-", "_"): value for key, value in join.algorithm.items()}
    return REGISTRY.make(str(table.pop("name", "")), table)


def training_of(join: Join, loss: str | None = None) -> Settings:
    """How the run trains. loss: where joining has left it open"""
    return read_table(Settings, {"loss": loss} | join.training, NOWHERE, TABLES)


def model_table(join: Join, settled: Settled) -> Table:
    """The [model] table, with the name of the default where joining has left it open."""
    return {"name": default_for(settled.inputs)} | join.model


def model_at_start(join: Join, settled: Settled) -> torch.nn.Module:
    """The model that all sites start from."""
    table = model_of(model_table(join, settled), NOWHERE)
    if table.file is not None:
        raise Refusal("the model is in a file, which a site does not run; name one of polyfed's own")
    return make_model(table, settled.inputs, settled.outputs, training_of(join).seed)


def forms_of(join: Join, settled: Settled) -> Forms:
    """What the method sends on files like this."""
    loss = "mse" if settled.classes is None else "cross-entropy"
    task = training_of(join).task(model_at_start(join, settled), loss, "cpu", metrics=())
    return forms(method_of(join), task, settled.inputs, settled.classes, settled.outputs)
