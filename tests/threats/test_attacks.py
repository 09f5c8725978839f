"""What attackers send: the laws of section 6 of the FPFC paper, drawn anew per upload, by nobody else."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed import threats
from polyfed.base.errors import ConfigError, DataError
from polyfed.base.randomness import client_keys, generator

KEYS = client_keys([f"client-{i}" for i in range(50)])
W = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def forged(attack, round=0, client=0, received=None):
    return attack.forge(W, received, generator(0, "attack 0", round, int(KEYS[client])))


def test_same_value():
    values = [forged(threats.SameValue(), t) for t in range(2000)]
    assert all((v == v[0]).all() for v in values)
    c = np.array([float(v[0]) for v in values])
    assert c.std() == pytest.approx(100, rel=0.05)
    assert abs(c.mean()) < 3 * 100 / np.sqrt(2000)


def test_sign_flip():
    """-|c| w: every entry against its sign, by one factor of mean 10 sqrt(2/pi)."""
    ratios = np.stack([(forged(threats.SignFlip(), t) / W).numpy() for t in range(1000)])
    assert (ratios < 0).all()
    assert np.allclose(ratios, ratios[:, :1])
    assert -ratios[:, 0].mean() == pytest.approx(10 * np.sqrt(2 / np.pi), rel=0.1)


def test_gaussian_noise():
    """N(0, 100^2 I), nothing of the honest model in it."""
    noise = forged(threats.GaussianNoise())
    assert float(noise.std()) == pytest.approx(100, rel=0.05)
    assert abs(float(torch.corrcoef(torch.stack([noise, W]))[0, 1])) < 4 / np.sqrt(2000)


def test_scaled_update():
    x = W.roll(1)
    assert torch.allclose(forged(threats.ScaledUpdate(scale=7.0), received=x), x + 7 * (W - x))
    assert torch.equal(forged(threats.ScaledUpdate(scale=7.0)), 7 * W)


@pytest.mark.parametrize("attack", [threats.SameValue(), threats.SignFlip(), threats.GaussianNoise()])
def test_drawn_anew_for_every_upload(attack):
    first = forged(attack)
    assert torch.equal(first, forged(attack))
    assert not torch.equal(first, forged(attack, round=1))
    assert not torch.equal(first, forged(attack, client=1))


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.2, 10), (0.5, 25), (0.99, 49), (1.0, 50)])
def test_the_attackers_are_a_fixed_part_of_the_clients(ratio, count):
    attack = threats.SignFlip(ratio=ratio)
    who = attack.attackers(0, KEYS)
    assert who.sum() == count
    assert (attack.attackers(0, KEYS) == who).all()
    order = np.random.default_rng(0).permutation(50)
    assert (attack.attackers(0, KEYS[order]) == who[order]).all()
    assert 0 < count < 50 or (attack.attackers(1, KEYS) == who).all()


def test_more_attackers_include_the_fewer_and_another_seed_has_others():
    """So that a curve over ratios adds attackers and does not exchange them."""
    few, many = (threats.SignFlip(ratio=r).attackers(0, KEYS) for r in (0.2, 0.4))
    assert (many[few]).all()
    assert (threats.SignFlip(ratio=0.4).attackers(1, KEYS) != many).any()


def federation(regression=False):
    rng = np.random.default_rng(0)
    data = [
        (rng.normal(size=(20, 3)), rng.normal(size=20) if regression else rng.integers(0, 5, 20)) for _ in range(10)
    ]
    return pf.Federation.from_arrays(data, test=data, classes=None if regression else 5)


def test_label_flipping_changes_the_attackers_training_labels_only():
    fed = federation()
    attack = threats.LabelFlip(ratio=0.3)
    bad, who = attack.poison(fed, seed=4), attack.attackers(4, client_keys(fed.names))
    assert who.sum() == 3
    for i in range(10):
        y, now = fed.train.client(i)[1], bad.train.client(i)[1]
        assert torch.equal(now, 4 - y if who[i] else y)
    assert torch.equal(bad.train.x, fed.train.x)
    assert bad.test is fed.test
    assert attack.attacked({"w": W}) == []


def test_a_share_of_the_labels():
    fed = federation()
    bad = threats.flip_labels(fed, np.ones(10, dtype=bool), share=0.5, seed=1)
    flipped = (bad.train.y == 4 - fed.train.y) & (fed.train.y != 2)
    assert ((bad.train.y == fed.train.y) | (bad.train.y == 4 - fed.train.y)).all()
    assert flipped.sum() <= 100
    assert flipped.sum() > 60
    again = threats.flip_labels(fed, np.ones(10, dtype=bool), share=0.5, seed=1)
    assert torch.equal(again.train.y, bad.train.y)


def test_numbers_have_no_labels_to_flip():
    with pytest.raises(DataError, match="needs classes"):
        threats.LabelFlip(ratio=0.5).poison(federation(regression=True), 0)


def test_what_is_not_forged_may_be_returned_as_received():
    """Where the client received a tensor of the same name and shape; all else is sent as trained."""
    up = {"w": W[:6].view(3, 2), "common": W[6:12].view(3, 2), "own": W[12:15].view(3, 1)}
    down = {"w": up["w"] + 1, "common": up["common"] + 1, "own": torch.zeros(3, 2)}
    turn = SimpleNamespace(ids=torch.arange(3), phase=0, t=0)

    def sent(others):
        attack = threats.SameValue(ratio=2 / 3, tensors=("w",), others=others)
        forging = threats.Forging(attack, KEYS[:3], 0)
        return forging(up, down, turn), torch.as_tensor(forging.attackers)

    honest, who = sent("honest")
    back, _ = sent("received")
    assert who.sum() == 2
    assert torch.equal(honest["common"], up["common"])
    assert torch.equal(back["common"], torch.where(who[:, None], down["common"], up["common"]))
    assert torch.equal(back["own"], up["own"])
    assert torch.equal(back["w"], honest["w"])
    assert (back["w"] != up["w"]).any(1).equal(who)


def test_which_tensors():
    up = {"w": W, "cluster": torch.zeros(3, dtype=torch.int32), "c": W}
    assert threats.SignFlip().attacked(up) == ["c", "w"]
    assert threats.SignFlip(tensors=("w",)).attacked(up) == ["w"]
    with pytest.raises(ConfigError, match="found 'cluster', expected some of w, c"):
        threats.SignFlip(tensors=("cluster",)).attacked(up)


ATTACK, RULE = threats.make_attack, threats.make_rule


@pytest.mark.parametrize(
    ("make", "name", "settings", "line"),
    [
        (ATTACK, "sing-flip", {}, "attack.name: unknown 'sing-flip' (did you mean 'sign-flip'?)"),
        (ATTACK, "gaussian", {"ration": 0.1}, "attack.ration: gaussian has no such setting"),
        (ATTACK, "gaussian", {"ratio": 1.5}, "attack.ratio of GaussianNoise: found 1.5, expected a number from 0 to 1"),
        (ATTACK, "gaussian", {"scale": -1}, "attack.scale of GaussianNoise: found -1, expected"),
        (ATTACK, "sign-flip", {"scale": "9**9"}, "attack.scale of SignFlip: found '9**9', expected"),
        (ATTACK, "sign-flip", {"tensors": 0}, "attack.tensors of SignFlip: found 0, expected a list"),
        (ATTACK, "label-flip", {"scale": 2.0}, "attack.scale of LabelFlip: found 2.0, expected a number from 0 to 1"),
        (RULE, "mean", {}, "robust.name: unknown 'mean'"),
        (RULE, "krum", {"share": False}, "robust.share of Krum: found False, expected a number"),
        (RULE, "krum", {"share": 0.5}, "robust.share of Krum: found 0.5, expected a number from 0 to below 0.5"),
        (RULE, "median", {"share": 0.5}, "robust.share: median has no such setting; it has none"),
        (RULE, "geometric-median", {"tolerance": -1}, "robust.tolerance of GeometricMedian: found -1"),
        (RULE, "norm-clipping", {"bound": 0.0}, "bound of NormClipping: found 0.0, expected a number above 0 or none"),
    ],
)
def test_what_is_wrong_is_named(make, name, settings, line):
    with pytest.raises(ConfigError) as error:
        make(name, **settings)
    assert line in str(error.value)


def test_by_name():
    assert threats.make_attack("same-value", ratio=0.4, tensors=["w"]) == threats.SameValue(ratio=0.4, tensors=("w",))
    assert threats.make_rule("trimmed-mean", share=0.1) == threats.TrimmedMean(0.1)
    summary = threats.summary(threats.make_attack("sign-flip"))
    assert summary == {"name": "sign-flip", "scale": 10.0, "ratio": 0.2, "tensors": [], "others": "honest"}
