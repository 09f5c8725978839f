"""Masks that cancel in a sum: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(CCS 2017), with keys by X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869), and numbers by ChaCha20 (RFC 8439).

Needs `cryptography`, the extra [privacy].
"""

from collections.abc import Mapping

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyfed.base.errors import RunError


def derive(secret: bytes, purpose: str, context: bytes) -> bytes:
    """A key of its own for a purpose, such as "mask", and a context: 32 bytes of HKDF-SHA256."""
    head = purpose.encode()
    return HKDF(hashes.SHA256(), 32, salt=None, info=len(head).to_bytes(2, "big") + head + context).derive(secret)


def agreed(own: X25519PrivateKey, peer: bytes) -> bytes:
    """The secret [32] that a site shares with a peer, the same at both. Raises RunError for what is no key."""
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise RunError(f"public key of a site: found {len(peer)} bytes that are no X25519 key") from None


def words(key: bytes, n: int) -> np.ndarray:
    """[n] uint64 of a key [32] that is used for one mask alone: ChaCha20's stream from block 0 under nonce 0."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * n))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)


def add(a: np.ndarray, b: np.ndarray, limbs: int = 1) -> np.ndarray:
    """a + b modulo 2^(64 limbs), [d] uint64; limbs: words of one integer, 1 or 2, of which the low one is first."""
    total = a + b
    if limbs == 2:
        total[1::2] += total[::2] < b[::2]  # the carry
    return total


def subtract(a: np.ndarray, b: np.ndarray, limbs: int = 1) -> np.ndarray:
    """a - b modulo 2^(64 limbs), as `add`."""
    total = a - b
    if limbs == 2:
        total[1::2] -= a[::2] < b[::2]
    return total


def masked(q: np.ndarray, name: str, own: bytes, pairs: Mapping[str, bytes], limbs: int = 1) -> np.ndarray:
    """q + PRG(own) + sum_{j > name} PRG(k_j) - sum_{j < name} PRG(k_j) of a site's words q: [d]; pairs: j -> k_j."""
    return add(add(q, words(own, len(q)), limbs), pair_masks(len(q), name, pairs, limbs), limbs)


def pair_masks(d: int, name: str, pairs: Mapping[str, bytes], limbs: int = 1) -> np.ndarray:
    """[d] the sum of a site's pair masks, which over all sites is zero; see `masked`."""
    total = np.zeros(d, dtype=np.uint64)
    for peer, key in pairs.items():
        total = (add if name < peer else subtract)(total, words(key, d), limbs)
    return total


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt the only message under its key [32] by ChaCha20-Poly1305; about: what it is held to belong to."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Decrypt what `seal` made; None where it was changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, about)
    except InvalidTag:
        return None
