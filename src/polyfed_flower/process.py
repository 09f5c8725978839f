"""A site's process, which stays between Flower's messages, and the sites of a simulation, which are in its actors.

python -m polyfed_flower.process '["bern", "bern.csv", "/srv/vault", ...]'
"""

import contextlib
import hashlib
import json
import os
import re
import select
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from polyfed.base.errors import ConfigError, PolyfedError, printable
from polyfed.base.system import alone, lock, opened, unix_socket
from polyfed.data.readers import client_files, picture_folders
from polyfed_flower.node import TERMS, Node, receive, send
from polyfed_sites import wire as m
from polyfed_sites.audit import NAME as AUDIT
from polyfed_sites.audit import heading
from polyfed_sites.commands import MADE
from polyfed_sites.consent import Consent
from polyfed_sites.keys import openssh, pem, put, sign, write
from polyfed_sites.policy import Policy, read
from polyfed_sites.runs import NAME, Runs
from polyfed_sites.site import Site
from polyfed_sites.wire import Message

KEY, LAST, LOCK = "node.pem", "last.answer", "lock"  # in the folder of vaults, of a run's vault, of the former
IDLE = 1800.0  # seconds without a message after which a process ends that a ClientApp has started
NOTHING = frozenset({"nothing"})  # that an operator who has said nothing has agreed to
# of a simulation, whose rows are on one machine: numbers are those of `polyfed run`
OPEN = Policy(
    least_rows=1, least_batch=1, least_count=1, most_steps=10**9, most_rounds=10**9, most_evaluations=10**9,
    most_runs=10**9, most_joins=10**9, most_agreements=10**9, most_cells=10**9, most_parameters=10**9,
    absent=10**9, pooled="medians", digits=17, separable=True,
)  # fmt: skip
Say = Callable[[str], None]
_simulated: dict[str, "Answers"] = {}  # sites of this process of a simulation


class Configured(Site):
    """A site without a terminal: what its operator is asked for is a key of its SuperNode's --node-config."""

    def answer(self, data: bytes) -> bytes:
        reply = super().answer(data)
        if heading(reply) != "failed":
            return reply
        error = m.reply(reply, m.FIRST, self.name).head
        assert isinstance(error, m.Failed)
        line = re.sub(
            r"read them, then agree with --yes", f"read {TERMS} in its vault, then agree with --yes", error.error
        )
        line = re.sub(r"--(yes|allow) (\S+)", r'\1="\2" in its --node-config', line)
        return Message(m.Failed(error=line[: m.LINE])).pack()


