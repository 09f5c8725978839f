"""FedBN: what stays with the clients, by hand with torch's own optimiser; FedAvg where all clients are alike."""

import copy

import numpy as np
import pytest
import torch
from certify import certifies
from problems import fit_labels, labelled, two_layers
from torch import nn

import polyfed as pf
from polyfed.base.errors import ModelError
from polyfed.compute.layout import Layout


@certifies(pf.FedBN, by="torch.optim, client by client")
def test_all_but_normalisation_is_averaged():
    """The normalisation layer is "1.weight" and "1.bias": known by its type, not by "bn" in its name."""
    fed, start = labelled(), two_layers(norm=True)
    run = fit_labels(fed, pf.FedBN(0.1), model=two_layers(norm=True))
    clients = [copy.deepcopy(start) for _ in range(3)]
    for _ in range(3):
        for i, net in enumerate(clients):
            x, y = fed.train.client(i)
            for _ in range(2):
                net.zero_grad()
                nn.functional.cross_entropy(net(x.double()), y).backward()
                torch.optim.SGD(net.parameters(), lr=0.1).step()
        common = {k: torch.stack([net.state_dict()[k] for net in clients]).mean(0) for k in start.state_dict()}
        for net in clients:
            net.load_state_dict({k: v if k.startswith("1.") else common[k] for k, v in net.state_dict().items()})
    expected = torch.stack([Layout(net).flatten(net) for net in clients])
    assert torch.allclose(run.personal, expected, atol=1e-12)
    assert len({tuple(w) for w in expected[:, Layout(start).mask("norm")].tolist()}) == 3


@pytest.mark.parametrize("norm", [nn.LayerNorm(5), nn.GroupNorm(1, 5, affine=False), nn.Identity()])
def test_a_model_without_trained_normalisation_is_refused(norm):
    """It would be FedAvg under another name."""
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 3)).double()
    if isinstance(norm, nn.LayerNorm):
        assert np.isfinite(fit_labels(labelled(), pf.FedBN(0.1), model=model).personal.numpy()).all()
        return
    with pytest.raises(ModelError, match=r"found no normalisation layer among 0\.weight"):
        fit_labels(labelled(), pf.FedBN(0.1), model=model)
