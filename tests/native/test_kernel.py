"""The compiled kernel: whom it leaves alone, what it is like to the bit, and what happens where it is not there. Its
steps are compared with torch's in `test_networks.py`."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed import native
from polyfed.base.errors import RunError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Batches, Work
from polyfed.compute.compiled import mixed, path_of, products, renewed
from polyfed.compute.optimizers import Optimizer
from polyfed.compute.solvers import local_sgd, sgd_with_curvature
from polyfed.compute.split import Split
from polyfed.compute.task import Task

BUILT = native.built()
needed = pytest.mark.skipif(BUILT is None, reason="the kernel is not built here")
SIZES = (50, 26, 13, 3, 1)
IN, OUT = 37, 7  # of no instruction set's vectors
CHAINS = {
    "linear": lambda: nn.Linear(IN, OUT),
    "relu": lambda: nn.Sequential(nn.Flatten(), nn.Linear(IN, 33), nn.ReLU(), nn.Linear(33, OUT)),
    "three": lambda: nn.Sequential(
        nn.Linear(IN, 20), nn.Tanh(), nn.Linear(20, 64, bias=False), nn.Sigmoid(), nn.Linear(64, OUT)
    ),
}
WORK = [Work(epochs=2, batch_size=5), Work(epochs=3, batch_size=None), Work(steps=7, batch_size=16)]


def chain(name="relu"):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return CHAINS[name]()


def split_of(loss="cross-entropy", sizes=SIZES, inputs=IN):
    rng = np.random.default_rng(0)

    def client(n):
        y = rng.integers(0, OUT, n) if loss == "cross-entropy" else rng.normal(size=(n, OUT))
        return torch.tensor(rng.normal(size=(n, *np.atleast_1d(inputs)))), torch.tensor(y)

    return Split.of([client(n) for n in sizes])


def batches(split, work, native, clients=None):
    at = np.arange(split.n) if clients is None else np.array(clients)
    return Batches(split, at, client_keys([f"c{i}" for i in range(split.n)])[at], work, 3, 5, native=native)


@pytest.fixture(params=native.SETS)
def instructions(request, monkeypatch):
    """The kernel by each instruction set that this processor has."""
    if BUILT is None or native.SETS.index(request.param) > native.SETS.index(BUILT.set):
        pytest.skip("not on this machine")
    monkeypatch.setattr(BUILT, "set", request.param)


@needed
@pytest.mark.parametrize("n", [0, 1, 2, 5, 63, 64, 65, 1000, 70_000])
def test_orders_are_numpys(n):
    assert BUILT is not None
    key = np.array([2**64 - 1, 12345 + n], dtype=np.uint64)
    rng = np.random.Generator(np.random.Philox(key=key))
    for order in BUILT.permutations(key, 3, n):
        assert (order == rng.permutation(n)).all()


def federation():
    split = split_of()
    x, y = split.x.float().numpy(), split.y.numpy()
    parts = [(x[a:b], y[a:b]) for a, b in zip(split.offsets, split.offsets[1:], strict=False)]
    return pf.Federation.from_arrays(parts, parts, classes=OUT)


@needed
def test_the_kernel_takes_chains_in_plain_steps_and_torch_the_rest():
    convolution = nn.Sequential(nn.Unflatten(1, (1, IN)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(70, OUT))
    two = nn.Sequential(nn.Linear(IN, 5), nn.ReLU(), nn.Tanh(), nn.Linear(5, OUT))
    assert path_of(Task(chain()).net) == path_of(Task(chain(), weight_decay=0.1).net, Work()) == "native"
    assert path_of(Task(chain(), optimizer=Optimizer("momentum")).net) == "closed form"
    assert path_of(Task(chain(), optimizer=Optimizer(clip_norm=1.0)).net) == "closed form"
    assert path_of(Task(chain(), class_weights=[2.0] * OUT).net) == "closed form"
    assert path_of(Task(chain(), dtype=torch.bfloat16).net) == "closed form"
    assert path_of(Task(chain()).net, Work(augment=lambda x, draws: x)) == "closed form"
    assert path_of(Task(two).net) == "closed form"
    other = Task(chain(), nn.functional.cross_entropy)
    assert path_of(other.net) == path_of(Task(convolution).net) == "client by client"


@needed
def test_the_run_folder_says_which_path_was_taken(tmp_path):
    for settings, path in (({}, "native"), ({"optimizer": "momentum"}, "closed form")):
        run = pf.fit(chain(), federation(), pf.FedAvg(lr=0.1), rounds=1, out=tmp_path / path, **settings)
        assert run.trained.engine.plan.path == path
        assert f'path = "{path}"' in (tmp_path / path / "config.toml").read_text()


@needed
def test_a_run_goes_on_only_by_the_path_it_began_on(tmp_path, monkeypatch):
    fed, whole = federation(), {}
    for switch in "10":
        monkeypatch.setenv("POLYFED_NATIVE", switch)
        for out in (tmp_path / switch, tmp_path / f"whole {switch}"):
            rounds = 4 if "whole" in out.name else 2
            whole[switch] = pf.fit(chain(), fed, pf.FedAvg(lr=0.1), rounds=rounds, out=out).personal
    task = chain()
    monkeypatch.setenv("POLYFED_NATIVE", "0")
    with pytest.raises(RunError, match="by the path 'native', here it is 'closed form'"):
        pf.fit(task, fed, pf.FedAvg(lr=0.1), rounds=4, out=tmp_path / "1", resume=True)
    monkeypatch.setenv("POLYFED_NATIVE", "1")
    for switch in "01":  # what torch began, torch goes on with, though the kernel is there
        run = pf.fit(task, fed, pf.FedAvg(lr=0.1), rounds=4, out=tmp_path / switch, resume=True)
        assert torch.equal(run.personal, whole[switch])


def test_without_the_library_torch_trains(monkeypatch):
    monkeypatch.setattr(native, "built", lambda: None)
    run = pf.fit(chain(), federation(), pf.FedAvg(lr=0.1), rounds=2)
    assert run.trained.engine.plan.path == "closed form"
    assert torch.isfinite(run.personal).all()


@needed
def test_a_class_that_the_model_has_no_output_for_is_refused():
    task, split = Task(chain("linear")), split_of().to("cpu", torch.float32)
    split.y[3] = OUT
    with pytest.raises(IndexError):
        local_sgd(task, task.w0.expand(5, -1), batches(split, WORK[0], True), 0.1)


@needed
def test_a_client_that_diverges_leaves_no_curvature_to_the_next():
    task, split = Task(chain("three"), dtype=torch.float64), split_of()
    w = 0.1 * torch.randn(len(SIZES), task.p, dtype=torch.float64)
    calm = sgd_with_curvature(task, w, batches(split, WORK[0], True), 0.05)[1]
    w[1] = torch.nan
    after = sgd_with_curvature(task, w, batches(split, WORK[0], True), 0.05)[1]
    assert torch.equal(after[2:], calm[2:])
    assert (calm > 0).all()


@pytest.mark.parametrize("native", [False, True])
def test_no_curvature_is_measured_where_nothing_moves(native):
    """At an optimum gradients are rounding, and so would be what is measured with mini-batches; 0 says that."""
    task, split = Task(chain("linear"), "mse", dtype=torch.float64), split_of("mse")
    w = task.w0.expand(len(SIZES), -1)
    split.y[:] = task.module(task.w0)(split.x).detach()
    assert (sgd_with_curvature(task, w + 1e-3, batches(split, WORK[0], native), 0.05)[1] > 0).all()
    assert (sgd_with_curvature(task, w, batches(split, WORK[0], native), 0.05)[1] == 0).all()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("name", ["linear", "relu"])
def test_a_client_without_samples_only_drifts(name, batch_size, native, instructions):
    task, split = Task(chain(name)), split_of(sizes=(4, 0)).to("cpu", torch.float32)
    work, shift = Work(steps=3, batch_size=batch_size), torch.ones(2, task.p)
    w = local_sgd(task, task.w0.expand(2, -1), batches(split, work, native), 0.1, shift=shift)
    assert torch.allclose(w[1], task.w0 - 0.3, atol=1e-6)
    alone = local_sgd(task, task.w0[None], batches(split, work, native, [0]), 0.1, shift=shift[:1])
    assert torch.allclose(w[0], alone[0], atol=1e-6)


def test_scaled_targets_are_trained_on_as_torch_does():
    """Of a client whose targets have a unit of their own; the optimiser of a task does not matter to a split."""
    split = split_of("mse", inputs=4)
    split = Split(split.x, split.y[:, 0], split.offsets, torch.rand(len(SIZES), 2).double() + 0.5)
    task = Task(nn.Linear(4, 1), "mse", dtype=torch.float64, optimizer=Optimizer())
    w = task.w0.expand(len(SIZES), -1)
    torchs, ours = (local_sgd(task, w, batches(split, WORK[0], n), 0.1) for n in (False, True))
    assert (torchs - ours).abs().max() < 1e-12


@needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
def test_fpfcs_pair_vectors_are_torchs_to_the_last_bit(dtype, instructions):
    """Of pairs that have a vector and of those that have none: so the server's state does not say who made it."""
    w, delta, keep = torch.randn(9, 61, dtype=dtype), torch.randn(36, 61, dtype=dtype), torch.rand(20, dtype=dtype)
    i, j = torch.triu_indices(9, 9, 1)[:, torch.randperm(36)[:20]]
    row = torch.randperm(36)[:20].masked_fill(torch.rand(20) < 0.3, -1)
    held = row >= 0
    keep[fresh := held.nonzero()[0]], delta[row[fresh]] = 0, torch.nan  # one that enters: what lay there is not read
    found = delta.clone()
    norms = renewed(w, i, j, found, row, keep)
    wanted = w[i] - w[j]
    delta[row[fresh]] = 0
    wanted[held] += keep[held, None] * delta[row[held]]
    assert torch.equal(found, delta.index_copy(0, row[held], wanted[held]))
    assert norms is not None
    assert torch.allclose(norms, wanted.norm(dim=1), rtol=8 * torch.finfo(dtype).eps)
    assert renewed(w, i, j, found.t().contiguous().t(), row, keep) is None


@needed
@pytest.mark.parametrize("p", [3, 61, 2 * 8192 + 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
def test_products_and_sums_of_long_rows(dtype, p, instructions):
    """Products in float64 whatever the rows are, sums in the rows' precision; of all rows, and of some for each sum."""
    W, ids = torch.randn(23, p, dtype=dtype), torch.tensor([4, 0, 22, 7, 9, 11, 3])
    found = products(W, ids)
    assert found is not None
    for ours, exact in zip(found, (W[ids].double() @ W.double().T, W.double().square().sum(1)), strict=True):
        assert torch.allclose(ours, exact, rtol=1e-13, atol=1e-11)
    weights, rows = torch.rand(7, 23, dtype=dtype), torch.randint(23, (7, 23))
    for ours, terms in ((mixed(weights, W), W), (mixed(weights, W, rows), W[rows])):
        assert ours is not None
        exact = (weights.double()[..., None] * terms.double()).sum(1)
        assert torch.allclose(ours.double(), exact, rtol=0, atol=64 * torch.finfo(dtype).eps)
    assert products(W.t(), ids[:1]) is None
    assert mixed(weights.half(), W.half()) is None
