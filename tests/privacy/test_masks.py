"""Keys and masks: the vectors of their RFCs, and masks that cancel in the sum and nowhere else."""

import hashlib
import hmac

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyfed.base.errors import RunError
from polyfed_privacy.masks import agreed, derive, pair_masks, seal, unseal, words


def hkdf(ikm: bytes, salt: bytes, info: bytes, size: int) -> bytes:
    """RFC 5869, by hand."""
    key, out, block, k = hmac.digest(salt or bytes(32), ikm, hashlib.sha256), b"", b"", 0
    while len(out) < size:
        k += 1
        block = hmac.digest(key, block + info + bytes([k]), hashlib.sha256)
        out += block
    return out[:size]


def test_two_sites_agree_as_in_rfc_7748():
    alice, bob = (
        X25519PrivateKey.from_private_bytes(bytes.fromhex(k))
        for k in (
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
        )
    )
    a, b = (key.public_key().public_bytes_raw() for key in (alice, bob))
    assert a.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert agreed(alice, b).hex() == agreed(bob, a).hex() == shared


def test_keys_are_derived_as_in_rfc_5869():
    found = hkdf(bytes.fromhex("0b" * 22), b"", b"", 42)  # the RFC's third case
    assert found.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    assert derive(b"s" * 32, "mask", b"round 3") == hkdf(b"s" * 32, b"", b"\x00\x04maskround 3", 32)
    assert derive(b"s" * 32, "ma", b"skround 3") != derive(b"s" * 32, "mask", b"round 3")


def test_words_are_the_key_stream_of_rfc_8439():
    stream = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a37"
    assert words(bytes(32), 6).astype("<u8").tobytes().hex() == stream


@pytest.mark.parametrize("peer", [b"", b"short", bytes(32)])
def test_a_key_that_is_none_is_refused(peer):
    with pytest.raises(RunError, match="X25519"):
        agreed(X25519PrivateKey.generate(), peer)


NAMES = ["bern", "oslo", "riga", "wien"]


def pairs(context: bytes) -> dict[str, dict[str, bytes]]:
    private = {name: X25519PrivateKey.generate() for name in NAMES}
    public = {name: key.public_key().public_bytes_raw() for name, key in private.items()}
    return {i: {j: derive(agreed(private[i], public[j]), "mask", context) for j in NAMES if j != i} for i in NAMES}


def test_pair_masks_cancel_over_all_sites_and_over_no_fewer():
    keys = pairs(b"t = 0")
    each = {name: pair_masks(1000, name, keys[name]) for name in NAMES}
    assert not sum(each.values()).any()
    for name in NAMES:
        others = sum(mask for other, mask in each.items() if other != name)
        assert (others != 0).mean() > 0.99


def test_what_is_sealed_opens_whole_or_not_at_all():
    sealed = seal(b"k" * 32, b"share", b"bern to oslo")
    assert unseal(b"k" * 32, sealed, b"bern to oslo") == b"share"
    assert unseal(b"k" * 32, sealed, b"bern to riga") is None
    assert unseal(b"k" * 32, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"bern to oslo") is None


def test_every_byte_of_a_key_decides_the_stream():
    first = words(bytes(32), 100)
    for k in range(32):
        assert not np.intersect1d(first, words(bytes(k) + b"\x01" + bytes(31 - k), 100)).size
