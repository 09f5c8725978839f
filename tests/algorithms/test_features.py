"""Methods with terms of features, outputs or margins in their losses, against autograd on the losses as written."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from certify import certifies
from problems import fit_labels, labelled, two_layers
from torch import nn

import polyfed as pf
from polyfed.algorithms.fedpac import mixtures
from polyfed.algorithms.fedtgp import made
from polyfed.compute.layout import Layout
from polyfed.compute.terms import Distillation, log_shares
from polyfed.core.messages import Round
from polyfed.core.uplinks import Uplinks

STEPS, LR = 3, 0.2


SHARE = torch.tensor([24.0, 9.0, 30.0]).double() / 63


def samples(i):
    x, y = labelled().train.client(i)
    return x.double(), y


def features(net, x):
    return net[:-1](x)


def stepped(net, loss, lr=LR, parts=None):
    parameters = [*(net if parts is None else parts).parameters()]
    for q, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        q.data -= lr * g


def flat(net):
    return Layout(net).flatten(net)


def averaged(nets, share=SHARE):
    return Layout(nets[0]).load_(copy.deepcopy(nets[0]), share @ torch.stack([flat(net) for net in nets]))


def means(net, x, y, classes=3):
    f = features(net, x).detach()
    return torch.stack([f[y == c].mean(0) if (y == c).any() else torch.zeros(5).double() for c in range(classes)])


def deploys_the_nearest_of(prototypes, run, nets):
    assert torch.allclose(run.server["prototypes"], prototypes, atol=1e-12)
    for i, net in enumerate(nets):
        x, _ = samples(i)
        gap = (features(net, x)[:, None] - prototypes).square().sum(2)
        assert torch.allclose(run.model(i)(x).softmax(1), (-gap).softmax(1), atol=1e-12)


# FedProto


@certifies(pf.FedProto, by="autograd on both losses, prototypes as plain means over the clients that have a class")
@pytest.mark.parametrize("pull", ["code", "paper"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rounds_of_fedproto(pull, weighted):
    """The last client has no sample of the last class. Never are prototypes divided twice (the paper's equation 6)."""
    method = pf.FedProto(LR, lam=0.7, pull=pull, weighted=weighted)
    run = fit_labels(labelled(), method, 2, local_steps=STEPS)
    nets, M = [two_layers() for _ in range(3)], None
    for _ in range(2):
        for i, net in enumerate(nets):
            x, y = samples(i)
            for _ in range(STEPS):
                f = features(net, x)
                loss = F.cross_entropy(net[-1](f), y)
                if M is not None and pull == "code":
                    loss = loss + 0.7 * F.mse_loss(f, M[y])
                if M is not None and pull == "paper":
                    loss = loss + 0.7 * sum((f[y == c].mean(0) - M[c]).square().sum() for c in y.unique())
                stepped(net, loss)
        each = torch.stack([means(net, *samples(i)) for i, net in enumerate(nets)])
        counts = torch.stack([torch.bincount(samples(i)[1], minlength=3) for i in range(3)]).double()
        mass = counts if weighted else (counts > 0).double()
        M = (mass[..., None] * each).sum(0) / mass.sum(0)[:, None]
    deploys_the_nearest_of(M, run, nets)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", [pf.FedProto, pf.FedTGP])
def test_a_class_that_nobody_has_shown_is_impossible_however_long_features_are(method, dtype):
    """After a round of two of six clients, and after three: some have a class that nobody sent a prototype of."""
    rng = np.random.default_rng(0)
    labels = [np.resize([0, 1] if i % 2 else [1, 2], 20) for i in range(6)]
    plain = [rng.normal(size=(20, 4)) + y[:, None] for y in labels]
    for length in (1e-3, 1e6):
        fed = pf.Federation.from_arrays([(length * x, y) for x, y in zip(plain, labels, strict=True)], classes=5)
        for rounds in (1, 3):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
            run = pf.fit(model, fed, method(0.01 / max(1, length**2)), rounds=rounds, fraction=0.34, dtype=dtype)
            assert run.server["seen"][3:].sum() == 0
            assert run.personal.isfinite().all()
            for i, x in enumerate(plain):
                taken = run.model(i)(torch.as_tensor(length * x, dtype=getattr(torch, dtype))).argmax(1)
                assert run.server["seen"][taken].all(), f"features of length {length:g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_class_that_is_left_out_of_a_distillation_has_no_share_however_long_logits_are(dtype):
    for length in 10.0 ** np.arange(-3, 13, 3):
        z = (length * torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)).requires_grad_()
        y = torch.arange(40) % 5
        log = log_shares(z, y, Distillation(1.0, true=False))
        (slope,) = torch.autograd.grad((log.exp() * (log - log.detach())).sum(), z)
        assert (log.exp()[torch.arange(40), y] == 0).all()
        assert torch.allclose(log.exp().sum(1), torch.ones(40, dtype=dtype))
        assert slope.isfinite().all()


