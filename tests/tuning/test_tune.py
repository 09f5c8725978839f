"""Tuning by validation: planted clusters found, the path's bookkeeping, resuming."""

import dataclasses
import signal

import numpy as np
import pytest
import torch
from problems import LeastSquares
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.base.errors import ConfigError, RunError
from polyfed.compute import evaluation
from polyfed.runs.folder import RunFolder
from polyfed_tuning.grids import GRIDS
from polyfed_tuning.tune import Watch, _Leg, tune

GRID = [0.0, 2.0, 4.0, 7.0, 200.0]
SETTINGS = {"local_steps": 5, "batch_size": None, "loss": "mse", "check_every": 10, "workers": 1}


def planted(seed=0, noise=1.0, test=None, second=(-1.0, -1, 0, 1)):
    """Few noisy samples, two true models at distance 32: alone overfits, one model is wrong, validation can tell."""
    rng = np.random.default_rng(seed)
    true = 10 * np.array([[1.0, 1, 1, 0], second])
    groups = np.repeat([0, 1], 5)

    def draw(i, n):
        x = rng.normal(size=(n, 4))
        return x, x @ true[groups[i]] + noise * rng.normal(size=n)

    train, validation = [draw(i, 10) for i in range(10)], [draw(i, 60) for i in range(10)]
    test = [draw(i, 200) for i in range(10)] if test is None else test
    return pf.Federation.from_arrays(train, test=test, validation=validation, clusters=groups)


