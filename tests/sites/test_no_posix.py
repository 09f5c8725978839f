"""A server and a site without POSIX; no Windows is at hand, so processes hide what it has not."""

import subprocess
import sys
from pathlib import Path

import demo
import pytest

ELSEWHERE = [sys.executable, Path(__file__).parents[1] / "base/windows.py"]


def test_a_site_shows_what_would_leave(tmp_path):
    pytest.importorskip("uvicorn", reason="needs the extra for sites")

    def said(*words):
        done = subprocess.run([*ELSEWHERE, *words], capture_output=True, text=True, cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    ((name, data),) = demo.hospitals(tmp_path / "hospitals", 1).items()
    said("keys", "init", f"127.0.0.1:{demo.free_port()}")
    said("keys", "add", name)
    words = ["server", Path(demo.__file__).with_name("heart.toml"), "--host", "127.0.0.1", "--sites", "1"]
    with subprocess.Popen([*ELSEWHERE, *words], stdout=-1, stderr=-1, cwd=tmp_path) as server:
        try:
            shown = said(
                "client", "--key", f"{name}.key", "--data", data, "--vault", "vault", "--allow", "pooled", "--dry-run"
            )
        finally:
            server.kill()
    assert "What leaves" in shown
