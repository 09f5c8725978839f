"""leave: the run without a site is, bit for bit, the run of a federation that never had it."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed as pf
from polyfed.base.errors import ConfigError, DataError, RunError
from polyfed.metrics.scores import ACCURACY
from polyfed.runs.build import Parts
from polyfed.runs.config import resolve
from polyfed.studies.verify import verify
from polyfed_members.departure import Departure

SITES = ("bern", "kyoto", "lima", "oslo")
METHODS = ("fedavg", "scaffold", "fpfc", "fedacs", "fedslr", "ifca:k=2", "ditto")


def sites(folder, names=SITES):
    """One file per site; oslo alone has the label 2."""
    folder.mkdir()
    for name in names:
        rng = np.random.default_rng(SITES.index(name))
        x, y = rng.normal(size=(24, 3)).astype(np.float32), np.arange(24) % (3 if name == "oslo" else 2)
        np.savez(folder / f"{name}.npz", x=x, y=y)
    return folder


def digests(folder):
    return json.loads((folder / "summary.json").read_text())["digest"]


def trained(data, out, method):
    """A run as `polyfed run --data FOLDER` makes it; who takes part is drawn anew in every round."""
    table = {"rounds": 3, "batch-size": 8, "fraction": 0.7, "model": {"name": "linear"}, "data": {"name": str(data)}}
    parts = Parts(resolve(None, table, [method]))
    chosen = parts.experiment.methods[0]
    given = parts.model(0), parts.federation(0), chosen.algorithm, parts.training(0)
    pf.fit(*given, out=out, describe=parts.describe(chosen))
    return out


@pytest.mark.parametrize("method", METHODS)
def test_a_run_without_a_site_is_that_of_a_federation_that_never_had_it(tmp_path, method):
    """Bit for bit; also where the site alone had a class, and when its data are gone before it leaves."""
    four, three = sites(tmp_path / "four"), sites(tmp_path / "three", SITES[:3])
    had, never = trained(four, tmp_path / "had", method), trained(three, tmp_path / "never", method)
    before = {p: p.read_bytes() for p in had.rglob("*") if p.is_file()}
    (four / "oslo.npz").unlink()
    left = pf.Run.open(had).leave("oslo").folder
    assert digests(left) == digests(never) != digests(had)
    assert contents(left / "models") == contents(never / "models")
    assert {p: p.read_bytes() for p in had.rglob("*") if p.is_file()} == before
    if method == "fedavg":
        assert verify(left).equal


def contents(folder):
    """Every file's bytes, without the times of day in log.txt."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {k: re.sub(rb"\d{4}-\d\d-\d\d.\d\d:\d\d:\d\d\S*", b"", v) if k.endswith("log.txt") else v
            for k, v in found.items()}  # fmt: skip


@pytest.mark.parametrize("several", [False, True])
def test_no_byte_of_the_new_folder_comes_of_the_rows_of_who_left(cli, tmp_path, monkeypatch, several):
    """Other rows of the client, as many, lead to the same files: models, scores, digests, ledgers, pages, all."""
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    found, had = [], []
    for k in range(2):
        data = sites(tmp_path / "data")
        if k:
            rows = dict(np.load(data / "oslo.npz"))
            np.savez(data / "oslo.npz", x=3 * rows["x"][::-1] - 1, y=rows["y"])
        methods = ("local", "fedavg", "--seeds", 2) if several else ("scaffold", "--seeds", 1)
        how = ("--data", "data", "--rounds", 2, "--batch-size", 8, "--model", "linear", "--quiet")
        assert cli("compare", *methods, *how, "--out", "had").status == 0
        cli("leave", "had", "--client", "oslo", "--quiet", "--out", "left").done()
        found.append(contents(tmp_path / "left"))
        had.append((tmp_path / "left-cost.csv").read_bytes())
        for name in ("had", "left", "data"):
            shutil.rmtree(tmp_path / name)
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if found[0][name] != found[1][name]] == []
    assert any(name.endswith("clients.csv") for name in found[0])
    assert had[0] != had[1], "the comparison with what was before does come of these rows, and lies elsewhere"
    assert not any("cost" in name or "leave" in name for name in found[0])


