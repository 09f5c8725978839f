"""The engine for clients elsewhere: which reply counts for which message, and on which state the next one builds.

Sites answer by hand: what is asked of them, doubled, and what a test adds."""

import numpy as np
import pytest
import torch
from direct import Direct, Raw, raw

from polyfed.compute.batches import Work
from polyfed.core.algorithm import Down, Round
from polyfed.core.uplinks import Tally
from polyfed_sites.engine import RemoteEngine

NAMES = ("oslo", "bern", "riga")
SAMPLES = torch.tensor([2.0, 5.0, 3.0])  # so that replies are added up in another order than that of the clients


class Sites(Direct):
    """heads: of every message, in order     silent: who does not answer     stray: what is answered instead, once"""

    def __init__(self):
        super().__init__(NAMES, self.reply)
        self.heads, self.silent, self.stray, self.told = [], set(), [], {}

    def reply(self, name: str, data: bytes) -> bytes:
        if self.stray:
            return self.stray.pop()
        asked = raw(data)
        head = {"kind": "trained", "steps": 1, "seconds": 0.0} | {key: asked.head.get(key) for key in ("t", "phase")}
        if (told := self.told.get(name, {})).get("kind") == "diverged":
            head = {key: head[key] for key in ("t", "phase")}
        return Raw(head | told, {key: 2 * t for key, t in asked.tensors.items()}).pack()

    def push(self, messages):
        super().push(messages)
        self.heads += [message.head.model_dump() | {"to": name} for name, message in messages.items()]
        self._asked = {name: data for name, data in self._asked.items() if name not in self.silent}


def engine(sites: Sites, **settings) -> RemoteEngine:
    return RemoteEngine(NAMES, SAMPLES.long().numpy(), sites, Work(), 0, seconds=0.0, **settings)


def connected(**settings) -> tuple[Sites, RemoteEngine]:
    sites = Sites()
    return sites, engine(sites, **settings)


def round_of(t: int, ids=(0, 1, 2), phase: int = 0) -> Round:
    at = torch.tensor(ids)
    return Round(t, 3, phase, at, SAMPLES[at], torch.full_like(at, t))


def told(round: Round) -> Down:
    """Each client its own number of 10 (round + 1) + client, and a hundred for each exchange before."""
    return Down({}, {"w": (100 * round.phase + 10 * (round.t + 1) + round.ids)[:, None].double()})


def exchange(remote: RemoteEngine, round: Round, send=True):
    """What came up, by client; and what the engine says of it."""
    if send:
        remote.send(told(round), round)
    ids, missing, _ = remote.wait(round.ids.numpy())
    part = round.take(torch.from_numpy(np.flatnonzero(np.isin(round.ids, ids))))
    tally = Tally(part, {})
    reply = remote.exchange(None, {}, part, tally)
    rows = [] if reply.bad is not None else tally.uplinks()["w"][:, 0].tolist()
    return dict(zip(part.ids.tolist(), rows, strict=False)), missing, reply


def bases(sites: Sites, key: str = "base") -> dict[str, tuple]:
    """Of the last message to each site."""
    return {head["to"]: tuple(head[key]) for head in sites.heads}


def test_a_round_that_is_abandoned_after_a_reply_was_used_builds_on_the_last_that_counts():
    sites, remote = connected()
    for phase in (0, 1):
        exchange(remote, round_of(0, phase=phase))
    remote.commit()
    for drops in range(2):  # each begins again from there
        exchange(remote, round_of(1))
        exchange(remote, round_of(1, phase=1))
        assert bases(sites) == dict.fromkeys(NAMES, (1, 0)), drops
        remote.abandon()
        remote.send(told(round_of(1)), round_of(1))
        assert bases(sites) == dict.fromkeys(NAMES, (0, 1)), drops


def test_what_is_saved_in_the_middle_of_a_round_is_the_state_before_it():
    sites, remote = connected()
    exchange(remote, round_of(0))
    remote.commit()
    exchange(remote, round_of(1))
    saved = remote.save()
    assert saved["base"].tolist() == 3 * [[0, 0]]
    again = engine(sites)
    again.restore(saved)
    exchange(again, round_of(1))
    again.abandon()
    again.send(told(round_of(1)), round_of(1))
    assert bases(sites) == dict.fromkeys(NAMES, (0, 0))


def test_an_answer_to_the_exchange_before_is_none_to_this_one():
    sites, remote = connected()
    exchange(remote, round_of(0))
    head = {"kind": "trained", "t": 0, "phase": 0, "steps": 1, "seconds": 0.0}
    sites.stray = [Raw(head, {"w": torch.zeros(1).double()}).pack()]
    assert exchange(remote, round_of(0, phase=1))[0] == {0: 220, 1: 222, 2: 224}
    assert not sites.stray


def test_a_reply_that_came_early_waits_for_its_turn():
    (sites, remote), round = connected(), round_of(0)
    remote.send(told(round), round)
    assert len(remote.wait(round.ids.numpy()).ids) == 3
    assert exchange(remote, round_of(0, [2]), send=False)[0] == {2: 24}
    remote.commit()
    assert exchange(remote, round_of(0, [0, 1]), send=False)[0] == {0: 20, 1: 22}
    assert len(sites.heads) == 3


class Backwards(Sites):
    def pull(self, names, enough=None, seconds=None):
        return super().pull([*names][::-1], enough, seconds)


def test_replies_are_in_the_order_of_clients_whatever_order_they_come_in():
    sites = Backwards()
    sites.told = {name: {"steps": k + 1, "seconds": float(k)} for k, name in enumerate(NAMES)}
    remote = engine(sites, quorum=2)
    found, _, reply = exchange(remote, round_of(0))
    assert found == {0: 20, 1: 22, 2: 24}
    assert (reply.steps.tolist(), reply.seconds.tolist()) == ([1, 2, 3], [0, 1, 2])
    remote.commit()
    sites.silent = {"oslo"}
    remote.send(told(round_of(1)), round_of(1))
    assert remote.wait(np.arange(3)).ids.tolist() == [1, 2]


@pytest.mark.parametrize("who", range(3))
def test_the_client_that_diverged_is_named(who):
    """By its row of the exchange, whether it says so itself or a number of its says it."""
    for ids in ([0, 1, 2], [2, 0, 1]):
        sites = Sites()
        sites.told = {NAMES[who]: {"kind": "diverged"}}
        assert exchange(engine(sites), round_of(0, ids))[2].bad == ids.index(who)
        round, remote = round_of(0, ids), engine(Sites())
        remote.send(told(round), round)
        remote.wait(round.ids.numpy())
        tally = Tally(round, {}, forge=lambda up, _, of: {"w": up["w"].where(of.ids[:, None] != who, torch.nan)})
        assert remote.exchange(None, {}, round, tally).bad == ids.index(who)
