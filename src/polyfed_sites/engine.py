"""The engine for clients that are elsewhere: it turns exchanges into messages and replies into uplinks.

It knows of each client only its name, its number of samples, and which of its private states counts.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import RunError
from polyfed.base.part import Strict
from polyfed.base.randomness import client_keys
from polyfed.base.typed import norm
from polyfed.compute.batches import Work
from polyfed.compute.optimizers import Constant, StepSizes
from polyfed.core.algorithm import Algorithm, Down, Round, State
from polyfed.core.engine import Answers, Silent
from polyfed.core.messages import Form, form_of
from polyfed.core.uplinks import Part, Tally, Wanted
from polyfed.core.worker import Plan, Reply, chunks, expand
from polyfed.metrics.metric import Metric
from polyfed_sites import wire as m
from polyfed_sites.asking import ANOTHER, Asking, R, Transport, Wrong
from polyfed_sites.sums import Opener, Sum, sent_forms, unpacked
from polyfed_sites.vault import START, Version
from polyfed_sites.wire import Message, misfit

LOUD = 1000.0  # times the median norm of what sites send, above which whoever sends it is named
LARGEST = float(np.finfo(np.float32).max)  # of a score


class RemoteEngine:
    """Runs clients through a transport."""

    here = False

    def __init__(
        self,
        names: Sequence[str],
        counts: np.ndarray,  # [n] training samples
        transport: Transport,
        work: Work,  # with the seed it decides in which order replies are added up
        seed: int,
        step_sizes: StepSizes = Constant(),  # noqa: B008  (immutable)
        *,
        run: str = "",  # what sites know it by
        # the forms of what is sent up, by round and exchange; None: all that counts is that replies are alike
        expected: Callable[[int, int], Mapping[str, Form]] | None = None,
        accepts: Callable[[State], str] | None = None,  # what is wrong with a reply's numbers
        metrics: Sequence[Metric] = (),
        seconds: float | None = None,  # as for `Asking`
        quorum: int | None = None,  # replies that will do once `seconds` are over; None: all
        durable: bool = True,  # the run has checkpoints, to which it may go back
        say: Callable[[str], None] = lambda _: None,
        log: Callable[[str], None] = lambda _: None,  # takes lines about every exchange
        sums: Callable[[int, int], Wanted] | None = None,  # under [privacy], by exchange, what replies are sums of
        opener: Opener | None = None,  # of secure sums, of which replies are a part then
    ):
        self.sums, self.opener = sums, opener
        self._sum: Sum | None = None  # the secure one that is under way
        self.names, self.counts, self.transport = names, counts, transport
        self.work, self.seed, self.step_sizes = work, seed, step_sizes
        self.run, self.expected, self.accepts, self.metrics = run, expected, accepts, metrics
        self.quorum, self.durable, self.say, self.log = quorum, durable, say, log
        self._loud = ""  # who has sent much larger numbers than the others in the last exchange
        self.asking = Asking(transport, seconds, say)
        self.plan = Plan(1, len(names), "at the sites", "at the sites")
        self._parameters: dict[int, int] = {}  # numbers that describe a client's model, as of the last evaluation
        self._keys = client_keys(names)
        self._base = np.full((len(names), 2), START)  # the private state [n] that the next message builds on
        self._held = self._base.copy()  # as of the last commit
        # as of the last checkpoint but one, which is read where the last is damaged; of the last; and of its draft
        self._safe, self._last, self._saving = self._base.copy(), self._base.copy(), self._base.copy()
        self._best: np.ndarray | None = None  # of the round that is kept
        self._asked: dict[str, Message[m.Train]] = {}  # messages under way
        self._replies: dict[int, Message[Any]] = {}
        self._used: set[int] = set()  # whose replies this round has used

    @property
    def parameters(self) -> Mapping[int, int]:
        return self._parameters

    def send(self, down: Down, round: Round) -> None:
        messages = {self.names[i]: message for i, message in self._messages(down, round).items()}
        if self.opener is not None:
            self._sum = self.opener.begin(messages, sum(f.most for f in self._forms(round.t, round.phase).values()))
        self._asked |= messages
        self._replies = {i: reply for i, reply in self._replies.items() if self.names[i] not in messages}
        self.asking.ask(messages)

    def _messages(self, down: Down, round: Round) -> dict[int, Message[m.Train]]:
        messages: dict[int, Message[m.Train]] = {}
        ids, sent = round.ids.cpu().numpy(), round.sent.cpu().numpy()
        cohort = [] if self.sums is None else sorted(self.names[int(i)] for i in ids)
        for row, (i, t) in enumerate(zip(map(int, ids), map(int, sent), strict=True)):
            base, keep = self._state(i)
            head = m.Train(
                run=self.run, base=base, keep=keep, t=t, phase=round.phase, n=round.n, scale=self.step_sizes.at(t),
                cohort=cohort,
            )  # fmt: skip
            messages[i] = Message(head, down.shared | {name: each[row] for name, each in down.each.items()})
        return messages

    def _state(self, i: int) -> tuple[Version, Version]:
        """The state of a client that the next message builds on, and the oldest that may still be asked for."""
        keep = self._safe if self.durable else self._older(self._held)
        return _version(self._base[i]), _version(keep[i])

    def _older(self, states: np.ndarray) -> np.ndarray:
        """[n, 2]: of each client the older of this state and of the one that is kept."""
        if self._best is None:
            return states.copy()
        return np.array([min(pair) for pair in zip(states.tolist(), self._best.tolist(), strict=True)])

    def wait(self, ids: np.ndarray, first: bool = False) -> Answers:
        there = [int(i) for i in self._replies if i in ids]  # in the order in which they came
        if len(there) == len(ids) or (first and there):
            return Answers(np.array(there), {})
        names = [self.names[int(i)] for i in ids if i not in there]
        asked = {name: self._asked[name] for name in names}
        what = f"round {max(message.head.t for message in asked.values())}"
        if self._sum is None:
            answers, missing = self.asking.answers(asked, what, m.Exchanged, self._wrong, self.quorum, first)
        else:
            wrong, take = self._sum.wrong, self._sum.take
            answers, missing = self.asking.answers(asked, what, Strict, wrong, self.quorum, take=take)
        at = {self.names[int(i)]: int(i) for i in ids}
        self._replies |= {at[name]: reply for name, reply in answers.items()}
        for name in [*answers, *missing]:
            del self._asked[name]
        who = [*there, *(at[name] for name in answers)]
        ids, sizes = np.array(who if first else sorted(who)), {i: self._replies[i].bytes for i in who}
        return Answers(ids, {at[name]: why for name, why in missing.items()}, sizes)

    def _wrong(self, name: str, reply: Message[m.Exchanged]) -> str:
        asked, head = self._asked[name].head, reply.head
        if (head.t, head.phase) != (asked.t, asked.phase):
            return ANOTHER
        if isinstance(head, m.Diverged):
            return "" if self.quorum is None else "diverged (NaN or infinity)"
        forms = None if self.expected is None else self._forms(asked.t, asked.phase)
        wrong = misfit(reply.tensors, {k: form_of(t) for k, t in reply.tensors.items()} if forms is None else forms)
        return wrong or (self.accepts(reply.tensors) if self.accepts is not None and self.sums is None else "")

    def _forms(self, t: int, phase: int) -> Mapping[str, Form]:
        """Of what is sent up in an exchange."""
        assert self.expected is not None
        forms = self.expected(t, phase)
        return forms if self.sums is None else sent_forms(forms, self.sums(t, phase))

    def exchange(self, algorithm: Algorithm, received: State, round: Round, tally: Tally) -> Reply:
        ids = [int(i) for i in round.ids.cpu().numpy()]
        seconds, steps = np.zeros(len(ids)), np.zeros(len(ids), dtype=np.int64)
        self._used.update(ids)
        diverged = [row for row, i in enumerate(ids) if isinstance(self._replies[i].head, m.Diverged)]
        if diverged:
            return Reply(seconds, steps, diverged[0], self._loud)
        if self.sums is not None:
            return self._summed(round, ids, tally)
        self._weigh(round, ids)
        first = {name: form_of(t) for name, t in self._replies[ids[0]].tensors.items()}
        for row in self._order(round):
            (head, tensors), at = self._replies[ids[row]], torch.tensor([row], device=round.ids.device)
            if wrong := misfit(tensors, first):
                raise RunError(f"{self.names[ids[row]]}: {wrong}")
            part = tally.reduce({name: t.to(round.samples.device)[None] for name, t in tensors.items()}, at)
            if part.bad is not None:
                return Reply(seconds, steps, row)
            tally.add(part, at)
            assert isinstance(head, m.Trained), "none has diverged"
            seconds[row], steps[row] = head.seconds, head.steps
            self._base[ids[row]] = int(round.sent[row]), round.phase
        return Reply(seconds, steps)

    def _summed(self, round: Round, ids: Sequence[int], tally: Tally) -> Reply:
        """Replies that are integers to sum, hidden or not."""
        forms, t = self._forms(round.t, round.phase), int(round.sent[0])
        if self._sum is not None:
            there = {*self._sum.server.present}
            if there != {self.names[i] for i in ids}:
                raise Silent(f"round {round.t}: {', '.join(sorted(there))} are in the sum, and others have answered")
            parts = [unpacked(self._sum.open(f"round {round.t}"), forms)]
            self._sum = None
        else:
            parts = [self._replies[i].tensors for i in ids]
        size = sum(f.bytes for f in forms.values())
        for tensors in parts:
            sums = {(key.rpartition(".")[0], key.rpartition(".")[2]): words.clone() for key, words in tensors.items()}
            tally.add(Part({}, sums, size, None), round.ids)
        for i in ids:
            self._base[i] = t, round.phase
        counts, keys = self.counts[list(ids)], self._keys[list(ids)]
        return Reply(np.zeros(len(ids)), self.work.taken(counts, round.t, keys, self.seed))

    def _weigh(self, round: Round, ids: Sequence[int]) -> None:
        """Note the norm of each uplink beside the median, and who has sent much larger numbers than the others."""
        sent = {i: [t for t in self._replies[i].tensors.values() if t.is_floating_point()] for i in ids}
        norms = {self.names[i]: math.hypot(*(norm(t.double()) for t in of)) for i, of in sent.items() if of}
        if not norms:
            return
        middle, where = statistics.median_low(norms.values()), f"round {round.t}, exchange {round.phase}"
        each = ", ".join(f"{name} {value:.3g}" for name, value in norms.items())
        self.log(f"{where}: norms of what was sent: {each}; median {middle:.3g}")
        loud = [f"{name} sent numbers of norm {v:.3g}" for name, v in norms.items() if v > LOUD * max(middle, 1e-30)]
        self._loud = f"{where}: {', '.join(loud)}, the median being {middle:.3g}" if loud else ""
        if loud:
            self.say(self._loud)

    def _order(self, round: Round) -> list[int]:
        """The rows, in the order in which one machine would run the clients one by one: sums then have its bits."""
        ids, sent = round.ids.cpu().numpy(), round.sent.cpu().numpy()
        order: list[int] = []
        for t in sorted(set(sent.tolist())):
            at = np.flatnonzero(sent == t)
            who = ids[at]
            order += [int(at[c[0]]) for c in chunks(self.work, self.counts[who], self._keys[who], self.seed, t, 1)]
        return order

    def commit(self) -> None:
        self._held = self._base.copy()
        self._forget()

    def abandon(self) -> None:
        self._base = self._held.copy()
        self._forget()

    def _forget(self) -> None:
        """Replies that were used, or dropped; those that came early stay."""
        self._replies = {i: reply for i, reply in self._replies.items() if i not in self._used}
        self._used = set()

    def evaluate(self, algorithm: Algorithm, down: Down, split: str) -> dict[str, np.ndarray]:
        """Each client's metrics [n], as far as its site says them; NaN for a site that does not, or does not answer."""
        t = int(self._base.max(initial=-1)) + 1
        messages = self._about(down, m.Evaluate, split=split, round=t)
        if self.opener is not None:
            return self._scored(self.opener, messages, f"evaluation on {split}")
        answers = self._deployed(messages, f"evaluation on {split}", m.Measured, self._wrong_scores)
        told: dict[int, dict[str, float]] = {}
        together: list[int] = []
        for i, name in enumerate(self.names):
            if name not in answers:
                continue
            measured = answers[name].head
            self._parameters[i] = measured.parameters
            if measured.metrics is not None:
                told[i] = measured.metrics
                together += [i] * measured.aggregate
        values = {
            key: np.array([told.get(i, {}).get(key, math.nan) for i in range(len(self.names))])
            for key in [of.name for of in self.metrics]
            or dict.fromkeys(key for metrics in told.values() for key in metrics)
        }
        if together:
            for v in values.values():
                there = v[together][~np.isnan(v[together])]
                v[together] = there.mean() if len(there) > 1 else math.nan
        return values

    def _scored(self, opener: Opener, messages: Mapping[str, Message[Any]], what: str) -> dict[str, np.ndarray]:
        """The mean of each metric over the sites that have it, from a secure sum, for every site."""
        names = sorted(of.name for of in self.metrics)
        sums = opener.ask(messages, 2 * len(names), what, self.quorum)
        means = [total / there if there > 1 else math.nan for total, there in zip(sums[::2], sums[1::2], strict=True)]
        if self._asked:
            self.asking.ask(self._asked)
        return {name: np.full(len(self.names), mean) for name, mean in zip(names, means, strict=True)}

    def _wrong_scores(self, name: str, reply: Message[m.Measured]) -> str:
        if reply.tensors:
            return "found tensors beside its metrics, expected none"
        for of in self.metrics:
            value = (reply.head.metrics or {}).get(of.name)
            least, most = (-LARGEST if of.least is None else of.least), (LARGEST if of.most is None else of.most)
            if value is not None and math.isinf(value):  # without a quorum it ends the run
                return "" if self.quorum is None else "diverged (NaN or infinity)"
            if value is not None and not math.isnan(value) and not least <= value <= most:
                return f"found {of.name} {value:g}, expected a number from {least:g} to {most:g}"
        return ""

    def end(self, down: Down) -> dict[str, str]:
        """The last message: sites make their models. Returns who has not answered, and why."""
        answers = self._deployed(self._about(down, m.End), "the end", m.Stored)
        return {name: "no answer" for name in self.names if name not in answers}

    def _about(self, down: Down, head: type[m.Turn], **more: Any) -> dict[str, Message[Any]]:
        """Messages to all sites about the models that they would deploy."""
        each, messages = expand(down, len(self.names)), dict[str, Message[Any]]()
        for i, name in enumerate(self.names):
            base, keep = self._state(i)
            messages[name] = Message(
                head(run=self.run, base=base, keep=keep, **more), {k: t[i] for k, t in each.items()}
            )
        return messages

    def _deployed(
        self, messages: Mapping[str, Message[Any]], what: str, kind: type[R], wrong: Wrong[R] = lambda *_: ""
    ) -> dict[str, Message[R]]:
        self.asking.ask(messages)
        answers, _ = self.asking.answers(messages, what, kind, wrong, self.quorum)
        if self._asked:  # this message has taken the place of one that is under way
            self.asking.ask(self._asked)
        return answers

    def personal(self, algorithm: Algorithm, down: Down, ids: np.ndarray) -> Tensor:
        raise RunError("the models of this run are at its sites; they are exported there")

    def private(self, ids: Tensor) -> State:
        raise RunError("the private state of this run is at its sites")

    def place(self, ids: Tensor, rows: State) -> None:
        raise RunError("the private state of this run is at its sites")

    def save(self) -> State:
        self._saving = self._older(self._held)
        return {"base": torch.as_tensor(self._held.copy())}

    def keep(self, kept: State | None = None) -> State:
        kept = {"base": torch.as_tensor(self._held.copy())} if kept is None else kept
        self._best = kept["base"].numpy()
        self._last = self._older(self._last)
        return kept

    def saved(self) -> None:
        self._safe, self._last = self._last, self._saving

    def restore(self, state: State) -> None:
        self._base = state["base"].numpy().copy()
        self._held, self._last = self._base.copy(), self._base.copy()

    def close(self) -> "RemoteEngine":
        """The transport is closed by whoever made it."""
        return self


def _version(pair: np.ndarray) -> Version:
    t, phase = pair.tolist()
    return t, phase
