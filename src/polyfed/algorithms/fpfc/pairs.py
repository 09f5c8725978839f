"""FPFC's server as in the paper (arXiv 2211.04218, Algorithm 2), with a vector per pair; functions on server state."""

import torch
from torch import Tensor

from polyfed.algorithms._shared.clusters import components
from polyfed.algorithms._shared.similarity import mixed
from polyfed.algorithms.fpfc.penalty import Fusion, shrinkage
from polyfed.base.allocator import lengthened
from polyfed.compute import compiled
from polyfed.core.algorithm import State

NAME = "pairs"
BLOCK = 1 << 18  # numbers per block of pair vectors, so that a block stays in the cache


# Per pair i < j, delta_ij = w_i - w_j + v_ij / rho and the factor c_ij of rule (6) give theta_ij = c delta and the dual
# v_ij = rho (1 - c) delta. A pair that was free at its last two updates is idle: v_ij = 0 and theta_ij = w_i - w_j need
# no memory. The state, of n clients, q parameters, pairs in row order, k of them busy:
#     w [n, q]   last uploads     c [pairs]   factor     row [pairs]   where its vector is, -1: idle     delta [k, q]


# ---- what FPFC calls -------------------------------------------------------------------------------------------------


def start(w: Tensor, n: int, fusion: Fusion) -> State:
    """The state before the first round, from a common model [q] or the clients' [n, q]: theta_ij = w_i - w_j, v = 0."""
    pairs = n * (n - 1) // 2
    return {
        "w": w.expand(n, -1).clone(),
        "c": w.new_ones(pairs),
        "delta": w.new_empty(pairs if w.is_meta else 0, w.shape[-1]),
        "row": torch.full((pairs,), -1, dtype=torch.int64, device=w.device),
    }


def current(state: State, fusion: Fusion) -> State:
    """The state as it is: it does not depend on the settings."""
    return state


def messages(state: State, ids: Tensor) -> Tensor:
    """zeta_i [s, q] of the clients `ids`."""
    w, n, i = state["w"], len(state["w"]), ids[:, None]
    if n == 1:  # no pairs, and a sum over none is not one to torch
        return w[ids]
    j = torch.arange(n - 1, device=w.device).expand(len(i), -1)
    j = j + (j >= i)  # all clients but i
    pair = pair_index(torch.minimum(i, j), torch.maximum(i, j), n)
    # an idle pair adds w_j + (w_i - w_j), taken as w_i, so that what a far client sends cannot cost the others their
    # last digits; of the others theta - v/rho = (2c - 1) delta
    row = state["row"][pair]
    busy = (row >= 0).to(w.dtype) / n
    weight = torch.where(i < j, 2 * state["c"][pair] - 1, 1 - 2 * state["c"][pair]) * busy
    share = torch.zeros(len(ids), n, dtype=w.dtype, device=w.device).scatter_(1, j, busy)
    zeta = mixed(share.scatter_(1, i, 1 - busy.sum(1, keepdim=True)), w)
    return zeta + mixed(weight, state["delta"], row.clamp(min=0)) if len(state["delta"]) else zeta


def advance(state: State, ids: Tensor, w_new: Tensor, fusion: Fusion, t: int) -> State:
    """The state after the uploads w_new [s, q] of `ids`: the pairs with at least one of them, each once, in place."""
    n, w = len(state["w"]), state["w"].index_copy_(0, ids, w_new)
    i, j = torch.triu_indices(n, n, 1, device=w.device)
    active = torch.zeros(n, dtype=torch.bool, device=w.device).index_fill(0, ids, True)
    changed = (active[i] | active[j]).nonzero()[:, 0]
    other = torch.where(active[i], j, i)[changed]
    changed = changed[other.argsort(stable=True)]  # a client's pairs one after another: its model stays in the cache
    delta, c, row = state["delta"], state["c"], state["row"]
    i, j, before, mine = i[changed], j[changed], c[changed], row[changed]
    now = shrinkage(_renewed(w, i, j, delta, mine, 1 - before), *fusion[:5])  # (6)
    busy = (before != 1) | (now != 1)
    entering = (busy & (mine < 0)).nonzero()[:, 0]
    mine = mine.masked_fill(~busy, -1)  # an idle pair gives its vector's place back
    c[changed], row[changed] = now, mine
    delta, spare = _room(delta, _unused(delta, row), len(entering), len(row))
    row[changed[entering]] = spare[: len(entering)]
    _renewed(w, i[entering], j[entering], delta, spare[: len(entering)], torch.zeros_like(before[: len(entering)]))
    return {"w": w, "delta": _compact(delta, row), "c": c, "row": row}


