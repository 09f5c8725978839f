"""What runs without POSIX; no Windows is at hand, so a process hides what it has not."""

import subprocess
import sys
from pathlib import Path


def test_fit_compare_run_and_verify_need_no_posix(tmp_path):
    command = [sys.executable, Path(__file__).parents[1] / "base/windows.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"finished", "0 0"} <= {*done.stdout.splitlines()}, done.stdout
    assert {path.name for path in (tmp_path / "run/runs").iterdir()} == {"fedavg-seed0", "fedavg-seed1"}
