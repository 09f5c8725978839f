"""The [schedule] table: asynchronous training and virtual time from a configuration, and what is refused."""

import json

import pandas as pd
import pytest

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = ["run", "--data", "digits", "--partition", "iid", "--clients", "6", "--rounds", "12", "--seeds", "1", "-q"]


def final(folder):
    return json.loads((folder / "summary.json").read_text())["final"]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["schedule.name=lazy"], "schedule.name"),
        (["schedule.name=bernoulli", "schedule.concurrency=3"], "schedule.concurrency"),
        (["schedule.name=asynchronous", "schedule.delays=soon"], "schedule.delays"),
        (["schedule.name=asynchronous", "schedule.delays=file:/no/such.csv"], "such.csv"),
        (["schedule.name=asynchronous", "schedule.concurrency=60"], "concurrency"),
        (["schedule.name=uniform", "schedule.delays=file:bad.csv"], "bad.csv, client 'client-2'"),
        (["schedule.name=uniform", "schedule.delays=file:none.csv"], "none.csv, client 'client-2'"),
        (["schedule.name=asynchronous", "algorithm.name=fpfc", "algorithm.solver=device-dual"], "run asynchronously"),
    ],
)
def test_what_is_refused_before_a_folder_is_made(cli, settings, word, tmp_path):
    for name, seconds in (("bad", -1.0), ("none", float("nan"))):
        delay_file(tmp_path / f"{name}.csv", [1.0, 1.0, seconds, 1.0, 1.0, 1.0])
    method = () if "algorithm.name=fpfc" in settings else ("--algorithm", "fedasync")
    cli(*SMALL, *method, *(w for s in settings for w in ("--set", s)), "--out", tmp_path / "a").line((1, 2), word)
    assert not (tmp_path / "a").exists()


def delay_file(path, seconds):
    """Client i of six computes seconds[i] and is at no distance."""
    rows = "".join(f"client-{i},{s},0\n" for i, s in enumerate(seconds))
    path.write_text(f"client,compute,network\n{rows}")


@pytest.mark.parametrize("name", ["uniform", "asynchronous"])
def test_delays_from_a_file(cli, tmp_path, monkeypatch, name):
    """Twelve synchronous rounds last as long as the slowest client each; or twelve replies, in the order of arrival."""
    seconds = [1.0, 1.5, 3.25, 5.0, 7.0, 100.0]
    delay_file(tmp_path / "delays.csv", seconds)
    monkeypatch.chdir(tmp_path)
    words = ["--algorithm", "fedasync", "--set", f"schedule.name={name}", "--set", "schedule.delays=file:delays.csv"]
    cli(*SMALL, *words, "--out", tmp_path / "a").done()
    last = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[-1])
    if name == "asynchronous":
        assert pd.read_csv(tmp_path / "a" / "ledger.csv")["staleness"].max() > 0
    arrivals = sorted(k * s for s in seconds for k in range(1, 13))
    assert last["virtual_time"] == (1200 if name == "uniform" else arrivals[11])
    monkeypatch.chdir(tmp_path / "a")  # the file is found again from anywhere
    assert cli("run", tmp_path / "a" / "config.toml", "-q", "--out", tmp_path / "b").status == 0
    assert final(tmp_path / "a") == final(tmp_path / "b")


def test_a_delay_file_lies_beside_its_configuration(cli, tmp_path):
    delay_file(tmp_path / "delays.csv", [1.0] * 6)
    lines = ["algorithm = { name = 'fedavg' }", "[schedule]", "name = 'uniform'", "delays = 'file:delays.csv'"]
    (tmp_path / "clock.toml").write_text("\n".join(lines))
    cli("run", tmp_path / "clock.toml", *SMALL[1:], "--out", tmp_path / "a").done()
