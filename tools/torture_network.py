"""Kill what carries the messages of real sites, at every moment of a round: do the numbers stay the same, to the bit?

    make torture-network [ONLY=port,site] [METHODS=scaffold,fedcet] [SEED=0] [STORM=120] [SECURE=20]

A server and three sites, each a process of its own, train method after method; in each run something is killed or
disturbed once. The state of the server and of every site must be that of a run on one machine; where a reply cannot be
used, that of a run without its site in that round, and the server says so. Prints a line for each case, with what the
operators of both sides have seen. STORM: instead, so many seconds of each method over a network that refuses, delays
and cuts connections and changes bits, where calls and answers are lost and calls come twice, at every site. SECURE:
instead, so many runs with secure sums, in each round of which server or site is killed twice, before, between or after
the two exchanges of a sum; every other run has noise. Without it the bits are those of one machine, and in all that was
carried no exchange, mask or noise is used twice.
"""

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[1] / "tests" / n) for n in ("sites", "conformance", "algorithms", "compute")]
sys.path += [str(Path(__file__).parents[1] / "examples" / "network")]

from hospitals import experiment, on_one_machine, same
from secured import FOUR, SECURE, folder

from network import SITES, Federation, loops, private
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Replay, Uniform
from polyfed_sites.gate import Gate, Port, tls
from processes import PLACES, Network, killing, repeated

METHODS = ("fedavg", "scaffold", "fedcet", "fpfc")
ROUNDS = 3
MOMENTS = ("before", "during", "after")


class Wire:
    """Carries a site's bytes to the server and back as they are, but for one, as the file `spoil` in its folder says.

    "up 3": a bit of the third piece from now on that leaves the site     spoiled: how many bits were changed so far
    storm: refuse, delay, cut and change at random, and count in `storms`
    """

    storm = False

    def __init__(self, server: int, folder: Path):
        self.server, self.spoil, self.spoiled = server, folder / "spoil", 0
        self.lock, self.rng, self.storms = threading.Lock(), random.Random(folder.name), Counter()
        self.door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.door.getsockname()[1]}"
        threading.Thread(target=self._open, daemon=True).start()

    def _open(self) -> None:
        while True:
            site = self.door.accept()[0]
            if self._strikes("refused", 0.03):
                site.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.server))
            except OSError:
                site.close()
                continue
            for ends in ((site, server, "up"), (server, site, "down")):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._strikes("late", 0.2):
                    time.sleep(self.rng.uniform(0, 1))
                if self._strikes("cut", 0.01):
                    break
                if self._strikes("changed", 0.01):
                    data = data[:-1] + bytes([data[-1] ^ 1])
                to.sendall(self._passed(data, way))
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _strikes(self, what: str, chance: float) -> bool:
        struck = self.storm and self.rng.random() < chance
        self.storms[what] += struck
        return struck

    def _passed(self, data: bytes, way: str) -> bytes:
        with self.lock:
            if not self.spoil.exists() or not (said := self.spoil.read_text()).startswith(way):
                return data
            if left := int(said.split()[1]) - 1:
                self.spoil.write_text(f"{way} {left}")
                return data
            self.spoil.unlink()
            self.spoiled += 1
            return data[:-1] + bytes([data[-1] ^ 1])


class Wired(Federation):
    """Sites that reach the server through a wire each."""

    def server(self, name: str) -> str:
        if not hasattr(self, "wires"):
            self.wires = {n: Wire(self.hub.port, self.folder / n) for n in self.names}
        return self.wires[name].address


def told(what: str):
    """The test's site spoils its reply as the message tells it."""

    def spoil(there: Federation, site: str) -> None:
        there.faults[site] = what

    return staticmethod(spoil)


