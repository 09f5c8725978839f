"""Every method with its clients at sites of their own: the same bits as on one machine, whatever gets lost."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from atsites import at_sites, balanced, private, same
from instances import METHODS, loop

from polyfed.algorithms.pacfl import PACFL
from polyfed.core.engine import Answers
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Schedule, Uniform
from polyfed.engines.local import LocalEngine
from polyfed_sites.vault import Vault
from polyfed_testing.stage import NAMES

N, ROUNDS = len(NAMES), 3
PLAIN = {name: m for name, m in METHODS.items() if "(" not in name}  # test_story.py draws variants too
each_method = pytest.mark.parametrize("method", PLAIN.values(), ids=PLAIN.keys())


@each_method
def test_sites_compute_the_same_bits_as_one_machine(method, tmp_path):
    """Server state, private tensors and metrics; and the ledger has the bytes that were carried."""
    here, there = loop(method, schedule=Uniform(), chunk=1), at_sites(method, tmp_path, Uniform())
    for _ in range(ROUNDS):
        assert np.array_equal(here.step(), there.step())
    same(here, there)
    assert tuple(there.engine.transport.moved) == there.ledger.totals() == here.ledger.totals()
    mine, yours = here.scored("train"), there.scored("train")
    assert np.array_equal(mine["accuracy"], yours["accuracy"])
    assert np.allclose(mine["loss"], yours["loss"], rtol=0, atol=1e-6)


class Absent(LocalEngine):
    """Somebody does not answer one exchange of one round."""

    def __init__(self, the_loop: Loop, who: int, t: int, phase: int):
        vars(self).update(vars(the_loop.engine))
        self.loop, self.who, self.at, self.phase, self.missed = the_loop, who, (t, phase), 0, False
        the_loop.engine = self

    def send(self, down, round):
        self.phase = round.phase

    def wait(self, ids, first=False):
        if (self.loop.t, self.phase) != self.at or self.who not in ids:
            return Answers(ids, {})
        self.missed = True
        return Answers(ids[ids != self.who], {self.who: "no answer"})


@dataclass(frozen=True)
class Without(Schedule):
    """Everybody, but in one round without one client."""

    who: int | None = None
    at: int = 0

    def cohort(self, seed, t, keys):
        ids = np.arange(len(keys))
        return ids[ids != self.who] if t == self.at else ids


@each_method
def test_a_round_that_somebody_misses_is_one_of_those_who_are_left(method):
    """In any exchange of the round: what it would have been had they never been asked; none of it is kept otherwise."""
    if getattr(method, "pool", "") == "participants":
        pytest.skip("its messages are mixed from the models of all that are asked")
    if method.needs.everyone:
        pytest.skip("it needs everyone: a server of sites takes no quorum for it, and waits")
    for phase in range(method.needs.phases(1)):
        found = loop(method, schedule=Without(), dtype=torch.float64)
        engine = Absent(found, 2, 1, phase)
        expected = loop(method, schedule=Without(2, 1), dtype=torch.float64)
        expected.step(), found.step()
        found.step()
        if not engine.missed:  # nobody was asked in that exchange
            continue
        assert found.missing == {NAMES[2]: "no answer"}
        expected.step(), expected.step(), found.step()
        assert found.missing == {}
        for name, t in expected.server.items():
            assert torch.allclose(found.server[name].double(), t.double(), rtol=0, atol=1e-12), (phase, name)
        for mine, yours in zip(private(expected), private(found), strict=True):
            assert all(torch.allclose(mine[k].double(), yours[k].double(), rtol=0, atol=1e-12) for k in mine)
        balanced(found)


def test_who_does_not_answer_the_first_question_is_asked_when_it_takes_part():
    """A method that asks everyone before the first round goes on without client 2, who sends its signature later."""
    found = loop(PACFL(everyone_first=True), schedule=Without(2, 0))
    Absent(found, 2, 0, 0)
    found.step()
    assert found.missing == {NAMES[2]: "no answer"}
    assert (found.server["known"] > 0).tolist() == [i != 2 for i in range(len(NAMES))]
    assert not found.server["signature"][2].any()
    found.step()
    assert (found.server["known"] > 0).all()
    assert found.server["signature"][2].any()


def test_a_run_without_checkpoints_keeps_no_old_versions(tmp_path):
    """Nothing can go back behind the last round then; with checkpoints, the last two are what may be gone back to."""
    there = at_sites(METHODS["scaffold"], tmp_path / "a", Uniform())
    there.engine.durable = False
    for _ in range(6):
        there.step()
    assert Vault(tmp_path / "a" / "oslo", "run", "oslo").versions() == [(4, 0), (5, 0)]
    there = at_sites(METHODS["scaffold"], tmp_path / "b", Uniform())
    for t in range(6):
        there.step()
        if t in (1, 3):
            there.state()
            there.engine.saved()
    assert Vault(tmp_path / "b" / "oslo", "run", "oslo").versions() == [(t, 0) for t in range(1, 6)]
