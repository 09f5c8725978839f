"""What runs without POSIX; no Windows is at hand, so a process hides what it has not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import windows


@pytest.mark.skipif(sys.platform != "linux", reason="hides what Linux has")
def test_fit_compare_run_and_verify_need_no_posix(tmp_path):
    way = os.pathsep.join([str(Path(windows.__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", "import windows; windows.hide(); windows.everything()"],
        cwd=tmp_path, capture_output=True, encoding="cp1252",
        env=os.environ | {"PYTHONPATH": way, "PYTHONIOENCODING": "cp1252"},
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, done.stderr
    assert "-1 <= 2 -> †" in said
    assert "runs train one after another" in done.stderr
    assert "comes out again, bit for bit" in said
    assert {path.name for path in (tmp_path / "both/runs").iterdir()} == {"ditto-seed0", "local-seed0"}
