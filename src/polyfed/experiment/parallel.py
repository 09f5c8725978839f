"""Tasks side by side, each in a process of its own: for many runs that are each too small for two threads.

A task's process is forked, so that data are shared and nothing but its number is sent to it; what it returns comes back
as JSON. A Ctrl-C reaches the tasks once, through this process, so that each can finish its round and save.
"""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from polyfed.core import errors
from polyfed.engines.local import cores, memory

PARENT_ENDED = 1  # PR_SET_PDEATHSIG of prctl
NO_MORE = -1  # in place of a task's number
_orders: dict[Connection, Connection] = {}  # where a task's answers come from -> where its process is told the next
_inside = False  # whether this process is such a task


def room(device: str = "cpu") -> int:
    """How many tasks may run at a time: one per core, as far as memory allows.

    One where processes cannot be forked safely: not on Linux, on an accelerator, off the main thread, in a task.
    """
    plain = sys.platform == "linux" and device == "cpu" and not torch.cuda.is_initialized()
    if not plain or _inside or threading.current_thread() is not threading.main_thread():
        return 1
    used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(1, min(cores(), int(memory() // max(used, 1))))


def side_by_side(
    tasks: Sequence[Callable[[], Any]],
    most: int,
    begin: Callable[[int], None] | None = None,
    needs: Callable[[int], Any] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Run the tasks in order, a limited number at a time; yields (which, what it returned) as they end.

    begin: called with the number of a task before it starts
    needs: of `begin`'s making, what the task of that number uses; a process that has it takes the next task as well

    Raises what a task raised, after the others were stopped. After Ctrl-C no further task is started, those that run
    are signalled once, what they return is still yielded, and KeyboardInterrupt is raised at the end.
    """
    waiting, running = list(range(len(tasks))), dict[Connection, tuple[int, BaseProcess]]()
    idle: dict[Connection, tuple[int, BaseProcess]] = {}  # by what they did last
    failed: BaseException | None = None
    gc.freeze()  # a collection in a task would write on, and so copy, all that it shares
    try:
        while running or (waiting and failed is None):
            try:
                while waiting and failed is None and len(running) < most:
                    which = waiting.pop(0)
                    if begin is not None:
                        begin(which)
                    for channel, (last, _) in list(idle.items()):
                        if needs is None or needs(last) != needs(which):
                            _dismiss(channel, *idle.pop(channel))
                    if idle:
                        channel, (_, process) = idle.popitem()
                        _say(channel, which)
                    else:
                        channel, process = _started(tasks, which)
                    running[channel] = which, process
                for channel in wait(list(running)):
                    assert isinstance(channel, Connection)
                    which, process = running.pop(channel)
                    value, error = _told(channel, process)
                    if error is None:
                        idle[channel] = which, process
                        yield which, value
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
        for channel, (which, process) in idle.items():
            _dismiss(channel, which, process)
        for _, process in running.values():
            process.join()
        gc.unfreeze()
    if failed is not None:
        raise failed


def say_stopping() -> None:
    """Tell whoever pressed Ctrl-C what happens now, once for all tasks."""
    if not _inside and sys.stderr.isatty():
        sys.stderr.write("\nfinishing this round, then saving; Ctrl-C again stops at once\n")


def _started(tasks: Sequence[Callable[[], Any]], which: int) -> tuple[Connection, BaseProcess]:
    mine, its = multiprocessing.Pipe(duplex=False)  # two of one direction are no sockets
    its_orders, orders = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(tasks, which, its, its_orders))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the task can answer it
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    its.close()
    its_orders.close()
    _orders[mine] = orders
    return mine, process


def _run(tasks: Sequence[Callable[[], Any]], which: int, channel: Connection, orders: Connection) -> None:
    """In the process of the tasks: the first, and then those that it is given."""
    global _inside
    _inside = True
    try:
        os.setpgid(0, 0)  # the terminal's Ctrl-C goes to the parent alone, which passes it on
        signal.signal(signal.SIGUSR1, _orphaned)
        ctypes.CDLL(None).prctl(PARENT_ENDED, signal.SIGUSR1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        torch.set_num_threads(1)  # the threads of the parent's operations do not exist here
        while which != NO_MORE:
            channel.send_bytes(json.dumps({"value": tasks[which]()}).encode())
            which = json.loads(orders.recv_bytes())
        return
    except KeyboardInterrupt:
        told: dict[str, Any] = {"interrupted": True}
    except errors.PolyfedError as e:
        told = {"error": type(e).__name__, "text": str(e)}
    except BaseException:
        told = {"error": "", "text": traceback.format_exc()}
    channel.send_bytes(json.dumps(told).encode())


def _orphaned(number: int, frame: Any) -> None:
    """As one Ctrl-C: a parent is said to have ended once for each of its threads, and a second Ctrl-C stops at once."""
    signal.signal(number, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


def _told(channel: Connection, process: BaseProcess) -> tuple[Any, BaseException | None]:
    """(what a task returned, what it raised); after the latter its process has ended."""
    try:
        told = json.loads(channel.recv_bytes())
    except (EOFError, ConnectionError):
        process.join()
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"code {code}"
        told = {"error": "RunError", "text": f"a worker process was killed ({how}); the machine may be out of memory"}
    if "value" in told:
        return told["value"], None
    _close(channel)
    process.join()
    if "interrupted" in told:
        return None, KeyboardInterrupt()
    kind = getattr(errors, told["error"], None)
    return None, kind(told["text"]) if kind else RuntimeError(f"in a worker process:\n{told['text']}")


def _say(channel: Connection, which: int) -> None:
    """The next task's number, or that there is none; that a process has died is seen when its answer is read."""
    with contextlib.suppress(ConnectionError):
        _orders[channel].send_bytes(json.dumps(which).encode())


def _dismiss(channel: Connection, _: int, process: BaseProcess) -> None:
    _say(channel, NO_MORE)
    process.join()
    _close(channel)


def _close(channel: Connection) -> None:
    channel.close()
    _orders.pop(channel).close()


def _stop(running: dict[Connection, tuple[int, BaseProcess]]) -> None:
    """As Ctrl-C in each."""
    for _, process in running.values():
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGINT)
