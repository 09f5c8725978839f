"""How a server asks its sites and waits for them, whatever carries the messages. All waiting of a server is in here and
in its transport.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from polyfed.base.errors import RunError
from polyfed.base.part import Strict
from polyfed.core.engine import Silent
from polyfed.runs import stop
from polyfed_sites.wire import Failed, Message, Request, reply

ANOTHER = "it answers another message"
PAUSE = 0.2  # seconds between looks at who is connected
R = TypeVar("R", bound=Strict)
Wrong = Callable[[str, Message[R]], str]  # (a site's name, its answer) -> what is wrong with it; "": nothing


class Transport(Protocol):
    """Carries messages to sites, by name."""

    most: int  # bytes of tensors that are accepted in a reply
    run: str  # what sites know the run by

    def sites(self) -> Sequence[str]:
        """Names of the sites that are connected now."""
        ...

    def register(self) -> Mapping[str, str]:
        """The public keys, as OpenSSH writes them, that the sites which are connected sign with."""
        ...

    def push(self, messages: Mapping[str, Message[Request]]) -> None:
        """Pack and send; an earlier message to the same site that has not been answered is then of no use."""
        ...

    def pull(
        self, names: Sequence[str], enough: int | None = None, seconds: float | None = None
    ) -> dict[str, bytes | str]:
        """Replies (or why there is none) once `enough` of these sites (default: all) have answered or failed, or after
        `seconds`; who is not among them may be pulled later.
        """
        ...

    def close(self) -> None: ...


class Asking:
    """Asks sites and collects their answers, each at most twice; after `seconds`, `say` says who is missing."""

    def __init__(self, transport: Transport, seconds: float | None = None, say: Callable[[str], None] = lambda _: None):
        self.transport, self.seconds, self.say = transport, seconds, say

    def connected(self, sites: Sequence[str] | int | None) -> list[str]:
        """Who takes part, once they are there: `sites`, or that many, or whoever is connected when the first one is."""
        told = ""
        while True:
            there = [*self.transport.sites()]
            if isinstance(sites, int):
                enough, missing = len(there) >= sites, f"{sites} sites; {len(there)} connected"
            else:
                gone = [name for name in sites or () if name not in there]
                enough, missing = bool(there) and not gone, ", ".join(gone) or "sites"
            if enough:
                return there[:sites] if isinstance(sites, int) else [*(sites or there)]
            if missing != told:
                self.say(f"waiting for {missing}")
                told = missing
            stop.waiting()
            time.sleep(PAUSE)

    def ask(self, messages: Mapping[str, Message[Request]]) -> None:
        """Send, and do not wait."""
        self.transport.push(messages)

    def all(
        self, messages: Mapping[str, Message[Request]], what: str, kind: type[R], wrong: Wrong[R] = lambda *_: ""
    ) -> dict[str, Message[R]]:
        """Send, and wait for the answers of all. Raises RunError, with every site that has refused."""
        self.ask(messages)
        answers, _ = self.answers(messages, what, kind, wrong)
        return {name: answers[name] for name in messages}

    def answers(
        self,
        messages: Mapping[str, Message[Request]],
        what: str,  # that is asked for, in words
        kind: type[R],  # of the answers; another one answers an earlier message
        wrong: Wrong[R] = lambda *_: "",
        enough: int | None = None,  # answers that will do once `seconds` are over; None: all
        one: bool = False,  # the first answer will do
        take: Callable[[str, Message[R]], Message[R]] | None = None,  # what is kept of answers, which come one by one
    ) -> tuple[dict[str, Message[R]], dict[str, str]]:
        """The answers to messages that were sent, and why others are missing."""
        needed, kept, failed = min(enough or len(messages), len(messages)), dict[str, Message[R]](), dict[str, str]()
        waiting, again = dict(messages), dict[str, str]()
        start = time.monotonic()
        while waiting and not (one and kept):
            left = None if self.seconds is None else max(0.0, start + self.seconds - time.monotonic())
            for name, said in self.transport.pull([*waiting], 1 if one or take is not None else None, left).items():
                answer = self._read(name, said, kind, wrong)
                if isinstance(answer, Message):
                    kept[name] = answer if take is None else take(name, answer)
                    del waiting[name]
                elif name not in again:  # it may have been stopped, or lost on the way
                    again[name] = " ".join(answer.split())[:500].removeprefix(f"{name}: ")
                    self.ask({name: waiting[name]})
                else:
                    failed[name] = again[name]
                    del waiting[name]
            if self.seconds is None or not waiting or time.monotonic() < start + self.seconds:
                continue
            if len(kept) >= needed and not one:
                failed |= {name: again.get(name, f"no answer within {self.seconds:g} s") for name in waiting}
                break
            self.say(f"{what}: waiting for {', '.join(waiting)}")
            start = time.monotonic()
        for name, why in failed.items():
            self.say(f"{what}: {name} is missing: {why}")
        if len(kept) < (1 if one else needed):
            said = "; ".join(f"{name}: {why}" for name, why in failed.items())
            raise Silent(f"{what}: {len(kept)} of {len(messages)} sites have answered, expected {needed} ({said})")
        return kept, failed

    def _read(self, name: str, said: bytes | str, kind: type[R], wrong: Wrong[R]) -> Message[R] | str:
        """An answer that counts, or why it does not."""
        if isinstance(said, str):
            return said
        try:
            message = reply(said, self.transport.most, name)
            if isinstance(message.head, Failed):
                return message.head.error
            if not isinstance(message.head, kind):
                return ANOTHER
            answer = Message(message.head, message.tensors)
            return wrong(name, answer) or answer
        except RunError as e:
            return str(e)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as e:  # a method's own test of numbers
            return f"its reply is damaged ({type(e).__name__}: {e})"
