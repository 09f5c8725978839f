"""What is learnt from training rows: against scikit-learn, and never from a row that is held out."""

import json

import numpy as np
import pandas as pd
import pytest
from doors import written
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import polyfed as pf
from polyfed.base.errors import ConfigError, DataError
from polyfed.data.csv_files import sheet_of
from polyfed.data.moments import median, moments
from polyfed.data.preparation import Preparation

WARDS = ["icu", "medicine", "surgery"]


@pytest.fixture
def tables():
    rng, made = np.random.default_rng(0), {}
    for name, n in {"north": 40, "south": 60, "west": 25}.items():
        t = pd.DataFrame({"age": rng.integers(30, 90, n).astype(float), "crp": rng.gamma(2, 1e3, n)})
        t["ward"] = rng.choice(WARDS, n)
        t.loc[rng.random(n) < 0.2, "crp"] = np.nan
        t["y"] = 100 + 10 * t["age"] + rng.normal(size=n)
        made[name] = t
    return made


def rows_of(fed, tables, split="train"):
    """The raw rows of a split, client by client."""
    frame = pd.concat(list(tables.values()), ignore_index=True)
    return [frame.iloc[index] for index in fed.meta["split_indices"][split]]


def oracle():
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    wards = OneHotEncoder(categories=[WARDS], sparse_output=False)
    return ColumnTransformer([("numbers", numbers, ["age", "crp"]), ("wards", wards, ["ward"])])


@pytest.mark.parametrize("scope", ["pooled", "client"])
def test_the_inputs_are_those_of_scikit_learn_fitted_on_the_training_rows(tmp_path, tables, scope):
    fed = pf.data.load(written(tmp_path, tables), standardise=scope).partition(seed=3)
    train, test = rows_of(fed, tables), rows_of(fed, tables, "test")
    assert fed.meta["inputs"] == ["age", "crp", "crp missing", *(f"ward={w}" for w in WARDS)]
    for i in range(fed.n):
        fitted = oracle().fit(pd.concat(train) if scope == "pooled" else train[i])
        for part, raw in ((fed.train, train[i]), (fed.test, test[i])):
            x = part.client(i)[0].numpy()
            wanted = fitted.transform(raw)
            assert x[:, [0, 1, 3, 4, 5]] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert (x[:, 2] == raw["crp"].isna()).all()
    of = [train[1]] if scope == "client" else train
    y = np.concatenate([t["y"] for t in of])
    assert fed.train.unit is not None
    assert fed.train.unit[1].tolist() == pytest.approx([y.mean(), y.std()])
    assert fed.train.client(1)[1].numpy() == pytest.approx(train[1]["y"].to_numpy())


def test_none_fills_gaps_and_scales_nothing(tmp_path, tables):
    fed = pf.data.load(written(tmp_path, tables), standardise="none").partition(seed=3)
    own = rows_of(fed, tables)[2]
    wanted = own[["age", "crp"]].fillna(own[["age", "crp"]].median())
    assert fed.train.client(2)[0][:, :2].numpy() == pytest.approx(wanted.to_numpy(), rel=1e-6)
    assert fed.train.unit is None


@pytest.mark.parametrize("scope", ["pooled", "client"])
def test_held_out_rows_change_nothing_that_is_learnt(tmp_path, tables, scope):
    fed = pf.data.load(written(tmp_path / "a", tables), standardise=scope).partition(seed=1)
    frame = pd.concat(tables, names=["site"]).reset_index("site")
    for index in fed.meta["split_indices"]["test"]:
        frame.iloc[index, frame.columns.get_indexer(["age", "crp", "ward", "y"])] = [1e6, np.nan, "attic", -1e6]
    other = {name: frame[frame["site"] == name].drop(columns="site") for name in tables}
    again = pf.data.load(written(tmp_path / "b", other), standardise=scope).partition(seed=1)
    assert again.meta["preparation"] == fed.meta["preparation"]
    assert again.train.x.equal(fed.train.x)
    assert (again.test.x[:, 3:] == 0).all()  # "attic" is none of the wards


