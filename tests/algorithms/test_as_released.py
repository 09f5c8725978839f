"""Ten methods by their authors' released loops, in plain torch: the optimiser, the order of steps, the decay of lr.

Clients are of equal sizes and have all classes: of what docs/released.md names as not taken over, four readings are
left to make a difference, and are ours here: FedProto's class means are of the trained model, FedRep's decay is of
biases too, APFL's mixture is of parameters, and pFedMe's inner solve begins at w_i."""

import copy
import subprocess
import sys
import tomllib
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from certify import certifies
from problems import batches_of, two_layers
from torch import nn

import polyfed as pf
from polyfed.algorithms.fedpac import mixtures
from polyfed.base.errors import ConfigError
from polyfed.base.settings import kebab
from polyfed.compute.layout import Layout
from polyfed.runs.released import RELEASED

N, ROUNDS = 3, 3


def federation():
    rng = np.random.default_rng(7)
    data = []
    for i in range(N):
        y = rng.permutation(np.arange(60) % 3)
        data.append((rng.normal(size=(60, 4)) + y[:, None] * (1 + 0.3 * i), y))
    return pf.Federation.from_arrays(data, test=data, classes=3)


FED = federation()
DATA = [(x.double(), y) for x, y in map(FED.train.client, range(N))]


def batches(i, t, size, epochs=1, purpose="batches"):
    x, y = DATA[i]
    for at in batches_of(FED, t, size, epochs, purpose)[i]:
        yield x[at], y[at]


def copies(norm=False):
    return [two_layers(norm=norm) for _ in range(N)]


def vector(net):
    return Layout(net).flatten(net).detach()


def mean(nets):
    return torch.stack([vector(net) for net in nets]).mean(0)


def load(net, w):
    return Layout(net).load_(net, w)


def descend(net, optimizer, parts, loss_of):
    """Steps as in a released loop: zero_grad, backward, step."""
    for x, y in parts:
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        optimizer.step()


def cross_entropy(net, x, y):
    return F.cross_entropy(net(x), y)


def class_means(net):
    def of(x, y):
        f = net[:-1](x).detach()
        return torch.stack([f[y == c].mean(0) for c in range(3)])

    return of


def fedproto():
    nets, M = copies(), None
    for t in range(ROUNDS):
        for i, net in enumerate(nets):

            def loss(net, x, y, M=M):
                f = net[:-1](x)
                pull = 0 if M is None else F.mse_loss(f, M[y])
                return F.cross_entropy(net[-1](f), y) + pull

            descend(net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5), batches(i, t, 4), loss)
        M = torch.stack([class_means(net)(*DATA[i]) for i, net in enumerate(nets)]).mean(0)
    return [torch.cat([vector(net)[:-18], (2 * M).reshape(-1), -M.square().sum(1)]) for net in nets]


def averaged(train):
    """The common model of rounds in which `train(t, i, net, common)` trains a copy of it for every client."""
    common = two_layers()
    for t in range(ROUNDS):
        nets = [copy.deepcopy(common) for _ in range(N)]
        for i, net in enumerate(nets):
            train(t, i, net, common)
        common = load(copy.deepcopy(common), mean(nets))
    return common


def slope(net, x, y):
    grads = torch.autograd.grad(cross_entropy(net, x, y), [*net.parameters()])
    return torch.cat([g.reshape(-1) for g in grads])


def moon():
    last, cosine = copies(), nn.CosineSimilarity(dim=-1)

    def train(t, i, net, common):
        def loss(net, x, y, far=last[i]):
            z, near, far = net[:-1](x), common[:-1](x).detach(), far[:-1](x).detach()
            logits = torch.stack([cosine(z, near), cosine(z, far)], 1) / 0.5
            return F.cross_entropy(net[-1](z), y) + 5 * F.cross_entropy(logits, torch.zeros(len(x)).long())

        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
        descend(net, optimizer, batches(i, t, 64, 10), loss)
        last[i] = net

    return [vector(averaged(train))] * N


def fedntd():
    def train(t, i, net, common):
        def loss(net, x, y):
            z, teacher, others = net(x), common(x).detach(), F.one_hot(y, 3) == 0
            z_not, t_not = (v[others].view(len(x), 2) for v in (z, teacher))
            kept = F.kl_div(z_not.log_softmax(1), t_not.softmax(1), reduction="batchmean")
            return F.cross_entropy(z, y) + kept

        optimizer = torch.optim.SGD(net.parameters(), lr=0.01 * 0.99**t, momentum=0.9, weight_decay=1e-5)
        descend(net, optimizer, batches(i, t, 50, 5), loss)

    return [vector(averaged(train))] * N


def fedbn():
    nets = copies(norm=True)
    shared = ~Layout(nets[0]).mask("norm")
    for t in range(ROUNDS):
        for i, net in enumerate(nets):
            descend(net, torch.optim.SGD(net.parameters(), lr=0.01), batches(i, t, 32), cross_entropy)
        common = mean(nets)
        for net in nets:
            load(net, torch.where(shared, common, vector(net)))
    return [vector(net) for net in nets]


