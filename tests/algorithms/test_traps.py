"""The traps of docs/traps.md: each has a test; those that belong to no method are here."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import LeastSquares, fit_labels, labelled

import polyfed as pf
from polyfed.core.schedule import Asynchronous, Delays

ROOT = Path(__file__).parents[2]


def named():
    return re.findall(
        r"`((?:tests|src)/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "tables" / "traps" / "traps.csv").read_text()
    )


@pytest.mark.parametrize(("path", "name"), named())
def test_the_tests_that_the_table_names_exist(path, name):
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M)


def test_scaffolds_variates_use_the_decayed_step():
    """Option II in round two: c_i = c_i - c + (x - y) / (k lr_2), the mean of the gradients along the local path."""
    problem = LeastSquares(seed=1, clients=4, dim=3)
    lr, decay, steps = 0.05, 0.5, 3
    run = problem.fit(pf.Scaffold(lr), rounds=2, steps=steps, lr_schedule=f"exponential:{decay}")
    x, c, ci = np.zeros(problem.dim), np.zeros(problem.dim), np.zeros((problem.clients, problem.dim))
    for t in range(2):
        step, moves, used = lr * decay**t, [], []
        for i in range(problem.clients):
            y, seen = x.copy(), []
            for _ in range(steps):
                seen.append(problem.gradient(i, y))
                y = y - step * (seen[-1] - ci[i] + c)
            moves.append(y - x)
            used.append(np.mean(seen, axis=0))
        x, ci = x + np.mean(moves, axis=0), np.array(used)
        c = ci.mean(0)
    found = run.trained.engine.rows.gather(torch.arange(problem.clients))["c"]
    assert np.allclose(found, ci, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "own", "mean"),
    [
        (pf.Scaffold(0.02), "c", "c"),
        (pf.FedDyn(0.02, alpha=5.0), "g", "h"),
        (pf.FedSLR(0.02, lam=0.0, eta_g=0.2), "g", "g"),
    ],
    ids=["scaffold", "feddyn", "fedslr"],
)
def test_cohorts_of_random_size(method, own, mean):
    """Everyone takes part by chance: the optimum is reached, and the server's vector is the mean of all clients'."""
    problem = LeastSquares(seed=1, clients=8, dim=6)
    run = problem.fit(method, rounds=450, schedule=pf.Bernoulli(0.4))
    assert run.ledger.groupby("round").size().nunique() > 4
    assert problem.error(run.server["w"]) < 1e-10
    early = problem.fit(method, rounds=7, schedule=pf.Bernoulli(0.4))
    rows = early.trained.engine.rows.gather(torch.arange(8))
    assert torch.allclose(early.server[mean], rows[own].mean(0), atol=1e-13)
    assert early.server[mean].abs().max() > 0.01


def descend(w, gradient, step, steps):
    for _ in range(steps):
        w = w - step * gradient(w)
    return w


def moreau(f, w, scale):
    """Three local steps of pFedMe, four inner steps each: (w, theta)."""
    theta = w
    for _ in range(3):
        theta = descend(w, lambda u, w=w: f(u) + 2.0 * (u - w), 0.03 * scale, 4)
        w = w - 0.05 * scale * 2.0 * (w - theta)
    return w, theta


DECAYED = {  # (f, x, v, scale) -> (w_i, v_i), f the client's gradient, x as received, v its own model
    "ditto": (
        pf.Ditto(0.05, lam=2.0, personal_epochs=4),
        lambda f, x, v, s: (descend(x, f, 0.05 * s, 3), descend(v, lambda u: f(u) + 2.0 * (u - x), 0.05 * s, 4)),
    ),
    "fedavg-ft": (
        pf.FedAvgFT(0.05, finetune_epochs=4, finetune_lr=0.08),
        lambda f, x, v, s: (descend(x, f, 0.05 * s, 3), descend(x, f, 0.08 * s, 4)),
    ),
    "fedbabu": (
        pf.FedBABU(0.05, finetune_epochs=4, head=""),
        lambda f, x, v, s: (descend(x, f, 0.05 * s, 3), descend(x, f, 0.05 * s, 4)),
    ),
    "pfedme": (pf.PFedMe(0.05, lam=2.0, personal_lr=0.03, inner_steps=4), lambda f, x, v, s: moreau(f, x, s)),
}


@pytest.mark.parametrize("name", DECAYED)
def test_the_personal_solve_decays_with_the_common_one(name):
    """Three rounds by hand: round t + 1 takes steps of lr decay^t, in what stays with the client as in what is sent."""
    problem, decay = LeastSquares(seed=2, clients=5, dim=4), 0.5
    method, update = DECAYED[name]
    x, v = np.zeros(4), np.zeros((5, 4))
    share = np.ones(5) if name == "pfedme" else problem.federation.train.counts
    for t in range(3):
        pairs = [update(lambda w, i=i: problem.gradient(i, w), x, v[i], decay**t) for i in range(5)]
        x, v = np.average([w for w, _ in pairs], axis=0, weights=share), np.array([own for _, own in pairs])
    run = problem.fit(method, rounds=3, steps=3, lr_schedule=f"exponential:{decay}")
    assert np.allclose(run.server["w"], x, atol=1e-12)
    assert np.allclose(run.personal, v, atol=1e-12)


def federation():
    """Two clients with 1 and 9 test samples, x = 1; labels 0 for the first, 1 for the second."""
    train = [
        (torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)),
        (torch.ones(4, 1), torch.ones(4, dtype=torch.int64)),
    ]
    test = [(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)), (torch.ones(9, 1), torch.ones(9, dtype=torch.int64))]
    return pf.Federation.from_arrays(train, test, test_fraction=0.0)


def test_the_last_round_is_reported_not_the_best(tmp_path):
    """A step so large that the loss is worse at the end than before training."""
    fed = federation()
    run = pf.fit(torch.nn.Linear(1, 2), fed, pf.FedAvg(lr=40.0), rounds=6, batch_size=1, out=tmp_path / "run")
    history = run.history.query("split == 'test'").set_index("round")["loss"]
    assert history.iloc[-1] > history.min()
    assert float(run.clients["test_loss"].mean()) == pytest.approx(history.iloc[-1])


def test_the_mean_is_over_clients():
    """All is called class 1: right for the client with 9 of the 10 test samples, 1/2 over clients, 0.9 pooled."""
    model = torch.nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.0, 1.0]))
    run = pf.fit(model, federation(), pf.FedAvg(lr=0.0), rounds=1)
    assert run.history.query("split == 'test'")["accuracy"].iloc[-1] == 0.5


NUMBERS = (pf.FedProx, pf.Ditto, pf.APFL, pf.PFedMe, pf.PerFedAvg, pf.FedAMP, pf.HeurFedAMP, pf.FedACS)
CLASSES = (pf.MOON, pf.FedNTD, pf.FedProto, pf.FedPAC, pf.FedDBE)


@pytest.mark.parametrize("method", NUMBERS + CLASSES, ids=lambda m: m.name)
def test_no_default_makes_a_method_another_one(method):
    """Neither FedAvg's models nor Local's after three rounds; PFLlib's flags make MOON and FedNTD FedAvg."""
    problem = LeastSquares(seed=1, clients=8, dim=3)

    def trained(cls, **settings):
        if method in CLASSES:
            return fit_labels(labelled(), cls(lr=0.2), local_steps=5).personal
        return problem.fit(cls(**settings), rounds=3, steps=5, batch_size=8).personal

    found, fedavg, local = trained(method), trained(pf.FedAvg, weighted=False), trained(pf.Local)
    assert (found - fedavg).abs().max() > 1e-4
    assert (found - local).abs().max() > 1e-4