def model():
    linear = torch.nn.Linear(4, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(linear.weight)
    return linear


@pytest.fixture(scope="module")
def found():
    return tune(model(), planted(), pf.FPFC(0.1), grid=GRID, rounds=150, stop_at_drop=False, train_on=100, **SETTINGS)


def test_the_table_holds_both_regimes_and_one_winner(found):
    """The planted clusters are found by validation, and better than alone."""
    t, fed = found.table, found.run.federation
    assert adjusted_rand_score(fed.clusters, found.run.clusters) == found.best["ari"] == 1
    assert found.best["lam"] == found.run.trained.algorithm.lam
    local = pf.fit(model(), fed, pf.Local(0.1), rounds=50, local_steps=5, batch_size=None, loss="mse")
    assert found.run.clients["test_rmse"].mean() < local.clients["test_rmse"].mean()
    assert (t["regime"].tolist(), t["lam"].tolist()) == (["warm"] * 5 + ["cold"] * 5, GRID * 2)
    assert t["best"].sum() == 1
    assert t.loc[t["best"], "validation"].item() == t["validation"].min()  # an error: lower is better
    assert t.loc[[0, 5], "clusters"].tolist() == [10, 10]
    assert set(t["ended"]) <= {"tolerance", "rounds"}
    p = 4
    assert (t["bytes"] == 2 * 10 * p * 8 * t["rounds"]).all()
    assert found.costs["cold"]["bytes"] == t[t["regime"] == "cold"]["bytes"].sum()


def test_the_first_leg_of_both_regimes_is_trained_once(found):
    warm, cold = (found.table[found.table["regime"] == r].iloc[0].drop("regime") for r in ("warm", "cold"))
    assert warm.drop("best").equals(cold.drop("best"))


def test_the_chosen_model_is_trained_on_from_its_own_leg(found):
    """The final run counts its rounds on from those of the path up to the chosen lam, and stops when it has settled."""
    t, best = found.table, found.best
    path = t[(t["regime"] == best["regime"]) & (t["lam"] <= best["lam"])]
    before = path["rounds"].sum() if best["regime"] == "warm" else best["rounds"]
    assert found.run.settings.start.rounds == before
    assert before < found.run.trained.t <= before + 100


def test_a_path_is_the_chain_of_runs_it_stands_for():
    """Two values of lam by hand, w and v kept: the same models, bit for bit."""
    fed = planted()
    result = tune(
        model(), fed, pf.FPFC(0.1), regime="warm", grid=[0.5, 1.0], rounds=20, tolerance=0.0, train_on=10,
        stop_at_drop=False, extend=0, **SETTINGS,
    )  # fmt: skip
    by_hand, settings = None, {k: v for k, v in SETTINGS.items() if k != "check_every"}
    lams = [0.5, 1.0] if result.best["lam"] == 1.0 else [0.5]
    for lam, rounds in [*((lam, 20) for lam in lams), (lams[-1], 10)]:
        by_hand = pf.fit(model(), fed, pf.FPFC(0.1, lam=lam), rounds=rounds, start=by_hand, **settings)
    assert all(torch.equal(v, result.run.server[k]) for k, v in by_hand.server.items())


def test_a_drop_ends_the_warm_path_and_the_best_is_returned_to():
    """lam = 200 merges the two groups, which validation sees at once: nothing is tried after it."""
    result = tune(
        model(), planted(), pf.FPFC(0.1), regime="warm", grid=[0.0, 7.0, 200.0, 300.0], rounds=200, train_on=0,
        **SETTINGS,
    )  # fmt: skip
    assert (result.table["lam"].tolist(), result.best["lam"]) == ([0.0, 7.0, 200.0], 7.0)
    assert result.run is None


def test_a_path_goes_on_beyond_its_grid_while_the_last_is_the_best():
    """From 14 on the penalty reaches across to the other group (a lam = 52 against 32), which is worse than 7."""
    settings = {"regime": "warm", "grid": [0.0, 7.0], "rounds": 200, "train_on": 0, **SETTINGS}
    result = tune(model(), planted(), pf.FPFC(0.1), extend=5, **settings)
    assert (result.table["lam"].tolist(), result.best["lam"]) == ([0.0, 7.0, 14.0], 7.0)


def test_a_cold_grid_goes_on_beyond_either_end_while_that_is_the_best():
    """One true model wants a harder pull than the grid has, two a softer; where it may not go on, the edge is said."""
    settings = {"regime": "cold", "rounds": 60, "train_on": 0, "tolerance": 0.0, **SETTINGS}
    method = pf.FPFC(0.1, penalty="l1")
    up = tune(model(), planted(noise=20.0, second=(1.0, 1, 1, 0)), method, grid=[1.0, 4.0, 16.0], **settings)
    assert 16.0 < up.best["lam"] < max(up.table["lam"])
    assert up.edges == 0
    down = tune(model(), planted(noise=0.1), method, grid=[0.3, 0.4, 0.5], extend=8, **settings)
    assert min(down.table["lam"]) < down.best["lam"] < 0.3
    assert down.edges == 0
    cut = tune(model(), planted(noise=0.1), method, grid=[0.3, 0.4, 0.5], extend=0, **settings)
    assert (len(cut.rows), cut.edges) == (3, 1)


def test_test_data_are_not_looked_at_before_lambda_is_chosen(monkeypatch):
    """Test samples for one common model change nothing; the search computes metrics on training and validation ones."""
    honest = planted()
    common = honest.validation.x.numpy()[:10]
    misleading = planted(test=[(common, 1e6 * np.ones(10))] * 10)
    searching, seen = [True], []
    metrics = evaluation.metrics

    def watched(task, w, split, clients):
        if searching[0]:
            seen.append(int(split.counts[0]))
        return metrics(task, w, split, clients)

    class Search(Watch):
        def begin(self, regime, value, done, total):
            searching[0] = regime != "final"

    monkeypatch.setattr(evaluation, "metrics", watched)
    settings = {"grid": [0.0, 7.0, 200.0], "rounds": 50, "train_on": 10, "watch": Search(), **SETTINGS}
    a = tune(model(), honest, pf.FPFC(0.1), **settings)
    searching[0] = True
    b = tune(model(), misleading, pf.FPFC(0.1), **settings)
    assert set(seen) == {10, 60}
    assert a.table.drop(columns="seconds").equals(b.table.drop(columns="seconds"))
    assert torch.equal(a.run.personal, b.run.personal)
    assert "test" in a.run.final


def test_without_validation_samples_some_are_held_out_of_training():
    fed = dataclasses.replace(planted(), validation=None)
    result = tune(model(), fed, pf.FPFC(0.1), regime="cold", grid=[1.0], rounds=10, train_on=10, **SETTINGS)
    assert (result.run.federation.train.counts == 8).all()
    assert (result.run.federation.validation.counts == 2).all()


def test_a_value_that_diverges_does_not_stop_separate_tuning():
    result = tune(
        model(), planted(), pf.Ditto(0.1), regime="cold", grid=[0.1, 1e9], extend=0, rounds=80, train_on=0,
        dtype=torch.float32, **SETTINGS,
    )  # fmt: skip
    assert (result.table["ended"].tolist()[1], result.best["lam"]) == ("diverged", 0.1)


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("algorithm: fedavg has no setting lam to tune", {"algorithm": pf.FedAvg(0.1)}),
        (r"regime: found 'hot' .*, expected warm, cold, both or none", {"regime": "hot"}),
        ("grid: found .* for warm, expected rising values", {"grid": [1.0, 0.5]}),
        ("algorithm.lam of FPFC: found 1e-05", {"grid": [0.0, 1e-5]}),
        ("check_every: found 0, expected an integer of at least 1", {"check_every": 0}),
        ("evaluate_every: set by tune", {"evaluate_every": 3}),
        (r"algorithm: fpfc has no setting lamb to tune \(did you mean 'lam'", {"setting": "lamb"}),
        ("setting: penalty of fpfc is not a number", {"setting": "penalty"}),
        ("grid: nu of fpfc has no default for a cold start; give one", {"setting": "nu"}),
        (
            r"grid: found \[2, 2.5\] for cold, expected integers",
            {"algorithm": pf.IFCA(), "setting": "k", "grid": [2, 2.5]},
        ),
        (
            "clients: found 10, expected at least 11 with IFCA",
            {"algorithm": pf.IFCA(), "setting": "k", "grid": [2, 11]},
        ),
        ("resume: needs the folder", {"resume": True}),
    ],
)
def test_wrong_settings_are_refused_before_training(message, settings, monkeypatch):
    monkeypatch.setattr("polyfed_tuning.tune.fit", lambda *a, **k: pytest.fail("trained"))
    algorithm = settings.pop("algorithm", None) if "algorithm" in settings else pf.FPFC(0.1)
    with pytest.raises(ConfigError, match=message):
        tune(model(), planted(), algorithm, **(SETTINGS | settings))


