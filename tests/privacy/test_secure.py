"""A secure sum between sites in memory: exact with everybody and with each absent; no mask for two answers."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyfed.base.errors import Refusal, RunError
from polyfed_privacy.masks import add, subtract
from polyfed_privacy.secure import Context, Server, Site
from polyfed_privacy.shares import PRIME

NAMES = ("bern", "oslo", "riga", "wien")
D = 50


def context(t: int = 0, digest: bytes = b"model", cohort: tuple[str, ...] = NAMES, limbs: int = 1) -> Context:
    return Context("run", f"train {t}.0", cohort, digest, limbs=limbs)


class Sites(dict[str, Site]):
    """Sites that know each other's keys; `again` is one whose process was killed."""

    def __init__(self, least: int = 3, names: tuple[str, ...] = NAMES):
        super().__init__()
        self.private = {name: X25519PrivateKey.generate() for name in names}
        self.memory = {name: {} for name in names}
        self.least = least
        for name in names:
            self.again(name)

    def again(self, name: str) -> Site:
        public = {j: key.public_key().public_bytes_raw() for j, key in self.private.items() if j != name}
        self[name] = Site(name, self.private[name], name.encode() * 8, public, self.memory[name], self.least)
        return self[name]


def numbers() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 2**64, D, dtype=np.uint64) for name in NAMES}


def asked(sites: Sites, c: Context, who: tuple[str, ...] = NAMES) -> Server:
    """A server that has these sites' first answers."""
    q, server = numbers(), Server(c, D)
    for name in who:
        server.take(name, sites[name].mask(c, q[name]))
    return server


def exchange(sites: Sites, c: Context, absent: str | None = None, between=lambda name: None) -> np.ndarray:
    server, opened = asked(sites, c, tuple(name for name in c.cohort if name != absent)), {}
    for name in server.present:
        between(name)
        opened[name] = sites[name].open(c, server.present, server.sealed(name))
    return server.sum(opened)


@pytest.mark.parametrize("absent", [None, *NAMES])
def test_the_sum_is_exact_with_everybody_and_with_each_absent_in_turn(absent):
    """Whatever the keys, the context and so the masks; also of sites that are killed between the two exchanges."""
    total = sum(q for name, q in numbers().items() if name != absent)
    sites = Sites()
    assert (exchange(sites, context(), absent) == total).all()
    assert (exchange(sites, context(5, b"other"), absent, between=sites.again) == total).all()


