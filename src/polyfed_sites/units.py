"""Units of a model whose gradients depend on few rows: what a site keeps back of an answer.

A gradient of a unit is a sum over rows: residual times slope of the unit times what enters it. A server that chooses
the model lets two units, or one unit in two rounds, differ in a few rows alone, and subtracts. So the site remembers
these factors for each unit that it has answered about, as sums over buckets of rows by keyed digests. A unit that
differs from a remembered one, or from nothing at all, by fewer than `least_count` rows stays as it was received, and so
do others that are drawn: which units stay would tell where rows are.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.base.errors import Refusal
from polyfed.compute.layout import Layout
from polyfed.compute.net import model_input
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.messages import State
from polyfed_sites import journal
from polyfed_sites.rows import Book

FACTORS, ANSWERED = "factors", "units.jsonl"  # beside what was asked of the rows
SHARE = 0.97  # of a sum, carried by the few rows that it is then said to depend on
LIKE = 0.97  # cosine, in a group of buckets, from which two units are compared
MOST = 1 << 14  # units that are remembered
PARTS = 8  # of a layer's units, which leave or stay together
PAIRS = 1 << 20  # compared at a time
LAYERS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


class Layer(NamedTuple):
    """A layer and the one that its outputs enter ("": none). factors: [buckets, units]"""

    name: str
    after: str
    factors: Tensor


def _groups(least: int) -> int:
    return least + 3


def buckets(least: int) -> int:
    """Parts of the rows that factors are summed over: few rows touch few of them."""
    return _groups(least) * max(4, -(-32 // _groups(least)))


def factors(task: Task, w: Tensor, split: Split, rows: Tensor, least: int, seed: int) -> list[Layer]:
    """What each row adds to each unit of a model, in buckets of rows. rows: [n] buckets"""
    module, parameters = task.net.workspace(training=False)
    task.net.point(parameters, w.clone())
    trained, passed = {e.name for e in task.layout.entries}, dict[str, tuple[Tensor, Tensor]]()
    handles = [
        layer.register_forward_hook(_noting(passed, name))
        for name, layer in module.named_modules()
        if isinstance(layer, LAYERS) and f"{name}.weight" in trained
    ]
    totals = dict[tuple[str, str, str], Tensor]()
    try:
        for k in range(0, len(split.x), task.net.block):
            passed.clear()
            at = slice(k, k + task.net.block)
            for name, after, way, each in _of_rows(task, module, split, at, passed, seed):
                total = torch.zeros(buckets(least), each.shape[1], dtype=torch.float64)
                total = totals.setdefault((name, after, way), total)
                total.index_add_(0, rows[at], each.double().cpu())
    finally:
        for handle in handles:
            handle.remove()
    return [Layer(name, after, t) for (name, after, _), t in totals.items()]


def _noting(seen: dict[str, tuple[Tensor, Tensor]], name: str) -> Any:
    def note(_: nn.Module, entered: tuple[Tensor, ...], left: Tensor) -> None:
        seen[name] = entered[0], left

    return note


def _of_rows(
    task: Task, module: nn.Module, split: Split, at: slice, seen: Mapping[str, tuple[Tensor, Tensor]], seed: int
) -> list[tuple[str, str, str, Tensor]]:
    """For each layer: its name, the next one's, of which weights, and [b, units] what some rows add to them."""
    y, share = split.y[at], split.shares
    if split.unit is not None:
        y = (y - split.unit[0, 0]) / split.unit[0, 1]
    with torch.enable_grad(), task.net.exactly():
        output = module(model_input(split.x[at]))
        loss = task.net.criterion.mean(output, y, None if share is None else share[at].to(output.dtype))
        names = [name for name, (_, left) in seen.items() if left.requires_grad]
        if not names:
            return []
        slopes = torch.autograd.grad(loss * len(y), [seen[n][1] for n in names], retain_graph=True, allow_unused=True)
        sums: list[tuple[str, str, str, Tensor]] = []
        for k, (name, slope) in enumerate(zip(names, slopes, strict=True)):
            left, then = seen[name][1], names[k + 1] if k + 1 < len(names) else ""
            if then and (next_ := slopes[k + 1]) is not None and (entered := seen[then][0]).requires_grad:
                residual = _summed(next_, seen[then][1])
                draw = torch.Generator().manual_seed(seed + residual.shape[1])
                one = residual @ torch.randn(residual.shape[1], generator=draw).to(residual)
                weighted = one.detach().view(-1, *[1] * (entered.dim() - 1)) * entered
                slope = torch.autograd.grad(weighted.sum(), left, retain_graph=True, allow_unused=True)[0]
                width = left.shape[1 if left.dim() > 3 else -1]
                if (out := _summed(weighted.detach(), entered)).shape[1] % width == 0:
                    sums.append((name, then, "out", out.view(len(y), width, -1).sum(2)))
            if slope is not None and len(slope) == len(y):
                sums.append((name, then, "in", _summed(slope, left)))
    return sums