# other settings


def test_the_quantile_of_fedacs_is_found_by_validation():
    """Two groups at 48 degrees: quantiles about 1/2 give them, a lower one mixes them, a higher one trains alone."""
    fed = planted(noise=4.0, second=(1.0, 1, 0, 1))
    settings = {"grid": [0.1, 0.5, 0.98], "rounds": 60, "train_on": 20, **SETTINGS}
    result = tune(model(), fed, pf.FedACS(0.1), setting="quantile", **settings)
    assert result.table.columns[1] == "quantile"
    assert result.table["regime"].tolist() == ["cold"] * 3
    assert (result.table["clusters"].tolist(), result.best["quantile"]) == ([1, 2, 10], 0.5)
    assert (result.best["ari"], result.run.trained.algorithm.quantile) == (1, 0.5)
    assert result.figure().axes[-1].get_xlabel() == "quantile"


def test_a_default_grid_is_one_of_valid_values():
    for (name, setting), grids in GRIDS.items():
        for values in grids.values():
            assert list(values) == sorted(set(values))
            for value in values:
                pf.core.algorithm.make(name, **{setting: value})


def test_an_integer_stays_one():
    """The number of IFCA's clusters: two are planted, and one is worse for everybody."""
    settings = {"grid": [1, 2], "extend": 0, "rounds": 30, "train_on": 0, **SETTINGS}
    result = tune(model(), planted(), pf.IFCA(0.1, init_scale=1.0), setting="k", **settings)
    assert [type(k) for k in result.table["k"].tolist()] == [int, int]
    assert result.best["k"] == 2


