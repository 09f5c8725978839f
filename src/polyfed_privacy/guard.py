"""What the messages of a private run pass through: clipping, the lattice, noise, the ledger, and sums.

Site i sends n_i q_i + noise (q_i + noise where a method takes plain means), integers modulo 2^64, of which the server
has the sum. A simulation adds them up without masks, which change no bit of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, RunError
from polyfed.compute.batches import Batch
from polyfed.compute.clipped import clipped_sum, sizes_of
from polyfed.compute.split import Split
from polyfed.compute.stacked import shrink
from polyfed.compute.task import Task, having
from polyfed.core.messages import Round, State
from polyfed.core.uplinks import Wanted
from polyfed_privacy.accounts import cost, epsilon_of, shared_cost
from polyfed_privacy.fixed import PLACES, OutOfRange, decode, encode
from polyfed_privacy.ledger import Entry, Ledger, Spent
from polyfed_privacy.noise import Gaussian, keyed
from polyfed_privacy.planned import PLACES as NOISY
from polyfed_privacy.planned import Planned
from polyfed_privacy.quantile import INSIDE, Following

SLACK = 1 + 1e-6  # on sensitivities: more than the rounding of sums in float64
BLOCK = 1 << 17  # numbers at a time: they stay in a core's cache
FINE = 2**20  # steps of the lattice of a row's clipped gradient, whose length is at most this

Sums = dict[tuple[str, str], Tensor]


@dataclass
class Guard:
    """The door of a run with [privacy].

    plan: what was fixed before the first round     names, counts: the clients, and their training samples [n]
    secret: of the run; every site's is made of it in a simulation     ledger, data: where releases are booked, and
    whose factor: round -> what step sizes are multiplied by     train: of which rows batches are made
    everybody: training samples of all sites, where the clients here are some of them     following: an adaptive clip
    asked: digest of all that was asked for an exchange, of which noise and releases are functions
    """

    plan: Planned
    names: Sequence[str]
    counts: np.ndarray
    secret: bytes
    ledger: Ledger
    data: str
    train: Split
    factor: Callable[[int], float] = lambda t: 1.0
    everybody: np.ndarray | None = None
    following: Following | None = None
    asked: bytes = b""
    _turns: dict[int, "Rows"] = field(default_factory=dict[int, "Rows"])

    def __post_init__(self) -> None:
        self.run = keyed(self.secret, ["run"]).hex()[:16]
        private = self.plan.private
        self.everybody = self.counts if self.everybody is None else self.everybody
        self.budget = self.plan.budget if self.plan.private else None
        self.multiplier, self.limit = (self.plan.multiplier, self.plan.limit) if private else (0.0, 0.0)
        if private:
            self._check_range()

    def _check_range(self) -> None:
        """Raise ConfigError for noise that cannot be drawn, before anything is trained."""
        p, most = self.plan.privacy, 2.0**50
        if p.noise == "own":
            sigma = self.multiplier * (FINE * SLACK + math.sqrt(self.plan.numbers))
        else:
            first = self.plan.numbers, 0, self.plan.cohort
            sigma = max((self._sigma("", kind, *first) for kind in self.plan.kinds), default=0.0)
        if sigma >= most:
            fits = "a larger one" if p.noise == "own" else f"less than {(p.clip or 0) * most / sigma:.3g}"
            key, value = ("epsilon", p.epsilon) if p.noise == "own" else ("clip", p.clip)
            raise ConfigError(
                f"privacy.{key}: found {value:g}, expected {fits}: noise of {sigma:.3g} steps is beyond the integers "
                "that are summed"
            )

    def site(self, i: int) -> bytes:
        """A site's own secret."""
        return keyed(self.secret, ["site", self.names[i]])

    # at the sites

    def check_budget(self, i: int) -> None:
        """Raise Spent where a client's budget does not hold what is left of the plan, before anything is trained."""
        budget, done = self.budget or self.plan.budget, self.ledger.rounds(self.names[i], self.data, self.run)
        left = max(0, self.plan.rounds - done)
        if done and self.plan.privacy.noise == "own":
            left = 0  # what remains depends on how often a row is used; each release is held to the budget
        spent = self.ledger.spent(self.names[i], self.data)
        once = self._once(self.plan.numbers, 0, self.plan.cohort) * self.plan.releases / max(1, self.plan.rounds)
        if spent + left * once > self.limit * (1 + 1e-6):
            so_far, then = (epsilon_of(rho, budget.delta) for rho in (spent, spent + left * once))
            state = "is spent" if spent > self.limit * (1 - 1e-6) else f"does not hold {left} rounds"
            more = "" if state == "is spent" else f", {then:.3g} with them"
            raise Spent(
                f"client {self.names[i]!r}: its privacy budget of epsilon {budget.epsilon:g} at delta {budget.delta:g} "
                f"{state} (epsilon {so_far:.3g} so far{more})"
            )

    def enter(self, task: Task, received: State, round: Round) -> Task:
        if not self.plan.private or self.plan.privacy.unit == "site":
            return task
        rows = Rows(self, task, received, round)
        for i in rows.ids:
            self._turns[i] = rows
        return having(task, guard=rows)

    def leave(self, up: State, received: State, round: Round, wanted: Wanted, cohort: int) -> Sums:
        self._enough(round, cohort)
        ids, sent = round.ids.tolist(), {name: up[name] for name in wanted if name in up}
        numbers = {name: t[0].numel() for name, t in sent.items()}
        digests = digest_of(received, len(ids), self.asked) if self.plan.private else []
        self._book(ids, digests, round, sum(numbers.values()), cohort)
        sums = {(n, kind): t.new_zeros(t.shape[1:], dtype=torch.int64) for n, t in sent.items() for kind in wanted[n]}
        if self.following is not None:
            sums[INSIDE] = torch.zeros(1, dtype=torch.int64)
            numbers[INSIDE[0]] = 1
        size = min(len(ids), max(1, BLOCK // max(1, sum(numbers.values()))))
        room = {name: t.new_empty(size, *t.shape[1:], dtype=torch.int64) for name, t in sent.items()}
        for k in range(0, len(ids), size):
            at = slice(k, k + size)
            words = self._words({name: t[at] for name, t in sent.items()}, received, ids[at], room, round.t)
            weights = round.samples[at].long()
            for (name, kind), total in sums.items():
                q = words[name]
                if len(q) == 1:
                    total.add_(q[0], alpha=1 if kind == "plain" else int(weights))
                else:
                    total.add_((q if kind == "plain" else _column(weights, q) * q).sum(0))
        if self.plan.private and self.plan.privacy.noise == "shared":
            for (name, kind), total in sums.items():
                gaussian = Gaussian(
                    self._sigma(name, kind, numbers[name], round.t, cohort) / self._honest(cohort) ** 0.5
                )
                for i, digest in zip(ids, digests, strict=True):
                    total += self._noise(gaussian, self.site(i), total, round, name, kind, digest)
        return sums

    def _words(self, sent: State, received: State, ids: list[int], room: State, t: int) -> State:
        """[s, ...] integers: what the clients send, or under a clip its change from what all of them received.

        A client that keeps what it sends goes on with the numbers that it has sent. room: memory for words
        """
        lent = {t.untyped_storage().data_ptr() for t in received.values()}
        kept = {name for name, t in sent.items() if t.untyped_storage().data_ptr() not in lent and t.stride(0) != 0}
        if self.plan.private and self.plan.privacy.unit == "site":
            bases = {name: _base(name, t, received) for name, t in sent.items()}
            changes, clip = {name: of - bases[name] for name, of in sent.items()}, self._clip(t)
            words = clipped_words(changes, clip)
            for name in kept:
                sent[name].copy_(decode(words[name], NOISY, torch.float64) + bases[name])
            if self.following is not None:
                inside = lengths({name: of.double() * 2.0**NOISY for name, of in changes.items()}) <= clip
                words[INSIDE[0]] = (2 * inside.long() - 1)[:, None] << NOISY - 1  # a half, up or down
            return words
        encoded, total = State(), float(self._all.sum())
        for name, of in sent.items():
            try:
                encoded[name] = encode(of, self.places(of.dtype), total, name in kept, room[name][: len(of)])
            except OutOfRange as e:
                raise RunError(f"client {self.names[ids[e.row]]!r}: uplink {name!r}: {e}") from None
        return encoded

    def _book(self, ids: list[int], digests: list[bytes], round: Round, numbers: int, cohort: int) -> None:
        """Put the releases on disk, before anything of them leaves."""
        if not self.plan.private:
            return
        once = self._once(numbers, round.t, cohort)
        entries = [
            Entry(self.names[i], self.data, f"{self.run} {round.t}.{round.phase}", digest.hex(), once * self._hits(i))
            for i, digest in zip(ids, digests, strict=True)
        ]
        self.ledger.book(entries, self.budget or self.plan.budget, self.limit)

    def _once(self, numbers: int, t: int, cohort: int) -> float:
        """rho of one release."""
        z, h = self.multiplier, self._honest(cohort)
        if self.plan.privacy.noise != "shared":
            return cost(1, z)
        least = min(self._sensitivity(kind, numbers, t) for kind in ("plain", "weighted"))
        if (f := self.following) is None:
            return shared_cost(least, z * least / math.sqrt(h), h, numbers)
        z, bit, half = f.multiplier(z, cohort), f.sigma(z, cohort) * 2.0**NOISY, 2.0 ** (NOISY - 1)
        return shared_cost(least, z * least / h**0.5, h, numbers) + shared_cost(half, bit / h**0.5, h, 1)

    def _hits(self, i: int) -> int:
        """How often one row of a client was used in this exchange, at most; 1 for the client itself."""
        if self.plan.privacy.unit == "site":
            return 1
        hits = self._turns.pop(i).most(i)
        if self.plan.privacy.noise != "own" and hits > 1:
            raise RunError(f"client {self.names[i]!r}: a row was used {hits} times in one exchange, expected once")
        return hits

    def _enough(self, round: Round, cohort: int) -> None:
        p = self.plan.privacy
        least = max(p.threshold if p.sums == "secure" else 1, p.absent + 1)
        if cohort < least:
            raise RunError(f"round {round.t}: found {cohort} sites, expected at least {least} for a sum that is opened")

    # at the server

    def opened(self, sums: Mapping[tuple[str, str], Tensor], received: State, round: Round) -> Sums:
        p, dtype, m = self.plan.privacy, round.samples.dtype, len(round.ids)
        opened: Sums = {}
        for (name, kind), words in sums.items():
            if self.plan.private and p.noise == "server":
                gaussian = Gaussian(self._sigma(name, kind, words.numel(), round.t, m))
                digest = b"".join(digest_of(received, m, self.asked))
                words = words + self._noise(gaussian, keyed(self.secret, ["server"]), words, round, name, kind, digest)
            total = decode(words, self.places(dtype), torch.float64)
            if self.following is not None and (name, kind) == INSIDE:
                self.following.move(round.t, float(total), m)
                continue
            if kind == "weighted":
                total = total / float(round.samples.sum())
            if self.plan.private and p.unit == "site":
                total = total + (m if kind == "plain" else 1) * _base(name, words[None], received)[0]
            opened[name, kind] = total.to(dtype)
        return opened

    # noise

    def places(self, dtype: torch.dtype) -> int:
        """Binary places of what is summed."""
        return NOISY if self.plan.private else PLACES[dtype]

    @property
    def _all(self) -> np.ndarray:
        assert self.everybody is not None
        return self.everybody

    def _clip(self, t: int) -> int:
        """The clip of round t in steps of the lattice."""
        return int((self.following.at(t) if self.following else float(self.plan.privacy.clip or 0)) * 2**NOISY)

    def _honest(self, cohort: int) -> int:
        """Sites whose noise is surely there and unknown to the server."""
        return max(1, cohort - self.plan.privacy.absent)

    def _sensitivity(self, kind: str, numbers: int, t: int) -> float:
        """Longest change of a sum by one unit, in steps of the lattice."""
        p, most, least = self.plan.privacy, float(self._all.max()), float(self._all[self._all > 0].min())
        if p.unit == "site":
            return self._clip(t) * (1.0 if kind == "plain" else most)
        # a row moves its site's uplink by rate clip / n_i, and rounding adds a step to each number
        step = self.plan.rate * self.factor(t) * float(p.clip or 0) * 2.0**NOISY * SLACK
        return step / least + math.sqrt(numbers) if kind == "plain" else step + most * math.sqrt(numbers)

    def _sigma(self, name: str, kind: str, numbers: int, t: int, cohort: int) -> float:
        """Deviation of the noise in a sum, in steps of the lattice."""
        z, f = self.multiplier, self.following
        if f is not None and (name, kind) == INSIDE:
            return f.sigma(z, cohort) * 2.0**NOISY
        return (f.multiplier(z, cohort) if f else z) * self._sensitivity(kind, numbers, t)

    def _noise(
        self, gaussian: Gaussian, secret: bytes, like: Tensor, round: Round, name: str, kind: str, digest: bytes
    ) -> Tensor:
        key = keyed(secret, [self.run, round.t, round.phase, name, kind, gaussian.sigma, digest])
        return torch.from_numpy(gaussian.draw(key, like.numel())).view(like.shape).to(like.device)


class Rows:
    """Gradients of one exchange's clients, clipped row by row; with noise where each site adds its own.

    task: as it is without a guard
    """

    def __init__(self, guard: Guard, task: Task, received: State, round: Round):
        self.guard, self.task, self.round, self.ids = guard, task, round, round.ids.tolist()
        self._digests = digest_of(received, len(self.ids), guard.asked)
        self._calls = dict.fromkeys(self.ids, 0)
        self._used = {i: np.zeros(int(guard.counts[i]), dtype=np.int64) for i in self.ids}
        self._own = guard.plan.privacy.noise == "own"

    def __call__(self, w: Tensor, batch: Batch) -> Tensor | None:
        if batch.purpose in self.guard.plan.home:
            return None
        clip = float(self.guard.plan.privacy.clip or 0)
        total = clipped_sum(self.task, w, batch, clip)
        for k in range(len(w)):
            if batch.live is None or bool(batch.live[k]):
                self._use(k, batch)
                if self._own:
                    total[k] = self._noisy(total[k], k, clip)
        return (total / sizes_of(batch).clamp(min=1)[:, None]).to(w.dtype)

    def _use(self, k: int, batch: Batch) -> None:
        """Count a use of every row of the batch."""
        i = self.ids[k]
        self._calls[i] += 1
        used = self._used[i]
        if batch.places is None:
            used += 1
        else:
            size = batch.places.shape[1] if batch.sizes is None else batch.sizes[k]
            used[batch.places[k, :size] - self.guard.train.offsets[i]] += 1

    def _noisy(self, total: Tensor, k: int, clip: float) -> Tensor:
        """[p] a sum of clipped gradients on the lattice of clip / FINE, under noise."""
        guard, t, i = self.guard, self.round, self.ids[k]
        gaussian = Gaussian(guard.multiplier * (FINE * SLACK + math.sqrt(len(total))))
        key = keyed(guard.site(i), [guard.run, t.t, t.phase, "row", self._calls[i], self._digests[k]])
        noise = torch.from_numpy(gaussian.draw(key, len(total))).to(total.device)
        return ((total * (FINE / clip)).round() + noise) * (clip / FINE)

    def most(self, i: int) -> int:
        """How often a row of client i was used, at most."""
        return int(self._used[i].max(initial=0))


def clipped_words(changes: State, clip: int) -> State:
    """Round changes [s, ...] to the lattice, each client's together at most `clip` long, as integers exactly."""
    flat = {name: t.double().reshape(len(t), -1) * 2.0**NOISY for name, t in changes.items()}
    numbers = sum(t.shape[1] for t in flat.values())
    long = lengths(flat)
    scale = torch.where(long > clip, shrink(long, max(0.0, clip - math.sqrt(numbers))), 1.0)
    words = {name: (t * scale[:, None]).nan_to_num(0, 0, 0).round() for name, t in flat.items()}
    over = lengths(words) > clip * (1 - 1e-12)  # by the rounding alone
    words = {name: torch.where(over[:, None], w.sign() * (w.abs() - 1).clamp(min=0), w) for name, w in words.items()}
    return {name: w.long().view(changes[name].shape) for name, w in words.items()}


def lengths(of: State) -> Tensor:
    """[s] lengths of each client's numbers, all tensors together."""
    return torch.stack([t.double().flatten(1).square().sum(1) for t in of.values()]).sum(0).sqrt()


def digest_of(received: State, s: int, request: bytes = b"") -> list[bytes]:
    """[s] digests of what each client received, and was asked."""
    shared = blake2b(request, digest_size=16)
    for name, t in sorted(received.items()):
        if t.stride(0) == 0 or len(t) == 0:
            shared.update(name.encode() + _bytes(t[:1]))
    own = [name for name, t in sorted(received.items()) if t.stride(0) != 0 and len(t)]
    digests: list[bytes] = []
    for i in range(s):
        h = shared.copy()
        for name in own:
            h.update(name.encode() + _bytes(received[name][i]))
        digests.append(h.digest())
    return digests


def _bytes(t: Tensor) -> bytes:
    return t.detach().cpu().contiguous().numpy().tobytes()


def _base(name: str, t: Tensor, received: State) -> Tensor:
    """What a client's change is taken from: the shared message of the same name and shape, or zero."""
    base = received.get(name)
    fits = base is not None and len(base) > 0 and base.stride(0) == 0 and base.shape[1:] == t.shape[1:]
    return base[:1] if base is not None and fits else torch.zeros_like(t[:1], dtype=torch.float64)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))
