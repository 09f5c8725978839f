"""Partitions: `assign` deals the samples of a data set out to clients, in time linear in their number, from a seed."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import MISSING, dataclass, field, fields, replace
from heapq import heapify, heappop, heapreplace
from math import gcd
from typing import Any, ClassVar, Literal

import numpy as np

from polyfed.base.arguments import checked
from polyfed.base.errors import DataError, PolyfedError
from polyfed.base.registry import Registry
from polyfed.base.settings import Configured, setting, shown
from polyfed.data import prepare
from polyfed.data.corruptions import KINDS


@dataclass(frozen=True, eq=False)
class Source:
    """The part of a data set that a partitioner sees.

    Parameters
    ----------
    size : int
        Number of samples.
    labels : array
        [size] int64 in 0..classes-1; empty, with classes = 0, for a regression.
    classes : int
        Number of classes.
    groups : array or None
        [size] natural client of each sample.
    group_names : tuple of str or None
        One per natural client.
    group_clusters : array or None
        One per natural client.
    shape : tuple of int
        Shape of one input.
    name : str
        Name of the data set, for errors.
    """

    size: int
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    classes: int = 0
    groups: np.ndarray | None = None
    group_names: tuple[str, ...] | None = None
    group_clusters: np.ndarray | None = None
    shape: tuple[int, ...] = ()
    name: str = "the data"


@checked
@dataclass(frozen=True, eq=False)
class Assignment:
    """The samples of each client.

    Parameters
    ----------
    indices : list of array
        Positions of each client's samples, ascending.
    clusters : array or None
        [n] int64 ground truth.
    names : tuple of str or None
        [n] names of natural clients.
    notes : tuple of str
        Caveats for the run.
    relabel : array or None
        [n, classes] int64: label y of client i becomes relabel[i, y].
    turns : array or None
        [n] int64: quarter turns of client i's images, counter-clockwise.
    noise : array or None
        [n] deviation of the Gaussian noise added to client i's inputs.
    corruption : array or None
        [n, 2] int64: kind (position in `polyfed.data.corruptions.KINDS`) and severity of client i's corruption.
    """

    indices: list[np.ndarray]
    clusters: np.ndarray | None = None
    names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    relabel: np.ndarray | None = None
    turns: np.ndarray | None = None
    noise: np.ndarray | None = None
    corruption: np.ndarray | None = None

    def among(self, clients: list[int]) -> "Assignment":
        """The share of some of the clients.

        Parameters
        ----------
        clients : list of int
            Positions of these clients.

        Returns
        -------
        Assignment
            The samples of these clients alone, in this order.
        """
        clients = prepare.positions(clients, len(self.indices), "clients")
        each = {k: getattr(self, k) for k in ("clusters", "relabel", "turns", "noise", "corruption")}
        kept = {k: v if v is None else v[clients] for k, v in each.items()}
        names = None if self.names is None else tuple(self.names[i] for i in clients)
        return replace(self, indices=[self.indices[i] for i in clients], names=names, **kept)


@checked
@dataclass(frozen=True)
class Partitioner(Configured, ABC):
    """Base of all partitioners. `word` is the name in the string form."""

    table: ClassVar[str] = "partition"
    refusal: ClassVar[type[PolyfedError]] = DataError
    word: ClassVar[str] = ""
    needs_labels: ClassVar[bool] = False

    def assign(self, source: Source, clients: int | None, seed: int = 0, min_samples: int = 2) -> Assignment:
        """Deal the samples out. The result depends on the arguments only.

        Parameters
        ----------
        source : Source
            The samples to divide.
        clients : int or None
            Number of clients; None only for natural ones.
        seed : int
            Seed of the draws.
        min_samples : int
            Least number of samples of a client.

        Returns
        -------
        Assignment
            The samples of each client.

        Raises
        ------
        DataError
            More clients than samples / min_samples, class labels needed and not there, or parameters that do not fit.
        """
        rng = prepare.keyed(seed, prepare.ASSIGN)
        if self.needs_labels and not source.classes:
            raise DataError(f"partition {self.word!r} needs class labels; {source.name} is a regression")
        result = self._deal(source, self._count(source, clients, min_samples), seed, rng, min_samples)
        for i, index in enumerate(result.indices):
            if len(index) < min_samples and not self.natural:
                raise DataError(
                    f"partition {self}: found {len(index)} samples for client {i}, expected at least {min_samples}"
                )
        return result

    @property
    def natural(self) -> bool:
        """True where the clients are those the data came from."""
        return False

    def _count(self, source: Source, clients: int | None, min_samples: int) -> int:
        """The number of clients, checked."""
        if clients is None:
            raise DataError(f"partition {self.word!r} needs the number of clients")
        if isinstance(clients, bool) or not isinstance(clients, int | np.integer) or clients < 1:
            raise DataError(f"clients: found {clients!r}, expected an integer of at least 1")
        least = max(min_samples, 1)
        if clients * least > source.size:
            raise DataError(f"{clients} clients are too many for {source.size} samples; each takes {least} at least")
        return int(clients)

    @abstractmethod
    def _deal(self, source: Source, n: int, seed: int, rng: np.random.Generator, min_samples: int) -> Assignment: ...

    def __str__(self) -> str:
        values = []
        for k, f in enumerate(f for f in fields(self) if f.name != "base"):
            value = getattr(self, f.name)
            if f.default is not MISSING and value == f.default and not (k == 0 and f.name in _SHOWN):
                continue
            text = _write(value)
            values.append(text if k == 0 else f"{f.name.replace('_', '-')}={text}")
        own = self.word + (":" + ",".join(values) if values else "")
        return f"{self.base}+{own}" if isinstance(self, Composed) else own


RETRIES = 1000
_SHOWN = ("alpha", "classes_per_client", "per_client", "clusters", "sigma")


def _per_client(owner: np.ndarray, clients: int, index: np.ndarray | None = None) -> list[np.ndarray]:
    """Sample positions by owner: n ascending arrays."""
    order = np.argsort(owner, kind="stable")
    bounds = np.cumsum(np.bincount(owner, minlength=clients))[:-1]
    parts = np.split(order if index is None else index[order], bounds)
    return [np.sort(part).astype(np.int64) for part in parts]


def _top_up(parts: list[np.ndarray], least: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Give every client at least `least` samples, taken one by one at random from whoever has most at the time."""
    counts = np.array([len(p) for p in parts])
    if (counts >= least).all():
        return parts
    shuffled = [rng.permutation(p) for p in parts]
    taken: list[list[int]] = [[] for _ in parts]
    left = counts.copy()
    richest = [(-int(c), i) for i, c in enumerate(counts) if c > least]
    heapify(richest)
    for i in np.flatnonzero(counts < least):
        for _ in range(least - int(counts[i])):
            giver = richest[0][1]
            left[giver] -= 1
            taken[i].append(int(shuffled[giver][left[giver]]))
            if left[giver] > least:
                heapreplace(richest, (-int(left[giver]), giver))
            else:
                heappop(richest)
    return [
        np.sort(np.concatenate([shuffled[i][: left[i]], np.array(taken[i], dtype=np.int64)])) for i in range(len(parts))
    ]


