"""Tasks side by side, each in a process of its own: for many runs that are each too small for two threads.

A task is forked, so that data are shared and nothing is sent to it; what it returns comes back as JSON. A Ctrl-C
reaches the tasks once, through this process, so that each can finish its round and save.
"""

import ctypes
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
    tasks: Sequence[Callable[[], Any]], most: int, begin: Callable[[int], None] | None = None
) -> Iterator[tuple[int, Any]]:
    """Run the tasks in order, a limited number at a time; yields (which, what it returned) as they end.

    begin: called with the number of a task before it starts

    Raises what a task raised, after the others were stopped. After Ctrl-C no further task is started, those that run
    are signalled once, what they return is still yielded, and KeyboardInterrupt is raised at the end.
    """
    waiting, running = list(enumerate(tasks)), dict[Connection, tuple[int, BaseProcess]]()
    failed: BaseException | None = None
    try:
        while running or (waiting and failed is None):
            try:
                while waiting and failed is None and len(running) < most:
                    which, task = waiting.pop(0)
                    if begin is not None:
                        begin(which)
                    channel, process = _started(task)
                    running[channel] = which, process
                for channel in wait(list(running)):
                    assert isinstance(channel, Connection)
                    which, process = running.pop(channel)
                    value, error = _ended(channel, process)
                    if error is None:
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
        for _, process in running.values():
            process.join()
    if failed is not None:
        raise failed


def say_stopping() -> None:
    """Tell whoever pressed Ctrl-C what happens now, once for all tasks."""
    if not _inside and sys.stderr.isatty():
        sys.stderr.write("\nfinishing this round, then saving; Ctrl-C again stops at once\n")


def _started(task: Callable[[], Any]) -> tuple[Connection, BaseProcess]:
    mine, its = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(task, its))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the task can answer it
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    its.close()
    return mine, process


def _run(task: Callable[[], Any], channel: Connection) -> None:
    """In the process of the task."""
    global _inside
    _inside = True
    try:
        os.setpgid(0, 0)  # the terminal's Ctrl-C goes to the parent alone, which passes it on
        signal.signal(signal.SIGUSR1, _orphaned)
        ctypes.CDLL(None).prctl(PARENT_ENDED, signal.SIGUSR1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        torch.set_num_threads(1)  # the threads of the parent's operations do not exist here
        told: dict[str, Any] = {"value": task()}
    except KeyboardInterrupt:
        told = {"interrupted": True}
    except errors.PolyfedError as e:
        told = {"error": type(e).__name__, "text": str(e)}
    except BaseException:
        told = {"error": "", "text": traceback.format_exc()}
    channel.send_bytes(json.dumps(told).encode())


def _orphaned(number: int, frame: Any) -> None:
    """As one Ctrl-C: a parent is said to have ended once for each of its threads, and a second Ctrl-C stops at once."""
    signal.signal(number, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


def _ended(channel: Connection, process: BaseProcess) -> tuple[Any, BaseException | None]:
    """(what a task returned, what it raised)."""
    try:
        told = json.loads(channel.recv_bytes())
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"code {code}"
        return None, errors.RunError(f"a worker process was killed ({how}); the machine may be out of memory")
    finally:
        channel.close()
    process.join()
    if "error" in told:
        kind = getattr(errors, told["error"], None)
        return None, kind(told["text"]) if kind else RuntimeError(f"in a worker process:\n{told['text']}")
    return (None, KeyboardInterrupt()) if "interrupted" in told else (told["value"], None)


def _stop(running: dict[Connection, tuple[int, BaseProcess]]) -> None:
    """As Ctrl-C in each."""
    for _, process in running.values():
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGINT)
