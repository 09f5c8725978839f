"""Secure sums of a run, at both ends: which numbers of an answer are summed, whose keys hide them, and how a sum is
opened. The exchange itself is `privacy/secure.py`.

An answer whose numbers are hidden leaves as `Masked`. What a site has answered is on its disk before an answer leaves,
and so is at the server for whom a sum is opened: a run that goes on after a kill opens the same sums.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyfed.base.errors import ConfigError, Refusal, RunError
from polyfed.base.part import Strict
from polyfed.core.algorithm import Algorithm
from polyfed.core.engine import Silent
from polyfed.core.messages import Form, State
from polyfed.core.uplinks import Wanted
from polyfed.runs.privacy import Privacy
from polyfed.runs.rehearsal import counted, sums_instead
from polyfed_privacy.fixed import narrow, wide
from polyfed_privacy.masks import derive
from polyfed_privacy.noise import new_secret
from polyfed_privacy.secure import Context, Masked, Opened, Server, Site
from polyfed_sites import journal
from polyfed_sites import wire as m
from polyfed_sites.agreed import digest
from polyfed_sites.asking import ANOTHER, Asking
from polyfed_sites.keys import signed, write
from polyfed_sites.policy import Policy
from polyfed_sites.wire import Message, misfit

SECRET, SIGNED, PEERS, NOTED, OPENED = "secret.key", "signed.json", "peers.json", "sums.jsonl", "opened.jsonl"


def refuse_rows(method: Algorithm) -> None:
    """Raise ConfigError for a method whose server needs more than sums, seen on random samples."""
    rows = sorted(name for name, of in counted(method).kinds.items() if "rows" in of)
    if rows:
        own = ", ".join(rows) + sums_instead(method)
        raise ConfigError(f"privacy: the server of {method.name} needs every client's own {own}")


def fewest(privacy: Privacy, cohort: int) -> int:
    """Fewest sites whose sum is opened: with fewer, noise that the sites share falls short."""
    short = privacy.epsilon is not None and privacy.noise == "shared"
    return max(privacy.threshold, cohort - privacy.absent if short else 0)


# what is summed


def sent_forms(forms: Mapping[str, Form], wanted: Wanted) -> dict[str, Form]:
    """The forms of the integers that are sent in the place of a method's tensors."""
    return {
        f"{name}.{kind}": forms[name]._replace(dtype=torch.int64)
        for name in sorted(wanted)
        if name in forms
        for kind in sorted(wanted[name])
    }


def packed(tensors: State) -> np.ndarray:
    """[d] words: integers of 64 bits, by name."""
    flat = [tensors[name].reshape(-1) for name in sorted(tensors)]
    return torch.cat([*flat, torch.zeros(0, dtype=torch.int64)]).numpy().astype(np.int64).view(np.uint64)


def unpacked(words: np.ndarray, forms: Mapping[str, Form]) -> State:
    """The tensors of `packed`."""
    tensors, at = dict[str, torch.Tensor](), 0
    for name in sorted(forms):
        shape = [int(k or 0) for k in forms[name].shape]
        size = int(np.prod(shape))
        tensors[name] = torch.from_numpy(words[at : at + size].view(np.int64).copy()).view(shape)
        at += size
    return tensors


def numbers(head: Strict, tensors: State, names: Sequence[str]) -> list[float]:
    """The numbers of an answer that is no uplink, in one order. names: of metrics, each with a count beside it"""
    match head:
        case m.Labelled():
            return [*head.rows]
        case m.Measured():
            metrics = head.metrics or {}
            if any(map(np.isinf, metrics.values())):  # it must not leave the mean
                raise Refusal("its model diverged (NaN or infinity)")
            there = [name in metrics and np.isfinite(metrics[name]) for name in names]
            return [v for name, ok in zip(names, there, strict=True) for v in (metrics[name] if ok else 0.0, float(ok))]
        case _:
            return [v for name in sorted(tensors) for v in tensors[name].reshape(-1).tolist()]


def shared(asked: Message[Any]) -> bytes:
    """Digest of what is the same in a message to all sites."""
    says = asked.head.model_dump(exclude={"joined", "settled", "peers", "base", "keep"})
    h = hashlib.sha256(json.dumps(says, sort_keys=True).encode())
    for name, t in sorted(asked.tensors.items()):
        h.update(f"{name} {t.dtype} {list(t.shape)} {digest(t)}".encode())
    return h.digest()