def test_a_search_ends_before_a_value_that_these_clients_do_not_allow():
    """Ten clients with a true model each: the most models are best, and there cannot be more."""
    x = np.random.default_rng(0).normal(size=(10, 20, 4))
    fed = pf.Federation.from_arrays(*[[(a, 10 * a @ np.cos(i + np.arange(4))) for i, a in enumerate(x)]] * 3)
    settings = {"grid": [2, 10], "rounds": 30, "train_on": 0, **SETTINGS}
    result = tune(model(), fed, pf.CLoVE(0.1, init_scale=1.0), setting="k", **settings)
    assert (result.table["k"].tolist(), result.best["k"]) == ([2, 10], 10)


# the drop that ends a warm path


def leg(scores):
    return _Leg({}, np.array(scores), None)


@pytest.mark.parametrize(
    ("scores", "drops"),
    [
        ([0.9, 0.8, 0.7, 0.8], False),  # the best itself
        ([0.8, 0.7, 0.6, 0.7], True),  # 0.1 worse for everybody: no noise at all in the differences
        ([0.9, 0.8, 0.7, 0.6], False),  # mean 0.05, standard deviation 0.1, standard error 0.05
        ([0.6, 0.8, 0.4, 0.8], False),  # mean 0.15, standard error 0.087: between one and two
        ([0.85, 0.7, 0.6, 0.7], True),  # mean 0.0875, standard error 0.0125
        ([0.9, 0.8, 0.7, 0.0], False),  # one client alone, however large its loss: 0.2 against 0.2
        ([0.9, 0.8, 0.7, np.nan], False),  # a client without validation samples does not count
    ],
)
def test_two_standard_errors_of_the_paired_differences(scores, drops):
    assert leg(scores).drops(leg([0.9, 0.8, 0.7, 0.8])) == drops


# interrupted and resumed


class Stop(Watch):
    """Ends the search in the round after `rounds` of all its legs, as Ctrl-C does, or as a kill."""

    def __init__(self, rounds, kill=False):
        self.left, self.kill = rounds, kill

    def callbacks(self):
        return (self.count,)

    def count(self, progress):
        self.left -= 1
        if self.left == 0:
            if self.kill:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)


SEARCH = {"grid": [0.0, 7.0], "extend": 0, "rounds": 20, "train_on": 15, **SETTINGS, "check_every": 5}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return tune(model(), planted(), pf.FPFC(0.1), out=tmp_path_factory.mktemp("undisturbed") / "a", **SEARCH)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("after", "kill"), [(1, False), (28, True), (50, False), (70, True)])
def test_a_resumed_search_is_the_undisturbed_one(after, kill, undisturbed, tmp_path):
    """In the first leg, in the second, in the other regime, and in the final run: the same table, the same bits."""
    stop, settings = Stop(after, kill), {"out": tmp_path / "a", "checkpoint_every": 5, **SEARCH}
    if kill:
        with pytest.raises(KeyboardInterrupt):
            tune(model(), planted(), pf.FPFC(0.1), watch=stop, **settings)
    else:
        assert tune(model(), planted(), pf.FPFC(0.1), watch=stop, **settings).status == "interrupted"
    assert (tmp_path / "a/legs").is_dir()
    with pytest.raises(RunError, match="holds"):
        tune(model(), planted(), pf.FPFC(0.1), **settings)
    trained = Stop(10**6)
    result = tune(model(), planted(), pf.FPFC(0.1), resume=True, watch=trained, **settings)
    assert result.status == "finished"
    assert 10**6 - trained.left <= undisturbed_rounds(undisturbed) - after + 10  # looks at leg starts count too
    assert result.table.drop(columns="seconds").equals(undisturbed.table.drop(columns="seconds"))
    assert all(torch.equal(v, result.run.server[k]) for k, v in undisturbed.run.server.items())
    assert not (tmp_path / "a/legs").exists()
    again = tune(model(), planted(), pf.FPFC(0.1), resume=True, watch=Stop(1), **settings)  # nothing is trained
    assert again.table.drop(columns="seconds").equals(undisturbed.table.drop(columns="seconds"))


