"""Folders of results: files that survive a power cut, a mark that says that a folder is ours, and a lock.

`.polyfed` is mark and lock: a process that writes in the folder holds a lock on it, which ends with the process, and
its name is inside. A folder with the mark is ours alone; whatever lies in it is renamed with it, and never deleted.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.base.settings import is_table
from polyfed.base.system import MOVES_OPEN, alive, flush, lock, move, opened

MARK = ".polyfed"
RESULTS = ("checkpoint/round-*", "summary.json", "tune.csv", "admission.csv", "kept/*.json", "outcome.md")
SITES = (".csv", ".npz")  # of a folder with a file per site
HEADER = "# Written by polyfed; the last line is a checksum. To run an edited copy: polyfed run copy.toml\n"
_written: set[Path] = set()  # by this process
PATIENCE = 30.0  # seconds for the processes of a run that was killed to end


# writing


def put(path: Path, content: bytes | Callable[[Path], None], late: list[Path] | None = None) -> None:
    """Replace a file in one step that also a power cut does not halve. The folder is to be flushed afterwards.

    content: its bytes, or what writes them to a path
    late: takes the file's name, and it is `placed` with others
    """
    try:
        if isinstance(content, bytes):
            _draft(path).write_bytes(content)
        else:
            content(_draft(path))
        placed(path) if late is None else late.append(path)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None


def placed(*paths: Path) -> None:
    """Give files that were written, once all are on the disk, their names."""
    flush(*map(_draft, paths))
    for path in paths:
        move(_draft(path), path)
    note(*paths)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.draft")


def note(*paths: Path) -> None:
    """Take files or folders for written by this process; see `remove_written`."""
    _written.update(paths)


def linked(folder: Path, name: str, same: Callable[[Path], bool] = lambda _: True) -> bool:
    """Give a file of a folder beside this one the same name here: one file on the disk. True where it then is here.

    same: whether it is the file that is wanted
    """
    path = folder / name
    for other in sorted(folder.parent.glob(f"*/{name}")):
        if other != path and same(other):
            with contextlib.suppress(OSError):  # another disk, or a file system without links
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(other, path)
                note(path)
    return path.exists() and same(path)


def write_private(path: Path, text: str) -> None:
    """Write a new file that its user alone can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text.encode())


def sealed(text: str) -> str:
    """A TOML text with a checksum in its last line."""
    body = HEADER + text
    return f"{body}# sha256 {hashlib.sha256(body.encode()).hexdigest()}\n"


def unsealed(path: Path) -> dict[str, Any]:
    """The tables of a sealed file. Raises RunError, with one line, where it is not as it was written."""
    try:
        text = path.read_bytes().decode()
        tables = tomllib.loads(text)
    except OSError as e:
        raise RunError(f"{path}: cannot be read ({reason(e)})") from None
    except ValueError as e:
        raise RunError(f"{path}: damaged ({e}); nothing was touched") from None
    body, _, seal = text.rpartition("# sha256 ")
    if not text.startswith(HEADER):
        raise RunError(f"{path}: cut short or not written by polyfed; nothing was touched")
    if seal.strip() != hashlib.sha256(body.encode()).hexdigest():
        raise RunError(
            f"{path}: was cut or edited after it was written (its checksum does not match); nothing was touched, and "
            "an edited copy is run with: polyfed run copy.toml"
        )
    return tables


def put_out(out: Path, content: bytes) -> None:
    """Write a file that a user named: whole or not at all, where a link leads, and straight into what is no file."""
    if out.exists() and not out.is_file():
        out.write_bytes(content)
    else:
        put(out.resolve(), content)


