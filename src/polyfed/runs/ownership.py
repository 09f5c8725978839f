"""Folders of results: files that survive a power cut, a mark that says whose it is, a lock, and
results from before that are kept aside until new ones are complete.

`.polyfed` is mark and lock: a process that writes in the folder holds an flock on it, which ends with the process, and
its name is inside. `.old` holds the results that `--force` replaces, complete, until the new ones are; files that are
not ours are never touched.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

from polyfed.base.checkpoint import alive, flush, reason
from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.base.settings import is_table

MARK = ".polyfed"
OLD, MOVING = ".old", ".old-moving"  # results from before: all of them, or on their way in or out
HEADS = (  # what a folder is
    "config.toml", "comparison.toml", "tune.toml", "tune.csv", "recipe.txt", "admission.csv", "coalitions.toml",
)  # fmt: skip
NAMES = (
    *HEADS, "federation.json", "partition.safetensors", "fixed.safetensors", "models.safetensors",
    "models/*.safetensors", "models/.*.draft", ".*.draft", "checkpoint/**/*", "rows/**/*", "features/*.npy",
    "features/.*.draft", "metrics.jsonl", "common.jsonl", "clients.csv", "ledger.csv", "assignments.csv",
    "report.json", "summary.json", "log.txt", "scores.safetensors", "report.html", "report-clients.csv",
    "report-figures/*", "results.csv", "tune.svg", "admission.svg", "leave.csv", "leave.html", "coalitions.json",
    "coalitions-*.csv", "coalitions.png", "coalitions.svg", "coalitions.pdf", "sites.json",
)  # fmt: skip
BEGUN = (  # there before any head is
    "models/.*.draft", ".*.draft", "checkpoint/**/*", "rows/**/*", "features/*.npy", "features/.*.draft",
    "metrics.jsonl",
)  # fmt: skip
RECIPE = ("kept/*.json", "outcome.md", "record.jsonl.gz", "table[0-9]*-*.csv")  # beside recipe.txt
SITES = (".csv", ".npz")  # of a folder with a file per site
PART = re.compile(r"(?!\d{8}-\d{6}-).+-seed-?\d+")  # a run of a comparison, and not a folder that was named by its time
HEADER = "# Written by polyfed; the last line is a checksum. To run an edited copy: polyfed run copy.toml\n"
PATIENCE = 30.0  # seconds for the processes of a run that was killed to end
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


# writing


def put(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Replace a file in one step that also a power cut does not halve. The folder is to be flushed afterwards.

    content: its bytes, or what writes them to a path
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        if isinstance(content, bytes):
            draft.write_bytes(content)
        else:
            content(draft)
        flush(draft)
        os.replace(draft, path)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None


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
    return path.exists() and same(path)


def write_private(path: Path, text: str) -> None:
    """Write a new file that its user alone can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def sealed(text: str) -> str:
    """A TOML text with a checksum in its last line."""
    body = HEADER + text
    return f"{body}# sha256 {hashlib.sha256(body.encode()).hexdigest()}\n"


def unsealed(path: Path) -> dict[str, Any]:
    """The tables of a sealed file. Raises RunError, with one line, where it is not as it was written."""
    try:
        text = path.read_bytes().decode()
        found = tomllib.loads(text)
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
    return found


def put_out(out: Path, content: bytes) -> None:
    """Write a file that a user named: whole or not at all, where a link leads, and straight into what is no file."""
    if out.exists() and not out.is_file():
        out.write_bytes(content)
    else:
        put(out.resolve(), content)


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
    old = f"; results from before are in {folder / OLD}" if (folder / OLD).exists() else ""
    raise RunError(f"{folder}: neither a run (no config.toml) nor a comparison (no comparison.toml){old}")


def holds_results(folder: Path) -> bool:
    """True where there is something that another run would mix with."""
    return any((folder / name).exists() for name in (*HEADS, "checkpoint", "rows", "summary.json", "runs", "legs"))


def our_files(folder: Path) -> list[Path]:
    """The files in a folder that we wrote; whatever else is there is its owner's."""
    found = _matching(folder, [*NAMES, *_of_recipe(folder)])
    for part in _parts(folder):
        found += our_files(part) + [p for p in (part / MARK,) if p.exists()]
    return list(dict.fromkeys(found))


def _matching(folder: Path, names: Iterable[str]) -> list[Path]:
    return [p for name in names for p in folder.glob(name) if p.is_file() or p.is_symlink()]


def _of_recipe(folder: Path) -> list[str]:
    """Names of a recipe's results in addition to those of any run; figures are those that its page shows."""
    if not (folder / "recipe.txt").is_file():
        return []
    page = folder / "outcome.md"
    text = page.read_text(errors="replace") if page.is_file() else ""
    return [*RECIPE, *re.findall(r"\]\(([\w.-]+\.svg)\)", text)]


def _parts(folder: Path) -> list[Path]:
    """The folders inside that belong to these results: runs of a comparison, legs of a search, parts of a recipe."""
    inside = [*folder.glob("legs/*"), *(p for p in folder.glob("runs/*") if PART.fullmatch(p.name))]
    if (folder / "recipe.txt").is_file():
        inside += [p.parent for depth in ("*/", "*/*/", "*/*/*/") for p in folder.glob(depth + MARK)]
    aside = (folder / OLD, folder / MOVING)
    return [
        p for p in inside
        if p.is_dir() and not p.is_symlink() and not any(p.is_relative_to(a) for a in aside) and is_ours(p)
    ]  # fmt: skip


def spare(out: Path, *inputs: Path) -> None:
    """Raise ConfigError where writing `out` would replace or become what is read, under whatever name it is reached.

    inputs: files, folders of sites' data, or folders of results, whose report.html may be made anew
    """
    for place in inputs:
        if (why := _of_input(out, place)) is not None:
            raise ConfigError(f"out: {out} {why}; choose another name")


