"""The ServerApp: polyfed's server, whose messages Flower's Grid carries."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp

from polyfed import report
from polyfed.base.errors import ConfigError, PolyfedError, RunError, printable
from polyfed.runs import stop
from polyfed.runs.result import Result
from polyfed_flower.client import packed, unpacked
from polyfed_sites import wire as m
from polyfed_sites.audit import SERVER, Audit, heading, mark
from polyfed_sites.server import serve

PAUSE = 0.1  # seconds between two looks for replies
LOOK = 3.0  # seconds between two looks at which nodes are there
AGAIN = 60.0  # seconds until a message is sent again, as its node may have been stopped with it; then twice as long
KINDS = {"train": "train", "evaluate": "evaluate"}  # Flower's kinds of messages, by ours; others are queries
Say = Callable[[str], None]


class Node(NamedTuple):
    """Where a site is. id: Flower's node     key: the public one that its vault has"""

    id: int
    key: str


class Asked:
    """A message that its site has not answered. ids: Flower's, of each time that it was sent"""

    def __init__(self, message: m.Message[m.Request]):
        self.message, self.ids, self.node = message, set[str](), 0
        self.again, self.patience = 0.0, AGAIN


class Carried:
    """The Transport of a run."""

    def __init__(self, grid: Grid, audit: Audit, say: Say):
        self.grid, self.audit, self.say = grid, audit, say
        self.run, self.most = "", m.FIRST
        self.nodes: dict[str, Node] = {}
        self._there: set[int] = set()
        self._heard: dict[int, float] = {}  # nodes, and when they were asked who they are
        self._who: dict[str, int] = {}  # such questions under way
        self._asked: dict[str, Asked] = {}
        self._found: dict[str, bytes | str] = {}
        self._looked = 0.0
        self._said: set[str] = set()

    def sites(self) -> Sequence[str]:
        """Who is connected now, and has said who it is. Raises RunError for two nodes with one name."""
        self._look()
        return sorted(name for name, node in self.nodes.items() if node.id in self._there)

    def register(self) -> Mapping[str, str]:
        """The public keys of the sites. Raises ConfigError for a site without one."""
        for name, node in self.nodes.items():
            if not node.key:
                raise ConfigError(f"privacy.sums: found secure, and {name} has no key to sign with, which they need")
        return {name: node.key for name, node in self.nodes.items()}

    def push(self, messages: Mapping[str, m.Message[m.Request]]) -> None:
        for name, message in messages.items():
            self._found.pop(name, None)
            self._asked[name] = Asked(message)
            data = message.pack()
            self.audit.add("asked", site=name, run=self.run, asked=mark(data), what=heading(data))
            self._send(name, data)

    def pull(
        self, names: Sequence[str], enough: int | None = None, seconds: float | None = None
    ) -> dict[str, bytes | str]:
        end = time.monotonic() + (float("inf") if seconds is None else seconds)
        while True:
            self._take()
            there = [name for name in names if name in self._found]
            if len(there) >= (len(names) if enough is None else enough) or time.monotonic() > end:
                return {name: self._found.pop(name) for name in there}
            stop.waiting()
            time.sleep(PAUSE)
            if time.monotonic() > self._looked + LOOK:
                self._look()
                self._repeat()

    def close(self) -> None:
        self._asked.clear()

    def _push(self, nodes: Iterable[int], kind: str, head: dict[str, Any], data: bytes = b"") -> list[str]:
        sent = [Message(packed(head, data), dst_node_id=k, message_type=kind, group_id=heading(data)) for k in nodes]
        return [*self.grid.push_messages(sent)]

    # who is there

    def _look(self) -> None:
        """Ask new nodes who they are, and take what those say that were asked."""
        self._looked = now = time.monotonic()
        self._there = {*self.grid.get_node_ids()}
        new = [k for k in sorted(self._there) if now > self._heard.get(k, -AGAIN) + AGAIN and self._name(k) is None]
        self._heard |= dict.fromkeys(new, now)
        self._who |= dict(zip(self._push(new, "query", {}), new, strict=True))
        for reply in self.grid.pull_messages([*self._who]):
            node = self._who.pop(reply.metadata.reply_to_message_id)
            says = {"error": _error(reply)} if reply.has_error() else reply.content.get("polyfed", {})
            if name := str(says.get("site", "")):
                self._enter(name, Node(node, str(says.get("key", ""))))
            elif line := str(says.get("error", "")):
                if says.get("simulated"):  # where no operator can mend it
                    raise RunError(line)
                self._note(f"node {node}: {line}")

    def _name(self, node: int) -> str | None:
        return next((name for name, there in self.nodes.items() if there.id == node), None)

    def _enter(self, name: str, node: Node) -> None:
        """A node that has said its name; one with the same vault is the site of before, started again."""
        before = self.nodes.get(name, node)
        if before.key != node.key:
            line = f"two nodes are called {name}, {before.id} and {node.id}; give each SuperNode a name of its own"
            if not self.run:
                raise RunError(f"{line}: --node-config 'name=\"NAME\"'")
            self._note(f"{line}; the first one is asked")
            return
        self.nodes[name] = node
        if name in self._asked and before.id != node.id:
            self._send(name)

    def _note(self, line: str) -> None:
        """Say it once."""
        if line not in self._said:
            self._said.add(line)
            self.say(printable(line))

    # messages

    def _send(self, name: str, data: bytes = b"") -> None:
        """Send a site what it is asked; not while it is away."""
        asked, node = self._asked[name], self.nodes[name].id
        if node not in self._there:
            return
        kind = KINDS.get(asked.message.head.kind, "query")
        asked.ids.update(self._push([node], kind, {"run": self.run}, data or asked.message.pack()))
        asked.again, asked.node = time.monotonic() + asked.patience, node

    def _repeat(self) -> None:
        """Send again what may be lost; a site that has answered it gives the same answer again."""
        for name, asked in self._asked.items():
            if time.monotonic() > asked.again:
                asked.patience *= 2
                self._send(name)

    def _take(self) -> None:
        """Keep the replies that have come."""
        names = {key: name for name, asked in self._asked.items() for key in asked.ids}
        for reply in self.grid.pull_messages([*names]) if names else ():
            key = reply.metadata.reply_to_message_id
            name = names[key]
            if name not in self._asked:
                continue
            if reply.has_error() and self._asked[name].node not in {*self.grid.get_node_ids()}:
                self._asked[name].ids.discard(key)  # lost with its node, and sent again when the site is back
                continue
            said = _said(reply)
            if isinstance(said, bytes):
                asked = mark(self._asked[name].message.pack())
                facts = {"asked": asked, "answer": mark(said), "kind": heading(said), "bytes": len(said)}
                self.audit.add("answered", site=name, run=self.run, **facts)
            self._found[name] = said
            del self._asked[name]


