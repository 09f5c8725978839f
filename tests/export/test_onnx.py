"""Exported as ONNX a model needs nothing of ours: onnxruntime gives the same predictions for raw rows."""

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed as pf
from polyfed.base.errors import ConfigError

pytest.importorskip("onnx", reason="onnx is not installed; pip install '.[onnx]'")
runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
KINDS = {"tensor(double)": float, "tensor(string)": object}


def answers(file, rows):
    """[prediction, probabilities] of a table by onnxruntime, which is given nothing but its columns."""
    session = runtime.InferenceSession(str(file))
    return session.run(None, {i.name: rows[i.name].to_numpy(KINDS[i.type]) for i in session.get_inputs()})


def folder(path, regression=False):
    """Two sites with gaps, a gap written as -999, categories of texts, of numbers and of true and false."""
    rng, n = np.random.default_rng(0), 60
    path.mkdir()
    for name in ("north", "south"):
        rows = pd.DataFrame({"age": rng.integers(30, 80, n).astype(float)})
        score = (rows.age - 55) / 10 + rng.normal(size=n)
        rows["crp"] = np.where(rng.random(n) < 0.2, -999.0, rng.gamma(2.0, 20.0, n))
        rows["weight"] = np.where(rng.random(n) < 0.2, np.nan, rng.normal(80, 9, n))
        rows["ward"] = rng.choice(["icu", "surgery", "NA"], n)
        rows["grade"] = rng.choice([1, 2, 3], n)
        rows["smokes"] = rng.choice(["TRUE", "FALSE"], n)
        rows["outcome"] = 5000 + 300 * score if regression else np.where(score > 0, "ill", "well")
        rows.to_csv(path / f"{name}.csv", index=False)
    return pf.data.load(path, target="outcome", gaps=["-999"], categories=["grade"], standardise="client")


