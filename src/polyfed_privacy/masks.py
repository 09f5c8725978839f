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
    """A key of its own for a purpose and a context.

    Parameters
    ----------
    secret : bytes
        Input key material.
    purpose : str
        Such as "mask".
    context : bytes
        What the key is for; two contexts have unrelated keys.

    Returns
    -------
    bytes
        32 bytes of HKDF-SHA256.
    """
    head = purpose.encode()
    return HKDF(hashes.SHA256(), 32, salt=None, info=len(head).to_bytes(2, "big") + head + context).derive(secret)


def agreed(own: X25519PrivateKey, peer: bytes) -> bytes:
    """The secret that a site shares with a peer.

    Parameters
    ----------
    own : X25519PrivateKey
        The site's key.
    peer : bytes
        [32] the peer's public key.

    Returns
    -------
    bytes
        [32], the same at both.

    Raises
    ------
    RunError
        The peer's key is no key, or one that gives everybody the same secret.
    """
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise RunError(f"public key of a site: found {len(peer)} bytes that are no X25519 key") from None


def words(key: bytes, n: int) -> np.ndarray:
    """Uniform integers from a key.

    Parameters
    ----------
    key : bytes
        [32].
    n : int
        How many.

    Returns
    -------
    array
        [n] uint64, the key stream of ChaCha20 from block 0 under nonce 0. A key is used for one mask alone.
    """
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * n))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)


def add(a: np.ndarray, b: np.ndarray, limbs: int = 1) -> np.ndarray:
    """Sums of integers.

    Parameters
    ----------
    a, b : array
        [d] uint64.
    limbs : int
        Words of one integer, 1 or 2; the low one is first.

    Returns
    -------
    array
        [d] uint64: a + b modulo 2^(64 limbs).
    """
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
    """One site's words under its masks.

    Parameters
    ----------
    q : array
        [d] uint64.
    name : str
        The site.
    own : bytes
        Key of its self mask.
    pairs : mapping
        Other sites' names -> the key of the mask shared with each.
    limbs : int
        As in `add`.

    Returns
    -------
    array
        q + PRG(own) + sum_{j > name} PRG(k_j) - sum_{j < name} PRG(k_j)  modulo 2^(64 limbs).
    """
    return add(add(q, words(own, len(q)), limbs), pair_masks(len(q), name, pairs, limbs), limbs)


def pair_masks(d: int, name: str, pairs: Mapping[str, bytes], limbs: int = 1) -> np.ndarray:
    """The sum of a site's pair masks, which over all sites is zero.

    Parameters
    ----------
    d : int
        Numbers in a message.
    name : str
        The site.
    pairs : mapping
        Other sites' names -> keys.
    limbs : int
        As in `add`.

    Returns
    -------
    array
        [d] uint64.
    """
    total = np.zeros(d, dtype=np.uint64)
    for peer, key in pairs.items():
        total = (add if name < peer else subtract)(total, words(key, d), limbs)
    return total


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt a message that is the only one under its key.

    Parameters
    ----------
    key : bytes
        [32], derived for this message.
    text : bytes
        What to hide.
    about : bytes
        What it belongs to, which is held to.

    Returns
    -------
    bytes
        ChaCha20-Poly1305.
    """
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Decrypt what `seal` made; None where it was changed.

    Parameters
    ----------
    key, sealed, about : bytes
        As in `seal`.

    Returns
    -------
    bytes or None
        The message.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, about)
    except InvalidTag:
        return None
