"""Secure sums at sites, over messages as bytes: the bits of a rehearsal, and nothing but sums at the server."""

import dataclasses
import json

import numpy as np
import pytest
from direct import raw
from hospitals import FEDAVG, OPEN, at_sites, experiment, on_one_machine, same
from secured import COLUMNS, FOUR, SECURE, Keyed, Secured

from polyfed.base.errors import ConfigError, PolyfedError, RunError
from polyfed_privacy.fixed import narrow, wide
from polyfed_sites import sums

NET = '[model]\nname = "mlp"\nhidden = [5]\n'


def study(place, method=FEDAVG, privacy="", **top):
    return experiment(place / "study.toml", method, COLUMNS + SECURE + privacy, **top)


METHODS = [f'name = "{name}"' for name in ("scaffold", "ditto", "local")]
METHODS += ['name = "fedcet"\nlr = 0.05', 'name = "hypcluster"\none-hot = true']


@pytest.mark.parametrize(("method", "more"), [*((m, "") for m in METHODS), ('name = "fedrep"', NET)])
def test_sites_have_the_bits_of_a_rehearsal(method, more, data, tmp_path):
    """State and models, by sums of moments that are secure too; FedRep's rows lie elsewhere in memory at a site."""
    file, sites = study(tmp_path, method, more, rounds=2), Secured(tmp_path, data)
    same(on_one_machine(file, data), at_sites(file, sites), sites)


def test_nothing_that_leaves_a_site_or_lies_at_the_server_holds_its_numbers(data, tmp_path, monkeypatch):
    """No plain reply, sum, score or time: neither as it would be sent, nor as the integers under the masks."""
    plain: list[bytes] = []
    hidden = sums.Hidden.masked

    def noted(self, asked, found, names, privacy):
        tensors = [t.numpy() for t in found.tensors.values() if t.numel() > 3]
        values = sums.numbers(found.head, found.tensors, names) if asked.head.kind != "train" else []
        plain.extend([a.tobytes() for a in tensors if len(np.unique(a)) > 3])
        plain.extend(np.float64(v).tobytes() for v in values if len(repr(v)) > 9)
        plain.extend(repr(v).encode() for v in values if len(repr(v)) > 9)
        return hidden(self, asked, found, names, privacy)

    monkeypatch.setattr(sums.Hidden, "masked", noted)
    sites = Secured(tmp_path, data)
    run = at_sites(study(tmp_path), sites)
    assert len(plain) > 50
    kinds = {
        raw(found).head["kind"] for _, head, found in sites.seen if head["kind"] in ("pooled", "train", "evaluate")
    }
    assert kinds == {"masked"}
    there = b"".join(found for _, _, found in sites.seen)
    there += b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert not [value for value in plain if value in there]
    assert not run.trained.engine._replies
    scores = [line.split(",")[5:9] for line in (tmp_path / "run" / "clients.csv").read_text().splitlines()[1:]]
    assert len(scores) == 4
    assert scores.count(scores[0]) == 4, "the mean over sites stands for each of them"


@pytest.mark.parametrize("method", ["scaffold", "hypcluster"])
def test_a_round_without_one_site_is_the_sum_of_the_others(method, data, tmp_path):
    """Each is absent in a round: a plain run at sites but for rounding; that sum is opened for the three others."""
    states = []
    for k, privacy in enumerate((SECURE, "")):
        lines = f'name = "{method}"' + "\none-hot = true" * (method == "hypcluster" and k == 0)
        file = experiment(tmp_path / f"{k}.toml", lines, COLUMNS + privacy, rounds=5, **{"evaluate-every": 0})
        place = tmp_path / str(k)
        place.mkdir()
        sites = Secured(place, data)
        sites.lost = lambda name, head: head["kind"] == "train" and head["t"] < 4 and name == FOUR[head["t"]]
        states.append(at_sites(file, sites, wait=30, quorum=3).server)
    opened = [json.loads(line)[1] for line in (tmp_path / "0" / "run" / "opened.jsonl").read_text().split("\n") if line]
    assert [set(FOUR) - {*there} for there in opened if len(there) == 3] == [{name} for name in FOUR]
    for name in {"w", "c"} & states[0].keys():
        assert (states[0][name].double() - states[1][name].double()).abs().max() < 1e-5


