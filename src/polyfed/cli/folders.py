"""Run folders seen from the command line: making one, and what is done with results from before."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polyfed.base import plugins
from polyfed.base.errors import ConfigError, Diverged, RunError
from polyfed.runs import ownership as files
from polyfed.runs.folder import safe

KINDS = {"coalitions.toml": "polyfed_games.command"}  # a file that tells whose a folder is -> the module


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
    before = files.our_files(folder)
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
                files.discard(folder, before)
        raise


def _computed(folder: Path) -> bool:
    """True where there is anything that took time."""
    places = ("checkpoint/round-*", "*/*/checkpoint/round-*", "*/*/*/*/checkpoint/round-*", "kept/*.json", "tune.csv")
    return any(any(folder.glob(place)) for place in places)


def kind(folder: Path) -> Any:
    """The module of a package beside the core that made a folder, with its `resumed` and `rebuilt`, or None."""
    mine = (module for name, module in KINDS.items() if (folder / name).is_file())
    return next((plugins.sibling(module, f"{folder}:") for module in mine), None)


def is_search(folder: Path) -> bool:
    """True where a folder holds a search by `polyfed tune`."""
    return any((folder / name).exists() for name in ("tune.toml", "tune.csv", "legs"))
