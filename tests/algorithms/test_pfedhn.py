"""pFedHN: the hypernetwork's step against autograd, and the clients' own optima."""

import numpy as np
import pytest
import torch
from certify import certifies
from problems import LeastSquares

import polyfed as pf


def network(server, v, layers):
    h = v
    for k in range(layers + 1):
        H = server[f"h{k}"]
        h = h @ H[:, :-1].T + H[:, -1]
        h = torch.relu(h) if k < layers else h
    return h


@certifies(pf.PFedHN, by="autograd through the hypernetwork")
@pytest.mark.parametrize("layers", [0, 2])
def test_a_step_is_the_vector_jacobian_product_of_the_moves(layers):
    """Summed over the cohort; vectors of clients that did not take part stay."""
    problem = LeastSquares(seed=2, clients=5, dim=4)
    method = pf.PFedHN(0.05, server_lr=0.3, hidden=6, layers=layers, embedding=3)
    before, after = (problem.fit(method, rounds=r, fraction=0.6) for r in (0, 1))
    state = {k: torch.as_tensor(t).clone().requires_grad_() for k, t in before.server.items() if k != "known"}
    ids = torch.as_tensor(np.sort(after.ledger["client"].unique()))
    theta = network(state, state["v"][ids], layers)
    D = torch.zeros_like(theta)
    for row, i in enumerate(ids.tolist()):
        w = theta[row].detach().numpy().copy()
        for _ in range(5):
            w -= 0.05 * problem.gradient(i, w)
        D[row] = theta[row].detach() - torch.as_tensor(w)
    grads = torch.autograd.grad((theta * D).sum(), [*state.values()])
    for (name, old), g in zip(state.items(), grads, strict=True):
        assert torch.allclose(torch.as_tensor(after.server[name]), old.detach() - 0.3 * g, atol=1e-12), name
    absent = [i for i in range(5) if i not in ids]
    assert torch.equal(torch.as_tensor(after.server["v"])[absent], state["v"].detach()[absent])
    assert torch.allclose(after.personal, network(after.server, torch.as_tensor(after.server["v"]), layers))


def test_a_client_is_drawn_by_its_name():
    """In another order of the clients each has the model that it had."""
    problem, order = LeastSquares(seed=2, clients=5, dim=4), [3, 1, 4, 0, 2]
    how = {"rounds": 2, "local_steps": 2, "batch_size": None, "loss": "mse"}
    a, b = (
        pf.fit(problem.model(), fed, pf.PFedHN(0.05, layers=1), **how).personal
        for fed in (problem.federation, problem.federation.reorder(order))
    )
    assert torch.allclose(a[order], b, atol=1e-12)
    assert (a[0] - a[1]).abs().max() > 1e-3


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_before_training_every_model_is_the_common_start_and_a_little_of_its_own(layers):
    """The start may be far from zero, as where a layer normalises: what a client adds is no larger for it."""
    problem = LeastSquares(seed=2, clients=6, dim=4)
    method = pf.PFedHN(0.05, hidden=30, layers=layers, embedding=5)
    own = []
    for start in (0.0, 100.0):
        model = problem.model()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(start)
        run = pf.fit(model, problem.federation, method, rounds=0, batch_size=None, loss="mse")
        own.append(run.personal - start)
        assert own[-1].abs().max() < 4
        assert torch.equal(torch.as_tensor(run.server[f"h{layers}"])[:, -1], torch.full_like(own[-1][0], start))
        assert own[-1].std(0).min() > 1e-3, "no two clients have one model"
    assert torch.allclose(*own, atol=1e-12)
