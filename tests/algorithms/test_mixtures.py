"""FedEM, FedRC and kNN-Per: mixtures by a transcription in torch and in numpy, FedAvg with one part, planted groups."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from certify import certifies
from problems import expectation_maximisation, fit_labels, labelled, two_layers
from torch import nn

import polyfed as pf
from polyfed.compute.layout import Layout
from polyfed.models.memory import Memory
from polyfed.models.mixture import Mixture


def two_parts(seed: int = 0) -> Mixture:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Mixture(*(nn.Sequential(nn.Linear(4, 3)) for _ in range(2))).double()


@certifies(pf.FedEM, by="identity with FedAvg where the mixture has one part")
def test_with_one_part_it_is_fedavg():
    a = fit_labels(labelled(), pf.FedEM(0.1), model=Mixture(two_layers()).double())
    b = fit_labels(labelled(), pf.FedAvg(0.1), model=two_layers())
    mixing = Layout(Mixture(two_layers())).mask("mixing")
    assert torch.allclose(a.personal[:, ~mixing], b.personal, atol=1e-13)
    assert torch.allclose(a.personal[:, mixing], torch.zeros(3, 1).double(), atol=1e-13)


@certifies(pf.FedEM, by="a transcription in torch, responsibilities held through the batches, or taken anew in each")
@pytest.mark.parametrize("responsibilities", ["fixed", "following"])
def test_rounds_of_batches(responsibilities):
    fed = labelled()
    method = pf.FedEM(0.3, responsibilities)
    run = fit_labels(fed, method, 3, two_parts(), local_steps=None, local_epochs=2, batch_size=7)
    pi, parts = expectation_maximisation(fed, two_parts().parts, 0.3, 3, responsibilities, False, 7, 2)
    mixing = Layout(two_parts()).mask("mixing")
    assert torch.allclose(run.personal[:, ~mixing], parts.expand(3, -1), rtol=0, atol=1e-12)
    assert torch.allclose(run.personal[:, mixing].exp(), pi, rtol=0, atol=1e-12)
    assert replace(pf.FedEM(0.3), responsibilities=responsibilities) == method
    assert pf.FedEM().responsibilities == "fixed"  # the paper's


def test_the_output_is_the_logarithm_of_mixed_probabilities():
    model, x = two_parts(), torch.randn(7, 4).double()
    mixed = torch.stack([part(x).softmax(1) for part in model.parts]).mean(0)
    assert torch.allclose(model(x).exp(), mixed, atol=1e-14)


def two_parts_of_classes(classes: int | None = 3) -> Mixture:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mixture(*(nn.Sequential(nn.Linear(4, 3)) for _ in range(2)), classes=classes).double()


MIXING = Layout(two_parts_of_classes()).mask("mixing")


@certifies(pf.FedRC, by="identity with FedAvg where the mixture has one part")
def test_with_one_part_fedrc_is_fedavg():
    a = fit_labels(labelled(), pf.FedRC(0.1), model=Mixture(two_layers(), classes=3).double())
    b = fit_labels(labelled(), pf.FedAvg(0.1), model=two_layers())
    mixing = Layout(Mixture(two_layers(), classes=3)).mask("mixing")
    assert torch.allclose(a.personal[:, ~mixing], b.personal, atol=1e-13)


@certifies(pf.FedRC, by="a transcription in torch, responsibilities held through the batches, or taken anew in each")
@pytest.mark.parametrize("responsibilities", ["fixed", "following"])
def test_rounds_of_batches_of_fedrc(responsibilities):
    fed, method = labelled(), pf.FedRC(0.3, responsibilities)
    run = fit_labels(fed, method, 3, two_parts_of_classes(), local_steps=None, local_epochs=2, batch_size=7)
    pi, parts = expectation_maximisation(fed, two_parts_of_classes().parts, 0.3, 3, responsibilities, True, 7, 2)
    assert torch.allclose(run.personal[:, ~MIXING], parts.expand(3, -1), rtol=0, atol=1e-12)
    assert torch.allclose(run.personal[:, MIXING].view(3, 2, 3).exp(), pi[..., None].expand(-1, -1, 3), atol=1e-12)
    assert pf.FedRC().responsibilities == "fixed"  # the paper's


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


def test_where_there_is_no_room_for_all_every_so_many_are_stored():
    fed = tens()
    model, stored, _ = parts(fit_labels(fed, pf.KNNPer(0.1), model=remembering(rows=12)), fed, 2)
    whole, all_of, _ = parts(fit_labels(fed, pf.KNNPer(0.1), model=remembering()), fed, 2)
    assert int(model.shares.sum()) == 12
    assert int(whole.shares.sum()) == 24
    assert stored.tolist() == all_of[::2].tolist()
