"""A run in a notebook: it shows its own numbers, `fit` shows its progress, and nowhere else."""

import re
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed import report
from polyfed.metrics.scores import RMSE
from polyfed.report.notebook import sentence
from polyfed.runs.watching import Line, Progress
from polyfed.studies import parallel

NAMES = ("<b>oslo</b>", "bern", "rome")


def train(out=None, rounds=5, **settings):
    rng = np.random.default_rng(0)
    draw = [(rng.normal(size=(20, 3)), rng.integers(0, 2, 20)) for _ in NAMES]
    fed = pf.Federation.from_arrays(draw, names=NAMES, classes=2, test_fraction=0.25)
    torch.manual_seed(0)
    return pf.fit(torch.nn.Linear(3, 2), fed, pf.Ditto(0.1), rounds=rounds, out=out, **settings)


@pytest.fixture
def ipython(monkeypatch):
    """As in a cell of a notebook."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: object()))


def test_a_run_shows_its_mean_worst_client_and_history(tmp_path):
    run = train(tmp_path)
    shown = run._repr_html_()
    tree = ElementTree.fromstring(shown)
    values, who = run.final["test"]["accuracy"], run.final["test"]["accuracy"].argmin()
    for value in (values.mean(), values[who]):
        assert f"{100 * value:.1f} %" in repr(run)
    assert f"({NAMES[who]})" in repr(run)
    assert repr(run).startswith("ditto, 3 clients, finished after 5 rounds: test accuracy ")
    cells = ["".join(cell.itertext()) for cell in tree.iter("td")]
    assert f"{100 * values.mean():.1f}" in cells
    assert any(cell.endswith(f"({NAMES[who]})") for cell in cells)
    assert len(list(tree.iter("svg"))) + len(list(tree.iter("{http://www.w3.org/2000/svg}svg"))) == 1
    assert set(re.findall(r"var\((--\w+)\)", shown)) <= set(re.findall(r"(--\w+):", shown))  # no colour is undefined
    opened = pf.Run.open(tmp_path)
    assert repr(opened) == repr(run)
    assert opened._repr_html_() == shown


def test_a_federation_and_a_comparison_show_themselves_in_a_line_and_as_a_table(tmp_path):
    """What a notebook's last line prints: no tensor."""
    rng = np.random.default_rng(0)
    draw = [(rng.normal(size=(20, 3)), rng.integers(0, 2, 20)) for _ in range(30)]
    fed = pf.Federation.from_arrays(draw, names=["<b>oslo</b>", *map(str, range(29))], classes=2, test_fraction=0.25)
    line = "<Federation of 30 clients (<b>oslo</b>, 0, 1, 2, 3 and 25 more): 450 training, 150 test"
    assert repr(fed).startswith(line)
    shown = ElementTree.fromstring(fed._repr_html_())
    cells = ["".join(cell.itertext()) for cell in shown.iter("td")]
    assert cells[:4] == [NAMES[0], "15", "0", "5"]
    assert len(list(shown.iter("tr"))) < 25
    methods, how = [pf.Local(0.1), pf.FedAvg(0.1)], {"rounds": 2, "seeds": 2, "out": tmp_path / "c"}
    found = pf.compare(torch.nn.Linear(3, 2), fed.reorder([0, 1]), methods, **how)
    assert repr(found) == "<Comparison of local, fedavg: 4 runs, finished>"
    shown = found._repr_html_()
    rows = [[cell.text for cell in row] for row in ElementTree.fromstring(shown).iter("tr")]
    assert [row[0] for row in rows] == ["label", "local", "fedavg"]
    assert report.answer(report.read(tmp_path / "c"))[:40] in shown


def test_a_run_without_rounds_or_test_samples_shows_itself_too():
    run = train(rounds=0)
    assert "svg" not in run._repr_html_()
    fed = pf.Federation.from_arrays([(np.eye(4), np.arange(4.0))], test_fraction=0.0)
    torch.manual_seed(0)
    run = pf.fit(torch.nn.Linear(4, 1).double(), fed, pf.FedAvg(0.1), rounds=2, loss="mse")
    assert "train RMSE" not in repr(run)
    assert "held out" in repr(run)
    ElementTree.fromstring(run._repr_html_())


def test_a_lower_rmse_is_better():
    final = {"test": {"rmse": np.array([1.0, np.nan, 3.0])}}
    assert sentence("x", "finished", 1, NAMES, final, RMSE).endswith("test RMSE 2.000, worst 3.000 (rome)")


def test_fit_shows_its_progress_in_a_notebook_alone(ipython, capsys, monkeypatch):
    run = train()
    last = capsys.readouterr().out
    assert last.count("\n") == 1
    accuracy = run.history[run.history["split"] == "test"]["accuracy"].iloc[-1]
    bar = "█" * 20
    assert last.split("\r")[-1].split() == ["ditto:", bar, "round", "5/5", "test", "accuracy", f"{accuracy:.4g}"]
    train(callbacks=[lambda step: None])  # somebody watches already
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    train()
    monkeypatch.delitem(sys.modules, "IPython")
    train()
    assert capsys.readouterr().out == ""


def test_the_bar_says_how_much_is_done_and_how_long_the_rest_takes(capsys, monkeypatch):
    run, now = train(rounds=1), iter([0.0, 10.0, 40.0])
    monkeypatch.setattr("polyfed.runs.watching.time.monotonic", lambda: next(now))
    line = Line()
    for t in (0, 1, 4):  # ten seconds a round
        line(Progress(t, 4, [], run))
    shown = [part.split() for part in capsys.readouterr().out.split("\r")[1:]]
    assert [part[1] for part in shown] == ["█" * 5 + "░" * 15, "█" * 20]
    assert shown[0][2:] == ["round", "1/4", "30", "s", "left"]
    assert shown[1][2:] == ["round", "4/4"]


def test_runs_side_by_side_do_not_write_over_each_other(ipython, capfd):
    """A comparison's runs are processes of their own."""
    found = dict(parallel.side_by_side([lambda: train().rounds, lambda: train(rounds=3).rounds], 2))
    assert found == {0: 5, 1: 3}
    assert capfd.readouterr().out == ""