def remove_written(folder: Path) -> None:
    """Remove what this process has written in a folder, and nothing else."""
    with contextlib.suppress(OSError):
        for path in [p for p in _written if p.is_relative_to(folder)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for place, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(place)
        if os.listdir(folder) == [MARK]:
            (folder / MARK).unlink()


# whose a folder is


def is_ours(folder: Path) -> bool:
    """True where a folder holds our results, which the mark says."""
    return (folder / MARK).is_file()


def config_of(folder: Path) -> Path:
    """The experiment file inside a run or comparison folder."""
    if folder.is_file():
        raise RunError(f"{folder}: a file, expected the folder of a run or of a comparison")
    if not folder.is_dir():
        near = closest(folder.name, [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else [])
        raise RunError(f"{folder}: no such folder{near}")
    for name in ("comparison.toml", "config.toml"):
        if (folder / name).is_file():
            return folder / name
    raise RunError(f"{folder}: neither a run (no config.toml) nor a comparison (no comparison.toml)")


def holds_results(folder: Path) -> bool:
    """True where anything in a folder took time."""
    return any(any(folder.rglob(name)) for name in RESULTS)


def spare(out: Path, *inputs: Path) -> None:
    """Raise ConfigError where writing `out` would replace or become what is read, under whatever name it is reached.

    inputs: files, folders of sites' data, or folders of results, in which report.html alone may be made anew
    """
    for place in inputs:
        if (why := _of_input(out, place)) is not None:
            raise ConfigError(f"out: {out} {why}; choose another name")


def _of_input(out: Path, place: Path) -> str | None:
    """Say how an output clashes with an input that is read, or None."""
    if place.is_dir() and is_ours(place):
        if out.is_dir() and (_within(out, place) or _within(place, out)):
            return f"would be written while {place} is read"
        clash = out.is_file() and out.name != "report.html" and _within(out, place)
    else:
        sites = [p for p in place.iterdir() if p.suffix.lower() in SITES] if place.is_dir() else []
        if place.is_dir() and out.suffix.lower() in SITES and _within(out, place):
            return f"would be taken for a site's file of {place}"
        clash = out.exists() and any(p.exists() and out.samefile(p) for p in (place, *sites))
    return f"is {place if place.is_file() else f'in {place}'}, which is read" if clash else None


def _within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


# one process at a time

_held: dict[str, int] = {}  # folder -> the thread of this process that holds its lock


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Make the folder ours and keep other processes from writing in it; the same thread may do so again.

    Raises RunError, saying who is at work there. An error leaves no folder behind that was empty before.
    """
    key, me = os.path.realpath(folder), threading.get_ident()
    if _held.get(key) == me:
        yield
        return
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = set(os.listdir(folder))
    except OSError as e:
        raise RunError(f"cannot make the folder {folder}: {reason(e)}") from None
    handle = _acquire(folder)
    _held[key] = me
    with contextlib.ExitStack() as held:
        held.callback(_let_go, handle, key)
        try:
            yield
        except BaseException:
            if not MOVES_OPEN:
                held.close()
            with contextlib.suppress(OSError):
                if set(os.listdir(folder)) == before | {MARK} != before:
                    (folder / MARK).unlink()
                for place in made:
                    place.rmdir()
            raise


def _let_go(handle: int, key: str) -> None:
    del _held[key]
    with contextlib.suppress(OSError):
        _sign(handle, {})
    os.close(handle)


def _acquire(folder: Path) -> int:
    """A handle on the mark, locked."""
    path, give_up = folder / MARK, time.monotonic() + PATIENCE
    while True:
        try:
            handle = opened(path, 0o644)
        except OSError as e:
            raise RunError(f"cannot write in the folder {folder}: {reason(e)}") from None
        holder = _holder(handle)
        try:
            locked = lock(handle, wait=False)
        except BlockingIOError:
            os.close(handle)
            if _alive(holder) or time.monotonic() > give_up:  # the children of one that was killed end soon
                raise _in_use(folder, holder) from None
            time.sleep(0.05)
            continue
        except OSError as e:
            os.close(handle)
            raise RunError(f"cannot lock the folder {folder}: {reason(e)}") from None
        if not locked:
            if holder.get("host") == socket.gethostname() and _alive(holder):
                os.close(handle)
                raise _in_use(folder, holder) from None
            print(f"polyfed: {folder} cannot be locked here; let no other process write in it", file=sys.stderr)
        if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:  # not removed by who had it before
            break
        os.close(handle)
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        _sign(handle, {"pid": os.getpid(), "host": socket.gethostname(), "since": since})
    return handle


def _sign(handle: int, holder: dict[str, Any]) -> None:
    text = json.dumps({"polyfed": "a folder of results", **holder}).encode() + b"\n"
    os.ftruncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, text)


def _holder(handle: int) -> dict[str, Any]:
    try:
        os.lseek(handle, 1, os.SEEK_SET)  # behind the byte that is locked
        signed: Any = json.loads(b"{" + os.read(handle, 4096))
    except ValueError:
        return {}
    return signed if is_table(signed) and isinstance(signed.get("pid"), int) else {}


def _alive(holder: dict[str, Any]) -> bool:
    """True where a holder may still be at work; one on another machine may."""
    return holder.get("host") != socket.gethostname() or alive(holder["pid"])


def _in_use(folder: Path, holder: dict[str, Any]) -> RunError:
    who = (
        f"process {holder['pid']} on {holder.get('host')} since {holder.get('since')}" if holder else "another process"
    )
    return RunError(f"{folder}: in use by {who}; wait until it ends, or stop it")