# FedGH and FedTGP: the server trains on pairs of a class mean and its class


def own_means(nets):
    """(mean [k, d], class [k], samples [k]) of every client and class that it has"""
    found = [(means(net, *samples(i))[c], c, (samples(i)[1] == c).sum())
             for i, net in enumerate(nets) for c in range(3) if (samples(i)[1] == c).any()]  # fmt: skip
    return (torch.stack([torch.as_tensor(one) for one in column]) for column in zip(*found, strict=True))


@certifies(pf.FedGH, by="autograd and torch's SGD on a head under every client's own body")
@pytest.mark.parametrize("deployed", ["own", "common"])
def test_rounds_of_fedgh(deployed):
    method = pf.FedGH(LR, server_lr=0.3, server_steps=7, deployed=deployed)
    run = fit_labels(labelled(), method, 2, local_steps=STEPS)
    nets, head = [two_layers() for _ in range(3)], copy.deepcopy(two_layers()[-1])
    for _ in range(2):
        for i, net in enumerate(nets):
            net[-1].load_state_dict(head.state_dict())
            for _ in range(STEPS):
                stepped(net, F.cross_entropy(net(samples(i)[0]), samples(i)[1]))
        m, c, _ = own_means(nets)
        descent = torch.optim.SGD(head.parameters(), 0.3)
        for _ in range(7):
            descent.zero_grad()
            F.cross_entropy(head(m), c).backward()
            descent.step()
    for i, net in enumerate(nets):
        if deployed == "common":
            net[-1].load_state_dict(head.state_dict())
        assert torch.allclose(run.personal[i], flat(net), atol=1e-12)


@certifies(pf.FedTGP, by="torch's SGD on the margin loss, through modules of an embedding and two linear layers")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tau", [100.0, 0.05])
def test_rounds_of_fedtgp(weighted, tau):
    method = pf.FedTGP(LR, lam=0.7, tau=tau, server_lr=0.1, server_steps=6, weighted=weighted)
    e, U, u, V, v = (method.init_server(SimpleNamespace(classes=3, width=5), torch.zeros(1).double(), 3)[name]
                     for name in ("e", "U", "u", "V", "v"))  # fmt: skip
    assert 0.2 < float(e.std()) < 2
    assert 0.9 * 5**-0.5 < float(U.abs().max()) < 5**-0.5
    assert not torch.equal(U, V)
    server = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)).double()
    server[0].weight.data, server[0].bias.data, server[2].weight.data, server[2].bias.data = U, u, V, v
    e = nn.Parameter(e)
    run = fit_labels(labelled(), method, 2, local_steps=STEPS)
    nets, P = [two_layers() for _ in range(3)], None
    for _ in range(2):
        for i, net in enumerate(nets):
            x, y = samples(i)
            for _ in range(STEPS):
                f = features(net, x)
                stepped(net, F.cross_entropy(net[-1](f), y) + (0 if P is None else 0.7 * F.mse_loss(f, P[y])))
        m, c, n = own_means(nets)
        q = n.double() if weighted else torch.ones(len(c)).double()
        M = [(q[c == k] @ m[c == k]) / q[c == k].sum() for k in range(3)]
        nearest = [min(float((M[k] - M[j]).norm()) for j in range(3) if j != k) for k in range(3)]
        margin = min(max(nearest), tau)
        descent = torch.optim.SGD([e, *server.parameters()], 0.1)
        for _ in range(6):
            P = server(e)
            far = torch.stack([(m - p).norm(dim=1) for p in P], 1)
            far[torch.arange(len(c)), c] += margin
            descent.zero_grad()
            (q / q.sum() @ F.cross_entropy(-far, c, reduction="none")).backward()
            descent.step()
        P = server(e).detach()
    deploys_the_nearest_of(P, run, nets)


def test_a_prototype_that_meets_its_class_mean_has_a_gradient():
    """The root of a^2 - 2ab + b^2 is not a number where rounding makes it negative, nor its slope at 0."""
    method = pf.FedTGP(LR, lam=0.0, server_steps=1)
    server = method.init_server(SimpleNamespace(classes=3, width=5), torch.zeros(1).double(), 1)
    alone = Round(0, 1, 0, torch.arange(1), torch.tensor([3.0]), torch.zeros(1))
    up = Uplinks({"prototypes": made(server)[None], "mass": torch.ones(1, 3).double()}, alone)
    assert method.aggregate(server, up, alone)["prototypes"].isfinite().all()