class Answers:
    """A node's answers, in as many runs as there are. consent: by its settings, or of a terminal's"""

    def __init__(self, node: Node, policy: Policy, consent: Consent, say: Say = print, kind: type[Site] = Configured):
        self.node, self.policy, self.consent, self.say, self.kind = node, policy, consent, say, kind
        self.vault = Path(node.vault)
        self._runs: Runs | None = None
        self._logged: dict[str, int] = {}  # bytes of a run's audit log as this process has left it

    def key(self) -> Any:
        """The node's own key, made when it is first asked for."""
        path = self.vault / KEY
        if not path.is_file():
            write(path, pem(ec.generate_private_key(ec.SECP256R1())))
        return serialization.load_pem_private_key(path.read_bytes(), None)

    def public(self) -> str:
        """Its public one, as OpenSSH writes it."""
        return openssh(self.key())

    def who(self) -> dict[str, str]:
        """What the server is told of the node."""
        with self._alone():
            return {"site": self.node.name, "key": self.public()}

    def answer(self, run: str, data: bytes) -> bytes:
        """The answer to a message of a run; asked again, one that took training is read from the disk."""
        with self._alone():
            last, asked = self.vault / run / LAST, hashlib.sha256(data).digest()
            if NAME.fullmatch(run) and last.is_file() and (kept := last.read_bytes())[:32] == asked:
                return kept[32:]
            log = self.vault / run / AUDIT
            if self._runs is None or self._logged.get(run) != _size(log):  # another process has answered in between
                self._runs = Runs(self.node.name, self._site, many=True)
            reply = self._runs.answer(run, data)
            self._logged[run] = _size(log)
            if heading(reply).startswith("trained"):
                put(last, asked + reply)
            return reply

    def _site(self, run: str) -> Site:
        def show(text: str) -> None:
            write(self.vault / TERMS, text.encode())
            self.say(text)

        backbone = Path(self.node.backbone) if self.node.backbone else None
        return self.kind(
            self.node.name, Path(self.node.data), self.vault / run, self.consent, self.say, show, self.policy,
            lambda text: sign(self.key(), text), backbone, self.say,
        )  # fmt: skip

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        handle = alone(self.vault / LOCK, unlocked=True)
        try:
            yield
        finally:
            os.close(handle)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def answers(node: Node, say: Say = print) -> Answers:
    """A node's answers by its settings. Raises ConfigError."""
    allowed = frozenset(word.strip() for word in node.allow.split(",") if word.strip())
    if strange := sorted(allowed - {*MADE}):
        raise ConfigError(f"allow: found {strange[0]!r}, expected {', '.join(MADE)}")
    agreed = frozenset() if node.yes == "policy" else frozenset(node.yes.split(",")) if node.yes else NOTHING
    policy = read(Path(node.policy)) if node.policy else Policy()
    return Answers(node, policy, Consent(allowed, node.metrics, None, agreed), say)


def simulated(k: int, folder: Path, vaults: Path, given: Path | None) -> Answers | None:
    """Node k of a simulation, who answers whatever it is asked, as `polyfed run` would have it; None: there is no file.

    folder: of the sites' files, of which it has the k-th     given: its own, where the app makes it
    """
    files = [] if given is not None else picture_folders(folder) or client_files(folder)
    if given is None and k >= len(files):
        return None
    name, file = (files[k].stem, files[k]) if given is None else (f"site-{k}", given)
    if name not in _simulated:
        node = Node(name, str(file), str(vaults / name))
        _simulated[name] = Answers(node, OPEN, Consent(frozenset(MADE), "own", lambda _: True), lambda _: None, Site)
    return _simulated[name]


def listen(place: Path, there: Answers, idle: float | None = None) -> None:
    """Answer at a Unix socket, one message after the other; idle: until so many seconds pass without one.

    A ClientApp that was given other settings than this process makes it end, so that another one starts.
    """
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with unix_socket() as s:
        place.unlink(missing_ok=True)
        s.bind(str(place))
        s.listen(64)
        while select.select([s], [], [], idle)[0]:
            connection, _ = s.accept()
            connection.settimeout(60)
            with contextlib.suppress(OSError, ValueError, EOFError), connection, connection.makefile("rwb") as file:
                head, data = receive(file)
                if head.get("node", [*there.node]) != [*there.node]:
                    place.unlink(missing_ok=True)
                    send(file, {"ends": True})
                    return
                try:
                    known = "run" in head
                    answer = ({}, there.answer(str(head["run"]), data)) if known else (there.who(), b"")
                except (PolyfedError, OSError) as e:
                    there.say(printable(str(e)))
                    answer = {"error": "it cannot answer; its log says why"}, b""
                send(file, *answer)


def main(given: str) -> None:
    """A node's process, unless there is one."""
    os.umask(0o077)
    node = Node(*json.loads(given))
    handle = opened(Path(node.vault) / "process.lock")
    try:
        lock(handle, wait=False)
    except BlockingIOError:
        sys.exit(0)
    try:
        listen(node.socket, answers(node, lambda line: print(line, flush=True)), IDLE)
    except PolyfedError as e:
        sys.exit(f"polyfed: {e}")


if __name__ == "__main__":
    main(sys.argv[1])