class Faults:
    """What can happen, by name; each is given the federation and a site."""

    @staticmethod
    def port(there: Federation, site: str) -> None:
        """The server's port closes at once, and opens again with nothing known of who was there."""
        hub = there.transport.hub
        hub.gate.close()
        with hub.changed:
            hub._sessions.clear()
            hub._open.clear()
        hub.gate = Port(Gate(hub, hub.say), tls(there.keys, None, None), "127.0.0.1", hub.port)

    @staticmethod
    def site(there: Federation, site: str) -> None:
        """Killed, and started again, as systemd would."""
        there.processes[site].kill()
        there.processes[site].wait()
        there.processes[site] = there.start(site)

    @staticmethod
    def away(there: Federation, site: str) -> None:
        """Stopped in order, and back after 20 seconds."""
        there.processes[site].terminate()
        there.processes[site].wait()
        threading.Timer(20, lambda: there.processes.__setitem__(site, there.start(site))).start()

    @staticmethod
    def frozen(there: Federation, site: str) -> None:
        """Too slow to answer anything for 30 seconds."""
        pid = there.processes[site].pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(30, os.kill, (pid, signal.SIGCONT)).start()

    @staticmethod
    def twice(there: Federation, site: str) -> None:
        """Asked twice, and so answers twice."""
        asked = there.hub.asked.get(("run", site))
        if asked is not None and site in there.hub._open:
            there.hub.ask(there.transport, site, asked.message)

    @staticmethod
    def up(there: Federation, site: str, piece: int) -> None:
        """A bit of what carries the reply is changed on the wire."""
        there.faults[site] = f"up {piece}"

    @staticmethod
    def down(there: Federation, site: str, piece: int) -> None:
        """A bit of what carries the message is changed on the wire."""
        (there.folder / site / "spoil").write_text(f"down {piece}")

    # a reply cut off in its middle, sent twice, with a bit changed before it leaves, with NaN, with a tensor
    # of another shape
    cut, doubled, garbled, nan, shape = map(told, ("cut", "doubled", "garbled", "nan", "shape"))


FAULTS = [name for name in vars(Faults) if not name.startswith("_")]
WIRE = ("up", "down")  # by which piece is spoiled
LOST = ("garbled", "nan", "shape")  # of one round, which goes on without that site
WHEN = dict.fromkeys(WIRE, (1, 2, 3)) | dict.fromkeys(("cut", "doubled", *LOST), ("once",))


def disturbed(loop: Loop, fault, moment: str, rng: random.Random, there: Federation) -> None:
    """Run the loop; in its second round something happens."""
    for t in range(ROUNDS):
        if t == 1 and moment == "before":
            fault()
        if t == 1 and moment == "during":
            threading.Timer(rng.uniform(0.01, 0.4), fault).start()
        loop.step()
        there.faults.clear()
        if t == 1 and moment == "after":
            fault()


def case(there: Wired, label: str, name: str, moment: str | int, rng: random.Random) -> str:
    """What differs from one machine; "" if nothing does."""
    mark = f"-{name}-{moment}"
    here, far = loops(there, label, Uniform(), mark, 2 if name in LOST else None)
    site, said = rng.choice(SITES), len(there.said)
    spoiled = there.wires[site].spoiled
    piece = [moment] if name in WIRE else []
    fault = lambda: getattr(Faults, name)(there, site, *piece)  # noqa: E731
    if name == "twice":  # from the loop's own thread
        pull = there.transport.pull
        there.transport.pull = lambda *a, **k: (fault(), pull(*a, **k))[1]
        disturbed(far, lambda: None, moment, rng, there)
        there.transport.pull = pull
    else:
        disturbed(far, fault, moment if moment in MOMENTS else "before", rng, there)
    if name in LOST:
        here.schedule = Replay.of(far.ledger.frame())
    for _ in range(ROUNDS):
        here.step()
    wrong = differences(there, label, here, far, mark)
    missing = [line for line in there.said[said:] if f"round 1: {site} is missing: " in line]
    if len(missing) != (name in LOST):
        wrong.append(f"the log: {missing}")
    changed = there.wires[site].spoiled - spoiled
    if (changed > 0) != (name in WIRE):  # a round of two exchanges is spoiled twice
        wrong.append(f"the wire, which has changed {changed} bits")
    return ", ".join(wrong)