def test_the_same_request_has_the_same_answer_bit_for_bit_and_it_says_nothing():
    """What the server holds after the first exchange, and one site's words, are no numbers of anybody's."""
    sites, zero = Sites(), np.zeros(20_000, dtype=np.uint64)
    first, again = sites["bern"].mask(context(), zero), sites.again("bern").mask(context(), zero)
    assert (first.words == again.words).all()
    assert first.commitments == again.commitments
    bits = np.unpackbits(first.words.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 5 * 0.5 / (64 * 20_000) ** 0.5


@pytest.mark.parametrize(("other", "more", "said"), [
    (context(digest=b"other"), 0, "for another cohort or message"),
    (context(cohort=NAMES[:3]), 0, "for another cohort or message"), (context(), 1, "with other numbers"),
])  # fmt: skip
def test_one_exchange_is_answered_for_one_message_one_cohort_and_the_same_numbers(other, more, said):
    """Two models under one mask, or a round begun again without a lost site: the difference would be open."""
    sites, q = Sites(), numbers()["bern"]
    sites["bern"].mask(context(), q)
    with pytest.raises(Refusal, match=f"asked a second time for one exchange, {said}" if not more else said):
        sites.again("bern").mask(other, q + np.uint64(more))


def test_a_sum_is_opened_once_and_for_one_set_of_sites():
    sites, c = Sites(), context()
    server = asked(sites, c)
    for _ in range(2):
        sites["bern"].open(c, NAMES, server.sealed("bern"))
    with pytest.raises(Refusal, match="for other sites"):
        sites["bern"].open(c, NAMES[:3], server.sealed("bern"))


def test_an_older_copy_of_a_vault_hides_no_other_numbers_by_one_mask_that_is_opened():
    """What bern has forgotten it answers anew, and differently; the others have opened the first answer's mask."""
    sites, c, q = Sites(), context(), numbers()
    first, second = asked(sites, c), Server(c, D)
    for name in NAMES:
        sites[name].open(c, NAMES, first.sealed(name))
    sites.memory["bern"].clear()
    second.take("bern", sites["bern"].mask(c, q["bern"] + np.uint64(1)))
    second.take("oslo", sites["oslo"].mask(c, q["oslo"]))
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


@pytest.mark.parametrize(("cohort", "least", "said"), [
    (("bern", "oslo"), 3, "asked for a sum over"), (("bern", "bern", "oslo"), 3, "asked for a sum over"),
    (("oslo", "riga", "wien"), 3, "asked for a sum over"), (NAMES, 5, "a sum over 4 sites, expected at least 5"),
    ((*NAMES, "paris"), 3, "'paris' has no key that was checked"),
])  # fmt: skip
def test_a_cohort_below_the_sites_own_least_or_with_keys_that_were_not_checked_is_refused(cohort, least, said):
    sites = Sites(least)
    with pytest.raises(Refusal, match=said):
        sites["bern"].mask(context(cohort=cohort), numbers()["bern"])
    sites.private["oslo"] = sites.private["riga"]
    with pytest.raises(Refusal, match="two sites with one public key"):
        sites.again("bern")


def test_who_lies_is_named():
    sites, c = Sites(), context()
    server = asked(sites, c, NAMES[:3])
    opened = {name: sites[name].open(c, NAMES[:3], server.sealed(name)) for name in NAMES[:3]}
    for name, change, said in (
        ("oslo", {"keys": {"wien": bytes(32)}}, "its key with 'wien' is not the one"),
        ("riga", {"shares": opened["riga"].shares | {"bern": bytes(32)}}, "its share of 'bern' is not the one"),
        ("riga", None, "left between the two exchanges"),
    ):
        wrong = {} if change is None else {name: opened[name]._replace(**change)}
        with pytest.raises(RunError, match=rf"site '{name}'(:)? {said}"):
            server.sum({n: o for n, o in opened.items() if n != name} | wrong)
    sealed = server.sealed("bern")
    spoiled = sealed["oslo"][:-1] + bytes([sealed["oslo"][-1] ^ 1])
    with pytest.raises(Refusal, match="the share of 'oslo' is not as 'oslo' sealed it"):
        sites["bern"].open(c, NAMES[:3], sealed | {"oslo": spoiled})


def test_with_everybody_there_a_threshold_of_second_answers_is_enough():
    sites, c = Sites(), context()
    server = asked(sites, c)
    opened = {name: sites[name].open(c, NAMES, server.sealed(name)) for name in NAMES[:3]}
    assert (server.sum(opened) == sum(numbers().values())).all()
    with pytest.raises(RunError, match="found 2, expected at least 3"):
        server.sum({name: opened[name] for name in NAMES[:2]})


@pytest.mark.parametrize(
    ("name", "words"),
    [("bern", np.zeros(D - 1, dtype=np.uint64)), ("bern", np.zeros(D)), ("paris", np.zeros(D, dtype=np.uint64))],
)
def test_masked_words_of_another_shape_or_sender_or_a_second_time_are_refused(name, words):
    answer, server = Sites()["bern"].mask(context(), numbers()["bern"]), Server(context(), D)
    with pytest.raises(RunError, match=f"site {name!r}"):
        server.take(name, answer._replace(words=words))
    server.take("bern", answer)
    with pytest.raises(RunError, match="site 'bern'"):
        server.take("bern", answer)


# what a site answers, whatever it is asked


def opens(sites: Sites, c: Context, present: tuple[str, ...], name: str) -> bool:
    """Whether a site opens a sum over those who are present, all of whom have answered."""
    sealed = {dealer: sites[dealer].mask(c, np.zeros(1, dtype=np.uint64)).sealed for dealer in present}
    try:
        sites.again(name).open(c, present, {dealer: of[name] for dealer, of in sealed.items() if dealer != name})
    except Refusal:
        return False
    return True


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7, 9, 10])
@pytest.mark.parametrize("extra", ["", "site", "context"])
def test_a_sum_is_opened_for_more_than_two_thirds_and_for_no_fewer_than_each_least(n, extra):
    """Two disjoint answers would need more than everybody. A site holds to its own least too, and to the context's."""
    names = tuple(f"site-{k:02}" for k in range(n))
    own, asked = (n if extra == "site" else 3), (n - 1 if extra == "context" else 0)
    c = Context("run", "train 0.0", names, b"model", least=asked)
    for k in range(1, n + 1):
        sites = Sites(own, names)
        allowed = 3 * k > 2 * n and k >= max(own, asked)
        assert opens(sites, c, names[n - k :], names[-1]) == allowed, f"{k} of {n}"


