"""pf.coalitions: a planted truth is found, a coalition is the federation that never had anybody else, and a folder that
was interrupted goes on."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr, ttest_ind
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.base.errors import ConfigError, RunError
from polyfed.data.validation import LEAKED
from polyfed.report.intervals import Spread
from polyfed.report.pairs import Evidence
from polyfed_games import values as game
from polyfed_games.found import Found
from polyfed_games.gains import _widened, gains_of
from polyfed_games.show import details

NAMES = ("a1", "a2", "b1", "b2", "liar")
GROUPS = {"a1": "a", "a2": "a", "b1": "b", "b2": "b", "liar": "liar"}


def planted(train=14, test=150):
    """Two sites with the rule x_0 > 0, two with x_1 > 0, and one whose labels contradict both."""
    rng = np.random.default_rng(1)
    rules = [*np.eye(6)[[0, 0, 1, 1]].tolist(), [-1, -1, 0, 0, 0, 0]]

    def draw(rule, n):
        x = rng.normal(size=(n, 6)).astype(np.float32)
        return x, (x @ np.array(rule) > 0).astype(int)

    pairs = [(draw(r, train), draw(r, test)) for r in rules]
    return pf.Federation.from_arrays([a for a, _ in pairs], [b for _, b in pairs], names=NAMES, classes=2)


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(6, 2)


SETTINGS = {"rounds": 8, "local_steps": 4, "batch_size": None, "seeds": 1}


OTHERS = {"fpfc": pf.FPFC(0.3, lam=0.5), "ifca": pf.IFCA(0.3, k=3), "fedacs": pf.FedACS(0.3, quantile=0.25)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    return pf.coalitions(linear(), planted(), pf.FedAvg(0.3), out=folder, against=OTHERS, **SETTINGS)


def test_means_are_over_clients_that_test_ten_samples(found):
    read = Found.read(found.folder)
    few = gains_of(replace(read, tested=[*read.tested[:-1], 9]), pf.Coalitions)
    together = few.partitions.set_index("partition").loc["together"]
    assert together["gain"] == pytest.approx(few.clients.all_gain[:4].mean())
    assert few.clients.tested.tolist() == [150, 150, 150, 150, 9]
    assert "means leave out liar: fewer than 10" in " ".join(details(few))
    assert "leave out" not in " ".join(details(found))


def test_the_planted_truth_is_found(found):
    """Who shares a rule helps, who does not harms, the liar harms everybody, and the groups hold."""
    m = found.matrix
    for i in NAMES:
        for j in set(NAMES) - {i}:
            assert (m.loc[i, j] > 0) == (GROUPS[i] == GROUPS[j]), (i, j)
    assert (found.help[found.help["from"] == "liar"].shapley < 0).all()
    best = found.partitions.iloc[0]
    assert best["coalitions"] == "a1 + a2 | b1 + b2 | liar"
    assert best["individual"]
    assert best["core"]
    together = found.partitions.set_index("partition").loc["together"]
    assert not together["individual"]
    assert not together["nash"]


def test_the_values_of_a_client_add_up_to_its_gain_with_all_and_are_those_of_runs(found):
    gain = found.clients.set_index("client")["all_gain"]
    assert np.allclose(found.matrix.sum(axis=1), gain, atol=1e-12)
    whole = found.values[found.values["size"] == 5].set_index("client")
    assert np.allclose(gain, whole["gain"])
    for row in found.values.to_dict("records"):
        table = pd.read_csv(found.folder / row["run"] / "clients.csv").set_index("client")
        assert row["test"] == pytest.approx(table.loc[row["client"], "test_accuracy"])
        assert list(table.index) == [n for n in NAMES if n in row["coalition"].split(" + ")]
        config = (found.folder / row["run"] / "config.toml").read_text()
        assert f'name = "{"local" if row["size"] == 1 else "fedavg"}"' in config
    assert len(found.values) == sum(c.bit_count() for c in range(1, 32))
    assert found.trainings == 31 + 3


def test_leaving_one_out_and_what_is_chosen_are_read_off_the_scores(found):
    by = found.values.set_index(["coalition", "client"])
    everyone = " + ".join(NAMES)
    for row in found.help.to_dict("records"):
        rest = " + ".join(n for n in NAMES if n != row["from"])
        change = by.loc[(everyone, row["client"]), "test"] - by.loc[(rest, row["client"]), "test"]
        assert row["leave_one_out"] == pytest.approx(change)
        assert row["low"] <= row["shapley"] <= row["high"]
    for row in found.clients.to_dict("records"):
        mine = found.values[found.values.client == row["client"]]
        assert by.loc[(row["chosen"], row["client"]), "validation"] == mine.validation.max()
        assert row["after_choice"] == pytest.approx(by.loc[(row["chosen"], row["client"]), "test"])
        assert row["hindsight_gain"] == pytest.approx(mine.gain.max())


def test_a_coalition_is_the_federation_that_never_had_the_others(found, tmp_path):
    two = planted().with_validation(0.2, 0).reorder([0, 2])
    how = {k: v for k, v in SETTINGS.items() if k != "seeds"}
    pf.fit(linear(), two, pf.FedAvg(0.3), evaluate_every=0, out=tmp_path, **how)
    digest = [
        json.loads((f / "summary.json").read_text())["digest"] for f in (tmp_path, found.folder / "runs/a1+b1-seed0")
    ]
    assert digest[0] == digest[1]


def test_methods_are_held_against_the_coalitions(found):
    table = found.agreement.set_index("method")
    assert list(table.index) == ["fpfc", "ifca", "fedacs"]
    for label in ("fpfc", "ifca"):
        report = json.loads((found.folder / f"runs/{label}-seed0/report.json").read_text())
        assert table.loc[label, "rand_index"] == pytest.approx(adjusted_rand_score([0, 0, 1, 1, 2], report["clusters"]))
    mixing = json.loads((found.folder / "runs/fedacs-seed0/report.json").read_text())["mixing"]
    pairs = [(mixing[i][j], found.matrix.iloc[i, j]) for i in range(5) for j in range(5) if i != j]
    ranks = spearmanr(*zip(*pairs, strict=True)).statistic
    assert table.loc["fedacs", "rank_correlation"] == pytest.approx(ranks)


def test_what_is_missing_in_a_folder_is_trained_and_nothing_else(found, tmp_path):
    shutil.copytree(found.folder, tmp_path / "copy")
    for name in ("a1+b1", "a2+liar"):
        shutil.rmtree(tmp_path / f"copy/runs/{name}-seed0")
    with pytest.raises(RunError, match="polyfed resume"):
        pf.Coalitions.open(tmp_path / "copy")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "copy/runs").rglob("*.csv")}
    given = {"out": tmp_path / "copy", "against": OTHERS, **SETTINGS}
    again = pf.coalitions(linear(), planted(), pf.FedAvg(0.3), resume=True, **given)
    pd.testing.assert_frame_equal(again.help, found.help)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    with pytest.raises(RunError, match="already holds coalitions"):
        pf.coalitions(linear(), planted(), pf.FedAvg(0.3), **given)
    with pytest.raises(RunError, match="its samples: found 2, expected None"):
        pf.coalitions(linear(), planted(), pf.FedAvg(0.3), resume=True, samples=2, **given)


def test_sampled_coalitions_say_how_sure_they_are(found):
    """The same federation by sampling: near the exact values by their own standard errors, which are stated."""
    some = pf.coalitions(linear(), planted(), pf.FedAvg(0.3), samples=4, **SETTINGS)
    assert some.folder is None
    assert some.sampled == 4
    orders = game.walks(5, 20, 0)
    for row, exact in zip(some.help.to_dict("records"), found.help.shapley, strict=True):
        i, j = NAMES.index(row["client"]), NAMES.index(row["from"])
        assert row["drawn"] == len(game.joinings(orders, i, j))
        known = row["drawn"] > 2 and row["error"] > 0
        assert np.isfinite(row["low"]) == known
        assert known or not row["clear"]
        if row["drawn"] > 2:
            assert abs(row["shapley"] - exact) < 4 * row["error"] + 0.05
            assert not known or row["low"] <= row["shapley"] <= row["high"]
    assert {2} < set(some.help.drawn), "pairs with too few joinings are among them"
    assert not np.allclose(some.matrix.sum(axis=1), some.clients.set_index("client")["all_gain"], atol=1e-3)
    adds_up = "A row adds up to the client's gain with all together"
    assert [any(adds_up in note for note in c.tables()[0].notes) for c in (found, some)] == [True, False]
    best = some.partitions.iloc[0]
    assert best["individual"]
    assert pd.isna(best["core"]) or isinstance(best["core"], bool)


@pytest.mark.parametrize("drawn", [3, 5, 10])
def test_two_sources_of_chance_are_judged_by_welchs_test(drawn):
    """Joinings (drawn - 1 degrees of freedom) and patients (19): as the difference of two means, of unlike variance."""
    rng = np.random.default_rng(drawn)
    changes, patients = 0.02 + 0.02 * rng.normal(size=drawn), rng.normal(size=20)
    patients = 0.01 * (patients - patients.mean())
    evidence = Evidence(Spread(np.array([changes.mean()]), patients.var(ddof=1) / 20, 19.0), 0.3, 100, 1.0, 1.0)
    found, welch = (
        _widened(evidence, game.standard_error(changes), drawn),
        ttest_ind(changes, patients, equal_var=False),
    )
    assert found.p == pytest.approx(welch.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx(tuple(welch.confidence_interval()), rel=1e-9)


def test_what_does_not_show_its_own_chance_has_no_interval_and_is_never_clear():
    def of(changes, sampling: float | None = 1e-6):
        changes = np.array(changes)
        evidence = Evidence(Spread(changes.mean(keepdims=True), sampling), 0.3, 100, 1.0, 1.0)
        return _widened(evidence, game.standard_error(changes), len(changes))

    assert np.isfinite(of([0.1, 0.2, 0.3]).low)
    for lacking in (of([0.1]), of([0.1, 0.2]), of([0.1] * 3), of([0.1] * 10), of([0.1, 0.2, 0.3], None)):
        assert np.isnan([lacking.low, lacking.high, lacking.p]).all()
        assert not lacking.clear
    assert of([-0.9, 0.1, 0.9]).high == 1, "no accuracy rises by more than 100 points"


def test_scores_in_the_file_are_those_of_the_runs_whichever_way_is_better(tmp_path):
    """A slope is best near 1: neither column holds its distance from there."""
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(2, 400, 6)).astype(np.float32)
    fed = pf.Federation.from_arrays([(x, (x[:, 0] + rng.normal(size=400) > 0).astype(int)) for x in xs])
    how = SETTINGS | {"metrics": ["calibration-slope"], "rounds": 2, "out": tmp_path / "c"}
    some = pf.coalitions(linear(), fed, pf.FedAvg(0.3), **how)
    table = pd.read_csv(tmp_path / "c/coalitions-values.csv")
    for row in table.to_dict("records"):
        scores = pd.read_csv(tmp_path / "c" / row["run"] / "clients.csv").set_index("client").loc[row["client"]]
        for split in ("validation", "test"):
            assert row[split] == pytest.approx(scores[f"{split}_calibration-slope"])
    for name in some.names:
        mine = some.values[some.values.client == name]
        nearest = mine.loc[(mine.validation - 1).abs().idxmin(), "coalition"]
        assert some.clients.set_index("client")["chosen"][name] == nearest


def test_samples_held_out_after_scaling_are_pointed_out(tmp_path):
    """The hospitals are scaled by training rows; where validation rows were taken out before, nothing is said."""
    data, how = pf.data.load("heart-disease"), {"rounds": 1, "seeds": 1, "batch_size": None}
    cut = {"test_fraction": 0.3, "without": ["switzerland", "va"]}
    said = []
    for fraction in (0.0, 0.2):
        fed = data.partition(validation_fraction=fraction, **cut)
        some = pf.coalitions(torch.nn.Linear(10, 2), fed, out=tmp_path / f"{fraction}", **how)
        said.append(LEAKED in some.notes)
        assert (LEAKED in (tmp_path / f"{fraction}/report.html").read_text()) == said[-1]
        assert any(LEAKED in note for note in some.tables()[1].notes) == said[-1]
    assert said == [True, False]


def test_wrong_settings_are_refused_before_anything_is_trained(tmp_path):
    for given, word in (
        ({"seeds": 0}, "seeds"), ({"samples": 0}, "samples"), ({"rond": 3}, "rond"),
        ({"attack": {"name": "sign-flip", "ratio": 0.4}}, "attack"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            pf.coalitions(linear(), planted(), **{**SETTINGS, "out": tmp_path / "x", **given})
    with pytest.raises(ConfigError, match="at least two"):
        pf.coalitions(linear(), planted().reorder([0]), **SETTINGS)
    x, y = planted().train.client(0)
    untested = pf.Federation.from_arrays([(x, y), (-x, y)], test_fraction=0.0)
    with pytest.raises(ConfigError, match="found a federation without test samples, expected some"):
        pf.coalitions(linear(), untested, **{**SETTINGS, "out": tmp_path / "x"})
    assert not (tmp_path / "x").exists()