def _cut(index: np.ndarray, shares: np.ndarray) -> list[np.ndarray]:
    """Cut `index` into consecutive parts in the ratio of `shares` (summing to 1), to the nearest sample."""
    bounds = np.round(np.cumsum(shares)[:-1] * len(index)).astype(np.int64)
    return np.split(index, bounds)


@dataclass(frozen=True)
class IID(Partitioner):
    """Samples dealt out at random; sizes differ by at most one."""

    word = "iid"

    def _deal(self, source, n, seed, rng, min_samples):
        parts = np.array_split(rng.permutation(source.size), n)
        return Assignment([np.sort(part).astype(np.int64) for part in parts])


@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Per class, shares over the clients drawn from Dirichlet(alpha, ..., alpha); sizes come out unequal.

    Too small a client is topped up from the largest ones. The "practical" setting of PFLlib and FL-bench is
    "dirichlet:0.1,capped=true,least=1"; early PFLlib asked for 40.
    """

    alpha: float = setting(0.5, gt=0, doc="Above 0: small is skewed, large is IID.")
    capped: bool = setting(
        False, doc="Class by class, whoever has size / clients samples already gets no more, which evens out the sizes."
    )
    least: int | None = setting(
        None,
        ge=1,
        doc="Draw again from scratch, instead of topping up, until every client has at least this many samples.",
    )
    word = "dirichlet"
    needs_labels = True

    def _deal(self, source, n, seed, rng, min_samples):
        if self.least is None:
            return Assignment(_top_up(self._draw(source, n, rng), min_samples, rng))
        least = max(self.least, min_samples)
        for _ in range(RETRIES):
            parts = self._draw(source, n, rng)
            if min(len(part) for part in parts) >= least:
                return Assignment(parts)
        raise DataError(
            f"partition {self}: none of {RETRIES} draws gave each of {n} clients {least} of the {source.size} samples"
        )

    def _draw(self, source: Source, n: int, rng: np.random.Generator) -> list[np.ndarray]:
        owner = np.empty(source.size, dtype=np.int64)
        sizes = np.zeros(n, dtype=np.int64)
        for k in range(source.classes):
            index = rng.permutation(np.flatnonzero(source.labels == k))
            shares = rng.dirichlet(np.full(n, self.alpha))
            if self.capped:
                shares = shares * (sizes * n < source.size)
            for i, part in enumerate(_cut(index, _proper(shares, rng))):
                owner[part] = i
                sizes[i] += len(part)
        return _per_client(owner, n)


@dataclass(frozen=True)
class DirichletPrior(Partitioner):
    """Every client draws its own class prior from Dirichlet(alpha); sizes differ by at most one.

    Samples are dealt one by one to clients in random order, the class drawn from the client's prior over the classes
    that are left: a true partition. After Hsu, Qi and Brown (2019); used by FedDyn and FedSLR (arXiv 2302.11051, 6).
    """

    alpha: float = setting(0.5, gt=0, doc="Above 0: small is skewed, large is IID.")
    samples: int | None = setting(
        None, ge=1, doc="Per client; None: all of them, shared equally. Fewer leaves the rest unused."
    )
    restart: bool = setting(
        False,
        doc="As the released code of FedSLR: an exhausted class starts again from the top, so that some samples are "
        "used twice and some not at all; at alpha = 0.1 and 100 clients 8.4 % (10 classes) or 12 % (100) on "
        "average.",
    )
    word = "dirichlet-prior"
    needs_labels = True

    def _deal(self, source, n, seed, rng, min_samples):
        C, N = source.classes, source.size
        if self.samples is not None and self.samples * n > N:
            raise DataError(f"{n} clients with {self.samples} samples each need more than the {N} there are")
        wanted = N if self.samples is None else self.samples * n
        pools = [rng.permutation(np.flatnonzero(source.labels == k)) for k in range(C)]
        stock = np.array([len(pool) for pool in pools])
        prior = np.stack([_proper(rng.dirichlet(np.full(C, self.alpha)), rng) for _ in range(n)])
        present = stock > 0
        ladder = _ladder(prior, present, stock).tolist()
        used = np.zeros(C, dtype=np.int64)
        turns = rng.permutation(np.arange(wanted) % n)
        draws = rng.random(wanted)
        index = np.empty(wanted, dtype=np.int64)
        for step, (i, u) in enumerate(zip(turns.tolist(), draws.tolist(), strict=True)):
            k = min(bisect_right(ladder[i], u), C - 1)
            index[step] = pools[k][used[k] % stock[k]]
            used[k] += 1
            if used[k] == stock[k] and not self.restart:
                left = stock - used
                if left.any():
                    ladder = _ladder(prior, left > 0, left).tolist()
        notes = ()
        if self.restart:
            lost = N - len(np.unique(index))
            notes = (f"not a partition: exhausted classes were restarted, {lost} of {N} samples are never used",)
        return Assignment(_per_client(turns, n, index), notes=notes)


def _ladder(prior: np.ndarray, available: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Cumulative class probabilities per client over the available classes; never ends on an unavailable one."""
    p = np.where(available, prior, 0.0)
    p[p.sum(1) <= 0] = left  # the client's own classes are all gone: whatever is left, by its stock
    ladder = np.cumsum(p, axis=1)
    ladder /= ladder[:, -1:]
    ladder[:, np.flatnonzero(available)[-1] :] = 1.0
    return ladder


