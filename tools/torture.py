"""Torture: commands that are killed, terminated, run twice at once and run out of disk, again and again until they end;
then every file must be what an undisturbed command leaves, byte for byte but for times.

    python tools/torture.py [--cases 100] [--seed 0] [--only run,compare] [--mode kill,term,two,full] [--case NAME]

Needs Linux. One process imports torch once and forks a child per command. Kills come at a random time, or at the k-th
of all moments at which a file is opened, written, flushed, renamed or removed: before it, after it, or in the middle of
writing it. Disks are full by the size of a small tmpfs where one may be mounted, else by a write that fails.
"""

import argparse
import builtins
import contextlib
import errno
import functools
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from safetensors.torch import load_file

import polyfed.algorithms
import polyfed.report  # noqa: F401  (loaded once, before children are forked)
from polyfed.base import checkpoint
from polyfed.cli import call
from polyfed.core import rows
from polyfed.runs import folder as folder_module
from polyfed.runs import trainer as trainer_module

SMALL = ["--data", "heart-disease", "--model", "linear", "--batch-size", "full", "--set", "checkpoint-every=1", "-q"]
APART, OUT = ("--set", "workers=1"), ("--out", "out")
PLENTY = 256 << 20  # bytes of a disk that is not full
LIMIT = 300  # seconds for a command that is not disturbed


@dataclass(frozen=True)
class Command:
    """first: its arguments, for the folder `out`     resumed: whether `polyfed resume` continues it
    files: private rows are kept in files     replaces: results that are there
    once: results that are complete are refused, not made again
    """

    first: tuple[str, ...]
    resumed: bool = False
    files: bool = False
    replaces: bool = False
    once: bool = False

    def again(self, place: Path) -> list[str]:
        begun = any((place / "out" / name).exists() for name in ("config.toml", "comparison.toml"))
        return ["resume", "out", "-q"] if self.resumed and begun else list(self.first)


def _run(method: str, rounds: int = 8, *more: str) -> tuple[str, ...]:
    return ("run", "--algorithm", method, "--seeds", "1", "--rounds", str(rounds), "--out", "out", *SMALL, *more)


COMMANDS = {
    "run fedavg": Command(_run("fedavg", 12), True),
    "run fpfc": Command(_run("fpfc", 8, "--fraction", "0.5"), True),
    "run fedcet": Command(_run("fedcet"), True),
    "run scaffold, rows in files": Command(_run("scaffold", 8, "--fraction", "0.5"), True, files=True),
    "run ditto, rows in files": Command(_run("ditto"), True, files=True),
    "run --stop, rows in files": Command(
        _run("ditto", 30, "--stop", "patience:4", "--set", "data.validation-fraction=0.3"), True, files=True
    ),
    "run --force": Command(_run("ditto", 6, "--force"), replaces=True),
    "compare": Command(
        ("compare", "local", "fedavg", "ditto", "--seeds", "2", "--rounds", "6", "--out", "out", *SMALL, *APART),
        True,
    ),
    "tune": Command(
        ("tune", "fpfc", "--grid", "0,0.5,1", "--rounds", "10", "--check-every", "2", "--train-on", "6", *SMALL, *OUT)
    ),
    "admit": Command(("admit", "base", "--data", "oslo.csv", "--exchanges", "3", "--out", "out"), once=True),
    "reproduce": Command(("reproduce", "fedcet/figure1", "--rehearse", "--seeds", "2", "--yes", "-q", "--out", "out")),
    "export": Command(("export", "base", "--client", "va", "--out", "out/va.safetensors")),
}


# disturbances, in the child


