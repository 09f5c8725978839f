"""FPFC's server for many clients: one dual per client, m x m coefficients in place of pair vectors. Block-coordinate
Douglas-Rachford on objective (1) of Yu et al. (arXiv 2211.04218); functions on server state."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.algorithms._shared.clusters import components
from polyfed.algorithms.fpfc.penalty import Fusion
from polyfed.core.algorithm import State

NAME = "device-dual"
BLOCK = 1 << 20  # numbers per float64 block of columns
ROWS = 256  # clients per block of pair distances


class Nodes(NamedTuple):
    """The geometry of P by node."""

    size: Tensor  # [r] clients
    gram: Tensor  # [r, r] of node means
    spread: Tensor  # [r] mean squared distance of members to their mean
    offset: Tensor  # [m] distance of every client to its node's mean


#     P_i            one point per client                       z = prox(P) = argmin F(z) + rho/2 ||z - P||^2
#     downlink       y_i = 2 z_i - P_i                          F(z) = 1/(2m) sum_{i,j} g(||z_i - z_j||)
#     device         w_i <- w_i - lr (grad f_i(w_i) + rho (w_i - y_i)), from its own last w_i
#     server         P_i <- P_i + w_i - z_i  for participants, then one majorisation step towards the new prox
# g(sqrt(u)) is concave, so g(t) <= g(D) + W/2 (t^2 - D^2), W = g'(D)/D, and minimising this bound is one linear solve
# with a Laplacian: z = A P. A and all distances follow from the Gram matrix of P: the server touches vectors only for
# the participants. Clients whose z lie within `delta` of each other form a node with one weight to every other node.
# The state, of m clients, d parameters, r nodes:
#     w [m, d]   last uploads           groups [m]   node of each client      B [r, r]   node means of z from those of P
#     Q [m, d]   P - centre             Om [r, r]    weights for the next     f [r]      z_i - zbar = f (P_i - Pbar)
#     centre [d] first mean of P                     majorisation step        G [m, m]   Q Q' in float64
#     settings [6]   that groups, Om, B and f belong to


# ---- what FPFC calls -------------------------------------------------------------------------------------------------


def start(w: Tensor, n: int, fusion: Fusion) -> State:
    """The state before the first round, from a common model [d] or from local models [n, d] (zero duals: P = w)."""
    common = w.dim() == 1
    r = 1 if common and not w.is_meta else n
    P = w.expand(n, -1)
    centre = w.clone() if common else w.mean(0)
    Q = P - centre
    double = {"dtype": torch.float64, "device": w.device}
    state = {
        "w": P.clone(),
        "Q": Q,
        "centre": centre,
        "G": torch.zeros(n, n, **double),
        "groups": torch.zeros(n, dtype=torch.int64, device=w.device),
        "Om": torch.zeros(r, r, **double),
        "B": torch.eye(r, **double),
        "f": torch.zeros(r, **double),
        "settings": fusion.numbers(w.device),
    }
    if w.is_meta:
        # one node per client, the largest state; with "working" twice its bytes, by which a run is admitted, cover the
        # peak
        held = sum(t.numel() * t.element_size() for t in state.values())
        peak = memory(n, w.shape[-1], participants=0, itemsize=w.element_size())
        return state | {"working": torch.empty(max(0, peak // 2 - held), dtype=torch.uint8, device="meta")}
    if common:
        return _settle(state, fusion)
    _whole_gram(state["G"], Q)
    return reweigh(state, fusion)


def reweigh(state: State, fusion: Fusion) -> State:
    """The state with nodes and weights from P alone, as after local models or under another lambda; w and P stay."""
    G, own = state["G"], state["G"].diagonal()
    # all that lies within lam of one another in a chain; _settle detaches what is too far for one node
    groups = _components(len(G), lambda k: own[k, None] + own - 2 * G[k] <= fusion.lam**2, G.device)
    nodes = _nodes(G, groups, int(groups.max()) + 1)
    away = _distances(nodes.gram) + nodes.spread[:, None] + nodes.spread
    fresh = {"groups": groups, "Om": _hollow(fusion.weight(away.sqrt())), "settings": fusion.numbers(G.device)}
    return _settle(state | fresh, fusion)


def current(state: State, fusion: Fusion) -> State:
    """The state with nodes and weights for these settings, where a path has changed them."""
    return state if torch.equal(state["settings"], fusion.numbers(state["G"].device)) else reweigh(state, fusion)


def messages(state: State, ids: Tensor) -> Tensor:
    """y_i = 2 z_i - P_i [s, d], towards which the clients `ids` solve."""
    return prox_rows(state, ids).mul_(2).sub_(state["Q"][ids]).sub_(state["centre"])


def update(state: State, ids: Tensor, w_new: Tensor, fusion: Fusion, refresh: bool = True) -> State:
    """The state after the uploads w_new [s, d] of `ids`; w, Q, G change in place. refresh: by a majorisation step"""
    Q = state["Q"]
    Q[ids] += prox_rows(state, ids).neg_().add_(w_new)
    state["w"][ids] = w_new
    _refresh_gram(state["G"], Q, ids)
    return _settle(state, fusion) if refresh else state


def advance(state: State, ids: Tensor, w_new: Tensor, fusion: Fusion, t: int) -> State:
    """`update` in round t; while a majorisation step would cost the cube of m, it is taken every fifth round."""
    m = len(state["w"])
    return update(state, ids, w_new, fusion, refresh=m <= 1000 or len(state["f"]) <= m // 2 or t % 5 == 4)


def prox_rows(state: State, ids: Tensor) -> Tensor:
    """z_i [s, d] of the clients `ids`."""
    Q, groups, f = state["Q"], state["groups"], state["f"]
    r, m, g = len(f), len(Q), groups[ids]
    if r >= len(ids):
        return torch.addmm(state["centre"], coefficients(state, ids).to(Q.dtype), Q)
    member = torch.zeros(r, m, dtype=Q.dtype, device=Q.device)
    member[groups, torch.arange(m, device=Q.device)] = 1
    means = (member / member.sum(1, keepdim=True)) @ Q
    of_means = (state["B"] - torch.diag(f))[g].to(Q.dtype)
    return torch.addmm(state["centre"], of_means, means).addcmul_(f[g, None].to(Q.dtype), Q[ids])


def coefficients(state: State, ids: Tensor) -> Tensor:
    """Rows `ids` [s, m] of the operator A, z - centre = A Q."""
    groups, f = state["groups"], state["f"]
    g, size = groups[ids], torch.bincount(groups, minlength=len(f)).to(f.dtype)
    A = (state["B"][g] / size)[:, groups]
    A -= (f[g] / size[g])[:, None] * (groups == g[:, None])
    A[torch.arange(len(ids), device=A.device), ids] += f[g]
    return A


def node_distances(state: State) -> Tensor:
    """[r, r]: root mean square distance of z between the members of two nodes."""
    nodes = _nodes(state["G"], state["groups"], len(state["f"]))
    return _apart(state["B"], state["f"], nodes).sqrt()


def clusters(state: State, nu: float) -> Tensor:
    """[m] labels: connected components of node distances <= nu, numbered by their first client."""
    near = node_distances(state) <= nu
    return first_seen(_components(len(near), near.__getitem__, near.device)[state["groups"]])


def memory(m: int, d: int, nodes: int | None = None, participants: int | None = None, itemsize: int = 4) -> int:
    """Bytes the server needs at its peak, working space included. nodes: largest number of nodes, None: m."""
    r, s = m if nodes is None else nodes, m if participants is None else participants
    columns = min(d, max(1, BLOCK // m))
    state = 2 * itemsize * m * d + 8 * m * m + 16 * r * r
    working = max(itemsize * (4 * s + min(r, s)) * d, 8 * ((m + s) * columns + s * m), 8 * (r * m + 8 * r * r))
    return state + working


def report(state: State) -> dict[str, int]:
    return {"nodes": len(state["f"])}


# ---- the prox --------------------------------------------------------------------------------------------------------


def _settle(state: State, fusion: Fusion) -> State:
    """One majorisation step at the present P, with nodes split and joined as their distances ask."""
    G = state["G"]
    groups, Om, nodes = _split(G, state["groups"], state["Om"], fusion)
    B, f, D, new = _majorise(nodes, Om, fusion, len(G))
    joined = _join(G, groups, new, nodes, D, fusion)
    if joined is not None:
        groups, Om, nodes = _split(G, *joined, fusion)
        B, f, D, new = _majorise(nodes, Om, fusion, len(G))
    return state | {"groups": groups, "Om": new, "B": B, "f": f}


def _majorise(nodes: Nodes, Om: Tensor, fusion: Fusion, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The minimiser (B, f) of the bound with weights Om, its node distances, and the weights of the next bound."""
    B = _operator(nodes.size, Om, fusion, m)
    f, _ = _factors(nodes, Om, fusion, m)
    D = _apart(B, f, nodes).sqrt_()
    return B, f, D, _hollow(fusion.weight(D))


