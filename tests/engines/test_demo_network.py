"""The demonstration of README, with two hospitals: every process, key and command of a real federation."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polyfed.experiment.build import Parts
from polyfed.experiment.config import resolve
from polyfed.experiment.fit import fit

pytest.importorskip("flwr", reason="needs the extra [flower]")
NETWORK = Path(__file__).parents[2] / "examples" / "network"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder that it leaves, and what it said."""
    out = tmp_path_factory.mktemp("demo")
    text = re.sub(r"(?m)^(rounds|evaluate-every) = \d+", r"\1 = 2", (NETWORK / "heart.toml").read_text())
    (out / "short.toml").write_text(text)
    command = [sys.executable, str(NETWORK / "demo.py"), "--out", str(out / "demo"), "--sites", "2"]
    done = subprocess.run(
        [*command, "--experiment", str(out / "short.toml")], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "demo", done.stdout + done.stderr, out / "short.toml"


def test_the_sites_have_the_models_that_one_machine_would_have_made_for_them(demo, tmp_path):
    folder, _, file = demo
    (tmp_path / "data").mkdir()
    for path in (folder / "hospitals").glob("*.csv"):
        shutil.copy(path, tmp_path / "data")
    found = resolve(file, {"data": {"name": str(tmp_path / "data")}})
    parts, training = Parts(found), Parts(found).training(0)
    here = fit(parts.model(0), parts.federation(0), found.methods[0].algorithm, replace(training, chunk=1, workers=1))
    for i, name in enumerate(here.loop.names):
        mine = load_file(folder / name / "model.safetensors")
        for key, t in here.loop.task.layout.named(here.personal[i]).items():
            assert torch.equal(t, mine[key]), f"{name} {key}"


def test_the_server_reports_and_has_neither_samples_nor_private_state(demo):
    folder, said, _ = demo
    assert (folder / "run" / "report.html").is_file()
    assert re.search(r"cleveland +200", said)
    names = {path.name for path in (folder / "run").rglob("*")}
    assert not any("rows" in name for name in names)
    cells = (folder / "hospitals" / "cleveland.csv").read_text().splitlines()[1]
    for path in (folder / "run").rglob("*"):
        if path.is_file():
            assert cells.encode() not in path.read_bytes()
            assert b"cleveland.csv" not in path.read_bytes()


def test_flower_leaves_no_key_and_nothing_runs_any_more(demo):
    folder, _, _ = demo
    for path in folder.rglob("*"):
        assert path.name not in ("node.key", "supernode.secret", "superlink.secret"), path
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(folder) not in running
