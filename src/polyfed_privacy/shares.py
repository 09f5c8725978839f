"""Shamir's secret sharing over the prime 2^256 - 189: any t of n shares give the secret, fewer say nothing of it.

Every share and the secret are committed to by their hashes, so that whoever lies is named: the holder whose share is
not the one that was dealt, or the dealer whose shares do not give the secret that it committed to.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

from polyfed.base.errors import RunError

PRIME = 2**256 - 189
SIZE = 32  # bytes of a share


class Dealt(NamedTuple):
    """Shares of one secret."""

    shares: dict[str, bytes]  # by holder, for nobody else
    commitments: dict[str, bytes]  # the hash of each holder's share; of "", that of the secret; public


def element(key: bytes) -> int:
    """The field's element of 32 bytes."""
    return int.from_bytes(key, "big") % PRIME


def commitment(dealer: str, holder: str, share: bytes) -> bytes:
    """The hash that stands for a share, or for the secret where the holder is ""."""
    parts = [dealer.encode(), holder.encode(), share]
    return sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).digest()


def split(dealer: str, secret: bytes, holders: list[str], threshold: int, coefficients: list[bytes]) -> Dealt:
    """Share a secret [32] among holders, of whom k gets the polynomial's value at k + 1; `threshold` shares give it.

    coefficients: threshold - 1 times 32 bytes, unpredictable, and never used for another secret
    """
    if not 1 <= threshold <= len(holders) or len(coefficients) != threshold - 1:
        raise RunError(f"threshold: found {threshold}, expected 1 to {len(holders)}, the sites of the exchange")
    polynomial = [element(secret), *map(element, coefficients)]
    shares: dict[str, bytes] = {}
    for k, holder in enumerate(holders, 1):
        value = 0
        for a in reversed(polynomial):
            value = (value * k + a) % PRIME
        shares[holder] = value.to_bytes(SIZE, "big")
    hashes = {holder: commitment(dealer, holder, share) for holder, share in shares.items()}
    return Dealt(shares, hashes | {"": commitment(dealer, "", element(secret).to_bytes(SIZE, "big"))})


def join(
    dealer: str, shares: Mapping[str, bytes], holders: list[str], threshold: int, commitments: Mapping[str, bytes]
) -> bytes:
    """The secret, from the shares of at least `threshold` holders; holders: all, in the order of `split`.

    Raises RunError for too few shares, naming the holder of one that was not dealt, or the dealer whose shares do not
    give the secret that it committed to.
    """
    for holder, share in shares.items():
        if len(share) != SIZE:
            raise RunError(f"site {holder!r}: its share of {dealer!r} has {len(share)} bytes, expected {SIZE}")
        if commitment(dealer, holder, share) != commitments.get(holder):
            raise RunError(f"site {holder!r}: its share of {dealer!r} is not the one that {dealer!r} committed to")
    if len(shares) < threshold:
        raise RunError(f"shares of {dealer!r}: found {len(shares)}, expected at least {threshold}")
    points = [(holders.index(holder) + 1, int.from_bytes(shares[holder], "big")) for holder in sorted(shares)]
    secret = 0
    for x, y in points[:threshold]:
        above = below = 1
        for other, _ in points[:threshold]:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        secret = (secret + y * above * pow(below, -1, PRIME)) % PRIME
    joined = secret.to_bytes(SIZE, "big")
    if commitment(dealer, "", joined) != commitments.get(""):
        raise RunError(f"site {dealer!r}: its shares do not give the secret that it committed to")
    return joined
