"""Bad input to the Python API: one clear line that names the thing, raised before any training."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base.errors import Diverged, PolyfedError
from polyfed.runs.trainer import prepare
from polyfed.runs.training import Training

rng = np.random.default_rng(0)


def site(n):
    return rng.normal(size=(n, 4)).astype(np.float32), np.arange(n) % 2


GOOD = [site(20), site(30)]
FED = pf.Federation.from_arrays(GOOD, test=GOOD)


def fit(model=None, fed=FED, method=None, **settings):
    return lambda: pf.fit(model or nn.Linear(4, 2), fed, method or pf.FedAvg(), **{"rounds": 1} | settings)


NORM = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
REFUSED = {

    "too few outputs": (fit(nn.Linear(4, 1)), "expected [2] for 2 classes"),
    "another input size": (fit(nn.Linear(5, 2)), "shape [4]"),
    "BatchNorm": (fit(NORM), "replace_batchnorm"),
    "no parameters": (fit(nn.Flatten()), "no trainable parameters"),
    "a fractional number of rounds": (fit(rounds=1.5), "rounds"),
    "a fraction above one": (fit(fraction=2), "fraction"),
    "an unknown loss": (fit(loss="crossentropy"), "did you mean 'cross-entropy'"),
    "a method's name": (fit(method="fedavg"), "algorithm"),
    "a model's name": (fit(model="linear"), "torch.nn.Module"),
    "a bare list": (fit(fed=GOOD), "Federation"),
    "a negative step": (lambda: pf.FedAvg(-1.0), "algorithm.lr of FedAvg: found -1.0, expected a number of at "),
    "a step in words": (lambda: pf.FedAvg("fast"), "algorithm.lr of FedAvg: found 'fast', expected a number"),
    "a NaN step": (lambda: pf.FedAvg(float("nan")), "algorithm.lr of FedAvg: found nan, expected a finite number"),
    "a seed in words": (fit(seed="a"), "seed"),
    "an empty batch": (fit(batch_size=0), "batch_size"),
    "labels for mse": (fit(nn.Linear(4, 1), loss="mse"), "mse needs float targets"),

}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_one_line_that_names_the_thing(case):
    attempt, word = REFUSED[case]
    with pytest.raises(PolyfedError) as caught:
        attempt()
    assert word in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_missing_device_is_named():
    with pytest.raises(PolyfedError, match="cuda"):
        fit(device="cuda")()


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(PolyfedError, match="taken"):
        fit(out=tmp_path / "taken")()
    assert (tmp_path / "taken").read_text() == "mine"


def test_divergence_names_round_client_and_the_last_finite_state(tmp_path):
    pairs = [(100 * x, y.astype(np.float32)) for x, y in GOOD]
    fed = pf.Federation.from_arrays(pairs, test=pairs)
    with pytest.raises(Diverged, match=r"round \d+: client 'client-\d'.*checkpoint"):
        fit(nn.Linear(4, 1), fed, pf.FedAvg(1e6), rounds=50, loss="mse", out=tmp_path / "run")()


@pytest.mark.parametrize("client", ["nowhere", 7, -3])
def test_an_unknown_client_is_named(client):
    run = fit()()
    with pytest.raises(PolyfedError, match=f"no client {client!r}"):
        run.model(client)


def test_what_a_method_refuses_is_found_without_making_the_servers_state(monkeypatch):
    """It may be larger than memory, which is refused with an estimate, later."""
    made, real = [], pf.FedAMP.init_server

    def watched(self, task, w0, n):
        made.append((w0.device.type, n))
        return real(self, task, w0, n)

    monkeypatch.setattr(pf.FedAMP, "init_server", watched)
    prepare(nn.Linear(4, 100_000), FED, pf.FedAMP(), Training(rounds=1))
    assert {n for kind, n in made if kind != "meta"} <= {2}  # the rehearsal's
