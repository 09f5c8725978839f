"""Layers as matrices, the proximal step of their nuclear norm, and common models that go down as factors: for FedSLR
and its relatives. Huang et al., "Fusion of Global and Local Knowledge ...", A.1, footnote 1."""

from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.algorithms._shared.parts import assemble, split
from polyfed.compute.layout import Layout
from polyfed.core.algorithm import Algorithm, Down, Portrait, Server, State


class Sheet(NamedTuple):
    """One layer as a matrix, a kernel as (o kh) x (i kw), so that rank r is two thin convolutions in a row."""

    start: int
    o: int
    kh: int
    kw: int
    i: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.o * self.kh, self.i * self.kw

    @property
    def span(self) -> slice:
        """Its positions in the vector."""
        return slice(self.start, self.start + self.o * self.kh * self.kw * self.i)

    def smaller(self, rank: int) -> bool:
        """True where two factors of this rank are fewer numbers than the matrix."""
        return rank * sum(self.shape) < self.shape[0] * self.shape[1]

    def numbers(self, rank: int) -> int:
        """Numbers of the matrix or of two factors of this rank, whichever are fewer."""
        return min(rank * sum(self.shape), self.shape[0] * self.shape[1])

    def unfold(self, w: Tensor) -> Tensor:
        """The layer of `w: [..., p]` as matrices [..., d1, d2]."""
        lead = w.shape[:-1]
        kernel = w[..., self.span].reshape(*lead, self.o, self.kh, self.kw, self.i)
        return kernel.transpose(-2, -1).reshape(*lead, *self.shape)

    def fold(self, matrix: Tensor) -> Tensor:
        """A matrix, or several [s, d1, d2], in the order of the vector: [..., d1 d2]."""
        lead = matrix.shape[:-2]
        return matrix.reshape(*lead, self.o, self.kh, self.i, self.kw).transpose(-1, -2).reshape(*lead, -1)


