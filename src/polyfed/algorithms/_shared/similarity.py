"""Clients' long vectors: inner products, cosine similarities, mixtures."""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from polyfed.compute import compiled

COLUMNS = 2048


def unit(W: Tensor) -> Tensor:
    """[m, p] float64: the rows of W divided by their lengths; a zero row stays zero."""
    X = W.to(torch.float64, copy=True)
    norm = X.norm(dim=1, keepdim=True)
    return X.div_(torch.where(norm > 0, norm, 1.0))


def products(W: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Inner products [m, n] of the rows `ids` with all rows of W: [n, p], and all squared lengths [n], in float64."""
    if (by_kernel := compiled.products(W, ids)) is not None:
        return by_kernel
    G = W.new_zeros(len(ids), len(W), dtype=torch.float64)
    squares = W.new_zeros(len(W), dtype=torch.float64)
    for X in W.split(COLUMNS, dim=1):  # a copy of a few columns at a time stays in the cache
        X = X.double()
        G += X[ids] @ X.T
        squares += torch.linalg.vector_norm(X, dim=1).square()
    return G, squares


def distances(G: Tensor, squares: Tensor, ids: Tensor) -> Tensor:
    """[m, n] squared distances of the rows `ids` to all rows, from their `products`."""
    return (squares[ids, None] + squares - 2 * G).clamp_(min=0)


def mixed(weights: Tensor, W: Tensor, rows: Tensor | None = None) -> Tensor:
    """[m, p]: weights [m, k] @ W [k, p], in the precision of W; with rows [m, k], sums of rows of W, others in each."""
    weights = weights.to(W.dtype)
    if (by_kernel := compiled.mixed(weights, W, rows)) is not None:
        return by_kernel
    return weights @ W if rows is None else embedding_bag(rows, W, per_sample_weights=weights, mode="sum")


def similarity(W: Tensor) -> Tensor:
    """[m, m] float64 cosines of rows of W: [m, p], exactly symmetric, diagonal 1; a zero row is like itself alone."""
    X = unit(W)
    return mirrored(X @ X.T)


def mirrored(S: Tensor) -> Tensor:
    """The upper triangle on both sides, so that ties stay ties, clipped to 1, above which a cosine is rounding."""
    upper = S.triu(1).clamp_(-1, 1)
    return upper + upper.T + torch.eye(len(S), dtype=S.dtype, device=S.device)


def simplex(v: Tensor) -> Tensor:
    """The points of the probability simplex nearest to the rows of v: [..., m]. Of v with NaN: NaN."""
    top = v.amax(-1, keepdim=True)
    v = v - torch.where(top > 1024, top, 0.0)  # the nearest point is the same, and sums of large numbers lose the 1
    u = v.sort(descending=True)[0]
    excess = (u.cumsum(-1) - 1) / torch.arange(1, v.shape[-1] + 1, device=v.device, dtype=v.dtype)
    return (v - excess.gather(-1, (u > excess).sum(-1, keepdim=True).clamp(min=1) - 1)).clamp(min=0)
