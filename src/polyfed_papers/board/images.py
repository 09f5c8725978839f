"""The board of images: PFLlib's clients and net, and FedAvg held against a loop of torch alone."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from polyfed import FedAvg, Federation
from polyfed.base.errors import DataError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Batches, Work
from polyfed.report.table import Cell, Table
from polyfed_papers import board as common
from polyfed_papers.board.board import Budget, compared, settings
from polyfed_papers.pfllib import BATCH, CLIENTS, PARTITIONS
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, metric_of, recipe
from polyfed_papers.recipes.said import ours

METHODS = (
    "local", "fedavg", "fedavg-ft", "ditto", "fedrep", "fedper", "fedbabu", "fedala", "fedpac", "fedacs", "fedslr",
    "fpfc",
)  # fmt: skip
SETTINGS = {
    f"{data}-{name}": common.Setting(data, partition, CLIENTS, options=(("normalise", "half"),), convolutional=True,
                                     rate=0.5, looks=2, tested=0.25, long=True, training=(("batch_size", BATCH),))
    for data in ("fashion-mnist", "cifar10", "cifar100")
    for name, partition in PARTITIONS.items()
}  # fmt: skip
BUDGETS: Mapping[Size, Budget] = {"small": Budget(1000, 6), "paper": Budget(1000, 12)}
WHOLE = 60_000  # samples of the smallest of the data sets; a folder may have a part of one
POINT = 0.01


@recipe("board/images", "Twelve methods on PFLlib's clients of images, with its convolutional net",
        minutes=(430, 1700), settings=partial(settings, SETTINGS, budgets=BUDGETS, some=METHODS),
        data=("fashion_mnist",), seeds=5, scored=True, joins=True)  # fmt: skip
def images(bench: Bench) -> Outcome:
    """Which methods are told apart on images of two classes a client and of Dirichlet(0.1), with a convolutional net?
    Fashion-MNIST, and CIFAR-10 and CIFAR-100 where the folder of data has all of them.
    """
    here, absent = dict[str, common.Setting](), dict[str, None]()
    for name, setting in SETTINGS.items():
        setting = replace(setting, folder=None if bench.data_dir is None else str(bench.data_dir))
        try:
            if (count := samples(setting.federation(common.UNCOUNTED))) < WHOLE:
                raise DataError(f"{setting.data}: found {count} samples, expected all")
            here[name] = setting
        except DataError as e:
            if setting.data == "fashion-mnist":
                raise
            absent[str(e)] = None
        if bench.rehearse:
            break
    budget = BUDGETS[bench.pick("small", "paper")]
    checked = [(name, setting) for name, setting in here.items() if bench.wants(f"{name}/alone")]
    rows = [agreement(bench, name, setting, budget.gradients) for name, setting in checked]
    note = "step size 0.05, which nobody chose; the same batches: a point apart is a fault of one of them"
    table = Table("FedAvg, and the same by torch alone", ("setting<", "polyfed, %", "torch, %", "apart, points"),
                  tuple(rows), (note,))  # fmt: skip
    outcome = compared(bench, here, budget, common.contenders(bench, METHODS))
    notes = [*outcome.notes, *(f"Left out: {why}" for why in absent)]
    return replace(outcome, tables=[*outcome.tables, table], notes=notes)


def samples(data: Federation) -> int:
    return len(data.train.x) + len(data.test.x)


def agreement(bench: Bench, name: str, setting: common.Setting, gradients: int) -> tuple[Cell, ...]:
    """FedAvg at the middle step size, and the same by torch alone: means over clients and seeds."""
    cls = FedAvg
    at, work = common.start(cls, setting), common.work(setting)
    method = common.made(cls, at, setting)
    rounds = bench.rounds(*[gradients // work["local_steps"]] * 2)

    def alone(seed: int) -> float:
        return plain(setting.model(cls, seed), setting.federation(seed), at[0], rounds, seed, **work)

    runs = bench.compare(f"{name}/alone", partial(setting.model, cls), setting.federation, {"fedavg": method},
                         rounds=rounds, evaluate_every=0, metrics="accuracy", **work)  # fmt: skip
    both = metric_of(runs, "fedavg"), np.array(bench.by_seed(f"{name}-torch", alone))
    apart = float(np.mean(both[0] - both[1]))
    mark = "gain" if abs(apart) <= POINT else "loss"
    return Cell(name), ours(both[0], 100), ours(both[1], 100), Cell(f"{100 * apart:+.2f}", {"apart": apart}, mark)


def plain(
    net: nn.Module, data: Federation, lr: float, rounds: int, seed: int, local_steps: int, batch_size: int
) -> float:
    """Mean accuracy over clients of FedAvg written with torch alone, on the batches that polyfed draws."""
    net, keys, work = deepcopy(net), client_keys(data.names), Work(1, local_steps, batch_size)
    sgd = torch.optim.SGD(net.parameters(), lr)
    common_model = parameters_to_vector(net.parameters()).detach().clone()
    for t in range(rounds):
        total = torch.zeros_like(common_model)
        for i in range(data.n):
            vector_to_parameters(common_model.clone(), net.parameters())  # whose slices they become
            for batch in Batches(data.train, np.array([i]), keys[[i]], work, seed, t, "batches"):
                real = slice(None if batch.sizes is None else batch.sizes[0])
                sgd.zero_grad()
                cross_entropy(net(batch.x[0, real]), batch.y[0, real]).backward()
                sgd.step()
            total += int(data.train.counts[i]) / len(data.train.x) * parameters_to_vector(net.parameters()).detach()
        common_model = total
    vector_to_parameters(common_model, net.parameters())
    with torch.no_grad():
        right = net(data.test.x).argmax(1) == data.test.y
    return float(np.mean([right[data.test.rows(i)].double().mean() for i in range(data.n)]))