# MOON


@certifies(pf.MOON, by="autograd on the contrast as printed, of the received and the client's last model")
def test_rounds_of_moon():
    run = fit_labels(labelled(), pf.MOON(LR, mu=2.0, tau=0.4), 3, local_steps=STEPS)
    common, last = two_layers(), [two_layers() for _ in range(3)]
    for _ in range(3):
        for i in range(3):
            net, (x, y) = copy.deepcopy(common), samples(i)
            near, far = (features(frozen, x).detach() for frozen in (common, last[i]))
            for _ in range(STEPS):
                z = features(net, x)
                g, p = (torch.exp(F.cosine_similarity(z, other) / 0.4) for other in (near, far))
                stepped(net, F.cross_entropy(net[-1](z), y) - 2.0 * torch.log(g / (g + p)).mean())
            last[i] = net
        common = averaged(last)
    assert torch.allclose(run.server["w"], flat(common), atol=1e-12)


# FedNTD


@certifies(pf.FedNTD, by="autograd on the divergence of the logits that are left, a mean over samples")
def test_rounds_of_fedntd():
    """Not over samples and classes, as nn.KLDivLoss without batchmean takes it."""
    run = fit_labels(labelled(), pf.FedNTD(LR, beta=0.8, tau=2.0), 2, local_steps=STEPS)
    common = two_layers()
    for _ in range(2):
        nets = []
        for i in range(3):
            net, (x, y) = copy.deepcopy(common), samples(i)
            kept = F.one_hot(y, 3) == 0
            told = (common(x)[kept].view(-1, 2) / 2).softmax(1).detach()
            for _ in range(STEPS):
                own = (net(x)[kept].view(-1, 2) / 2).log_softmax(1)
                stepped(net, F.cross_entropy(net(x), y) + 0.8 * 4 * (told * (told.log() - own)).sum(1).mean())
            nets.append(net)
        common = averaged(nets)
    assert torch.allclose(run.server["w"], flat(common), atol=1e-12)


# FedDBE


@certifies(pf.FedDBE, by="autograd on the shifted features, with the running mean of batches")
@pytest.mark.parametrize(("kappa", "decay"), [(3.0, 0.0), (0.0, 0.0), (3.0, 0.1)])
def test_rounds_of_feddbe(kappa, decay):
    """Two rounds after the initial training of everybody, whose running means alone are kept."""
    method = pf.FedDBE(LR, kappa=kappa, momentum=0.3)
    run = fit_labels(labelled(), method, 2, local_steps=STEPS, weight_decay=decay)

    def trained(start, mu, x, y, target):
        net, mu, m = copy.deepcopy(start), mu.clone().requires_grad_(), torch.zeros(5).double()
        for _ in range(STEPS):
            f = features(net, x)
            m = 0.7 * m.detach() + 0.3 * f.mean(0)
            loss = F.cross_entropy(net[-1](f + mu), y)
            loss = loss + decay / 2 * sum(q.square().sum() for q in [*net.parameters(), mu])
            if target is not None:
                loss = loss + kappa * (0.5 * (m - target).square()).mean()
            grads = torch.autograd.grad(loss, [*net.parameters(), mu])
            for q, g in zip([*net.parameters(), mu], grads, strict=True):
                if target is not None or not kappa or q is not mu:
                    q.data -= LR * g
        return net, mu.detach(), m.detach()

    common, mus, target = two_layers(), [torch.zeros(5).double()] * 3, None
    if kappa:
        target = SHARE @ torch.stack([trained(common, mus[i], *samples(i), None)[2] for i in range(3)])
        assert torch.allclose(run.server["mean"], target, atol=1e-12)
    for _ in range(2):
        found = [trained(common, mus[i], *samples(i), target) for i in range(3)]
        common, mus = averaged([net for net, *_ in found]), [mu for _, mu, _ in found]
    assert torch.allclose(run.server["w"], flat(common), atol=1e-12)
    for i in range(3):
        x, _ = samples(i)
        assert torch.allclose(run.model(i)(x), common[-1](features(common, x) + mus[i]), atol=1e-12)
    assert len(run.ledger) == 2 * 3
    assert run.ledger["exchanges"].sum() == (9 if kappa else 6)


# FedAS


