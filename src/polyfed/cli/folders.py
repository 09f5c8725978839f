"""Run folders seen from the command line: making one, finding what to resume, taking a model out."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polyfed.core.errors import ConfigError, Diverged, RunError, closest
from polyfed.experiment import files
from polyfed.experiment.folder import client_model, safe
from polyfed.report import files as reading

BATCH = 20  # samples for which an exported model is timed, as in Table 9 of FedSLR's paper
OURS = ("config.toml", "comparison.toml")


@contextmanager
def claimed(out: Path | None, name: str, force: bool = False, resume: bool = False) -> Iterator[Path]:
    """The folder for results, locked: `out`, or a new runs/<time>-<name>. One that holds other results is refused.

    force: move results from before aside; they are deleted by `files.forget_old`, and put back when the new ones end in
    an error before anything is computed, or diverge. resume: go on in the folder, whatever of ours it holds.
    """
    folder = out if out is not None else _new(name)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: this is a file, expected a folder")
    if folder.is_dir() and any(folder.iterdir()) and not files.is_ours(folder):
        raise ConfigError(f"--out {folder}: the folder is not empty and holds no polyfed results; choose another")
    try:
        with files.locked(folder):
            files.settle(folder)
            if not resume and files.holds_results(folder):
                _make_room(folder, force)
            with _kept(folder, resume):
                yield folder
    finally:
        if out is None:
            with suppress(OSError):
                folder.rmdir()  # if there is nothing in it


def _new(name: str) -> Path:
    base = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe(name)}"
    for k in range(1, 1000):
        folder = base if k == 1 else base.with_name(f"{base.name}-{k}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise RunError(f"cannot make the folder {folder}: {(e.strerror or str(e)).lower()}") from None
        return folder
    raise RunError(f"{base}: exists already; choose another with --out")


def _make_room(folder: Path, force: bool) -> None:
    if force:
        files.set_aside(folder)
        return
    then = f"continue them with: polyfed resume {folder}, or replace them with --force"
    if is_search(folder):
        then = "continue them with the same polyfed tune command, or replace them with --force"
    elif (folder / "admission.csv").exists():
        then = "choose another folder"
    raise ConfigError(f"--out {folder}: holds results already{files.where_old(folder)}; {then}")


@contextmanager
def _kept(folder: Path, resume: bool) -> Iterator[None]:
    """On an error: results from before are put back where the new ones came to nothing, and nothing is lost else."""
    try:
        yield
    except Diverged as e:
        if not (folder / files.OLD).exists():
            raise
        files.restore(folder)
        raise Diverged(f"{e.__cause__ or e}; the results that were in {folder} are as they were") from None
    except BaseException:
        if not resume and not _computed(folder):
            if (folder / files.OLD).exists():
                files.restore(folder)
            else:
                files.discard(folder)
        raise


def _computed(folder: Path) -> bool:
    """Whether there is anything that took time."""
    places = ("checkpoint/round-*", "*/*/checkpoint/round-*", "*/*/*/*/checkpoint/round-*", "kept/*.json", "tune.csv")
    return any(any(folder.glob(place)) for place in places)


def is_search(folder: Path) -> bool:
    """Whether a folder holds a search by `polyfed tune`."""
    return any((folder / name).exists() for name in ("tune.toml", "tune.csv", "legs"))


def config_of(folder: Path) -> Path:
    """The experiment file inside a run or comparison folder."""
    if not folder.is_dir():
        near = closest(folder.name, [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else [])
        raise RunError(f"{folder}: there is no such folder{near}")
    for name in reversed(OURS):
        if (folder / name).is_file():
            return folder / name
    old = f"; results from before are in {folder / files.OLD}" if (folder / files.OLD).exists() else ""
    raise RunError(f"{folder}: neither a run (no config.toml) nor a comparison (no comparison.toml){old}")


def export_model(run: Path, client: str, out: Path | None, factorised: bool = False) -> tuple[Path, Path]:
    """Copy a client's tensors to `out`, low-rank layers as factors if asked, and describe them in a JSON beside it.

    With factors the JSON also has what the dense and the factorised models were measured to take, under "measured".
    """
    place = config_of(run)
    if (run / "comparison.toml").is_file():
        some = sorted(p.name for p in (run / "runs").glob("*-seed*"))
        raise ConfigError(
            f"{run}: is a comparison; export from one of its runs, such as {run / 'runs' / some[0]}"
            if some
            else f"{run}: a comparison without runs"
        )
    config, federation = reading.config(run, place.name), reading.federation(run)
    names = [c["name"] for c in federation["clients"]]
    name = names[int(client)] if client not in names and client.isdigit() and int(client) < len(names) else client
    if name not in names:
        raise ConfigError(
            f"--client: found {client!r}{closest(client, names)}, expected a name or 0 to {len(names) - 1}"
        )
    found = client_model(run, names.index(name), name)
    if found is None:
        raise RunError(f"{run}: has no models yet; finish it with: polyfed resume {run}")
    target = out or Path(f"{safe(name)}.safetensors")
    if target.suffix != ".safetensors":
        raise ConfigError(f"--out: found {str(target)!r}, expected a name ending in .safetensors")
    about = target.with_suffix(".json")
    named, shared = found
    fixed = _fixed(run)
    facts = _facts(run, name, named | fixed, shared, config, federation)
    tensors = _factors(run, named, config) if factorised else None
    if tensors is not None:
        facts |= {"tensors": {key: list(t.shape) for key, t in tensors.items()}, "factorised": _layers(tensors)}
        facts["measured"] = _measured(run, named | fixed, tensors)
    try:
        from safetensors.torch import save_file

        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.draft")
        save_file((named if tensors is None else tensors) | fixed, draft)
        os.replace(draft, target)
        about.write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as e:
        raise RunError(f"cannot write {target}: {(e.strerror or str(e)).lower()}") from None
    return target, about


def _fixed(run: Path) -> dict[str, Any]:
    """The run's frozen parameters and buffers, so that what is exported is a complete state of the module."""
    path = run / "fixed.safetensors"
    return reading.tensors(path) if path.is_file() else {}