def test_of_every_other_site_a_share_or_a_mask_key_leaves_and_never_both():
    """Both would open that site's numbers, also where the server has its share and says that it has not."""
    for size in (3, 4):
        for there in combinations(NAMES, size):
            sites, c = Sites(), context()
            said = {name: sites[name].mask(c, numbers()[name]) for name in NAMES}
            for name in there:
                opened = sites[name].open(c, there, {j: a.sealed[name] for j, a in said.items() if j != name})
                assert set(opened.shares) == set(there)
                assert set(opened.keys) == set(NAMES) - set(there)


def test_what_was_not_answered_is_not_opened():
    for given in ({}, {"digest": b"another model"}, {"what": "train 1.0"}, {"run": "run 2"}):
        sites = Sites()
        if given:
            sites["bern"].mask(context()._replace(**given), numbers()["bern"])
        with pytest.raises(Refusal, match="asked to open what it has not answered"):
            sites["bern"].open(context(), NAMES, {})


PARTS = {
    "run": "run 2", "what": "train 1.0", "cohort": NAMES[:3], "digest": b"another model", "least": 4, "limbs": 2,
}  # fmt: skip


RUN_ON = [({"run": "run", "what": "1"}, {"run": "run1", "what": ""}),
          ({"what": "1", "least": 3}, {"what": "13", "least": 0, "limbs": 1})]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), [*(({}, {part: PARTS[part]}) for part in Context._fields), *RUN_ON])
def test_an_exchange_that_differs_in_any_part_has_masks_keys_and_shares_of_its_own(one, other):
    """Asked for both, also by an older copy of its vault, a site hides no two messages by one mask."""
    one, other = context()._replace(**one), context()._replace(**other)
    sites, zero = Sites(), np.zeros(200, dtype=np.uint64)
    a = sites["bern"].mask(one, zero)
    sites.memory["bern"].clear()
    b = sites.again("bern").mask(other, zero)
    assert (a.words == b.words).mean() < 0.02
    for name in (set(one.cohort) & set(other.cohort)) - {"bern"}:
        assert a.pairs[name] != b.pairs[name]
        assert a.commitments[name] != b.commitments[name]
        assert sum(x == y for x, y in zip(a.sealed[name], b.sealed[name], strict=True)) < 8, "one key for two shares"
    assert a.commitments[""] != b.commitments[""]


def test_other_numbers_have_another_self_mask_and_other_shares():
    sites, q, c = Sites(), numbers()["bern"], context()
    a = sites["bern"].mask(c, q)
    sites.memory["bern"].clear()
    b = sites.again("bern").mask(c, q + np.uint64(1))
    assert len(set(np.unique(a.words - b.words).tolist())) == D, (
        "the difference of two answers is no difference of numbers"
    )
    assert a.commitments[""] != b.commitments[""]


