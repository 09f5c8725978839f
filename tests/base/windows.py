"""polyfed without what POSIX alone has, and with files as Windows has them, as far as POSIX can show that: `hide()`, or
`python windows.py COMMAND ...`. Packages of others are loaded before, as Windows has their own files for it."""

import asyncio  # noqa: F401
import builtins
import contextlib
import importlib.util
import io
import mmap
import multiprocessing.connection  # noqa: F401
import os
import re
import select
import shutil
import signal
import socket
import subprocess  # noqa: F401
import sys
from functools import partial
from pathlib import PurePath
from types import SimpleNamespace

import numpy as np
import psutil  # noqa: F401
import torch.utils.data

for module in ("filelock._descriptor", "uvicorn"):  # the first is not of every version
    if importlib.util.find_spec(module):
        importlib.import_module(module)

MODULES = "fcntl resource pwd grp termios tty pty syslog crypt nis spwd curses readline posix _posixsubprocess"
DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.I)
NAMES = {
    os: "fork forkpty posix_spawn killpg getuid geteuid getgid getegid getgroups getpgid getpgrp setpgid getsid setsid "
    "setuid setgid pread pwrite preadv pwritev chown fchown fchmod lchown mkfifo mknod sched_getaffinity "
    "sched_setaffinity statvfs fstatvfs uname sysconf confstr getloadavg nice wait wait3 wait4 waitid openpty chroot "
    "O_CLOEXEC O_NOFOLLOW O_DIRECTORY O_NONBLOCK O_SYNC O_DSYNC sendfile getrandom getpriority memfd_create "
    "register_at_fork set_blocking ttyname WNOHANG posix_fallocate posix_fadvise readv writev fdatasync sync fchdir",
    signal: "SIGUSR1 SIGUSR2 SIGHUP SIGALRM SIGKILL SIGSTOP SIGCONT SIGCHLD SIGPIPE SIGTSTP SIGQUIT pthread_sigmask "
    "pthread_kill sigwait sigpending setitimer getitimer alarm pause siginterrupt",
    select: "poll epoll",
    socket: "AF_UNIX SO_REUSEPORT",
    mmap: "MAP_PRIVATE MAP_SHARED MADV_HUGEPAGE PROT_READ",
}  # fmt: skip


def hide() -> None:
    """In this process, from now on."""
    socket.socketpair = partial(socket.socketpair, socket.AF_UNIX)  # of TCP there, by which asyncio wakes itself
    for module, names in NAMES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.modules.update(dict.fromkeys(MODULES.split()))
    shutil._use_fd_functions = False
    files()
    for name in [name for name in sys.modules if name.partition("_")[0].partition(".")[0] == "polyfed"]:
        del sys.modules[name]  # loaded once more, without
    from polyfed.base import allocator, system

    allocator.sys = system.sys = SimpleNamespace(platform="win32")
    system.FORKS = system.MOVES_OPEN = False


def files() -> None:
    """Files as Windows has them: text in cp1252 with its ends of lines, names that it cannot have or has in another
    case, and none that is moved or removed while it is open."""
    plain, text, moved = (
        os.open,
        io.open,
        {k: getattr(os, k) for k in ("mkdir", "rename", "replace", "unlink")},
    )

    scanned = set()

    def made(path):
        folder, name = os.path.split(os.path.abspath(path))
        if re.search(r'[<>:"|?*\x00-\x1f\\\\]|[. ]$', name) or DEVICE.fullmatch(name):
            raise OSError(22, "Invalid argument", str(path))
        others = os.listdir(folder) if os.path.isdir(folder) else ()
        if name not in others and name.casefold() in map(str.casefold, others):
            raise AssertionError(f"{path}: there in another case")

    def free(path):
        place = os.path.realpath(path)
        with text("/proc/self/maps") as f:
            held = {line.split(maxsplit=5)[5][:-1] for line in f if "/" in line}
        for k in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(f"/proc/self/fd/{k}"))
        if any(other == place or other.startswith(f"{place}/") for other in held):
            raise PermissionError(13, "The process cannot access the file, as it is being used", str(path))

    def opened(path, flags, *others, **named):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        if flags & os.O_CREAT:
            made(path)
        return plain(path, flags, *others, **named)

    def read(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *others, **named):
        if not isinstance(file, int) and set(mode) & set("wax"):
            made(file)
        if "b" not in mode:
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            newline = "\r\n" if newline is None and "r" not in mode else newline
        return text(file, mode, buffering, encoding, errors, newline, *others, **named)

    def mkdir(path, *others, **named):
        made(path)
        moved["mkdir"](path, *others, **named)

    def unlink(path, **named):
        free(path)
        moved["unlink"](path, **named)

    def rename(a, b, **named):
        if os.path.lexists(b):
            raise FileExistsError(17, "File exists", str(b))
        os.replace(a, b, **named)

    def replace(a, b, **named):
        made(b)
        free(a)
        free(b)
        if os.path.isdir(b):
            raise PermissionError(13, "Access is denied", str(b))
        if os.path.isfile(a) and a not in scanned:  # a virus scanner has it open
            scanned.add(a)
            raise PermissionError(13, "Access is denied", str(a))
        scanned.discard(a)
        moved["replace"](a, b, **named)

    def symlink(*_, **__):
        raise OSError(22, "A required privilege is not held by the client")

    os.open, os.mkdir, os.rename, os.replace, os.unlink, os.remove = opened, mkdir, rename, replace, unlink, unlink
    PurePath.__lt__ = lambda a, b: str(a).casefold() < str(b).casefold()
    os.symlink, os.chmod, io.open, builtins.open = symlink, lambda *_, **__: None, read, read


def everything() -> None:
    """In this folder: fit, compare, run, replace, resume and verify, with output as a pipe has it there."""
    import polyfed as pf
    from polyfed.cli import main

    def command(*words):
        try:
            main(words)
        except SystemExit as e:
            return e.code

    rng, names = np.random.default_rng(0), ["bern", "Zug", "aarau", "Ko\u0308ln"]  # the last one as macOS has it
    os.mkdir("sites")
    for name in names:
        x = rng.normal(size=(30, 4)).astype(np.float32)
        np.savez(f"sites/{name}.npz", x=x, y=(x[:, 0] > 0).astype(int))
    federation = pf.data.load("sites").partition("natural", seed=0)
    assert [*federation.names] == ["Köln", "Zug", "aarau", "bern"]
    how, methods = {"rounds": 2, "batch_size": 50, "report": False}, [pf.Ditto(0.1), pf.Local(0.1)]
    both = pf.compare(lambda seed: torch.nn.Linear(4, 2), federation, methods, seeds=1, out="both", **how)
    assert both.status == "finished"
    methods = ["--algorithm", "fedavg", "--algorithm", "local", "--model", "linear"]
    words = ["run", *methods, "--seeds", "1", "--data", "sites", "--rounds", "1", "--out", "run"]
    assert [command(*words) for _ in range(2)] == [0, 2]
    print("−1 ≤ 2 → †")
    assert command(*words, "--force") == command("resume", "run") == command("verify", "run") == 0


if __name__ == "__main__":
    hide()
    from polyfed.cli import main

    sys.exit(main())
