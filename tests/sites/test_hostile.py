"""Sites that mean harm, and those who only connect: they are named, and nobody else pays for it."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from direct import Direct, Raw, raw
from hospitals import NAMES, Between, Sites, at_sites, study

from polyfed.base.errors import DataError, Diverged, PolyfedError
from polyfed.runs import stop

QUIET = {"evaluate-every": 0}


def from_riga(sites, kind, change):
    """Riga's answers of a kind are changed."""

    def said(name, question, reply):
        return change(reply) if name == "riga" and question.head["kind"] == kind else reply

    return Between(sites, said)


def test_who_sends_numbers_that_no_other_sends_is_named_and_not_the_site_that_then_diverges(tmp_path):
    """Finite, and small enough to be added up; the next round begins with them."""
    file, _, sites = study(tmp_path, **QUIET)

    def said(name, question, reply):
        if name == "riga" and question.head.get("t") == 0:
            return reply._replace(tensors={"w": torch.full_like(reply.tensors["w"], 1e15)})
        diverged = name == "bern" and question.head.get("t") == 1
        return Raw({"kind": "diverged", "t": 1, "phase": 0}) if diverged else reply

    with pytest.raises(Diverged, match=r"round 1: client 'bern' diverged .* round 0, exchange 0: riga sent"):
        at_sites(file, sites, Between(sites, said))
    log = (sites.place / "run" / "log.txt").read_text()
    assert "round 0, exchange 0: norms of what was sent: " in log
    assert "riga 3.74e+15; median" in log


def test_a_site_that_says_it_diverged_costs_itself_the_round_where_fewer_will_do(tmp_path):
    file, _, sites = study(tmp_path, **QUIET)

    def said(name, question, reply):
        diverged = name == "riga" and question.head.get("t") == 1
        return Raw({"kind": "diverged", "t": 1, "phase": 0}) if diverged else reply

    assert at_sites(file, sites, Between(sites, said), quorum=2, wait=0.0).rounds == 3
    assert "round 1: riga is missing: diverged (NaN or infinity)" in sites.lines


def test_the_rows_of_each_site_are_shown_and_one_sites_share_may_be_bounded(tmp_path):
    file, _, sites = study(tmp_path, rounds=1)
    many = lambda reply: reply.saying(counts=reply.head["counts"] | {"train": 10**8})  # noqa: E731
    with pytest.raises(DataError, match=r"riga: says that it has 100,000,000 training rows, 100\.0%"):
        at_sites(file, sites, from_riga(sites, "join", many), most_share=0.9)
    at_sites(file, sites, most_share=0.9)
    assert "3 sites have joined: bern (17 rows), oslo (24 rows), riga (13 rows)" in sites.lines


def test_a_run_is_reported_before_its_sites_hear_that_it_is_over(tmp_path):
    """One that fails at the end leaves a finished run, whose folder is complete."""
    file, _, sites = study(tmp_path, rounds=1)
    seen = []
    fails = from_riga(sites, "end", lambda _: Raw({"kind": "failed", "error": "no"}))
    with pytest.raises(PolyfedError, match="the end: 2 of 3 sites have answered"):
        at_sites(file, sites, fails, trained=lambda _: seen.append((sites.place / "run" / "summary.json").is_file()))
    assert seen == [True]


def test_a_run_that_goes_on_with_other_sites_is_refused_by_their_names(tmp_path):
    file, data, sites = study(tmp_path, rounds=1)
    at_sites(file, sites)
    two = Sites(tmp_path, data, names=NAMES[:2])
    with pytest.raises(PolyfedError, match=r"its sites are bern, oslo, riga, found bern, oslo$"):
        at_sites(file, two, resume=True)


def test_a_signal_is_obeyed_while_others_are_waited_for(tmp_path):
    """The round in hand cannot end without them: the wait ends soon after the first signal."""
    hub_py = pytest.importorskip("polyfed_sites.hub", reason="needs the extra [sites]")
    hub = SimpleNamespace(changed=threading.Condition(), found={}, runs=[])
    there = hub_py.Channel(hub, tmp_path)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    begun = time.monotonic()
    with stop.interruptible(terminable=True) as asked, pytest.raises(KeyboardInterrupt):
        there.pull(["bern"], seconds=20)
    assert asked.is_set()
    assert time.monotonic() - begun < 5


class Silent(Direct):
    """Sites that do not answer messages of a kind; SIGTERM comes while they are waited for."""

    kind, signals = "", 0

    def signal(self) -> None:
        self.signals += 1
        if self.signals == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def sites(self):
        if self.kind == "connecting":
            self.signal()
            return []
        return super().sites()

    def pull(self, names, enough=None, seconds=None):
        if any(raw(self._asked[name]).head["kind"] == self.kind for name in names):
            self.signal()
            for _ in range(200):
                stop.waiting()
                time.sleep(0.02)
        return super().pull(names, enough, seconds)


@pytest.mark.parametrize("kind", ["connecting", "join", "pooled", "labels", "begin", "train", "evaluate", "end"])
def test_a_server_obeys_a_signal_whatever_it_waits_for(tmp_path, monkeypatch, kind):
    """And goes on from there, to the end, when it is started again."""
    file, _, sites = study(tmp_path, columns="", rounds=2, **{"class-weights": "balanced"})  # standardised by sums
    monkeypatch.setattr(stop, "GRACE", 0.1)
    silent = sites.direct(Silent)
    silent.kind = kind
    begun = time.monotonic()
    with stop.interruptible(terminable=True) as asked, pytest.raises(KeyboardInterrupt):
        at_sites(file, sites, silent)
    assert asked.is_set()
    assert time.monotonic() - begun < 5
    assert at_sites(file, sites, resume=True).status == "finished"
