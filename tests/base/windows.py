"""polyfed without what POSIX alone has, as far as POSIX can show that: `python windows.py COMMAND ...`, or several
with no word. Packages of others are loaded before, as Windows has their own files for it."""

import asyncio  # noqa: F401
import importlib.util
import mmap
import multiprocessing.connection  # noqa: F401
import os
import shutil
import signal
import socket
import subprocess  # noqa: F401
import sys
from types import SimpleNamespace

import filelock._descriptor  # noqa: F401
import psutil  # noqa: F401
import torch.utils.data

if importlib.util.find_spec("uvicorn"):
    import uvicorn  # noqa: F401

MODULES = "fcntl resource pwd grp termios tty pty syslog crypt nis spwd curses readline posix _posixsubprocess"
NAMES = {
    os: "fork forkpty posix_spawn killpg getuid geteuid getgid getegid getgroups getpgid getpgrp setpgid getsid setsid "
    "setuid setgid pread pwrite preadv pwritev chown fchown fchmod lchown mkfifo mknod sched_getaffinity "
    "sched_setaffinity statvfs fstatvfs uname sysconf confstr getloadavg nice wait wait3 wait4 waitid openpty chroot "
    "O_CLOEXEC O_NOFOLLOW O_DIRECTORY O_NONBLOCK O_SYNC O_DSYNC sendfile getrandom getpriority memfd_create",
    signal: "SIGUSR1 SIGUSR2 SIGHUP SIGALRM SIGKILL SIGSTOP SIGCONT SIGCHLD SIGPIPE SIGTSTP SIGQUIT pthread_sigmask "
    "pthread_kill sigwait sigpending setitimer getitimer alarm pause siginterrupt",
    socket: "SO_REUSEPORT",
    mmap: "MAP_PRIVATE MAP_SHARED MADV_HUGEPAGE PROT_READ",
}  # fmt: skip


def hide() -> None:
    """In this process, from now on."""
    for module, names in NAMES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.modules.update(dict.fromkeys(MODULES.split()))
    shutil._use_fd_functions = False
    plain = os.open

    def opened(path, flags, *others, **named):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, flags, *others, **named)

    os.open = opened
    from polyfed.base import allocator, system

    allocator.sys = system.sys = SimpleNamespace(platform="win32")
    system.FORKS = False


def everything() -> None:
    """In this folder: fit, compare, run and verify."""
    import polyfed as pf
    from polyfed.cli import call

    federation = pf.data.load("digits").partition(pf.data.IID(), clients=3, seed=0)
    model, how, methods = torch.nn.Linear(64, 10), {"rounds": 2, "batch_size": 50}, [pf.Ditto(0.1), pf.Local(0.1)]
    print(pf.fit(model, federation, pf.Ditto(0.1), out="fit", **how).status)
    print(pf.compare(lambda seed: model, federation, methods, seeds=2, out="both", report=False, **how).status)
    words = "--algorithm fedavg --data digits --clients 3 --rounds 1 --seeds 2 --model linear --quiet --out run"
    print(call(["run", *words.split()]), call(["verify", "run/runs/fedavg-seed1"]))


if __name__ == "__main__":
    hide()
    if sys.argv[1:]:
        from polyfed.cli import main

        sys.exit(main())
    everything()
