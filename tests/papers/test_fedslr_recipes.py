"""FedSLR's recipes: every table and figure under its own number, what the figures are made of, and what decides a
claim."""

import numpy as np
import pandas as pd
import pytest
import torch

from polyfed.algorithms.fedslr import FedSLR
from polyfed.models import build
from polyfed.studies.compare import Comparison
from polyfed.studies.jobs import Done
from polyfed_papers.fedslr import last, method, stated, train
from polyfed_papers.fedslr.figures import LATENCY, PERSONAL, RATE, features, hidden, measured, seconds
from polyfed_papers.fedslr.sweeps import peak
from polyfed_papers.fedslr.table1 import PRINTED, iid_pairs
from polyfed_papers.fedslr.variants import Noted, gradient, guessed
from polyfed_papers.recipes import Bench
from polyfed_papers.recipes.recipe import metric_of
from polyfed_papers.recipes.said import ordered

HIGH, LOW = np.array([0.8, 0.9, 0.85]), np.array([0.7, 0.82, 0.76])
OPEN = HIGH + np.array([0.1, -0.1, 0.02])


@pytest.mark.parametrize(
    ("smallest", "largest", "holds"),
    [(LOW, LOW, True), (2 * HIGH, LOW, False), (OPEN, LOW, None), (OPEN, 2 * HIGH, False), (LOW, OPEN, None)],
)
def test_a_peak_is_above_both_ends(smallest, largest, holds):
    """One end above the middle refutes it, one that is not told apart leaves it open."""
    assert peak(1e-3, ordered("", HIGH, smallest), ordered("", HIGH, largest)).holds is holds


@pytest.mark.parametrize("column", [0, 2, 4])
def test_claims_of_the_iid_columns_are_true_of_the_printed_figures(column):
    """The text's claim, mixed above every other personal method, and the printed order of the common models."""
    printed = {row: values[column] for row, values in PRINTED.items()}
    found = iid_pairs(printed)
    assert all(printed[a] > printed[b] for a, b in found if None not in (printed[a], printed[b]))
    assert {b for a, b in found if a == stated.MIXED} >= set(PERSONAL) - {stated.MIXED}
    assert any(stated.GKR in pair for pair in found)


def test_what_the_last_layer_is_given():
    """Its weights times that are the model's answers, under the parameters that were asked for."""
    model, x = build("mlp", (6,), 4, 0, hidden=(5, 3)), torch.randn(7, 6)
    w = torch.randn(sum(p.numel() for p in model.parameters()))
    found, said = features(model, w, x)
    *_, weight, bias = (p.detach().numpy() for p in model.parameters())
    assert found.shape == (7, 3)
    assert np.array_equal((found @ weight.T + bias).argmax(1), said)
    assert np.array_equal(w[-4:].numpy(), bias)


def test_extractors_and_classifiers_in_four_pairs(data_dir, tmp_path):
    """Both personal is the deployed model, both global the GKR: accuracies are those of the run."""
    bench = Bench(tmp_path, seeds=1, data_dir=data_dir("fashion_mnist"), rehearse=True)
    found = train(bench, "runs", {"FedSLR": method(bench)}, rounds=2)
    of = hidden(bench, found.results[0].folder, 0, "CIFAR-10", show=True)
    mean = {pair: np.mean(values) for pair, values in of["accuracy"].items()}
    assert mean["personal, personal"] == pytest.approx(metric_of(found, "FedSLR")[0], abs=1e-6)
    assert mean["global, global"] == pytest.approx(last(found, "FedSLR")[0], abs=1e-6)
    picture = of["picture"]
    for pair, said in picture["predicted"].items():
        right = np.mean(np.array(said) == picture["labels"])
        assert right == pytest.approx(of["accuracy"][pair][picture["client"]], abs=1e-6)


def test_seconds_of_communication_are_those_of_the_bytes(tmp_path):
    """Two clients that share a medium wait for each other's bytes, not for each other's latency."""
    columns = {"exchanges": 1, "down_bytes": [100, 300, 50, 50], "up_bytes": [25, 75, 20, 30]}
    pd.DataFrame({"round": [1, 1, 2, 2], **columns}).to_csv(tmp_path / "ledger.csv")
    found = Comparison([Done("FedAvg", 0, "finished", folder=tmp_path)])
    assert seconds(found, "FedAvg")[0] == pytest.approx(8 * np.array([500, 150]) / RATE + 2 * LATENCY)


def test_messages_through_a_real_socket():
    """What arrives is what the ledger bills: SCAFFOLD's twice FedAvg's, FedSLR's less from its uplink on."""
    rows = measured(1, 0.001)
    sent = {label: row["bytes"] for label, row in rows.items()}
    assert sent["SCAFFOLD"] == pytest.approx(2 * sent["FedAvg"], abs=16)
    assert sent["FedAvg"] / 2 < sent["FedSLR, last round"] < sent["FedSLR, first round"] == sent["FedAvg"]
    assert all(0 < s for row in rows.values() for s in row["seconds"])


def test_one_step_gives_fedavgs_gradient_away_and_a_solved_problem_fedslrs(tmp_path):
    """(w - w_i) / lr is the gradient at w; gamma is that at w_i where phase I is solved; against autograd's."""
    x, y, w = torch.randn(9, 5).double(), torch.arange(9) % 3, torch.randn(18).double().requires_grad_()
    torch.nn.functional.cross_entropy(x @ w[:-3].view(3, 5).T + w[-3:], y).backward()
    assert gradient(w.detach().numpy(), x.numpy(), y.numpy()) == pytest.approx(w.grad.numpy(), abs=1e-12)
    bench = Bench(tmp_path)
    assert guessed(bench, Noted(0.1), 1, 0)["gradient"] < 1e-12
    solved = FedSLR(0.1, eta_g=0.2, lam=0.0, personal_epochs=0, form="all-duals")
    assert guessed(bench, solved, 60, 0)["gradient"] < 1e-6
