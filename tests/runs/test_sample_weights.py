"""Weights of samples and of classes: how much each counts in its client's loss, on every path to a gradient."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError, DataError, PolyfedError
from polyfed.compute import evaluation
from polyfed.compute.batches import Batch, Batches, Work, padded
from polyfed.compute.check import check
from polyfed.compute.gradients import gradient_on, hvp
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.runs.measured import together
from polyfed.runs.resume import digest
from polyfed.runs.weights import weights_of
from polyfed.yardsticks import Commonest, OwnLinear, OwnTrees

SIZES = (9, 7)
EVERYONE = np.arange(len(SIZES))
RISING = [np.arange(1.0, n + 1) for n in SIZES]


class Odd(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.layer = nn.Linear(4, outputs)

    def forward(self, x):
        return self.layer(x) * 2


def sites(classes: bool, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, 4)), rng.integers(0, 3, n) if classes else rng.normal(size=n)) for n in SIZES]


def weighted(classes: bool = True) -> tuple[Split, Split]:
    """Two ragged clients with integer weights, and with that many copies of each sample."""
    data, rng = sites(classes), np.random.default_rng(1)
    weights = [rng.integers(0, 4, n) for n in SIZES]
    copies = [(np.repeat(x, w, 0), np.repeat(y, w)) for (x, y), w in zip(data, weights, strict=True)]
    more = {"test_fraction": 0.0, "classes": 3 if classes else None}
    given = (data, weights), (copies, None)
    return tuple(pf.Federation.from_arrays(pairs, weights=w, **more).train for pairs, w in given)


PATHS = ["closed form", "module", "vectorised"]


def computed(path: str, split: Split, loss="cross-entropy", **weights) -> list[torch.Tensor]:
    """Gradient, loss, step and product with the Hessian of two clients, by a path; the loss is the evaluation's too."""
    outputs = 3 if loss == "cross-entropy" else 1
    task = Task(nn.Linear(4, outputs) if path == "closed form" else Odd(outputs), loss, dtype=torch.float64, **weights)
    check(task, split, 3 if outputs == 3 else None)
    task.net.vectorised = path == "vectorised"
    split = task.place(split)
    w, batch = torch.linspace(0, 1, 2 * task.p, dtype=torch.float64).view(2, -1), padded(split, EVERYONE)
    g, value = task.gradient(w, batch)
    stepped, on = w.clone(), gradient_on(task.net, w, batch)
    task.descend_(stepped, batch, 1.0)
    if weights:
        assert evaluation.metrics(task, w, split, EVERYONE)["loss"] == pytest.approx(value.numpy())
    same = [g, value, task.loss_of(w, batch), w - stepped, hvp(task.net, w, torch.ones_like(w), batch)]
    return [torch.as_tensor(v) for v in (*same, *([] if on is None else [on().clone()]))]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("loss", ["cross-entropy", "mse", nn.functional.huber_loss])
