"""The status page: every run at a server's port, its sites, what has left them, and who is waited for."""

import time
from html import escape
from typing import Any

from polyfed.report.page import answer, page
from polyfed.report.table import Cell, Table
from polyfed.report.words import duration, size
from polyfed_sites import wire as m
from polyfed_sites.hub import Channel, Hub

COLUMNS = "site<", "waited for", "left the site", "answers", "last answer<", "connection<"
LEFT = "Answers and bytes are of this run, with what was asked again; the audit log has each of them."


def status_page(hub: Hub) -> str:
    """All of it as HTML."""
    going = [run for run in hub.runs if not run.over]
    waiting = f", {len(hub.queued)} waiting for their turn" if hub.queued else ""
    heading = f"{len(going)} going, {len(hub.runs) - len(going)} over{waiting}; {time.strftime('%Y-%m-%d %H:%M:%S')}"
    sections = [(run.folder.name, _run(hub, run)) for run in (*going, *(run for run in hub.runs if run.over))]
    queued = "".join(f"<li>{name}</li>" for name in map(escape, hub.queued))
    sections += [("Waiting for their turn", f"<ul>{queued}</ul>" if queued else "")]
    there = ", ".join(sorted(hub.online)) or "nobody"
    missing = ", ".join(sorted({name for name, _ in hub.keys.accepted().values()} - {*hub.online}))
    top = answer(f"Connected: {there}{f'. Not connected: {missing}' if missing else ''}.")
    return page(f"Runs at {hub.keys.address}", heading, top, sections, "polyfed server")


def _run(hub: Hub, run: Channel) -> str:
    asked = {site: of for (name, site), of in hub.asked.items() if name == run.run}
    rows = tuple(_site(hub, run, name, asked.get(name)) for name in sorted({*run.left, *asked}))
    table = Table(run.folder.name, COLUMNS, rows, (LEFT,)).to("html") if rows else ""
    waits = f"; waiting for {', '.join(sorted(asked))}" if asked else ""
    below = f'<p class="rest">{escape(run.said)}</p>' if run.said else ""
    return answer(run.over or f"{doing(run.head, run.rounds)}{waits}", below) + table


def _site(hub: Hub, run: Channel, name: str, asked: Any) -> tuple[Cell, ...]:
    left: Any = run.left.get(name)
    there = hub.online.get(name)
    waits = duration(time.time() - asked.since) if asked else "–"
    answers, sent, kind = left or (0, 0, "–")
    return tuple(
        Cell(text, mark=mark)
        for text, mark in (
            (name, ""),
            (waits, "" if asked else "quiet"),
            (size(sent), ""),
            (f"{answers:,}", ""),
            (kind, "quiet"),
            (there or "not connected", "" if there else "loss"),
        )
    )


def doing(head: Any, rounds: int) -> str:
    """What a run is at, in words, by the head of its last message. rounds: of the run; 0: not said"""
    of = f" of {rounds}" if rounds else ""
    match head:
        case m.Train():
            exchange = f", exchange {head.phase + 1}" if head.phase else ""
            return f"Round {head.t + 1}{of}{exchange}"
        case m.Evaluate():
            return f"Evaluation on {head.split} after round {head.round}{of}"
        case m.End():
            return "The end"
        case m.Join():
            return "Joining"
        case m.Audit() | m.Pooled() | m.Labels() | m.Begin() | m.Over():
            return "Before the first round"
        case _:
            return "Waiting for its sites"
