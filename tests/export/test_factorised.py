"""Factorised models: the same outputs from fewer numbers, in memory, on disk, and after a run."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import polyfed as pf
from polyfed import models
from polyfed.algorithms._shared.lowrank import sheets
from polyfed.base.errors import ConfigError, ModelError
from polyfed.compute.layout import Layout
from polyfed_export.factorised import Beside, factorised, load, measure, memory, pack, size

NETS = {
    "linear": ((1, 12, 12), {}),
    "mlp": ((1, 12, 12), {"hidden": [40, 30]}),
    "cnn": ((1, 12, 12), {}),
    "lenet": ((3, 14, 14), {}),
    "resnet18": ((3, 16, 16), {}),
}


def low_rank(model: nn.Module, rank: int) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """A vector of the model whose layers have a rank, and the factors of those layers that are smaller so."""
    layout, g = Layout(model), torch.Generator().manual_seed(0)
    w, factors = layout.flatten(model), {}
    for name, sheet in sheets(layout).items():
        if sheet.smaller(rank):
            d1, d2 = sheet.shape
            U, V = (torch.randn(*shape, generator=g, dtype=w.dtype) for shape in ((d1, rank), (rank, d2)))
            factors[name] = U * float(w[sheet.span].std()), V / max(1, rank) ** 0.5
            w[sheet.span] = sheet.fold(factors[name][0] @ factors[name][1])
    return w, factors


def packed(model: nn.Module, rank: int, every: int = 0) -> tuple[nn.Module, dict, dict]:
    """(a copy of the model whose layers have a rank, its tensors as packed, the factors); each `every`-th number of the
    vector is not of that rank."""
    layout, (w, factors) = Layout(model), low_rank(model, rank)
    common = layout.named(w.clone())
    w[:: every or layout.p] += 0.5 * bool(every)
    return layout.load_(copy.deepcopy(model), w), pack(layout.named(w), common, factors), factors


def outputs(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1), dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        return model.eval()(x)


def convolutions(model: nn.Module) -> int:
    return sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules())


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", NETS)
def test_pairs_compute_what_the_dense_layers_do(name, rank):
    shape, options = NETS[name]
    model = models.build(name, shape, 10, **options)
    whole, tensors, factors = packed(model, rank)
    assert factors
    small = factorised(model, tensors)
    assert convolutions(small) == convolutions(model) + len(factors)
    dense, layout = outputs(whole, shape), Layout(model)
    assert (outputs(small, shape) - dense).abs().max() <= 1e-5 * max(1, dense.abs().max())
    if rank:
        numbers = sum(q.numel() for q in small.parameters())
        saved = sum(s.shape[0] * s.shape[1] - s.numbers(rank) for k, s in sheets(layout).items() if k in factors)
        assert numbers == layout.p - saved
        assert size(tensors) == 4 * numbers


CONVOLUTIONS = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (0, 1), "dilation": (1, 2)},
    {"kernel_size": (1, 3), "stride": (2, 3), "padding": (2, 1), "bias": False},
    {"kernel_size": (3, 1), "stride": (2, 3), "padding": (2, 1)},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 3, "padding": "same", "bias": False},
    {"kernel_size": 3, "padding": 2, "padding_mode": "circular"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect", "stride": 2},
]


@pytest.mark.parametrize("sparse", [False, True], ids=["pair", "and a sparse rest"])
@pytest.mark.parametrize("settings", CONVOLUTIONS, ids=str)
def test_every_kind_of_convolution(settings, sparse):
    """In double precision; beside a sparse rest, other padding than zeros in numbers is run dense."""
    conv = nn.Conv2d(14, 16, dtype=torch.float64, **settings)
    whole, tensors, _ = packed(conv, 1, every=50 * sparse)
    found = factorised(conv, tensors, "beside")
    beside = "padding_mode" not in settings and settings.get("padding") != "same"
    assert isinstance(found, Beside if sparse and beside else nn.Sequential if not sparse else nn.Module)
    assert (outputs(found, (14, 9, 8)) - outputs(whole, (14, 9, 8))).abs().max() < 1e-12


def test_largest_ranks_that_save():
    """Two factors are smaller than the matrix up to these ranks: 767 of 1536 x 1536, ... (ResNet-18)."""
    layers = sheets(Layout(models.build("resnet18", (3, 32, 32), 10)))
    largest = {s.shape: max(r for r in range(min(s.shape)) if s.smaller(r)) for s in layers.values()}
    assert largest == {
        (192, 9): 8, (192, 192): 95, (384, 192): 127, (384, 384): 191, (768, 384): 255, (768, 768): 383,
        (1536, 768): 511, (1536, 1536): 767, (128, 64): 42, (256, 128): 85, (512, 256): 170, (10, 512): 9,
    }  # fmt: skip


def test_a_sparse_rest_goes_beside_the_factors_and_is_run_dense():
    model = models.build("mlp", (1, 12, 12), 10)
    whole, tensors, factors = packed(model, 2, every=97)
    for name in factors:
        U, V = factors[name]
        rest = int((dict(whole.named_parameters())[name] != (U @ V).view_as(model.get_parameter(name))).sum())
        assert len(tensors[f"{name}.values"]) == len(tensors[f"{name}.at"]) == rest > 0
    small = factorised(model, tensors)
    assert convolutions(small) == convolutions(model)
    assert (outputs(small, (1, 12, 12)) - outputs(whole, (1, 12, 12))).abs().max() < 1e-5


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", NETS)
def test_a_sparse_rest_beside_the_pairs(name, rank):
    """The same outputs; 8 bytes per nonzero and 4 per row (and one more) beside the pairs' numbers."""
    shape, options = NETS[name]
    model = models.build(name, shape, 10, **options)
    whole, tensors, factors = packed(model, rank, every=97)
    small = factorised(model, tensors, "beside")
    found = [m for m in small.modules() if isinstance(m, Beside)]
    assert len(found) == sum(f"{n}.at" in tensors for n in factors) > 0
    dense = outputs(whole, shape)
    for other in (small, copy.deepcopy(small)):
        assert (outputs(other, shape) - dense).abs().max() <= 1e-5 * max(1, dense.abs().max())
    if rank:
        assert memory(small) == size(tensors) + sum(4 * (m.shape[0] + 1) for m in found)
    forms = measure(model.eval(), tensors, torch.ones(2, *shape), repeats=1)
    assert [f["bytes"] for f in forms.values()][::2] == [4 * Layout(model).p, memory(small)]
    assert model.training is False