def about(head: m.Request, mark: bytes) -> str:
    """The exchange that a message is, for which there is one cohort and one sum."""
    if isinstance(head, m.Train):
        return f"train {head.t}.{head.phase}"
    return f"{head.kind} {mark.hex()}"


def context_of(run: str, head: m.Request, mark: bytes, cohort: tuple[str, ...], privacy: Privacy) -> Context:
    """The context of an exchange, the same at both ends. cohort: who is asked, sorted     mark: of `shared`"""
    training = isinstance(head, m.Train)
    least = fewest(privacy, len(cohort)) if training or isinstance(head, m.Evaluate) else len(cohort)
    return Context(run, about(head, mark), cohort, mark, least, 1 if training else 2)


def run_of(join: m.Join) -> str:
    """What all sites of a run have agreed to, in digits."""
    says = join.model_dump(exclude={"steps"})
    return hashlib.sha256(json.dumps(says, sort_keys=True).encode()).hexdigest()


# at a site


class Noted(dict[str, bytes]):
    """What a site has answered; a line is on the disk before `setdefault` returns."""

    def __init__(self, path: Path):
        self.path = path
        for key, value in journal.pairs(path):
            with suppress(ValueError, TypeError):
                self[key] = bytes.fromhex(value)

    def setdefault(self, key: str, default: bytes = b"") -> bytes:
        if key not in self:
            journal.append(self.path, [key, default.hex()])
            self[key] = default
        return self[key]


