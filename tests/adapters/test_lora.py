"""Methods for LoRA adapters: identities between them, exact means by dense algebra, and bytes by formula."""

import numpy as np
import pytest
import torch
from certify import certifies
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError, ModelError
from polyfed.base.randomness import generator, key_of
from polyfed.models import adapted, merged
from polyfed_adapters.adapters import LoRA
from polyfed_adapters.lora import mean_of_products, product

M, K, R, C = 7, 6, 2, 3  # an adapted layer [M, K] of rank R, a head of C outputs
RNG = np.random.default_rng(0)
SITES = [(RNG.normal(size=(n, K)), np.arange(n) % C) for n in (12, 9, 15)]
EVERY = (
    pf.FedExLoRA(lr=0.3),
    pf.FLoRA(lr=0.3),
    pf.FFALoRA(lr=0.3),
    pf.RoLoRA(lr=0.3),
    pf.FlexLoRA(lr=0.3),
    pf.HetLoRA(lr=0.3, gamma=1.0),
    pf.FedRPCA(lr=0.3, beta=1.0),
)
FEDIT = pf.FedAvg(lr=0.3)  # on both factors


def net(train: str = "factors", b: float = 0.0) -> nn.Module:
    """A layer with both factors trained beside it, which B = b begin at, and a head."""
    torch.manual_seed(0)
    model = adapted(nn.Sequential(nn.Linear(K, M), nn.Tanh(), nn.Linear(M, C)).double(), f"lora:r={R},train={train}")
    layer(model).B.data += b * torch.randn(M, R).double()
    return model


def layer(model: nn.Module) -> LoRA:
    (found,) = (m for m in model.modules() if isinstance(m, LoRA))
    return found


def fit(method: pf.Algorithm, sites=SITES, rounds: int = 1, b: float = 0.0, **settings) -> pf.Run:
    fed = pf.Federation.from_arrays(sites, test_fraction=0.0, classes=C)
    given = {"batch_size": None, "local_steps": 4, "dtype": torch.float64, "evaluate_every": 0} | settings
    return pf.fit(net(method.adapter_train or "factors", b), fed, method, rounds=rounds, **given)


def deployed(run: pf.Run, client: int = 0) -> torch.Tensor:
    """The weights that a client computes with, those of the head at the end."""
    model = merged(run.model(client))
    return torch.cat([q.detach().flatten() for q in model.parameters()])


def alone(sites=SITES, b: float = 0.0, a: np.ndarray | None = None) -> list[nn.Module]:
    """Clients' models after four steps from the common start, or from another A, by torch's own optimiser."""
    models = []
    for x, y in sites:
        model = net(b=b)
        if a is not None:
            layer(model).A.data = torch.tensor(a)
        steps = torch.optim.SGD([q for q in model.parameters() if q.requires_grad], lr=0.3)
        for _ in range(4):
            steps.zero_grad()
            nn.functional.cross_entropy(model(torch.as_tensor(x)), torch.as_tensor(y)).backward()
            steps.step()
        models.append(model)
    return models


def dense_mean(models: list[nn.Module], weights: np.ndarray) -> torch.Tensor:
    """W0 + c sum_i p_i B_i A_i."""
    p = torch.as_tensor(weights / weights.sum())
    layers = [layer(m) for m in models]
    return layers[0].base.weight + layers[0].scale * sum(pi * q.B @ q.A for pi, q in zip(p, layers, strict=True))


@certifies(pf.FedExLoRA, by="the dense mean of torch.optim's updates")
@pytest.mark.parametrize("rounds", [1, 3])
def test_fedex_deploys_the_mean_of_the_updates(rounds):
    run = fit(pf.FedExLoRA(lr=0.3), b=0.5)
    found = merged(run.model(0))[0].weight
    expected = dense_mean(alone(b=0.5), np.array([12, 9, 15]))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    later = fit(pf.FedExLoRA(lr=0.3), b=0.5, rounds=rounds)
    assert layer(later.model(0)).R.norm() > 1e-6, "the mean of the factors is not the mean of the updates"


