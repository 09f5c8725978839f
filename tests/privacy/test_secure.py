"""A secure sum between four sites in memory: exact with everybody and with each absent; no mask for two answers."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyfed.base.errors import Refusal, RunError
from polyfed.privacy.masks import add, subtract
from polyfed.privacy.secure import Context, Server, Site

NAMES = ("bern", "oslo", "riga", "wien")
D = 50


def context(t: int = 0, digest: bytes = b"model", cohort: tuple[str, ...] = NAMES, limbs: int = 1) -> Context:
    return Context("run", f"train {t}.0", cohort, digest, limbs=limbs)


class Sites(dict[str, Site]):
    """Four sites that know each other's keys; `again` is one whose process was killed."""

    def __init__(self, least: int = 3):
        super().__init__()
        self.private = {name: X25519PrivateKey.generate() for name in NAMES}
        self.memory = {name: {} for name in NAMES}
        self.least = least
        for name in NAMES:
            self.again(name)

    def again(self, name: str) -> Site:
        public = {j: key.public_key().public_bytes_raw() for j, key in self.private.items() if j != name}
        self[name] = Site(name, self.private[name], name.encode() * 8, public, self.memory[name], self.least)
        return self[name]


def numbers() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 2**64, D, dtype=np.uint64) for name in NAMES}


def exchange(sites: Sites, c: Context, absent: str | None = None, between=lambda name: None) -> np.ndarray:
    q, server = numbers(), Server(c, D)
    for name in c.cohort:
        if name != absent:
            server.take(name, sites[name].mask(c, q[name]))
    opened = {}
    for name in server.present:
        between(name)
        opened[name] = sites[name].open(c, server.present, server.sealed(name))
    return server.sum(opened)


@pytest.mark.parametrize("absent", [None, *NAMES])
def test_the_sum_is_exact_with_everybody_and_with_each_absent_in_turn(absent):
    q = numbers()
    found = exchange(Sites(), context(), absent)
    assert (found == sum(q[name] for name in NAMES if name != absent)).all()


def test_the_bits_depend_on_neither_keys_nor_masks():
    assert (exchange(Sites(), context()) == exchange(Sites(), context(5, b"other"))).all()


@pytest.mark.parametrize("absent", [None, "oslo"])
def test_a_site_killed_between_the_exchanges_goes_on(absent):
    sites = Sites()
    found = exchange(sites, context(), absent, between=sites.again)
    assert (found == sum(q for name, q in numbers().items() if name != absent)).all()


def test_the_same_request_has_the_same_answer_bit_for_bit():
    sites, q = Sites(), numbers()["bern"]
    first = sites["bern"].mask(context(), q)
    again = sites.again("bern").mask(context(), q)
    assert (first.words == again.words).all()
    assert first.commitments == again.commitments


