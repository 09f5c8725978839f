"""Locks on files, which one process holds at a time and which end with it."""

import errno
import fcntl
import os
from pathlib import Path

NONE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of a file system without locks


def lock(handle: int, wait: bool = True) -> bool:
    """Lock an open file; False where its file system has no locks. Raises BlockingIOError where it is not to wait."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as e:
        if e.errno not in NONE:
            raise
        return False
    return True


def alone(path: Path, unlocked: bool = False) -> int:
    """A handle on a file that no other process has before it is closed; unlocked: or where there are no locks."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock(handle) and not unlocked:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path))
    except OSError:
        os.close(handle)
        raise
    return handle
