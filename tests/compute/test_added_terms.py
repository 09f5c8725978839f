"""Terms of features and outputs in local steps, against torch's autograd on the loss as it is written."""

import copy
from collections import ChainMap
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import Wrapped, batches, mlp, split_of
from torch import nn

import polyfed as pf
from polyfed.base.errors import ModelError
from polyfed.compute.check import check
from polyfed.compute.outputs import each_outputs
from polyfed.compute.solvers import local_sgd
from polyfed.compute.split import Split
from polyfed.compute.task import Task

SIZES = (10, 3, 8, 17)
SPLIT = split_of(*SIZES)
CLIENTS = [3, 0, 2, 1]
TERMS = ["toward", "toward by class", "all outputs", "not true", "also", "together"]


def task_of(path: str) -> Task:
    """A task that takes the steps in closed form, module by module, or all models at once."""
    task = Task(mlp() if path == "closed form" else Wrapped(mlp()))
    check(task, SPLIT, 3)
    task.net.vectorised = path == "vectorised"
    return task


def net_of(module: nn.Module) -> nn.Module:
    return module.inner if isinstance(module, Wrapped) else module


def given(term: str, task: Task):
    """(arguments of local_sgd for all clients, the term of one client's batch with features f and outputs z)."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        M, other = torch.randn(4, 3, 5, dtype=torch.float64), torch.randn(4, task.p, dtype=torch.float64)
        by_class = torch.rand(4, 3).double() * torch.tensor([1.0, 0.0, 2.0])
    teachers = [task.module(v) for v in other]

    def toward(strength):
        return lambda i, x, y, f, z: (strength[i][y] * (f - M[i][y]).square().sum(1)).mean()

    def distilled(i, x, y, f, z, true):
        t, kept = teachers[i](x).detach(), F.one_hot(y, 3) == 0
        if not true:
            t, z = t[kept].view(-1, 2), z[kept].view(-1, 2)
        return 0.7 * 2.0**2 * F.kl_div(F.log_softmax(z / 2, 1), F.softmax(t / 2, 1), reduction="batchmean")

    def also(features, outputs, batch, rows):  # cosines with features of frozen models
        return 0.3 * batch.mean(F.cosine_similarity(features, task.features(other[CLIENTS][rows], batch.x), dim=2))

    def cosine(i, x, y, f, z):
        return 0.3 * F.cosine_similarity(f, net_of(teachers[i])[:-1](x).detach(), dim=1).mean()

    form, equal = pf.Distillation(0.7, 2.0), toward(torch.full((4, 3), 0.6, dtype=torch.float64))
    terms = {
        "toward": ({"toward": (0.6, M[CLIENTS])}, equal),
        "toward by class": ({"toward": (by_class[CLIENTS], M[CLIENTS])}, toward(by_class)),
        "all outputs": ({"teacher": (other[CLIENTS], form)}, partial(distilled, true=True)),
        "not true": ({"teacher": (other[CLIENTS], form._replace(true=False))}, partial(distilled, true=False)),
        "also": ({"also": also}, cosine),
    }
    together = [terms[name] for name in ("toward", "all outputs", "also")]
    terms["together"] = ChainMap(*(given for given, _ in together)), lambda *at: sum(term(*at) for _, term in together)
    return terms[term]


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("path", ["closed form", "client by client", "vectorised"])
@pytest.mark.parametrize("work", [{"epochs": 2, "batch_size": 4}, {"steps": 3, "batch_size": None}])
def test_steps_with_a_term_are_the_loop_with_it(term, path, work):
    task = task_of(path)
    stated, added = given(term, task)
    start, anchor = torch.randn(2, 4, task.p, dtype=torch.float64)
    for only in (None, task.layout.mask("body").double()):
        given_too = {"pull": (0.2, anchor[CLIENTS]), "only": only}
        out = local_sgd(task, start[CLIENTS], batches(SPLIT, CLIENTS, **work), 0.1, **given_too, **stated)
        for row, i in enumerate(CLIENTS):
            module, w = task.module(start[i]), start[i]
            net = net_of(module)
            for batch in batches(SPLIT, [i], **work):
                x, y = batch.x[0], batch.y[0]
                if batch.sizes is not None:
                    x, y = x[: batch.sizes[0]], y[: batch.sizes[0]]
                f = net[:-1](x)
                loss = F.cross_entropy(net[-1](f), y) + added(i, x, y, f, net[-1](f))
                loss = loss + 0.1 * (torch.cat([q.flatten() for q in net.parameters()]) - anchor[i]).square().sum()
                g = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*net.parameters()])])
                w = w - 0.1 * (g if only is None else g * only)
                task.layout.load_(module, w)
            assert (out[row] - w).abs().max() < 1e-12


def test_a_weighted_sample_counts_in_a_term_as_its_copies():
    x, y = SPLIT.client(3)
    weights = torch.tensor([2.0, 0.0, 1.0] * 5 + [1.0, 1.0])
    copies = Split.of([(x.repeat_interleave(weights.long(), 0), y.repeat_interleave(weights.long()))])
    weighted, M = Split(x, y, [0, len(x)], weight=weights), torch.randn(1, 3, 5, dtype=torch.float64)
    for path in ("closed form", "client by client"):
        task = task_of(path)
        rest = {"toward": (0.6, M), "teacher": (task.w0[None] + 0.1, pf.Distillation(0.7))}
        ends, means = [], []
        for split in (weighted, copies):
            ends.append(local_sgd(task, task.w0[None], batches(split, batch_size=None, steps=3), 0.1, **rest))
            means.append(task.class_means(task.w0[None], batches(split)))
        for one, other in (ends, means):
            assert (one - other).abs().max() < 1e-12


@pytest.mark.parametrize("path", ["closed form", "client by client", "vectorised"])
def test_class_means_are_the_mean_features_of_each_class(path):
    """A client without a class has zeros there."""
    task, split = task_of(path), SPLIT
    split.y[split.rows(1)] = 2
    w = torch.randn(4, task.p, dtype=torch.float64)
    found = task.class_means(w, batches(split))
    for i in range(4):
        x, y = split.client(i)
        f = net_of(task.module(w[i]))[:-1](x).detach().numpy()
        expected = [f[y.numpy() == c].mean(0) if (y == c).any() else np.zeros(5) for c in range(3)]
        assert np.allclose(found[i], expected, atol=1e-13)


def test_a_term_may_evaluate_models_while_the_network_is_trained():
    """A dropout in training mode, and models in evaluation mode on its batches: neither disturbs the other."""
    net = Wrapped(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double())
    task = Task(net)
    check(task, SPLIT, 3)
    seen = []

    def watch(features, outputs, batch, rows):
        seen.append(
            torch.equal(each_outputs(task.net, start[rows], batch.x), each_outputs(task.net, start[rows], batch.x))
        )
        return 0 * features.sum((1, 2))

    start = torch.randn(4, task.p, dtype=torch.float64)
    with_it = local_sgd(task, start, batches(SPLIT, epochs=2, batch_size=4), 0.1, also=watch)
    alone = local_sgd(task, start, batches(SPLIT, epochs=2, batch_size=4), 0.1)
    assert (with_it - alone).abs().max() < 1e-12
    assert all(seen)


class Scaled(nn.Module):
    """Outputs that are not those of its last layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return 2 * self.layer(x)


def test_features_of_another_end_are_refused():
    x = torch.randn(1, 6, 4)
    for net, said in (
        (Scaled(), "its outputs are not those of its last layer, Linear"),
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh()), "its last layer is Tanh"),
        (nn.Linear(4, 3, bias=False), "expected a trained linear layer with a bias"),
    ):
        task = Task(copy.deepcopy(net))
        with pytest.raises(ModelError, match=said):
            task.features(task.w0[None], x)