def test_without_the_last_share_nothing_is_seen():
    """What the server holds after the first exchange, and one site's words, are no numbers of anybody's."""
    sites, zero = Sites(), np.zeros(20_000, dtype=np.uint64)
    found = sites["bern"].mask(context(), zero).words
    bits = np.unpackbits(found.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 5 * 0.5 / (64 * 20_000) ** 0.5


@pytest.mark.parametrize("other", [context(digest=b"other"), context(cohort=NAMES[:3])])
def test_one_exchange_is_answered_for_one_message_and_one_cohort(other):
    """Two models under one mask, or a round begun again without a lost site: the difference would be open."""
    sites, q = Sites(), numbers()["bern"]
    sites["bern"].mask(context(), q)
    with pytest.raises(Refusal, match="asked a second time for one exchange, for another cohort or message"):
        sites.again("bern").mask(other, q)


def test_other_numbers_for_one_context_are_refused():
    sites, q = Sites(), numbers()["bern"]
    sites["bern"].mask(context(), q)
    with pytest.raises(Refusal, match="with other numbers"):
        sites["bern"].mask(context(), q + np.uint64(1))


def test_a_sum_is_opened_once_and_for_one_set_of_sites():
    sites, c, q = Sites(), context(), numbers()
    server = Server(c, D)
    for name in NAMES:
        server.take(name, sites[name].mask(c, q[name]))
    sites["bern"].open(c, NAMES, server.sealed("bern"))
    sites["bern"].open(c, NAMES, server.sealed("bern"))
    with pytest.raises(Refusal, match="for other sites"):
        sites["bern"].open(c, NAMES[:3], server.sealed("bern"))


def test_an_older_copy_of_a_vault_hides_no_other_numbers_by_one_mask_that_is_opened():
    """What bern has forgotten it answers anew, and differently; the others have opened the first answer's mask."""
    sites, c, q = Sites(), context(), numbers()
    first, second = Server(c, D), Server(c, D)
    for name in NAMES:
        first.take(name, sites[name].mask(c, q[name]))
    for name in NAMES:
        sites[name].open(c, NAMES, first.sealed(name))
    sites.memory["bern"].clear()
    other = sites["bern"].mask(c, q["bern"] + np.uint64(1))
    kept = sites["oslo"].mask(c, q["oslo"])
    second.take("bern", other), second.take("oslo", kept)
    with pytest.raises(Refusal, match="asked a second time for one exchange, for other sites"):
        sites["riga"].open(c, NAMES, first.sealed("riga") | second.sealed("riga"))


def test_integers_of_two_words_carry():
    """128 bits: what lies in the low words of two sites carries into the high one, with masks or without."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        x = [rng.integers(0, 2**64, 2 * D, dtype=np.uint64) for _ in range(3)]
        as_one = [[int(a[2 * k]) + (int(a[2 * k + 1]) << 64) for k in range(D)] for a in x]
        total = subtract(add(x[0], x[1], 2), x[2], 2)
        for k in range(D):
            expected = (as_one[0][k] + as_one[1][k] - as_one[2][k]) % 2**128
            assert int(total[2 * k]) + (int(total[2 * k + 1]) << 64) == expected
    found, q = exchange(Sites(), context(limbs=2), "oslo"), numbers()
    assert (found == add(add(q["bern"], q["riga"], 2), q["wien"], 2)).all()


@pytest.mark.parametrize(
    ("present", "line"),
    [
        (NAMES[:2], "a sum of 2 sites, expected at least 3"),
        (NAMES[1:], "expected some of the cohort"),
        ((*NAMES, "paris"), "expected some of the cohort"),
        ((), "expected some of the cohort"),
    ],
)
def test_too_few_or_others_are_not_opened(present, line):
    sites, c = Sites(), context()
    sites["bern"].mask(c, numbers()["bern"])
    with pytest.raises(Refusal, match=line):
        sites["bern"].open(c, present, {})


@pytest.mark.parametrize("cohort", [("bern", "oslo"), ("bern", "bern", "oslo"), ("oslo", "riga", "wien")])
def test_a_cohort_below_the_sites_own_least_is_refused(cohort):
    with pytest.raises(Refusal, match="asked for a sum over"):
        Sites()["bern"].mask(context(cohort=cohort), numbers()["bern"])
    with pytest.raises(Refusal, match="asked for a sum over 4 sites, expected at least 5"):
        Sites(least=5)["bern"].mask(context(), numbers()["bern"])


def test_a_site_whose_key_was_not_checked_is_no_peer():
    with pytest.raises(Refusal, match="'paris' has no key that was checked"):
        Sites()["bern"].mask(context(cohort=(*NAMES, "paris")), numbers()["bern"])


def test_repeated_keys_are_refused():
    sites = Sites()
    sites.private["oslo"] = sites.private["riga"]
    with pytest.raises(Refusal, match="two sites with one public key"):
        sites.again("bern")


def test_who_lies_is_named():
    sites, c, q = Sites(), context(), numbers()
    server = Server(c, D)
    for name in NAMES[:3]:
        server.take(name, sites[name].mask(c, q[name]))
    opened = {name: sites[name].open(c, NAMES[:3], server.sealed(name)) for name in NAMES[:3]}
    wrong = opened["oslo"]._replace(keys={"wien": bytes(32)})
    with pytest.raises(RunError, match=r"site 'oslo': its key with 'wien' is not the one"):
        server.sum(opened | {"oslo": wrong})
    wrong = opened["riga"]._replace(shares=opened["riga"].shares | {"bern": bytes(32)})
    with pytest.raises(RunError, match=r"site 'riga': its share of 'bern' is not the one"):
        server.sum(opened | {"riga": wrong})
    with pytest.raises(RunError, match=r"site 'riga' left between the two exchanges"):
        server.sum({name: o for name, o in opened.items() if name != "riga"})
    with pytest.raises(Refusal, match="the share of 'oslo' is not as 'oslo' sealed it"):
        _spoiled(sites, c, server)


def _spoiled(sites: Sites, c: Context, server: Server) -> None:
    sealed = server.sealed("bern")
    sites["bern"].open(c, NAMES[:3], sealed | {"oslo": sealed["oslo"][:-1] + bytes([sealed["oslo"][-1] ^ 1])})


def test_with_everybody_there_a_threshold_of_second_answers_is_enough():
    sites, c, q = Sites(), context(), numbers()
    server = Server(c, D)
    for name in NAMES:
        server.take(name, sites[name].mask(c, q[name]))
    opened = {name: sites[name].open(c, NAMES, server.sealed(name)) for name in NAMES[:3]}
    assert (server.sum(opened) == sum(q.values())).all()
    with pytest.raises(RunError, match="found 2, expected at least 3"):
        server.sum({name: opened[name] for name in NAMES[:2]})


@pytest.mark.parametrize(
    ("name", "words"),
    [("bern", np.zeros(D - 1, dtype=np.uint64)), ("bern", np.zeros(D)), ("paris", np.zeros(D, dtype=np.uint64))],
)
def test_masked_words_of_another_shape_or_sender_are_refused(name, words):
    answer = Sites()["bern"].mask(context(), numbers()["bern"])
    with pytest.raises(RunError, match=f"site {name!r}"):
        Server(context(), D).take(name, answer._replace(words=words))
