"""Messages over Flower: its SuperLink at the server, a SuperNode at each site, and at both ends polyfed's own process.

    polyfed server -- Runtime API -- SuperLink ==== TLS ==== SuperNode -- Runtime API -- polyfed client

Both processes take the place of Flower's apps (its isolation mode "process"): they ask the SuperLink or SuperNode
beside them for work over the loopback interface. So no process starts for a message, and a site runs no code that the
server sent.
Flower keeps nothing that matters: what it loses is asked for again, and a site answers the same again.
"""

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.base.errors import RunError
from polyfed.runs import stop
from polyfed.sites import flower_api as flwr
from polyfed.sites.flower_child import HEADER, SIZE
from polyfed.sites.flower_process import Child
from polyfed.sites.keys import Keys, split, write

if TYPE_CHECKING:
    from polyfed.sites.message import Message, Request

POLL = 0.1  # seconds between two questions to the process beside this one
ENDS = 60.0  # seconds between two looks at whether a key has ended
LOOK = 1.0  # seconds between two looks at who is connected
BEAT = 10.0  # seconds between two signs of life; Flower gives up after 60
START = 60.0  # seconds that one of Flower's processes may take to start
PATIENCE = 120.0  # seconds until a connected site that does not answer is asked again, doubled every time
MOST = 1 << 34  # bytes of tensors in a message
TTL = 7 * 86400.0  # seconds for which Flower keeps a message
STATE = "state.json"  # for `polyfed status`
Say = Callable[[str], None]
# how Flower fails, by whatever cause
Faults = (flwr.HTTPError, flwr.RunNotRunningException, flwr.ObjectPullError, flwr.ObjectPushError, OSError)

APP = {
    "pyproject.toml": b"""
[project]
name = "polyfed-relay"
version = "1"
description = "Messages of polyfed; handled by polyfed server and polyfed client."
dependencies = []
[tool.flwr.app]
publisher = "polyfed"
[tool.flwr.app.components]
serverapp = "relay:server"
clientapp = "relay:client"
[tool.flwr.app.config]
""",
    "relay.py": b"""
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()

""",
}


class Known:
    """Shows the secret that `Gate` asks for, and says what is the most that a site may send at once."""

    def __init__(self, secret: bytes, most: Callable[[], int] | None = None):
        self.secret, self.most = secret, most

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        context.request.headers[HEADER.decode()] = self.secret.decode()
        if self.most is not None:
            context.request.headers[SIZE.decode()] = str(self.most())
        return call_next(context)


class Task:
    """A piece of work taken from a SuperLink or SuperNode, kept alive by signs of life until it is closed."""

    def __init__(self, client: Any, token: str):
        self.client, self.token = client, token
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(*Faults):
                self.client.SendTaskHeartbeat(flwr.SendTaskHeartbeatRequest())

    def close(self) -> None:
        self._over.set()
        self.client.close()


class Door:
    """Where pieces of work of a kind are waiting: a SuperLink or SuperNode."""

    def __init__(
        self, address: str, authority: bytes | None, secret: bytes, kind: str, most: Callable[[], int] | None = None
    ):
        self.kind, self._where = kind, (address, authority is None, authority)
        self._shown = flwr.RuntimeVersionHttpInterceptor("polyfed"), Known(secret, most)
        signed = ["/flwr.proto.Runtime/AcquireTask"]
        self._client = self._runtime(flwr.SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=signed))

    def _runtime(self, shown: Any) -> Any:
        """Flower's Runtime API, without repeats of its own: they would go on for ever."""
        return flwr.RuntimeHttpClient.from_server_address(*self._where, [*self._shown, shown])

    def take(self) -> Task | None:
        """The oldest, if any."""
        found = self._client.AcquireTask(flwr.AcquireTaskRequest(supported_task_types=[self.kind]))
        token = found.token
        return Task(self._runtime(flwr.RuntimeTokenHttpInterceptor(token)), token) if token else None

    def close(self) -> None:
        self._client.close()


