"""polyfed verify, and --portable: the same bits whatever instructions the machine would choose."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import polyfed as pf
from polyfed import native
from polyfed.runs import folder as folder_module

pytestmark = pytest.mark.usefixtures("undrawn")

COMMAND = (sys.executable, "-c", "from polyfed.cli import main; main()")
AVX2 = "AVX2" in torch.backends.cpu.get_cpu_capability() or "AVX512" in torch.backends.cpu.get_cpu_capability()


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".polyfed"}


def run_of(cli, small, *more):
    assert cli("run", small, "--algorithm", "ditto", "--out", "a", "-q", *more).status == 0
    return small.parent / "a"


def spoil(folder, by, at=-1):
    """Another loss in the records. Returns the record"""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[at]["loss"] *= 1 + by
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines[at]


def test_a_run_comes_out_again_and_what_differs_is_said_part_by_part(cli, small):
    folder = run_of(cli, small)
    before = contents(folder)
    said = cli("verify", "a")
    assert (said.status, said.err) == (0, "")
    assert " ".join(said.out.split()) == "a: comes out again, bit for bit server equal models equal history equal"
    assert contents(folder) == before
    rounds = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    changed = spoil(folder, 1e-6, rounds.index(2))
    said = cli("verify", "a")
    assert said.status == 1
    assert f"history  differs from round 2 on ({changed['split']} loss by 1.0e-06, relative)" in said.out
    assert said.out.count("equal") == 2
    path = folder / "models/va.safetensors"
    save_file({k: t * (1 + 1e-4) for k, t in load_file(path).items()}, path)
    found = json.loads((folder / "summary.json").read_text())
    found["digest"]["server"] = "0" * 64
    (folder / "summary.json").write_text(json.dumps(found))
    said = cli("verify", "a")
    assert said.status == 1
    assert "models   differs by 1.0e-04, relative (client 'va')" in said.out
    assert "server   differs from its digest in summary.json" in said.out


@pytest.mark.parametrize(
    ("by", "capability", "says"),
    [
        (1e-6, None, "does not come out again"),
        (1e-6, "OTHER", "comes out again: the same to 1e-06, relative; it was made with other processor instructions"),
        (1e-2, "OTHER", "does not come out again"),
        (1e-6, "NUMPY", "comes out again: the same to 1e-06, relative; it was made with other versions of numpy"),
    ],
)
def test_rounding_is_told_from_another_result(cli, small, monkeypatch, by, capability, says):
    """A difference is rounding's where instructions or libraries differ and half of the digits of floats agree."""
    spoil(run_of(cli, small), by)
    if capability == "NUMPY":
        known = folder_module.version_of
        monkeypatch.setattr(folder_module, "version_of", lambda name: "1.0" if name == "numpy" else known(name))
    elif capability:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    said = cli("verify", "a")
    assert said.out.splitlines()[0] == f"a: {says}"
    assert said.status == (says == "does not come out again")
    assert ("OTHER here" in said.out) == (capability == "OTHER")


def test_the_runs_of_a_comparison(cli):
    plain = ("--data", "heart-disease", "--local-steps", 2, "--rounds", 2, "--seeds", 2, "-q")
    assert cli("compare", "fedavg", "scaffold", *plain, "--out", "a").status == 0
    for words, runs in ((), 4), (("--run", "fedavg-seed1"), 1):
        said = cli("verify", "a", *words)
        assert (said.status, said.out.count("bit for bit")) == (0, runs)
    said = cli("verify", "a", "--run", "fedavg-seed7")
    assert said.status == 2
    assert "did you mean" in said.err
    assert "expected one of" in said.err


def test_a_run_that_its_folder_does_not_describe_is_refused_in_one_line(cli, tmp_path):
    fed = pf.Federation.from_arrays([(torch.ones(4, 3).numpy(), [0, 1, 0, 1])] * 2)
    pf.fit(torch.nn.Linear(3, 2), fed, pf.FedAvg(), rounds=1, out=tmp_path / "a")
    cli("verify", "a").line(2, "started from Python")


