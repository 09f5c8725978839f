"""Run folders seen from the command line: making one, finding what to resume, taking a model out."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from polyfed.core.errors import ConfigError, RunError, closest
from polyfed.experiment import files
from polyfed.experiment.folder import safe

BATCH = 20  # samples for which an exported model is timed, as in Table 9 of FedSLR's paper
OURS = ("config.toml", "comparison.toml")


def new_folder(out: Path | None, name: str, force: bool) -> Path:
    """The folder for new results: runs/<time>-<name> unless given. An occupied one is refused."""
    if out is None:
        base = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe(name)}"
        out = base
        for k in range(2, 1000):
            if not out.exists():
                break
            out = base.with_name(f"{base.name}-{k}")
        return out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: this is a file, expected a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return out
    if not is_ours(out):
        raise ConfigError(f"--out {out}: the folder is not empty and holds no polyfed results; choose another")
    if not force:
        raise ConfigError(
            f"--out {out}: holds results already; continue them with: polyfed resume {out}, "
            "or replace them with --force"
        )
    shutil.rmtree(out)
    return out


def is_ours(folder: Path) -> bool:
    """Whether a folder holds a run, a comparison or a search."""
    return any((folder / name).is_file() for name in (*OURS, "tune.csv"))


def config_of(folder: Path) -> Path:
    """The experiment file inside a run or comparison folder."""
    if not folder.is_dir():
        near = closest(folder.name, [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else [])
        raise RunError(f"{folder}: there is no such folder{near}")
    for name in reversed(OURS):
        if (folder / name).is_file():
            return folder / name
    raise RunError(f"{folder}: neither a run (no config.toml) nor a comparison (no comparison.toml)")


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
    config, federation = files.config(run, place.name), files.federation(run)
    names = [c["name"] for c in federation["clients"]]
    name = names[int(client)] if client not in names and client.isdigit() and int(client) < len(names) else client
    if name not in names:
        raise ConfigError(
            f"--client: found {client!r}{closest(client, names)}, expected a name or 0 to {len(names) - 1}"
        )
    own, common = (run / "models" / f"{stem}.safetensors" for stem in (safe(name), "common"))
    source = own if own.is_file() else common
    if not source.is_file():
        raise RunError(f"{run}: has no models yet; finish it with: polyfed resume {run}")
    target = out or Path(f"{safe(name)}.safetensors")
    if target.suffix != ".safetensors":
        raise ConfigError(f"--out: found {str(target)!r}, expected a name ending in .safetensors")
    about = target.with_suffix(".json")
    facts = _facts(run, name, source, config, federation)
    tensors = _factors(run, source, config) if factorised else None
    if tensors is not None:
        facts |= {"tensors": {key: list(t.shape) for key, t in tensors.items()}, "factorised": _layers(tensors)}
        facts["measured"] = _measured(run, source, tensors)
    try:
        from safetensors.torch import save_file

        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.draft")
        if tensors is None:
            shutil.copyfile(source, draft)
        else:
            save_file(tensors, draft)
        os.replace(draft, target)
        about.write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as e:
        raise RunError(f"cannot write {target}: {(e.strerror or str(e)).lower()}") from None
    return target, about


def _facts(run: Path, client: str, source: Path, config: dict[str, Any], federation: dict[str, Any]) -> dict[str, Any]:
    return {
        "client": client,
        "shared_by_all_clients": source.stem == "common",
        "model": config.get("model", {}),
        "classes": federation.get("classes"),
        "tensors": {key: list(t.shape) for key, t in files.tensors(source).items()},
        "dtype": config.get("dtype"),
        "algorithm": config.get("algorithm", {}),
        "data": {k: v for k, v in config.get("data", {}).items() if k != "dir"},
        "seed": config.get("seed"),
        "run": run.resolve().name,
        "polyfed": config.get("versions", {}).get("polyfed"),
    }


def _factors(run: Path, source: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A client's model as factors: its tensors from models/, the common model and its factors from the checkpoint."""
    import polyfed.algorithms  # noqa: F401  (registers the methods)
    from polyfed.algorithms.lowrank import places
    from polyfed.core import checkpoint
    from polyfed.core.algorithm import make
    from polyfed.models.factorised import as_weight, pack

    settings = {key.replace("-", "_"): value for key, value in config.get("algorithm", {}).items()}
    algorithm = make(settings.pop("name", ""), **settings)
    state = checkpoint.load(run / "checkpoint")[0]
    server = {key[7:]: t for key, t in state.items() if key.startswith("server.")}
    factors, w, named = algorithm.factors(server), algorithm.common(server), files.tensors(source)
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


def _measured(run: Path, source: Path, tensors: dict[str, Any]) -> dict[str, Any]:
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
        model, named = parts.model(seed), files.tensors(source)
        dtype = next(iter(named.values())).dtype
        x = parts.federation(seed).test.to("cpu", dtype).x[:BATCH]
        model.to(dtype).load_state_dict(named, strict=False)
        forms = measure(model, tensors, x)
    except PolyfedError as e:
        return {"missing": f"the run's model cannot be made again from its folder ({e})"}
    return {"samples": len(x), "threads": 1, "fastest": min(forms, key=lambda f: forms[f]["ms"]), "forms": forms}