def enveloped(data: bytes) -> Any:
    """One array of bytes: Flower cuts arrays, and nothing else, into pieces."""
    return flwr.RecordDict(
        {"polyfed": flwr.ArrayRecord({"message": flwr.Array("uint8", (len(data),), "polyfed", data)})}
    )


def opened(content: Any) -> bytes:
    """What `enveloped` was given. Raises ValueError for anything else."""
    try:
        return content.array_records["polyfed"]["message"].data
    except KeyError:
        raise ValueError("no message of polyfed") from None


class Asked:
    """What a site was sent and has not answered."""

    def __init__(self, message: "Message[Request]"):
        self.message = message  # not its bytes: sites share its tensors
        self.ids: list[str] = []  # Flower's numbers of it, one for each time that it was sent
        self.node, self.activated = 0, ""  # to which the last one went, and since when it had been connected
        self.since, self.patience = 0.0, PATIENCE


class Flower:
    """A transport (see sites/asking.py) over a SuperLink.

    keys: the federation's     folder: for Flower's files, which can be thrown away     host, port: where to listen
    say: takes one line per event     most: bytes of tensors that a site may send at once
    """

    def __init__(
        self, keys: Keys, folder: Path, say: Say, host: str = "0.0.0.0", port: int | None = None, most: int = MOST
    ):
        self.keys, self.folder, self.say, self.host, self.most = keys, folder, say, host, most
        self.port = port or split(keys.address)[1]
        self._authority = keys.authority.read_bytes()
        self._secret = secrets.token_hex(32).encode()
        self._asked: dict[str, Asked] = {}
        self._failed: dict[str, str] = {}
        self._online: dict[str, tuple[int, str]] = {}  # by name: Flower's number of the node, connected since
        self._looked, self._noted = 0.0, dict[str, str]()
        self._link: Child | None = None
        self._task: Task | None = None
        self._grid: Any = None
        self._control: Any = None
        folder.mkdir(parents=True, exist_ok=True)
        self._connect()

    # the SuperLink

    @property
    def _local(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _start(self) -> None:
        """A SuperLink of our own. It keeps messages in memory only: what is lost with it is asked for again."""
        files = ["--ssl-ca-certfile", str(self.keys.authority), "--ssl-certfile", str(self.keys.certificate)]
        files += ["--ssl-keyfile", str(self.keys.private), "--enable-supernode-auth"]
        files += ["--host", self.host, "--port", str(self.port)]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as e:
                raise RunError(
                    f"cannot listen at {self.host}:{self.port} ({e.strerror}); choose another --port"
                ) from None
        self._link = Child("superlink", files, self.folder, self._secret)
        end = time.monotonic() + START
        while not answers(self._local):
            if not self._link.alive or time.monotonic() > end:
                raise RunError(f"Flower's SuperLink does not start; its last words are in {self._link.log}")
            time.sleep(POLL)

    def _connect(self) -> None:
        """A new run at the SuperLink, in which this process is the server's app."""
        self._drop()
        if self._link is None or not self._link.alive:
            if self._link is not None:
                self.say("Flower's SuperLink has died; starting it again, and asking the sites again")
            self._start()
        interceptors = [flwr.RuntimeVersionHttpInterceptor("polyfed"), Known(self._secret)]
        self._control = flwr.ControlHttpClient.from_server_address(self._local, False, self._authority, interceptors)
        self._registered = 0, 0.0
        self._register()
        fab = flwr.build_fab_from_files(APP)[0]
        started = self._control.StartRun(
            flwr.StartRunRequest(fab=flwr.fab_to_proto(flwr.Fab(hashlib.sha256(fab).hexdigest(), fab, {})))
        )
        if not started.run_id:
            raise RunError(f"Flower's SuperLink starts no run; its last words are in {self.folder / 'superlink.log'}")
        door = Door(self._local, self._authority, self._secret, flwr.TaskType.SERVER_APP, lambda: self.most)
        while (task := door.take()) is None:
            continue
        door.close()
        given = task.client.PullTaskInput(flwr.PullTaskInputRequest())
        flwr.TaskIdentity.task_id, flwr.TaskIdentity.run_id = given.task_id, given.run.run_id
        flwr.TaskIdentity.node_id = given.context.node_id
        grid = flwr.HttpGrid(self._local, False, self._authority, token=task.token)
        grid._client = task.client  # pyright: ignore  (its own would repeat a failed call for ever, or end this process)
        grid.set_run(flwr.run_from_proto(given.run))
        import_module(type(grid).__module__).pull_objects = self._objects  # pyright: ignore
        self._task, self._grid, self._online = task, grid, {}
        for asked in self._asked.values():
            asked.ids = []

    def _register(self) -> None:
        """Flower's list of keys becomes that of the federation: also while it runs, so a key can be revoked."""
        changed, now = self.keys.changed(), time.monotonic()
        if self._registered[0] == changed and now < self._registered[1] + ENDS:
            return
        wanted = {_as_flower(public): name for public, name in self.keys.accepted().items()}
        nodes = self._control.ListNodes(flwr.ListNodesRequest()).nodes_info
        there = {n.public_key: n.node_id for n in nodes if n.status != "unregistered"}
        for key, name in wanted.items():
            if key not in there:
                self._control.RegisterNode(flwr.RegisterNodeRequest(public_key=key, name=name))
        for key, node in there.items():
            if key not in wanted:
                self._control.UnregisterNode(flwr.UnregisterNodeRequest(node_id=node))
        self._names, self._registered = wanted, (changed, now)

    def _look(self) -> None:
        """Who is connected. A site that has come anew has lost what it was sent, and is sent it again."""
        if time.monotonic() < self._looked + LOOK:
            return
        if self._link is not None and not self._link.alive:
            raise OSError("the SuperLink has died")
        self._register()
        found = {
            self._names[n.public_key]: (n.node_id, n.last_activated_at)
            for n in self._grid.get_nodes()
            if n.status == "online" and n.public_key in self._names
        }
        for name in sorted(found.keys() | self._online.keys()):
            if name not in self._online or (name in found and found[name] != self._online[name]):
                self.say(f"{name} is connected")
            elif name not in found:
                known = name in self._names.values()
                self.say(f"{name} is not connected any more" if known else f"{name}'s key is no longer accepted")
        for name in self._asked.keys() - self._names.values():
            self._failed[name] = "its key is not accepted (revoked, expired or unknown)"
        self._online, self._looked = found, time.monotonic()
        doing = {name: "connected" if name in found else "not connected" for name in self._names.values()}
        doing |= {name: f"{doing.get(name, 'refused')}, to answer" for name in self._asked}
        if doing != self._noted:
            self._noted = doing
            write(self.folder / STATE, json.dumps({"pid": os.getpid(), "sites": doing}).encode())

    def _drop(self) -> None:
        if self._task is not None:
            self._task.close()
        for client in (self._grid, self._control):
            if client is not None:
                client.close()
        self._task = self._grid = self._control = None

    # messages

    def sites(self) -> Sequence[str]:
        """Who is connected now."""
        self._safely(self._look)
        return sorted(self._online)

    def push(self, messages: "Mapping[str, Message[Request]]") -> None:
        for name, message in messages.items():
            self._failed.pop(name, None)
            self._asked[name] = Asked(message)
            self._safely(lambda name=name: self._send(name))

    def pull(
        self, names: Sequence[str], enough: int | None = None, seconds: float | None = None
    ) -> dict[str, bytes | str]:
        end = time.monotonic() + (float("inf") if seconds is None else seconds)
        found: dict[str, bytes | str] = {}
        while True:
            stop.waiting()
            self._safely(lambda: self._turn(names, found))
            if len(found) >= (len(names) if enough is None else enough) or time.monotonic() > end:
                return found
            time.sleep(POLL)

    def _turn(self, names: Iterable[str], found: dict[str, bytes | str]) -> None:
        self._look()
        self._take([n for n in names if n in self._asked], found)
        for name in names:
            if name in self._failed:
                found[name] = self._failed.pop(name)
                self._asked.pop(name, None)
            elif name in self._asked and name in self._online:
                asked = self._asked[name]
                late = asked.ids and time.monotonic() > asked.since + asked.patience
                if late:
                    asked.patience *= 2
                    self.say(f"{name} has not answered for {time.monotonic() - asked.since:.0f} s; asked again")
                if late or not asked.ids or (asked.node, asked.activated) != self._online[name]:
                    self._send(name)

    def _send(self, name: str) -> None:
        """Send it, if the site is connected; otherwise it is sent as soon as it is."""
        asked = self._asked[name]
        if name not in self._online:
            return
        asked.node, asked.activated = self._online[name]
        data = asked.message.pack()
        envelope = flwr.Message(enveloped(data), dst_node_id=asked.node, message_type="query", ttl=TTL)
        taken = [i for i in self._grid.push_messages([envelope]) if i]
        if not taken:  # Flower says no more than this
            self._failed[name] = f"the SuperLink refused the message to it ({len(data):,} bytes)"
            return
        asked.ids += taken
        asked.since = time.monotonic()

    def _take(self, names: Sequence[str], found: dict[str, bytes | str]) -> None:
        """What has arrived."""
        whose = {i: name for name in names for i in self._asked[name].ids}
        for number, name in whose.items():  # one by one, so that what a site has spoilt is known for its own
            try:
                for reply in self._grid.pull_messages([number]):
                    self._took(number, name, reply, found)
            except Faults:
                raise
            except Exception as e:  # whatever Flower makes of bytes that are none of its messages
                if name in self._asked:
                    found[name] = f"not a message ({type(e).__name__}: {' '.join(str(e).split())})"
                    del self._asked[name]

    def _took(self, number: str, name: str, reply: Any, found: dict[str, bytes | str]) -> None:
        if name not in self._asked:  # a second answer to what was asked twice
            return
        if reply.has_error():  # Flower's words, of a site that went or an upload that was cut: asked again
            self._asked[name].ids.remove(number)
            return
        found[name] = opened(reply.content)
        del self._asked[name]

    def _objects(self, object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
        """The parts of a reply, in place of Flower's own, which waits three minutes when their site has gone.

        Whoever else is sending then is asked again.
        """

        def one(i: str) -> bytes:
            try:
                return pull_object_fn(i)
            except flwr.ObjectUnavailableError:
                self._look()
                for name, asked in self._asked.items():
                    if asked.ids and self._online.get(name) != (asked.node, asked.activated):
                        raise flwr.ObjectPullError(i, f"{name} has gone") from None
                raise

        return flwr.pull_objects(object_ids, one)

    def _safely(self, do: Callable[[], None]) -> None:
        """Whatever happens to Flower, begin anew; what was asked is asked again."""
        said = ""
        for _ in range(2):  # it also closes a connection now and then that was idle
            try:
                do()
                return
            except Faults as e:
                said = " ".join(str(e).split())[:100] or type(e).__name__
        if self._link is not None and self._link.alive:
            self.say(f"lost touch with Flower's SuperLink ({said})")
        while True:
            time.sleep(1)
            stop.waiting()
            with suppress(*Faults):
                self._connect()
                return

    def close(self) -> None:
        self._drop()
        if self._link is not None:
            self._link.stop()
            self._link = None
            for name in ("superlink.secret", STATE):
                (self.folder / name).unlink(missing_ok=True)


def _as_flower(public: str) -> bytes:
    return flwr.public_key_to_bytes(flwr.load_ssh_public_key(public.encode()))  # pyright: ignore[reportArgumentType]


def answers(address: str) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(split(address), timeout=1).close()
        return True
    except OSError:
        return False