@certifies(pf.FedAS, by="autograd on the alignment and on each sample's gradient")
@pytest.mark.parametrize("fisher", ["sample", "batch"])
def test_rounds_of_fedas(fisher):
    """Every client aligns a copy of the received body of its own; the head takes no part in that."""
    method = pf.FedAS(LR, align_lr=0.3, align_epochs=2, fisher=fisher)
    run = fit_labels(labelled(), method, 2, local_steps=STEPS)
    common, own = two_layers(), [two_layers() for _ in range(3)]
    for _ in range(2):
        traces = []
        for i in range(3):
            x, y = samples(i)
            M, net = means(own[i], x, y), copy.deepcopy(common)
            net[-1] = own[i][-1]
            for _ in range(2):
                f = features(net, x)
                stepped(net, sum(F.mse_loss(f[y == c], M[c].expand_as(f[y == c])) for c in y.unique()), 0.3, net[:-1])
            for _ in range(STEPS):
                stepped(net, F.cross_entropy(net(x), y))
            each = [(x[k : k + 1], y[k : k + 1]) for k in range(len(x))] if fisher == "sample" else [(x, y)]
            squares = [
                sum(g.square().sum() for g in torch.autograd.grad(F.cross_entropy(net(a), b), [*net.parameters()]))
                for a, b in each
            ]
            traces.append(sum(squares) / len(each))
            own[i] = net
        share = torch.stack(traces) / sum(traces)
        common = averaged(own, share)
    body = Layout(common).mask("body")
    assert torch.allclose(run.server["w"], flat(common)[body], atol=1e-12)
    for i in range(3):
        assert torch.allclose(run.personal[i], torch.where(body, flat(common), flat(own[i])), atol=1e-12)


# FedPAC


@certifies(pf.FedPAC, by="the mixture of two heads in closed form, and its optimality for more")
def test_mixtures_of_heads():
    """a_2 = v_1 / (v_1 + v_2 + |H_1 - H_2|^2); equal means: shares as 1 / v; no point of the simplex is better."""
    H, v = torch.randn(2, 7).double(), torch.rand(2).double()
    gap = (H[0] - H[1]).square().sum()
    expected = torch.stack([v[0], v[1]]) / (v.sum() + gap)
    found = mixtures(H, v, 0.0)
    assert torch.allclose(torch.stack([found[0, 1], found[1, 0]]), expected, atol=1e-12)
    v = torch.rand(5).double() + 0.1
    equal = mixtures(torch.ones(5, 3).double(), v, 0.0)
    assert torch.allclose(equal, ((1 / v) / (1 / v).sum()).expand(5, -1), atol=1e-9)
    H, points = torch.randn(5, 3).double(), torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(5) / 2, 4000))
    for i, mine in enumerate(mixtures(H, v, 0.0)):

        def value(a, i=i):
            return (a.square() * v).sum(-1) + (a @ (H[i] - H)).square().sum(-1)

        assert value(mine) <= value(points).min() + 1e-12
        assert (mine >= 0).all()
    far = mixtures(1e6 * torch.eye(5).double(), v, 1e-3)
    assert torch.allclose(far, torch.eye(5).double())


@certifies(pf.FedPAC, by="autograd on both phases, statistics of features in numpy")
@pytest.mark.parametrize("distance", ["mean", "sum"])
def test_rounds_of_fedpac(distance):
    """Every client has the mixture that was worked out for it, of the heads it was worked out of."""
    method = pf.FedPAC(LR, head_lr=0.3, lam=0.4, head_epochs=1, body_epochs=2, distance=distance, least=0.0)
    run = fit_labels(labelled(), method, 2)
    common, heads, M = two_layers(), [two_layers()[-1] for _ in range(3)], None
    for _ in range(2):
        nets, H, v = [], [], []
        for i in range(3):
            x, y = samples(i)
            net = copy.deepcopy(common)
            net[-1] = copy.deepcopy(heads[i])
            counts = torch.bincount(y, minlength=3).double()
            H.append((counts / len(y))[:, None] * means(net, x, y))
            v.append((features(net, x).square().sum(1).mean() - H[-1].square().sum()).detach() / len(y))
            stepped(net, F.cross_entropy(net(x), y), 0.3, net[-1])
            for _ in range(2):
                f = features(net, x)
                loss = F.cross_entropy(net[-1](f), y)
                if M is not None:
                    gap = (f - M[y]).square()
                    loss = loss + 0.4 * (gap.mean() if distance == "mean" else gap.sum(1).mean())
                stepped(net, loss, LR, net[:-1])
            nets.append(net)
        counts = torch.stack([torch.bincount(samples(i)[1], minlength=3) for i in range(3)]).double()
        each = torch.stack([means(net, *samples(i)) for i, net in enumerate(nets)])
        M = (counts[..., None] * each).sum(0) / counts.sum(0)[:, None]
        a = mixtures(torch.stack(H).flatten(1), torch.stack(v), 0.0)
        common = averaged(nets)
        flats = torch.stack([Layout(net[-1]).flatten(net[-1]) for net in nets])
        heads = [Layout(nets[0][-1]).load_(copy.deepcopy(nets[0][-1]), row) for row in a @ flats]
    assert torch.allclose(run.server["prototypes"], M, atol=1e-10)
    for i in range(3):
        common[-1] = heads[i]
        assert torch.allclose(run.personal[i], flat(common), atol=1e-10)