def opened_of(sites: Sites, c: Context, there: tuple[str, ...]):
    """Everybody's two answers, over those who are there."""
    said = {name: sites[name].mask(c, np.zeros(D, dtype=np.uint64)) for name in there}
    return said, {j: sites[j].open(c, there, {i: said[i].sealed[j] for i in there if i != j}) for j in there}


def test_no_two_shares_are_sealed_by_one_key_stream_and_none_opens_at_another_place():
    """Whoever knows one share would read the other off. Also in the other direction of a pair, and in another round."""
    sites, streams = Sites(), []
    for c in (context(0), context(1), context(0, b"model 2")._replace(run="run 2")):
        said, opened = opened_of(sites, c, NAMES)
        for dealer, holder in combinations(NAMES, 2):
            for i, j in ((dealer, holder), (holder, dealer)):
                sealed, share = said[i].sealed[j], opened[j].shares[i]
                streams.append(bytes(x ^ y for x, y in zip(sealed, share, strict=False)))
    assert len(set(streams)) == len(streams) == 3 * 12
    for mine in NAMES:
        theirs = {n: said[n].sealed[mine] for n in NAMES if n != mine}
        for n in theirs:
            other = next(h for h in NAMES if h not in (n, mine))
            for wrong in (said[n].sealed[other], said[mine].sealed[n]):
                with pytest.raises(Refusal, match=f"the share of {n!r} is not as"):
                    sites.again(mine).open(c, NAMES, theirs | {n: wrong})


def test_masks_are_made_of_what_the_server_cannot_know():
    """Of the pair's keys and of the site's own secret; the names and the context are everybody's."""
    there = NAMES[:3]
    (_, one), (_, other) = (opened_of(Sites(), context(), there) for _ in range(2))
    keys = [key for answers in (one, other) for o in answers.values() for key in o.keys.values()]
    assert len(set(keys)) == len(keys) == 6
    sites = Sites()
    first = sites["bern"].mask(context(), np.zeros(D, dtype=np.uint64))
    sites["bern"].secret = bytes(32)
    sites.memory["bern"].clear()
    second = sites["bern"].mask(context(), np.zeros(D, dtype=np.uint64))
    assert (first.words != second.words).all()
    assert first.pairs == second.pairs
    assert not set(first.commitments.values()) & set(second.commitments.values())


def coefficients(shares: list[int]) -> list[int]:
    """The polynomial modulo the prime through values at 1, 2, ..., by Newton's differences."""
    row, n, differences = shares, len(shares), []
    for k in range(n):
        differences.append(row[0])
        row = [(b - a) * pow(k + 1, -1, PRIME) % PRIME for a, b in pairwise(row)]
    found = [0]
    for k in reversed(range(n)):  # times (x - (k + 1)), and the difference
        found = [(a - (k + 1) * b) % PRIME for a, b in zip([0, *found], [*found, 0], strict=True)]
        found[0] = (found[0] + differences[k]) % PRIME
    return found[:n]


@pytest.mark.parametrize("n", [4, 7, 9])
def test_the_shares_of_a_self_mask_lie_on_a_polynomial_of_the_threshold_and_no_less(n):
    """As many coefficients as sites that open a sum, none zero, none known from another or from another exchange."""
    names = tuple(f"site-{k:02}" for k in range(n))
    sites, seen = Sites(3, names), []
    least = next(k for k in range(1, n + 1) if 3 * k > 2 * n)
    for t in (0, 1):
        _, opened = opened_of(sites, Context("run", f"train {t}.0", names, b"model"), names)
        for dealer in names[:2]:
            found = coefficients([int.from_bytes(opened[j].shares[dealer], "big") for j in names])
            assert all(found[:least])
            assert not any(found[least:])
            seen += found[:least]
    assert len(set(seen)) == len(seen)