def new_rows():
    """As from elsewhere: gaps, and a category that no training row had."""
    return pd.DataFrame(
        {
            "age": [40.0, 70.0, np.nan, 55.0],
            "crp": [-999.0, 12.5, 80.0, np.nan],
            "weight": [80.0, np.nan, 70.5, 90.0],
            "ward": ["icu", "na", "maternity", "surgery"],
            "grade": [1, 2, 9, np.nan],
            "smokes": ["true", "False", "", "TRUE"],
        }
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # of gaps
@pytest.mark.parametrize("regression", [False, True])
def test_onnxruntime_predicts_raw_rows_as_the_run_does(tmp_path, regression):
    fed = folder(tmp_path / "sites", regression).partition("natural")
    layers = torch.nn.Linear(fed.input_shape[0], 8), torch.nn.Tanh(), torch.nn.Linear(8, fed.outputs)
    run = pf.fit(torch.nn.Sequential(*layers), fed, pf.Ditto(0.1), rounds=20)
    rows = new_rows()
    for client in ("north", "south"):  # each with its own means and medians
        file = run.onnx(client, tmp_path / f"{client}.onnx")
        expected = run.predict(client, rows)
        found = answers(file, rows.assign(smokes=["TRUE", "False", "", "true"]))
        if regression:
            assert found[0] == pytest.approx(expected["prediction"], rel=1e-6)
        else:
            assert found[0].tolist() == expected["prediction"].tolist()
            assert found[1] == pytest.approx(expected.filter(like="probability_").to_numpy(), abs=1e-6)
    assert np.ptp(expected["prediction" if regression else "probability_ill"]) > 0.01  # it is no constant


@pytest.mark.filterwarnings("ignore::UserWarning")  # of gaps
def test_a_sites_repairs_are_in_its_graph(tmp_path):
    """Units, texts and codes of one site: its rows are given as it writes them, and -9 stays a gap."""
    path = tmp_path / "sites"
    path.mkdir()
    rng = np.random.default_rng(0)
    for name, factor, words in (("a", 1.0, ("f", "m")), ("b", 18.02, ("w", "h"))):
        x, sex, y = rng.normal(6, 1, 40), rng.integers(0, 2, 40), rng.integers(0, 2, 40)
        glucose = np.where(rng.random(40) < 0.2, -9.0, (x + y) * factor)
        rows = {"glucose": glucose, "sex": np.take(words, sex), "ward": 1 + sex * (1 if name == "a" else 6), "y": y}
        pd.DataFrame(rows).to_csv(path / f"{name}.csv", index=False)
    site = {"b": {"glucose": "(x + 0) / 18.02", "sex": {"w": "f", "h": "m"}, "ward": {"7": "2"}}}
    fed = pf.data.load(path, target="y", gaps=["-9.0"], site=site, categories=["ward"]).partition("natural")
    run = pf.fit(torch.nn.Linear(fed.input_shape[0], 2), fed, pf.Ditto(0.1), rounds=20)
    words = {"sex": ["w", "h", "w"], "ward": [1, 7, 1]}
    for client, rows in {"a": {"sex": ["f", "m", "f"], "ward": [1, 2, 1]}, "b": words}.items():
        glucose = np.array([6.0, 7.5, np.nan]) * (18.02 if client == "b" else 1)
        raw, gap = (pd.DataFrame({"glucose": np.where(np.isnan(glucose), g, glucose)} | rows) for g in (-9.0, np.nan))
        expected = run.predict(client, raw).filter(like="probability_").to_numpy()
        assert np.allclose(run.predict(client, gap).filter(like="probability_"), expected, atol=1e-7)
        assert answers(run.onnx(client, tmp_path / f"{client}.onnx"), raw)[1] == pytest.approx(expected, abs=1e-6)
    a, b = (run.predict("b", pd.DataFrame({"glucose": [g]} | {k: v[:1] for k, v in words.items()})) for g in (60, 180))
    assert abs(a["probability_1"] - b["probability_1"])[0] > 0.01  # glucose matters


@pytest.mark.filterwarnings("ignore::UserWarning")  # of gaps
def test_columns_that_a_site_names_otherwise_or_computes_are_in_its_graph(tmp_path):
    """A site's rows go in under its own names, two of them exchanged; its bmi is of its pounds, and a gap makes one."""
    rng = np.random.default_rng(0)
    a, b = (
        {"kg": rng.normal(75, 9, 40), "cm": rng.normal(170, 9, 40), "hb": rng.normal(13, 1, 40), "y": [0, 1] * 20}
        for _ in range(2)
    )
    there = pd.DataFrame({"kg": b["kg"] / 0.45359237, "hb": b["cm"], "cm": b["hb"], "y": b["y"]})
    site = {"*": {"bmi": "kg / (cm / 100) ** 2"}, "b": {"rename": {"hb": "cm", "cm": "hb"}, "kg": "lb -> kg"}}
    fed = pf.data.from_frames({"a": pd.DataFrame(a), "b": there}, "y", site=site, test_fraction=0.0)
    run = pf.fit(torch.nn.Linear(fed.input_shape[0], 2), fed, pf.FedAvg(0.1), rounds=5)
    rows = there.iloc[:5].assign(hb=[*there["hb"][:4], np.nan])
    expected = run.predict("b", rows).filter(like="probability_").to_numpy()
    assert answers(run.onnx("b", tmp_path / "b.onnx"), rows)[1] == pytest.approx(expected, abs=1e-6)
    plain = pd.DataFrame(b).iloc[:5].assign(cm=rows["hb"])
    assert run.predict("a", plain).filter(like="probability_").to_numpy() == pytest.approx(expected, abs=1e-6)


def test_what_the_columns_refuse_comes_out_as_nan(tmp_path):
    path = tmp_path / "sites"
    path.mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        rows = {"x": rng.normal(size=20), "c": rng.choice(["u", "v"], 20), "y": rng.integers(0, 2, 20)}
        pd.DataFrame(rows).to_csv(path / f"{name}.csv", index=False)
    fed = pf.data.load(path, missing="refuse", unseen="refuse").partition("natural")
    run = pf.fit(torch.nn.Linear(3, 2), fed, pf.FedAvg(0.1), rounds=1)
    rows = pd.DataFrame({"x": [0.0, np.nan, 0.0, 0.0], "c": ["u", "u", "w", ""]})
    _, found = answers(run.onnx("a", tmp_path / "a.onnx"), rows)
    assert np.isnan(found).all(1).tolist() == [False, True, True, True]


def test_a_run_on_arrays_takes_prepared_inputs_in_any_number(tmp_path):
    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(20, 1, 8, 8)), rng.integers(0, 3, 20)) for _ in range(2)]
    fed = pf.Federation.from_arrays(sites, classes=3)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3)
    ).double()
    run = pf.fit(net, fed, pf.FedAvg(0.1), rounds=1)
    session = runtime.InferenceSession(str(run.onnx(1, tmp_path / "one.onnx")))
    for n in (1, 7):
        x = rng.normal(size=(n, 1, 8, 8))
        expected = run.model(1)(torch.from_numpy(x)).detach().numpy()
        assert session.run(None, {"x": x.astype(np.float32)})[0] == pytest.approx(expected, abs=1e-6)


def test_the_command_writes_the_file_and_refuses_in_a_line(cli, tmp_path):
    folder(tmp_path / "sites")
    settings = ("--set", 'columns.gaps=["-999"]', "--set", 'columns.categories=["grade"]')
    cli("run", "--data", "sites", "--algorithm", "fedavg", "--rounds", 2, "--out", "r", "-q", *settings).done()
    assert cli("export", "r", "--client", "south", "--form", "onnx").out == "south.onnx\n"
    assert len(answers("south.onnx", new_rows().assign(smokes="TRUE"))[0]) == 4
    for words, line in {
        ("--out", "m.pt"): "out: found 'm.pt', expected a name ending in .onnx",
        ("--form", "onxn"): "(did you mean 'onnx'?)",
        ("--onnx",): "No such option '--onnx'. ",
        ("--client", "soth"): "no client 'soth' (did you mean 'south'?); there are 2 of them",
    }.items():
        cli("export", "r", "--client", "south", "--form", "onnx", *words).line(2, line)
    cli("export", "r", "--form", "onnx").line(2, "--client: missing; r is a run, with the clients ")


def test_without_onnx_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("polyfed_export.onnx.find_spec", lambda name: None)
    fed = pf.Federation.from_arrays([(np.eye(4), np.arange(4) % 2)])
    run = pf.fit(torch.nn.Linear(4, 2), fed, pf.FedAvg(0.1), rounds=1)
    with pytest.raises(ConfigError, match=r"^onnx: is not installed; pip install 'polyfed\[onnx\]'$"):
        run.onnx(0, tmp_path / "a.onnx")