def test_a_weight_is_that_many_copies_of_the_sample(path, loss):
    found = [computed(path, split, loss) for split in weighted(loss == "cross-entropy")]
    for one, copies in zip(*found, strict=True):
        assert one.numpy() == pytest.approx(copies.numpy(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("path", PATHS)
def test_a_classs_weight_is_that_many_copies_of_its_samples(path):
    """But for the number that it is divided by."""
    weights, data = np.array([1, 3, 2]), sites(True)
    copies = [(np.repeat(x, weights[y], 0), np.repeat(y, weights[y])) for x, y in data]
    alike = [pf.Federation.from_arrays(of, test_fraction=0.0, classes=3).train for of in (data, copies)]
    factor = torch.tensor([weights[y].mean() for _, y in data])
    found = computed(path, alike[0], class_weights=weights.tolist()), computed(path, alike[1])
    for one, many in zip(*found, strict=True):
        wanted = many * factor.view(2, *[1] * (many.dim() - 1))
        assert one.numpy() == pytest.approx(wanted.numpy(), rel=1e-6, abs=1e-9)


def test_the_batches_of_an_epoch_make_up_the_weighted_loss():
    """Every batch divides by its number of samples, so that their gradients are those of the whole on average."""
    split, _ = weighted()
    task = Task(nn.Linear(4, 3), dtype=torch.float64)
    split = task.place(split)
    w, total = task.w0.expand(2, -1), torch.zeros(2, task.p, dtype=torch.float64)
    sizes = []
    for batch in Batches(split, EVERYONE, EVERYONE, Work(batch_size=4), seed=0, round=0):
        m = batch.rows
        real = torch.tensor(batch.sizes or [4] * m, dtype=torch.float64)[:, None]
        total[:m] += real * task.gradient(w[:m], batch)[0]
        sizes.append(int(real.sum()))
    assert sum(sizes) == sum(SIZES)
    whole = torch.tensor(SIZES)[:, None] * task.gradient(w, padded(split, EVERYONE))[0]
    assert total.numpy() == pytest.approx(whole.numpy(), rel=1e-9, abs=1e-12)


def test_any_factor_on_a_clients_weights_changes_nothing_and_equal_ones_no_bit():
    model, how = nn.Linear(4, 3), {"rounds": 2, "seed": 1, "batch_size": 4, "dtype": "float64"}

    def models(weights):
        fed = pf.Federation.from_arrays(sites(True), weights=weights, test_fraction=0.2, classes=3)
        return pf.fit(model, fed, pf.FedAvg(), **how).personal

    once, more = models(RISING), models([5 * RISING[0], 0.2 * RISING[1]])
    assert once.numpy() == pytest.approx(more.numpy(), abs=1e-12)
    assert torch.equal(models([np.ones(9), np.full(7, 0.3)]), models(None))
    assert float((once - models(None)).abs().max()) > 1e-3


@pytest.mark.parametrize("balanced", [True, False])
def test_the_optimum_is_the_one_that_scikit_learn_finds(balanced):
    rng = np.random.default_rng(1)
    x, u = rng.normal(size=(80, 3)), rng.exponential(size=80)
    y = (x @ [1.0, -1.0, 0.5] + rng.normal(size=80) > 1.2).astype(int)
    fed = pf.Federation.from_arrays([(x, y)], weights=None if balanced else [u], test_fraction=0.0)
    kind = "balanced" if balanced else None
    run = pf.fit(
        nn.Linear(3, 2, bias=False), fed, pf.FedAvg(lr=0.5), rounds=1, local_steps=800, batch_size=None,
        weight_decay=0.1, dtype="float64", class_weights=kind,
    )  # fmt: skip
    w = run.personal[0].view(2, 3)
    # with two outputs w1 = -w0 = v/2 at the optimum, so 0.1/2 ||w||^2 = 0.1/4 ||v||^2; weights are 1 on average
    wanted = LogisticRegression(C=1 / (80 * 0.05), fit_intercept=False, class_weight=kind, tol=1e-10)
    wanted.fit(x, y, None if balanced else u / u.mean())
    assert (w[1] - w[0]).numpy() == pytest.approx(wanted.coef_[0], rel=1e-5)
    said = "the loss weighs classes inversely" if balanced else "training samples have weights"
    assert said in " ".join(run.federation.notes)


def test_scores_and_the_weight_of_a_client_do_not_ask_for_them():
    split, _ = weighted()
    plain, task = replace(split, weight=None), Task(nn.Linear(4, 3), dtype=torch.float64)
    for w in (task.w0.expand(2, -1), task.w0.repeat(2, 1)):
        found, wanted = (evaluation.metrics(task, w, task.place(s), EVERYONE) for s in (split, plain))
        assert {k: v.tolist() for k, v in found.items()} == {k: v.tolist() for k, v in wanted.items()}
    batches = Batches(split, EVERYONE, EVERYONE, Work(), 0, 0)
    assert batches.samples.tolist() == list(SIZES)


def test_they_go_where_the_samples_go():
    pairs = [(np.c_[x, w], y) for (x, y), w in zip(sites(True), RISING, strict=True)]
    fed = pf.Federation.from_arrays(pairs, weights=RISING)
    later = fed.with_validation(0.3)
    for f in (fed, fed.reorder([1, 0]), fed.without(["client-0"]), later):
        assert torch.equal(f.train.weight.float(), f.train.x[:, -1].float())
        assert f.test.weight is None
    assert later.validation.weight is None
    assert later.train.select([1]).shares is not None
    shares = [later.train.shares[later.train.rows(i)] for i in range(2)]
    assert [float(s.mean()) for s in shares] == pytest.approx([1, 1])
    assert together(later).train.shares.numpy() == pytest.approx(torch.cat(shares).numpy())
    assert digest(fed) != digest(replace(fed, train=replace(fed.train, weight=fed.train.weight.square())))


def test_own_models_and_intercepts_take_them_too():
    rng, u = np.random.default_rng(0), torch.tensor([2, 0, 1] * 20)
    x, y = torch.tensor(rng.normal(size=(60, 4))), torch.tensor(rng.integers(0, 3, 60))
    many = [t.repeat_interleave(u, 0) for t in (x, y)]
    trees = OwnTrees(min_samples_leaf=2)
    assert not torch.allclose(trees.fitted(x, y, 3, u.double())(x), trees.fitted(x, y, 3)(x), atol=0.1)
    for kind in (Commonest(), OwnLinear(penalty=1.0)):
        one, copies = kind.fitted(x, y, 3, u.double())(x), kind.fitted(*many, 3)(x)
        assert one.numpy() == pytest.approx(copies.numpy(), abs=1e-3)
        one = kind.fitted(x, x[:, 0] + y, None, u.double())(x)
        copies = kind.fitted(many[0], many[0][:, 0] + many[1], None)(x)
        assert one.numpy() == pytest.approx(copies.numpy())


def cox(output, target):
    """Of Cox's kind: every sample's loss has all of the batch in it."""
    return (output.reshape(-1).logsumexp(0) - output.reshape(-1)).mean()


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([np.ones(9), -np.ones(7)], "client 'client-1': found the weight -1, expected numbers of 0 or more"),
        ([np.full(9, np.nan), np.ones(7)], "client 'client-0': found the weight nan, expected numbers of 0 or more"),
        ([np.full(9, np.inf), np.ones(7)], "client 'client-0': found the weight inf"),
        ([np.ones(9), np.zeros(7)], "client 'client-1': found weight 0 on every training sample"),
        ([np.ones(9)], "weights: found 1 entries for 2 clients"),
        ([np.ones(8), np.ones(7)], r"client 'client-0': found weights of shape \[8\], expected \[9\]"),
        ([["a"] * 9, np.ones(7)], "client 'client-0': found weights of dtype"),
    ],
)
def test_weights_that_are_none_are_refused(weights, said):
    with pytest.raises(DataError, match=said):
        pf.Federation.from_arrays(sites(True), weights=weights)