def fedrep():
    nets = copies()
    head = Layout(nets[0]).mask("head")
    for t in range(ROUNDS):
        for i, net in enumerate(nets):
            # one optimiser for both phases: what is frozen has no gradient, and is left out of its steps
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5, weight_decay=1e-4)
            for trained, epochs, purpose in (("2", 10, "head"), ("0", 1, "body")):
                for name, q in net.named_parameters():
                    q.requires_grad_(name.startswith(trained))
                optimizer.zero_grad()
                descend(net, optimizer, batches(i, t, 10, epochs, purpose), cross_entropy)
            net.requires_grad_(True)
        common = mean(nets)
        for net in nets:
            load(net, torch.where(head, vector(net), common))
    return [vector(net) for net in nets]


def ditto():
    own = copies()

    def train(t, i, net, common):
        for _, (x, y) in zip(range(2), batches(i, t, 16), strict=False):
            for mine, lam in ((own[i], 1.0), (net, 0.0)):
                w = vector(mine)
                load(mine, w - 0.05 * (slope(mine, x, y) + lam * (w - vector(common))))

    averaged(train)
    return [vector(net) for net in own]


def apfl():
    own = copies()

    def train(t, i, net, common):
        lr = 0.1 / 1.01**t
        for x, y in batches(i, t, 50):
            mixed = load(copy.deepcopy(net), (vector(own[i]) + vector(net)) / 2)
            grads = slope(mixed, x, y)
            torch_step = torch.optim.SGD(net.parameters(), lr=lr, weight_decay=1e-4)
            descend(net, torch_step, [(x, y)], cross_entropy)
            load(own[i], vector(own[i]) - lr * 0.5 * (grads + 1e-4 * vector(mixed)))

    common = averaged(train)
    return [(vector(net) + vector(common)) / 2 for net in own]


def pfedme():
    own = copies()

    def train(t, i, net, common):
        for _, (x, y) in zip(range(20), batches(i, t, 20, 7), strict=False):
            theta, w = copy.deepcopy(net), vector(net)
            for _ in range(5):
                u = vector(theta)
                load(theta, u - 0.09 * (slope(theta, x, y) + 15 * (u - w) + 1e-3 * u))
            load(net, w - 15 * 0.005 * (w - vector(theta)))
        own[i] = theta

    averaged(train)
    return [vector(net) for net in own]


def fedala():
    common, nets = two_layers(), copies()
    weights, trained = [None] * N, [False] * N
    for t in range(ROUNDS):
        for i, net in enumerate(nets):
            if (vector(net) != vector(common)).any():
                load(net, torch.cat([vector(common)[:-18], vector(net)[-18:]]))
                head, theirs = vector(net)[-18:], vector(common)[-18:]
                A = torch.ones(18).double() if weights[i] is None else weights[i]
                mixed, losses = copy.deepcopy(net), []
                while True:
                    parts = [*batches(i, t, 10, 1, f"weights {len(losses)}")]
                    for x, y in parts[: int(np.ceil(0.8 * len(parts)))]:
                        load(mixed, torch.cat([vector(net)[:-18], head + (theirs - head) * A]))
                        loss = cross_entropy(mixed, x, y)
                        g = torch.cat([v.reshape(-1) for v in torch.autograd.grad(loss, [*mixed[-1].parameters()])])
                        A = (A - (theirs - head) * g).clamp(0, 1)
                    losses.append(float(loss.detach()))
                    if trained[i] or (len(losses) > 10 and np.std(losses[-10:]) < 0.1):
                        break
                weights[i], trained[i] = A, True
                load(net, torch.cat([vector(net)[:-18], head + (theirs - head) * A]))
            descend(net, torch.optim.SGD(net.parameters(), lr=0.005), batches(i, t, 10), cross_entropy)
        common = load(copy.deepcopy(common), mean(nets))
    return [vector(net) for net in nets]


def fedpac():
    nets, centres, heads = copies(), None, None
    for t in range(ROUNDS):
        H, v = [], []
        for i, net in enumerate(nets):
            x, y = DATA[i]
            f, share = net[:-1](x).detach(), 1 / 3  # of every class
            H.append(share * class_means(net)(x, y))
            v.append((f.square().sum(1).mean() - H[-1].square().sum()) / len(y))
            for trained, lr, epochs, purpose in (("2", 0.1, 1, "head"), ("0", 0.01, 5, "body")):
                some = [q for name, q in net.named_parameters() if name.startswith(trained)]
                pull = centres if purpose == "body" else None

                def loss(net, x, y, pull=pull):
                    f = net[:-1](x)
                    return F.cross_entropy(net[-1](f), y) + (0 if pull is None else F.mse_loss(f, pull[y]))

                optimizer = torch.optim.SGD(some, lr=lr, momentum=0.5, weight_decay=5e-4)
                descend(net, optimizer, batches(i, t, 50, epochs, purpose), loss)
        centres = torch.stack([class_means(net)(*DATA[i]) for i, net in enumerate(nets)]).mean(0)
        shares = mixtures(torch.stack(H).flatten(1), torch.stack(v), 1e-3)
        body, heads = mean(nets)[:-18], shares @ torch.stack([vector(net)[-18:] for net in nets])
        for net, head in zip(nets, heads, strict=True):
            load(net, torch.cat([body, head]))
    return [vector(net) for net in nets]


