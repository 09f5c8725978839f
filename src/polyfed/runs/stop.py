"""Ctrl-C, and SIGTERM, by which clusters end jobs: the round in hand is finished and saved, then the command ends.

The exit status is 128 and the signal's number: 130 or 143. A second signal stops at once.
"""

import contextlib
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

STOPPED = 128 + signal.SIGINT  # exit status of a command that a signal has ended, before `status` says which
GRACE = 1.0  # seconds for which a round in hand is finished, where that means to wait for others
_answered: list[int] = []
_pending: list[float] = []  # when a signal came that a round in hand has still to obey
_events: list[threading.Event] = []  # of the outermost `interruptible`


def interruptions() -> int:
    """Number of signals that have been answered so far by finishing a round."""
    return len(_answered)


def status(since: int = 0) -> int:
    """The exit status after an interruption; of SIGTERM where one was answered beyond the first `since` signals."""
    return 128 + (signal.SIGTERM if signal.SIGTERM in _answered[since:] else signal.SIGINT)


@contextlib.contextmanager
def interruptible(terminable: bool = False) -> Generator[threading.Event]:
    """The first signal sets the event, so that the round in hand is finished; the second one interrupts at once.

    Inside another one, also in another thread, the event is that of the outer one.
    terminable: answer SIGTERM too, since there is a folder to save the state in
    """
    if _events:
        yield _events[0]
        return
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)[: 1 + terminable]}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: Any) -> None:
        event.set()
        _answered.append(number)
        _pending.append(time.monotonic())
        say_stopping()
        restore()

    for number in before:
        signal.signal(number, note)
    _events.append(event)
    try:
        yield event
    finally:
        _events.clear()
        _pending.clear()
        restore()


def waiting() -> None:
    """For whoever waits for another process: raise KeyboardInterrupt where a signal has come and the wait goes on."""
    if _pending and time.monotonic() > _pending[0] + GRACE:
        raise KeyboardInterrupt


def say_stopping() -> None:
    """Tell whoever pressed Ctrl-C what happens now, once for all processes that train side by side."""
    if multiprocessing.parent_process() is None and sys.stderr.isatty():
        sys.stderr.write("\nfinishing this round, then saving; Ctrl-C again stops at once\n")


@contextlib.contextmanager
def terminable() -> Generator[None]:
    """For a command: SIGTERM outside of a round is as Ctrl-C, so that processes side by side are stopped in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: Any) -> None:
        _answered.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
