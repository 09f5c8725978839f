"""What runs without POSIX; no Windows is at hand, so a process hides what it has not."""

import multiprocessing
import os
import sys
import traceback

import pytest
import windows


@pytest.mark.skipif(sys.platform != "linux", reason="hides what Linux has")
def test_fit_compare_run_and_verify_need_no_posix(tmp_path, monkeypatch):
    def elsewhere():
        with open("out", "w", encoding="cp1252") as sys.stdout, open("err", "w", encoding="cp1252") as sys.stderr:
            try:
                windows.hide()
                windows.everything()
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)

    monkeypatch.chdir(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=elsewhere)  # which has torch already
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "err").read_text("cp1252")
    said = (tmp_path / "out").read_text("cp1252")
    assert "-1 <= 2 -> †" in said
    assert "runs train one after another" in (tmp_path / "err").read_text("cp1252")
    assert "comes out again, bit for bit" in said
    assert {path.name for path in (tmp_path / "both/runs").iterdir()} == {"ditto-seed0", "local-seed0"}