LOOPS = {
    "apfl": (pf.APFL, apfl), "ditto": (pf.Ditto, ditto), "fedala": (pf.FedALA, fedala), "fedbn": (pf.FedBN, fedbn),
    "fedntd": (pf.FedNTD, fedntd), "fedpac": (pf.FedPAC, fedpac), "fedproto": (pf.FedProto, fedproto),
    "fedrep": (pf.FedRep, fedrep), "moon": (pf.MOON, moon), "pfedme": (pf.PFedMe, pfedme),
}  # fmt: skip


@certifies(
    pf.APFL, pf.Ditto, pf.FedALA, pf.FedBN, pf.FedNTD, pf.FedPAC, pf.FedProto, pf.FedRep, pf.MOON, pf.PFedMe,
    by="a transcription in torch of the released loop, three rounds",
)  # fmt: skip
@pytest.mark.parametrize("name", LOOPS)
def test_a_run_as_released_is_the_released_loop(name):
    model, expected = two_layers(norm=name == "fedbn"), torch.stack(LOOPS[name][1]())
    run = pf.fit(model, FED, LOOPS[name][0](), rounds=ROUNDS, as_released=True, evaluate_every=0)
    assert run.personal.dtype == torch.float64
    assert torch.allclose(run.personal, expected, rtol=0, atol=1e-10)


def test_every_preset_has_its_loop_and_is_another_run_than_the_default():
    assert LOOPS.keys() == RELEASED.keys()
    for name, row in RELEASED.items():
        method, training = pf.released(name)
        assert method == LOOPS[name][0](**row.method)
        run = pf.fit(two_layers(norm=name == "fedbn"), FED, method, training, rounds=1, evaluate_every=0)
        same = pf.fit(
            two_layers(norm=name == "fedbn"), FED, type(method)(), rounds=1, evaluate_every=0, as_released=True
        )
        plain = pf.fit(two_layers(norm=name == "fedbn"), FED, type(method)(), rounds=1, evaluate_every=0)
        assert torch.equal(run.personal, same.personal)
        assert torch.equal(run.personal, plain.personal) == (name == "fedbn")  # whose defaults are the released ones
        assert {f.name for f in fields(method)} >= row.method.keys()


def test_a_comparison_trains_each_method_by_its_own_and_the_others_by_the_settings_given():
    found = pf.compare(two_layers(), FED, [pf.MOON(), pf.Ditto(), pf.FedAvg()], seeds=1, rounds=1, as_released=True)
    alone = [pf.fit(two_layers(), FED, *pf.released(name), rounds=1) for name in ("moon", "ditto")]
    alone.append(pf.fit(two_layers(), FED, pf.FedAvg(), rounds=1))
    for done, run in zip(found.results, alone, strict=True):
        assert torch.equal(done.run.personal, run.personal)
    tuned = pf.fit(two_layers(), FED, pf.MOON(mu=0.5), rounds=1, as_released=True)
    assert torch.equal(
        tuned.personal, pf.fit(two_layers(), FED, pf.MOON(mu=0.5), pf.released("moon")[1], rounds=1).personal
    )


@pytest.mark.parametrize(
    ("method", "given", "facts"),
    [
        (pf.MOON(), {"batch_size": 16}, ("batch-size", "16", "64", "moon")),
        (pf.MOON(), {"local_steps": 5}, ("local-steps", "5", "none", "moon")),
        (pf.Ditto(), {"optimizer": "adam"}, ("optimizer", "adam", "sgd", "ditto")),
        (pf.FedAvg(), {}, ("as-released", "fedavg", "fedproto")),
    ],
)
def test_what_contradicts_a_preset_is_refused(method, given, facts):
    with pytest.raises(ConfigError) as error:
        pf.fit(two_layers(), FED, method, rounds=1, as_released=True, **given)
    assert all(fact in str(error.value) for fact in facts)


def test_the_command_shows_every_row(cli):
    for name, row in RELEASED.items():
        shown = cli("algorithms", name).out.replace("\n", " ")
        assert all(text.split()[-1] in shown for text in (row.source, row.apart))


def test_from_the_command_line_each_run_says_what_it_was_trained_with(cli, tmp_path):
    cli("compare", "ditto", "moon", "fedavg", "--as-released", "--model", "mlp", "--rounds", "1", "--seeds", "1",
        "--out", tmp_path / "out")  # fmt: skip
    for name in ("ditto", "moon"):
        (file,) = (tmp_path / "out" / "runs").glob(f"{name}*/config.toml")
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        for key, value in RELEASED[name].training.items():
            assert table[kebab(key)] == value
        for key, value in RELEASED[name].method.items():
            assert table["algorithm"][kebab(key)] == value


def test_a_program_may_begin_with_it():
    """No other name of polyfed has been touched, which would bring the methods."""
    code = "import polyfed as pf; print(pf.released('moon')[0])"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.startswith("MOON(")