class Tap:
    """Sees every change of a file, and disturbs the `at`-th: None only counts them."""

    def __init__(self, at: int | None, how: str):
        self.at, self.how, self.seen = at, how, 0

    def due(self) -> bool:
        self.seen += 1
        full = self.how == "full" and self.at is not None and self.seen >= self.at
        return full or self.seen == self.at

    def around(self, function: Callable[..., Any], grows: bool = False) -> Callable[..., Any]:
        @functools.wraps(function)
        def tapped(*given: Any, **more: Any) -> Any:
            if not self.due():
                return function(*given, **more)
            if self.how == "full" and grows:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.how == "before":
                die()
            found = function(*given, **more)
            if self.how in ("after", "middle"):
                die()
            return found

        return tapped

    def half(self, function: Callable[..., Any], target: int) -> Callable[..., Any]:
        """Of a function that writes a whole file: dies when the file is half written."""
        whole = self.around(function, grows=True)

        @functools.wraps(function)
        def tapped(*given: Any, **more: Any) -> Any:
            if self.how != "middle" or self.seen + 1 != self.at:
                return whole(*given, **more)
            function(*given, **more)
            os.truncate(given[target], os.path.getsize(given[target]) // 2)
            return die()

        return tapped

    def install(self) -> None:
        for name in ("replace", "rename", "fsync", "unlink", "rmdir", "ftruncate"):
            setattr(os, name, self.around(getattr(os, name)))
        os.mkdir = self.around(os.mkdir, grows=True)
        for name in ("write_bytes", "write_text"):
            setattr(Path, name, self.half(getattr(Path, name), 0))
        checkpoint.save_file = self.half(checkpoint.save_file, 1)
        folder_module.save_file = self.half(folder_module.save_file, 1)
        opened, tapped = io.open, self.around(io.open, grows=True)

        def open_(file: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
            return (tapped if set(mode) & set("wax+") else opened)(file, mode, *given, **more)

        io.open = builtins.open = open_


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_files(algorithm: Any, task: Any, n: int, cohort: int, folder: Path, saved: Any = None, *_: Any) -> Any:
    return rows.MappedRows(n, algorithm.init_client(task, task.w0), folder / "rows")


def start(place: Path, arguments: list[str], files: bool, tap: Tap | None = None) -> int:
    """Fork a child that runs a command in `place`; what it says is appended to said.txt."""
    child = os.fork()
    if child:
        return child
    try:
        os.chdir(place)
        said = os.open("../said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(said, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if files:
            trainer_module.make_rows = in_files
        if tap is not None:
            tap.install()
        status = call(arguments)
        if tap is not None and tap.at is None:
            os.write(said, f"{tap.seen} moments\n".encode())
        os._exit(status)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


def ended(child: int, limit: float = LIMIT) -> int:
    """The exit status of a child, negative for a signal; -100 where it had to be ended."""
    give_up = time.monotonic() + limit
    while time.monotonic() < give_up:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -100


# what a command left


def content(place: Path) -> dict[str, Any]:
    """Every file of the results by its name, without times."""
    out = place / "out"
    return {
        str(p.relative_to(out)): _read(p, out) for p in sorted(out.rglob("*")) if p.is_file() and _counts(p, out)
    } | {str(p.parent.relative_to(out)): _state(p) for p in out.rglob("checkpoint") if any(p.iterdir())}


def _counts(path: Path, out: Path) -> bool:
    return "checkpoint" not in path.relative_to(out).parts and path.name != ".polyfed"


def _read(path: Path, out: Path) -> Any:
    if path.parent.name == "rows":
        return "compared by the checkpoint"
    if path.name == "log.txt":
        return "a log"
    raw = path.read_bytes()
    if path.suffix in (".html", ".svg") or path.name == "outcome.md":  # some show seconds
        return raw.rstrip().endswith((b"</html>", b"</svg>")) or path.suffix == ".md"
    if path.suffix == ".json":
        return _timeless(json.loads(raw))
    if path.suffix == ".jsonl":
        return [_timeless(json.loads(line)) for line in raw.decode().splitlines()]
    if path.suffix == ".csv":
        lines = [line.split(",") for line in raw.decode().splitlines()]
        keep = [k for k, name in enumerate(lines[0]) if name != "seconds"] if lines else []
        return [[line[k] for k in keep if k < len(line)] for line in lines]
    if path.suffix == ".toml":
        return tomllib.loads(raw.decode())
    return raw


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in ("seconds", "sha256")}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


def _state(folder: Path) -> dict[str, Any]:
    """The newest checkpoint, private rows resolved wherever they are."""
    newest = checkpoint.checkpoints(folder)[-1]
    extra = [p.name for p in folder.iterdir() if not p.name.startswith("round-")]
    tensors, meta = load_file(newest / "tensors.safetensors"), json.loads((newest / "meta.json").read_text())
    found: dict[str, Any] = {"round": newest.name.removesuffix("-again"), "meta": _timeless(meta), "drafts": extra}
    for name, t in tensors.items():
        kept, client, key = name.rpartition("client.")  # "best.", of the round that was kept
        if client and key.startswith("index."):
            field_, size = key[6:], int(tensors[f"{kept}client.size.{key[6:]}"])
            raw = (folder.parent / "rows" / f"{field_}.rows").read_bytes()
            found[f"{kept}client.{field_}"] = {i: raw[s * size : (s + 1) * size] for i, s, _ in t.tolist()}
        elif not client or not key.startswith(("before.", "size.")):
            found[name] = _without_seconds(t).numpy().tobytes() if name == "ledger" else t.numpy().tobytes()
    return found


def _without_seconds(ledger: torch.Tensor) -> torch.Tensor:
    from polyfed.core.ledger import COLUMNS

    kept = [k for k, name in enumerate(COLUMNS) if name != "seconds"]
    return ledger[:, kept] if ledger.dim() == 2 and ledger.shape[1] == len(COLUMNS) else ledger


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    missing = [f"{k} is missing" for k in expected if k not in found]
    extra = [f"{k} is left over" for k in found if k not in expected]
    other = []
    for k in found.keys() & expected.keys():
        if found[k] != expected[k]:
            parts = ""
            if isinstance(found[k], dict) and isinstance(expected[k], dict):
                keys = found[k].keys() | expected[k].keys()
                parts = f" in {', '.join(sorted(n for n in keys if found[k].get(n) != expected[k].get(n)))}"
            other.append(f"{k} differs{parts}")
    return missing + extra + other


# one case


@dataclass
class Reference:
    """An undisturbed command: what it leaves, how long it takes, how many moments it has, how much disk it needs."""

    content: dict[str, Any]
    seconds: float
    moments: int
    size: int


@dataclass
class Case:
    name: str
    command: Command
    place: Path
    draw: random.Random
    reference: Reference
    told: list[str] = field(default_factory=list)
    over: bool = False

    def go(self, arguments: list[str], tap: Tap | None = None, after: float | None = None, number: int = 0) -> int:
        child = start(self.place, arguments, self.command.files, tap)
        if after is not None:
            time.sleep(after)
            os.kill(child, number)
        status = ended(child)
        what = (
            f"{tap.how} moment {tap.at}" if tap else f"signal {number} after {after:.2f} s" if number else "undisturbed"
        )
        self.told.append(f"{arguments[0]} ({what}): {status}")
        refused = self.command.once and "holds results already" in (self.place.parent / "said.txt").read_text()
        self.over = status == 0 or (status == 2 and refused)
        return status

    def kill(self) -> bool:
        """Disturb once with kill -9; returns whether that came before the end."""
        arguments = self.command.again(self.place) if self.told else list(self.command.first)
        if self.draw.random() < 0.5:
            status = self.go(arguments, None, self.draw.uniform(0, self.reference.seconds), signal.SIGKILL)
        else:
            how = self.draw.choice(("before", "after", "middle"))
            status = self.go(arguments, Tap(self.draw.randint(1, self.reference.moments), how))
        return status != 0

    def term(self) -> bool:
        arguments = self.command.again(self.place) if self.told else list(self.command.first)
        status = self.go(arguments, None, self.draw.uniform(0, self.reference.seconds), signal.SIGTERM)
        if status not in (0, 143, -signal.SIGTERM):  # the last before the command has begun
            raise Fault(f"SIGTERM ended it with status {status}")
        return status != 0

    def two(self) -> bool:
        """A second process with the same command, or that continues it, while the first one is at work."""
        first = start(self.place, list(self.command.first), self.command.files)
        time.sleep(self.draw.uniform(0, self.reference.seconds))
        second = start(self.place, self.command.again(self.place), self.command.files)
        both = ended(first), ended(second)
        self.told.append(f"two at once: {both}")
        if 0 not in both:
            raise Fault(f"two at once ended with {both}")
        return True

    def full(self) -> bool:
        disk = self.place
        if mounted(disk):
            prepare(self.command, disk)
            state = os.statvfs(disk)
            taken = (state.f_blocks - state.f_bfree) * state.f_frsize
            resized(disk, taken + self.draw.randint(4096, max(8192, self.reference.size)))
            status = self.go(list(self.command.first))
            resized(disk, PLENTY)
        else:
            prepare(self.command, disk)
            status = self.go(list(self.command.first), Tap(self.draw.randint(1, self.reference.moments), "full"))
        return status != 0

    def end(self) -> None:
        """The command again, undisturbed, unless it has come to its end, and the comparison."""
        if not self.over and (status := self.go(self.command.again(self.place))) and not self.over:
            raise Fault(f"the last command ended with status {status}")
        said = (self.place.parent / "said.txt").read_text()
        for word in ("Traceback", "bug in polyfed"):
            if word in said:
                raise Fault(f"{word!r} was said")
        found = differences(content(self.place), self.reference.content)
        if found:
            raise Fault("; ".join(found))


class Fault(Exception):
    pass


def mounted(place: Path) -> bool:
    """Whether `place` is now a disk of its own."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={PLENTY}", "none", str(place)]
    return os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode


def resized(place: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)


def prepare(command: Command, place: Path) -> None:
    """What a command starts from: a finished run, data of a newcomer, results to replace."""
    base = place.parent.parent / "base"
    place.mkdir(parents=True, exist_ok=True)
    if command.first[0] in ("admit", "export"):
        (place / "base").symlink_to(base)
        (place / "oslo.csv").symlink_to(base.parent / "oslo.csv")
    if command.first[0] == "export":
        (place / "out").mkdir()
    if command.replaces:
        shutil.copytree(base, place / "out")


def make_base(root: Path) -> None:
    """A finished run to start from, and a newcomer's file with inputs like the run's."""
    place = root / "first"
    place.mkdir()
    status = ended(start(place, list(_run("ditto", 6, "--seed", "5")), False))
    if status:
        raise SystemExit((root / "said.txt").read_text())
    shutil.move(place / "out", root / "base")
    draw = np.random.default_rng(0)
    model = load_file(next((root / "base/models").glob("*.safetensors")))
    inputs = next(t.shape[1] for t in model.values() if t.dim() == 2)
    lines = [",".join([*(f"x{k}" for k in range(inputs)), "y"])]
    lines += [",".join([*(f"{v:.4f}" for v in draw.normal(size=inputs)), str(i % 2)]) for i in range(30)]
    (root / "oslo.csv").write_text("\n".join(lines) + "\n")


def undisturbed(command: Command, root: Path) -> Reference:
    """Twice, so that whatever differs between them by itself is found first."""
    found = []
    for k in range(2):
        place = root / f"undisturbed-{k}" / "disk"
        prepare(command, place)
        begun = time.monotonic()
        status = ended(start(place, list(command.first), command.files, Tap(None, "")))
        said = (place.parent / "said.txt").read_text()
        if status:
            raise SystemExit(f"{command.first}: status {status}\n{said}")
        size = sum(p.stat().st_blocks * 512 for p in place.rglob("*") if not p.is_symlink())
        moments = int(said.rsplit(" moments", 1)[0].split()[-1])
        found.append(Reference(content(place), time.monotonic() - begun, moments, size))
    apart = differences(found[0].content, found[1].content)
    if apart:
        raise SystemExit(f"{command.first}: two undisturbed commands differ: {'; '.join(apart)}")
    return found[1]


def one(name: str, mode: str, number: int, seed: int, root: Path, reference: Reference) -> str:
    """Returns what went wrong, or nothing."""
    command, draw = COMMANDS[name], random.Random(f"{seed} {name} {mode} {number}")
    place = root / f"{mode}-{number}" / "disk"
    case, disturbed = Case(name, command, place, draw, reference), False
    try:
        while not disturbed:
            if place.parent.exists():
                dismissed(place)
            case.told.clear()
            case.over = False
            (place if mode == "full" else place.parent).mkdir(parents=True)
            if mode != "full":
                prepare(command, place)
            for _ in range(draw.randint(1, 3) if mode in ("kill", "term") else 1):
                if not case.over:
                    disturbed = getattr(case, mode)() or disturbed
        case.end()
    except Fault as e:
        said = (place.parent / "said.txt").read_text().splitlines()
        return f"{e} [{'; '.join(case.told)}] {' | '.join(said[-3:])}"
    dismissed(place)
    return ""


def dismissed(place: Path) -> None:
    subprocess.run(["umount", str(place)], capture_output=True)
    shutil.rmtree(place.parent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="kills, in all; a fifth as many of every other mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="commands, with commas")
    parser.add_argument("--mode", default="kill,term,two,full")
    parser.add_argument("--case", help="one case, as a failure names it: 'run fedavg:kill:3'")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in COMMANDS if given.only is None or any(n.startswith(o) for o in given.only.split(","))]
    jobs = [
        (names[k % len(names)], mode, k // len(names))
        for mode in given.mode.split(",")
        for k in range(given.cases if mode == "kill" else -(-given.cases // 5))
    ]
    if given.case:
        name, mode, number = given.case.rsplit(":", 2)
        jobs = [(name, mode, int(number))]
    tried, identical, faults = Counter(), Counter(), []
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        root = Path(folder)
        make_base(root)
        places = {name: root / f"command-{k}" for k, name in enumerate(dict.fromkeys(j[0] for j in jobs))}
        references: dict[str, Reference] = {}
        for place in places.values():
            place.mkdir()
            (place / "base").symlink_to(root / "base")
            (place / "oslo.csv").symlink_to(root / "oslo.csv")
        with contextlib.suppress(KeyboardInterrupt):  # the table so far
            for name, mode, number in jobs:
                if name not in references:
                    references[name] = undisturbed(COMMANDS[name], places[name])
                wrong = one(name, mode, number, given.seed, places[name], references[name])
                tried[name, mode] += 1
                identical[name, mode] += not wrong
                print(f"{name}:{mode}:{number} {'failed' if wrong else 'identical'}", file=sys.stderr, flush=True)
                if wrong:
                    faults.append(
                        f"python tools/torture.py --seed {given.seed} --case '{name}:{mode}:{number}'  # {wrong}"
                    )
                    print(faults[-1], flush=True)
                    subprocess.run(["umount", str(places[name] / f"{mode}-{number}" / "disk")], capture_output=True)
    print(f"\n{'command':<30}{'mode':<6}{'tried':>7}{'identical':>11}{'failed':>8}")
    for key in tried:
        print(f"{key[0]:<30}{key[1]:<6}{tried[key]:>7}{identical[key]:>11}{tried[key] - identical[key]:>8}")
    for mode in given.mode.split(","):
        all_, good = (sum(n for (_, m), n in c.items() if m == mode) for c in (tried, identical))
        print(f"{'all':<30}{mode:<6}{all_:>7}{good:>11}{all_ - good:>8}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