def test_linear_layers_on_more_axes_and_unknown_forms():
    linear = nn.Linear(40, 30)
    whole, tensors, _ = packed(linear, 2, every=50)
    found = outputs(factorised(linear, tensors, "beside"), (5, 40))
    assert (found - outputs(whole, (5, 40))).abs().max() < 1e-5
    with pytest.raises(ConfigError, match="sparse: found 'other', expected merged or beside"):
        factorised(linear, tensors, "other")


def test_a_layer_used_twice_stays_one():
    shared = nn.Linear(12, 12)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    whole, tensors, _ = packed(model, 2)
    small = factorised(model, tensors)
    assert small[0] is small[2]
    assert (outputs(small, (12,)) - outputs(whole, (12,))).abs().max() < 1e-5


def test_other_tensors_are_refused(tmp_path):
    model = models.build("mlp", (1, 12, 12), 10)
    _, tensors, _ = packed(model, 2)
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    assert (outputs(load(path, model), (12, 12)) - outputs(factorised(model, tensors), (12, 12))).abs().max() == 0
    for other in (models.build("mlp", (1, 12, 12), 10, hidden=100), models.build("linear", (1, 12, 12), 10)):
        with pytest.raises(ModelError, match=r"a\.safetensors: not the tensors of this model"):
            load(path, other)
    path.write_text("nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        load(path, model)


# after a run


def trained(method: pf.Algorithm, **settings) -> pf.Run:
    return trained_net("lenet", method, **settings)


def trained_net(name: str, method: pf.Algorithm, **settings) -> pf.Run:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(12, 3, 14, 14)).astype(np.float32), rng.integers(3, size=12)) for _ in range(3)]
    federation = pf.Federation.from_arrays(data, test=data, classes=3)
    return pf.fit(models.build(name, (3, 14, 14), 3), federation, method, rounds=3, batch_size=6, **settings)


