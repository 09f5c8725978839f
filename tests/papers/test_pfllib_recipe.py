"""PFLlib's leaderboard: its network, and how its figure is taken."""

import pandas as pd
import torch

from polyfed.data import load
from polyfed.models import build
from polyfed.runs.trainer import fit
from polyfed_papers.pfllib import methods, model
from polyfed_papers.pfllib.fashion_mnist import best
from polyfed_papers.recipes import Bench


def test_the_network_has_the_leaderboards_parameters(tmp_path):
    """A 5 x 5 convolution from i to o channels takes o (25 i + 1) numbers; 28 -> 24 -> 12 -> 8 -> 4 pixels a side."""
    net = model(Bench(tmp_path, "paper"))(0)
    layers = 32 * (25 * 1 + 1), 64 * (25 * 32 + 1), 512 * (4 * 4 * 64 + 1), 10 * (512 + 1)
    assert sum(layers) == 582_026
    assert sum(p.numel() for p in net.parameters()) == sum(layers)
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_rounds_plus_one_evaluations_the_best_of_which_counts():
    """The start is evaluated too, as by the leaderboard; seeds are kept apart."""
    data = load("heart-disease").partition(seed=0)
    run = fit(build("linear", data.input_shape, 2), data, methods("small")["FedAvg"], rounds=3)
    history = run.history[run.history["split"] == "test"]
    assert history["round"].tolist() == [0, 1, 2, 3]
    both = pd.concat([history.assign(label="FedAvg", seed=s, pooled=history["pooled"] / (1 + s)) for s in (0, 1)])
    top = max(history["pooled"])
    assert best(both, "FedAvg", [0, 1]).tolist() == [top, top / 2]