@dataclass(frozen=True)
class Pathological(Partitioner):
    """Every client holds exactly `classes_per_client` classes. After McMahan et al. (2017).

    Classes are dealt round and round in runs of that length, and each class is divided among its holders. Runs that do
    not overlap (the length divides the number of classes) are the ground-truth clusters. PFLlib's "pathological"
    setting is "pathological:2,sizes=rest,order=label".
    """

    classes_per_client: int = setting(2, ge=1, doc="At least 1.")
    sizes: Literal["equal", "random", "rest"] = setting(
        "equal",
        doc='"equal"; "random": in the ratio of draws from 0.1 to 1; or "rest": each holder but the last gets 0.1 '
        "to 1 times the equal share, the last one all that is left.",
    )
    order: Literal["random", "label"] = setting("random", doc='Order of the classes: "random" or "label".')
    word = "pathological"
    needs_labels = True

    def _deal(self, source, n, seed, rng, min_samples):
        k, C = self.classes_per_client, source.classes
        present = np.flatnonzero(np.bincount(source.labels, minlength=C))
        if k > len(present):
            raise DataError(f"partition {self}: {source.name} has only {len(present)} classes")
        if n * k < len(present):
            raise DataError(f"partition {self}: {n} clients with {k} classes cannot hold all {len(present)} classes")
        C, order = len(present), rng.permutation(present) if self.order == "random" else present
        runs = C // gcd(C, k)
        run = np.arange(n) * runs // n if n >= runs else np.arange(n)
        holding: dict[int, list[int]] = {int(c): [] for c in order}
        for i, r in enumerate(run):
            for c in order[(r * k + np.arange(k)) % C]:
                holding[int(c)].append(i)
        parts: list[list[np.ndarray]] = [[] for _ in range(n)]
        for c, holders in holding.items():
            index = rng.permutation(np.flatnonzero(source.labels == c))
            if len(index) < len(holders):
                raise DataError(f"partition {self}: class {c} has {len(index)} samples for {len(holders)} clients")
            for i, part in zip(holders, self._divided(index, len(holders), rng), strict=True):
                parts[i].append(part)
        clusters = run.astype(np.int64) if C % k == 0 else None
        return Assignment([np.sort(np.concatenate(part)).astype(np.int64) for part in parts], clusters)

    def _divided(self, index: np.ndarray, holders: int, rng: np.random.Generator) -> list[np.ndarray]:
        """One class, cut into one part per holder, none of them empty."""
        if self.sizes == "rest":
            share = len(index) / holders
            sizes = rng.integers(max(int(share / 10), 1), max(int(np.ceil(share)), 2), holders - 1)
            return np.split(index, np.cumsum(sizes))
        shares = np.ones(holders) if self.sizes == "equal" else rng.uniform(0.1, 1.0, holders)
        parts = _cut(index[holders:], shares / shares.sum())
        return [np.append(part, one) for one, part in zip(index[:holders], parts, strict=True)]


