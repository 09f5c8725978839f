"""Hospitals whose sums are secure, the server and each site a process of its own that can be killed; this process is
the network between them, and keeps all that it carries.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import contextmanager, suppress
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from direct import Direct, Raw, raw
from hospitals import at_sites
from secured import FOUR, Secured, register

from polyfed_privacy.guard import Guard

FORK = multiprocessing.get_context("fork")  # packages are loaded once
NOISE = "noise.jsonl"  # [key, digest] of all that was drawn, by whichever process
PLACES = ("before", "between", "after")  # of the two exchanges of a sum
Carried = tuple[str, bytes]


class Far(Direct):
    """The server's end of the network."""

    def __init__(self, pipe: Connection):
        super().__init__(FOUR, self._ask)
        self.pipe = pipe

    def _ask(self, name: str, data: bytes) -> bytes:
        self.pipe.send((name, data))
        return self.pipe.recv()

    def register(self):
        return register()


class Network:
    """A run over processes.

    file, data: the experiment, and the folder of the sites' files     carried: (name, answer) of the sites
    passing: called with (network, name, question, answer or None) before and after a site answers, and may kill
    """

    def __init__(self, place: Path, file: Path, data: Path, passing: Callable[..., None] = lambda *_: None):
        self.sites = Secured(place, data)
        self.file, self.passing, self.place = file, passing, place
        self.carried: list[Carried] = []
        self.processes: dict[str, tuple[multiprocessing.Process, Connection]] = {}
        self.killed: list[str] = []

    def run(self) -> None:
        """Carry messages until the server has ended; who was killed is started again."""
        torch.set_num_threads(1)
        with noted(self.place / NOISE):
            try:
                while True:
                    process, pipe = self.process("server")
                    try:
                        name, data = pipe.recv()
                    except (EOFError, OSError):
                        process.join()
                        if process.exitcode == 0:
                            return
                        assert process.exitcode == -signal.SIGKILL, (self.place / "server.txt").read_text()
                        del self.processes["server"]
                        continue
                    answer = self.asked(name, data)
                    with suppress(OSError):  # who asked may be gone
                        pipe.send(answer)
            finally:
                for process, _ in self.processes.values():
                    process.kill()
                    process.join()

    def asked(self, name: str, data: bytes) -> bytes:
        """A site's answer, from whichever of its processes lives to give it."""
        question = raw(data)
        self.passing(self, name, question, None)
        while True:
            process, pipe = self.process(name)
            try:
                pipe.send_bytes(data)
                answer = pipe.recv_bytes()
            except (EOFError, OSError):
                process.join()
                del self.processes[name]
                continue
            self.carried.append((name, answer))
            self.passing(self, name, question, answer)
            return answer

    def kill(self, who: str) -> None:
        """SIGKILL."""
        process, _ = self.processes[who]
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.killed.append(who)

    def process(self, who: str) -> tuple[multiprocessing.Process, Connection]:
        if who in self.processes and who != "server" and not self.processes[who][0].is_alive():
            del self.processes[who]
        if who not in self.processes:
            mine, theirs = FORK.Pipe()
            others = [mine, *(pipe for _, pipe in self.processes.values())]
            process = FORK.Process(target=self._server if who == "server" else self._site, args=(who, theirs, others))
            process.start()
            theirs.close()
            self.processes[who] = process, mine
        return self.processes[who]

    def _server(self, _: str, pipe: Connection, others: list[Connection]) -> None:
        close(others)
        begun = (self.place / "run" / "config.toml").exists()
        try:
            at_sites(self.file, self.sites, Far(pipe), resume=begun)
        except BaseException as e:
            (self.place / "server.txt").write_text(f"{type(e).__name__}: {e}")
            os._exit(1)
        os._exit(0)

    def _site(self, name: str, pipe: Connection, others: list[Connection]) -> None:
        close(others)
        while True:
            try:
                pipe.send_bytes(self.sites.member(name).answer(pipe.recv_bytes()))
            except (EOFError, OSError):
                os._exit(0)