def _operator(size: Tensor, Om: Tensor, fusion: Fusion, m: int) -> Tensor:
    """B = [N + (diag(N Om n) - N Om N) / (m rho)]^-1 N, N = diag(n)."""
    scale = 1 / (m * fusion.rho)
    system = (size[:, None] * Om).mul_(size).mul_(-scale)
    system.diagonal().add_(size + scale * size * (Om @ size))
    return torch.cholesky_inverse(torch.linalg.cholesky(system)).mT.contiguous().mul_(size)


def _factors(nodes: Nodes, Om: Tensor, fusion: Fusion, m: int) -> tuple[Tensor, Tensor]:
    """f [r], and how far from its node's mean a member may lie at P for the node to hold it within delta [r]."""
    # in-node weights are g'/D at the node's root mean square distance f p, in closed form up to f p = lam. A member is
    # pulled into its node by lam at most from each other: beyond n lam / (m rho) plus delta (1 + s) it would leave on
    # its own, whatever the average says
    n, xi, scale = nodes.size, fusion.xi, 1 / (m * fusion.rho)
    pull, s = n * fusion.lam * scale, (Om @ n) * scale
    p = (2 * nodes.spread * n / (n - 1).clamp(min=1)).sqrt()
    tight = xi / (xi * (1 + s) + pull)
    loose = torch.maximum((p - pull) / (1 + s), torch.full_like(p, xi)) / p.clamp(min=xi)
    return torch.where(tight * p <= xi, tight, loose), pull + fusion.radius * (1 + s)