def stormy(there: Wired, label: str, seconds: float) -> str:
    """What differs from one machine after rounds in a storm, and one in calm weather; "" if nothing does."""
    here, far = loops(there, label, Uniform(), "-storm")
    said, rounds, until = len(there.said), 0, time.monotonic() + seconds
    storm(there, True)
    calm = threading.Timer(seconds, storm, (there, False))
    calm.start()
    while time.monotonic() < until:
        far.step()
        rounds += 1
    calm.join()
    far.step()
    for _ in range(rounds + 1):
        here.step()
    struck = sum((w.storms for w in there.wires.values()), Counter())
    print(f"    {rounds} rounds; on the wires: " + ", ".join(f"{n} {what}" for what, n in struck.items()))
    return ", ".join(differences(there, label, here, far, "-storm") + [x for x in there.said[said:] if "missing" in x])


def storm(there: Wired, on: bool) -> None:
    for name, wire in there.wires.items():
        wire.storm = on
        (there.folder / name / "storm").touch() if on else (there.folder / name / "storm").unlink()


def differences(there: Wired, label: str, here: Loop, far: Loop, mark: str) -> list[str]:
    wrong = [f"server {k}" for k in here.server if not torch.equal(here.server[k], far.server[k])]
    for i, mine in enumerate(private(there, label, far, mark)):
        wrong += [f"{SITES[i]} {k}" for k, t in here.engine.rows.tensors.items() if not torch.equal(t[i], mine[k])]
    return wrong


def secure(place: Path, k: int, rng: random.Random) -> str:
    """What a run that is killed again and again has repeated, or how it differs; "" if it is right."""
    noise = k % 2 == 1
    method = rng.choice(("fedavg", "ditto") if noise else ("fedavg", "scaffold", "ditto", "fedavgm"))
    table = SECURE + ("epsilon = 2.0\ndelta = 1e-3\nclip = 1.0\n" if noise else "")
    top = {"rounds": ROUNDS, "batch-size": "full", "local-epochs": 1}
    data, file = folder(place / "data"), place / "study.toml"
    experiment(file, f'name = "{method}"', '[columns]\nmissing = "mean"\n' + table, **top)
    moments = [(who, place) for who in ("server", *FOUR) for place in PLACES]
    kills = [(*moment, t) for t in range(ROUNDS) for moment in rng.sample(moments, 2)]
    there = Network(place, file, data, killing(kills))
    there.run()
    wrong = repeated(there)
    if not noise:
        here = on_one_machine(file, data)
        try:
            same(here, here, there.sites)
        except AssertionError as e:
            wrong.append(str(e).splitlines()[0])
    print(f"    {method}: {', '.join(f'{who} {place} {t}' for who, place, t in kills)}")
    return ", ".join(wrong) + ("" if len(there.killed) == len(kills) else f"; killed {len(there.killed)} times")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(FAULTS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storm", type=float, default=0)
    parser.add_argument("--secure", type=int, default=0)
    given = parser.parse_args()
    rng, bad = random.Random(given.seed), 0
    for k in range(given.secure):
        with tempfile.TemporaryDirectory() as place:
            wrong = secure(Path(place), k, rng)
        bad += bool(wrong)
        print(f"secure {k}: {wrong or 'right'}", flush=True)
    if given.secure:
        print(f"{bad} runs are wrong")
        return int(bad > 0)
    with tempfile.TemporaryDirectory() as folder:
        there = Wired(Path(folder))
        try:
            there.ask(kind="echo", seconds=300)
            for label in given.methods.split(",") if given.storm else ():
                wrong = stormy(there, label, given.storm)
                bad += bool(wrong)
                print(f"storm {label}: {wrong or 'the same bits'}, {given.storm:.0f} s", flush=True)
            for name in given.only.split(",") if not given.storm else ():
                for moment in WHEN.get(name, MOMENTS):
                    for label in given.methods.split(","):
                        seen, told = len(there.said), {n: len(there.told(n)) for n in SITES}
                        start = time.monotonic()
                        wrong = case(there, label, name, moment, rng)
                        bad += bool(wrong)
                        took = time.monotonic() - start
                        print(f"{name} {moment} {label}: {wrong or 'the same bits'}, {took:.0f} s", flush=True)
                        for line in there.said[seen:]:
                            print(f"    server: {line}")
                        for n in SITES:
                            for line in there.told(n)[told[n] :].splitlines():
                                print(f"    {n}: {line}", flush=True)
        finally:
            there.close()
    print(f"{bad} cases differ")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
