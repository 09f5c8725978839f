"""FedEM and FedRC: a transcription in torch, FedAvg with one part, and the sources and labels of planted groups."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from certify import certifies
from problems import expectation_maximisation, fit_labels, labelled, two_layers
from torch import nn

import polyfed as pf
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


@certifies(pf.FedEM, by="planted sources: the private weights are the shares that each client's samples were drawn in")
def test_it_finds_the_sources_of_a_mixture():
    data = pf.data.load("mixtures", shares="linear", clients=12)
    fed, shares = data.partition(seed=0), np.asarray(data.meta["shares"])
    parts = Mixture(*(build("linear", (20,), 5, seed=s) for s in (1, 2)))
    run = pf.fit(parts, fed, pf.FedEM(1.0), rounds=30, local_steps=2, batch_size=None, evaluate_every=0)
    mixing = run.personal[:, Layout(parts).mask("mixing")].exp().numpy()
    assert abs(np.corrcoef(mixing[:, 0], shares[:, 0])[0, 1]) > 0.9
    common = pf.fit(build("linear", (20,), 5), fed, pf.FedAvg(1.0), rounds=30, local_steps=2, batch_size=None)
    assert run.final["test"]["accuracy"].mean() > common.final["test"]["accuracy"].mean() + 0.03


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


@certifies(
    pf.FedRC, by="planted groups: a swap of labels parts its models, and shares of classes, which part FedEM's, do not"
)
@pytest.mark.parametrize(
    ("shift", "method", "parted"),
    [("labels", pf.FedEM(0.3), True), ("labels", pf.FedRC(0.3), False), ("swap", pf.FedRC(0.3), True)],
)
def test_labels_alone_part_no_models(shift, method, parted):
    rng, sites = np.random.default_rng(0), []
    centres = 1.5 * rng.normal(size=(4, 6))
    for i in range(8):
        y = rng.choice([0, 1] if i % 2 else [2, 3], 120) if shift == "labels" else rng.integers(0, 4, 120)
        x = centres[y] + rng.normal(size=(120, 6))
        sites.append((x, (y + 1) % 4 if shift == "swap" and i % 2 else y))
    model = Mixture(*(build("linear", (6,), 4, seed=s) for s in (1, 2)), classes=4 if method.by_class else None)
    fed = pf.Federation.from_arrays(sites, classes=4)
    run = pf.fit(model, fed, method, rounds=30, local_steps=2, batch_size=None, evaluate_every=0)
    weight = run.personal[:, Layout(model).mask("mixing")].exp().view(8, 2, -1)[:, 0, 0]
    gap = float((weight[::2].mean() - weight[1::2].mean()).abs())
    assert gap > 0.9 if parted else gap < 0.1