@dataclass(frozen=True)
class Shards(Partitioner):
    """Samples sorted by label, cut into clients * per_client shards, dealt out at random: McMahan et al. (2017).

    A client sees about `per_client` classes, as a shard may span two. Shards differ by at most one sample.
    """

    per_client: int = setting(2, ge=1, doc="Shards of each client, at least 1.")
    word = "shards"
    needs_labels = True

    def _deal(self, source, n, seed, rng, min_samples):
        count = n * self.per_client
        if count > source.size:
            raise DataError(f"partition {self}: {count} shards cannot be cut from {source.size} samples")
        shuffled = rng.permutation(source.size)
        shards = np.array_split(shuffled[np.argsort(source.labels[shuffled], kind="stable")], count)
        dealt = rng.permutation(count).reshape(n, self.per_client)
        return Assignment([np.sort(np.concatenate([shards[s] for s in row])).astype(np.int64) for row in dealt])


@dataclass(frozen=True)
class QuantitySkew(Partitioner):
    """IID contents, unequal sizes."""

    alpha: float = setting(0.5, gt=0, doc="Shares are drawn from Dirichlet(alpha, ..., alpha).")
    sigma: float | None = setting(
        None, gt=0, doc="If given, shares are log-normal with this deviation of the logarithm instead."
    )
    word = "quantity"

    def _deal(self, source, n, seed, rng, min_samples):
        if self.sigma is None:
            shares = _proper(rng.dirichlet(np.full(n, self.alpha)), rng)
        else:
            logs = self.sigma * rng.standard_normal(n)
            shares = np.exp(logs - logs.max())
            shares /= shares.sum()
        parts = [np.sort(part).astype(np.int64) for part in _cut(rng.permutation(source.size), shares)]
        return Assignment(_top_up(parts, min_samples, rng))


@dataclass(frozen=True)
class Natural(Partitioner):
    """The clients that the data came from: hospitals, patients, schools, or the files of a folder."""

    word = "natural"

    @property
    def natural(self):
        return True

    def _count(self, source, clients, min_samples):
        if source.groups is None:
            raise DataError(f"{source.name} has no natural clients; give a partition, such as 'dirichlet:0.5'")
        n = int(source.groups.max()) + 1
        if clients is not None and clients != n:
            raise DataError(
                f"clients: found {clients}, but {source.name} has {n} natural clients; leave the number out"
            )
        return n

    def _deal(self, source, n, seed, rng, min_samples):
        assert source.groups is not None
        return Assignment(_per_client(source.groups, n), source.group_clusters, source.group_names)


