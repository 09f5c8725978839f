"""What systems differ in stands in one file, text files are the same on all, and so is what names files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyfed
from polyfed.base import system
from polyfed.runs.folder import distinct, safe

SOURCE = Path(polyfed.__file__).parent.parent
ONE = re.compile(  # what one kind of system alone has, or does otherwise
    r"fcntl|import (resource|pwd|grp|termios|pty|msvcrt|winreg)|prctl|pthread_sigmask|/proc/|AF_UNIX"
    r"|SIG(USR|ALRM|HUP|KILL|BREAK)|os\.kill\([^,]*, 0\)|os\.(exec|replace|rename|fork|pread|pwrite|get[egu]+id|setsid)"
    r"|os\.(setpgid|chown|fchmod|mkfifo|O_CLOEXEC|sched_)"
)
TEXT = re.compile(r"write_text\(|open\((\w+, )?\"[wax]t?\"|open\(newline|read_text\(\)")  # unless it says which text
DEVICES = ["con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))]


def test_one_file_knows_what_systems_differ_in_and_text_is_utf_8_with_the_same_line_ends():
    for path in SOURCE.rglob("*.py"):
        for k, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            assert path == Path(system.__file__) or not ONE.search(line), f"{path}:{k}: {line}"
            whole = "encoding=" in line and ("newline=" in line or '"r"' in line)
            assert whole or not TEXT.search(line), f"{path}:{k}: {line}"


NAMES = st.text(max_size=40) | st.sampled_from(
    [
        *DEVICES,
        "nul.txt",
        "COM¹",
        "a:b",
        "a/b",
        "a\\b",
        "a.",
        "a ",
        "..",
        "",
        "common",
        "Common",
        "North",
        "north",
        "-",
        "x" * 300,
    ]
)


def windows_has(file: str) -> bool:
    """Whether NTFS takes a name and Win32 leaves it as it is."""
    plain = file.split(".")[0].rstrip().lower()
    return plain not in DEVICES and not re.search(r'[<>:"/\\|?*\x00-\x1f]|[. ]$', file) and 0 < len(file) < 128


@settings(max_examples=40, deadline=None)
@given(st.lists(NAMES, unique=True, max_size=6))
def test_distinct_names_make_distinct_files_on_every_system(names):
    files = [f"{file}.safetensors" for file in distinct(names)]
    assert len({file.lower() for file in files} | {"common.safetensors"}) == len(names) + 1
    assert all(map(windows_has, files)), files
    for name in names:
        assert safe(name) == name or not re.fullmatch("[a-z0-9_-]{1,99}", name) or name in (*DEVICES, "common")
        assert windows_has(safe(name))


def test_a_lock_ends_with_its_process(tmp_path):
    """However it ends; until then whoever does not want to wait is told."""
    path = tmp_path / "lock"
    code = "import sys; from pathlib import Path; from polyfed.base import system; system.alone(Path(sys.argv[1]))"
    wait = f"{code}; print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", wait, path], stdin=-1, stdout=-1) as holder:
        assert holder.stdout.readline() == b"held\n"
        handle = system.opened(path)
        with pytest.raises(BlockingIOError):
            system.lock(handle, wait=False)
        assert system.alive(holder.pid)
        holder.kill()
        holder.wait()
    assert system.lock(handle)
    assert not system.alive(holder.pid)
    assert not system.alive("no number")


def test_a_program_starts_again_with_variables_as_on_windows_too():
    """There in a process of its own, whose status is handed on."""
    code = """if True:
        import os, sys
        from types import SimpleNamespace
        from polyfed.base import system
        if "ANEW" in os.environ:
            sys.exit(int(os.environ["ANEW"]))
        windows = SimpleNamespace(platform="win32", executable=sys.executable, orig_argv=sys.orig_argv, exit=sys.exit)
        system.sys = windows if sys.argv[1:] else sys
        system.again(ANEW="41")"""
    for words in ([], ["windows"]):
        assert subprocess.run([sys.executable, "-c", code, *words], timeout=60).returncode == 41


def test_where_nothing_tells_of_memory_and_processes_runs_go_on(monkeypatch):
    """As under a Linux without its module resource, which psutil wants."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert (system.memory(), system.used(), system.alive(1)) == (sys.maxsize, 0, True)