def _summed(t: Tensor, like: Tensor) -> Tensor:
    """[b, units], over places or tokens."""
    if like.dim() < 3:
        return t.reshape(len(t), -1)
    return t.flatten(1, -2).sum(1) if like.dim() == 3 else t.flatten(2).sum(2)


def few(new: Tensor, known: Tensor, least: int, eps: float) -> tuple[Tensor, Tensor]:
    """[u] bool: units [buckets, u] that fewer than `least` rows reach; that differ from others by so few."""
    alone = _dominated(new, least) & (new.abs().sum(0) > 0)
    pool, pairs, old = torch.cat([known, new], 1), list[tuple[int, int]](), known.shape[1]
    ways = _ways(pool, least)
    size = max(1, PAIRS // max(1, pool.shape[1]))
    for k in range(old, pool.shape[1], size):
        alike = torch.zeros(min(size, pool.shape[1] - k), pool.shape[1], dtype=torch.uint8)
        for way in ways:
            alike += (way[:, k : k + size].T @ way).abs_() > LIKE
        i, j = torch.nonzero(alike > len(ways) - least, as_tuple=True)
        i, j = (of[j < k + i] for of in (i + k, j))
        x, y = pool[:, i], pool[:, j]
        rest = x - _ratio(x, y) * y
        bad = _dominated(rest, least) & (rest.abs().sum(0) > 2 * eps * x.abs().sum(0))
        pairs += zip((i[bad] - old).tolist(), j[bad].tolist(), strict=True)
    differs = torch.zeros_like(alone)
    for i, j in sorted(pairs):  # of two units that differ by a few rows, one may leave
        differs[i] |= not alone[i] and (j < old or not (alone | differs)[j - old])
    return alone, differs


def _dominated(t: Tensor, least: int) -> Tensor:
    return t.abs().topk(min(least - 1, len(t)), 0).values.sum(0) > SHARE * t.abs().sum(0)


def _ways(t: Tensor, least: int) -> list[Tensor]:
    """Directions [*, k] in each group of buckets, of which few rows touch fewer than `least`."""
    parts = t.view(_groups(least), -1, t.shape[1])
    size = parts.norm(dim=1, keepdim=True)
    return [*torch.cat([parts / size.clamp(min=1e-300), (size == 0).double()], 1).float()]


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """[1, k]: r of the least |x - r y|, a weighted median, by column."""
    ratios = torch.where(y == 0, torch.inf, x / y)
    order = ratios.argsort(0)
    weight = y.abs().gather(0, order).cumsum(0)
    middle = (2 * weight >= weight[-1:]).long().argmax(0, keepdim=True)
    return ratios.gather(0, order).gather(0, middle)


class Units:
    """What a site remembers of the units that it has answered about. book: of its rows     least: `least_count`"""

    def __init__(self, book: Book, least: int):
        self.book, self.least = book, least
        self.seed = int.from_bytes(book.key()[:6], "little")
        self._lines, self._kept = journal.Pairs(book.folder / ANSWERED), dict[str, list[Any]]()

    def kept_back(self, asks: str, models: "Models", task: Task, split: Split, rows: np.ndarray) -> list[Any]:
        """[layer, next layer, units] that stay as they were received; on the disk before an answer leaves."""
        with self.book.held():
            self._kept |= self._lines.new()
            if asks not in self._kept:
                journal.append(self._lines.path, [asks, self._decide(asks, models, task, split, rows)])
                self._kept |= self._lines.new()
            return self._kept[asks]

    def _decide(self, asks: str, models: "Models", task: Task, split: Split, rows: np.ndarray) -> list[Any]:
        n, kept = buckets(self.least), dict[str, tuple[str, set[int]]]()
        path = self.book.folder / f"{FACTORS}-{n}"
        at, remembered = torch.as_tensor((rows % np.uint64(n)).astype(np.int64)), _read(path, n)
        new, none = list[Tensor](), remembered[:, :0]
        for w, earlier in [*((w, remembered) for w in models.received), *((w, none) for w in models.trained)]:
            for name, after, t in factors(task, w, split, at, self.least, self.seed):
                alone, differs = few(t, earlier, self.least, torch.finfo(w.dtype).eps)
                back = alone | self._together(differs, asks)
                new += [t[:, ~back]] if earlier is remembered else []
                kept.setdefault(name, (after, set()))[1].update(torch.nonzero(back)[:, 0].tolist())
        _write(path, torch.cat(new, 1) if new else none)
        return [[name, after, sorted(some)] for name, (after, some) in kept.items() if some]

    def _together(self, back: Tensor, asks: str) -> Tensor:
        """Keep back whole parts, which a question draws, of the units: which one it was would tell where rows are."""
        parts = max(1, min(PARTS, len(back) // PARTS))
        draw = torch.Generator().manual_seed(self.seed + int(asks[:12], 16))
        part = torch.randperm(len(back), generator=draw) % parts
        return torch.isin(part, part[back])


def _read(path: Path, n: int) -> Tensor:
    """[n, k] the latest of a file."""
    if not path.is_file():
        return torch.zeros(n, 0, dtype=torch.float64)
    size = path.stat().st_size // (8 * n)
    with path.open("rb") as f:
        f.seek(8 * n * max(0, size - MOST))
        return torch.from_numpy(np.frombuffer(f.read(8 * n * min(size, MOST)), "<f8").reshape(-1, n).T.copy())


def _write(path: Path, t: Tensor) -> None:
    with journal.writing(path), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "r+b") as f:
        f.seek(path.stat().st_size // (8 * len(t)) * 8 * len(t))  # over what a kill has cut off
        f.write(t.T.contiguous().numpy().astype("<f8").tobytes())
        f.flush()
        os.fsync(f.fileno())


class Models(NamedTuple):
    """[p] each: the models that were received, and those that training has made of them."""

    received: list[Tensor]
    trained: list[Tensor]


def models(received: State, sent: State, p: int) -> Models:
    """The models of an exchange."""
    trained = {name: t for name, t in sent.items() if _like(t, received.get(name))}
    changed = {name: received.get(name.removeprefix("d")) for name in sent if name.startswith("d")}
    trained |= {n: was + sent[n] for n, was in changed.items() if was is not None and _like(sent[n], was)}
    return Models(*([w for t in of.values() if _whole(t, p) for w in t.reshape(-1, p)] for of in (received, trained)))


def _whole(t: Tensor, p: int) -> bool:
    return t.is_floating_point() and t.numel() > 0 and t.numel() % p == 0


def _like(t: Tensor, was: Tensor | None) -> bool:
    return was is not None and t.is_floating_point() and was.shape == t.shape and t.numel() > 0


def withheld(sent: State, received: State, layout: Layout, units: Sequence[Any]) -> State:
    """What is sent, with these units as received (a change or gradient is 0); Refusal where they cannot be found."""
    if not units:
        return sent
    mask = _mask(layout, units)
    parts = {int(some.sum()): mask[some] for some in _parts(layout)}
    left: State = {}
    for name, t in sent.items():
        part = next((m for n, m in parts.items() if t.numel() and t.numel() % n == 0), None)
        if not t.is_floating_point() or t.dim() == 0 or t.numel() < min(parts):
            left[name] = t
        elif part is None:
            tensor = f"{name!r}, in which it cannot keep back what few rows have made"
            raise Refusal(f"is asked for {tensor}; its policy has least-count above 1, and with 1 it would answer")
        else:
            was = received.get(name)
            centre = was.to(t) if _like(t, was) and was is not None else torch.zeros_like(t)
            left[name] = torch.where(
                part.to(t.device), centre.reshape(-1, len(part)), t.reshape(-1, len(part))
            ).reshape(t.shape)
    return left


def _parts(layout: Layout) -> list[Tensor]:
    """[p] masks of what methods send: all, or the body, the head, or all but norms."""
    everything = torch.ones(layout.p, dtype=torch.bool)
    return [everything, *(m for m in (layout.mask("body"), layout.mask("head"), ~layout.mask("norm")) if m.any())]


def _mask(layout: Layout, units: Sequence[Any]) -> Tensor:
    """[p] bool: the weights that enter units and leave them, and what normalises them."""
    w = torch.zeros(layout.p)
    named = layout.named(w)
    names = [*named]
    for name, after, some in units:
        n = len(named[f"{name}.weight"])
        for key in (f"{name}.weight", f"{name}.bias"):
            if key in named:
                named[key][some] = 1
        if not after:
            continue
        begin, end = names.index(f"{name}.weight"), names.index(f"{after}.weight")
        for key in names[begin + 1 : end]:
            if named[key].shape == (n,):
                named[key][some] = 1
        out = named[f"{after}.weight"]
        if out.shape[1] % n == 0:
            out.unflatten(1, (n, -1))[:, some] = 1
    return w > 0
