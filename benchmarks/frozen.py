"""What a frozen backbone costs where its features are kept, and where it is run again at every step: EfficientNet-Lite0
with a new head on 64 x 64 images of CIFAR-10, 20 clients of 35 samples, FedAvg. The weights are of a package.

The plain loop trains one client after another, each sample through the backbone. polyfed's run is `fit` as it is, timed
by the difference of runs of few and of many rounds on the same features. Processor time of one thread.
"""

import argparse
import copy
from collections.abc import Callable
from time import process_time
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.data import load
from polyfed.models import adapted
from polyfed.runs import trainer
from polyfed_papers.adapters import efficientnet, enlarged

CLIENTS, EACH, BATCH, RATE = 20, 35, 7, 0.05
GIVEN = {"batch_size": BATCH, "local_epochs": 1, "seed": 0, "evaluate_every": 0, "workers": 1, "device": "cpu"}


def federation(data_dir: str | None) -> pf.Federation:
    data, rng = load("cifar10", data_dir), np.random.default_rng(0)
    some = rng.permutation(len(np.asarray(data.y)))[: CLIENTS * EACH]
    x, y = enlarged(np.asarray(data.x)[some]).numpy(), np.asarray(data.y)[some]
    pairs = [(x[i::CLIENTS], y[i::CLIENTS]) for i in range(CLIENTS)]
    return pf.Federation.from_arrays(pairs, classes=10, test_fraction=0.0)


def seconds(work: Callable[[], object]) -> float:
    before = process_time()
    work()
    return process_time() - before


def by_hand(net: nn.Module, fed: pf.Federation) -> None:
    """One round of FedAvg as anybody writes it."""
    head, sums = net.get_submodule("_fc"), list[Tensor]()
    start = copy.deepcopy(head.state_dict())
    for i in range(fed.n):
        head.load_state_dict(start)
        x, y = fed.train.client(i)
        optimiser = torch.optim.SGD(head.parameters(), lr=RATE)
        for rows in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
        sums.append(nn.utils.parameters_to_vector(head.parameters()).detach() * len(x))
    nn.utils.vector_to_parameters(torch.stack(sums).sum(0) / fed.train.counts.sum(), head.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--rounds", type=int, default=400, help="of the run on kept features")
    given = parser.parse_args()
    torch.set_num_threads(1)
    fed, net, runs = federation(given.data_dir), adapted(efficientnet(10), "probe").eval(), list[pf.Run]()

    def fitted(rounds: int) -> float:
        """Seconds; the run stays, and so do its features, for the next."""
        return seconds(lambda: runs.append(pf.fit(net, fed, pf.FedAvg(lr=RATE), rounds=rounds, **GIVEN)))

    whole = fitted(2)
    few, many = fitted(2), fitted(2 + given.rounds)
    each, once = (many - few) / given.rounds, whole - few
    plain = seconds(lambda: by_hand(copy.deepcopy(net), fed))
    with patch.object(trainer, "kept", lambda task, x: None):
        fitted(2)
    on_features, through = (run.personal[0].double() for run in (runs[0], runs[-1]))
    apart = float((on_features - through).norm() / through.norm())
    print("| | processor time | by a kept round |\n|---|--:|--:|")
    for name, t in (("a round by hand", plain), ("a round of `fit`", each), ("features, once", once)):
        print(f"| {name} | {1e3 * t:.4g} ms | {t / each:.4g} |")
    print(f"\n100 rounds with the features made: {100 * plain / (once + 100 * each):.0f} times as fast as by hand.")
    print(f"Heads after two rounds, on features and through the backbone: {apart:.1e} of their length apart.")


if __name__ == "__main__":
    main()
