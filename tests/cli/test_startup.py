"""What commands load: only what they use, since a library that takes a second to load is waited for every time."""

import subprocess
import sys

from polyfed.cli import command_line

SAY = """
import sys
from polyfed.cli import call
for unused, command in zip(sys.argv[1::2], sys.argv[2::2]):
    status = call(command.split())
    print("loaded:", status, *(name for name in unused.split(",") if name in sys.modules))
"""
HEAVY = "numpy,torch,pandas,scipy,matplotlib,pydantic"
NAMES = [*(n for n, c in command_line().commands.items() if not hasattr(c, "commands")), "data inspect", "keys add"]
COMMANDS = {  # one after another in one process: a later one may load more
    "--help": HEAVY,
    **{f"{name} {word}": HEAVY for name in NAMES for word in ("--help", "--mistyped")},
    "algorithms": "torch._dynamo,sympy,pandas,sklearn,matplotlib",
    "run --algorithm local --rounds 1 --seeds 1 --metrics accuracy --quiet": "torch._dynamo,sympy,sklearn,scipy.stats",
    "run --algorithm fedacs --data digits --clients 4 --rounds 1 --seeds 1 --quiet": (
        "torch._dynamo,sympy,sklearn.ensemble,matplotlib.pyplot"
    ),
}


def test_a_command_loads_what_it_uses(tmp_path):
    words = [word for command, unused in COMMANDS.items() for word in (unused, command)]
    done = subprocess.run([sys.executable, "-c", SAY, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = [line for line in done.stdout.splitlines() if line.startswith("loaded:")]
    assert dict(zip(COMMANDS, loaded, strict=True)) == {c: f"loaded: {2 if 'mistyped' in c else 0}" for c in COMMANDS}


def test_the_heap_is_not_gone_through_again_at_the_end():
    """What packages loaded is set aside: at the end Python would go through all of it, for a second with torch."""
    say = "import atexit, gc; atexit.register(lambda: print(len(gc.get_objects()) < 1000 < gc.get_freeze_count()))\n"
    code = f"{say}from polyfed.cli import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["True"]
