"""Differential privacy at sites: noise as the account has it, booked on the disk before it leaves, and a budget."""

import json

import numpy as np
import pytest
from direct import raw
from hospitals import at_sites, experiment
from secured import COLUMNS, DP, FOUR, SECURE, Secured

from polyfed.base.errors import PolyfedError
from polyfed_privacy.guard import Guard

WIDE = '[model]\nname = "mlp"\nhidden = [120]\n'


def study(place, privacy, rounds=1, model="", name="study"):
    """FedAvg with one step a round on all rows."""
    top = {"batch-size": "full", "local-steps": 1, "rounds": rounds, "evaluate-every": 0}
    file = experiment(place / f"{name}.toml", 'name = "fedavg"\nlr = 1.0', COLUMNS + model + privacy, **top)
    file.write_text(file.read_text().replace("local-epochs = 2\n", ""))
    return file


def model(place, data, monkeypatch, silent, unit="row"):
    """The model after a round in which these sites draw no noise, and what the account claims of its noise."""
    sigma = []
    place.mkdir()
    noise, of = Guard._noise, Guard._sigma

    def noted(self, *about):
        sigma.append(of(self, *about))
        return sigma[-1]

    def drawn(self, gaussian, secret, like, *rest):
        found = noise(self, gaussian, secret, like, *rest)
        return found * 0 if self.names[0] in silent else found

    with monkeypatch.context() as patch:
        patch.setattr(Guard, "_sigma", noted)
        patch.setattr(Guard, "_noise", drawn)
        sites = Secured(place, data)
        w = at_sites(study(place, f'{SECURE}{DP}unit = "{unit}"\n', model=WIDE), sites).server["w"].double().numpy()
    rows = sum(member.state.joined.file.counts["train"] for member in sites.members.values())
    return w, sigma[-1] / (rows * 2.0**30)


@pytest.mark.parametrize("unit", ["row", "site"])
def test_the_noise_in_a_sum_of_sites_has_the_variance_of_the_account(unit, data, tmp_path, monkeypatch):
    """Each site draws its share from its own secret; one of four that draws none is seen."""
    quiet, sigma = model(tmp_path / "quiet", data, monkeypatch, FOUR, unit)
    x = (model(tmp_path / "all", data, monkeypatch, (), unit)[0] - quiet) / sigma
    short = (model(tmp_path / "three", data, monkeypatch, ("oslo",), unit)[0] - quiet) / sigma
    second, fourth, n = (x**2).mean(), (x**4).mean(), len(x)
    assert abs(second - 1) < 4 * (2 / n) ** 0.5
    assert abs(fourth - 3) < 4 * (96 / n) ** 0.5
    short = (short**2).mean()
    assert abs(short - 0.75) < 4 * 0.75 * (2 / n) ** 0.5
    assert short < 1 - 3 * (2 / n) ** 0.5


@pytest.mark.parametrize("noise", ["shared", "own", "server"])
def test_a_release_is_on_the_disk_before_it_leaves_and_asked_again_is_the_same(noise, data, tmp_path):
    table = SECURE if noise == "shared" else "[privacy]\n"
    file, sites = study(tmp_path, f'{table}{DP}noise = "{noise}"\n', rounds=2), Secured(tmp_path, data)
    ledger, answer = tmp_path / "vaults" / "privacy.ledger", sites.answer

    def twice(name, message):
        """A site that is killed after its answer, which is lost."""
        head = raw(message).head
        first = answer(name, message)
        if head["kind"] != "train":
            return first
        booked = [json.loads(line) for line in ledger.read_text().splitlines()]
        mine = [entry for entry in booked if entry["site"] == name]
        assert len(mine) == head["t"] + 1
        sites.members.pop(name)
        again = answer(name, message)
        assert len(ledger.read_text().splitlines()) == len(booked)
        for key, words in raw(first).tensors.items():
            assert words.equal(raw(again).tensors[key])
        return again

    sites.answer = twice
    at_sites(file, sites)
    spent = dict.fromkeys(FOUR, 0.0)
    for line in ledger.read_text().splitlines():
        entry = json.loads(line)
        spent[entry["site"]] += entry["rho"]
    assert all(rho > 0 for rho in spent.values())


@pytest.mark.parametrize("unit", ["row", "site"])
def test_rounds_that_are_raised_on_resume_are_refused_by_every_site(unit, data, tmp_path):
    """The noise was made for two rounds, which are the whole budget; nothing is asked for beyond them."""
    privacy, sites = f'{SECURE}{DP}unit = "{unit}"\n', Secured(tmp_path, data)
    at_sites(study(tmp_path, privacy, rounds=2), sites)
    booked = (tmp_path / "vaults" / "privacy.ledger").read_text()
    assert len(booked.splitlines()) == 2 * len(FOUR)
    line = ".*".join(
        f"{name}: client '{name}': its privacy budget of epsilon 2 at delta 0.001 is spent" for name in FOUR
    )
    with pytest.raises(PolyfedError, match=line):
        at_sites(study(tmp_path, privacy, rounds=4), sites, resume=True)
    assert {head["t"] for _, head, _ in sites.seen if head["kind"] == "train"} == {0, 1}
    assert (tmp_path / "vaults" / "privacy.ledger").read_text() == booked


def test_noise_is_none_of_the_runs_seed(data, tmp_path):
    """Two federations of the same seed on the same rows: other secrets, other noise."""
    models = []
    for k in range(2):
        place = tmp_path / str(k)
        place.mkdir()
        models.append(at_sites(study(place, SECURE + DP), Secured(place, data)).server["w"].numpy())
    assert not np.isclose(*models).any()