class Hidden:
    """A site's end of the sums of a run, in the folder of its vault; `sign` makes a signature by its key."""

    def __init__(self, folder: Path, name: str, sign: Callable[[bytes], bytes] | None, policy: Policy):
        self.folder, self.name, self.sign, self.policy = folder, name, sign, policy
        self._site: Site | None = None
        self._cohort: tuple[str, ...] = ()
        self._run = ""
        self._memory: Noted | None = None

    @property
    def secret(self) -> bytes:
        """The site's own, from the system; masks and noise come from it, and nothing else does."""
        path = self.folder / SECRET
        try:
            if not path.is_file():
                write(path, new_secret())
            secret = path.read_bytes()
        except (OSError, RunError) as e:
            raise Refusal(f"{path}: cannot be read or written ({e})", "its vault cannot be read or written") from None
        if len(secret) != 32:
            raise Refusal(f"{path}: found {len(secret)} bytes, expected 32; restore it", "its vault is damaged")
        return secret

    def introduce(self, join: m.Join, rows: int) -> m.Peer:
        """The site's public key and number of rows, signed."""
        if self.sign is None:
            raise Refusal("has no key to sign with, which secure sums need")
        public = self._public(run_of(join))
        text, path = _signed(join, self.name, public, rows), self.folder / SIGNED
        try:  # a signature is another one each time, and the same question has the same answer
            signatures: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        except ValueError:
            signatures = {}
        if text.decode() not in signatures:
            signatures = {text.decode(): self.sign(text).hex()}
            write(path, json.dumps(signatures).encode())
        return m.Peer(key=public, rows=rows, signature=signatures[text.decode()])

    def meet(self, join: m.Join, peers: Mapping[str, m.Peer]) -> None:
        """Check who else takes part. Raises Refusal for a key that its site has not signed."""
        for name, peer in peers.items():
            if name not in join.keys:
                raise Refusal(f"is given a key of {name!r}, which was not named when it joined")
            if not signed(join.keys[name], _signed(join, name, peer.key, peer.rows), bytes.fromhex(peer.signature)):
                raise Refusal(f"is given a key of {name!r} that {name!r} has not signed")
        mine = peers.get(self.name)
        if mine is None or mine.key != self._public(run_of(join)):
            raise Refusal("is not given its own key among those of the run")
        self._become(run_of(join), {name: peer.key for name, peer in peers.items()})
        write(self.folder / PEERS, json.dumps({"run": self._run, "keys": self._keys}).encode())

    def _become(self, run: str, keys: Mapping[str, str]) -> None:
        self._run, self._keys = run, dict(keys)
        self._cohort = tuple(sorted(keys))
        self._memory = self._memory or Noted(self.folder / NOTED)
        others = {name: bytes.fromhex(key) for name, key in keys.items() if name != self.name}
        try:
            self._site = Site(self.name, self._private(run), self.secret, others, self._memory, self.policy.least_sites)
        except RunError as e:
            raise Refusal(str(e)) from None

    def _private(self, run: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(derive(self.secret, "agreement", run.encode()))

    def _public(self, run: str) -> str:
        return self._private(run).public_key().public_bytes_raw().hex()

    def _met(self) -> Site:
        """The site that knows its peers, by the vault's word after it was stopped."""
        if self._site is None:
            path = self.folder / PEERS
            if not path.is_file():
                raise Refusal("is asked for a sum, and knows no other site; start the server again")
            says: dict[str, Any] = json.loads(path.read_bytes())
            self._become(says["run"], says["keys"])
        assert self._site is not None
        return self._site

    def _memory_of(self, context: str, model: bytes = b"") -> bytes:
        """The model that an exchange was about."""
        assert self._memory is not None
        return self._memory.setdefault(f"about {context}", model)

    def _one(self, what: str, model: str, sites: Sequence[str]) -> None:
        """Remember for whom a model's replies are summed: two sums at one model differ by the others' replies."""
        assert self._memory is not None
        mark, names = f"{what} {self._run} {model}", ",".join(sorted(sites)).encode()
        if model and self._memory.setdefault(mark, names) != names:
            raise Refusal(
                "is asked for the sum at one model over two groups of sites, whose difference others could read"
            )

    def within(self, asked: m.Train, cohort: Sequence[str]) -> None:
        """Refuse a sum over other sites than those of the terms. cohort: theirs, of this round"""
        if sorted(asked.cohort) != sorted(cohort):
            asks, terms = (", ".join(sorted(names)) for names in (asked.cohort, cohort))
            raise Refusal(f"is asked for a sum over {asks}, and has agreed to {terms}")

    def masked(
        self, asked: Message[m.Request], found: Message[Strict], names: Sequence[str], privacy: Privacy
    ) -> Message[m.Masked]:
        """An answer with its numbers hidden. names: of metrics"""
        site, head = self._met(), asked.head
        cohort = tuple(sorted(head.cohort)) if isinstance(head, m.Train) else self._cohort
        context = context_of(self._run, head, shared(asked), cohort, privacy)
        if isinstance(head, m.Train):
            model = Message(m.Sums(), asked.tensors).digest if asked.tensors else ""
            self._one("model", model and f"{head.phase} {model}", head.cohort)
            self._memory_of(context.key.hex(), f"{head.phase} {model}".encode() if model else b"")
        q = packed(found.tensors) if context.limbs == 1 else wide(numbers(found.head, found.tensors, names))
        answer = site.mask(context, q)
        sealed, commitments, pairs = (_hexed(of) for of in (answer.sealed, answer.commitments, answer.pairs))
        head = m.Masked(context=context.key.hex(), sealed=sealed, commitments=commitments, pairs=pairs)
        return Message(head, {"words": torch.from_numpy(answer.words.view(np.int64).copy())})

    def open(self, asked: m.Open) -> Message[m.Opened]:
        """The second answer of a sum."""
        site, c = self._met(), asked
        context = Context(self._run, c.what, tuple(c.cohort), bytes.fromhex(c.digest), c.least, c.limbs)
        gone = sorted({*c.cohort} - {*c.present})
        if len(gone) > self.policy.absent:
            self.policy.forbid("absent", f"a sum without {', '.join(gone)}")
        model = self._memory_of(context.key.hex())
        self._one("opened", model.decode(), c.present)
        found = site.open(context, c.present, {name: bytes.fromhex(share) for name, share in c.sealed.items()})
        return Message(m.Opened(shares=_hexed(found.shares), keys=_hexed(found.keys)))


def _signed(join: m.Join, name: str, public: str, rows: int) -> bytes:
    return f"polyfed sums {run_of(join)} {name} {public} {rows}".encode()


def _hexed(of: Mapping[str, bytes]) -> dict[str, str]:
    return {name: value.hex() for name, value in of.items()}


def _bytes(of: Mapping[str, str]) -> dict[str, bytes]:
    return {name: bytes.fromhex(value) for name, value in of.items()}


# at the server


@dataclasses.dataclass
class Opener:
    """The server's end of all sums of a run."""

    asking: Asking
    join: m.Join  # what one of the sites has joined for
    privacy: Privacy
    path: Path  # of the file that says for whom each sum was opened

    def __post_init__(self) -> None:
        self.run = run_of(self.join)
        self.opened: dict[str, list[str]] = {}
        for key, present in journal.pairs(self.path):
            with suppress(TypeError):
                self.opened[key] = [*map(str, present)]

    def begin(self, messages: Mapping[str, Message[Any]], size: int) -> "Sum":
        """A sum over the answers to these messages. size: numbers of an answer"""
        marks = {name: shared(message) for name, message in messages.items()}
        if len({*marks.values()}) > 1:
            raise ConfigError("privacy: the method sends each client a message of its own, whose answers have no sum")
        (mark,), head = {*marks.values()}, next(iter(messages.values())).head
        context = context_of(self.run, head, mark, tuple(sorted(messages)), self.privacy)
        exchange = (head.t, head.phase) if isinstance(head, m.Train) else None
        return Sum(self, context, size * context.limbs, exchange)

    def ask(self, messages: Mapping[str, Message[Any]], size: int, what: str, quorum: int | None = None) -> list[float]:
        """The sum over the answers of sites, which are asked and waited for."""
        total = self.begin(messages, size)
        self.asking.ask(messages)
        self.asking.answers(messages, what, Strict, total.wrong, quorum, take=total.take)
        return narrow(total.open(what))


class Sum:
    """One sum, from the first answer to the opening. It holds one vector of words, however many sites there are."""

    def __init__(self, by: Opener, context: Context, size: int, exchange: tuple[int, int] | None):
        self.by, self.context, self.exchange = by, context, exchange
        self.server = Server(context, size)
        self.form = {"words": Form(torch.int64, (size,), size)}
        self.only = by.opened.get(context.key.hex())  # for whom it was opened before the server was stopped

    def wrong(self, name: str, reply: Message[Strict]) -> str:
        """What is wrong with a first answer; "": nothing."""
        head = reply.head
        if isinstance(head, m.Diverged):
            return "" if (head.t, head.phase) == self.exchange else ANOTHER
        if not isinstance(head, m.Masked):
            return "its reply is not masked" if isinstance(head, m.Trained | m.Sums | m.Measured) else ANOTHER
        if head.context != self.context.key.hex():
            return "its reply is of another exchange, or it received another message"
        return misfit(reply.tensors, self.form, finite=False)

    def take(self, name: str, reply: Message[Any]) -> Message[Any]:
        """Add an answer up; what is kept of it has no numbers."""
        head = reply.head
        if isinstance(head, m.Masked) and (self.only is None or name in self.only):
            words = reply.tensors["words"].numpy().view(np.uint64)
            parts = (_bytes(of) for of in (head.sealed, head.commitments, head.pairs))
            self.server.take(name, Masked(words, *parts))
        return Message(head)

    def open(self, what: str) -> np.ndarray:
        """The sum over those who have answered. Raises Silent where there are too few of them."""
        there, c = self.server.present, self.context
        if self.only is not None and there != sorted(self.only):
            missing = ", ".join(sorted({*self.only} - {*there}))
            raise Silent(f"{what}: this sum was opened with {missing}, and cannot be opened for others")
        if len(there) < c.threshold:
            raise Silent(f"{what}: {len(there)} sites have answered, expected {c.threshold} for a sum that is opened")
        if self.only is None:
            journal.append(self.by.path, [c.key.hex(), there])
            self.by.opened[c.key.hex()] = there
        question = m.Open(
            what=c.what, cohort=list(c.cohort), digest=c.digest.hex(), least=c.least,
            limbs=2 if c.limbs == 2 else 1, present=there, sealed={},
        )  # fmt: skip
        sealed = {name: _hexed(self.server.sealed(name)) for name in there}
        asked = {name: Message(question.model_copy(update={"sealed": shares})) for name, shares in sealed.items()}
        self.by.asking.ask(asked)
        # where all are there, shares of some are enough; keys with those who are not must come from everybody
        enough = c.threshold if len(there) == len(c.cohort) else None
        found, _ = self.by.asking.answers(asked, f"{what}, its sum", m.Opened, enough=enough)
        second = {name: Opened(_bytes(r.head.shares), _bytes(r.head.keys)) for name, r in found.items()}
        return self.server.sum(second)