def _of_input(out: Path, place: Path) -> str | None:
    """Say how an output clashes with an input that is read, or None."""
    read = [place]
    if place.is_dir() and is_ours(place):
        read += [p for p in our_files(place) if p.name != "report.html"]
        if out.is_dir() and (_within(out, place) or _within(place, out)):
            return f"would be written while {place} is read"
    elif place.is_dir():
        read += [p for p in place.iterdir() if p.suffix.lower() in SITES]
        if out.suffix.lower() in SITES and _within(out, place):
            return f"would be taken for a site's file of {place}"
    if out.exists() and any(p.exists() and out.samefile(p) for p in read):
        return f"is {place if place.is_file() else f'in {place}'}, which is read"
    return None


def _within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


# results from before


def set_aside(folder: Path) -> None:
    """Move our files into `.old`, where they stay a complete folder, until `forget_old` or `restore`.

    Where `.old` is there, what is in the folder is a try to replace it that did not end well; that is removed.
    """
    try:
        if (folder / OLD).exists():
            _remove(folder, our_files(folder))
            return
        _move(our_files(folder), folder, folder / MOVING)
        (folder / MOVING / MARK).touch()
        os.replace(folder / MOVING, folder / OLD)
    except OSError as e:
        with contextlib.suppress(OSError):
            settle(folder)
        raise RunError(f"cannot move the results in {folder} aside: {reason(e)}; they are as they were") from None


def restore(folder: Path) -> None:
    """Put the results from before back in the place of new ones."""
    if (folder / OLD).exists():
        _remove(folder, our_files(folder))
        os.replace(folder / OLD, folder / MOVING)
    if (folder / MOVING).exists():
        (folder / MOVING / MARK).unlink(missing_ok=True)
        _move([p for p in (folder / MOVING).rglob("*") if not p.is_dir()], folder / MOVING, folder)
        shutil.rmtree(folder / MOVING)


def settle(folder: Path) -> None:
    """End what a crash has cut short: results on their way aside come back, also those that nothing has replaced, and
    what a run writes before its head is removed. Results stay, also where it is not known what they belong to.
    """
    begun = any((folder / h).exists() for h in (*HEADS, "summary.json"))
    if (folder / MOVING).exists() or ((folder / OLD).exists() and not any((folder / h).exists() for h in HEADS)):
        restore(folder)
    elif not begun and not any(any(folder.glob(p)) for p in ("checkpoint/round-*", "*/*/checkpoint/round-*")):
        with contextlib.suppress(OSError):
            _remove(folder, _matching(folder, BEGUN))


def forget_old(folder: Path) -> None:
    """Delete the results from before, now that the new ones are complete."""
    shutil.rmtree(folder / OLD, ignore_errors=True)


def where_old(folder: Path) -> str:
    """A remark on results from before, or nothing."""
    return f"; the results from before are in {folder / OLD} until it is complete" if (folder / OLD).exists() else ""


def discard(folder: Path, but: Iterable[Path] = ()) -> None:
    """Remove our files, `but` for some."""
    with contextlib.suppress(OSError):
        _remove(folder, [p for p in our_files(folder) if p not in {*but}])


def _remove(folder: Path, files: list[Path]) -> None:
    for path in sorted(files, key=lambda p: not (p.parent == folder and p.name in HEADS)):  # first what it is known by
        path.unlink(missing_ok=True)
    _prune(folder, files)


def _move(files: list[Path], origin: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in files:
        place = target / path.relative_to(origin)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    _prune(origin, files)
    for folder in (origin, target):
        flush(folder)


def _prune(folder: Path, files: list[Path]) -> None:
    """Remove the folders inside that have become empty, and those that we make first of all."""
    first = [folder / name for name in ("runs", "models", "checkpoint", "rows", "legs", "kept")]
    empty = {q for top in first for q in (top, *top.rglob("*")) if q.is_dir()}  # also those that a kill has left
    places = empty | {q for p in files for q in p.parents if folder in q.parents}
    for place in sorted(places, key=lambda q: -len(q.parts)):
        with contextlib.suppress(OSError):
            place.rmdir()


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
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if set(os.listdir(folder)) == before | {MARK} != before:
                (folder / MARK).unlink()
            for place in made:
                place.rmdir()
        raise
    finally:
        del _held[key]
        with contextlib.suppress(OSError):
            _sign(handle, {})
        os.close(handle)


def _acquire(folder: Path) -> int:
    """A handle on the mark, locked."""
    path, give_up = folder / MARK, time.monotonic() + PATIENCE
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise RunError(f"cannot write in the folder {folder}: {reason(e)}") from None
        holder = _holder(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            if _alive(holder) or time.monotonic() > give_up:  # the children of one that was killed end soon
                raise _in_use(folder, holder) from None
            time.sleep(0.05)
            continue
        except OSError as e:
            if e.errno not in NO_LOCKS:
                os.close(handle)
                raise RunError(f"cannot lock the folder {folder}: {reason(e)}") from None
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
    os.pwrite(handle, text, 0)


def _holder(handle: int) -> dict[str, Any]:
    try:
        found: Any = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return found if is_table(found) and isinstance(found.get("pid"), int) else {}


def _alive(holder: dict[str, Any]) -> bool:
    """True where a holder may still be at work; one on another machine may."""
    return holder.get("host") != socket.gethostname() or alive(holder["pid"])


def _in_use(folder: Path, holder: dict[str, Any]) -> RunError:
    who = (
        f"process {holder['pid']} on {holder.get('host')} since {holder.get('since')}" if holder else "another process"
    )
    return RunError(f"{folder}: in use by {who}; wait until it ends, or stop it")