def _facts(
    run: Path, client: str, tensors: dict[str, Any], shared: bool, config: dict[str, Any], federation: dict[str, Any]
) -> dict[str, Any]:
    return {
        "client": client,
        "shared_by_all_clients": shared,
        "model": config.get("model", {}),
        "classes": federation.get("classes"),
        "tensors": {key: list(t.shape) for key, t in tensors.items()},
        "dtype": config.get("dtype"),
        "algorithm": config.get("algorithm", {}),
        "data": {k: v for k, v in config.get("data", {}).items() if k != "dir"},
        "seed": config.get("seed"),
        "run": run.resolve().name,
        "polyfed": config.get("versions", {}).get("polyfed"),
    }


def _factors(run: Path, named: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """A client's model as factors: its tensors, the common model and its factors from the checkpoint."""
    import polyfed.algorithms  # noqa: F401  (registers the methods)
    from polyfed.algorithms._shared.lowrank import places
    from polyfed.core import checkpoint
    from polyfed.core.algorithm import make
    from polyfed.models.factorised import as_weight, pack

    settings = {key.replace("-", "_"): value for key, value in config.get("algorithm", {}).items()}
    algorithm = make(settings.pop("name", ""), **settings)
    state = checkpoint.load(run / "checkpoint")[0]
    server = {key[7:]: t for key, t in state.items() if key.startswith("server.")}
    factors, w = algorithm.factors(server), algorithm.common(server)
    if factors is None or w is None:
        raise ConfigError(
            f"--factorised: {algorithm.name} makes no low-rank model; fedslr (structure LR+S or LR+LR) and gpgd do"
        )
    common = {k: as_weight(sheet.unfold(w), named[k].shape) for k, sheet in places(server).items() if k in factors}
    return pack(named, common, factors)


def _layers(tensors: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Rank and nonzeros of every factorised layer."""
    return {
        key[:-2]: {"rank": t.shape[1], "nonzeros": len(tensors.get(f"{key[:-2]}.at", ()))}
        for key, t in tensors.items()
        if key.endswith(".U")
    }


def _measured(run: Path, named: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Bytes, milliseconds and output differences of all forms of the model for a batch of test samples.

    Model and data are made again from config.toml; {"missing": why} where that cannot be, as for runs from Python.
    """
    from polyfed.core.errors import PolyfedError
    from polyfed.experiment.build import Parts
    from polyfed.experiment.config import resolve
    from polyfed.models.factorised import measure

    try:
        parts = Parts(resolve(config_of(run), {}))
        seed = parts.experiment.seeds[0]
        model, dtype = parts.model(seed), next(iter(named.values())).dtype
        x = parts.federation(seed).test.to("cpu", dtype).x[:BATCH]
        model.to(dtype).load_state_dict(named, strict=False)
        forms = measure(model, tensors, x)
    except PolyfedError as e:
        return {"missing": f"the run's model cannot be made again from its folder ({e})"}
    return {"samples": len(x), "threads": 1, "fastest": min(forms, key=lambda f: forms[f]["ms"]), "forms": forms}