def test_a_loss_that_is_no_mean_over_samples_refuses_them_by_name():
    fed = pf.Federation.from_arrays(sites(False), weights=RISING)
    with pytest.raises(ConfigError, match="weights: the loss cox is no mean over samples"):
        pf.fit(nn.Linear(4, 1), fed, pf.FedAvg(), rounds=1, loss=cox)
    times = [(x, np.c_[np.abs(y), np.arange(len(y)) % 2]) for x, y in sites(False)]
    fed = pf.Federation.from_arrays(times, weights=RISING)
    clinical = pytest.importorskip("polyfed_clinical")
    with pytest.raises(PolyfedError, match="weights: the loss cox"):
        pf.fit(nn.Linear(4, 1), fed, pf.FedAvg(), rounds=1, loss=clinical.loss("cox"), batch_size=None)
    with pytest.raises(ConfigError, match=r"weights: the cox \(efron\) regression takes none"):
        clinical.fit(fed, "cox")


# of classes


def test_balanced_weights_are_one_on_average_over_all_clients_rows():
    rng = np.random.default_rng(0)
    fed = pf.Federation.from_arrays([(rng.normal(size=(n, 2)), np.arange(n) % k) for n, k in ((30, 3), (20, 2))])
    weights = weights_of("balanced", "cross-entropy", fed.describe())
    counts = fed.train.y.bincount().numpy()
    assert (np.array(weights) * counts) == pytest.approx(np.full(3, counts.sum() / 3))


def test_a_batch_of_padding_keeps_its_weights():
    task = Task(nn.Linear(2, 2), dtype=torch.float64, class_weights=[1.0, 5.0])
    x, y = torch.randn(1, 4, 2).double(), torch.tensor([[0, 1, 1, 0]])
    real = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).double()
    padded_too = task.gradient(task.w0[None], Batch(x, y, real, [2]))
    torch.testing.assert_close(padded_too, task.gradient(task.w0[None], Batch(x[:, :2], y[:, :2])))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"class_weights": [1.0]}, "class-weights: found 1 numbers, expected one for each of 2 classes"),
        ({"class_weights": {"0": 1.0}}, "class-weights: found none for the class '1'"),
        ({"class_weights": {0: 1.0}}, "class-weights: found none for the class '1'"),
        ({"class_weights": {"a": 1.0}}, "class-weights: unknown class 'a'"),
        ({"class_weights": [1.0, -1.0]}, "class_weights: found"),
        ({"class_weights": "even"}, "class_weights: found 'even'"),
        ({"class_weights": "balanced", "loss": nn.functional.cross_entropy}, "for the loss cross-entropy alone"),
    ],
)
def test_weights_that_do_not_fit_are_refused(settings, said):
    x = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(ConfigError, match=said):
        pf.fit(nn.Linear(2, 2), pf.Federation.from_arrays([(x, np.arange(20) % 2)]), pf.FedAvg(), rounds=1, **settings)
    numbers = pf.Federation.from_arrays([(x, x[:, 0])])
    with pytest.raises(ConfigError, match="the targets are numbers"):
        pf.fit(nn.Linear(2, 1), numbers, pf.FedAvg(), rounds=1, class_weights="balanced")
