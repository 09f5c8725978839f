"""Augmentation: what a sample becomes depends on its key alone; flips and crops are what their names say."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import batches
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed.base.randomness import mix
from polyfed.compute.augment import Crop, Draws, Flip, Steps, augmentation
from polyfed.compute.split import Split

SIZES, SHAPE = (10, 3, 8, 17), (2, 6, 5)
BOTH = Steps((Flip(), Crop(2)))


def draws(n: int, seed: int = 0) -> Draws:
    return Draws(mix(seed, np.arange(n, dtype=np.uint64)))


def images(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand((n, *SHAPE), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def split():
    return Split.of([(images(n, i), torch.arange(n) % 3) for i, n in enumerate(SIZES)])


def test_two_flips_are_the_identity():
    x, flip = images(200), Flip()
    once = flip(x, draws(200))
    assert torch.equal(flip(once, draws(200)), x)
    assert torch.equal(Flip(1.0)(x, draws(200)), x.flip(-1))
    assert torch.equal(Flip(0.0)(x, draws(200)), x)
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(once, x, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(once, x, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert abs(sum(mirrored) - 100) < 4 * 50**0.5  # four standard deviations


@pytest.mark.parametrize("padding", [1, 2, 4])
def test_a_crop_is_padding_and_a_slice(padding):
    """Every result is one of the (2 padding + 1)^2 windows of the padded image, and each window comes up."""
    n, (_, height, width), side = 2000, SHAPE, 2 * padding + 1
    x = images(1).expand(n, *SHAPE).contiguous()
    found = Crop(padding)(x, draws(n))
    wide = F.pad(x[0], (padding,) * 4)
    windows = torch.stack([wide[:, i : i + height, j : j + width] for i in range(side) for j in range(side)])
    equal = (found[:, None] == windows).flatten(2).all(2)
    assert equal.sum(1).tolist() == [1] * n
    expected, freedom = n / side**2, side**2 - 1
    chi2 = float(((equal.sum(0).double() - expected) ** 2 / expected).sum())
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("batch_size", [1, 4, None])
def test_a_batch_does_not_depend_on_who_else_is_in_the_call(split, batch_size):
    work = {"epochs": 2, "batch_size": batch_size, "augment": BOTH}
    together = list(batches(split, **work))
    for i in range(len(SIZES)):
        for k, alone in enumerate(batches(split, [i], **work)):
            sizes = together[k].sizes
            b = alone.x.shape[1] if sizes is None else sizes[i]
            assert torch.equal(alone.x[0, :b], together[k].x[i, :b])
    mixed = list(batches(split, [2, 0], **work))
    for k, (a, b) in enumerate(zip(mixed, together, strict=False)):
        real = (a.x.shape[1] if a.sizes is None else a.sizes[0]) if k < 2 * -(-8 // (batch_size or 8)) else 0
        assert torch.equal(a.x[0, :real], b.x[2, :real])


def test_the_same_samples_are_drawn_with_and_without(split):
    """Labels and order are untouched, and every augmented image is made of its own original."""
    plain, changed = (list(batches(split, batch_size=4, augment=a)) for a in (None, Steps((Flip(),))))
    moved = 0
    for a, b in zip(plain, changed, strict=True):
        assert torch.equal(a.y, b.y)
        same = (a.x == b.x).flatten(2).all(2)
        assert (same | (a.x.flip(-1) == b.x).flatten(2).all(2)).all()
        moved += int((~same).sum())
    assert moved > 0
    assert torch.equal(batches(split, augment=BOTH).whole().x, batches(split).whole().x)


def test_steps_rounds_clients_and_solves_draw_their_own(split):
    def one(data=split, purpose=None, **key):
        work = batches(data, batch_size=None, epochs=2, augment=BOTH, **key)
        return [batch.x for batch in (work.again(purpose) if purpose else work)]

    base, second = one(clients=[0])
    assert torch.equal(base, one(clients=[0])[0])
    for other in (
        second,
        *(one(clients=[0], **key)[0] for key in ({"round": 1}, {"seed": 1}, {"purpose": "personal"})),
    ):
        assert not torch.equal(base, other)
    twins = one(Split.of([(images(10), torch.zeros(10))] * 2))[0]
    assert not torch.equal(twins[0], twins[1])


def federation():
    rng = np.random.default_rng(0)
    return pf.Federation.from_arrays(
        [(rng.normal(size=(n, 1, 6, 6)).astype(np.float32), np.arange(n) % 2) for n in (12, 9, 15)], test_fraction=0.0
    )


def net() -> nn.Module:
    """Of the module's own path: the compiled kernel, which augments nothing, would give other last bits."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.SiLU(), nn.Flatten(), nn.Linear(48, 2))


def run(augment, **settings):
    given = {"rounds": 2, "batch_size": 4, "device": "cpu", **settings}
    return pf.fit(net(), federation(), pf.FedAvg(lr=0.1), augment=augment, **given)


def test_a_run_is_augmented_by_its_seed_alone():
    plain, changed = run(None), run("flip+crop:2")
    assert not torch.equal(plain.personal, changed.personal)
    assert torch.equal(changed.personal, run(Steps((Flip(), Crop(2)))).personal)
    torch.testing.assert_close(changed.personal, run("flip+crop:2", chunk=3, workers=1).personal)
    torch.testing.assert_close(plain.personal, run("flip:0").personal)  # the kernel's sums and torch's
    assert changed.settings.table()["augment"] == "flip+crop:2"
    assert run("crop:5", rounds=0).records == run(None, rounds=0).records, "evaluation sees the images as they are"


def test_a_function_of_the_user():
    """Brightness noise per sample; its draws are keyed as those of a flip."""

    def brighten(x, draws):
        return x + draws.uniform().to(x.dtype)[:, None, None, None]

    one, again, plain = (run(given).personal for given in (brighten, brighten, None))
    assert torch.equal(one, again)
    assert not torch.equal(one, plain)
    with pytest.raises(ConfigError, match="expected the same shape"):
        run(lambda x, draws: x[:, :, 1:])


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("flip+crop:4", (Flip(), Crop(4))),
        ("flip:0.3 + crop:8,p=0.5", (Flip(0.3), Crop(8, 0.5))),
        ("crop", (Crop(4),)),
    ],
)
def test_the_text_form(text, made):
    assert augmentation(text, (3, 32, 32)) == Steps(made)


@pytest.mark.parametrize(
    ("given", "shape", "words"),
    [
        ("flop", (3, 8, 8), "did you mean 'flip'"),
        ("", (3, 8, 8), "flip\\+crop:4"),
        ("crop:x", (3, 8, 8), "'x'"),
        ("crop:0", (3, 8, 8), "at least 1"),
        ("crop:4,p=2", (3, 8, 8), "from 0 to 1"),
        ("crop:4,q=1", (3, 8, 8), "'q=1'"),
        ("crop:8", (3, 8, 9), "\\[8, 9\\]"),
        ("flip", (784,), "\\[784\\]"),
        (3, (3, 8, 8), "a callable"),
    ],
)
def test_what_is_no_augmentation_is_refused(given, shape, words):
    with pytest.raises(ConfigError, match=words):
        augmentation(given, shape)