def test_what_follows_from_all_hospitals_is_worked_out_from_those_that_stay():
    """Pooled standardisation: mean 0 and variance 1 over the training rows of the three, not of the four."""
    parts = Parts(resolve(None, {"data": {"name": "heart-disease"}}, ["fedavg"]))
    four, three = parts.federation(0), parts.leaving(["va"]).federation(0)
    assert three.names == ("cleveland", "hungarian", "switzerland")
    assert torch.allclose(three.train.x.mean(0), torch.zeros(10), atol=1e-5)
    assert torch.allclose(three.train.x.std(0, unbiased=False), torch.ones(10), atol=1e-4)
    same = four.without(["va"])
    assert torch.equal(same.train.y, three.train.y)  # the same rows
    assert same.train.x.mean(0).abs().max() > 0.02


def test_a_comparison_is_repeated_for_every_method_and_seed_with_intervals(cli, tmp_path):
    cli("compare", "local", "fedavg", "--rounds", 3, "--seeds", 3, "--quiet", "--out", "four")
    cli("leave", "four", "--client", "va", "--client", "switzerland", "--quiet", "--out", "two").done()
    table = pd.read_csv(tmp_path / "two-cost.csv")
    assert table.groupby("method")["client"].agg(list).to_dict() == {
        m: ["cleveland", "hungarian", "mean"] for m in ("fedavg", "local")
    }
    mean = {
        f: np.mean([pd.read_csv(tmp_path / f"{f}/runs/fedavg-seed{s}/clients.csv").test_accuracy for s in range(3)], 0)
        for f in ("four", "two")
    }
    rows = table[table.method == "fedavg"]
    assert np.allclose(rows.change[:2], mean["two"] - mean["four"][:2], atol=1e-6)
    assert (rows.low <= rows.change).all()
    assert (rows.change <= rows.high).all()
    assert np.isclose(rows.change.iloc[2], rows.change[:2].mean())
    assert rows.bytes_before.equals(rows.bytes_after)  # FedAvg's do not depend on how many clients there are
    assert {(r, s) for r, s in zip(table.seeds, table.method, strict=True)} == {(3, "fedavg"), (3, "local")}
    page = (tmp_path / "two-cost.html").read_text()
    assert "What does it cost those who stay if va and switzerland leave?" in page
    headline = page.split('<p class="headline">')[1].split("</p>")[0].replace("\N{NO-BREAK SPACE}", " ")
    assert "test accuracy with fedavg changes by" in headline, "the method that sends messages comes first"
    assert f"{100 * rows.change.iloc[2]:.1f}".lstrip("-") + " points" in headline
    assert page.index('class="forest"') < page.index("<table")
    assert page.count('<th scope="row"') == len(rows), "local sends nothing, and is named instead"
    assert page.count("test accuracy with local changes by") == 1
    assert "figure-leave-title" in page


def test_the_method_in_the_lead_of_the_answer_comes_first():
    """Which among those who stay may be another one: the answer is over everyone."""
    row = {"client": "mean", "after": 0.8, "change": 0.0, "low": 0.0, "high": 0.0, "clear": False, "seeds": 2,
           "bytes_before": 8.0, "bytes_after": 8.0}  # fmt: skip
    table = pd.DataFrame([row | {"method": m, "before": s} for m, s in (("a", 0.8), ("b", 0.7), ("c", 0.9))])
    for lead, order in (("b", ["b", "c", "a"]), (None, ["c", "a", "b"])):
        found = Departure(("x",), Path("folder"), table, ACCURACY, "test", lead)
        assert [cells[1].text for cells in found.summary().rows] == order


