"""Shamir's shares: any threshold of them is enough, fewer say nothing, and a liar is named."""

from itertools import combinations

import pytest

from polyfed.base.errors import RunError
from polyfed_privacy.shares import PRIME, commitment, join, split

HOLDERS = ["bern", "oslo", "riga", "wien"]
SECRET = bytes(range(32))


def dealt(threshold: int = 3, secret: bytes = SECRET):
    return split("bern", secret, HOLDERS, threshold, [bytes([7 + k]) * 32 for k in range(threshold - 1)])


@pytest.mark.parametrize("threshold", [1, 2, 3, 4])
def test_any_threshold_of_shares_gives_the_secret(threshold):
    assert PRIME > 2**256 - 2**8
    for secret in (SECRET, bytes(32), b"\x80" + bytes(31), b"\xff" * 31 + b"\x00", (PRIME - 1).to_bytes(32, "big")):
        found = dealt(threshold, secret)
        for some in combinations(HOLDERS, threshold):
            shares = {name: found.shares[name] for name in some}
            assert join("bern", shares, HOLDERS, threshold, found.commitments) == secret


def test_fewer_shares_fit_every_secret():
    """For any other secret there is a polynomial of the same degree through the shares that are known."""
    found, x = dealt(3), {"bern": 1, "oslo": 2}
    y = {name: int.from_bytes(found.shares[name], "big") for name in x}
    for other in (0, 1, PRIME - 1):  # a + b x + c x^2 through (0, other), (1, y1), (2, y2)
        c = (y["oslo"] - 2 * y["bern"] + other) * pow(2, -1, PRIME) % PRIME
        b = (y["bern"] - other - c) % PRIME
        assert all((other + b * k + c * k * k) % PRIME == y[name] for name, k in x.items())


def test_shares_add_up_to_shares_of_the_sum():
    """Textbook: 1234 + 166 x + 94 x^2 at x = 1 to 4, over any prime."""
    found = split("d", (1234).to_bytes(32, "big"), HOLDERS, 3, [(166).to_bytes(32, "big"), (94).to_bytes(32, "big")])
    assert [int.from_bytes(found.shares[h], "big") for h in HOLDERS] == [1494, 1942, 2578, 3402]


WRONG = bytes(31) + b"\x05"


@pytest.mark.parametrize(("shares", "told", "said"), [
    ({"riga": bytes(32)}, {}, "site 'riga': its share of 'bern' is not the one that 'bern' committed to"),
    ({"oslo": WRONG}, {"oslo": commitment("bern", "oslo", WRONG)}, "site 'bern': its shares do not give the secret"),
    *(({"oslo": bytes(n)}, {}, f"site 'oslo': its share of 'bern' has {n} bytes, expected 32") for n in (0, 31, 33)),
    ({"riga": None, "wien": None}, {}, "found 2, expected at least 3"),
])  # fmt: skip
def test_a_holder_or_a_dealer_that_lies_is_named_and_too_few_are_refused(shares, told, said):
    found = dealt()
    given = {name: share for name, share in (dict(found.shares) | shares).items() if share is not None}
    with pytest.raises(RunError, match=said):
        join("bern", given, HOLDERS, 3, found.commitments | told)
    with pytest.raises(RunError, match="threshold: found 5"):
        split("bern", SECRET, HOLDERS, 5, [bytes(32)] * 4)


def test_a_commitment_is_to_dealer_holder_and_share_together():
    made = [commitment(*of) for of in (
        ("bern", "oslo", b"s"), ("riga", "oslo", b"s"), ("bern", "riga", b"s"), ("bern", "oslo", b"t"),
        ("bernoslo", "", b"s"), ("ber", "noslo", b"s"), ("bern", "", b"oslos"), ("oslo", "bern", b"s"),
    )]  # fmt: skip
    assert len(set(made)) == len(made)
