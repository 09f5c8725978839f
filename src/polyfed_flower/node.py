"""What a node's operator has set, and how the ClientApp asks the node's site. Nothing here loads torch: a SuperNode
starts a process for every message, and the site is a process that stays (`process`).

    SuperNode -> flwr-clientapp (this) ==== a Unix socket ====> the site: rows, policy, consent, vault
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from io import BufferedRWPair
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyfed.base.errors import ConfigError, RunError
from polyfed.base.settings import table_in
from polyfed.base.system import unix_socket
from polyfed.base.text import nfc

SOCKET, LOG, TERMS = "site.sock", "site.log", "terms.txt"  # in the folder of vaults
LONGEST = 100  # characters of a socket's path
LINE = 1 << 16  # bytes of a head
STARTS = 300.0  # seconds that a site's process may take to start
LOOK = 0.05  # seconds between two looks at whether it has
METRICS = ("own", "aggregate", "none")
SIMULATED = {"partition-id", "num-partitions"}  # what Flower's simulation sets of a node, and nobody else


class Node(NamedTuple):
    """A site on its own machine. yes: digests of terms, or "policy"     allow: as polyfed client takes it"""

    name: str
    data: str
    vault: str
    policy: str = ""
    yes: str = ""
    allow: str = ""
    metrics: Any = "own"
    backbone: str = ""

    @property
    def socket(self) -> Path:
        """Where its process listens."""
        return Path(self.vault) / SOCKET

    def checked(self) -> "Node":
        """Itself. Raises ConfigError, in one line that names the key."""
        if not re.fullmatch(r"\w[\w.-]{0,63}", self.name):
            raise ConfigError(f"name: found {self.name!r}, expected letters, digits, dots and hyphens")
        if not Path(self.data).exists():
            raise ConfigError(f"data: {self.data} is not there")
        if self.metrics not in METRICS:
            raise ConfigError(f"metrics: found {self.metrics!r}, expected {', '.join(METRICS)}")
        if not re.fullmatch(r"(policy|[0-9a-f]{16}(,[0-9a-f]{16})*)?", self.yes):
            raise ConfigError(f"yes: found {self.yes!r}, expected the digest of the terms, or policy")
        return self


def node_of(config: Mapping[str, Any], given: Any = None) -> Node:
    """A SuperNode's site by its --node-config. given: its rows, where a function of the app's makes them

    Raises ConfigError for what is missing or wrong.
    """
    then = 'start its SuperNode with --node-config \'data="FILE" vault="DIR"\''
    if not (config.get("data") or given is not None):
        raise ConfigError(f"has no data: {then}")
    if not config.get("vault"):
        raise ConfigError(f"has no vault, a folder for what the site keeps: {then}")
    said = {key: str(config[key]) for key in Node._fields if key in config}
    vault = Path(said["vault"]).expanduser().absolute()
    data = Path(said["data"]).expanduser().absolute() if given is None else written(given, vault)
    if "name" not in said and given is not None:
        raise ConfigError('has no name, which the rows that its app makes do not give; add name="NAME"')
    files = {key: str(Path(said[key]).expanduser().absolute()) for key in ("policy", "backbone") if said.get(key)}
    return Node(**{"name": nfc(data.stem)} | said | files | {"data": str(data), "vault": str(vault)}).checked()


def written(given: Any, vault: Path) -> Path:
    """The file of rows that are given in Python. given: a path, a data frame, or arrays x, y and perhaps x_test, y_test

    Raises ConfigError for anything else.
    """
    if isinstance(given, str | Path):
        return Path(given).expanduser().absolute()
    path = vault / ("data.npz" if isinstance(given, Mapping) else "data.csv")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"draft-{os.getpid()}{path.suffix}")
    if isinstance(given, Mapping):
        arrays: dict[str, Any] = {str(key): np.asarray(a) for key, a in given.items()}
        np.savez(draft, **arrays)
    elif hasattr(given, "to_csv"):
        given.to_csv(draft, index=False)
    else:
        kind = type(given).__name__
        raise ConfigError(f"data: found {kind}, expected a path, a data frame, or arrays by name, x and y")
    if path.is_file() and path.read_bytes() == draft.read_bytes():
        draft.unlink()
    else:
        draft.replace(path)
    return path


# what passes between a ClientApp and its site's process


def send(file: BufferedRWPair, head: Mapping[str, Any], data: bytes = b"") -> None:
    """A line of JSON, and bytes."""
    file.write(json.dumps({**head, "bytes": len(data)}).encode() + b"\n" + data)
    file.flush()


def receive(file: BufferedRWPair) -> tuple[dict[str, Any], bytes]:
    """What `send` has sent. Raises ValueError or EOFError for anything else."""
    head = table_in(file.readline(LINE))
    data = file.read(size := int(head["bytes"]))
    if len(data) < size:
        raise EOFError("cut off")
    return head, data


def ask(place: Path, head: Mapping[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
    """The answer of the process that listens at `place`. Raises OSError, ValueError or EOFError where there is none."""
    with unix_socket() as s:
        s.connect(str(place))
        with s.makefile("rwb") as file:
            send(file, head, data)
            return receive(file)


def ask_own(node: Node, head: Mapping[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
    """The answer of a node's own process, started where it does not run, or runs with other settings."""
    process, until = None, time.monotonic() + STARTS
    while True:
        with contextlib.suppress(OSError, ValueError, EOFError):
            answer, reply = ask(node.socket, {"node": [*node], **head}, data)
            if "ends" not in answer:
                return answer, reply
        if process is None:
            process = _start(node)
        elif (status := process.poll()) is not None:
            if status:
                raise RunError(_last(Path(node.vault) / LOG))
            process = None  # another one was there
        if time.monotonic() > until:
            raise RunError(f"{node.socket}: the site's process does not answer; see {LOG} beside it")
        time.sleep(LOOK)


def _start(node: Node) -> "subprocess.Popen[bytes]":
    vault = Path(node.vault)
    if len(str(node.socket)) > LONGEST:
        raise ConfigError(f"vault: {vault} is too long a path for the socket in it, expected one of {LONGEST - 10}")
    vault.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "polyfed_flower.process", json.dumps(node)]
    with (vault / LOG).open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("polyfed: ") if lines else "the site's process has ended"
