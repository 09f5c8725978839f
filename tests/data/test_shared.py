"""One global score beside the clients' own: scikit-learn's on the same rows, and nothing else changes by it."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import accuracy_score, mean_absolute_error, roc_auc_score

import polyfed as pf
from polyfed.base.errors import ConfigError, DataError
from polyfed.report import answer, compare_table, read
from polyfed.runs.resume import digest

METHODS = [pf.FedAvg(lr=0.1), pf.Ditto(lr=0.1), pf.Local(lr=0.1)]


def table(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    x, c, gaps = rng.normal(size=n), rng.choice(list("abc"), n), rng.normal(size=n)
    score = x + gaps + (c == "a") + rng.normal(size=n)
    gaps[:: 9 + seed] = np.nan
    return pd.DataFrame({"x": 5 * x, "c": c, "gaps": gaps, "y": np.where(score > 0, "yes", "no")})


ROWS = table(150, 9).assign(other=1.0).iloc[:, ::-1]  # columns in another order, one more


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sites").mkdir()
    for k in range(3):
        table(40, k).to_csv(tmp_path / "sites" / f"s{k}.csv", index=False)
    ROWS.to_csv(tmp_path / "all.csv", index=False)
    return tmp_path


def trained(federation, method, **more):
    model = torch.nn.Linear(*federation.input_shape, federation.outputs)
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    return pf.fit(model, federation, method, rounds=2, **more)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_models_score_is_scikit_learns_and_nothing_else_changes(folder, method):
    plain = pf.data.load(folder / "sites", target="y").partition(seed=0)
    both = pf.data.with_global(plain, folder / "all.csv")
    assert digest(both) == digest(plain)
    judges = {"metrics": "accuracy,auc"}
    before, run = (trained(fed, method, out=folder / str(id(fed)), **judges) for fed in (plain, both))
    assert torch.equal(before.personal, run.personal)
    for split, scores in before.final.items():
        assert all(np.array_equal(v, run.final[split][k]) for k, v in scores.items())
    for i, name in enumerate(plain.names):
        said = run.predict(name, ROWS)
        assert run.final["global"]["accuracy"][i] == pytest.approx(accuracy_score(ROWS.y, said.prediction))
        area = roc_auc_score(ROWS.y == "yes", said.probability_yes)
        assert run.final["global"]["auc"][i] == pytest.approx(area, abs=1e-6)
    same = len(set(run.final["global"]["auc"])) == 1
    assert same == (run.deploys == "common")
    if run.deploys == "common":
        assert np.array_equal(run.evaluate(run.common, "global")["auc"], run.final["global"]["auc"])
    again = pf.Run.open(run.folder, federation=plain)
    assert np.allclose(again.final["global"]["auc"], run.final["global"]["auc"])
    assert len(both.shared.x) == len(ROWS)


def test_a_frame_a_file_and_numbers_to_predict(folder):
    frames = {f"s{k}": table(40, k).drop(columns="y") for k in range(3)}
    fed = pf.data.from_frames(frames, "x")
    by_file, by_frame = (pf.data.with_global(fed, rows) for rows in (folder / "all.csv", ROWS))
    assert torch.equal(by_file.shared.x, by_frame.shared.x)
    run = trained(by_file, pf.Local(lr=0.1), metrics="mae", out=folder / "run")
    for i, name in enumerate(fed.names):
        expected = mean_absolute_error(ROWS.x, run.predict(name, ROWS).prediction)
        assert run.final["global"]["mae"][i] == pytest.approx(expected, rel=1e-5)


def test_arrays_npz_files_and_yardsticks(tmp_path):
    rng = np.random.default_rng(0)
    pairs = [(x := rng.normal(size=(30, 4)).astype(np.float32), 1 + (x[:, 0] > 0)) for _ in range(4)]
    sites, rows = pairs[:3], pairs[3]
    for k, (x, y) in enumerate(pairs):
        np.savez(tmp_path / f"{k}.npz", x=x, y=y)
    given = pf.data.with_global(pf.Federation.from_arrays(sites), rows)
    files = pf.Federation.from_files([tmp_path / f"{k}.npz" for k in range(3)])
    there = pf.data.with_global(files, tmp_path / "3.npz")
    assert torch.equal(given.shared.x, there.shared.x)
    assert torch.equal(given.shared.y, there.shared.y)
    run = trained(given, pf.FedAvg(lr=0.1))
    with torch.no_grad():
        right = run.model(0)(torch.as_tensor(rows[0])).argmax(1).numpy() + 1 == rows[1]
    assert run.final["global"]["accuracy"] == pytest.approx([right.mean()] * 3)
    usual = [1 + given.train.client(i)[1].bincount().argmax().item() for i in range(3)]
    commonest = trained(given, pf.yardsticks.Commonest()).final["global"]["accuracy"]
    assert commonest == pytest.approx([(rows[1] == label).mean() for label in usual])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.drop(columns="gaps"), "no column 'gaps'"),
        (lambda t: t.assign(y="perhaps"), "found 'perhaps', expected one of no, yes"),
        (lambda t: t.assign(x="high"), "found 'high', expected a number"),
        (lambda t: t.iloc[:0], "a header and no rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused_in_one_line(folder, change, says):
    fed = pf.data.load(folder / "sites", target="y").partition(seed=0)
    with pytest.raises(DataError, match=says) as e:
        pf.data.with_global(fed, change(ROWS))
    assert "\n" not in str(e.value)
    own = pf.data.load(folder / "sites", target="y", standardise="client").partition(seed=0)
    with pytest.raises(ConfigError, match="standardise = client"):
        pf.data.with_global(own, ROWS)
    arrays = pf.Federation.from_arrays([(np.ones((4, 2)), [0, 1, 0, 1])])
    for rows, words in (((np.ones((2, 3)), [0, 1]), "found inputs of shape"), ((np.ones((2, 2)), [0, 2]), "label 2")):
        with pytest.raises(DataError, match=words):
            pf.data.with_global(arrays, rows)


def test_the_answer_and_the_choice_are_those_without_it_and_the_table_has_its_interval(folder):
    plain = pf.data.load(folder / "sites", target="y").partition(seed=0)
    both = pf.data.with_global(plain, ROWS)
    model = torch.nn.Linear(*plain.input_shape, 2)
    ranked = {}
    for name, fed in (("plain", plain), ("both", both)):
        compared = pf.compare(model, fed, METHODS[::2], seeds=3, rounds=2, out=folder / name, report=False)
        study = read([folder / name])
        ranked[name] = (study.verdicts.ranked, answer(study))
    assert ranked["plain"] == ranked["both"]
    shown = compare_table(study)
    at = shown.headers.index("global file")
    assert "over seeds" in " ".join(shown.notes)
    for label, row in zip(study.verdicts.ranked, shown.rows, strict=True):
        values = [r.clients.global_accuracy.mean() for r in study.of(label)]
        half = 4.302653 * np.std(values, ddof=1) / 3**0.5  # Student's with two degrees of freedom
        assert row[at].values["global_mean"] == pytest.approx(np.mean(values))
        assert row[at].values["global_low"] == pytest.approx(max(0, np.mean(values) - half), abs=1e-6)
        assert compared.table.set_index("label").global_accuracy[label] == pytest.approx(np.mean(values))


def test_a_command_takes_the_file_and_names_it_in_a_refusal(folder, cli):
    run = ("run", "--data", "./sites", "--target", "y", "--rounds", "1", "--seeds", "1", "--algorithm", "fedavg")
    said = cli(*run, "--global-file", "all.csv", "--out", "both")
    assert "global" in said.out
    scores = pd.read_csv("both/clients.csv").global_accuracy
    assert scores.nunique() == 1
    ROWS.drop(columns="c").to_csv("less.csv", index=False)
    for file, words in (("none.csv", "none.csv: cannot be read (No such file"), ("less.csv", "no column 'c'")):
        said = cli(*run, "--global-file", file, "--out", "x")
        said.line(1)
        assert words in said.err
