"""Folders that hold more than one story: a used folder, another experiment."""

import numpy as np
import pytest
import torch
from halfway import half
from instances import METHODS, federation, train

import polyfed as pf
from polyfed.base import checkpoint
from polyfed.base.errors import RunError
from polyfed_testing.stage import NAMES


def test_a_used_folder_is_refused_and_left_as_it_was(tmp_path):
    half("ditto", out=tmp_path, checkpoint_every=1)
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    with pytest.raises(RunError, match="already holds a run"):
        half("ditto", out=tmp_path, seed=8)
    with pytest.raises(RunError, match="already holds a run"):
        half("ditto").save(tmp_path)
    assert {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()} == before


def renamed():
    fed = federation()
    return type(fed)(fed.train, fed.test, tuple(reversed(NAMES)), classes=fed.classes)


def test_other_delays_of_one_of_many_clients_are_not_continued(tmp_path):
    """Arrays of more than a thousand numbers differ in the middle."""
    fed = pf.Federation.from_arrays([(np.ones((2, 3)), np.array([0, 1]))] * 1100)
    delays = np.ones(1100)

    def go(**more):
        schedule = pf.Timed(pf.Uniform(0.01), pf.Delays(compute=delays))
        return pf.fit(torch.nn.Linear(3, 2), fed, pf.FedAvg(), rounds=1, schedule=schedule, out=tmp_path, **more)

    go()
    assert go(resume=True).trained.t == 1
    delays[600] = 2.0
    with pytest.raises(RunError, match=r"cannot resume .*schedule"):
        go(resume=True)


@pytest.mark.parametrize(
    ("word", "change"),
    [
        ("seed", {"seed": 4}),
        ("batch-size", {"batch_size": 4}),
        ("algorithm", {"method": METHODS["fedavg(weighted=False)"]}),
        ("dtype", {"dtype": torch.float64}),
        ("fraction", {"fraction": 0.25}),
        ("weight-decay", {"weight_decay": 0.1}),
        ("data", {"fed": federation().reorder([1, 0, 2, 3, 4, 5])}),
        ("", {"fed": renamed()}),
        ("", {"kind": "mlp"}),
        ("optimizer", {"optimizer": "adamw"}),
        ("clip-norm", {"clip_norm": 0.4}),
        ("optimizer", {"optimizer": "adam:0.8"}),
        ("lr-schedule", {"lr_schedule": "cosine:6,warmup=1"}),
    ],
)
def test_another_experiment_is_not_continued(word, change, tmp_path):
    begun = {"method": METHODS["fedavg"], "optimizer": "adam", "clip_norm": 0.5, "lr_schedule": "cosine:6,warmup=2"}
    train(**begun, out=tmp_path, rounds=1)
    with pytest.raises(RunError, match=f"cannot resume .*{word}"):
        train(**(begun | change), out=tmp_path, rounds=2, resume=True)
    assert checkpoint.load(tmp_path / "checkpoint")[1]["t"] == 1
