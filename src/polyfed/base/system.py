"""What operating systems differ in: locks on files, what is on the disk, processes and their signals, memory.

Nothing else of polyfed names what one system alone has; packages that only this file needs are imported when it does.
"""

import contextlib
import ctypes
import errno
import gc
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from polyfed.base.errors import RunError

FORKS = sys.platform == "linux"  # elsewhere a process that has used torch cannot be forked safely
MOVES_OPEN = sys.platform != "win32"  # renames and removes files that are open, and their folders
SCANNED = 2.0  # seconds that Windows may keep a new file open, for its virus scanner
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of a file system without
DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.I | re.S)  # no file on Windows
PARENT_ENDED = 1  # PR_SET_PDEATHSIG of prctl
_shares = 1  # processes that share the cores, this one among them


# files


def opened(path: Path, mode: int = 0o600) -> int:
    """A handle for reading and writing bytes of a file, which is made if it is not there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), mode)


def lock(handle: int, wait: bool = True) -> bool:
    """Lock an open file for this process, with which the lock ends; False where its file system has no locks.

    Raises BlockingIOError where it is not to wait. On Windows nobody else can read the file's first byte from then on.
    """
    from filelock import lock_descriptor

    try:
        if not lock_descriptor(handle, blocking=wait, poll_interval=0.01):
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise
        return False
    return True


def alone(path: Path, unlocked: bool = False) -> int:
    """A handle on a file that no other process has before it is closed; unlocked: or where there are no locks."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = opened(path)
    try:
        if not lock(handle) and not unlocked:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path))
    except OSError:
        os.close(handle)
        raise
    return handle


def flush(*paths: Path) -> None:
    """Have files, or the names in folders, on the disk before this returns; Windows does the latter by itself."""

    def one(path: Path) -> None:
        windows = sys.platform == "win32"
        if not (windows and path.is_dir()):
            handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    if len(paths) == 1:
        one(*paths)
        return
    with ThreadPoolExecutor(16) as pool:  # at the same time many take as long as one; threads begin as they are needed
        list(pool.map(one, paths))


def move(path: Path, other: Path) -> None:
    """As os.replace, which on Windows has to wait until its virus scanner has read the file."""
    until = time.monotonic() + SCANNED
    while True:
        try:
            return os.replace(path, other)
        except PermissionError:
            if MOVES_OPEN or time.monotonic() > until:
                raise
            time.sleep(0.05)


def files(most: int) -> int:
    """How many files this process may have open from now on: `most`, where its user may."""
    with contextlib.suppress(ImportError):  # on Windows, which does not count them
        import resource

        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, allowed))
    return most


def unix_socket() -> socket.socket:
    """A socket with a path for a name. Raises RunError where Python has none."""
    if not hasattr(socket, "AF_UNIX"):
        raise RunError("this Python has no Unix sockets, as on Windows; expected Linux, macOS or WSL")
    return socket.socket(socket.AF_UNIX)


# the machine


def cores() -> int:
    """Processor cores that this process may use, its share of them where it is one of several."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, found // _shares)


def memory() -> int:
    """Bytes of main memory that are free for use, without end where nothing tells."""
    with contextlib.suppress(ImportError):  # psutil, where a module of its system is missing
        import psutil

        return psutil.virtual_memory().available
    return sys.maxsize


def used() -> int:
    """Bytes of main memory that this process takes, 0 where nothing tells."""
    with contextlib.suppress(ImportError):
        import psutil

        return psutil.Process().memory_info().rss
    return 0


# processes


def alive(pid: str | int) -> bool:
    """True where a process of this machine may still be at work."""
    try:
        import psutil

        return psutil.pid_exists(int(pid))
    except ImportError:  # nothing tells
        return True
    except (OverflowError, ValueError):
        return False


def again(**variables: str) -> NoReturn:
    """Start this program again with variables of the environment; on Windows in a process of its own."""
    command, around = [sys.executable, *sys.orig_argv[1:]], os.environ | variables
    if sys.platform != "win32":
        os.execve(sys.executable, command, around)
    import subprocess

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both
    sys.exit(subprocess.call(command, env=around))


@contextlib.contextmanager
def deferred() -> Generator[None]:
    """Ctrl-C comes after what is inside; a process that is forked there has it come where it calls `child`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def child(of: int) -> None:
    """In a forked process, one of `of`: Ctrl-C goes to its parent alone, and that its parent ends is as Ctrl-C."""
    global _shares
    _shares = of
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, _orphaned)
    ctypes.CDLL(None).prctl(PARENT_ENDED, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _orphaned(number: int, frame: Any) -> None:
    """As one Ctrl-C: a parent is said to have ended once for each of its threads, and a second Ctrl-C stops at once."""
    signal.signal(number, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Make many objects that stay: no garbage is collected in the body, where every pass would look at all of them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