# ---- nodes -----------------------------------------------------------------------------------------------------------


def _split(G: Tensor, groups: Tensor, Om: Tensor, fusion: Fusion) -> tuple[Tensor, Tensor, Nodes]:
    """Detach clients, singly, until every node is legal: f ||P_i - P_j|| <= delta for all of its pairs."""
    m = len(G)
    while True:
        nodes = _nodes(G, groups, len(Om))
        out = _outsiders(G, groups, nodes, *_factors(nodes, Om, fusion, m), fusion).nonzero()[:, 0]
        if not len(out):
            return groups, Om, nodes
        origin = torch.cat([torch.arange(len(Om), device=G.device), groups[out]])
        pull = nodes.size[origin] * fusion.lam / (m * fusion.rho)
        groups = groups.index_copy(0, out, len(Om) + torch.arange(len(out), device=G.device))
        away = _distances(_nodes(G, groups, len(origin)).gram).sqrt() - pull[:, None]
        siblings = origin[:, None] == origin  # never fused again by a stale weight lam / xi
        Om = _hollow(torch.where(siblings, fusion.weight(away.clamp(min=fusion.xi)), Om[origin][:, origin]))


def _outsiders(G: Tensor, groups: Tensor, nodes: Nodes, f: Tensor, room: Tensor, fusion: Fusion) -> Tensor:
    """[m] bool: the clients to detach now; the member nearest to its node's mean always stays."""
    r, m, e = len(f), len(G), nodes.offset
    limit = fusion.radius / f  # of ||P_i - P_j|| within a node
    out = torch.zeros(m, dtype=torch.bool, device=G.device)
    wide = 2 * _by_node(e, groups, r, "amax") > limit
    wide &= nodes.size > 1
    over = e > room[groups]
    if not wide.any() and not over.any():
        return out
    rank = torch.empty(m, dtype=e.dtype, device=G.device)
    rank[torch.argsort(e, stable=True)] = torch.arange(m, dtype=e.dtype, device=G.device)
    first = rank == _by_node(rank, groups, r, "amin")[groups]
    pivot = torch.empty(r, dtype=torch.int64, device=G.device).index_copy_(0, groups[first], first.nonzero()[:, 0])
    own, p = G.diagonal(), pivot[groups]
    apart = (own + own[p] - 2 * G[torch.arange(m, device=G.device), p]).clamp(min=0).sqrt()
    out = wide[groups] & (apart > limit[groups])
    left = (wide[groups] & ~out).nonzero()[:, 0]
    out[left] = _rivals(G, groups, limit, rank, left) < rank[left]
    calm = ~_by_node(out.to(e.dtype), groups, r, "amax").bool()  # elsewhere the mean is about to move
    over &= calm[groups] & ~first
    return out | (over & (2 * e >= _by_node(e * over, groups, r, "amax")[groups]))