@certifies(pf.FedExLoRA, by="the dense mean less the product of means")
@pytest.mark.parametrize("method", [pf.FedExLoRA(lr=0.3), pf.FedAvg(lr=0.3, aggregation_error=True)])
def test_how_much_the_mean_of_factors_misses(method):
    """Round by round, of the updates that are averaged; with one client nothing."""
    p, layers = torch.tensor([12.0, 9, 15]).double() / 36, [layer(m) for m in alone(b=0.5)]
    mean = sum(pi * q.B @ q.A for pi, q in zip(p, layers, strict=True))
    B, A = (sum(pi * getattr(q, name) for pi, q in zip(p, layers, strict=True)) for name in "BA")
    history = fit(method, b=0.5, evaluate_every=1).history
    expected = float((mean - B @ A).detach().norm() / mean.detach().norm())
    assert expected > 1e-4
    assert history.aggregation_error.iloc[-1] == pytest.approx(expected, rel=0, abs=1e-12)
    assert fit(method, SITES[:1], b=0.5).history.aggregation_error.iloc[-1] < 1e-12


def test_what_reads_clients_uploads_is_asked_for():
    """Without the setting FedAvg takes sums, and trains to the same model."""
    plain, asked = fit(FEDIT, b=0.5, evaluate_every=1), fit(pf.FedAvg(lr=0.3, aggregation_error=True), b=0.5)
    assert "aggregation_error" not in plain.history
    pytest.importorskip("polyfed_privacy")
    with pytest.raises(ConfigError, match="the server of fedavg needs every client's own w; without aggregation-error"):
        fit(pf.FedAvg(aggregation_error=True), privacy={"sums": "secure"})
    assert torch.allclose(plain.server["w"], asked.server["w"], rtol=0, atol=1e-14)
    for words in ("chart", "residual"):
        fed = pf.Federation.from_arrays(SITES, test_fraction=0.0, classes=C)
        with pytest.raises(ModelError, match="expected an adapter such as lora:r=8,train=factors"):
            pf.fit(net(words), fed, pf.FedAvg(aggregation_error=True), rounds=1)


@certifies(pf.FLoRA, by="the dense mean of torch.optim's updates")
def test_floras_stack_is_the_mean_of_products():
    """From the drawn A and B = 0, client by client."""
    found = layer(fit(pf.FLoRA(lr=0.3)).model(0))
    drawn = generator(0, "flora", 0, key_of("0")).uniform(-1, 1, (R, K)) / np.sqrt(K)
    expected = dense_mean(alone(a=drawn), np.array([12, 9, 15]))
    assert torch.allclose(found.weight, expected, rtol=0, atol=1e-12)
    assert (found.B == 0).all()
    assert torch.linalg.matrix_rank(found.R) == min(len(SITES) * R, M, K)


@certifies(pf.FFALoRA, pf.RoLoRA, pf.FlexLoRA, pf.HetLoRA, pf.FedExLoRA, pf.FedRPCA, by="one client: local training")
@pytest.mark.parametrize("method", [m for m in EVERY if not isinstance(m, pf.FLoRA)], ids=lambda m: m.name)
def test_of_one_client_each_deploys_what_it_trained(method):
    """FFA-LoRA and RoLoRA train B and the head in the first round, the others A too."""
    found = deployed(fit(method, SITES[:1]))
    if isinstance(method, pf.FFALoRA | pf.RoLoRA):
        model = net()
        layer(model).A.requires_grad_(False)
        fed = pf.Federation.from_arrays(SITES[:1], test_fraction=0.0, classes=C)
        settings = {"batch_size": None, "local_steps": 4, "dtype": torch.float64, "evaluate_every": 0}
        expected = deployed(pf.fit(model, fed, pf.Local(lr=0.3), rounds=1, **settings))
    else:
        expected = deployed(fit(pf.Local(lr=0.3), SITES[:1]))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@certifies(pf.FFALoRA, by="FedAvg of B, which equal A make exact")
def test_with_equal_a_the_mean_of_factors_is_exact():
    """FFA-LoRA deploys the mean of what its clients would deploy alone; FedAvg on both factors does not."""
    p = torch.tensor([12, 9, 15]).double() / 36
    for method, exact in ((pf.FFALoRA(lr=0.3), True), (FEDIT, False)):
        own = [deployed(fit(method, [site], b=0.5)) for site in SITES]
        apart = (deployed(fit(method, b=0.5)) - sum(pi * w for pi, w in zip(p, own, strict=True))).abs().max()
        assert (apart < 1e-12) == exact