def clusters(state: State, nu: float) -> Tensor:
    """[n] labels: connected components of ||theta_ij|| <= nu, numbered by their first client."""
    w, c, row = state["w"], state["c"], state["row"]
    n, held = len(w), row >= 0
    theta = torch.pdist(w)
    theta[held] = c[held] * state["delta"].norm(dim=1)[row[held]]
    never = ~held & (theta == 0)  # pairs not updated yet
    return components(n, *torch.triu_indices(n, n, 1, device=w.device)[:, (theta <= nu) & ~never])


def memory(n: int, q: int, itemsize: int = 4) -> int:
    """Bytes of c, the two clients and a vector of every pair, two while they are copied; and of the clients' models."""
    return n * (n - 1) // 2 * (itemsize * (2 * q + 1) + 16) + 2 * itemsize * n * q


def report(state: State) -> dict[str, int]:
    return {}


# ---- pair vectors ----------------------------------------------------------------------------------------------------


def pair_index(i: Tensor, j: Tensor, n: int) -> Tensor:
    """Position of the pair (i, j), i < j, in the list of all pairs in row order."""
    return i * (2 * n - i - 1) // 2 + j - i - 1


def _renewed(w: Tensor, i: Tensor, j: Tensor, delta: Tensor, row: Tensor, keep: Tensor) -> Tensor:
    """Norms of delta_ij = w_i - w_j + v_ij / rho, v_ij / rho = keep delta_ij; vectors that are held change in place."""
    if (by_kernel := compiled.renewed(w, i, j, delta, row, keep)) is not None:
        return by_kernel
    if BLOCK // 4 <= w.shape[1]:
        return _renewed_alone(w, i, j, delta, row, keep)
    size = max(1, BLOCK // max(1, w.shape[1]))
    room = w.new_empty(2, min(size, len(row)), w.shape[1])  # for all blocks: fresh memory costs more than the sums
    norms: list[Tensor] = []
    for at in torch.arange(len(row), device=w.device).split(size):
        new, v = room[:, : len(at)]
        torch.index_select(w, 0, i[at], out=new)
        new.sub_(torch.index_select(w, 0, j[at], out=v))
        if len(held := (row[at] >= 0).nonzero()[:, 0]):
            mine = row[at[held]]
            v = torch.index_select(delta, 0, mine, out=v[: len(held)]).mul_(keep[at[held], None])
            whole = len(held) == len(at)
            delta.index_copy_(0, mine, new.add_(v) if whole else new.index_add_(0, held, v)[held])
        norms.append(torch.linalg.vector_norm(new, dim=1))
    return torch.cat(norms) if norms else keep


def _renewed_alone(w: Tensor, i: Tensor, j: Tensor, delta: Tensor, row: Tensor, keep: Tensor) -> Tensor:
    """`_renewed` for vectors so long that a pair at a time is enough: each is read and written once."""
    norms: list[Tensor] = []
    difference, models = w.new_empty(w.shape[1]), w.unbind()
    for a, b, at, share in zip(*(t.tolist() for t in (i, j, row, keep)), strict=True):
        new = torch.sub(models[a], models[b], out=difference)
        if at >= 0:
            new = torch.add(difference, delta[at], alpha=share, out=delta[at])
        norms.append(torch.linalg.vector_norm(new))
    return torch.stack(norms) if norms else keep


def _unused(delta: Tensor, row: Tensor) -> Tensor:
    """Rows of `delta` that no pair has."""
    taken = torch.zeros(len(delta), dtype=torch.bool, device=delta.device)
    taken[row[row >= 0]] = True
    return (~taken).nonzero()[:, 0]


def _room(delta: Tensor, spare: Tensor, count: int, pairs: int) -> tuple[Tensor, Tensor]:
    """(vectors, unused rows) with at least `count` of the latter."""
    if (more := count - len(spare)) <= 0:
        return delta, spare
    rows = torch.arange(len(delta), len(delta) + more, device=spare.device)
    return lengthened(delta, more, pairs), torch.cat([spare, rows])


def _compact(delta: Tensor, row: Tensor) -> Tensor:
    """The vectors without unused rows, once these are more than half; `row` follows, in place."""
    held = (row >= 0).nonzero()[:, 0]
    if 2 * len(held) >= len(delta):
        return delta
    some = lengthened(delta[:0].clone(), len(held), len(row))
    torch.index_select(delta, 0, row[held], out=some)
    row[held] = torch.arange(len(held), device=row.device)
    return some
