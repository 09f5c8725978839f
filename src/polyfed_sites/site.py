"""A site from the first message to the last, a state at a time: it has not joined, it has joined for the terms of a run
(`joining`), or the run has begun (`running`) and goes on until it is over. A message is read, brings the site to the
state that it is for, and is answered there; every answer leaves through the door.

Asked again, a site answers the same bits again. What goes wrong comes back as Failed: the part of the error that is for
others (see `PolyfedError.outside`); the site's screen has all of it.
"""

from typing import Any

import torch

from polyfed.base.checkpoint import reason
from polyfed.base.errors import PolyfedError, Refusal, RunError
from polyfed.base.part import Strict
from polyfed_sites import wire as m
from polyfed_sites.door import Door
from polyfed_sites.joining import Joined, Own
from polyfed_sites.running import BEGUN, Run
from polyfed_sites.wire import FIRST, Message, request

OVER = "the server has ended the run before its first round; its operator knows why"


class Site(Own):
    """One site and its data. state: None: it has not joined, or was stopped since"""

    state: Joined | Run | None = None

    def answer(self, data: bytes) -> bytes:
        """The answer to a message. An error is one too."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._answer(data).pack()
        except PolyfedError as e:
            if self.consent.dry:
                raise
            whole, outside = str(e), e.outside if isinstance(e, Refusal) else f"{e.outside}; the site's screen says why"
        except Exception as e:  # a bug; the server hears no more of it than that
            whole = f"this is a bug in polyfed: {type(e).__name__}: {reason(e)}"
            outside = f"a bug in polyfed ({type(e).__name__}); the site's screen says more"
        finally:
            torch.set_num_threads(threads)
        if whole != outside:
            self.warn(f"{self.name}: {whole}")
        self.say(outside := f"{self.name}: {outside}")
        return Message(m.Failed(error=outside[: m.LINE])).pack()

    def _answer(self, data: bytes) -> Message[Strict]:
        if self.state is None and len(data) > FIRST and (self.vault / BEGUN).is_file():
            self._running()  # a large model, for a run that began before the site was stopped
        try:
            asked: Message[Any] = request(data, self.state.most if isinstance(self.state, Run) else FIRST, "the server")
        except RunError as e:
            raise Refusal(str(e)) from None  # it is about the server's own words
        match asked.head:
            case m.Open():  # of a sum that this site has answered for, which is checked there
                return Door(self.policy, self.consent).out(asked, self.hidden.open(asked.head))
            case m.Over():
                self.ended = True
                self.say(f"{self.name}: {OVER}")
                return Door(self.policy, self.consent).out(asked, Message(m.Stored()))
            case m.Turn():
                return self._running().answer(asked)
            case m.Begin():
                self.state = run = Run.begun(self._joined(asked.head.joined), asked)
                return run.answer(asked)
            case m.Join():
                return self._joined(asked.head).answer(asked)
            case _:
                return self._joined(asked.head.joined).answer(asked)

    def _joined(self, join: m.Join) -> Joined:
        """The terms that a message is about, to which the site agrees anew where they are others."""
        joined = self.state.joined if isinstance(self.state, Run) else self.state
        if joined is None or joined.join != join:
            self.state = joined = Joined.agreed(self, join)
        return joined

    def _running(self) -> Run:
        """The run that has begun here, which may have been before the site was stopped."""
        if not isinstance(self.state, Run):
            self.state = Run.resumed(self)
        return self.state

    @property
    def finished(self) -> bool:
        """Whether the last message has been answered."""
        return self.ended or (isinstance(self.state, Run) and self.state.finished)