@certifies(pf.FlexLoRA, by="the dense SVD of the mean of products")
@pytest.mark.parametrize("sites", [SITES, [SITES[0]] * 3])
def test_flexlora_deploys_the_best_approximation_of_the_mean(sites):
    counts = np.array([len(y) for _, y in sites])
    found = layer(fit(pf.FlexLoRA(lr=0.3), sites, b=0.5).model(0))
    mean = (dense_mean(alone(sites, b=0.5), counts) - found.base.weight) / found.scale
    U, S, V = torch.linalg.svd(mean.detach(), full_matrices=False)
    assert torch.allclose(found.B @ found.A, U[:, :R] * S[:R] @ V[:R], rtol=0, atol=1e-12)
    assert torch.allclose(found.A @ found.A.T, found.B.T @ found.B, rtol=0, atol=1e-12), "the root on both sides"


@certifies(pf.FlexLoRA, pf.HetLoRA, by="ranks in what clients deploy")
@pytest.mark.parametrize("method", [pf.FlexLoRA(lr=0.3, least=1), pf.HetLoRA(lr=0.3, least=1, gamma=1.0)])
def test_ranks_differ_by_name_and_bind(method):
    sites = [SITES[i % 3] for i in range(8)]
    run = fit(method, sites, rounds=2, b=0.5)
    ranks = [int(torch.linalg.matrix_rank(layer(run.model(i)).B.detach())) for i in range(8)]
    assert set(ranks) == {1, 2}
    again = fit(method, sites, rounds=2, b=0.5, seed=1)
    assert [int(torch.linalg.matrix_rank(layer(again.model(i)).B.detach())) for i in range(8)] == ranks


@certifies(pf.HetLoRA, by="FedAvg of equal updates")
def test_hetlora_without_pruning_weighs_by_the_size_of_updates():
    models, run = alone(b=0.5), fit(pf.HetLoRA(lr=0.3, gamma=1.0), b=0.5)
    sizes = torch.stack([(layer(m).B @ layer(m).A).norm() for m in models]).detach()
    for part in ("A", "B"):
        own = torch.stack([getattr(layer(m), part).detach() for m in models])
        expected = (sizes[:, None, None] * own).sum(0) / sizes.sum()
        assert torch.allclose(getattr(layer(run.model(0)), part), expected, rtol=0, atol=1e-12)
    same = [SITES[0]] * 3
    found, fedit = (deployed(fit(method, same)) for method in (pf.HetLoRA(lr=0.3, gamma=1.0), FEDIT))
    assert torch.allclose(found, fedit, rtol=0, atol=1e-12)


def test_hetloras_penalty_prunes_what_it_pulls_to_zero():
    run = fit(pf.HetLoRA(lr=0.1, lam=3.0, gamma=0.5), rounds=30, b=0.5)
    assert all(int(torch.linalg.matrix_rank(layer(run.model(i)).B.detach())) == 1 for i in range(3))


@certifies(pf.RoLoRA, by="the frozen half, bit for bit")
def test_rolora_moves_one_factor_a_round():
    start = layer(net(b=0.5))
    runs = [layer(fit(pf.RoLoRA(lr=0.3), b=0.5, rounds=t).model(0)) for t in (1, 2, 3)]
    assert torch.equal(runs[0].A, start.A)
    assert not torch.equal(runs[0].B, start.B)
    assert torch.equal(runs[1].B, runs[0].B)
    assert not torch.equal(runs[1].A, runs[0].A)
    assert torch.equal(runs[2].A, runs[1].A)


