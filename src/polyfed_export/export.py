"""One client's model out of a run folder: a safetensors file and a JSON file about it, with frozen tensors in one more
file that exports into the same folder share.
"""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.base.settings import table_in
from polyfed.base.system import move
from polyfed.data.preparation import Preparation
from polyfed.runs import schema as reading
from polyfed.runs.folder import client_model, safe, said
from polyfed.runs.numbers import Numbers
from polyfed.runs.opened import stored
from polyfed.runs.ownership import put, spare
from polyfed.runs.result import Result
from polyfed_adapters.adapters import is_adapted
from polyfed_adapters.adapters import merged as put_into
from polyfed_export.factorised import parts_of

Form = Literal["dense", "factorised", "merged"]


def export(run: Result, client: int | str, out: Path | None, form: Form = "dense") -> tuple[Path, Path]:
    """Copy a client's tensors to `out` in a form, and a JSON about them.

    For factors, it also has measurements of the dense and the factorised models, under "measured".
    """
    folder, numbers = run.place(), stored(run).numbers
    config, names, wanted = numbers.config, numbers.about.names, str(client)
    name = names[int(wanted)] if wanted not in names and wanted.isdecimal() and int(wanted) < len(names) else wanted
    if name not in names:
        raise ConfigError(f"client: found {client!r}{closest(wanted, names)}, expected a name or 0 to {len(names) - 1}")
    model = client_model(folder, names.index(name), name)
    if model is None and numbers.role in ("yardstick", "oracle"):
        method = numbers.summary.algorithm
        raise ConfigError(f"{folder}: {method} is a yardstick: it has results, and no model to export")
    if model is None and config.data.sites is not None:
        raise RunError(f"{folder}: its models are at its sites; polyfed export VAULT writes one there")
    if model is None:
        raise RunError(f"{folder}: has no models yet; finish it with: polyfed resume {folder}")
    target = target_of(out, name, folder)
    named, shared = model
    facts = {
        "client": name,
        "shared_by_all_clients": shared,
        "tensors": _shapes(named),
        **_facts(folder, numbers, name),
    }
    tensors = None
    if form == "factorised":
        tensors, more = parts_of(run, name, named)
        facts |= {"tensors": _shapes(tensors)} | more
    if form == "merged":
        whole = _merged(run, name)
        facts["tensors"], facts["model"] = _shapes(whole), {k: v for k, v in config.model.items() if k != "adapter"}
        return write_model(target, whole, facts)
    common = _backbone(folder / "fixed.safetensors", target.parent)
    if common is not None:
        facts["backbone"] = common
    return write_model(target, named if tensors is None else tensors, facts)


def _facts(folder: Path, numbers: Numbers, name: str) -> dict[str, Any]:
    """What the JSON beside an exported model says of the run, of the data, and of how a client's rows are prepared."""
    config, federation = numbers.config, numbers.about
    facts = {
        "model": config.model,
        "classes": federation.classes,
        "inputs": federation.inputs,
        "outputs": federation.outputs,
        "loss": config.loss,
        "dtype": config.dtype,
        "algorithm": config.algorithm,
        "data": {k: v for k, v in config.data.table().items() if k != "dir"},
        "seed": config.seed,
        "run": folder.resolve().name,
        "polyfed": config.versions.get("polyfed"),
    }
    if federation.preparation is not None:
        where = str(folder / "federation.json")
        prepared = Preparation.read(federation.preparation, where).only(name)
        if config.privacy.get("epsilon") is not None:  # a least and a largest number are single rows'
            bare = {k: replace(s, low=None, high=None, gaps=None) for k, s in prepared.sites.items()}
            prepared = replace(prepared, sites=bare)
        facts["preparation"] = prepared.dump()
    if federation.scaling is not None:
        facts["scaling"] = federation.scaling  # what raw inputs are shifted and scaled with
    return facts


def _merged(run: Result, name: str) -> dict[str, Tensor]:
    """A client's model without its adapter, whose updates are in the weights."""
    model = run.model(name)
    if not is_adapted(model):
        raise ConfigError("merged: found a model without low-rank updates, expected one trained with an adapter lora")
    return put_into(model).state_dict()


def _backbone(fixed: Path, place: Path) -> str | None:
    """Put the frozen tensors beside an export, once: with them it is a whole state of the module. Returns its name."""
    if not fixed.is_file():
        return None
    wanted = said(fixed)
    name = f"backbone-{(wanted or {}).get('digest', '')[:12]}.safetensors"
    out = place / name
    try:
        if not out.is_file() or said(out) != wanted:
            place.mkdir(parents=True, exist_ok=True)
            put(out, partial(_linked, fixed))
    except OSError as e:
        raise RunError(f"cannot write {out}: {reason(e)}") from None
    return name


def _linked(source: Path, draft: Path) -> None:
    draft.unlink(missing_ok=True)
    try:
        os.link(source, draft)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, draft)


def from_vault(vault: Path, out: Path | None) -> tuple[Path, Path]:
    """Copy the model that a site has made at the end of a run out of its vault."""
    path = vault / "model.safetensors"
    if not path.is_file():
        raise RunError(f"{vault}: has no model yet, which is made at the end of the run")
    try:
        facts = table_in(path.with_suffix(".json").read_bytes())
        name = safe(facts["client"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RunError(f"{path}: no exported model with {path.stem}.json beside it ({reason(e)})") from None
    return write_model(target_of(out, name, *vault.iterdir()), reading.tensors(path), facts)


def target_of(out: Path | None, client: str, *kept: Path, ending: str = ".safetensors") -> Path:
    """The file to write, which spares what is kept."""
    target = out or Path(f"{safe(client)}{ending}")
    if target.suffix != ending:
        raise ConfigError(f"out: found {str(target)!r}, expected a name ending in {ending}")
    for written in (target, target.with_suffix(".json")):
        spare(written, *kept)
    return target


def write_model(target: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> tuple[Path, Path]:
    """Write a model's tensors, and beside them what they are. Raises RunError where that is impossible."""
    about = target.with_suffix(".json")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.draft")
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, draft)
        move(draft, target)
        about.write_bytes(json.dumps({"tensors": _shapes(tensors)} | facts, indent=1).encode() + b"\n")
    except OSError as e:
        raise RunError(f"cannot write {target}: {reason(e)}") from None
    return target, about


def _shapes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {key: list(t.shape) for key, t in tensors.items()}
