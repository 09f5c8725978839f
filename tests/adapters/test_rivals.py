"""FedRPCA and FedDPA against their boxes in numpy and torch, and identities that hold in their limits."""

import numpy as np
import pytest
import torch
from certify import certifies
from test_lora import SITES, C, K, M, R, alone, deployed, fit, layer, net
from torch import nn

import polyfed as pf
from polyfed.base.errors import ModelError
from polyfed_adapters.fedrpca import robust_pca

PLAIN = pf.FedAvg(lr=0.3, weighted=False)


def parted(X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Robust PCA as Candès et al. write it: a whole singular value decomposition in every iteration."""
    lam, mu = 1 / np.sqrt(max(X.shape)), X.size / (4 * np.abs(X).sum())
    S, Y = np.zeros_like(X), np.zeros_like(X)
    for _ in range(1000):
        U, s, V = np.linalg.svd(X - S + Y / mu, full_matrices=False)
        low = U @ np.diag(np.maximum(s - 1 / mu, 0)) @ V
        T = X - low + Y / mu
        S = np.sign(T) * np.maximum(np.abs(T) - lam / mu, 0)
        Y = Y + mu * (X - low - S)
        if np.linalg.norm(X - low - S) <= 1e-7 * np.linalg.norm(X):
            return low, S
    raise AssertionError("it has not converged")


@certifies(pf.FedRPCA, by="its box in numpy, on updates by torch.optim")
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_fedrpca_is_its_box(beta):
    models, start, found = alone(b=0.5), layer(net(b=0.5)), fit(pf.FedRPCA(lr=0.3, beta=beta), b=0.5).model(0)
    for part in "AB":
        before = getattr(start, part).detach().numpy()
        updates = np.stack([(getattr(layer(m), part).detach().numpy() - before).ravel() for m in models], 1)
        S = parted(updates)[1]
        assert 0 < (S != 0).mean() < 1
        expected = before + ((updates - S).mean(1) + beta * S.mean(1)).reshape(before.shape)
        assert np.abs(getattr(layer(found), part).detach().numpy() - expected).max() < 1e-12
    head = torch.stack([m[-1].weight for m in models]).mean(0)
    assert torch.allclose(found[-1].weight, head, rtol=0, atol=1e-12), "the head has a plain mean"


@certifies(pf.FedRPCA, by="a planted low-rank and sparse matrix, recovered")
def test_robust_pca_recovers_what_was_planted():
    rng = np.random.default_rng(0)
    low = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 60))
    sparse = np.where(rng.random((60, 60)) < 0.05, 10 * rng.normal(size=(60, 60)), 0)
    L, S = robust_pca(torch.as_tensor(low + sparse))
    assert np.abs(L.numpy() - low).max() < 1e-4
    assert ((S.numpy() != 0) >= (sparse != 0)).all()
    assert torch.equal(robust_pca(torch.zeros(4, 3))[1], torch.zeros(4, 3))


@certifies(pf.FedRPCA, by="FedAvg at beta = 1, and of equal updates at every beta")
def test_fedrpca_is_fedavg_where_nothing_is_sparse_or_scaled():
    one, plain = (fit(method, rounds=3, b=0.5) for method in (pf.FedRPCA(lr=0.3, beta=1.0), PLAIN))
    assert torch.allclose(deployed(one), deployed(plain), rtol=0, atol=1e-12)
    same = [SITES[0]] * 12  # enough that the largest number of an update is at most sqrt(12 / its length) of its norm
    many, plain = (fit(method, same, rounds=2, b=0.5) for method in (pf.FedRPCA(lr=0.3, beta=3.0), PLAIN))
    assert torch.allclose(deployed(many), deployed(plain), rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [10, 40])
def test_equal_columns_have_no_sparse_part_until_one_number_stands_out(length):
    """S = 0 just where max |v| / ||v|| <= sqrt(n / length)."""
    n, rest = 4, np.ones(length - 1)
    edge = np.sqrt(n / length / (1 - n / length) * (length - 1))  # the number of v at which it begins
    for by, empty in ((0.98, True), (1.02, False)):
        v = torch.as_tensor(np.append(rest, by * edge))
        S = robust_pca(v[:, None].expand(-1, n))[1]
        assert (S.abs().max() < 1e-6) == empty


def test_fedrpca_moves_as_many_bytes_as_fedavg():
    """r (m + k) numbers and the head each way."""
    sent = fit(pf.FedRPCA(lr=0.3)).ledger
    assert {*sent.up_bytes, *sent.down_bytes} == {8 * (R * (M + K) + C * M + C)}


def dual(lam: float, sites, rounds: int) -> list[list[torch.Tensor]]:
    """FedDPA-T in torch: every client's [weight, bias of the layer, weight, bias of the head] at the end."""
    start, half = net(b=0.5), R // 2
    W0, bias, c = start[0].base.weight, start[0].base.bias, start[0].scale
    A, B, *head = (q.detach() for q in (start[0].A, start[0].B, start[2].weight, start[2].bias))
    common = [A[:half], B[:, :half], *head]
    own = [[A[half:], B[:, half:], *head] for _ in sites]

    def weights(g, v, share):
        layer_weight = W0 + c * ((1 - share) * g[1] @ g[0] + share * v[1] @ v[0])
        return [layer_weight, bias, *((1 - share) * a + share * b for a, b in zip(g[2:], v[2:], strict=True))]

    def trained(free, made, x, y):
        free = [q.clone().requires_grad_() for q in free]
        steps = torch.optim.SGD(free, lr=0.3)
        for _ in range(4):
            steps.zero_grad()
            w, b, hw, hb = made(free)
            out = nn.functional.linear(torch.tanh(nn.functional.linear(torch.as_tensor(x), w, b)), hw, hb)
            nn.functional.cross_entropy(out, torch.as_tensor(y)).backward()
            steps.step()
        return [q.detach() for q in free]

    for t in range(rounds):
        sent, g = [], common
        for i, (x, y) in enumerate(sites):
            if t > 0:
                own[i] = trained(own[i], lambda v, g=g: weights(g, v, lam), x, y)
            sent.append(trained(g, lambda u: weights(u, u, 0.0), x, y))
        common = [torch.stack(parts).mean(0) for parts in zip(*sent, strict=True)]
    return [weights(common, v, lam) for v in own]


@certifies(pf.FedDPA, by="its box in torch, by torch.optim")
@pytest.mark.parametrize(
    ("lam", "sites", "rounds"), [(0.5, SITES, 3), (0.3, SITES, 2), (1.0, SITES, 3), (0.5, SITES[:1], 3)]
)
def test_feddpa_is_its_box(lam, sites, rounds):
    run = fit(pf.FedDPA(lr=0.3, lam=lam), sites, rounds=rounds, b=0.5)
    for i, expected in enumerate(dual(lam, sites, rounds)):
        assert (deployed(run, i) - torch.cat([q.flatten() for q in expected])).abs().max() < 1e-12


@certifies(pf.FedDPA, by="FedAvg of the global adapter at lam = 0; local training of the local one at lam = 1")
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_feddpa_with_one_adapter_alone_is_another_method(lam):
    """Both on half of the rank; the local adapter is a round behind."""
    run, model = fit(pf.FedDPA(lr=0.3, lam=lam), rounds=3, b=0.5), net(b=0.5)
    half = slice(0, R // 2) if lam == 0 else slice(R // 2, R)
    model[0].A, model[0].B = nn.Parameter(model[0].A[half].detach()), nn.Parameter(model[0].B[:, half].detach())
    fed = pf.Federation.from_arrays(SITES, test_fraction=0.0, classes=C)
    settings = {"batch_size": None, "local_steps": 4, "dtype": torch.float64, "evaluate_every": 0}
    method, rounds = (PLAIN, 3) if lam == 0 else (pf.Local(lr=0.3), 2)
    other = pf.fit(model, fed, method, rounds=rounds, **settings)
    for i in range(len(SITES)):
        assert torch.allclose(deployed(run, i), deployed(other, i), rtol=0, atol=1e-12)


def test_feddpa_sends_the_global_adapter_alone():
    """r / 2 (m + k) numbers and the head each way; rank 1 has no halves."""
    sent = fit(pf.FedDPA(lr=0.3), rounds=2).ledger
    assert {*sent.up_bytes, *sent.down_bytes} == {8 * (R // 2 * (M + K) + C * M + C)}
    fed, plain = pf.Federation.from_arrays(SITES, test_fraction=0.0), nn.Sequential(nn.Linear(K, M), nn.Linear(M, C))
    for words, said in (("r=1,train=factors", "found updates of rank 1"), ("r=2", "such as lora:r=8,train=factors")):
        with pytest.raises(ModelError, match=said):
            pf.fit(plain, fed, pf.FedDPA(), rounds=1, adapter=f"lora:{words}")
