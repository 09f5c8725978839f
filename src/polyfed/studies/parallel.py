"""Tasks side by side, each in a forked process that shares the data: for many runs, each too small for two threads.

Results come back as JSON. A Ctrl-C reaches the tasks once, through this process, so that each can save its round.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from polyfed.base import errors, system
from polyfed.runs.stop import say_stopping
from polyfed.runs.userfile import blamed

NO_MORE = -1  # in place of a task's number
_inside = False  # whether this process is such a task


def room(device: str = "cpu") -> int:
    """Number of tasks that may run at a time: one per core, as far as memory allows."""
    # processes cannot be forked safely with an accelerator, off the main thread or in a task
    plain = system.FORKS and device == "cpu" and not torch.cuda.is_initialized()
    if not plain or _inside or threading.current_thread() is not threading.main_thread():
        return 1
    return max(1, min(system.cores(), int(system.memory() // max(system.used(), 1))))


def side_by_side(
    tasks: Sequence[Callable[[], Any]],
    most: int,
    begin: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Run the tasks in order, at most `most` at a time; yields (number, result) as they end.

    `begin` is called with a task's number before it starts. A task's error is raised after the others were stopped.
    After Ctrl-C no task is started, those that run are signalled once, their results are still yielded, and
    KeyboardInterrupt is raised at the end.
    """
    waiting, running, idle = list(range(len(tasks))), dict[Connection, _Worker](), list[_Worker]()
    over: list[tuple[int, Any]] = []
    failed: BaseException | None = None
    gc.freeze()  # a collection in a task would write on, and so copy, all that it shares
    try:
        while over or running or (waiting and failed is None):
            try:
                while waiting and failed is None and len(running) < most:
                    which = waiting.pop(0)
                    if begin is not None:
                        begin(which)
                    worker = idle.pop() if idle else _Worker(tasks, min(most, len(tasks)))
                    worker.give(which)
                    running[worker.answers] = worker
                while over:  # once its process has the next task: what is made of it may take as long as one
                    yield over.pop(0)
                for channel in wait(list(running)) if running else ():
                    assert isinstance(channel, Connection)
                    worker = running.pop(channel)
                    value, error = worker.told()
                    if error is None:
                        idle.append(worker)
                        over.append((worker.which, value))
                    elif failed is None:
                        failed = error
                        _stop(running)
            except KeyboardInterrupt as e:
                if failed is None:
                    say_stopping()
                failed = failed or e
                _stop(running)  # a second time: at once
    finally:
        _stop(running)
        # one that runs was interrupted; but a signal that comes as it begins to wait for orders is seen after these
        for worker in (*idle, *running.values()):
            worker.dismiss()
        gc.unfreeze()
    if failed is not None:
        raise failed


class _Worker:
    """A process, and the task that it has or had last."""

    which: int

    def __init__(self, tasks: Sequence[Callable[[], Any]], of: int):
        self.answers, its_answers = multiprocessing.Pipe(duplex=False)  # two of one direction are no sockets
        its_orders, self.orders = multiprocessing.Pipe(duplex=False)
        given = tasks, of, its_answers, its_orders
        self.process: BaseProcess = multiprocessing.get_context("fork").Process(target=_run, args=given)
        with system.deferred():  # until the task can answer it
            self.process.start()
        its_answers.close()
        its_orders.close()

    def give(self, which: int) -> None:
        """The next task, or `NO_MORE`; that the process has died is seen when its answer is read."""
        self.which = which
        with contextlib.suppress(ConnectionError):
            self.orders.send_bytes(json.dumps(which).encode())

    def told(self) -> tuple[Any, BaseException | None]:
        """(what the task returned, what it raised); after the latter the process has ended."""
        try:
            told = json.loads(self.answers.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"signal {-code}" if code < 0 else f"code {code}"
            text = f"a worker process was killed ({how}); the machine may be out of memory"
            told = {"error": "RunError", "text": text}
        if "value" in told:
            return told["value"], None
        self._ended()
        if "interrupted" in told:
            return None, KeyboardInterrupt()
        kind = getattr(errors, told["error"], None)
        return None, kind(told["text"]) if kind else RuntimeError(f"in a worker process:\n{told['text']}")

    def dismiss(self) -> None:
        """There is nothing more for it."""
        self.give(NO_MORE)
        self._ended()

    def _ended(self) -> None:
        self.process.join()
        self.answers.close()
        self.orders.close()


def _run(tasks: Sequence[Callable[[], Any]], of: int, answers: Connection, orders: Connection) -> None:
    """In one of `of` processes of the tasks: those that it is given."""
    global _inside
    _inside, parent = True, multiprocessing.parent_process()
    assert parent is not None
    try:
        try:
            system.child(of)
            torch.set_num_threads(1)  # the threads of the parent's operations do not exist here
            while os.getppid() == parent.pid:  # else the pipes may still be open, in a process beside this one
                which = json.loads(orders.recv_bytes())
                if which == NO_MORE:
                    return
                answers.send_bytes(json.dumps({"value": tasks[which]()}).encode())
            return
        finally:
            signal.signal(signal.SIGINT, _nothing)  # what has ended needs no interruption, and would be halfway in this
    except KeyboardInterrupt:
        told: dict[str, Any] = {"interrupted": True}
    except BaseException as e:
        refusal = blamed(e) or (e if isinstance(e, errors.PolyfedError) else None)
        told = (
            {"error": type(refusal).__name__, "text": str(refusal)}
            if refusal
            else {"error": "", "text": traceback.format_exc()}
        )
    with contextlib.suppress(ConnectionError):  # nobody is there to be told
        answers.send_bytes(json.dumps(told).encode())


def _nothing(number: int, frame: Any) -> None:
    """As SIG_IGN, which says on the screen that a signal came just before it."""


def _stop(running: dict[Connection, _Worker]) -> None:
    """As Ctrl-C in each."""
    for worker in running.values():
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGINT)
