"""One secure sum in two exchanges, as what each end knows and answers; how messages travel is not its business.

Bonawitz et al. (CCS 2017) with keys for a whole run and shares that travel with the masked numbers:

    1. site i sends y_i = q_i + PRG(b_i) + sum_{j > i} PRG(k_ij) - sum_{j < i} PRG(k_ij), and for each peer a sealed
       share of b_i
    2. the server names those who have answered, A; each of them returns its shares of b_i, i in A, and its keys k_jd
       with those who have not

so that the server has sum_A q_i exactly and nothing else. A site answers one request for a context, and opens it for
one A. b_i is made of the numbers that it hides too, so that a site which has forgotten what it sent, its vault being an
older copy, still hides no two messages by one mask.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyfed.base.errors import Refusal, RunError
from polyfed_privacy.masks import add, agreed, derive, masked, pair_masks, seal, subtract, unseal, words
from polyfed_privacy.shares import SIZE, Dealt, commitment, element, join, split

Memory = MutableMapping[str, bytes]  # what a site has answered; each entry is on disk before an answer leaves


class Context(NamedTuple):
    """One exchange."""

    run: str  # what was agreed to
    what: str  # the exchange, for which one request is answered
    cohort: tuple[str, ...]  # the sites that are asked, sorted
    digest: bytes  # of the message that all of them received: sites with other models have masks that do not cancel
    least: int = 0  # sites whose sum is opened
    limbs: int = 1  # words of a number, 1 or 2

    @property
    def key(self) -> bytes:
        """What the exchange's keys are derived from."""
        parts = [self.run, self.what, str(self.least), str(self.limbs), *self.cohort]
        h = sha256(self.digest)
        for part in parts:
            h.update(len(part.encode()).to_bytes(4, "big") + part.encode())
        return h.digest()

    @property
    def threshold(self) -> int:
        """Least sites whose sum may be opened: more than two thirds, against a server that lies about who is there."""
        return max(self.least, 2 * len(self.cohort) // 3 + 1)


class Masked(NamedTuple):
    """A site's first answer: its masked words [d], a sealed share for each peer, and what it commits to."""

    words: np.ndarray
    sealed: dict[str, bytes]
    commitments: dict[str, bytes]
    pairs: dict[str, bytes]


class Opened(NamedTuple):
    """A site's second answer: its shares of those who are there, and its mask keys with those who are not."""

    shares: dict[str, bytes]
    keys: dict[str, bytes]


@dataclass
class Site:
    """A site's end.

    name: the site     private: its key of this run     secret: its own, which its self masks come from
    peers: public keys of all other sites, whose signatures have been checked     least: fewest sites that it sums with
    memory: what it has answered
    """

    name: str
    private: X25519PrivateKey
    secret: bytes
    peers: Mapping[str, bytes]
    memory: Memory
    least: int = 3

    def __post_init__(self) -> None:
        keys = [self.private.public_key().public_bytes_raw(), *self.peers.values()]
        if len(set(keys)) < len(keys):
            raise Refusal(f"site {self.name!r}: found two sites with one public key, expected a key of each's own")
        self._agreed = {name: agreed(self.private, key) for name, key in self.peers.items()}

    def mask(self, context: Context, q: np.ndarray) -> Masked:
        """The first answer. q: [d] uint64. Raises Refusal for a request that would open the site's numbers."""
        self._check(context)
        self._once(f"asked {context.run} {context.what}", context.key, "for another cohort or message")
        self._once(f"sent {context.key.hex()}", sha256(q.astype("<u8").tobytes()).digest(), "with other numbers")
        dealt, own, keys = self._dealt(context), self._own(context), self._pairs(context, context.cohort)
        sealed = {peer: seal(self._sealing(self.name, peer, context), dealt.shares[peer], context.key) for peer in keys}
        pairs = {peer: commitment(self.name, peer, key) for peer, key in keys.items()}
        return Masked(masked(q, self.name, own, keys, context.limbs), sealed, dealt.commitments, pairs)

    def open(self, context: Context, present: Iterable[str], sealed: Mapping[str, bytes]) -> Opened:
        """The second answer. present: who has answered, this site among them     sealed: their shares for this site"""
        there = sorted(set(present))
        self._check(context)
        if self.memory.get(f"asked {context.run} {context.what}") != context.key:
            raise Refusal(f"site {self.name!r}: asked to open what it has not answered")
        if self.name not in there or not set(there) <= set(context.cohort):
            raise Refusal(f"site {self.name!r}: asked to open a sum of {', '.join(there)}, expected some of the cohort")
        if len(there) < max(context.threshold, self.least):
            least = max(context.threshold, self.least)
            raise Refusal(f"site {self.name!r}: asked to open a sum of {len(there)} sites, expected at least {least}")
        shares = {self.name: self._dealt(context).shares[self.name]}
        for dealer in there:
            if dealer != self.name:
                key = self._sealing(dealer, self.name, context)
                share = unseal(key, sealed.get(dealer, b""), context.key)
                if share is None:
                    raise Refusal(f"site {self.name!r}: the share of {dealer!r} is not as {dealer!r} sealed it")
                shares[dealer] = share
        theirs = [f"{name} {sealed.get(name, b'').hex()}" for name in there if name != self.name]
        self._once(f"opened {context.key.hex()}", sha256("\0".join(theirs).encode()).digest(), "for other sites")
        return Opened(shares, self._pairs(context, [name for name in context.cohort if name not in there]))

    def _check(self, context: Context) -> None:
        if self.name not in context.cohort or len(set(context.cohort)) < max(self.least, len(context.cohort)):
            raise Refusal(
                f"site {self.name!r}: asked for a sum over {len(set(context.cohort))} sites, expected at least "
                f"{self.least}, itself among them"
            )
        strange = [name for name in context.cohort if name != self.name and name not in self.peers]
        if strange:
            raise Refusal(f"site {self.name!r}: {strange[0]!r} has no key that was checked")

    def _once(self, exchange: str, value: bytes, other: str) -> None:
        """Remember what was answered; the difference of two answers would be open."""
        if self.memory.setdefault(exchange, value) != value:
            raise Refusal(f"site {self.name!r}: asked a second time for one exchange, {other}; refused")

    def _own(self, context: Context) -> bytes:
        sent = self.memory[f"sent {context.key.hex()}"]
        return element(derive(self.secret, "self", context.key + sent)).to_bytes(SIZE, "big")

    def _dealt(self, context: Context) -> Dealt:
        own = self._own(context)
        more = [derive(own, f"share {k}", context.key) for k in range(1, context.threshold)]
        return split(self.name, own, list(context.cohort), context.threshold, more)

    def _pairs(self, context: Context, names: Iterable[str]) -> dict[str, bytes]:
        return {j: derive(self._agreed[j], "mask", context.key) for j in names if j != self.name}

    def _sealing(self, dealer: str, holder: str, context: Context) -> bytes:
        peer = holder if dealer == self.name else dealer
        return derive(self._agreed[peer], f"seal {dealer} to {holder}", context.key)


@dataclass
class Server:
    """The server's end of one exchange. It holds one vector of words, however many sites there are.

    context: the exchange     size: numbers of a message
    """

    context: Context
    size: int
    _total: np.ndarray = field(init=False)
    _answers: dict[str, Masked] = field(default_factory=dict[str, Masked])

    def __post_init__(self) -> None:
        self._total = np.zeros(self.size, dtype=np.uint64)

    @property
    def present(self) -> list[str]:
        """Who has answered."""
        return sorted(self._answers)

    def take(self, name: str, answer: Masked) -> None:
        """Add a site's masked words up; they are not kept."""
        if name not in self.context.cohort or name in self._answers:
            raise RunError(f"site {name!r}: its reply is not of this exchange, or came twice")
        if answer.words.shape != (self.size,) or answer.words.dtype != np.uint64:
            raise RunError(f"site {name!r}: found {answer.words.shape} masked words, expected ({self.size},)")
        self._total = add(self._total, answer.words, self.context.limbs)
        self._answers[name] = answer._replace(words=np.zeros(0, dtype=np.uint64))

    def sealed(self, name: str) -> dict[str, bytes]:
        """The shares that the others have sealed for a site, for its second answer."""
        return {dealer: a.sealed[name] for dealer, a in self._answers.items() if dealer != name and name in a.sealed}

    def sum(self, opened: Mapping[str, Opened]) -> np.ndarray:
        """[d] uint64: the sum over those who are present. opened: their second answers

        Raises RunError for too few answers, or a wrong one, whose sender is named.
        """
        there, total = self.present, self._total
        absent = [name for name in self.context.cohort if name not in self._answers]
        if absent and (silent := [name for name in there if name not in opened]):
            raise RunError(f"site {silent[0]!r} left between the two exchanges of a sum; the sum cannot be opened")
        for dealer in there:
            shares = {holder: o.shares.get(dealer, b"") for holder, o in opened.items() if holder in self._answers}
            commitments = self._answers[dealer].commitments
            own = join(dealer, shares, list(self.context.cohort), self.context.threshold, commitments)
            total = subtract(total, words(own, self.size), self.context.limbs)
        for name in there if absent else ():
            keys = {gone: opened[name].keys.get(gone, b"") for gone in absent}
            for gone, key in keys.items():
                if commitment(name, gone, key) != self._answers[name].pairs.get(gone):
                    raise RunError(f"site {name!r}: its key with {gone!r} is not the one that it committed to")
            total = subtract(total, pair_masks(self.size, name, keys, self.context.limbs), self.context.limbs)
        return total