# FedLC and FedRoD


def margined(z, y, margin):
    """Cross-entropy of z + margin, without the classes whose margin is -inf."""
    kept = margin.isfinite().nonzero()[:, 0]
    return F.cross_entropy(z[:, kept] + margin[kept], torch.searchsorted(kept, y))


def penalty(net, decay):
    return decay / 2 * sum(q.square().sum() for q in net.parameters())


@certifies(pf.FedLC, by="autograd on the loss as printed, an absent class left out of it")
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_round_of_fedlc(decay):
    """Every client calibrates by its own counts. Of an absent class weights and bias get no gradient."""
    run = fit_labels(labelled(), pf.FedLC(LR, tau=0.7), 1, local_steps=STEPS, weight_decay=decay)
    start, nets = two_layers(), [two_layers() for _ in range(3)]
    for i, net in enumerate(nets):
        x, y = samples(i)
        for _ in range(STEPS):
            stepped(
                net, margined(net(x), y, -0.7 * torch.bincount(y, minlength=3).double() ** -0.25) + penalty(net, decay)
            )
    head = nets[2][2]
    assert torch.equal(head.weight[2], start[2].weight[2]) == (decay == 0)
    head.bias.data[2] = start[2].bias[2]  # weight decay of a masked bias is left out
    assert torch.allclose(run.server["w"], flat(averaged(nets)), atol=1e-12)


@certifies(pf.FedRoD, by="autograd on both losses, the personal one stopped at the body and the generic head")
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_two_rounds_of_fedrod(decay):
    """The personal head starts at zero, its output is added to the generic one's, and the body never sees its loss."""
    run = fit_labels(labelled(), pf.FedRoD(LR, personal_lr=0.3), 2, local_steps=STEPS, weight_decay=decay)
    personal, common = [torch.zeros(18).double() for _ in range(3)], two_layers()
    for _ in range(2):
        nets = [copy.deepcopy(common) for _ in range(3)]
        for i, net in enumerate(nets):
            (x, y), p = samples(i), personal[i].requires_grad_()
            for _ in range(STEPS):
                f = features(net, x)
                generic, own = net[2](f), f.detach() @ p[:15].view(3, 5).T + p[15:]
                loss_p = F.cross_entropy(generic.detach() + own, y) + decay / 2 * p.square().sum()
                (slope,) = torch.autograd.grad(loss_p, p)
                stepped(net, margined(generic, y, torch.bincount(y, minlength=3).double().log()) + penalty(net, decay))
                if i == 2:
                    net[2].bias.data[2] = common[2].bias[2]
                p.data -= 0.3 * slope
            personal[i] = p.detach()
        common = averaged(nets)
    w = flat(common)
    assert torch.allclose(run.server["w"], w, atol=1e-12)
    expected = torch.stack([torch.cat([w[:-18], w[-18:] + p]) for p in personal])
    assert torch.allclose(run.personal, expected, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", [pf.FedLC, pf.FedRoD])
def test_a_masked_class_gets_no_gradient_however_long_features_are(method, dtype):
    """The last client has no sample of the last class. Nor does decay with clipping see the mask."""
    for length in torch.tensor([1e-3, 1e6]):
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


@certifies(pf.FedDBE, by="identity with FedAvg in the first step, from mu = 0, and its first mu in closed form")
def test_the_first_step_is_fedavgs():
    run = fit_labels(labelled(), pf.FedDBE(LR, kappa=0.0), 1, local_steps=1)
    average = fit_labels(labelled(), pf.FedAvg(LR), 1, local_steps=1)
    assert torch.allclose(run.server["w"], average.server["w"], atol=1e-12)
    for i in range(3):
        net, (x, y), mean = two_layers(), samples(i), average.model(i)
        mu = -LR * (net(x).softmax(1) - F.one_hot(y, 3)).mean(0) @ net[-1].weight
        assert torch.allclose(run.model(i)(x), mean(x) + mean[-1].weight @ mu, atol=1e-12)