def test_a_run_that_was_cut_short_or_killed_is_refused(cli, small, stopper):
    said = "polyfed: a: the run is not finished; finish it with: polyfed resume a\n"
    assert cli("run", small, "--set", f"algorithm.file={stopper}", "--out", "a", "-q").status == 130
    assert cli("verify", "a")[:3:2] == (1, said)
    (run_of(cli, small, "--force") / "summary.json").unlink()
    assert cli("verify", "a")[:3:2] == (1, said)


def separately(tmp_path, setting, *words):
    """A command in a process of its own, on a machine that would choose other instructions."""
    unset = {k: v for k, v in os.environ.items() if k not in ("ATEN_CPU_CAPABILITY", "MKL_CBWR")}
    env = unset | {"OMP_NUM_THREADS": "1"} | setting
    done = subprocess.run([*COMMAND, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


MLP = (
    *("--algorithm", "fedavg", "--data", "digits", "--clients", "4", "--model", "mlp", "--seeds", "1"),
    *("--local-steps", "3", "-q", "--rounds", "2", "--out", "a"),
)
MACHINES = {"plain": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}, "newest": {}}


@pytest.mark.skipif(not AVX2, reason="needs x86 with AVX2")
def test_portable_gives_the_same_bits_whatever_the_machine_chooses(tmp_path):
    """A resumed run takes the setting over from config.toml."""
    separately(tmp_path, MACHINES["plain"], "run", *MLP, "--portable")
    separately(tmp_path, MACHINES["newest"], "resume", "a", "--rounds", "3", "-q")
    said = separately(tmp_path, MACHINES["newest"], "verify", "a").splitlines()
    assert said[0] == "a: comes out again, bit for bit"
    config = (tmp_path / "a/config.toml").read_text()
    assert "portable = true" in config
    assert 'cpu-capability = "AVX2"' in config
    assert "from-round" not in config


@pytest.mark.skipif(not AVX2, reason="needs x86 with AVX2")
def test_a_run_of_another_instruction_set_comes_out_again_to_rounding(tmp_path):
    """Two of torch's, MKL's and the kernel's own, on one machine: they do count where a run is not portable."""
    plain = MACHINES["plain"] | {"POLYFED_NATIVE": "baseline"}
    separately(tmp_path, plain, "run", *MLP)
    said = separately(tmp_path, MACHINES["newest"], "verify", "a").splitlines()
    same = re.fullmatch(r"a: comes out again: the same to (\S+), relative; it was made with .*", said[0])
    assert same, said
    assert 0 < float(same[1]) < 1e-5
    named = {line.split(":")[0].strip() for line in said[4:]}
    assert named == {"cpu-capability", "mkl-cbwr"} | ({"kernel"} if native.built() is not None else set())


def test_portable_in_a_program_that_has_torch_already_is_refused(cli, small):
    cli("run", small, "--portable", "--out", "a").line(
        2, "polyfed: --portable: torch is loaded already; set ATEN_CPU_CAPABILITY=avx2"
    )


def test_portable_starts_the_program_again_where_torch_is_loaded_already(tmp_path, small):
    early = (sys.executable, "-c", "import torch; from polyfed.cli import main; main()")
    words = ("run", str(small), "--algorithm", "fedavg", "--set", "portable=true", "--out", "a", "-q")
    done = subprocess.run([*early, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'cpu-capability = "AVX2"' in (tmp_path / "a/config.toml").read_text()


def test_the_digest_is_that_of_the_numbers_alone():
    fed = pf.Federation.from_arrays([(torch.randn(40, 4).numpy(), [0, 1] * 20)] * 3)
    model = torch.nn.Linear(4, 2)
    one, other, third = (
        folder_module.digests(pf.fit(model, fed, pf.Ditto(), rounds=2, batch_size=5, seed=seed)) for seed in (1, 1, 2)
    )
    assert one == other
    assert all(one[part] != third[part] for part in one)
