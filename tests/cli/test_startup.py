"""What commands load: only what they use, since a library that takes a second to load is waited for every time."""

import subprocess
import sys

import pytest

SAY = """
import sys
from polyfed.cli import call
status = call(sys.argv[2:])
print("loaded:", *(name for name in sys.argv[1].split(",") if name in sys.modules))
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("unused", "command"),
    [
        ("torch,pandas,scipy,matplotlib", "keys --help"),
        ("torch._dynamo,sympy,pandas,sklearn,matplotlib", "algorithms"),
        (
            "torch._dynamo,sympy,sklearn.ensemble,matplotlib.pyplot",
            "run --algorithm fedacs --data digits --clients 4 --rounds 1 --seeds 1 --quiet",
        ),
    ],
    ids=lambda text: text.split()[0],
)
def test_a_command_loads_what_it_uses(tmp_path, unused, command):
    done = subprocess.run(
        [sys.executable, "-c", SAY, unused, *command.split()], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
