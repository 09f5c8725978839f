"""Small experiments for the command line."""

import pytest

SMALL = """
rounds = 4
local-steps = 2
batch-size = 8
evaluate-every = 2
[data]
name = "heart-disease"
[model]
name = "linear"
"""

# A method that presses Ctrl-C in its second round, the first time it gets there.
STOPPER = '''
import signal
from dataclasses import dataclass
from pathlib import Path

from polyfed import Personal, local_sgd


@dataclass(frozen=True)
class Stopper(Personal):
    """Local training that interrupts itself once."""

    lr: float = 0.1
    marker: str = "stopped"

    def local_update(self, task, client, down, data, round):
        return {"w": local_sgd(task, client["w"], data, self.lr)}, {"w": client["w"]}

    def aggregate(self, server, up, round):
        if round.t == 1 and round.n > 2 and not Path(self.marker).exists():  # not in the rehearsal
            Path(self.marker).touch()
            signal.raise_signal(signal.SIGINT)
        return {"w": up["w"].mean(0)}
'''


@pytest.fixture
def small(tmp_path):
    """A short experiment file without methods."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def stopper(tmp_path):
    """The file of a method that interrupts itself."""
    path = tmp_path / "stopper.py"
    path.write_text(STOPPER)
    return path
