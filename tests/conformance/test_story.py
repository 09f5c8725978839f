"""Any story of a federation ends in the bits of one in which only the sites that were missed were missed.

Replies are lost, come twice, or come when nobody waits any more; the server is killed and goes back to one of its last
two checkpoints; a newcomer is admitted. Every site is made anew from its files for every message, as if it had been
killed."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from atsites import at_sites, balanced, same
from direct import Direct
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from instances import METHODS, federation, loop, steps

from polyfed.base.errors import ConfigError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.core.engine import Answers
from polyfed.core.rounds import Loop
from polyfed.core.rows import MemoryRows
from polyfed.core.schedule import Uniform
from polyfed.engines.local import LocalEngine, make_plan
from polyfed_members.apart import Apart, newcomer
from polyfed_testing.stage import BATCH, NAMES, copied

FATES = ("lost", "twice", "absent", "late")
GONE = ("absent", "late")  # whose reply a round does without


class Weather(Direct):
    """Carries messages, to each site in its own way for a round."""

    def __init__(self, *given):
        super().__init__(*given)
        self.fate: dict[str, str] = {}
        self.stale: dict[str, bytes] = {}  # replies that come at last, to whoever waits for another one
        self.under_way: dict[str, bytes] = {}

    def pull(self, names, enough=None, seconds=None):
        found: dict[str, bytes | str] = {}
        for name in names:
            if name in self.stale:
                found[name] = self.stale.pop(name)
            elif self.fate.get(name) in GONE:
                if self.fate[name] == "late":
                    self.under_way[name] = self.answer(name, self._asked[name])
                found[name] = "no answer"
            elif self.fate.get(name) == "lost":
                self.answer(name, self._asked[name])
                del self.fate[name]
                found[name] = "no answer"
            elif self.fate.get(name) == "twice":
                self.stale[name] = self.answer(name, self._asked[name])
                del self.fate[name]
        return found | super().pull([name for name in names if name not in found])

    def clear(self) -> None:
        self.stale |= self.under_way
        self.under_way, self.fate = {}, {}


class Missing(LocalEngine):
    """One machine on which some clients do not answer."""

    def __init__(self, of: Loop):
        vars(self).update(vars(of.engine))
        self.gone: set[int] = set()
        of.engine = self

    def wait(self, ids, first=False):
        return Answers(
            np.array([i for i in ids if i not in self.gone]), {i: "no answer" for i in ids if i in self.gone}
        )


class Story(RuleBasedStateMachine):
    """`here` is one machine, `there` has every client at a site."""

    @initialize(name=st.sampled_from([*METHODS]), part=st.sampled_from([0.5, 1.0]))
    def begin(self, name, part):
        self.method, self.schedule, self.files = METHODS[name], Uniform(part), TemporaryDirectory()
        self.anew()
        self.kept = [self.states()]

    def anew(self):
        self.here = loop(self.method, schedule=self.schedule, chunk=1)
        Missing(self.here)
        self.there = at_sites(self.method, Path(self.files.name), self.schedule, Weather, quorum=1)

    def states(self):
        return [(copied(tensors), meta) for tensors, meta in (self.here.state(), self.there.state())]

    @rule(fates=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(FATES), max_size=4))
    def train(self, fates):
        most = 0 if self.method.needs.everyone else 2  # somebody of three answers
        gone = [name for name in fates if fates[name] in GONE][:most]
        carried = self.there.engine.transport
        twice = [name for name in fates if fates[name] == "lost" and name in carried.stale]  # nobody is asked thrice
        fates = {n: fate for n, fate in fates.items() if n in gone or not (fate in GONE or n in twice)}
        self.here.engine.gone = {NAMES.index(name) for name in gone}
        carried.fate = dict(fates)
        assert np.array_equal(self.here.step(), self.there.step())
        assert self.here.missing.keys() == self.there.missing.keys() <= set(gone)
        carried.clear()

    @rule()
    def save(self):
        self.kept = [*self.kept[-1:], self.states()]
        self.there.engine.saved()

    @rule(back=st.sampled_from([1, 2]))
    def kill_the_server(self, back):
        self.kept = self.kept[: max(1, len(self.kept) - back + 1)]
        self.anew()
        for one, (tensors, meta) in zip((self.here, self.there), self.kept[-1], strict=True):
            one.restore(copied(tensors), meta)

    @rule()
    def admit(self):
        """Its model is of the same bits at either, and nobody who was there before notices."""
        assert torch.equal(*(model_of_a_newcomer(one) for one in (self.here, self.there)))

    @invariant()
    def the_same_bits(self):
        if hasattr(self, "there"):
            same(self.here, self.there)

    def teardown(self):
        if hasattr(self, "there"):
            balanced(self.there)
            self.files.cleanup()


def model_of_a_newcomer(one: Loop) -> torch.Tensor:
    """After one exchange; the common start where the method admits nobody."""
    try:
        new = newcomer(one.algorithm, one.task, one.server, one.samples)
    except ConfigError:
        return one.task.w0
    data = federation().train.select(np.array([0]))
    rows = MemoryRows(1, new.enter(-1, float(data.counts[0])))
    work = Work(epochs=1, steps=steps(one.algorithm), batch_size=BATCH)
    plan = make_plan(one.task, 1, BATCH, chunk=1, workers=1)
    engine = LocalEngine(one.task, {"train": data}, rows, client_keys(("new",)), work, 3, plan)
    alone = Loop(one.task, data.counts, ("new",), Apart(one.algorithm, [new]), Uniform(), engine, 3)
    alone.step()
    return alone.personal(np.array([0]))


TestStory = Story.TestCase
TestStory.settings = settings(
    phases=[Phase.generate],    max_examples=25, stateful_step_count=8, deadline=None, derandomize=True,
    suppress_health_check=[*HealthCheck],
)  # fmt: skip