def close(pipes: list[Connection]) -> None:
    """Let go of the ends that a fork has inherited: a pipe ends where nobody has its other end."""
    for pipe in pipes:
        pipe.close()


@contextmanager
def noted(path: Path):
    """Within it, all noise that is drawn leaves a line."""
    before = Guard._noise

    def drawn(self, gaussian, secret, like, round, name, kind, digest):
        found = before(self, gaussian, secret, like, round, name, kind, digest)
        key = [*self.names, self.run, round.t, round.phase, name, kind, digest.hex()]
        with path.open("a") as f:
            f.write(json.dumps([key, sha256(found.numpy().tobytes()).hexdigest()]) + "\n")
        return found

    with mock.patch.object(Guard, "_noise", drawn):
        yield


def killing(kills: list[tuple[str, str, int]]) -> Callable[..., None]:
    """Kills of (the server or a site, before the first exchange, between the two or after the second, round), once
    each, the server's as the last site is asked or has answered.
    """
    left = list(kills)

    def passing(there: Network, name: str, asked: Raw, answer: bytes | None) -> None:
        for kill in list(left):
            who, place, t = kill
            first = asked.head["kind"] == "train" and asked.head["t"] == t
            second = asked.head.get("what") == f"train {t}.0"
            due = {"before": first and not answer, "between": first and answer, "after": second and answer}[place]
            if due and name == (FOUR[-1] if who == "server" else who) and there.process(who)[0].is_alive():
                left.remove(kill)
                there.kill(who)

    return passing


def repeated(there: Network) -> list[str]:
    """What was used twice in a campaign: an exchange for two requests or sums, a mask for two numbers, noise."""
    wrong: list[str] = []
    masked: dict[tuple[str, str], set[bytes]] = {}
    for name, answer in there.carried:
        reply = raw(answer)
        if reply.head["kind"] == "masked":
            words = reply.tensors["words"].numpy().tobytes()
            masked.setdefault((name, reply.head["context"]), set()).add(words)
    wrong += [f"{name}: masks of {context}" for (name, context), found in masked.items() if len(found) > 1]
    for name in FOUR:
        lines = (there.place / "vaults" / name / "sums.jsonl").read_text().split("\n")
        keys = [json.loads(line)[0] for line in lines if line]
        wrong += [f"{name}: {key}" for key in {*keys} if keys.count(key) > 1]
    noise: dict[str, set[str]] = {}
    if (there.place / NOISE).exists():
        for line in (there.place / NOISE).read_text().splitlines():
            key, found = json.loads(line)
            noise.setdefault(found, set()).add(json.dumps(key))
        wrong += [f"one noise for {sorted(keys)}" for keys in noise.values() if len(keys) > 1]
        keys = [key for of in noise.values() for key in of]
        wrong += [f"two noises for {key}" for key in {*keys} if keys.count(key) > 1]
    return wrong


def found_in(pid: int, wanted: dict[str, bytes]) -> set[str]:
    """Which of these are in what a process has written to its memory since it was forked."""
    with open(f"/proc/{pid}/maps") as f:
        regions = [line.split()[0].split("-") for line in f if "w" in line.split()[1]]
    pages, there = os.sysconf("SC_PAGE_SIZE"), set[str]()
    with open(f"/proc/{pid}/pagemap", "rb", 0) as map, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for first, last in ((int(a, 16), int(b, 16)) for a, b in regions):
            map.seek(first // pages * 8)
            entries = np.frombuffer(map.read((last - first) // pages * 8), dtype="<u8")
            own = np.flatnonzero(entries >> 56 & 1)  # pages that no other process has
            for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1) if len(own) else ():
                memory.seek(first + int(run[0]) * pages)
                part = memory.read(len(run) * pages)
                there |= {name for name, value in wanted.items() if value.strip(b"\0") in part}
    return there