@dataclass(frozen=True)
class Composed(Partitioner):
    """A partitioner on top of another one, `base`, that changes samples by ground-truth cluster, i * clusters // n."""

    base: Partitioner = setting(IID(), doc="Deals the samples out; its string form will do.")

    def __post_init__(self):
        object.__setattr__(self, "base", as_partitioner(self.base))
        super().__post_init__()

    @property
    def natural(self):
        return self.base.natural

    def _count(self, source, clients, min_samples):
        return self.base._count(source, clients, min_samples)

    def _blocks(self, base: Assignment, count: int) -> np.ndarray:
        n = len(base.indices)
        if count > n:
            raise DataError(
                f"partition {self.word!r}: found {n} clients for {count} clusters, expected at least {count}"
            )
        return np.arange(n) * count // n

    @staticmethod
    def _join(base: Assignment, blocks: np.ndarray) -> np.ndarray:
        """Clients are of one kind when base and this step both say so."""
        if base.clusters is None:
            return blocks.astype(np.int64)
        return (
            np.unique(np.stack([base.clusters, blocks], 1), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
        )


@dataclass(frozen=True)
class LabelSwap(Composed):
    """Clients in cluster p exchange two labels, in training and test samples alike.

    By default cluster p exchanges p and C-2-p: with ten classes 0/8, 1/7, 2/6, 3/5, the four clusters of FPFC's MNIST
    experiment (arXiv 2211.04218).
    """

    clusters: int = setting(4, ge=1, doc="Their number, in contiguous blocks of clients.")
    pairs: tuple[tuple[int, int], ...] | None = setting(None, doc="Other exchanges, one per cluster: ((0, 1), (2, 3)).")
    word = "label-swap"
    needs_labels = True

    def _deal(self, source, n, seed, rng, min_samples):
        C = source.classes
        pairs = self.pairs if self.pairs is not None else tuple((p, C - 2 - p) for p in range(self.clusters))
        for a, b in pairs:
            if not (0 <= a < C and 0 <= b < C) or a == b or (self.pairs is None and a > b):
                most = (C - 1) // 2
                raise DataError(
                    f"partition {self.word!r}: {C} classes allow at most {most} clusters, labels 0 to {C - 1}"
                )
        base = self.base.assign(source, n, seed, min_samples)
        blocks = self._blocks(base, len(pairs))
        swap = np.tile(np.arange(C), (n, 1))
        for p, (a, b) in enumerate(pairs):
            swap[blocks == p, a], swap[blocks == p, b] = b, a
        relabel = swap if base.relabel is None else np.take_along_axis(swap, base.relabel, axis=1)
        return replace(base, clusters=self._join(base, blocks), relabel=relabel)


@dataclass(frozen=True)
class Rotation(Composed):
    """Clients in cluster c see their images turned by degrees[c], counter-clockwise, in training and test alike.

    The rotated MNIST of IFCA (Ghosh et al., 2020).
    """

    degrees: tuple[int, ...] = setting(
        (0, 90, 180, 270), doc="One per cluster, multiples of 90; quarter turns need square images."
    )
    word = "rotation"

    def __post_init__(self):
        super().__post_init__()
        fits = len(self.degrees) > 0 and not any(d % 90 for d in self.degrees)
        self.require(fits, "degrees", "multiples of 90")

    def _deal(self, source, n, seed, rng, min_samples):
        if len(source.shape) < 2 or (any(d % 180 for d in self.degrees) and source.shape[-1] != source.shape[-2]):
            raise DataError(f"partition 'rotation': found inputs of shape {list(source.shape)}, expected square images")
        base = self.base.assign(source, n, seed, min_samples)
        blocks = self._blocks(base, len(self.degrees))
        turns = np.array([d // 90 % 4 for d in self.degrees])[blocks]
        turns = turns if base.turns is None else (turns + base.turns) % 4
        return replace(base, clusters=self._join(base, blocks), turns=turns)


@dataclass(frozen=True)
class Noise(Composed):
    """Inputs of client i of n have Gaussian noise of variance sigma (i + 1) / n, in training and test alike.

    The noise-based feature skew of NIID-Bench (Li et al., ICDE 2022). There is no ground-truth cluster in it.
    """

    sigma: float = setting(0.1, ge=0, doc="Variance of the noise at the last client.")
    word = "noise"

    def _deal(self, source, n, seed, rng, min_samples):
        base = self.base.assign(source, n, seed, min_samples)
        each = self.sigma * np.arange(1, len(base.indices) + 1) / len(base.indices)
        return replace(base, noise=np.sqrt(each if base.noise is None else each + base.noise**2))


@dataclass(frozen=True)
class Corruption(Composed):
    """Clients in cluster c see their images corrupted in the way kinds[c], in training and test alike.

    Four of the ways of ImageNet-C and its kin (Hendrycks and Dietterich, ICLR 2019) in simple form; strengths are ours.
    """

    kinds: tuple[Literal["clean", "noise", "blur", "contrast", "inverted"], ...] = setting(
        ("clean", "noise", "blur", "contrast"), doc="One per cluster."
    )
    severity: int = setting(2, ge=1, le=4, doc="How strongly, from 1 to 4.")
    word = "corruption"

    def __post_init__(self):
        super().__post_init__()
        self.require(len(self.kinds) > 0, "kinds", f"some of {', '.join(KINDS)}")

    def _deal(self, source, n, seed, rng, min_samples):
        if len(source.shape) < 2:
            raise DataError(f"partition 'corruption': found inputs of shape {list(source.shape)}, expected images")
        base = self.base.assign(source, n, seed, min_samples)
        if base.corruption is not None:
            raise DataError("partition: found 'corruption' twice, expected it once")
        blocks = self._blocks(base, len(self.kinds))
        kinds = np.array([KINDS.index(kind) for kind in self.kinds])[blocks]
        corruption = np.stack([kinds, np.full_like(kinds, self.severity)], 1)
        return replace(base, clusters=self._join(base, blocks), corruption=corruption)


PARTITIONERS: Registry[type[Partitioner]] = Registry("partition", DataError)
for _kind in (
    *(IID, Dirichlet, DirichletPrior, Pathological, Shards, QuantitySkew, Natural),
    *(LabelSwap, Rotation, Noise, Corruption),
):
    PARTITIONERS.add(_kind.word, _kind)


@checked
def parse(text: str) -> Partitioner:
    """A partitioner from its string form: `name`, `name:value`, `name:value,key=value`; steps joined by "+".

    "iid", "dirichlet:0.5", "dirichlet-prior:0.1,restart=true", "pathological:2", "shards:2", "quantity:sigma=1.0",
    "natural", "dirichlet:1.0+label-swap:4", "iid+rotation:0/90/180/270", "iid+label-swap:pairs=0-1/2-3",
    "iid+corruption:clean/blur,severity=3".

    Parameters
    ----------
    text : str
        The string form; `str(partitioner)` writes it.

    Returns
    -------
    Partitioner
        The partitioner.

    Raises
    ------
    DataError
        It names none, with the closest known word.
    """
    result: Partitioner | None = None
    for step in _steps(str(text)):
        word = step.partition(":")[0].strip()
        composed = issubclass(PARTITIONERS.find(word), Composed)
        if result is not None and not composed:
            raise DataError(f"partition: {word!r} cannot follow {str(result)!r}, expected it first")
        result = PARTITIONERS.read(step, "partition", **({} if result is None else {"base": result}))
    if result is None:
        raise DataError(f"partition: found {shown(text)}, expected one of {', '.join(PARTITIONERS.names())}")
    return result


def _steps(text: str) -> list[str]:
    """Split at each "+" that starts a word ("1e+3" does not)."""
    out, start = [], 0
    for i, c in enumerate(text):
        if c == "+" and text[i + 1 :].lstrip()[:1].isalpha():
            out.append(text[start:i])
            start = i + 1
    return [step for step in [*out, text[start:]] if step.strip()]


def _write(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join("-".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _proper(shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shares that sum to 1 even where a tiny alpha underflowed: then one client takes all, the limit of the law."""
    if np.isfinite(shares).all() and shares.sum() > 0:
        return shares / shares.sum()
    out = np.zeros(len(shares))
    out[rng.integers(len(shares))] = 1
    return out


def as_partitioner(how: "Partitioner | str") -> Partitioner:
    """`how` itself, or parsed from its string form."""
    return how if isinstance(how, Partitioner) else parse(how)