def _rivals(G: Tensor, groups: Tensor, limit: Tensor, rank: Tensor, members: Tensor) -> Tensor:
    """For each of `members` the lowest rank among those of its node beyond the node's limit from it; inf if none."""
    label, order = torch.sort(groups[members], stable=True)
    at, own = members[order], G.diagonal()[members[order]]
    out = torch.full_like(own, torch.inf)
    for k in range(0, len(at), ROWS):
        rows = slice(k, min(k + ROWS, len(at)))
        ends = label[rows][[0, -1]]
        columns = slice(int(torch.searchsorted(label, ends[0])), int(torch.searchsorted(label, ends[1], right=True)))
        square = own[rows, None] + own[columns] - 2 * G[at[rows]][:, at[columns]]
        far = (label[rows, None] == label[columns]) & (square > limit[label[rows], None] ** 2)
        out[rows] = torch.where(far, rank[at[columns]], torch.inf).amin(1)
    return torch.empty_like(out).index_copy_(0, order, out)


def _join(
    G: Tensor, groups: Tensor, Om: Tensor, nodes: Nodes, D: Tensor, fusion: Fusion
) -> tuple[Tensor, Tensor] | None:
    """Join nodes within delta whose union is legal: components where possible, else nearest pairs; None: none is."""
    r = len(D)
    near = D <= fusion.radius
    near.diagonal().fill_(False)
    if not near.any():
        return None
    label = _components(r, near.__getitem__, near.device)
    refused = _illegal(G, groups, Om, nodes, label, fusion)[label]
    if refused.any():
        nearest = torch.where(near, D, torch.inf).argmin(1)
        each = torch.arange(r, device=G.device)
        mutual = refused & near.any(1) & (nearest[nearest] == each)
        pairs = first_seen(torch.where(mutual, torch.minimum(each, nearest), each))
        mutual &= ~_illegal(G, groups, Om, nodes, pairs, fusion)[pairs]
        alone = torch.where(mutual, torch.minimum(each, nearest), each)
        label = torch.where(refused, r + alone, label)
    label = first_seen(label)
    if int(label.max()) + 1 == r:
        return None
    return label[groups], _pooled(Om, nodes.size, label)


def _illegal(G: Tensor, groups: Tensor, Om: Tensor, nodes: Nodes, label: Tensor, fusion: Fusion) -> Tensor:
    """[unions] bool: the unions `label` [r] of nodes that are not legal."""
    r, joined = int(label.max()) + 1, label[groups]
    union = _nodes(G, joined, r)
    f, room = _factors(union, _pooled(Om, nodes.size, label), fusion, len(G))
    limit, grown = fusion.radius / f, torch.bincount(label, minlength=r) > 1
    reach = _by_node(union.offset, joined, r, "amax")
    bad = grown & (reach > room)
    doubt = (grown & ~bad & (2 * reach > limit))[joined].nonzero()[:, 0]
    if len(doubt):
        blocked = _rivals(G, joined, limit, torch.zeros_like(union.offset), doubt).isfinite()
        bad[joined[doubt[blocked]]] = True
    return bad