def undisturbed_rounds(result):
    """Calls of a callback: every round, and one look before each leg."""
    legs = result.table.drop_duplicates(["lam", "rounds", "validation"])
    return int(legs["rounds"].sum()) + len(legs) + 16


def test_regimes_are_compared_after_equal_training():
    """A warm path of four legs has four times the rounds of a cold leg; its rival is trained on to as many first."""
    problem = LeastSquares(seed=0, clients=6, dim=4)
    fed = problem.federation.with_validation(0.25, 0)
    tuned = tune(
        problem.model(), fed, pf.FPFC(lr=0.01), grid=(0.0, 0.1, 0.2, 0.3), rounds=5, check_every=5, extend=0,
        train_on=0, stop_at_drop=False, loss="mse", local_steps=1, batch_size=None,
    )  # fmt: skip
    table = tuned.table
    levelled = table[table["ended"] == "levelled"]
    cold = table[(table["regime"] == "cold") & (table["ended"] != "levelled")]
    warm_rounds = 5 * (1 + int(table[table["regime"] == "warm"]["validation"].argmin()))
    assert levelled["regime"].tolist() == ["cold"]
    assert int(levelled["rounds"].iloc[0]) == warm_rounds - 5
    assert levelled["lam"].iloc[0] == cold.loc[cold["validation"].idxmin(), "lam"]
    alone = pf.fit(
        problem.model(), fed, pf.FPFC(lr=0.01, lam=levelled["lam"].iloc[0]),
        rounds=warm_rounds, loss="mse", local_steps=1, batch_size=None, evaluate_every=0,
    )  # fmt: skip
    assert levelled["validation"].iloc[0] == pytest.approx(np.nanmean(alone.final["validation"]["rmse"]), rel=1e-9)


def finishing(k):
    """`RunFolder.finish` that is killed in its k-th call, the state being saved and the results not."""
    finish, left = RunFolder.finish, [k]

    def wrapped(self, run):
        left[0] -= 1
        if left[0] == 0:
            self.checkpoint(run, force=True)
            raise KeyboardInterrupt
        finish(self, run)

    return wrapped


SETTLING = SEARCH | {"regime": "cold", "grid": [0.0, 0.5, 7.0], "tolerance": 10.0, "patience": 1}


@pytest.fixture(scope="module")
def settled():
    return tune(model(), planted(), pf.FPFC(0.1), **SETTLING)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("k", range(1, 5))
def test_a_leg_that_had_settled_is_not_trained_on_after_a_kill(k, settled, monkeypatch, tmp_path):
    """Killed at the end of each leg, and of the final run: the same table and the same model."""
    assert set(settled.table["ended"]) == {"tolerance"}
    with monkeypatch.context() as m:
        m.setattr(RunFolder, "finish", finishing(k))
        with pytest.raises(KeyboardInterrupt):
            tune(model(), planted(), pf.FPFC(0.1), out=tmp_path, **SETTLING)
    result = tune(model(), planted(), pf.FPFC(0.1), out=tmp_path, resume=True, **SETTLING)
    assert result.table.drop(columns="seconds").equals(settled.table.drop(columns="seconds"))
    assert result.run.trained.t == settled.run.trained.t
    assert all(torch.equal(v, result.run.server[name]) for name, v in settled.run.server.items())
