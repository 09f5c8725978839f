"""Run folders seen from the command line: making one, and what is done with results from before."""

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyfed.base import plugins
from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.system import MOVES_OPEN, move
from polyfed.cli.screen import say, stderr
from polyfed.runs import ownership as files
from polyfed.runs.folder import safe

LOGS = (files.MARK, "events.log", "audit.jsonl")  # no results; what a server has noted stays where it is
KINDS = {"coalitions.toml": "polyfed_games.command"}  # a file that tells whose a folder is -> the module


@contextlib.contextmanager
def claimed(out: Path | None, name: str, force: bool = False, resume: bool = False) -> Iterator[Path]:
    """The folder for results, locked: `out`, or a new runs/<time>-<name>. One that holds other results is refused.

    force: rename that folder away; it gets its name back where the new results come to nothing. So is renamed what a
    kill has left before anything was computed. resume: go on in the folder, whatever of ours it holds.
    """
    folder = out if out is not None else _new(name)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: this is a file, expected a folder")
    if folder.is_dir() and any(folder.iterdir()) and not files.is_ours(folder):
        raise ConfigError(f"--out {folder}: the folder is not empty and holds no polyfed results; choose another")
    old = None if resume else _moved(folder, force)
    try:
        with files.locked(folder):
            if not resume and _inside(folder):  # by a command that was faster
                raise _taken(folder)
            try:
                yield folder
            finally:
                if not resume and not files.holds_results(folder):
                    files.remove_written(folder)
    finally:
        if old is not None or out is None:
            _put_back(folder, old)
        if old is not None and old.exists():
            say(f"polyfed: what was in {folder} is in {old}", stderr)


def write_new(texts: Mapping[Path, str]) -> None:
    """Write files and say their names. Raises ConfigError, and writes nothing, where one of them is there."""
    for path in texts:
        if path.exists():
            raise ConfigError(f"{path}: already exists; nothing was written")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        say(str(path))


def _moved(folder: Path, force: bool) -> Path | None:
    """Where a folder with something in it has been renamed to; None for one without."""
    if not _inside(folder):
        return None
    with contextlib.ExitStack() as held:
        held.enter_context(files.locked(folder))
        if not force and files.holds_results(folder):
            raise _taken(folder)
        if not MOVES_OPEN:  # nor renames it while another process has taken the lock
            held.close()
        return _rename_away(folder)


def _inside(folder: Path) -> list[Path]:
    """What is in a folder, but for logs."""
    return [p for p in folder.iterdir() if p.name not in LOGS] if folder.is_dir() else []


def _rename_away(folder: Path) -> Path:
    """Rename a folder to NAME.old, or a numbered one, which is returned, and make an empty one in its place."""
    place = folder.resolve() if folder.is_symlink() or folder.name in ("", "..") else folder
    olds = (place.with_name(f"{place.name}.old{f'-{k}' * (k > 1)}") for k in itertools.count(1))
    old = next(path for path in olds if not os.path.lexists(path))
    if Path.cwd().is_relative_to(place.resolve()):
        raise RunError(f"--out {folder}: cannot be renamed to {old}: the working folder is in it; choose another")
    try:
        move(place, old)
        place.mkdir()
        shutil.copymode(old, place)
    except OSError as e:
        with contextlib.suppress(OSError):
            move(old, place)
        raise RunError(f"--out {folder}: cannot be renamed to {old}: {reason(e)}; it is as it was") from None
    return old


def _put_back(folder: Path, old: Path | None) -> None:
    """Remove a folder if it is empty; the one from before then gets its name back."""
    with contextlib.suppress(OSError):
        folder.resolve().rmdir()
        if old is not None:
            move(old, folder.resolve())


def _taken(folder: Path) -> ConfigError:
    then = f"continue them with: polyfed resume {folder}, or replace them with --force"
    if is_search(folder):
        then = "continue them with the same polyfed tune command, or replace them with --force"
    elif (folder / "admission.csv").exists():
        then = "choose another folder"
    return ConfigError(f"--out {folder}: holds results already; {then}")


def _new(name: str) -> Path:
    base = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe(name)}"
    for k in range(1, 1000):
        folder = base if k == 1 else base.with_name(f"{base.name}-{k}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise RunError(f"cannot make the folder {folder}: {reason(e)}") from None
        return folder
    raise RunError(f"{base}: exists already; choose another with --out")


def kind(folder: Path) -> Any:
    """The module of a package beside the core that made a folder, with its `resumed` and `rebuilt`, or None."""
    mine = (module for name, module in KINDS.items() if (folder / name).is_file())
    return next((plugins.sibling(module, f"{folder}:") for module in mine), None)


def is_search(folder: Path) -> bool:
    """True where a folder holds a search by `polyfed tune`."""
    return any((folder / name).exists() for name in ("tune.toml", "tune.csv", "legs"))