def federation():
    rng = np.random.default_rng(0)
    draw = [(rng.normal(size=(20, 3)).astype(np.float32), rng.integers(0, 2, 20)) for _ in SITES]
    return pf.Federation.from_arrays(draw, names=SITES, classes=2, test_fraction=0.25)


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_a_run_from_python_takes_its_data_and_model_again(tmp_path):
    steps = dict(zip(SITES, (1, 2, 3, 4), strict=True))
    pf.fit(linear(), federation(), pf.FedAvg(0.1), rounds=2, local_steps=steps, out=tmp_path / "run")
    found = pf.Run.open(tmp_path / "run", federation(), linear()).leave("lima")
    assert found.folder == tmp_path / "run-without-lima"
    rest = {name: number for name, number in steps.items() if name != "lima"}
    pf.fit(linear(), federation().without(["lima"]), pf.FedAvg(0.1), rounds=2, local_steps=rest, out=tmp_path / "new")
    assert digests(found.folder) == digests(tmp_path / "new")
    assert found.table["client"].tolist() == ["bern", "kyoto", "oslo", "mean"]
    assert (tmp_path / "run-without-lima-cost.csv").exists()


def test_who_tests_fewer_than_ten_samples_has_a_row_and_no_part_in_the_mean(tmp_path):
    rng = np.random.default_rng(0)
    draw = [(rng.normal(size=(n, 3)).astype(np.float32), rng.integers(0, 2, n)) for n in (80, 60, 36, 40)]
    data = pf.Federation.from_arrays(draw, names=SITES, classes=2, test_fraction=0.25)
    pf.fit(linear(), data, pf.FedAvg(0.1), rounds=1, out=tmp_path / "run")
    found = pf.Run.open(tmp_path / "run", data, linear()).leave(SITES[3])
    each, mean = found.table.iloc[:3], found.table.iloc[3]
    assert mean["client"] == "mean"
    for k in ("before", "after", "change"):
        assert mean[k] == pytest.approx(each[k][:2].mean())
    assert found.apart == (SITES[2],)
    assert f"leaves out {SITES[2]}: fewer than 10" in " ".join(found.summary().notes)


def test_what_cannot_leave_is_refused_in_one_line(tmp_path, cli):
    pf.fit(linear(), federation(), pf.FedAvg(0.1), rounds=2, out=tmp_path / "run")
    opened = pf.Run.open(tmp_path / "run", federation(), linear())
    for who, word in ((("olso",), "did you mean 'oslo'"), ((), "found 0 of 4"), (SITES, "found 4 of 4")):
        with pytest.raises(ConfigError, match=word):
            opened.leave(*who)
    with pytest.raises(DataError, match="did you mean 'oslo'"):
        federation().without(["olso"])
    with pytest.raises(RunError, match="not the ones it was trained on"):
        pf.Run.open(tmp_path / "run", federation().reorder([1, 0, 2, 3]), linear()).leave("oslo")
    pf.fit(linear(), federation(), pf.FedAvg(0.1), rounds=1, start=opened, out=tmp_path / "more")
    with pytest.raises(ConfigError, match="whose models have seen oslo"):
        pf.Run.open(tmp_path / "more", federation(), linear()).leave("oslo")
    said = cli("leave", "run", "--client", "oslo")
    assert said.err.splitlines()[0].endswith("polyfed.fit(..., out=folder, resume=True)")
    shutil.rmtree(tmp_path / "run/checkpoint")
    (tmp_path / "run/summary.json").unlink()
    line = "polyfed: run: is not finished; finish it with: polyfed resume run\n"
    assert cli("leave", "run", "--client", "oslo").err == line


def test_a_client_to_leave_out_must_be_there(cli, tmp_path):
    said = cli("run", "--set", 'data.without=["Va"]', "--rounds", 1)
    assert said.err == "polyfed: data.without: no client 'Va' (did you mean 'va'?) in heart-disease\n"
    sites(tmp_path / "four")
    said = cli("run", "--data", "four", "--set", 'data.without=["olso"]', "--rounds", 1)
    assert "no client 'olso' (did you mean 'oslo'?)" in said.err
