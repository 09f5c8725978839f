"""FedEM: its gradient is the responsibilities', it is FedAvg with one part, and it finds the sources of a mixture."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from certify import certifies
from problems import expectation_maximisation, fit_labels, labelled, two_layers
from torch import nn

import polyfed as pf
from polyfed.base.errors import ModelError
from polyfed.compute.layout import Layout
from polyfed.models import build
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


@certifies(pf.FedEM, by="torch's gradients by hand, every part's weighted by its responsibilities")
def test_one_round_of_one_step_by_hand():
    fed, start = labelled(), two_parts()
    method = pf.FedEM(0.1, "following")
    run = fit_labels(fed, method, model=two_parts(), rounds=1, local_steps=1)
    mixing = Layout(start).mask("mixing")
    parameters, moved = [p for f in start.parts for p in f.parameters()], torch.zeros(30).double()
    for i in range(3):
        x, y = fed.train.client(i)
        loss = torch.stack([nn.functional.cross_entropy(f(x.double()), y, reduction="none") for f in start.parts])
        weights = (-loss).softmax(0).mean(1).detach()  # from equal ones
        assert torch.allclose(run.personal[i, mixing].exp(), weights, atol=1e-12)
        q = (weights.log()[:, None] - loss).softmax(0).detach()
        g = torch.autograd.grad((q * loss).mean(1).sum(), parameters)
        w = torch.cat([(p - 0.1 * d).detach().reshape(-1) for p, d in zip(parameters, g, strict=True)])
        moved = moved + len(y) / float(fed.train.counts.sum()) * w
    assert torch.allclose(run.personal[:, ~mixing], moved.expand(3, -1), atol=1e-12)


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


@certifies(pf.FedEM, by="monotone: no step of EM lowers the likelihood of the training samples")
def test_the_likelihood_never_falls():
    fed = labelled()
    ends = [fit_labels(fed, pf.FedEM(0.05), model=two_parts(), rounds=t, local_steps=1) for t in range(6)]
    found = [float(np.average(run.final["train"]["loss"], weights=fed.train.counts)) for run in ends]
    assert all(b < a for a, b in pairwise(found))


@certifies(pf.FedEM, by="planted sources: the private weights are the shares that each client's samples were drawn in")
def test_it_finds_the_sources_of_a_mixture():
    data = pf.data.load("mixtures", shares="linear", clients=12)
    fed, shares = data.partition(seed=0), np.asarray(data.meta["shares"])
    parts = Mixture(*(build("linear", (20,), 5, seed=s) for s in (1, 2)))
    run = pf.fit(parts, fed, pf.FedEM(1.0), rounds=60, local_steps=2, batch_size=None, evaluate_every=0)
    mixing = run.personal[:, Layout(parts).mask("mixing")].exp().numpy()
    assert abs(np.corrcoef(mixing[:, 0], shares[:, 0])[0, 1]) > 0.9
    common = pf.fit(build("linear", (20,), 5), fed, pf.FedAvg(1.0), rounds=60, local_steps=2, batch_size=None)
    assert run.final["test"]["accuracy"].mean() > common.final["test"]["accuracy"].mean() + 0.03


def test_weights_stay_with_their_clients_and_are_not_billed():
    run = fit_labels(labelled(), pf.FedEM(0.1), model=two_parts())
    assert set(run.ledger["down_bytes"]) == set(run.ledger["up_bytes"]) == {8 * (run.personal.shape[1] - 2)}
    mixing = run.personal[:, Layout(two_parts()).mask("mixing")]
    assert torch.allclose(mixing.exp().sum(1), torch.ones(3).double())


def test_the_output_is_the_logarithm_of_mixed_probabilities():
    model, x = two_parts(), torch.randn(7, 4).double()
    mixed = torch.stack([part(x).softmax(1) for part in model.parts]).mean(0)
    assert torch.allclose(model(x).exp(), mixed, atol=1e-14)


def test_another_model_is_refused():
    with pytest.raises(ModelError, match="found no mixture, expected one for fedem to train"):
        fit_labels(labelled(), pf.FedEM(0.1), model=two_layers())
    with pytest.raises(ModelError, match="expects: it mixes probabilities of classes"):
        fit_labels(labelled(), pf.FedEM(0.1), model=two_parts(), loss=lambda output, target: output.square().mean())
    with pytest.raises(ModelError, match="found no net"):
        Mixture()
