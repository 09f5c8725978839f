"""One of Flower's processes, a SuperLink or a SuperNode, as `polyfed server` and `polyfed client` start it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from polyfed.sites.keys import write

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class Child:
    """One of Flower's processes. Its output goes to a file in `folder`, where its other files are too.

    key: of a site, which it is given through a pipe, so that no copy of it is on the disk
    """

    def __init__(self, kind: str, arguments: Sequence[str], folder: Path, secret: bytes, key: bytes = b""):
        self.log = folder / f"{kind}.log"
        write(folder / f"{kind}.secret", secret)
        command = [sys.executable, "-m", "polyfed.sites.flower_child", kind, str(os.getpid())]
        command += [str(folder / f"{kind}.secret"), *arguments]
        inside, outside = os.pipe()
        try:
            os.write(outside, key)
            os.close(outside)
            with self.log.open("ab") as out:
                self.process = subprocess.Popen(
                    command + (["--auth-supernode-private-key", f"/dev/fd/{inside}"] if key else []),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=os.environ | QUIET | {"FLWR_HOME": str(folder / "home")},
                    start_new_session=True,  # Ctrl-C is for its parent
                    pass_fds=(inside,) if key else (),
                )
        finally:
            os.close(inside)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, at_once: bool = False) -> None:
        """End it, in order or at once."""
        (self.process.kill if at_once else self.process.terminate)()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
