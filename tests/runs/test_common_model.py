"""Run.common, Run.evaluate and Run.parameters: the common model beside the clients' own."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed.runs.folder import summary


def fit(method: pf.Algorithm, **settings) -> pf.Run:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(n, 5)), rng.integers(3, size=n)) for n in (9, 14, 6, 11)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(5, 3, dtype=torch.float64)
    federation = pf.Federation.from_arrays(data, test=[(x + 0.1, y) for x, y in data], classes=3)
    return pf.fit(model, federation, method, **{"rounds": 4, "batch_size": 4} | settings)


@pytest.mark.parametrize("method", [pf.Ditto(0.1, lam=0.5), pf.APFL(0.1, alpha=0.5)])
def test_the_common_model_beside_personal_ones_is_fedavgs(method):
    """Both train it as FedAvg does (APFL with equal weights): the same metrics, at the end and in every round."""
    seen = []
    run = fit(method, callbacks=[lambda now: seen.append(now.run.evaluate(now.run.common))])
    fedavg = fit(pf.FedAvg(0.1, weighted=isinstance(method, pf.Ditto)))
    assert (run.common - fedavg.server["w"]).abs().max() < 1e-12
    for split in ("train", "test"):
        for name, values in run.evaluate(run.common, split).items():
            assert values == pytest.approx(fedavg.final[split][name], rel=1e-12)
    means = fedavg.history.query("round > 0")["loss"].tolist()
    assert [found["loss"].mean() for found in seen[-4:]] == pytest.approx(means, rel=1e-12)


def test_any_models_can_be_evaluated():
    run = fit(pf.Local(0.1))
    assert all((run.evaluate(run.personal)[k] == v).all() for k, v in run.final["test"].items())
    each = np.array([run.evaluate(w)["loss"][i] for i, w in enumerate(run.personal)])
    assert each == pytest.approx(run.evaluate(run.personal)["loss"], rel=1e-12)


def test_what_cannot_be_evaluated_is_one_line():
    run = fit(pf.Local(0.1), rounds=0)
    for models, split, words in (
        (run.common, "test", "local has no common model"),
        (torch.zeros(7), "test", r"found shape \[7\], expected \[18\] or \[4, 18\]"),
        (torch.zeros(3, 18), "test", r"found shape \[3, 18\]"),
        (torch.zeros(18), "tset", "did you mean 'test'"),
    ):
        with pytest.raises(ConfigError, match=words):
            run.evaluate(models, split)


def test_the_summary_and_the_table_tell_both_models():
    """Ditto's common model is FedAvg's; a model of low rank by the numbers of its factors, FedAvg by nothing."""
    found = {m.name: fit(m, rounds=3) for m in (pf.FedAvg(0.1), pf.Ditto(0.1), pf.FedSLR(0.1, lam=1.0, mu=10.0))}
    told = {name: summary(run) for name, run in found.items()}
    assert told["fedavg"].common is None
    assert told["ditto"].common == {k: v.mean for k, v in told["fedavg"].final.items()}
    assert found["ditto"].parameters.tolist() == [told["ditto"].described_by] * 4 == [18] * 4
    assert told["fedslr"].described_by == found["fedslr"].parameters.mean() < told["fedslr"].parameters
