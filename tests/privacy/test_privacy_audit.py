"""The audit: below the claim on right code, above it where noise or clipping is left out."""

import math

import numpy as np
import pytest
import torch

from polyfed.base.errors import ConfigError
from polyfed.cli import call
from polyfed.compute.stacked import Stacked
from polyfed.runs.privacy import Privacy
from polyfed_privacy.accounts import lower_bound
from polyfed_privacy.audit import audit
from polyfed_privacy.guard import Guard
from polyfed_privacy.noise import Gaussian

CLAIM = {"sums": "secure", "epsilon": 2.0, "delta": 1e-5, "clip": 1.0}


def test_two_hundred_right_guesses_show_epsilon_four():
    """The most that 200 guesses can show: log(p / (1 - p)) with p^200 = 0.05."""
    p = 0.05 ** (1 / 200)
    assert lower_bound(200, 200, 2000, 0.0) == pytest.approx(math.log(p / (1 - p)), abs=1e-6)
    assert lower_bound(200, 200, 2000, 1e-5) == pytest.approx(4.14, abs=0.02)
    assert lower_bound(100, 200, 2000, 1e-5) == 0, "guesses at random"


def test_randomised_response_is_bounded_from_below_in_nineteen_of_twenty():
    """Coins told rightly with probability e^eps / (1 + e^eps) are eps-private, exactly."""
    rng, eps = np.random.default_rng(0), 1.5
    right = rng.binomial(500, math.exp(eps) / (1 + math.exp(eps)), 400)
    found = np.array([lower_bound(int(r), 500, 500, 0.0) for r in right[:100]])
    assert (found > eps).mean() <= 0.05 + 3 * (0.05 * 0.95 / 100) ** 0.5
    assert np.median(found) > 0.75 * eps


@pytest.mark.parametrize(("noise", "absent"), [("shared", 0), ("shared", 1), ("own", 0), ("server", 0)])
def test_right_code_keeps_its_promise(noise, absent):
    """The canaries are seen as well as Gaussian noise of the claim's size allows, and the noise has that size."""
    found = audit(Privacy(**CLAIM, noise=noise, absent=absent), 20, 1000)
    assert found.claim == pytest.approx(2.0, rel=1e-6)
    assert not found.broken
    assert found.right > 0.5 * found.guesses
    assert found.auc == pytest.approx(found.best, abs=4 * (1 / 3000) ** 0.5)  # of ranks, 500 and 500
    assert found.second == pytest.approx(1, abs=4 * (2 / found.moves) ** 0.5)
    assert found.best > 0.55


@pytest.mark.parametrize("delta", [0.001, 0.02])
def test_a_federation_of_few_rows_is_audited_with_its_own_delta(delta):
    """At most 1 / delta canaries: more rows than the run may have would make its delta too large."""
    found = audit(Privacy(**{**CLAIM, "delta": delta}), 5)
    assert found.guesses < 1 / delta
    assert not found.broken


def halved(patch):
    sigma = Guard._sigma
    patch.setattr(Guard, "_sigma", lambda self, *given: sigma(self, *given) / 2)


def one_silent(patch):
    noise = Guard._noise

    def drawn(self, gaussian, secret, like, *rest):
        return torch.zeros_like(like) if secret == self.site(2) else noise(self, gaussian, secret, like, *rest)

    patch.setattr(Guard, "_noise", drawn)


def uniform(patch):
    """Of the right variance: the fourth moment tells."""

    def drawn(self, key, n):
        x = np.random.default_rng(int.from_bytes(key[:8], "big")).uniform(-1, 1, n)
        return np.rint(3**0.5 * self.sigma * x).astype(np.int64)

    patch.setattr(Gaussian, "draw", drawn)


@pytest.mark.parametrize(
    ("wrong", "second", "noise"), [(halved, 0.25, "shared"), (one_silent, 0.75, "shared"), (uniform, 1.0, "server")]
)
def test_noise_that_guesses_do_not_miss_is_missed_by_its_moments(wrong, second, noise, monkeypatch):
    wrong(monkeypatch)
    found = audit(Privacy(**CLAIM, noise=noise), 20, 1000)
    assert found.second == pytest.approx(second, abs=4 * second * (2 / found.moves) ** 0.5)
    assert found.short
    assert found.broken


def one_round_silent(patch):
    draw = Guard._noise

    def forgotten(self, gaussian, secret, like, round, *more):
        return torch.zeros_like(like) if round.t == 3 else draw(self, gaussian, secret, like, round, *more)

    patch.setattr(Guard, "_noise", forgotten)


def unclipped(patch):
    clipped = Stacked.clipped
    patch.setattr(Stacked, "clipped", lambda self, w, batch, clip: clipped(self, w, batch, 6 * clip))


def silent(patch):
    patch.setattr(Gaussian, "draw", lambda self, key, n: np.zeros(n, dtype=np.int64))


@pytest.mark.parametrize("wrong", [one_round_silent, silent, unclipped])
def test_noise_or_clipping_that_is_left_out_is_found(wrong, monkeypatch):
    wrong(monkeypatch)
    assert audit(Privacy(**CLAIM), 20, 1000).broken


def test_what_has_no_rows_to_audit_is_refused(tmp_path, capsys):
    with pytest.raises(ConfigError, match="unit = row"):
        audit(Privacy(**CLAIM, unit="site"), 3)
    assert call(["audit", str(tmp_path / "none")]) == 1
    assert "no such folder" in capsys.readouterr().err