def test_a_category_of_held_out_rows_alone_is_refused_where_that_is_asked(tmp_path, tables):
    fed = pf.data.load(written(tmp_path, tables)).partition(seed=1)
    tables["south"].iloc[fed.meta["split_indices"]["test"][1] - 40, 2] = "attic"
    data = pf.data.load(written(tmp_path, tables), unseen="refuse")
    with pytest.raises(DataError, match="'south', column 'ward': found 'attic', which no training part has"):
        data.partition(seed=1)
    declared = pf.data.load(tmp_path, unseen="refuse", categories={"ward": [*WARDS, "attic"]}).partition(seed=1)
    assert "ward=attic" in declared.meta["inputs"]


def test_units_order_and_delimiters_do_not_matter(tmp_path, tables):
    fed = pf.data.load(written(tmp_path / "a", tables)).partition(seed=0)
    for name, t in tables.items():
        t["crp"] = t["crp"] * 1000 + 7
        tables[name] = t[["y", "ward", "crp", "age"]] if name != "north" else t
    folder = written(tmp_path / "b", tables)
    tables["south"].to_csv(folder / "south.csv", index=False, sep=";", decimal=",")
    tables["west"].to_csv(folder / "west.csv", index=False, sep="\t")
    again = pf.data.load(folder, target="y").partition(seed=0)
    assert again.train.x.numpy() == pytest.approx(fed.train.x.numpy(), abs=1e-5)
    assert again.train.y.equal(fed.train.y)


def test_a_preparation_survives_json_to_the_last_bit(tmp_path, tables):
    fed = pf.data.load(written(tmp_path, tables), standardise="client").partition(seed=0)
    text = json.dumps(fed.meta["preparation"])
    read = Preparation.read(json.loads(text), "here")
    assert json.dumps(read.dump()) == text
    raw = rows_of(fed, tables, "test")[1].drop(columns="y")
    x = read.only("south").transform(read.codes(sheet_of(raw)), "south")
    assert (x == fed.test.client(1)[0].numpy()).all()
    with pytest.raises(DataError, match="'north'"):
        read.only("south").at("north")
    for damage in ({}, {"inputs": 3}, {**json.loads(text), "sites": {"": {}}}, json.loads(text) | {"inputs": []}):
        with pytest.raises(DataError, match="here: its preparation is damaged"):
            Preparation.read(damage, "here")


def test_sums_alone_give_the_pooled_median_mean_and_deviation():
    rng = np.random.default_rng(0)
    for n in (3, 10, 41):
        x = rng.normal(size=(n, 3)) * [1e-6, 1, 1e9]
        sites = np.array_split(x, 3)
        mean, deviation = moments(sites)
        assert mean == pytest.approx(x.mean(0))
        assert deviation == pytest.approx(x.std(0))
        holes = np.where(rng.random(x.shape) < 0.2, np.nan, x)
        holes[0] = x[0]
        assert median(np.array_split(holes, 3)) == pytest.approx(np.nanmedian(holes, 0), rel=1e-15)
    assert moments([np.full((4, 1), 0.1)])[1] == [1.0]
    assert median([np.full((4, 1), np.nan)]) == [0.0]


