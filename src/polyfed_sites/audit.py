"""The audit log at each end of a run: who was asked what, the digest and bytes of every answer, consent; no data.

A line is written before an answer leaves, and holds a digest of all lines before it, so the file itself shows a line
that was changed, removed or doubled. Only the other end's log shows a missing end, or a log written anew.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyfed.base.errors import ConfigError, RunError
from polyfed.base.settings import is_table
from polyfed_sites import journal

NAME = "audit.jsonl"
SERVER = "server"
LONGEST = 1 << 24  # bytes of a message's head
ABOUT = ("t", "phase", "round", "split", "what")  # what of a message's head says which one it is


def mark(data: bytes) -> str:
    """sha256 of a message."""
    return hashlib.sha256(data).hexdigest()


def heading(data: bytes) -> str:
    """Which message it is, in words, whatever it is."""
    try:
        head = json.loads(data[8 : 8 + min(int.from_bytes(data[:8], "little"), LONGEST)])["__metadata__"]["head"]
        says = json.loads(head)
        return " ".join([str(says["kind"]), *(f"{key} {says[key]}" for key in ABOUT if key in says)])[:200]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "no message"


class Audit:
    """A log that is added to. folder: where it is     end: whose it is, "server" or a site's name"""

    def __init__(self, folder: Path, end: str):
        self.path, self.end = folder / NAME, end
        self._n, self._hash, self._lock = -1, "", threading.Lock()

    def add(self, did: str, **what: Any) -> None:
        """Write a line down. Raises RunError where that fails."""
        with self._lock:
            try:
                if self._n < 0:
                    self._open()
                    self._add({"did": "started", "end": self.end})
                self._add({"did": did, **what})
            except OSError as e:
                raise RunError(f"{self.path}: cannot be written ({(e.strerror or str(e)).lower()})") from None

    def earlier(self, did: str) -> list[dict[str, Any]]:
        """The lines of a kind that are there, as far as they can be read."""
        return [says for says in journal.lines(self.path) if is_table(says) and says.get("did") == did]

    def _open(self) -> None:
        """Go on behind the last line that is whole; one that a kill has cut off was of an answer that did not leave."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as f:
            data = f.read()
            f.truncate(data.rfind(b"\n") + 1)
        last = data[: data.rfind(b"\n") + 1].splitlines()[-1:]
        try:
            says = json.loads(last[0]) if last else {"n": 0, "hash": ""}
            self._n, self._hash = int(says["n"]), str(says["hash"])
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{self.path}: its last line is damaged; move the file away, and keep it") from None

    def _add(self, what: Mapping[str, Any]) -> None:
        says = {"n": self._n + 1, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **what}
        hashed = _hash(self._hash, says)
        with self.path.open("ab") as f:
            f.write(json.dumps({**says, "hash": hashed}).encode() + b"\n")
        self._n, self._hash = self._n + 1, hashed


def audited(answer: Callable[[bytes], bytes], audit: Audit, terms: Callable[[], str]) -> Callable[[str, bytes], bytes]:
    """A site's answers, written down before they leave. terms: digest of what its operator agreed to; "": nothing"""
    agreed = ""

    def one(run: str, data: bytes) -> bytes:
        nonlocal agreed
        reply = answer(data)
        if terms() != agreed:
            agreed = terms()
            audit.add("agreed", run=run, terms=agreed)
        question = {"run": run, "asked": mark(data), "what": heading(data)}
        audit.add("answered", **question, answer=mark(reply), kind=heading(reply), bytes=len(reply))
        return reply

    return one


def _hash(before: str, says: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{before}{json.dumps(says, sort_keys=True)}".encode()).hexdigest()


class Log(NamedTuple):
    """A log that was read. end: whose it is"""

    path: Path
    end: str
    lines: Sequence[Mapping[str, Any]]

    def of(self, did: str, **what: str) -> list[Mapping[str, Any]]:
        """Lines of a kind."""
        return [s for s in self.lines if s["did"] == did and all(s.get(key) == value for key, value in what.items())]


def read(path: Path) -> Log:
    """The log at `path`, a file or its folder. Raises RunError, naming the first line that is not right."""
    path = path / NAME if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise ConfigError(f"{path}: no audit log ({(e.strerror or str(e)).lower()})") from None
    entries, before = list[Mapping[str, Any]](), ""
    for k, line in enumerate(lines[:-1] if not lines[-1] else lines, 1):
        try:
            says: dict[str, Any] = json.loads(line)
            n, hashed = int(says["n"]), says.pop("hash")
            did = str(says["did"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RunError(f"{path}, line {k}: found no line of an audit log; it has changed or was cut off") from None
        if n != k:
            raise RunError(f"{path}, line {k}: {f'line {n} is there twice' if n < k else f'line {k} is missing'}")
        if hashed != (before := _hash(before, says)):
            raise RunError(f"{path}, line {k}: has changed ({did}, {says.get('at')})")
        entries.append(says)
    if not entries or entries[0]["did"] != "started":
        raise RunError(f"{path}: found {'no line' if not entries else entries[0]['did']}, expected how it started")
    return Log(path, str(entries[0].get("end")), entries)


def compare(first: Log, second: Log) -> str:
    """What both ends agree on, in words. Raises RunError for the first answer that they do not agree on."""
    server, site = (first, second) if first.end == SERVER else (second, first)
    if server.end != SERVER or site.end == SERVER:
        raise ConfigError(f"found the logs of {first.end} and {second.end}, expected a server's and a site's")
    runs = {s["run"] for s in server.of("asked", site=site.end)}
    sent = [s for s in site.of("answered") if s["run"] in runs]
    taken = server.of("answered", site=site.end)
    questions = {s["asked"]: s for s in server.of("asked", site=site.end)}
    again = max(s["n"] for s in server.of("started"))
    there, here = ({(s["asked"], s["answer"], s["bytes"]) for s in of} for of in (taken, sent))
    lost = 0
    for s in sent:
        if (s["asked"], s["answer"], s["bytes"]) in there:
            continue
        where = f"{site.path}, line {s['n']}: {site.end}'s answer to {s['what']}"
        others = [t for t in taken if t["asked"] == s["asked"]]
        if others:
            mine, other = (f"{a['answer'][:12]}, {a['bytes']:,} bytes" for a in (s, others[0]))
            raise RunError(f"{where}: found {mine}, and {other} at the server (line {others[0]['n']})")
        if (
            s["asked"] not in questions or questions[s["asked"]]["n"] > again
        ):  # else the server was stopped before it came
            raise RunError(f"{where}: {server.path} has no such answer; a line or the end of it is missing")
        lost += 1
    for t in taken:
        if (t["asked"], t["answer"], t["bytes"]) not in here:
            where = f"{server.path}, line {t['n']}: {site.end}'s answer to {questions.get(t['asked'], {}).get('what')}"
            raise RunError(f"{where}: {site.path} has no such answer; a line or the end of it is missing")
    total = f"{len(here):,} answers of {site.end}, {sum(size for *_, size in here):,} bytes: the same at both ends"
    return total + (f"; {lost} of them did not reach a server that was stopped" if lost else "")
