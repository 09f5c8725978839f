"""Secure sums against a server that acts: keys of its own, other cohorts, one model twice, sites called absent."""

import dataclasses

import pytest
from direct import raw
from hospitals import OPEN, at_sites
from secured import DP, FOUR, SECURE, Keyed, Secured, register
from test_private_sites import study

from polyfed.base.errors import PolyfedError
from polyfed_sites.keys import fingerprint
from polyfed_sites.policy import Policy
from polyfed_sites.sums import shared
from polyfed_sites.wire import request

PINS = {name: fingerprint(key) for name, key in register().items()}


def attacked(tmp_path, data, change=lambda _, question: question, policy=OPEN, privacy=SECURE):
    """What a server is told that asks what `change` makes of its questions."""
    sites = Secured(tmp_path, data, policy=policy)
    with pytest.raises(PolyfedError) as error:
        at_sites(study(tmp_path, privacy, rounds=3), sites, Keyed(sites, asked=change), wait=30, quorum=3)
    return str(error.value), sites


def test_an_unattended_site_hides_by_no_key_that_it_was_not_given(data, tmp_path):
    """--yes policy asks nobody about keys: of oslo, riga and wien the server may have made three."""
    sites = Secured(tmp_path, data)
    for name in FOUR:
        sites.member(name).policy = Policy(least_rows=1, least_batch=1, least_count=1)
    with pytest.raises(PolyfedError) as error:
        at_sites(study(tmp_path, SECURE), sites)
    said = str(error.value)
    assert "bern: is asked for sums hidden by keys that nobody here has pinned" in said
    assert all(f'"{PINS[name]}"' in said for name in ("oslo", "riga", "wien")), "what would pass"
    assert "its policy has peers = none" in said
    assert {head["kind"] for _, head, _ in sites.seen} == {"join", "over"}


@pytest.mark.parametrize("pinned", [["oslo"], []])
def test_keys_of_the_servers_own_do_not_count_as_sites(pinned, data, tmp_path):
    policy = dataclasses.replace(OPEN, peers=[PINS[name] for name in pinned])
    said, _ = attacked(tmp_path, data, policy=policy)
    assert f"bern: is asked for sums over 4 sites, of whom {3 - len(pinned)} have keys that are not pinned" in said
    assert "its policy has least-sites = 3" in said


def test_noise_that_unpinned_sites_share_is_refused_unless_the_others_make_enough(data, tmp_path):
    policy = dataclasses.replace(
        OPEN, peers=[PINS[n] for n in ("bern", "oslo", "riga")], epsilon=2.0, delta=1e-3, absent=1
    )
    said, _ = attacked(tmp_path, data, policy=policy, privacy=SECURE + DP)
    keys = "of whom 1 have keys that are not pinned, with privacy.absent = 0"
    assert f"is asked for noise that 4 sites share, {keys}" in said
    assert "(2 or more would do); its policy has peers = " in said


@pytest.mark.parametrize("cohort", [["bern", "oslo", "riga"], ["bern", "oslo", "riga", "oslo"]])
def test_a_cohort_that_the_terms_do_not_have_is_refused(cohort, data, tmp_path):
    """Of three in a sum two may be the server's; and ten sites' sum less nine sites' is the tenth's reply."""

    def fewer(name, message):
        return message.saying(cohort=cohort) if message.head["kind"] == "train" else message

    said, sites = attacked(tmp_path, data, fewer)
    asks = ", ".join(sorted(cohort))
    assert f"bern: is asked for a sum over {asks}, and has agreed to bern, oslo, riga, wien" in said
    assert "open" not in {head["kind"] for _, head, _ in sites.seen if head.get("what", "").startswith("train")}


def test_a_sum_is_not_opened_without_a_site_that_the_policy_wants_in_it(data, tmp_path):
    sites = Secured(tmp_path, data)
    sites.lost = lambda name, head: name == "wien" and head["kind"] == "train"
    for name in FOUR:
        sites.member(name).hidden.policy = dataclasses.replace(OPEN, absent=0)
    with pytest.raises(PolyfedError, match="bern: is asked for a sum without wien; its policy has absent = 0"):
        at_sites(study(tmp_path, SECURE), sites, wait=30, quorum=3)


def test_one_model_is_opened_for_one_group_of_sites(data, tmp_path):
    """Where sites may be absent: the same model again, and wien called absent, would give wien's reply."""
    sites = Secured(tmp_path, data)

    def stop(name, question):
        if question.head["kind"] == "train" and question.head["t"] == 1:
            raise KeyboardInterrupt
        return question

    wire = Keyed(sites, asked=stop)
    with pytest.raises(KeyboardInterrupt):
        at_sites(study(tmp_path, SECURE, rounds=3), sites, wire)
    again = wire.first("train", "bern").saying(t=1)
    assert raw(sites.answer("bern", again.pack())).head["kind"] == "masked"
    digest = shared(request(again.pack(), 1 << 24, "it")).hex()
    for there, kind in ((["bern", "oslo", "riga"], "failed"), ([*FOUR], "opened")):
        asked = wire.first("open", "bern", what="train 0.0").saying(what="train 1.0", digest=digest, present=there)
        said = raw(sites.answer("bern", asked.pack())).head
        assert kind == "opened" or "bern: is asked for the sum at one model over two groups of sites" in said["error"]


def test_an_operator_who_has_read_the_keys_has_pinned_them(data, tmp_path):
    sites = Secured(tmp_path, data)
    for name in FOUR:
        sites.consent[name] = dataclasses.replace(
            sites.consent[name], ask=lambda text: all(p in text for p in PINS.values())
        )
        sites.member(name).policy = dataclasses.replace(OPEN, peers=None)
    assert at_sites(study(tmp_path, SECURE), sites).status == "finished"