def test_a_column_that_one_site_never_measured_is_neutral_there(tmp_path, tables):
    tables["west"]["crp"] = np.nan
    fed = pf.data.load(written(tmp_path, tables), standardise="client").partition(seed=0)
    assert fed.train.client(2)[0][:, 1:3].unique(dim=0).tolist() == [[0, 1]]


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_a_regression_trains_as_on_targets_standardised_by_hand_and_is_judged_in_its_unit(tmp_path, tables, model):
    data = pf.data.load(written(tmp_path, tables)).partition(seed=0)
    _, scale = data.train.unit[0].tolist()

    def by_hand(split):
        return [(x, (y.double() - data.train.unit[i, 0]) / data.train.unit[i, 1]) for i in range(3)
                for x, y in [split.client(i)]]  # fmt: skip

    hand = pf.Federation.from_arrays(by_hand(data.train), by_hand(data.test), names=data.names, task="regression")
    ends = []
    for fed in (data, hand):
        net = pf.models.build(model, (6,), 1, seed=0)
        for method in (pf.FedAvg(lr=0.05), pf.Ditto(lr=0.05)):
            run = pf.fit(net, fed, method, rounds=4, dtype="float64", batch_size=16, metrics=["rmse", "mae", "r2"])
            ends.append((run.personal, run.clients, run.trained.scored("test")))
    for (w, clients, seen), (v, others, _) in zip(ends[:2], ends[2:], strict=True):
        assert w.numpy() == pytest.approx(v.numpy(), rel=1e-5, abs=1e-6)
        for split in ("train", "test"):
            assert clients[f"{split}_loss"].to_numpy() == pytest.approx(others[f"{split}_loss"].to_numpy(), rel=1e-4)
            assert clients[f"{split}_r2"].to_numpy() == pytest.approx(others[f"{split}_r2"].to_numpy(), rel=1e-4)
            for key in ("rmse", "mae"):
                found, wanted = clients[f"{split}_{key}"].to_numpy(), scale * others[f"{split}_{key}"].to_numpy()
                assert found == pytest.approx(wanted, rel=1e-4)
        assert seen["rmse"] == pytest.approx(clients["test_rmse"].to_numpy(), rel=1e-6)


def test_predictions_of_raw_held_out_rows_have_the_error_that_the_run_reports(tmp_path, tables):
    fed = pf.data.load(written(tmp_path, tables), standardise="client").partition(seed=0)
    run = pf.fit(pf.models.build("linear", (6,), 1), fed, pf.Ditto(lr=0.05), rounds=3)
    for i, raw in enumerate(rows_of(fed, tables, "test")):
        found = run.predict(i, raw[["ward", "crp", "age"]])["prediction"].to_numpy()
        rmse = np.sqrt(np.mean((found - raw["y"].to_numpy()) ** 2))
        assert rmse == pytest.approx(run.clients["test_rmse"][i], rel=1e-4)
    path, _ = pf.Run.open(run.save(tmp_path / "run"), fed).export("north", tmp_path / "north.safetensors")
    with pytest.raises(ConfigError, match=r"given in Python, .* use Run\.predict"):
        pf.Predictor.open(path)


def test_survival_targets_are_times_and_events(tmp_path, tables):
    for t in tables.values():
        t["died"] = (np.arange(len(t)) % 2).astype(int)
    fed = pf.data.load(written(tmp_path, tables), task="survival", time="y", event="died").partition(seed=0)
    assert fed.classes is None
    assert fed.train.y.shape[1] == 2
    assert fed.train.unit is None
    assert "y" not in fed.meta["inputs"]
    run = pf.fit(
        pf.models.build("linear", (6,), 1), fed, pf.FedAvg(lr=0.01), rounds=3, batch_size=None,
        loss=pytest.importorskip("polyfed_clinical").loss("cox"), metrics="concordance",
    )  # fmt: skip
    assert run.clients["test_concordance"].between(0, 1).all()
    with pytest.raises(ConfigError, match="what outputs mean is known"):
        run.predict("north", tables["north"])


def test_npz_files_are_scaled_where_that_is_asked(tmp_path):
    rng = np.random.default_rng(0)
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=rng.normal(50, 9, size=(30, 2)), y=rng.normal(size=30))
    assert pf.data.load(tmp_path).partition(seed=0).train.x.mean() > 40
    scaled = pf.data.load(tmp_path, standardise="pooled").partition(seed=0).train.x
    assert scaled.mean(0).numpy() == pytest.approx(np.zeros(2), abs=1e-5)
    with pytest.raises(ConfigError, match=r"columns\.drop: .* holds arrays"):
        pf.data.load(tmp_path, drop=["x"])
