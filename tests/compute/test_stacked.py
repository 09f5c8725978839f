"""A chain of linear layers takes a row of every sample, in every path through a run and in the model that comes out."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import shipped

METHODS = {
    name: cls()
    for name, cls in shipped().items()
    if name not in ("fedbn", "fedem", "fedrc", "knn-per")  # no chains
    and not cls.adapter_train
} | {"per-fedavg(exact)": pf.PerFedAvg(order="exact"), "gpgd(low rank)": pf.GPGD(lam=0.5)}


def federation(*shape: int) -> pf.Federation:
    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(0, 3, n)) for n in (9, 5, 12)]
    return pf.Federation.from_arrays(sites, sites, classes=3)


IMAGES, ROWS = federation(1, 4, 4), federation(16)


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("name", METHODS)
def test_images_train_a_chain_as_their_rows_do(name, monkeypatch):
    monkeypatch.setenv("POLYFED_NATIVE", str(len(name) % 2))  # torch's ways are under test as well as the kernel's
    images, rows = (pf.fit(chain(), fed, METHODS[name], rounds=2, batch_size=4, workers=1) for fed in (IMAGES, ROWS))
    assert torch.equal(images.personal, rows.personal)
    assert images.clients.equals(rows.clients)
    model, x = images.model(1), IMAGES.test.client(1)[0]
    assert [*model.state_dict()] == [*chain().state_dict()]
    assert torch.equal(model(x), rows.model(1)(x.flatten(1)))


@pytest.mark.parametrize("model", [nn.Linear(16, 3), chain()], ids=["one layer", "three"])
def test_a_deployed_chain_takes_the_federations_inputs(model, tmp_path):
    """Also in bfloat16, which is of modules, opened again from its folder, and as factors."""
    pytest.importorskip("polyfed_export")
    x = IMAGES.test.client(2)[0]
    runs = [pf.fit(model, IMAGES, pf.GPGD(lam=0.5), rounds=1, workers=1, precision=p) for p in (None, "bf16")]
    runs[0].save(tmp_path)
    runs.append(pf.Run.open(tmp_path, federation=IMAGES, model=model))
    for run in runs:
        for found in (run.model(2), run.model(2, factorised=True)):
            assert found(x).shape == (12, 3)
            torch.testing.assert_close(found(x), run.trained.task.outputs(run.personal[2], x))