def test_a_round_of_several_exchanges_is_not_repeated_without_a_lost_site(data, tmp_path):
    """The first gradient would be open by subtraction: of bern, oslo, riga and wien, and of the others alone."""
    sites = Secured(tmp_path, data)
    sites.lost = lambda name, head: name == "wien" and head["kind"] == "train" and (head["t"], head["phase"]) == (1, 1)
    file = study(tmp_path, 'name = "fedlin"')
    with pytest.raises(
        RunError, match=r"round 1: wien missing in exchange 1 of 2; under \[privacy\] a round of several"
    ):
        at_sites(file, sites, wait=30, quorum=3)
    sites.lost = lambda name, head: False
    there = at_sites(file, sites, resume=True)
    same(on_one_machine(file, data), there, sites)


def test_a_sum_that_was_opened_without_a_site_stays_that_after_a_kill(data, tmp_path):
    """wien, absent in the round before the kill, is not added to its sum afterwards."""
    file, sites = study(tmp_path, **{"checkpoint-every": 100}), Secured(tmp_path, data)

    class Killed(Exception):
        pass

    def kill(name, head):
        if head["kind"] == "train" and head["t"] == 2:
            raise Killed
        return name == "wien" and head["kind"] == "train" and head["t"] == 0

    sites.lost = kill
    with pytest.raises(Killed):
        at_sites(file, sites, wait=30, quorum=3)
    sites.members.clear()
    sites.lost = lambda name, head: False
    run = at_sites(file, sites, resume=True, wait=30, quorum=3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "opened.jsonl").read_text().split("\n") if line]
    assert len({key for key, _ in lines}) == len(lines)
    assert any(present == ["bern", "oslo", "riga"] for _, present in lines)
    assert run.status == "finished"


@pytest.mark.parametrize(
    ("policy", "privacy", "line"),
    [
        ({"least_sites": 5}, SECURE, "is asked for sums over 4 sites; its policy has least-sites = 5"),
        ({"clip": 2.0}, SECURE, "its policy has clip = 2"),
        ({"epsilon": 1.0}, SECURE, "a run whose models no epsilon bounds; its policy has epsilon = 1"),
        ({"sums": "secure"}, "", r"privacy\.sums = open\); its policy has sums = secure"),
    ],
)
def test_a_sites_policy_is_held_to(policy, privacy, line, data, tmp_path):
    sites = Secured(tmp_path, data, policy=dataclasses.replace(OPEN, **policy))
    with pytest.raises(PolyfedError, match=line):
        at_sites(experiment(tmp_path / "study.toml", FEDAVG, COLUMNS + privacy), sites)


def test_methods_that_need_rows_are_refused_before_anybody_is_asked(data, tmp_path):
    sites = Secured(tmp_path, data)
    with pytest.raises(ConfigError, match="the server of fedamp needs every client's own"):
        at_sites(study(tmp_path, 'name = "fedamp"'), sites)
    assert not sites.seen


SHARES = "site 'riga': its share of 'bern' has 31 bytes, expected 32"
LIES = {  # a site, a kind of its answers, what becomes of their heads, and what is said
    "a key": ("oslo", "joined", lambda head: {"peer": dict(head["peer"], key="09" * 32)},
              "bern: is given a key of 'oslo' that 'oslo' has not signed"),
    "a share": ("riga", "opened", lambda head: {"shares": dict(head["shares"], bern="00" * 31)}, SHARES),
}  # fmt: skip


@pytest.mark.parametrize(("who", "kind", "change", "said"), LIES.values(), ids=LIES)
def test_keys_that_a_site_has_not_signed_are_refused_and_wrong_second_answers_name_who_lies(
    who, kind, change, said, data, tmp_path
):
    """The server puts a key of its own in oslo's place: it would read what is hidden between oslo and the others."""
    sites = Secured(tmp_path, data)

    def altered(name, question, reply):
        return reply.saying(**change(reply.head)) if name == who and reply.head["kind"] == kind else reply

    with pytest.raises(PolyfedError, match=said):
        at_sites(study(tmp_path), sites, Keyed(sites, altered))


@pytest.mark.parametrize("values", [[0.0, -1.5, 2.0**-60, 1e14, -1e14], [1 / 3, -(2.0**49)], []])
def test_wide_numbers_come_back_to_the_bit(values):
    rounded = [round(v * 2**64) / 2**64 if abs(v) < 1e-3 else v for v in values]
    assert narrow(wide(values)) == rounded


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**50])
def test_what_would_wrap_is_refused_with_its_number(value):
    with pytest.raises(PolyfedError, match=r"in a sum over sites, expected a number below"):
        wide([value])
