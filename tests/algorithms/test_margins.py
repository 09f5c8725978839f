"""FedLC and FedRoD: margins of the logits against autograd on the losses as the papers write them."""

import copy

import pytest
import torch
from certify import certifies
from problems import fit_labels, labelled, two_layers
from torch import nn

import polyfed as pf
from polyfed.compute.layout import Layout

STEPS = 3


def logits(z, margin):
    """z + margin, without the classes whose margin is -inf: the positions left, and their logits."""
    kept = margin.isfinite().nonzero()[:, 0]
    return kept, z[:, kept] + margin[kept]


def cross_entropy(z, y, margin):
    kept, left = logits(z, margin)
    return nn.functional.cross_entropy(left, torch.searchsorted(kept, y))


def counts(y):
    return torch.bincount(y, minlength=3).double()


def penalty(net, decay):
    return decay / 2 * sum(q.square().sum() for q in net.parameters())


@certifies(pf.FedLC, by="autograd on the loss as printed, an absent class left out of it")
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_round_of_fedlc(decay):
    """Every client calibrates by its own counts. Of an absent class weights and bias get no gradient."""
    fed, start = labelled(), two_layers()
    run = fit_labels(fed, pf.FedLC(0.2, tau=0.7), rounds=1, local_steps=STEPS, weight_decay=decay)
    trained = []
    for i in range(3):
        net, (x, y) = copy.deepcopy(start), fed.train.client(i)
        for _ in range(STEPS):
            loss = cross_entropy(net(x.double()), y, -0.7 * counts(y) ** -0.25) + penalty(net, decay)
            for q, g in zip(net.parameters(), torch.autograd.grad(loss, [*net.parameters()]), strict=True):
                q.data -= 0.2 * g
        trained.append(Layout(net).flatten(net))
        if i == 2:
            assert torch.equal(net[2].weight[2], start[2].weight[2]) == (decay == 0)
            net[2].bias.data[2] = start[2].bias[2]  # weight decay of a masked bias is left out
            trained[-1] = Layout(net).flatten(net)
    share = torch.tensor([24.0, 9.0, 30.0]).double() / 63
    assert torch.allclose(run.server["w"], share @ torch.stack(trained), atol=1e-12)


@certifies(pf.FedRoD, by="autograd on both losses, the personal one stopped at the body and the generic head")
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_two_rounds_of_fedrod(decay):
    """The personal head starts at zero, its output is added to the generic one's, and the body never sees its loss."""
    fed, start = labelled(), two_layers()
    run = fit_labels(fed, pf.FedRoD(0.2, personal_lr=0.3), 2, local_steps=STEPS, weight_decay=decay)
    personal = [torch.zeros(18, dtype=torch.float64) for _ in range(3)]
    common, share = start, torch.tensor([24.0, 9.0, 30.0]).double() / 63
    for _ in range(2):
        trained = []
        for i in range(3):
            net, (x, y), p = copy.deepcopy(common), fed.train.client(i), personal[i].requires_grad_()
            for _ in range(STEPS):
                f = net[:2](x.double())
                generic = net[2](f)
                own = f.detach() @ p[:15].view(3, 5).T + p[15:]
                loss = cross_entropy(generic, y, counts(y).log()) + penalty(net, decay)
                loss_p = nn.functional.cross_entropy(generic.detach() + own, y) + decay / 2 * p.square().sum()
                grads = torch.autograd.grad(loss, [*net.parameters()])
                (slope,) = torch.autograd.grad(loss_p, p)
                for q, g in zip(net.parameters(), grads, strict=True):
                    q.data -= 0.2 * g
                if i == 2:
                    net[2].bias.data[2] = common[2].bias[2]
                p.data -= 0.3 * slope
            personal[i] = p.detach()
            trained.append(Layout(net).flatten(net))
        w = share @ torch.stack(trained)
        common = Layout(start).load_(copy.deepcopy(start), w)
    assert torch.allclose(run.server["w"], w, atol=1e-12)
    expected = torch.stack([torch.cat([w[:-18], w[-18:] + p]) for p in personal])
    assert torch.allclose(run.personal, expected, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", [pf.FedLC, pf.FedRoD])
def test_a_masked_class_gets_no_gradient_however_long_features_are(method, dtype):
    """The last client has no sample of the last class. Nor does decay with clipping see the mask."""
    for length in 10.0 ** torch.arange(-3, 7, 3):
        data = [(float(length) * x.numpy(), y.numpy()) for x, y in map(labelled().train.client, range(3))]
        fed, long = pf.Federation.from_arrays(data[2:], classes=3), max(1.0, float(length))
        for more in ({}, {"weight_decay": 0.1, "clip_norm": 1.0}, {"optimizer": "adam", "weight_decay": 0.1}):
            if method is pf.FedRoD and set(more) != {"weight_decay"} and more:
                continue  # it takes plain SGD
            torch.manual_seed(0)
            net = nn.Linear(4, 3)
            run = fit_labels(
                fed, method(0.1 / long if more else 0.1 / long**2), 2, net, local_steps=STEPS, dtype=dtype, **more
            )
            now, before = (run.trained.task.layout.views(w) for w in (run.server["w"], run.trained.task.w0))
            assert run.server["w"].isfinite().all()
            assert more or torch.equal(now[0][2], before[0][2])  # weight decay is no gradient of the loss
            assert torch.equal(now[1][2], before[1][2])
            assert (now[0][:2] - before[0][:2]).abs().sum() > 0, f"features of length {length:g}, {more}"
