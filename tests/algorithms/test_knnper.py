"""kNN-Per: its net is FedAvg's, its mixture is numpy's, and it answers where clients' labels contradict each other."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import fit_labels, two_layers

import polyfed as pf
from polyfed.models import build
from polyfed.models.memory import Memory


def remembering(rows: int = 40, k: int = 3) -> Memory:
    return Memory(two_layers(), rows, k).double()


def tens(seed: int = 0) -> pf.Federation:
    """Clients of 10, 20 and 30 samples, of which a fifth each is a whole number."""
    rng = np.random.default_rng(seed)
    pairs = [(rng.normal(size=(n, 4)), rng.integers(0, 3, n)) for n in (10, 20, 30)]
    return pf.Federation.from_arrays(pairs, pairs, classes=3)


def parts(run: pf.Run, fed: pf.Federation, i: int) -> tuple[Memory, np.ndarray, np.ndarray]:
    """(client i's model, positions of its samples that are stored, of the others)"""
    model, x = run.model(i), fed.train.client(i)[0].double()
    assert isinstance(model, Memory)
    with torch.no_grad():
        gap = model.net[:-1](x)[:, None] - model.features[model.shares.sum(1) > 0]
    stored = (gap.abs().amax(2).amin(1) < 1e-9).numpy()
    return model, np.flatnonzero(stored), np.flatnonzero(~stored)


@certifies(pf.KNNPer, by="identity: the deployed net is that of FedAvg on the stored samples, one round before")
def test_its_net_is_fedavgs_on_what_is_stored():
    fed = tens()
    run = fit_labels(fed, pf.KNNPer(0.1), model=remembering(), rounds=4, batch_size=None)
    rest = []
    for i in range(3):
        _, stored, _ = parts(run, fed, i)
        x, y = (t.numpy() for t in fed.train.client(i))
        rest.append((x[stored], y[stored]))
    assert [len(y) for _, y in rest] == [8, 16, 24]
    alone = pf.Federation.from_arrays(rest, classes=3, test_fraction=0.0)
    same = fit_labels(alone, pf.FedAvg(0.1), model=two_layers(), rounds=3, batch_size=None)
    assert torch.allclose(run.personal[:, -same.personal.shape[1] :], same.personal, atol=1e-12)


@certifies(pf.KNNPer, by="numpy's neighbours, kernel and grid by hand, for every client")
def test_its_mixture_and_lambda_by_hand():
    fed = tens(1)
    run = fit_labels(fed, pf.KNNPer(0.1), model=remembering(), rounds=3)
    chosen = []
    for i in range(3):
        model, stored, held = parts(run, fed, i)
        x, y = fed.train.client(i)[0].double(), fed.train.client(i)[1].numpy()
        with torch.no_grad():
            f, p = model.net[:-1](x).numpy(), model.net(x).softmax(1).numpy()
        gap = ((f[:, None] - f[None, stored]) ** 2).sum(2)
        near = np.argsort(gap, 1)[:, :3]
        a = np.exp(-np.take_along_axis(gap, near, 1) / f.shape[1])
        own = (a[:, :, None] * np.eye(3)[y[stored]][near]).sum(1) / a.sum(1)[:, None]
        at = held, y[held]
        losses = [-np.log(np.maximum(s * own[at] + (1 - s) * p[at], 2.3e-308)).mean() for s in np.linspace(0, 1, 11)]
        lam = np.argmin(losses) / 10
        chosen.append(lam)
        assert model.lam.item() == pytest.approx(lam)
        found = model(x).exp().detach().numpy()
        np.testing.assert_allclose(found, np.maximum(lam * own + (1 - lam) * p, 2.3e-308), atol=1e-9)
    assert len(set(chosen)) > 1


def test_all_neighbours_at_any_distance_are_the_shares_of_classes():
    model = Memory(two_layers(), rows=9, k=9, sigma=1e12).double()
    y = torch.tensor([0, 1, 1, 2, 2, 2])
    with torch.no_grad():
        model.features[:6], model.shares[:6], model.lam[:] = torch.randn(6, model.features.shape[1]), torch.eye(3)[y], 1
    shares = torch.tensor([1, 2, 3]).double() / 6
    assert torch.allclose(model(torch.randn(5, 4).double()).exp(), shares.expand(5, 3), atol=1e-9)


@certifies(pf.KNNPer, by="a stored sample's nearest neighbour is itself: with k 1 and lam 1 its label comes back")
def test_with_one_neighbour_a_stored_sample_has_its_label():
    fed = tens(2)
    run = fit_labels(fed, pf.KNNPer(0.1), model=remembering(k=1), rounds=2)
    for i in range(3):
        model, stored, _ = parts(run, fed, i)
        x, y = fed.train.client(i)
        with torch.no_grad():
            model.lam[:] = 1
            assert torch.equal(model(x[stored].double()).argmax(1), y[stored])


def test_where_there_is_no_room_for_all_every_so_many_are_stored():
    fed = tens()
    model, stored, _ = parts(fit_labels(fed, pf.KNNPer(0.1), model=remembering(rows=12)), fed, 2)
    whole, all_of, _ = parts(fit_labels(fed, pf.KNNPer(0.1), model=remembering()), fed, 2)
    assert int(model.shares.sum()) == 12
    assert int(whole.shares.sum()) == 24
    assert stored.tolist() == all_of[::2].tolist()


def test_clients_whose_labels_contradict_each_other_are_answered_from_memory():
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(60, 3)).astype(np.float32) for _ in range(2)]
    y = [(t[:, 0] > 0).astype(np.int64) for t in x]
    data = pf.Federation.from_arrays([(x[0], y[0]), (x[1], 1 - y[1])], classes=2, test_fraction=0.25)
    run = pf.fit(build("memory", (3,), 2, hidden=8), data, pf.KNNPer(0.1), rounds=2, evaluate_every=0)
    common = pf.fit(build("mlp", (3,), 2, hidden=8), data, pf.FedAvg(0.1), rounds=2, evaluate_every=0)
    assert run.final["test"]["accuracy"].min() > 0.8
    assert common.final["test"]["accuracy"].mean() < 0.7
