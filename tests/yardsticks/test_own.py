"""What a site can do alone: scikit-learn's own fits, and closed forms."""

import numpy as np
import pytest
import torch
from certify import certifies
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed.yardsticks.own import PENALTIES

NAMES = ("north", "south", "west")


def federation(sizes=(60, 45, 12), classes=3, seed=0) -> pf.Federation:
    """Sites with unlike shares of the classes; numbers where classes is None."""
    rng = np.random.default_rng(seed)

    def draw(n, i):
        x = rng.normal(size=(n, 4)) * [1, 10, 0.1, 3] + i
        if classes is None:
            return x, x @ [1.0, 0.2, 3.0, 0.0] + rng.normal(size=n)
        y = rng.choice(classes, n, p=np.roll([0.6, 0.3, 0.1][:classes], i) if classes == 3 else [0.7, 0.3])
        y[:classes] = range(classes)
        return x + y[:, None], y

    train, test = ([draw(n, i) for i, n in enumerate(s)] for s in (sizes, (20, 30, 25)))
    return pf.Federation.from_arrays(train, test, names=NAMES, classes=classes)


def measured(method, fed, **settings):
    settings = {"rounds": 5, "metrics": "accuracy,auc,log-loss,brier"} | settings
    return pf.fit(torch.nn.Linear(4, fed.outputs), fed, method, **settings)


def arrays(split, i):
    x, y = split.client(i)
    return x.numpy().astype(float), y.numpy()


@certifies(pf.Commonest, by="closed form")
def test_the_commonest_class_is_right_as_often_as_it_occurs():
    fed = federation()
    found = measured(pf.Commonest(), fed).final["test"]
    for i in range(3):
        y, new = fed.train.client(i)[1].numpy(), fed.test.client(i)[1].numpy()
        share = np.bincount(y) / len(y)
        assert found["accuracy"][i] == np.mean(new == share.argmax())
        assert np.isclose(found["log-loss"][i], -np.log(share[new]).mean())
        assert found["auc"][i] == 0.5


@certifies(pf.Commonest, by="closed form")
def test_the_mean_leaves_the_standard_deviation():
    fed = federation(classes=None)
    run = pf.fit(torch.nn.Linear(4, 1), fed, pf.Commonest(), metrics="rmse,r2")
    spread = [np.std(fed.train.client(i)[1].numpy()) for i in range(3)]
    assert np.allclose(run.final["train"]["rmse"], spread)
    assert np.allclose(run.final["train"]["r2"], 0, atol=1e-12)


@certifies(pf.OwnLinear, by="identity")
@pytest.mark.parametrize("penalty", [0.1, 10.0])
def test_the_linear_model_is_scikit_learns(penalty):
    fed = federation()
    run = measured(pf.OwnLinear(penalty), fed)
    for i in range(3):
        (x, y), (new, true) = arrays(fed.train, i), arrays(fed.test, i)
        z = StandardScaler().fit(x)
        p = LogisticRegression(C=1 / penalty, max_iter=1000).fit(z.transform(x), y).predict_proba(z.transform(new))
        assert np.allclose(torch.softmax(run.kept.judged.outputs["test"][i], 1), p)
        assert run.final["test"]["accuracy"][i] == np.mean(p.argmax(1) == true)
        assert np.isclose(run.final["test"]["log-loss"][i], log_loss(true, p, labels=range(3)))
    numbers = federation(classes=None)
    fitted = pf.fit(torch.nn.Linear(4, 1), numbers, pf.OwnLinear(penalty)).kept.judged.outputs["test"]
    best = pf.fit(torch.nn.Linear(4, 1), numbers, pf.OwnLinear()).kept.judged.outputs["test"]
    for i in range(3):
        (x, y), (new, _) = arrays(numbers.train, i), arrays(numbers.test, i)
        z = StandardScaler().fit(x)
        assert np.allclose(fitted[i], Ridge(penalty).fit(z.transform(x), y).predict(z.transform(new)))
        assert np.allclose(best[i], RidgeCV(PENALTIES).fit(z.transform(x), y).predict(z.transform(new)))