def test_a_reply_under_way_has_not_touched_the_clients_variate():
    """SCAFFOLD with replies one at a time: c_i moves in the turn in which the reply is taken, and in no other."""
    problem, seen = LeastSquares(seed=1, clients=4, dim=3), [torch.zeros(4, 3, dtype=torch.float64)]

    def note(progress):
        seen.append(progress.run.trained.engine.rows.gather(torch.arange(4))["c"].clone())

    late = Asynchronous(Delays("uniform", 1.0, 5.0))
    ledger = problem.fit(pf.Scaffold(0.02), rounds=12, schedule=late, callbacks=[note]).ledger
    assert ledger["staleness"].max() > 0
    for t, (before, now) in enumerate(itertools.pairwise(seen)):
        moved = (before != now).any(1).nonzero()[:, 0]
        assert moved.tolist() == ledger.loc[ledger["round"] == t, "client"].tolist()


def test_an_absent_client_keeps_its_model():
    """A server that writes its own copies over everybody's would change those of clients that did not take part."""
    problem = LeastSquares(seed=1, clients=6, dim=3)
    keepers = (pf.Local, pf.Ditto, pf.PFedMe, pf.FedAvgFT, pf.FedACS, pf.FedAMP)
    for method in (*(keeper(0.02) for keeper in keepers), pf.FPFC(0.02, merge=False)):
        a, b = (problem.fit(method, rounds=t, steps=2, fraction=0.5) for t in (3, 4))
        there = set(b.ledger.query("round == 3")["client"])
        absent = [i for i in range(6) if i not in there]
        assert len(absent) == 3
        assert torch.equal(a.personal[absent], b.personal[absent]), method.name
        assert not torch.equal(a.personal[sorted(there)], b.personal[sorted(there)])