def sheets(layout: Layout) -> dict[str, Sheet]:
    """Every layer of two or more axes, by its parameter's name. Kernels not of four axes are o x (all the rest)."""
    layers, start = {}, 0
    for e in layout.entries:
        if e.channels_last:
            o, i, kh, kw = e.shape
            layers[e.name] = Sheet(start, o, kh, kw, i)
        elif len(e.shape) >= 2:
            layers[e.name] = Sheet(start, e.shape[0], 1, 1, e.size // e.shape[0])
        start += e.size
    return layers


def svt(matrix: Tensor, amount: float) -> tuple[Tensor, Tensor]:
    """Proximal operator of amount * ||matrix||_*, as factors U sqrt(S) [d1, r] and sqrt(S) V' [r, d2] of its rank r."""
    # no random projection: its residual certifies the result only if the rest of the spectrum is, all together, below
    # `amount`; in FedSLR's runs the first value left out is a few per cent below it (docs/design.md)
    U, S, Vh = _svd_above(matrix, amount)
    root = (S - amount).clamp(min=0).sqrt()
    r = int((root != 0).sum())  # values that are no numbers are kept, for what follows to notice
    return U[:, :r] * root[:r], root[:r, None] * Vh[:r]


def spectral(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, smallest first, and eigenvectors of positive semidefinite matrices [..., d, d]."""
    try:
        return torch.linalg.eigh(gram)
    except torch.linalg.LinAlgError:
        # the singular values are the same: of sparse matrices of low rank LAPACK's eigensolver leaves one in twenty in
        # single precision, and now and then one in double
        U, S, _ = torch.linalg.svd(gram)
        return S.flip(-1), U.flip(-1)


def _svd_above(matrix: Tensor, amount: float) -> tuple[Tensor, Tensor, Tensor]:
    """U, S, V' with all singular values above `amount`, largest first, and maybe others after them."""
    d1, d2 = sorted(matrix.shape)
    # of a long float32 matrix by the eigenvectors of A A' in double precision, 2 to 4 times as fast. Certified: the
    # eigenvalues are known to about eps ||A||_F^2, so that a singular value s > amount is to eps ||A||_F^2 / (2
    # amount), below the rounding of float32 wherever amount > 1e-6 ||A||_F
    exact = matrix.dtype == torch.float32 and amount > 1e-6 * float(matrix.norm())
    if not exact or matrix.device.type != "cpu" or d2 < 3 * d1:
        return torch.linalg.svd(matrix, full_matrices=False)
    if matrix.shape[0] > d1:
        V, S, Uh = _svd_above(matrix.T, amount)
        return Uh.T, S, V.T
    A = matrix.double()
    squares, U = spectral(A @ A.T)
    above = squares > amount**2
    S, U = squares[above].sqrt().flip(0), U[:, above].flip(1)
    return U.float(), S.float(), (U.T @ A / S[:, None]).float()


def shrink_layers(w: Tensor, layers: dict[str, Sheet], amount: float) -> Tensor:
    """Shrink every layer's singular values of w [s, p] by `amount`, in place. Rows that are not finite stay so."""
    for sheet in layers.values() if amount else ():
        matrix = sheet.unfold(w)
        finite = torch.linalg.matrix_norm(matrix).isfinite()[:, None]
        if finite.all():
            w[..., sheet.span] = sheet.fold(_shrunk(matrix, amount))
        else:
            low = _shrunk(torch.where(finite[:, None], matrix, 0), amount)
            w[..., sheet.span] = torch.where(finite, sheet.fold(low), w[..., sheet.span])
    return w


def _shrunk(A: Tensor, amount: float) -> Tensor:
    """A [s, d1, d2] with singular values shrunk by `amount`."""
    if A.shape[1] > A.shape[2]:
        return _shrunk(A.mT, amount).mT
    eigen = _eigen(A, amount)
    if eigen is None:
        U, S, Vh = torch.linalg.svd(A, full_matrices=False)
        return (U * (S - amount).clamp(min=0)[:, None]) @ Vh
    squares, U, all_stay = eigen
    if all_stay:
        return _less(A, squares, U, amount)
    keep = 1 - amount / squares.clamp(min=amount**2).sqrt()[:, None]
    return ((U * keep) @ (U.mT @ A.to(U.dtype))).to(A.dtype)  # of lower rank, but for the rounding of this product


def _less(A: Tensor, squares: Tensor, U: Tensor, amount: float) -> Tensor:
    """A - amount (A A')^(-1/2) A."""
    return torch.baddbmm(A, ((U * (amount / squares.sqrt()[:, None])) @ U.mT).to(A.dtype), A, alpha=-1)


def _eigen(A: Tensor, amount: float) -> tuple[Tensor, Tensor, bool] | None:
    """Eigenvalues and eigenvectors of A A' [s, d1, d1], and True if none vanishes; None: too inexact to shrink A."""
    # a few times as fast as a decomposition of A, which loses f(A A') A with f(x) = min(1, amount / sqrt(x)).
    # Certified: A A' is known to eps ||A||_F^2, and f has no slope above amount / (2 x^1.5) with x = max(least
    # eigenvalue, amount^2), so that the result moves by no more than the rounding of A's largest singular value
    size, own = torch.linalg.matrix_norm(A), torch.finfo(A.dtype).eps
    for kind in dict.fromkeys((A.dtype, torch.float64)):
        # A's own precision is enough where no singular value is small
        wide = A.to(kind)
        squares, U = spectral(wide @ wide.mT)
        moved = torch.finfo(kind).eps * size**2 * amount / 2
        sure = moved <= own * squares[:, -1].clamp(min=0).sqrt() * squares[:, 0].clamp(min=amount**2)
        certified, all_stay = torch.stack([sure.all(), (squares[:, 0] > amount**2).all()]).tolist()  # one wait
        if certified:
            return squares, U, all_stay
    return None


def _of_full_rank(matrix: Tensor, amount: float) -> Tensor | None:
    """The matrix with singular values shrunk by `amount`; None where one of them vanishes."""
    if matrix.shape[0] > matrix.shape[1]:
        low = _of_full_rank(matrix.T, amount)
        return None if low is None else low.T
    eigen = _eigen(matrix[None], amount)
    if eigen is None or not eigen[2]:
        return None
    return _less(matrix[None], *eigen[:2], amount)[0]


class LowRank(Algorithm, abstract=True):
    """Base: the server shrinks the singular values of the common model, which goes down as factors where smaller.

    Server state: w [p]; per layer `sheet.<name>`, its place; `rank.<name>`; `U.<name>` and `V.<name>` where these are
    smaller than the layer. Both sides compute with the product of what is sent.
    """

    def init_server(self, task, w0, n):
        state = {"w": w0}
        for name, sheet in sheets(task.layout).items():
            state[f"sheet.{name}"] = torch.tensor(sheet)
            state[f"rank.{name}"] = torch.tensor(min(sheet.shape))
        return Server(state)

    def shrunk(self, server: State, new: Tensor, amount: float) -> State:
        """The state whose common model is `new: [p]` with every layer's singular values shrunk by `amount`."""
        state = {"w": new.clone()}
        for name, sheet in places(server).items():
            matrix, rank = sheet.unfold(new), min(sheet.shape)
            low = _of_full_rank(matrix, amount) if int(server[f"rank.{name}"]) == rank else None
            if low is None:
                U, V = svt(matrix, amount)
                low, rank = U @ V, U.shape[1]
                if sheet.smaller(rank):
                    state[f"U.{name}"], state[f"V.{name}"] = U, V
            state["w"][sheet.span] = sheet.fold(low)
            state[f"sheet.{name}"], state[f"rank.{name}"] = server[f"sheet.{name}"], torch.tensor(rank)
        return state

    def downlink(self, server, round):
        factors = {name: t for name, t in server.items() if name[:2] in ("U.", "V.")}
        rest = split(unfactored(places(server), factors, len(server["w"])), server["w"])[0]
        return Down(shared={"rest": rest, **factors})

    def deployment(self, server, round):
        return Down(shared={k: t for k, t in server.items() if k == "w" or k.startswith("rank.")})

    def parameters(self, task, client, down) -> Tensor | int | None:
        return gkr_parameters({name: t[0] for name, t in down.items()}, sheets(task.layout))

    def describe(self, server):
        factors = {name[2:]: (U, server[f"V.{name[2:]}"]) for name, U in server.items() if name[:2] == "U."}
        findings = {"ranks": ranks(server), "gkr_parameters": gkr_parameters(server, places(server))}
        return Portrait(common=server["w"], factors=factors, findings=findings)


def received(down: State, layout: Layout) -> Tensor:
    """[s, p]: the common model from the factors and the rest of a downlink, multiplied once for all."""
    one = {name: t[0] for name, t in down.items()}
    layers, s = sheets(layout), len(down["rest"])
    rest = unfactored(layers, one, layout.p)
    w = assemble(rest, one["rest"], one["rest"].new_empty(layout.p - len(one["rest"])))
    for name, sheet in layers.items():
        if f"U.{name}" in one:
            w[sheet.span] = sheet.fold(one[f"U.{name}"] @ one[f"V.{name}"])
    return w.expand(s, -1)


def unfactored(layers: dict[str, Sheet], message: State, p: int) -> Tensor:
    """[p] bool: the numbers outside of layers that `message` holds as factors."""
    rest = torch.ones(p, dtype=torch.bool)
    for name, sheet in layers.items():
        if f"U.{name}" in message:
            rest[sheet.span] = False
    return rest


def places(server: State) -> dict[str, Sheet]:
    """The layers' places, out of the server's state."""
    return {name[6:]: Sheet(*t.tolist()) for name, t in sorted(server.items()) if name.startswith("sheet.")}


def ranks(server: State) -> dict[str, int]:
    """The rank of every layer's matrix in the common model."""
    return {name[5:]: int(t) for name, t in sorted(server.items()) if name.startswith("rank.")}


def gkr_parameters(server: State, layers: dict[str, Sheet]) -> int:
    """Numbers that describe the common model: per layer the matrix or its two factors, whichever is smaller."""
    r = ranks(server)
    return len(server["w"]) + sum(s.numbers(r[name]) - s.shape[0] * s.shape[1] for name, s in layers.items())
