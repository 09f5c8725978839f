"""The pooled model is training on everybody's samples in one place, with the same work and the same draws."""

import numpy as np
import torch
from certify import certifies
from test_own import federation

import polyfed as pf
from polyfed.runs.measured import EVERYBODY

HOW = {"rounds": 4, "seed": 3, "dtype": "float64"}


def linear(outputs=3):
    model = torch.nn.Linear(4, outputs, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


@certifies(pf.PooledOracle, by="closed form")
def test_it_is_gradient_descent_on_everybodys_samples():
    fed = federation(classes=None)
    run = pf.fit(linear(1), fed, pf.PooledOracle(0.001), local_steps=5, batch_size=None, **HOW)
    x, y = fed.train.x.double().numpy(), fed.train.y.double().numpy()
    a, w = np.c_[x, np.ones(len(x))], np.zeros(5)
    for _ in range(20):
        w -= 0.001 * 2 / len(y) * a.T @ (a @ w - y)
    for i in range(3):
        new = fed.test.client(i)[0].double().numpy()
        assert np.allclose(run.kept.judged.outputs["test"][i][:, 0], np.c_[new, np.ones(len(new))] @ w, atol=1e-9)


@certifies(pf.PooledOracle, by="identity")
def test_it_draws_the_batches_of_one_client_with_all_samples():
    fed = federation()
    run = pf.fit(linear(), fed, pf.PooledOracle(0.05), batch_size=8, local_epochs=2, fraction=0.4, **HOW)
    x, y = fed.train.x.numpy(), fed.train.y.numpy()
    one = pf.Federation.from_arrays([(x, y)], [(x, y)], names=[EVERYBODY], classes=3)
    alone = pf.fit(linear(), one, pf.FedAvg(0.05), batch_size=8, local_epochs=2, **HOW)
    assert run.final["test"].keys() == alone.final["test"].keys()
    for i in range(3):
        expected = alone.trained.task.outputs(alone.personal[0], fed.test.client(i)[0])
        assert torch.allclose(run.kept.judged.outputs["test"][i], expected, atol=1e-12)


def test_it_takes_any_loss_and_any_optimiser():
    fed = federation()
    loss = torch.nn.functional.cross_entropy
    named = pf.fit(linear(), fed, pf.PooledOracle(0.01), optimizer="adam", **HOW)
    given = pf.fit(linear(), fed, pf.PooledOracle(0.01), optimizer="adam", loss=loss, **HOW)
    for key, values in named.final["test"].items():
        assert np.allclose(values, given.final["test"][key], atol=1e-9), key
