"""The demonstration of README, with two hospitals: every process, key and command of a real federation."""

import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import demo as demo_py
import pytest
import torch
from safetensors.torch import load_file

from polyfed.runs.build import Parts
from polyfed.runs.config import resolve
from polyfed.runs.trainer import fit

pytest.importorskip("uvicorn", reason="needs the extra [sites]")
NETWORK = Path(__file__).parents[2] / "examples" / "network"


def short(path: Path, rounds: int) -> Path:
    """The demonstration's experiment, with fewer rounds."""
    text = re.sub(r"(?m)^(rounds|evaluate-every) = \d+", rf"\1 = {rounds}", (NETWORK / "heart.toml").read_text())
    path.write_text(text)
    return path


def compare(folder: Path, file: Path, data: Path) -> None:
    """Every site's model is the one that one machine with all files would have made for it, to the bit."""
    data.mkdir()
    for path in (folder / "hospitals").glob("*.csv"):
        shutil.copy(path, data)
    found = resolve(file, {"data": {"name": str(data)}})
    parts, training = Parts(found), Parts(found).training(0)
    here = fit(parts.model(0), parts.federation(0), found.methods[0].algorithm, replace(training, chunk=1, workers=1))
    for i, name in enumerate(here.trained.names):
        mine = load_file(folder / name / "model.safetensors")
        for key, t in here.trained.task.layout.named(here.personal[i]).items():
            assert torch.equal(t, mine[key]), f"{name} {key}"


def test_the_demonstration_ends_in_the_models_of_one_machine_and_leaves_nothing_at_the_server(tmp_path, cli):
    """Neither samples nor private state, no process, no key; files are for their user alone, whatever the umask."""
    folder, file = tmp_path / "demo", short(tmp_path / "short.toml", 2)
    words = ("--out", folder, "--sites", "2", "--experiment", file)
    command = [sys.executable, *map(str, (NETWORK / "demo.py", *words))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    compare(folder, file, tmp_path / "data")
    assert (folder / "run" / "report.html").is_file()
    assert re.search(r"cleveland +200", done.stdout + done.stderr)
    cells = (folder / "hospitals" / "cleveland.csv").read_text().splitlines()[1]
    for path in (folder / "run").rglob("*"):
        assert path.name == "ledger.rows" or "rows" not in path.name  # of the ledger: bytes and seconds
        assert not path.is_file() or not any(word in path.read_bytes() for word in (cells.encode(), b"cleveland.csv"))
    for place, event in ((folder / "run", "2 sites have joined"), (folder / "cleveland", "the run is over")):
        said = cli("status", place)
        assert (said.status, "not running" in said.out, event in said.out) == (0, True, True)
    for path in folder.rglob("*"):
        assert path.name not in ("flower", "state.json"), path
        if path.is_file() and path.suffix not in (".key", ".pem"):
            assert b"PRIVATE KEY" not in path.read_bytes(), path
    assert str(folder) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    places = [folder / name for name in ("keys", "run", "cleveland", "hungarian")]
    every = [p for place in places for p in (place, *place.rglob("*"))]
    every += (folder / "hospitals").glob("*.key")
    assert len(every) > 25
    assert [str(p) for p in every if p.stat().st_mode & 0o077] == []
    assert {p.stat().st_mode & 0o777 for p in every if p.is_file()} == {0o600}


POLYFED = [sys.executable, "-c", "from polyfed.cli import main; main()"]


@pytest.mark.long
def test_three_runs_at_once_survive_a_kill_of_their_server(tmp_path):
    """kill -9 amid runs of two, three and four sites, which wait for it: the models are those of one machine."""
    folder, keys = tmp_path / "several", ["--keys", str(tmp_path / "several" / "keys")]
    files = demo_py.hospitals(folder / "hospitals")
    names, sites, experiments = [*files], [], folder / "experiments"
    experiments.mkdir()
    who = {"two": names[:2], "three": names[1:], "four": names}
    for run, method in zip(who, ("ditto", "scaffold", "fedavg"), strict=True):
        text = short(folder / "short.toml", 8).read_text().partition("[algorithm]")[0]
        (experiments / f"{run}.toml").write_text(f'{text}[algorithm]\nname = "{method}"\nlr = 0.1\n')
    subprocess.run([*POLYFED, "keys", "init", f"127.0.0.1:{demo_py.free_port()}", *keys], check=True)
    command = [*POLYFED, "server", *map(str, experiments.iterdir()), *keys, "--out", str(folder / "runs")]
    command += ["--host", "127.0.0.1", *(word for run in who for word in ("--sites", f"{run}={','.join(who[run])}"))]
    for name, path in files.items():
        subprocess.run([*POLYFED, "keys", "add", name, *keys, "--out", str(folder)], check=True)
        site = ["client", "--key", str(folder / f"{name}.key"), "--data", str(path), "--vault", str(folder / name)]
        sites.append(subprocess.Popen([*POLYFED, *site, "--stay", "--allow", "pooled", "--yes", "policy"]))
    try:
        first = subprocess.Popen(command)
        while not all([*folder.glob(f"{names[1]}/{run}-*/00000001-*.safetensors")] for run in who):
            assert first.poll() is None
            time.sleep(0.05)
        first.kill()
        first.wait()
        assert not any((folder / "runs" / run / "summary.json").exists() for run in who), "all are under way"
        assert subprocess.run([*command, "--resume"]).returncode == 0
        assert subprocess.run([*command, "--resume"]).returncode == 0, "all are over"
    finally:
        for p in sites:
            p.terminate()
        assert [p.wait(30) for p in sites] == [143] * 4
    every = [p for place in ("keys", "runs", *names) for p in (folder / place).rglob("*")]
    assert [str(p) for p in every if p.stat().st_mode & 0o077] == []
    for run, there in who.items():
        (one := tmp_path / run / "hospitals").mkdir(parents=True)
        for name in there:
            shutil.copy(files[name], one)
            shutil.copytree(next((folder / name).glob(f"{run}-*")), tmp_path / run / name)
        compare(tmp_path / run, experiments / f"{run}.toml", tmp_path / run / "data")