@certifies(pf.FedSALoRA, by="torch.optim, client by client")
def test_fedsa_shares_a_and_keeps_b():
    run, models = fit(pf.FedSALoRA(lr=0.3), b=0.5), alone(b=0.5)
    mean = torch.stack([layer(m).A.detach() for m in models]).mean(0)
    for i, model in enumerate(models):
        assert torch.allclose(layer(run.model(i)).A, mean, rtol=0, atol=1e-12)
        assert torch.allclose(layer(run.model(i)).B, layer(model).B, rtol=0, atol=1e-12)
        assert torch.allclose(run.model(i)[-1].weight, model[-1].weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", EVERY, ids=lambda m: m.name)
def test_a_layer_as_narrow_as_the_rank_is_no_special_case(method):
    """Layers [2, 2] and [2, 6] of rank 2: A and B are told by their names. Of equal clients all are local training."""
    fed = pf.Federation.from_arrays([SITES[0]] * 3, test_fraction=0.0, classes=C)
    one = pf.Federation.from_arrays([SITES[0]], test_fraction=0.0, classes=C)
    torch.manual_seed(0)
    narrow = nn.Sequential(nn.Linear(K, R), nn.Tanh(), nn.Linear(R, R), nn.Linear(R, C)).double()
    settings = {"batch_size": None, "dtype": torch.float64, "adapter": f"lora:r={R},train={method.adapter_train}"}
    runs = [pf.fit(narrow, data, method, rounds=3, **settings) for data in (fed, one)]
    assert torch.allclose(*[deployed(run) for run in runs], rtol=0, atol=1e-12)


@certifies(pf.FLoRA, pf.FedExLoRA, by="bytes of the stack, while its factors are smaller")
def test_merged_updates_go_down_as_factors_while_these_are_smaller():
    """Two clients of rank 1 on a wide layer: r n (m + k) numbers of FLoRA after one round, r (n - 1) (m + k) of
    FedEx-LoRA's residual, and the matrix once those are more."""
    wide, n = 20, 2
    sites = [(RNG.normal(size=(12, wide)), np.arange(12) % C) for _ in range(n)]
    fed = pf.Federation.from_arrays(sites, test_fraction=0.0, classes=C)
    settings = {"batch_size": None, "local_steps": 2, "dtype": torch.float64, "evaluate_every": 0}
    for method, rank in ((pf.FLoRA(lr=0.3), n), (pf.FedExLoRA(lr=0.3), n - 1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, C)).double()
        run = pf.fit(adapted(model, "lora:r=1,train=residual"), fed, method, rounds=12, **settings)
        factors = 0 if method.name == "flora" else 2 * wide
        down = run.ledger.groupby("round")["down_bytes"].max() // 8 - (factors + wide * C + C)
        expected = [min(t * rank * 2 * wide, wide * wide) for t in range(12)]
        assert down.tolist()[:5] == expected[:5]
        assert down.max() == wide * wide


@pytest.mark.parametrize("shape", [(3, M, R, K), (9, M, R, K), (1, K, R, M)])
def test_products_by_qr_are_the_dense_ones(shape):
    s, m, r, k = shape
    B, A = torch.randn(s, m, r).double(), torch.randn(s, r, k).double()
    weights = torch.rand(s).double()
    dense = torch.einsum("s,smr,srk->mk", weights / weights.sum(), B, A)
    U, V = mean_of_products(B, A, weights)
    assert torch.allclose(U @ V, dense, rtol=0, atol=1e-12)
    values = torch.linalg.svdvals(dense)[: len(V)]
    assert torch.allclose(V.norm(dim=1) ** 2, values, rtol=1e-12)
    assert len(V) == min(s * r, m, k)
    assert product(0 * B[0], A[0])[0].shape == (m, 0)


@pytest.mark.parametrize("method", EVERY, ids=lambda m: m.name)
def test_a_model_without_such_factors_is_refused(method):
    plain = nn.Sequential(nn.Linear(K, M), nn.Linear(M, C))
    fed = pf.Federation.from_arrays(SITES, test_fraction=0.0)
    for model in (plain, adapted(plain, "lora:r=2")):
        with pytest.raises(ModelError, match=f"expected an adapter such as lora:r=8,train={method.adapter_train}"):
            pf.fit(model, fed, method, rounds=1)


@certifies(pf.FedSALoRA, by="FedPer with A as the body")
def test_fedsa_is_fedper_whose_body_is_a():
    found, other = fit(pf.FedSALoRA(lr=0.3), rounds=3), fit(pf.FedPer(lr=0.3, head="0.B 2"), rounds=3)
    assert torch.equal(found.personal, other.personal)
    assert found.ledger["up_bytes"].tolist() == other.ledger["up_bytes"].tolist()