def _error(reply: Message) -> str:
    return f"Flower says error {reply.error.code} ({' '.join(str(reply.error.reason).split())[:300]})"


def _said(reply: Message) -> bytes | str:
    """A site's answer, or why there is none."""
    if reply.has_error():
        return _error(reply)
    try:
        says = reply.content["polyfed"]
        return str(says["error"]) if "error" in says else unpacked(reply)[1]
    except (KeyError, AttributeError, TypeError) as e:
        return f"not a message ({type(e).__name__})"


def server(experiment: Path) -> ServerApp:
    """A ServerApp that trains by an experiment file."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid, context, experiment)

    return app


def run(grid: Grid, context: Context, experiment: Path, say: Say = lambda line: print(line, flush=True)) -> Result:
    """One run of an app; how is in its `run_config`. Raises PolyfedError."""
    config = context.run_config
    resume, sites = str(config.get("resume", "")), str(config.get("sites", ""))
    out = Path(str(config.get("out", "runs"))).expanduser() / (resume or str(context.run_id))
    names = [name.strip() for name in sites.split(",") if name.strip()]
    carried = Carried(grid, Audit(out, SERVER), say)
    try:
        found = serve(
            experiment, carried, out, sites=int(sites) if sites.isdigit() else names or None, resume=bool(resume),
            wait=float(config.get("wait", 0)) or None, quorum=int(config.get("quorum", 0)) or None, say=say,
            trained=lambda found: _report(found, out, context),
        )  # fmt: skip
    except PolyfedError as e:
        say(f"polyfed: {e}")
        sys.tracebacklimit = 0  # for Flower, which shows the traceback of what ends a run
        raise
    finally:
        carried.close()
    say(f"{found.status}: {out}")
    return found


def _report(found: Result, out: Path, context: Context) -> None:
    if found.status == "finished":
        report.write_report(out)
        scores: dict[str, Any] = {str(name): of.tolist() for name, of in found.clients.items() if of.dtype == float}
        context.state["polyfed"] = MetricRecord(scores)
