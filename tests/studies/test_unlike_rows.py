"""Rows that are predicted are held against the training rows: ranges, categories and shares of gaps, by every door."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest

import polyfed as pf
from polyfed.base.columns import Columns
from polyfed.base.errors import DataError
from polyfed.data.preparation import Preparation
from polyfed.data.prepare import Cut
from polyfed.data.schema import File, settle


def sites(seed=0):
    rng, found = np.random.default_rng(seed), {}
    for name, n in {"north": 60, "south": 80, "west": 50}.items():
        t = pd.DataFrame({"age": rng.integers(30, 90, n), "chol": rng.normal(5.5, 1, n).clip(3, 8).round(2)})
        t["crp"] = np.where(rng.random(n) < 0.1, np.nan, rng.normal(size=n).round(3))
        t["sex"] = rng.choice(["m", "f"], n)
        t["outcome"] = np.where(t.age / 10 + t.chol + rng.logistic(size=n) > 11.5, "ill", "well")
        found[name] = t
    return found


@pytest.fixture(scope="module", params=["pooled", "client"])
def run(request):
    fed = pf.data.from_frames(sites(), "outcome", standardise=request.param)
    model = pf.models.build("linear", fed.input_shape, 2)
    run = pf.fit(model, fed, pf.FedAvg(0.1), rounds=2)
    rows = [sites()["west"].drop(columns="outcome").iloc[i] for i in fed.meta["split_indices"]["train"][2] - 140]
    return run, pd.DataFrame(rows).reset_index(drop=True).astype({"age": float, "chol": float, "crp": float})


CHANGES = {
    "another unit": (lambda t: t.assign(chol=t.chol * 38.67), "chol: 40 of 40 rows are outside"),
    "one row": (lambda t: t.assign(age=[*t.age[:-1], 150.0]), "age: 1 of 40 rows are outside"),
    "below": (lambda t: t.assign(age=[*t.age[:-2], -999.0, -999.0]), "age: 2 of 40 rows are outside"),
    "a category": (lambda t: t.assign(sex=["x", "x", "x", *t.sex[3:]]), "sex: 3 of 40 rows are outside"),
    "a gap": (lambda t: t.assign(chol=[np.nan, *t.chol[1:]]), "chol: 1 of 40 are missing"),
    "many gaps": (lambda t: t.assign(crp=[*t.crp[:5], *[np.nan] * 35]), "crp: .*training rows had .*%"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_unlike_the_training_rows_are_counted_by_column_and_refused_if_strict(run, change):
    run, rows = run
    make, said = CHANGES[change]
    with pytest.warns(UserWarning, match=said) as warned:
        found = run.predict("west", make(rows))
    assert len(found) == 40
    assert sum(str(w.message).startswith(said[:4]) for w in warned) == 1
    with pytest.raises(DataError, match=said):
        run.predict("west", make(rows), strict=True)


def test_training_rows_are_in_order(run, recwarn):
    run, rows = run
    run.predict("west", rows, strict=True)
    assert not [w for w in recwarn if "outside" in str(w.message)]


def test_the_ranges_are_those_of_the_training_rows(run):
    run, rows = run
    known = Preparation.read(run.outline.meta["preparation"], "here")
    at = known.at("west")
    if len(known.sites) > 1:  # its own
        assert at.low == rows[["age", "chol", "crp"]].min().tolist()
        assert at.high == rows[["age", "chol", "crp"]].max().tolist()
        assert at.gaps == rows.isna().mean().tolist()
    else:
        assert at.low[0] == 30


@pytest.fixture
def exported(cli, tmp_path):
    """A folder with a run, the model of west, rows like its training rows (old) and in another unit (new)."""
    (tmp_path / "sites").mkdir()
    for name, frame in sites().items():
        frame.to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    how = ("--target", "outcome", "--algorithm", "fedavg", "--rounds", 2, "--seeds", 1, "-q")
    assert cli("run", "--data", "sites", *how, "--set", "data.test-fraction=0", "--out", "run").status == 0
    assert cli("export", "run", "--client", "west", "--out", "west.safetensors").status == 0
    rows = sites()["west"]
    rows.to_csv(tmp_path / "old.csv", index=False)
    rows.assign(chol=rows.chol * 38.67).to_csv(tmp_path / "new.csv", index=False)
    return tmp_path


def test_strict_writes_nothing_and_without_it_all_is_said(exported, cli):
    for model in (("west.safetensors",), ("run", "--client", "west")):
        (exported / "p.csv").unlink(missing_ok=True)
        for strict in (True, False):
            said = cli("predict", model[0], "new.csv", *model[1:], "--out", "p.csv", *["--strict"] * strict)
            assert said.status == strict
            assert "chol: 50 of 50 rows are outside" in said.err
            assert (exported / "p.csv").exists() != strict
        said = cli("predict", model[0], "old.csv", *model[1:], "--strict").done()
        assert "outside" not in said.err


def test_an_older_file_predicts_and_says_that_it_has_no_ranges(exported, cli):
    about = exported / "west.json"
    facts = json.loads(about.read_text())
    assert set(facts["preparation"]["sites"]) <= {"", "west"}
    for of in facts["preparation"]["sites"].values():
        for key in ("low", "high", "gaps"):
            del of[key]
    about.write_text(json.dumps(facts))
    said = cli("predict", "west.safetensors", "new.csv", "--out", "p.csv").done()
    assert "unknown" in said.err
    assert len(pd.read_csv(exported / "p.csv")) == 50
    assert cli("predict", "west.safetensors", "old.csv", "--strict").status == 1


def test_a_private_model_goes_without_single_rows_numbers(tmp_path):
    pytest.importorskip("polyfed_privacy")
    fed = pf.data.from_frames(sites(), "outcome")
    model = pf.models.build("linear", fed.input_shape, 2)
    how = {"privacy": {"epsilon": 8.0, "clip": 1.0, "sums": "secure"}, "batch_size": None, "local_steps": 1}
    run = pf.fit(model, fed, pf.FedAvg(0.1), rounds=2, out=tmp_path / "run", **how)
    about = json.loads(run.export("west", tmp_path / "west.safetensors")[1].read_text())
    assert all(of["low"] is of["high"] is of["gaps"] is None for of in about["preparation"]["sites"].values())


@pytest.mark.parametrize("standardise", ["client", "none"])
def test_a_site_keeps_its_own_ranges_and_says_none(tmp_path, standardise):
    columns = Columns(target="outcome", standardise=standardise)
    files = {}
    for name, frame in sites().items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        files[name] = File(tmp_path / f"{name}.csv", name, columns, Cut(0, 0.2, 0.0))
    settled = settle({name: file.schema() for name, file in files.items()}, columns)
    assert not any(of.low for of in settled.preparation.sites.values())
    own = files["west"].fitted(settled)[0].at("west")
    rows = sites()["west"].iloc[files["west"].rows["train"]]
    assert own.low == rows[["age", "chol", "crp"]].min().tolist()


@pytest.mark.parametrize("repair", [{"0": "1", "1": "0"}, "1 - x", {"alive": "1", "dead": "0"}, None])
def test_a_prediction_says_what_its_class_is_called_at_the_site(tmp_path, repair):
    """oslo codes the outcome the other way round, or in words; bern as the federation does."""
    here = {"0": "1", "1": "0"} if repair != {"alive": "1", "dead": "0"} else {"0": "dead", "1": "alive"}
    for site in ("bern", "oslo"):
        rows = [(k * 7 % 10 + 0.5, str(int(k % 5 > 1))) for k in range(20)]
        cells = "".join(f"{x},{here[y] if site == 'oslo' and repair else y}\n" for x, y in rows)
        (tmp_path / f"{site}.csv").write_text(f"age,died\n{cells}")
    repairs = {} if repair is None else {"site": {"oslo": {"died": repair}}}
    fed = pf.Federation.from_folder(tmp_path, target="died", **repairs)
    run = pf.fit(pf.models.build("linear", fed.input_shape, fed.outputs), fed, pf.FedAvg(lr=0.1), rounds=1)
    for site in ("bern", "oslo"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            table = run.predict(site, pd.DataFrame({"age": [1, 50]}))
        lines = [str(w.message) for w in said if "federation's classes" in str(w.message)]
        if site == "bern" or repair is None:
            assert "written_here" not in table
            assert not lines
        else:
            assert table["written_here"].tolist() == [here[p] for p in table["prediction"].astype(str)]
            assert f"oslo's file writes {here['0']} for 0, {here['1']} for 1" in lines[0]
