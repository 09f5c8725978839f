"""The ClientApp: what Flower hands it goes to the node's site as it is, and the site's answer back."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from polyfed.base.errors import PolyfedError
from polyfed_flower.node import SIMULATED, ask, ask_own, node_of, written
from polyfed_sites.audit import heading

Data = Callable[[Context], Any]


def client(data: Data | None = None) -> ClientApp:
    """A ClientApp. data: a function of a node's rows, as `written` takes them; None: they are in a file"""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        return Message(answered(message, context, data), reply_to=message)

    for kind in (app.train(), app.evaluate(), app.query()):
        kind(answer)
    return app


def answered(message: Message, context: Context, data: Data | None = None) -> RecordDict:
    """The answer of a node's site; "error" in its place, in one line, where there is none."""
    try:
        run, asked = unpacked(message)
        head, reply = _ask(context, data, {"run": run} if run else {}, asked)
    except (PolyfedError, OSError, ValueError, EOFError, KeyError) as e:
        line = str(e) if isinstance(e, PolyfedError) else f"its site does not answer ({type(e).__name__}: {e})"
        head, reply = {"error": line, "simulated": context.node_config.keys() == SIMULATED}, b""
    return packed(head, reply)


def packed(head: dict[str, Any], data: bytes = b"") -> RecordDict:
    """A message as Flower carries it: bytes that it cuts to pieces and does not read, and what it may show."""
    records = RecordDict({"polyfed": ConfigRecord({key: str(value) for key, value in head.items() if value})})
    if data:
        records["message"] = ArrayRecord({"bytes": Array("uint8", (len(data),), "bytes", data)})
        if metrics := measured(data):
            records["metrics"] = MetricRecord({**metrics})
    return records


def unpacked(message: Message) -> tuple[str, bytes]:
    """The name of the run, "" for a question who the node is, and the bytes."""
    content: Any = message.content
    data = content["message"]["bytes"].data if "message" in content else b""
    return str(content["polyfed"].get("run", "")), data


def measured(data: bytes) -> dict[str, Any]:
    """The numbers of an answer that Flower's own tools may show: metrics, or steps and seconds of training."""
    kind = heading(data).split(" ")[0]
    if kind not in ("measured", "trained"):
        return {}
    says = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["head"])
    return says["metrics"] or {} if kind == "measured" else {key: says[key] for key in ("steps", "seconds")}


def _ask(context: Context, data: Data | None, head: dict[str, Any], asked: bytes) -> tuple[dict[str, Any], bytes]:
    config = context.node_config
    if config.keys() == SIMULATED:
        return _ask_here(context, data, head, asked)
    if "site" in config:
        return ask(Path(str(config["site"])), head, asked)
    given = None if data is None else data(context)
    return ask_own(node_of(config, given), head, asked)


def _ask_here(context: Context, data: Data | None, head: dict[str, Any], asked: bytes) -> tuple[dict[str, Any], bytes]:
    """In a simulation, whose processes stay."""
    config, k = context.run_config, int(context.node_config["partition-id"])
    folder, vaults, given = Path(str(config["data"])), Path(str(config["out"])) / "vaults", data and data(context)
    file = None if given is None else written(given, vaults / f"site-{k}")
    there = import_module("polyfed_flower.process").simulated(k, folder, vaults, file)
    if there is None:  # a node that is not needed
        return {}, b""
    return ({}, there.answer(head["run"], asked)) if head else (there.who(), b"")