@certifies(pf.OwnLinear, by="brute force")
def test_the_penalty_is_the_best_of_a_cross_validation():
    fed = federation(sizes=(60, 45, 12))
    run = measured(pf.OwnLinear(), fed)
    x, y = arrays(fed.train, 0)
    z = StandardScaler().fit(x)
    folds = list(StratifiedKFold(5).split(x, y))
    losses = []
    for penalty in PENALTIES:
        p = np.zeros((len(y), 3))
        for kept, out in folds:
            model = LogisticRegression(C=1 / penalty, max_iter=1000).fit(z.transform(x)[kept], y[kept])
            p[out] = model.predict_proba(z.transform(x)[out])
        losses.append(log_loss(y, p))
    best = measured(pf.OwnLinear(PENALTIES[int(np.argmin(losses))]), fed)
    assert torch.equal(run.kept.judged.outputs["test"][0], best.kept.judged.outputs["test"][0])


@certifies(pf.OwnTrees, by="identity")
def test_the_trees_are_scikit_learns():
    fed = federation(sizes=(60, 300, 12))
    run = measured(pf.OwnTrees(), fed)
    for i, leaf in enumerate((6, 20, 2)):
        (x, y), (new, true) = arrays(fed.train, i), arrays(fed.test, i)
        p = HistGradientBoostingClassifier(min_samples_leaf=leaf, random_state=0).fit(x, y).predict_proba(new)
        assert np.allclose(torch.softmax(run.kept.judged.outputs["test"][i], 1), p)
        assert np.isclose(run.final["test"]["auc"][i], roc_auc_score(true, p, multi_class="ovr"), atol=1e-12)
    numbers = federation(classes=None)
    found = pf.fit(torch.nn.Linear(4, 1), numbers, pf.OwnTrees(3)).kept.judged.outputs["test"][1]
    (x, y), (new, _) = arrays(numbers.train, 1), arrays(numbers.test, 1)
    model = HistGradientBoostingRegressor(min_samples_leaf=3, random_state=0).fit(x, y)
    assert np.allclose(found, model.predict(new))


@pytest.mark.parametrize("method", [pf.Commonest(), pf.OwnLinear(), pf.OwnTrees()], ids=lambda m: m.name)
def test_a_site_with_one_class_predicts_it_and_no_probability_is_zero(method):
    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(n, 4)), y) for n, y in ((9, np.ones(9, int)), (30, np.arange(30) % 2))]
    fed = pf.Federation.from_arrays(sites, [(rng.normal(size=(6, 4)), np.arange(6) % 2)] * 2)
    found = measured(method, fed)
    assert found.final["test"]["accuracy"][0] == 0.5
    p = torch.softmax(found.kept.judged.outputs["test"][0], 1)
    assert np.allclose(p, [0.5 / 9.5, 9 / 9.5])  # the class that it has not seen counts as half a sample


@pytest.mark.parametrize("method", [pf.Commonest(), pf.OwnLinear(), pf.OwnTrees()], ids=lambda m: m.name)
def test_several_numbers_per_sample_are_predicted_one_by_one(method):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, 4)), rng.normal(size=(40, 2))
    fed = pf.Federation.from_arrays([(x, y), (x[:30], y[:30])], task="regression")
    run = pf.fit(torch.nn.Linear(4, 2), fed, method)
    for k in range(2):
        one = pf.Federation.from_arrays([(x, y[:, k]), (x[:30], y[:30, k])], task="regression")
        alone = pf.fit(torch.nn.Linear(4, 1), one, method).kept.judged.outputs["train"]
        if not isinstance(method, pf.OwnLinear):  # whose penalty is the best for both
            assert all(np.allclose(a[:, k], b) for a, b in zip(run.kept.judged.outputs["train"], alone, strict=True))
    assert all(t.shape == (len(t), 2) for t in run.kept.judged.outputs["train"])


def test_what_is_unknown_is_refused_in_one_line():
    fed = federation(classes=2)
    loss = torch.nn.functional.cross_entropy
    with pytest.raises(ConfigError, match="own-trees: knows the losses cross-entropy and mse, found cross_entropy"):
        pf.fit(torch.nn.Linear(4, 2), fed, pf.OwnTrees(), loss=loss)
    words = pf.Federation.from_arrays([(np.arange(12).reshape(6, 2), np.arange(6) % 2)] * 2)
    tokens = torch.nn.Sequential(torch.nn.Embedding(12, 4), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    with pytest.raises(ConfigError, match="own-linear: takes features, and the inputs are tokens"):
        pf.fit(tokens, words, pf.OwnLinear())
    run = measured(pf.OwnTrees(), fed)
    for ask in (lambda: run.model(0), lambda: run.personal, lambda: run.export(0)):
        with pytest.raises((ConfigError, pf.errors.RunError), match=r"yardstick|no folder"):
            ask()
