"""A data set before it is divided among clients: `partition` deals the samples out, cuts the test and validation sets
and scales the inputs, in that order, so that no held-out sample touches a training one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from polyfed.base.arguments import checked
from polyfed.base.errors import DataError, closest, few
from polyfed.compute.split import Split
from polyfed.data import prepare
from polyfed.data.corruptions import KINDS, corrupted
from polyfed.data.federation import Federation
from polyfed.data.intake import WEIGHTED
from polyfed.data.partition import Assignment, Natural, Partitioner, Source, as_partitioner
from polyfed.data.preparation import Preparation

TESTS = ("own", "ratio", "ratio-floor", "given", "merged", "independent")


@checked
@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples before they are divided among clients.

    Parameters
    ----------
    name : str
        Name of the data set.
    x : array
        [N, ...] inputs, floats; or uint8 pixels, which `partition` turns into float32 in [0, 1].
    y : array
        [N] int64 class labels, or float targets.
    x_test, y_test : array or None
        The official test set.
    classes : int or None
        Number of classes; None for a regression.
    groups : array or None
        [N] natural client of each sample (0, 1, ...).
    group_names : tuple of str or None
        One per natural client.
    group_clusters : array or None
        One per natural client.
    test_groups : array or None
        [N_test] natural clients of the official test set, if it has any.
    times : array or None
        [N]: held-out samples are then a client's latest, and equal times stay together.
    normalise : tuple or None
        Known (means, deviations), per channel or one for all: pixels in [0, 1] become (x - mean) / deviation.
    standardise : str or None
        Training rows that scale the inputs: "pooled", "client" or "cluster".
    scaling : str
        "z-score", "minmax" ([-1, 1]) or "unit" ([0, 1]).
    validation_fraction : float
        Default of `partition`.
    notes : tuple of str
        Caveats, licence and attribution, which go into every run.
    meta : dict
        More entries for the federation's meta.
    options : dict
        Options the data set was loaded with.
    preparation : Preparation or None
        Turns cells of tables into inputs; x then holds its `codes`.
    weights : array or None
        [N] weights of samples in their client's training loss; see `Federation.from_arrays`.
    whose : array or None
        [N] group of each sample, such as its patient: no split divides a group.
    strata : array or None
        [N] class of each sample, of each of which a share is held out.
    parts : array or None
        [N] the part that each sample is of: 0 training, 1 validation, 2 test; nothing is then held out for tests.
    texts : list of array or None
        [N] the ids of each text, which `preparation` makes rows of; x is then unused.
    tokens : int or None
        Number of classes of each token, as in `Federation`.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray | None = None
    y_test: np.ndarray | None = None
    classes: int | None = None
    groups: np.ndarray | None = None
    group_names: tuple[str, ...] | None = None
    group_clusters: np.ndarray | None = None
    test_groups: np.ndarray | None = None
    times: np.ndarray | None = None
    normalise: tuple[Sequence[float], Sequence[float]] | None = None
    standardise: str | None = None
    scaling: str = "z-score"
    validation_fraction: float = 0.0
    notes: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    preparation: Preparation | None = None
    weights: np.ndarray | None = None
    whose: np.ndarray | None = None
    strata: np.ndarray | None = None
    parts: np.ndarray | None = None
    texts: Sequence[np.ndarray] | None = None
    tokens: int | None = None

    def __len__(self) -> int:
        return len(self.y)

    def partition(
        self,
        how: Partitioner | str | None = None,
        clients: int | None = None,
        seed: int = 0,
        test: str | None = None,
        test_fraction: float = 0.2,
        validation_fraction: float | None = None,
        *,
        test_samples: int = 100,
        min_samples: int = 2,
        without: Sequence[str] = (),
    ) -> Federation:
        """Divide the samples among clients.

        Parameters
        ----------
        how : Partitioner, str or None
            A partitioner or its string form; None: the natural clients, where there are any.
        clients : int or None
            Number of clients; not for natural ones.
        seed : int
            Seed of the partition and of the held-out samples.
        test : str or None
            "own": `test_fraction` of each client's own samples; an official test set is unused. "ratio": `test_samples`
            official test samples in the client's class ratio, by largest remainder, without replacement within a client
            (clients may share them); fewer, with a note, where a class runs out. "ratio-floor": the same, rounded down
            by class as in FedSLR's released code (59 of 100 on average for CIFAR-100 IID on 100 clients). "given": the
            official test samples of the same natural client. "merged": official training and test samples dealt
            out together, then as "own" (PFLlib). "independent": the official test set dealt out by the same rule with
            other draws (FPFC). None: "given" for natural clients that have one, else "ratio" for classes with an
            official test set, else "own".
        test_fraction : float
            Share for "own" and "merged".
        validation_fraction : float or None
            Share of each client's remaining training samples; None: the data set's own, mostly 0.
        test_samples : int
            Number for "ratio" and "ratio-floor".
        min_samples : int
            Least number of samples per client in an artificial partition; a client without any is always refused.
        without : sequence of str
            Clients left out once the samples are dealt, before anything is computed from them; unknown names are
            ignored.

        Returns
        -------
        Federation
            Its meta has `indices` (each client's positions in x; test samples of "merged" count on from the end of x)
            and `split_indices`, except for packed texts; `preparation` and `inputs` (names) for tables; and `scaling`
            for standardised arrays.
        """
        how = self._partitioner(how)
        test = self._test_mode(test, how)
        test_fraction = prepare.check_fraction(test_fraction, "the test fraction")
        fraction = self.validation_fraction if validation_fraction is None else validation_fraction
        fraction = prepare.check_fraction(fraction, "the validation fraction")
        data = self._merged() if test == "merged" else self
        dealt, everyone, kept = data._dealt(how, clients, seed, min_samples, without)
        names, notes = tuple(everyone[i] for i in kept), [*self.notes, *dealt.notes]

        said = data.parts is not None
        own = said or test in ("own", "merged")
        cut, by = (
            prepare.Cut(seed, test_fraction, fraction),
            {k: getattr(data, k) for k in ("times", "whose", "strata")},
        )
        indices, uneven = cut.each(names, dealt.indices, own, given=data.parts, **by)
        if test in ("ratio", "ratio-floor"):
            floor = test == "ratio-floor"
            indices["test"], short = self._by_ratio(dealt.indices, names, test_samples, seed, floor)
            notes += [short] if short else []
        elif test == "given" and not said:
            indices["test"] = [np.flatnonzero(self.test_groups == i) for i in kept]
        elif not own:
            other = int(prepare.keyed(seed, prepare.OFFICIAL).integers(2**31))
            indices["test"] = how.assign(self._source(official=True), len(everyone), other, 1).among(kept).indices
        parts, prepared = data._prepared(indices, dealt, names, seed, official=not own)
        notes += [*uneven, *([WEIGHTED] if self.weights is not None else [])]
        amount = "" if said else f":{test_fraction:g}" if own else f":{test_samples}" if "ratio" in test else ""
        meta = {
            **self.meta, **prepared, "dataset": self.name, "options": dict(self.options), "partition": str(how),
            "seed": int(seed), "test": f"{test}{amount}", "notes": notes,
        }  # fmt: skip
        if self.preparation is None or not self.preparation.packed:
            meta |= {"indices": dealt.indices, "split_indices": indices}
            meta |= {} if self.whose is None else {"whose": [self.whose[held] for held in indices["test"]]}
        clusters = None if dealt.clusters is None else np.asarray(dealt.clusters, dtype=np.int64)
        train, held_out, validation = parts["train"], parts["test"], parts["validation"]
        return Federation(train, held_out, names, validation, self.classes, clusters, meta, self.tokens)

    # the steps of `partition`

    def _partitioner(self, how: Partitioner | str | None) -> Partitioner:
        if how is None and self.groups is None:
            raise DataError(f"{self.name} has no natural clients; give a partition, such as 'dirichlet:0.5'")
        how = as_partitioner(Natural() if how is None else how)
        if self.whose is not None and not isinstance(how, Natural):
            raise DataError(f"{self.name}, partition {how}: would part rows of one group; give one file per site")
        return how

    def _dealt(
        self, how: Partitioner, clients: int | None, seed: int, least: int, without: Sequence[str]
    ) -> tuple[Assignment, tuple[str, ...], list[int]]:
        """The samples of the clients that stay, the names of all, and the positions of those that stay."""
        dealt = how.assign(self._source(), clients, seed, least)
        names = dealt.names or tuple(f"client-{i}" for i in range(len(dealt.indices)))
        kept = [i for i, name in enumerate(names) if name not in without]
        if not kept:
            raise DataError(f"{self.name}: every client is left out, expected at least one to stay")
        dealt = dealt.among(kept)
        if empty := [names[i] for i, index in zip(kept, dealt.indices, strict=True) if not len(index)]:
            raise DataError(f"{self.name}, partition {how}: client {empty[0]!r} has no samples, expected at least one")
        return dealt, names, kept

    def _prepared(
        self, indices: dict[str, list[np.ndarray]], dealt: Assignment, names: tuple[str, ...], seed: int, official: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parts that these samples make, and what was learnt of the training part to prepare them."""
        if self.texts is not None:
            assert self.preparation is not None
            prepared, parts = self.preparation.of_texts(self.texts, indices)
            return parts, {"preparation": prepared.dump(), "inputs": []}
        parts: dict[str, Any] = {
            "train": self._gather(indices["train"], dealt, seed),
            "validation": self._gather(indices["validation"], dealt, seed) if "validation" in indices else None,
            "test": self._gather(indices["test"], dealt, seed, official),
        }
        if self.weights is not None:
            weight = torch.from_numpy(self.weights[np.concatenate(indices["train"])])
            parts["train"] = replace(parts["train"], weight=weight)
        if self.preparation is None:
            return parts, self._scale(parts, dealt, len(names))
        prepared, parts = self.preparation.fitted(parts, names)
        return parts, {"preparation": prepared.dump(), "inputs": prepared.names}

    def _test_mode(self, test: str | None, how: Partitioner) -> str:
        if self.parts is not None:
            if test in (None, "given"):
                return "given"
            raise DataError(f"test={test!r}: {self.name} says itself which rows are for testing, use test='given'")
        natural = isinstance(how, Natural) and self.test_groups is not None
        official = self.x_test is not None
        if test is None:
            return "given" if natural else "ratio" if official and self.classes is not None else "own"
        if test not in TESTS:
            raise DataError(f"test: unknown {test!r}{closest(test, TESTS)}; known: {', '.join(TESTS)}")
        if test != "own" and not official:
            raise DataError(f"test={test!r} needs an official test set; {self.name} has none, use test='own'")
        if test in ("ratio", "ratio-floor") and self.classes is None:
            raise DataError(f"test={test!r} needs class labels; {self.name} is a regression")
        if test == "given" and not natural:
            raise DataError(
                f"test='given' needs test samples that belong to natural clients; {self.name} with {how} has none"
            )
        return test

    def _source(self, official: bool = False) -> Source:
        x, y = (self.x_test, self.y_test) if official else (self.x, self.y)
        assert x is not None
        assert y is not None
        return Source(
            size=len(y),
            labels=np.zeros(0, dtype=np.int64) if self.classes is None else y,
            classes=self.classes or 0,
            groups=self.test_groups if official else self.groups,
            group_names=self.group_names,
            group_clusters=self.group_clusters,
            shape=x.shape[1:],
            name=self.name,
        )

    def _merged(self) -> "Dataset":
        """Official training and test samples as one set."""
        assert self.x_test is not None
        assert self.y_test is not None
        groups = None
        if self.groups is not None and self.test_groups is not None:
            groups = np.concatenate([self.groups, self.test_groups])
        x, y = np.concatenate([self.x, self.x_test]), np.concatenate([self.y, self.y_test])
        strata, own = None if self.strata is None else y, replace(self, x_test=None, y_test=None, test_groups=None)
        return replace(own, x=x, y=y, groups=groups, times=None, strata=strata)

    def _by_ratio(self, indices, names, total, seed, floor=False) -> tuple[list[np.ndarray], str | None]:
        """Official test samples per client in the class ratio of its own samples, and a note if some got fewer."""
        assert self.y_test is not None
        assert self.classes is not None
        pools = [np.flatnonzero(self.y_test == k) for k in range(self.classes)]
        available = np.array([len(pool) for pool in pools])
        held, short = [], []
        for index, name in zip(indices, names, strict=True):
            counts = np.bincount(self.y[index], minlength=self.classes)
            if floor:
                quota = np.minimum(prepare.floor_quota(counts, total), available)
            else:
                quota = prepare.ratio_quota(counts, available, total)
            rng = prepare.keyed(seed, prepare.RATIO, name)
            drawn = [rng.permutation(pool)[:q] for pool, q in zip(pools, quota, strict=True) if q]
            held.append(np.sort(np.concatenate(drawn)) if drawn else np.zeros(0, dtype=np.int64))
            if quota.sum() < total:
                short.append(f"{name} {quota.sum()}")
        if not short:
            return held, None
        if floor:
            mean = np.mean([len(h) for h in held])
            return (
                held,
                f"test numbers are rounded down per class: {mean:.1f} samples per client on average, not {total}",
            )
        return held, f"fewer than {total} official test samples in the client's own class ratio exist for: {few(short)}"

    def _gather(self, indices: Sequence[np.ndarray], dealt: Assignment, seed: int, official: bool = False) -> Split:
        """The samples at `indices`, client after client, as each client sees them."""
        x, y = (self.x_test, self.y_test) if official else (self.x, self.y)
        assert x is not None
        assert y is not None
        flat = np.concatenate(indices)
        offsets = np.concatenate([[0], np.cumsum([len(index) for index in indices])])
        tx, ty = torch.from_numpy(np.ascontiguousarray(x[flat])), torch.from_numpy(np.ascontiguousarray(y[flat]))
        if tx.dtype == torch.uint8:
            tx = tx.float().div_(255)
        elif not tx.is_floating_point() and (self.normalise or self.standardise):
            tx = tx.float()
        if self.normalise is not None:
            axes = (-1,) + (1,) * (tx.dim() - 2) if len(self.normalise[0]) > 1 else (-1,)
            mean, deviation = (torch.tensor(v, dtype=tx.dtype).view(axes) for v in self.normalise)
            tx.sub_(mean).div_(deviation)
        for i in range(len(indices)):
            rows = slice(int(offsets[i]), int(offsets[i + 1]))
            if dealt.relabel is not None:
                ty[rows] = torch.from_numpy(dealt.relabel[i])[ty[rows]]
            if dealt.turns is not None and dealt.turns[i]:
                tx[rows] = torch.rot90(tx[rows], int(dealt.turns[i]), (-2, -1))
            strange = [key for key in ("corruption", "noise") if getattr(dealt, key) is not None]
            if strange and len(indices[i]):
                if not tx.is_floating_point():
                    raise DataError(f"partition {strange[0]!r}: found integer inputs in {self.name}, expected numbers")
                drawn = prepare.keyed(seed, prepare.NOISE, f"{i} {official} {indices[i][0]}")  # of disjoint parts
                if dealt.noise is not None:
                    tx[rows] += torch.from_numpy(dealt.noise[i] * drawn.standard_normal(tx[rows].shape)).to(tx.dtype)
                if dealt.corruption is not None:
                    kind, severity = dealt.corruption[i].tolist()
                    tx[rows] = corrupted(tx[rows], KINDS[kind], severity, drawn)
        return Split(tx, ty, offsets)

    def _scale(self, parts: Mapping[str, Split | None], dealt: Assignment, n: int) -> dict[str, Any]:
        """Scale the inputs in place, with statistics of training rows only; what newcomers are scaled with, if so."""
        if self.standardise is None:
            return {}
        train = parts["train"]
        assert train is not None
        if self.standardise == "pooled":
            scopes = [np.arange(n)]
        elif self.standardise == "client" or dealt.clusters is None:
            scopes = [np.array([i]) for i in range(n)]
        else:
            scopes = [np.flatnonzero(dealt.clusters == c) for c in np.unique(dealt.clusters)]
        constant = (train.x.amax(0) == train.x.amin(0)).numpy()
        scaling = {"scope": self.standardise, "method": self.scaling, "constant": constant.tolist()}
        for scope in scopes:
            rows = {
                key: torch.from_numpy(np.concatenate([np.arange(s.offsets[i], s.offsets[i + 1]) for i in scope]))
                for key, s in parts.items()
                if s is not None
            }
            inputs = {key: s.x[rows[key]] for key, s in parts.items() if s is not None}
            others = [inputs[key] for key in inputs if key != "train"]
            shift, scale = prepare.standardise(inputs["train"], others, constant, self.scaling)
            if self.standardise == "pooled":
                scaling |= {"shift": shift.tolist(), "scale": scale.tolist()}
            for key, scaled in inputs.items():
                split = parts[key]
                assert split is not None
                split.x[rows[key]] = scaled
        return {"scaling": scaling}
