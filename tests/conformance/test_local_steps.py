"""Runs under another local optimiser, adam, clipped: resumed, continued and joined as under plain SGD."""

import dataclasses

import numpy as np
import pytest
import torch
from halfway import Crash, crash_after, same
from instances import METHODS, federation, kind_of, model, train

import polyfed as pf
from polyfed.base.errors import ConfigError

ADAM = {"optimizer": "adam", "clip_norm": 0.5, "lr_schedule": "cosine:6,warmup=2", "rounds": 4, "fraction": 0.5}
each = pytest.mark.parametrize("name", ["ditto", "fedrep"])


def adam(name: str, fed=None, **settings) -> pf.Run:
    return train(dataclasses.replace(METHODS[name], lr=0.02), fed, **(ADAM | settings))


@each
def test_a_run_is_resumed_bit_for_bit(name, tmp_path):
    for last in (1, 3):
        with pytest.raises(Crash):
            adam(name, out=tmp_path / str(last), checkpoint_every=1, callbacks=[crash_after(last)])
        assert same(adam(name, out=tmp_path / str(last), checkpoint_every=1, resume=True), adam(name))


def test_more_rounds_along_the_same_cosine(tmp_path):
    """The cosine's length is stated, so that a shorter run is the beginning of a longer one."""
    adam("ditto", out=tmp_path, rounds=2)
    assert same(adam("ditto", out=tmp_path, rounds=6, resume=True), adam("ditto", rounds=6))
    with pytest.raises(ConfigError, match=r"^rounds: found 7, expected at most the 6 of lr-schedule$"):
        adam("ditto", out=tmp_path, rounds=7, resume=True)


@pytest.mark.parametrize("name", ["ditto", "fedrep"])
def test_newcomers_train_with_the_runs_optimiser(name, tmp_path):
    """From the folder as from the run, and not as with plain SGD."""
    rng = np.random.default_rng(2)
    fed = federation()
    one = [(rng.normal(size=(9, 1, 6, 6)).astype(np.float32), rng.integers(0, 3, 9))]
    new = pf.Federation.from_arrays(one, one, names=["ulm"], classes=fed.classes)
    run = adam(name, out=tmp_path)
    with_adam = pf.admit(run, new, exchanges=2).personal
    opened = pf.Run.open(tmp_path, federation=fed, model=model(kind_of(METHODS[name])))
    assert torch.equal(opened.admit(new, exchanges=2).personal, with_adam)
    run.trained.task.net.optimizer = dataclasses.replace(run.trained.task.net.optimizer, name="sgd", clip_norm=None)
    assert not torch.equal(pf.admit(run, new, exchanges=2).personal, with_adam)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_uses_the_optimiser_or_says_why_not(name):
    """Whoever does not refuse it sends other models than under plain SGD: it is nowhere silently left out."""
    method, settings = METHODS[name], {"optimizer": "adam", "clip_norm": 1.0}
    if why := method.needs.plain_sgd:
        for key, value in settings.items():
            with pytest.raises(ConfigError) as error:
                train(method, rounds=1, **{key: value})
            assert str(error.value) == f"{key}: found {value!r}, expected plain sgd with {method.name}: {why}"
        return
    rounds = 2 if method.name in ("recalibrated", "knn-per") else 1  # which deploy the model that they received
    plain = train(method, rounds=rounds).personal
    for key, value in settings.items():
        assert not torch.equal(train(method, rounds=rounds, **{key: value}).personal, plain), key