@pytest.mark.parametrize(
    "method",
    [
        pf.FedSLR(0.05, lam=0.1, eta_g=2.0, mu=0.3),
        pf.FedSLR(0.05, lam=0.1, eta_g=2.0, mu=1e-3),
        pf.FedSLR(0.05, lam=0.1, eta_g=2.0, deploy="gkr"),
        pf.FedSLR(0.05, lam=0.1, eta_g=2.0, structure="LR+LR"),
        pf.GPGD(0.05, lam=2.0),
    ],
    ids=["few", "many", "gkr", "lr+lr", "gpgd"],
)
def test_a_clients_factorised_model_is_its_model(method):
    run = trained(method)
    assert run.trained.algorithm.describe(run.server).factors
    for i in range(3):
        a, b = run.model(i), run.model(i, factorised=True)
        assert (outputs(a, (3, 14, 14)) - outputs(b, (3, 14, 14))).abs().max() < 1e-5
    if isinstance(method, pf.GPGD) or method.deploy == "gkr":
        assert (run.parameters == run.findings["gkr_parameters"]).all()
        b = run.model(0, factorised=True)
        empty = sum(r == 0 for r in run.findings["ranks"].values())
        assert empty or sum(q.numel() for q in b.parameters()) == run.findings["gkr_parameters"]


@pytest.mark.parametrize(("name", "mu"), [("linear", 0.1), ("mlp", 0.03), ("lenet", 0.03)])
def test_a_trained_mixed_model_in_both_forms(name, mu):
    run = trained_net(name, pf.FedSLR(0.05, lam=0.1, eta_g=2.0, mu=mu))
    dense = outputs(run.model(2), (3, 14, 14))
    merged, beside = (run.model(2, factorised=True, sparse=sparse) for sparse in ("merged", "beside"))
    assert any(isinstance(m, Beside) for m in beside.modules())
    for found in (merged, beside):
        assert (outputs(found, (3, 14, 14)) - dense).abs().max() < 1e-5


@pytest.mark.parametrize("method", [pf.FedAvg(), pf.FedSLR(structure="S+S")])
def test_methods_without_a_low_rank_model_say_so(method):
    with pytest.raises(ConfigError, match="does not make low-rank models"):
        trained(method).model(0, factorised=True)


def test_export_writes_the_factors(tmp_path):
    run = trained(pf.FedSLR(0.05, lam=0.1, eta_g=2.0, mu=0.3), out=tmp_path / "run")
    path, about = pf.Run.open(tmp_path / "run").export("1", tmp_path / "one.safetensors", "factorised")
    facts = json.loads(about.read_text())
    assert "cannot be made again" in facts["measured"]["missing"]  # a model and data that were never named
    layers = facts["factorised"]
    assert layers
    for name, layer in layers.items():
        assert layer["rank"] == run.findings["ranks"][name]
    fresh = models.build("lenet", (3, 14, 14), 3, seed=9)
    a, b = run.model(1), load(path, fresh)
    assert (outputs(a, (3, 14, 14)) - outputs(b, (3, 14, 14))).abs().max() < 1e-5
    trained(pf.FedAvg(), out=tmp_path / "other")
    with pytest.raises(ConfigError, match="does not make low-rank models"):
        pf.Run.open(tmp_path / "other").export("1", tmp_path / "two.safetensors", "factorised")
