"""FedRC: its gradient is the responsibilities', of one class it is FedEM, and labels alone part no models."""

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


def two_parts(classes: int | None = 3) -> Mixture:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mixture(*(nn.Sequential(nn.Linear(4, 3)) for _ in range(2)), classes=classes).double()


MIXING = Layout(two_parts()).mask("mixing")


@certifies(pf.FedRC, by="identity with FedAvg where the mixture has one part")
def test_with_one_part_it_is_fedavg():
    a = fit_labels(labelled(), pf.FedRC(0.1), model=Mixture(two_layers(), classes=3).double())
    b = fit_labels(labelled(), pf.FedAvg(0.1), model=two_layers())
    mixing = Layout(Mixture(two_layers(), classes=3)).mask("mixing")
    assert torch.allclose(a.personal[:, ~mixing], b.personal, atol=1e-13)


@certifies(pf.FedRC, by="identity with FedEM in the first round, whose shares of classes are equal")
def test_its_first_round_is_fedems():
    a = fit_labels(labelled(), pf.FedRC(0.1), model=two_parts(), rounds=1)
    b = fit_labels(labelled(), pf.FedEM(0.1), model=two_parts(None), rounds=1)
    flat = Layout(two_parts(None)).mask("mixing")
    assert torch.allclose(a.personal[:, ~MIXING], b.personal[:, ~flat], atol=1e-13)
    weights = a.personal[:, MIXING].view(3, 2, 3)
    assert torch.allclose(weights, b.personal[:, flat][..., None].expand(-1, -1, 3), atol=1e-13)


@certifies(pf.FedRC, by="torch's gradients by hand over three rounds, shares of classes summed over all clients")
def test_rounds_of_one_step_by_hand():
    fed, parts, rounds = labelled(), two_parts().parts, 3
    n, pi = fed.train.counts, torch.full((3, 2), 0.5).double()
    common = torch.ones(2, 3).double()
    parameters = [p for f in parts for p in f.parameters()]
    for _ in range(rounds):
        moved, mass = [torch.zeros_like(p) for p in parameters], torch.zeros(2, 3).double()
        for i in range(3):
            x, y = fed.train.client(i)
            loss = torch.stack([nn.functional.cross_entropy(f(x.double()), y, reduction="none") for f in parts])
            odds = (-loss).exp().detach() / common[:, y]
            q = pi[i][:, None] * odds
            q = q / q.sum(0)
            for c in range(3):
                mass[:, c] += q[:, y == c].sum(1)
            pi[i] = q.mean(1)
            q = pi[i][:, None] * odds
            g = torch.autograd.grad((q / q.sum(0) * loss).mean(1).sum(), parameters)
            for m, p, d in zip(moved, parameters, g, strict=True):
                m += float(n[i] / n.sum()) * (p - 0.1 * d).detach()
        common = mass / mass.sum(1, keepdim=True)
        with torch.no_grad():
            for p, m in zip(parameters, moved, strict=True):
                p.copy_(m)
    run = fit_labels(fed, pf.FedRC(0.1, "following"), model=two_parts(), rounds=rounds, local_steps=1)
    expected = torch.cat([p.detach().reshape(-1) for p in parameters])
    assert torch.allclose(run.personal[:, ~MIXING], expected.expand(3, -1), atol=1e-12)
    assert torch.allclose(run.personal[:, MIXING].view(3, 2, 3).exp(), pi[..., None].expand(-1, -1, 3), atol=1e-12)


@certifies(pf.FedRC, by="a transcription in torch, responsibilities held through the batches, or taken anew in each")
@pytest.mark.parametrize("responsibilities", ["fixed", "following"])
def test_rounds_of_batches(responsibilities):
    fed, method = labelled(), pf.FedRC(0.3, responsibilities)
    run = fit_labels(fed, method, 3, two_parts(), local_steps=None, local_epochs=2, batch_size=7)
    pi, parts = expectation_maximisation(fed, two_parts().parts, 0.3, 3, responsibilities, True, 7, 2)
    assert torch.allclose(run.personal[:, ~MIXING], parts.expand(3, -1), rtol=0, atol=1e-12)
    assert torch.allclose(run.personal[:, MIXING].view(3, 2, 3).exp(), pi[..., None].expand(-1, -1, 3), atol=1e-12)
    assert pf.FedRC().responsibilities == "fixed"  # the paper's


@certifies(
    pf.FedRC, by="planted groups: a swap of labels parts its models, and shares of classes, which part FedEM's, do not"
)
@pytest.mark.parametrize(
    ("shift", "method", "parted"),
    [
        ("labels", pf.FedEM(0.3), True),
        ("labels", pf.FedRC(0.3), False),
        ("swap", pf.FedRC(0.3), True),
    ],
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
    run = pf.fit(model, fed, method, rounds=60, local_steps=2, batch_size=None, evaluate_every=0)
    weight = run.personal[:, Layout(model).mask("mixing")].exp().view(8, 2, -1)[:, 0, 0]
    gap = float((weight[::2].mean() - weight[1::2].mean()).abs())
    assert gap > 0.9 if parted else gap < 0.1


def test_another_model_is_refused():
    for method, net in ((pf.FedRC(), two_parts(None)), (pf.FedEM(), two_parts())):
        with pytest.raises(ModelError, match=rf"found no mixture.*for {method.name} to train"):
            fit_labels(labelled(), method, model=net)
