"""The engine for clients that are elsewhere: it turns exchanges into messages and replies into uplinks.

It knows of each client only its name, its number of samples, and which of its private states counts.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import RunError
from polyfed.base.randomness import client_keys
from polyfed.base.settings import is_mapping
from polyfed.compute.batches import Work
from polyfed.compute.optimizers import StepSizes
from polyfed.core.algorithm import Algorithm, Down, Round, State
from polyfed.core.engine import Answers, Silent
from polyfed.core.messages import Form, form_of
from polyfed.core.uplinks import Tally
from polyfed.core.worker import Plan, Reply, chunks, expand
from polyfed.sites.message import Message, fits, pack, unpack
from polyfed.sites.vault import START

METRICS = 100  # that a site may say
LARGE = 1 << 53  # from which a whole number that a site says is no count of anything


class Transport(Protocol):
    """Carries messages to sites, by name.

    most: bytes of tensors that are accepted in a reply
    """

    most: int

    def sites(self) -> Sequence[str]:
        """Names of the sites that are connected now."""
        ...

    def push(self, messages: Mapping[str, Message]) -> None:
        """Send; an earlier message to the same site that has not been answered is then of no use."""
        ...

    def pull(
        self, names: Sequence[str], enough: int | None = None, seconds: float | None = None
    ) -> dict[str, Message | str]:
        """Replies (or the reason why there is none) of these sites as they come.

        Returns when `enough` (default: all) of `names` have answered or failed, or when `seconds` are over; whoever has
        done neither is not in the result and may be pulled later.
        """
        ...

    def close(self) -> None: ...


class Direct:
    """Sites in this process, with which every message is exchanged as bytes: what a network would carry, without one.

    names: of the sites     answer: (a site's name, a message) -> its answer     moved: bytes of tensors so far, down
    and up
    """

    def __init__(self, names: Sequence[str], answer: Callable[[str, bytes], bytes], most: int = 1 << 24):
        self.names, self.answer, self.most, self.moved = names, answer, most, [0, 0]
        self._asked: dict[str, bytes] = {}

    def sites(self) -> Sequence[str]:
        return self.names

    def push(self, messages: Mapping[str, Message]) -> None:
        self._asked |= {name: pack(message) for name, message in messages.items()}
        self.moved[0] += sum(message.bytes for message in messages.values())

    def pull(
        self, names: Sequence[str], enough: int | None = None, seconds: float | None = None
    ) -> dict[str, Message | str]:
        some = [name for name in names if name in self._asked][:enough]
        return {name: self._answer(name, self._asked.pop(name)) for name in some}

    def _answer(self, name: str, data: bytes) -> Message | str:
        try:
            answer = unpack(self.answer(name, data), self.most, name)
        except RunError as e:
            return str(e)
        self.moved[1] += answer.bytes
        return answer

    def close(self) -> None:
        self._asked.clear()


class Asking:
    """Asks sites and collects their answers, each at most twice.

    seconds: how long all of them are waited for; after that, `say` says who is missing, and waiting goes on
    """

    def __init__(self, transport: Transport, seconds: float | None = None, say: Callable[[str], None] = lambda _: None):
        self.transport, self.seconds, self.say = transport, seconds, say

    def ask(self, messages: Mapping[str, Message]) -> None:
        self.transport.push(messages)

    def answers(
        self,
        messages: Mapping[str, Message],
        what: str,
        wrong: Callable[[str, Message], str | None],
        enough: int | None = None,
        one: bool = False,
    ) -> tuple[dict[str, Message], dict[str, str]]:
        """The answers to messages that were sent, and why others are missing.

        what: that is asked for, in words     wrong: says of an answer what is wrong with it; "" if it answers an
        earlier message     enough: how many answers will do once `seconds` are over (default: all)     one: whether the
        first answer will do
        """
        needed, found, failed = min(enough or len(messages), len(messages)), dict[str, Message](), dict[str, str]()
        waiting, again = dict(messages), dict[str, str]()
        start = time.monotonic()
        while waiting and not (one and found):
            left = None if self.seconds is None else max(0.0, start + self.seconds - time.monotonic())
            for name, reply in self.transport.pull([*waiting], 1 if one else None, left).items():
                why = reply if isinstance(reply, str) else _reason(name, reply, wrong)
                if isinstance(reply, Message) and why is None:
                    found[name] = reply
                    del waiting[name]
                elif name not in again:  # it may have been stopped, or lost on the way
                    again[name] = " ".join((why or "it answers another message").split())[:500]
                    again[name] = again[name].removeprefix(f"{name}: ")
                    self.transport.push({name: waiting[name]})
                else:
                    failed[name] = again[name]
                    del waiting[name]
            if self.seconds is None or not waiting or time.monotonic() < start + self.seconds:
                continue
            if len(found) >= needed and not one:
                failed |= {name: again.get(name, f"no answer within {self.seconds:g} s") for name in waiting}
                break
            self.say(f"{what}: waiting for {', '.join(waiting)}")
            start = time.monotonic()
        for name, why in failed.items():
            self.say(f"{what}: {name} is missing: {why}")
        if len(found) < (1 if one else needed):
            said = "; ".join(f"{name}: {why}" for name, why in failed.items())
            raise Silent(f"{what}: {len(found)} of {len(messages)} sites have answered, expected {needed} ({said})")
        return found, failed


def _reason(name: str, reply: Message, wrong: Callable[[str, Message], str | None]) -> str | None:
    """Why a message is no answer; what cannot even be checked is none."""
    if error := reply.head.get("error"):
        return str(error)
    try:
        return wrong(name, reply)
    except RunError as e:
        return str(e)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as e:
        return f"its reply is damaged ({type(e).__name__}: {e})"


def is_count(found: Any, most: int = LARGE) -> bool:
    """Whether what a site says is a whole number from 0 and below `most`."""
    return isinstance(found, int) and 0 <= found < most


class RemoteEngine:
    """Runs clients through a transport.

    Parameters
    ----------
    names : sequence of str
        The clients.
    counts : array
        [n] training samples.
    transport : Transport
        Carries messages.
    work, seed : Work, int
        Of the run; they decide in which order replies are added up.
    step_sizes : StepSizes
        Of the run.
    run : str
        What sites know the run by.
    expected : callable or None
        (round, exchange) -> the forms of what is sent up; None: all that counts is that replies are alike.
    accepts : callable or None
        A reply's tensors -> what is wrong with their numbers, see `Algorithm.accepts`.
    metrics : sequence of str
        What is asked for in an evaluation.
    seconds : float or None
        How long replies are waited for; None: for ever.
    quorum : int or None
        How many replies will do once `seconds` are over; None: all.
    durable : bool
        Whether the run has checkpoints, to which it may go back.
    say : callable
        Takes lines about sites that are missing.
    """

    here = False

    def __init__(
        self,
        names: Sequence[str],
        counts: np.ndarray,
        transport: Transport,
        work: Work,
        seed: int,
        step_sizes: StepSizes = StepSizes(),  # noqa: B008  (immutable)
        *,
        run: str = "",
        expected: Callable[[int, int], Mapping[str, Form]] | None = None,
        accepts: Callable[[State], str] | None = None,
        metrics: Sequence[str] = (),
        seconds: float | None = None,
        quorum: int | None = None,
        durable: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ):
        self.names, self.counts, self.transport = names, counts, transport
        self.work, self.seed, self.step_sizes = work, seed, step_sizes
        self.run, self.expected, self.accepts, self.metrics = run, expected, accepts, metrics
        self.quorum, self.durable = quorum, durable
        self.asking = Asking(transport, seconds, say)
        self.plan = Plan(1, len(names), "at the sites", "at the sites")
        self._parameters: dict[int, int] = {}  # numbers that describe a client's model, as of the last evaluation
        self._keys = client_keys(names)
        self._base = np.full((len(names), 2), START)  # the private state [n] that the next message builds on
        self._held = self._base.copy()  # as of the last commit
        # as of the last checkpoint but one, which is read where the last is damaged; of the last; and of its draft
        self._safe, self._last, self._saving = self._base.copy(), self._base.copy(), self._base.copy()
        self._asked: dict[str, Message] = {}  # messages under way
        self._replies: dict[int, Message] = {}
        self._used: set[int] = set()  # whose replies this round has used

    @property
    def parameters(self) -> Mapping[int, int]:
        return self._parameters

    def send(self, down: Down, round: Round) -> None:
        messages = {self.names[i]: m for i, m in self._messages(down, round).items()}
        self._asked |= messages
        self._replies = {i: reply for i, reply in self._replies.items() if self.names[i] not in messages}
        self.asking.ask(messages)

    def _messages(self, down: Down, round: Round) -> dict[int, Message]:
        head = {"do": "train", "run": self.run, "phase": round.phase, "n": round.n}
        found: dict[int, Message] = {}
        ids, sent = round.ids.cpu().numpy(), round.sent.cpu().numpy()
        for row, (i, t) in enumerate(zip(map(int, ids), map(int, sent), strict=True)):
            mine = {"t": t, "scale": self.step_sizes.at(t)} | self._state(i)
            found[i] = Message(head | mine, down.shared | {name: each[row] for name, each in down.each.items()})
        return found

    def _state(self, i: int) -> dict[str, Any]:
        keep = self._safe if self.durable else self._held
        return {"base": self._base[i].tolist(), "keep": keep[i].tolist()}

    def wait(self, ids: np.ndarray, first: bool = False) -> Answers:
        there = [int(i) for i in self._replies if i in ids]  # in the order in which they came
        if len(there) == len(ids) or (first and there):
            return Answers(np.array(there), {})
        names = [self.names[int(i)] for i in ids if i not in there]
        asked = {name: self._asked[name] for name in names}
        what = f"round {max(int(m.head['t']) for m in asked.values())}"
        found, missing = self.asking.answers(asked, what, self._wrong, self.quorum, first)
        at = {self.names[int(i)]: int(i) for i in ids}
        self._replies |= {at[name]: reply for name, reply in found.items()}
        for name in [*found, *missing]:
            del self._asked[name]
        who = [*there, *(at[name] for name in found)]
        ids, sizes = np.array(who if first else sorted(who)), {i: self._replies[i].bytes for i in who}
        return Answers(ids, {at[name]: why for name, why in missing.items()}, sizes)

    def _wrong(self, name: str, reply: Message) -> str | None:
        """What is wrong with a reply; "" if it is one to an earlier message."""
        asked, head = self._asked[name].head, reply.head
        if (head.get("t"), head.get("phase")) != (asked["t"], asked["phase"]):
            return ""
        if head.get("diverged"):
            return None
        fits(reply, self._forms(asked, reply), name)
        if not (0 <= float(head["seconds"]) < math.inf and is_count(head["steps"])):
            raise ValueError("its seconds and steps are no numbers from 0")
        return (self.accepts is not None and self.accepts(reply.tensors)) or None

    def _forms(self, asked: Mapping[str, Any], reply: Message) -> Mapping[str, Form]:
        if self.expected is not None:
            return self.expected(asked["t"], asked["phase"])
        return {name: form_of(t) for name, t in reply.tensors.items()}

    def exchange(self, algorithm: Algorithm, received: State, round: Round, tally: Tally) -> Reply:
        ids = [int(i) for i in round.ids.cpu().numpy()]
        seconds, steps = np.zeros(len(ids)), np.zeros(len(ids), dtype=np.int64)
        self._used.update(ids)
        diverged = [row for row, i in enumerate(ids) if self._replies[i].head.get("diverged")]
        if diverged:
            return Reply(seconds, steps, diverged[0])
        first = {name: form_of(t) for name, t in self._replies[ids[0]].tensors.items()}
        for row in self._order(round):
            reply, at = self._replies[ids[row]], torch.tensor([row], device=round.ids.device)
            fits(reply, first, self.names[ids[row]])
            up = {name: t.to(round.samples.device)[None] for name, t in reply.tensors.items()}
            part = tally.reduce(up, at)
            if part.bad is not None:
                return Reply(seconds, steps, row)
            tally.add(part, at)
            seconds[row], steps[row] = float(reply.head["seconds"]), int(reply.head["steps"])
            self._base[ids[row]] = int(round.sent[row]), round.phase
        return Reply(seconds, steps)

    def _order(self, round: Round) -> list[int]:
        """The rows, in the order in which one machine would run the clients one by one: sums then have its bits."""
        ids, sent = round.ids.cpu().numpy(), round.sent.cpu().numpy()
        found: list[int] = []
        for t in sorted(set(sent.tolist())):
            at = np.flatnonzero(sent == t)
            who = ids[at]
            found += [int(at[c[0]]) for c in chunks(self.work, self.counts[who], self._keys[who], self.seed, t, 1)]
        return found

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
        head = {"do": "evaluate", "run": self.run, "split": split, "round": int(self._base.max(initial=-1)) + 1}
        found = self._deployed(down, head, f"evaluation on {split}", _no_metrics)
        told: dict[int, dict[str, float]] = {}
        together: list[int] = []
        for i, name in enumerate(self.names):
            if name not in found:
                continue
            said = found[name].head
            self._parameters[i] = int(said["parameters"])
            if said["metrics"] is not None:
                told[i] = {str(key): float(value) for key, value in said["metrics"].items()}
                together += [i] * bool(said.get("aggregate"))
        values = {
            key: np.array([told.get(i, {}).get(key, math.nan) for i in range(len(self.names))])
            for key in self.metrics or dict.fromkeys(key for metrics in told.values() for key in metrics)
        }
        if together:
            for v in values.values():
                known = v[together][~np.isnan(v[together])]
                v[together] = known.mean() if len(known) > 1 else math.nan
        return values

    def end(self, down: Down) -> dict[str, str]:
        """The last message: sites make their models. Returns who has not answered, and why."""
        found = self._deployed(down, {"do": "end", "run": self.run}, "the end", _not_stored)
        return {name: "no answer" for name in self.names if name not in found}

    def _deployed(
        self, down: Down, head: dict[str, Any], what: str, wrong: Callable[[str, Message], str | None]
    ) -> dict[str, Message]:
        each = expand(down, len(self.names))
        messages = {
            name: Message(head | self._state(i), {key: t[i] for key, t in each.items()})
            for i, name in enumerate(self.names)
        }
        self.asking.ask(messages)
        found, _ = self.asking.answers(messages, what, wrong, self.quorum)
        if self._asked:  # this message has taken the place of one that is under way
            self.asking.ask(self._asked)
        return found

    def personal(self, algorithm: Algorithm, down: Down, ids: np.ndarray) -> Tensor:
        raise RunError("the models of this run are at its sites; they are exported there")

    def private(self, ids: Tensor) -> State:
        raise RunError("the private state of this run is at its sites")

    def place(self, ids: Tensor, rows: State) -> None:
        raise RunError("the private state of this run is at its sites")

    def save(self) -> State:
        self._saving = self._held.copy()
        return {"base": torch.as_tensor(self._held.copy())}

    def saved(self) -> None:
        self._safe, self._last = self._last, self._saving

    def restore(self, state: State) -> None:
        self._base = state["base"].numpy().copy()
        self._held, self._last = self._base.copy(), self._base.copy()

    def close(self) -> "RemoteEngine":
        """The transport is closed by whoever made it."""
        return self


def _no_metrics(name: str, reply: Message) -> str | None:
    """What is wrong with an answer to "evaluate"."""
    if "metrics" not in reply.head:
        return ""
    metrics: Any = reply.head["metrics"]
    right = metrics is None or (
        is_mapping(metrics)
        and len(metrics) <= METRICS
        and all(isinstance(v, float) or (isinstance(v, int) and abs(v) < LARGE) for v in metrics.values())
    )
    if not right or not is_count(reply.head.get("parameters")) or reply.tensors:
        return f"{name}: its metrics are damaged"
    return None


def _not_stored(name: str, reply: Message) -> str | None:
    """What is wrong with an answer to "end"."""
    return None if reply.head.get("stored") else ""