def _pooled(Om: Tensor, size: Tensor, label: Tensor) -> Tensor:
    """Weights between unions of nodes: means over pairs of clients."""
    r = int(label.max()) + 1
    total = size.new_zeros(r).index_add_(0, label, size)
    half = Om.new_zeros(r, len(size)).index_add_(0, label, size[:, None] * Om * size)
    return _hollow(Om.new_zeros(r, r).index_add_(0, label, half.T) / (total[:, None] * total))


def _nodes(G: Tensor, groups: Tensor, r: int) -> Nodes:
    """The geometry of P by node, from the Gram matrix of clients."""
    m = len(G)
    size = torch.bincount(groups, minlength=r).to(G.dtype)
    if r == m:
        at = torch.argsort(groups)
        return Nodes(size, G[at][:, at], torch.zeros_like(size), torch.zeros_like(size))
    to_mean = G.new_zeros(r, m).index_add_(0, groups, G).div_(size[:, None])
    gram = G.new_zeros(r, r).index_add_(0, groups, to_mean.T).div_(size[:, None])
    square = G.diagonal() - 2 * to_mean[groups, torch.arange(m, device=G.device)] + gram.diagonal()[groups]
    square = square.clamp_(min=0).mul_(size[groups] > 1)
    spread = torch.zeros_like(size).index_add_(0, groups, square) / size
    return Nodes(size, (gram + gram.T) / 2, spread, square.sqrt())


def _apart(B: Tensor, f: Tensor, nodes: Nodes) -> Tensor:
    """[r, r]: mean squared distance of z between the members of two nodes; diagonal 0."""
    out = _distances(B @ nodes.gram @ B.T)
    own = nodes.spread * f**2
    return _hollow(out.add_(own[:, None]).add_(own))


def _by_node(values: Tensor, groups: Tensor, r: int, reduce: str) -> Tensor:
    return values.new_zeros(r).scatter_reduce_(0, groups, values, reduce, include_self=False)


def _components(r: int, near: Callable[[slice], Tensor], device: torch.device) -> Tensor:
    """[r] labels of connected components, numbered by their first member. near(rows) [rows, r]: the edges, as bool"""
    # blocks of rows: only edges between parts not yet connected are looked at twice
    label = torch.arange(r, device=device)
    for k in range(0, r, ROWS):
        i, j = near(slice(k, k + ROWS)).nonzero().T
        i, j = label[i + k], label[j]
        new = i != j
        if new.any():
            label = components(r, i[new], j[new])[label]
    return first_seen(label)


def first_seen(label: Tensor) -> Tensor:
    """The labels renumbered from 0 in the order in which they first appear."""
    values, inverse = torch.unique(label, return_inverse=True)
    at = torch.arange(len(label), device=label.device)
    first = at.new_full((len(values),), len(label)).scatter_reduce_(0, inverse, at, "amin")
    return torch.argsort(torch.argsort(first))[inverse]


def _distances(G: Tensor) -> Tensor:
    """Squared distances from a Gram matrix, symmetric, with a zero diagonal."""
    own = G.diagonal()
    return _hollow((own[:, None] + own).sub_(G).sub_(G.T).clamp_(min=0))


def _hollow(D: Tensor) -> Tensor:
    D.diagonal().zero_()
    return D


def _refresh_gram(G: Tensor, Q: Tensor, ids: Tensor) -> None:
    """Rows and columns `ids` of G = Q Q', summed in float64 over blocks of columns."""
    rows = G.new_zeros(len(ids), len(Q))
    for part in Q.split(max(1, BLOCK // len(Q)), dim=1):
        block = part.to(G.dtype)
        rows.addmm_(block[ids], block.T)
    square = rows[:, ids]
    rows[:, ids] = (square + square.T) / 2
    G[ids] = rows
    G[:, ids] = rows.T


def _whole_gram(G: Tensor, Q: Tensor) -> None:
    """Write G = Q Q', likewise, over the zeros in G."""
    for part in Q.split(max(1, BLOCK // len(Q)), dim=1):
        block = part.to(G.dtype)
        G.addmm_(block, block.T)
    for k in range(0, len(G), ROWS):  # symmetric to the last bit
        G[k : k + ROWS, :k] = G[:k, k : k + ROWS].T
        corner = G[k : k + ROWS, k : k + ROWS]
        corner.copy_((corner + corner.T) / 2)
