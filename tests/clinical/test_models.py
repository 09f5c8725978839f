"""The likelihoods: their derivatives, their definitions, and what must not change them."""

import itertools

import numpy as np
import pytest
import torch

import polyfed as pf
import polyfed_clinical as clinical
from polyfed.base.errors import ConfigError, DataError
from polyfed_clinical.models import named

NAMES = [("logistic", "efron"), ("poisson", "efron"), ("linear", "efron"), ("cox", "efron"), ("cox", "breslow")]


def rows(model: str, n: int = 60, p: int = 3, seed: int = 0):
    """x and a target that the model takes; for Cox with many ties, of deaths and of censored."""
    rng = np.random.default_rng(seed)
    x, ones = rng.normal(size=(n, p)), np.ones(n)
    y = {
        "logistic": [rng.integers(0, 2, n), ones],
        "poisson": [rng.poisson(2, n), rng.uniform(0.5, 2, n)],
        "linear": [rng.normal(size=n), ones],
        "cox": [rng.integers(1, 12, n), rng.integers(0, 2, n)],
    }[model]
    return torch.tensor(x), torch.tensor(np.stack(y, 1).astype(float)), torch.tensor(rng.normal(size=p) / 2)


@pytest.mark.parametrize(("model", "ties"), NAMES)
def test_gradient_and_information_are_the_derivatives(model, ties):
    """The loss has the same gradient, and scores of rows add up to it."""
    kind, (x, target, beta), h = named(model, ties), rows(model), 1e-5
    _, gradient, information = kind.derivatives(beta, x, target)
    for k in range(len(beta)):
        e = h * torch.eye(len(beta), dtype=torch.float64)[k]
        up, down = (kind.derivatives(b, x, target) for b in (beta + e, beta - e))
        assert abs((up[0] - down[0]) / (2 * h) - gradient[k]) < 1e-7
        assert ((down[1] - up[1]) / (2 * h) - information[k]).abs().max() < 1e-6
    free = beta.clone().requires_grad_()
    clinical.loss(model, ties)((x @ free)[:, None], target).backward()
    assert (free.grad * -len(x) - gradient).abs().max() < 1e-11
    assert (kind.scores(beta, x, target).sum(0) - gradient).abs().max() < 1e-11


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_scores_of_cox_as_a_loop_has_them(ties):
    """Lin and Wei, with Efron's ties: of d deaths each counts 1/d in every step l, and is there with 1 - l/d."""
    x, target, beta = rows("cox")
    risk, (time, event) = (x @ beta).exp().numpy(), target.T.numpy()
    expected, x = np.zeros(x.shape), x.numpy()
    for t in np.unique(time[event > 0]):
        dead = (time == t) & (event > 0)
        for step in range(d := int(dead.sum())):
            weight = risk * (time >= t) * (1 - dead * (step / d if ties == "efron" else 0.0))
            centre = weight @ x / weight.sum()
            expected += dead[:, None] * (x - centre) / d - (weight / weight.sum())[:, None] * (x - centre)
    found = named("cox", ties).scores(beta, *rows("cox")[:2])
    assert np.abs(found.numpy() - expected).max() < 1e-11


def test_large_predictors_do_not_overflow():
    x, target, beta = rows("cox")
    moved = named("cox").derivatives(beta, torch.cat([x, 800 * torch.ones(len(x), 1).double()], 1)[:, :3], target)
    shifted = named("cox").parts(x @ beta + 800, target).value
    assert shifted == pytest.approx(float(moved[0]), abs=1e-9)


def test_cox_refuses_mini_batches_and_unknown_names():
    x, target, _ = rows("cox")
    fed = pf.Federation.from_arrays([(x, target)] * 2, test_fraction=0)
    net, how = torch.nn.Linear(3, 1, bias=False).double(), {"loss": clinical.loss("cox"), "rounds": 1}
    with pytest.raises(ConfigError, match=r"batch-size: found 8, expected full: the loss cox \(efron\)"):
        pf.fit(net, fed, pf.FedAvg(), batch_size=8, **how)
    assert pf.fit(net, fed, pf.FedAvg(), batch_size=None, **how).rounds == 1
    for model, ties in (("logit", "efron"), ("cox", "exact")):
        with pytest.raises(ConfigError, match="expected"):
            clinical.loss(model, ties)


def test_concordance_counts_pairs():
    rng = np.random.default_rng(1)
    time, event, risk = rng.integers(1, 9, 40), rng.integers(0, 2, 40), rng.integers(0, 5, 40)
    right = pairs = 0.0
    for i, j in itertools.permutations(range(40), 2):
        if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
            pairs += 1
            right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    found = clinical.concordance(time, event, risk)
    assert found == pytest.approx(right / pairs, abs=1e-15)
    assert clinical.concordance(time, event, -risk) == pytest.approx(1 - found, abs=1e-12)
    assert clinical.concordance(time, event, np.zeros(40)) == 0.5
    assert clinical.concordance([1, 2, 3], [1, 1, 0], [3, 2, 1]) == 1


@pytest.mark.parametrize(
    ("time", "event", "risk", "words"),
    [
        ([1, 2, 3, 4], [1, 1, 1, 0], [np.nan, 3, 2, 1], "risk of row 1: found nan, expected a number"),
        ([1, np.inf, 3, 4], [1, 1, 1, 0], [4, 3, 2, 1], "time of row 2: found inf, expected a number"),
        ([1, 2, 3, 4], [1, np.nan, 1, 0], [4, 3, 2, 1], "event of row 2: found nan, expected 0 or 1"),
        ([1, 2, 3, 4], [1, 1, 2, 0], [4, 3, 2, 1], "event of row 3: found 2, expected 0 or 1"),
        ([1, 2], [0, 0], [1, 2], "no pair"),
    ],
)
def test_concordance_refuses_what_it_cannot_order(time, event, risk, words):
    with pytest.raises(DataError, match=words):
        clinical.concordance(time, event, risk)
    assert clinical.concordance([1, 2, 3], [True, True, False], [3, 2, 1]) == 1
