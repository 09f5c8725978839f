"""Low-rank updates B A inside a model's vector, the exact mean of their products, and updates merged into a matrix R
beside them: common to the methods for LoRA adapters."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithms._shared.parts import assemble, split
from polyfed.base.errors import ModelError
from polyfed.base.randomness import key_of, uniform
from polyfed.compute.layout import Layout
from polyfed.core.algorithm import Algorithm, Down, Round, Server, State
from polyfed.core.uplinks import Uplinks


class Place(NamedTuple):
    """An adapted layer's place in the vector: A [r, k], B [m, r], and R [m, k] from `merged` on, or -1."""

    a: int
    b: int
    merged: int
    r: int
    m: int
    k: int

    def span(self, name: str) -> slice:
        """The positions of "A", "B" or "R"."""
        start = {"A": self.a, "B": self.b, "R": self.merged}[name]
        rows, columns = self._shape(name)
        return slice(start, start + rows * columns)

    def part(self, w: Tensor, name: str) -> Tensor:
        """The factor "A" or "B", or "R", as a view [..., rows, columns] of `w: [..., p]`."""
        return w[..., self.span(name)].unflatten(-1, self._shape(name))

    def _shape(self, name: str) -> tuple[int, int]:
        return {"A": (self.r, self.k), "B": (self.m, self.r), "R": (self.m, self.k)}[name]


def places(layout: Layout, method: Algorithm) -> dict[str, Place]:
    """The adapted layers of a model by name. Raises ModelError where it has none that the method can use."""
    shapes = {e.name: e.shape for e in layout.entries}
    starts = dict(zip(shapes, [0, *torch.tensor(layout.sizes).cumsum(0).tolist()], strict=False))
    layers: dict[str, Place] = {}
    pairs = [key[:-2] for key in shapes if key.endswith(".A") and f"{key[:-2]}.B" in shapes]
    for name in (name for name in pairs if f"{name}.g" not in shapes):  # which DoRA's lengths are
        (r, k), (m, _) = shapes[f"{name}.A"], shapes[f"{name}.B"]
        layers[name] = Place(starts[f"{name}.A"], starts[f"{name}.B"], starts.get(f"{name}.R", -1), r, m, k)
    if not layers or (method.adapter_train == "residual") != all(place.merged >= 0 for place in layers.values()):
        raise ModelError(
            f"model: found no low-rank updates to train as {method.name} does, expected an adapter such as "
            f"lora:r=8,train={method.adapter_train or 'factors'}"
        )
    return layers


def noted(layers: dict[str, Place]) -> State:
    """The layers' places as tensors of the server's state."""
    return {f"place.{name}": torch.tensor(place) for name, place in layers.items()}


def known(server: State) -> dict[str, Place]:
    """The layers' places, out of the server's state."""
    return {name[6:]: Place(*t.tolist()) for name, t in server.items() if name.startswith("place.")}


def without(layers: Iterable[Place], p: int, names: str) -> Tensor:
    """[p] bool: all but the named parts of the layers, such as "A" or "AR"."""
    rest = torch.ones(p, dtype=torch.bool)
    for place in layers:
        for name in names:
            rest[place.span(name)] = False
    return rest


def below(layers: Iterable[Place], ranks: Tensor, p: int) -> Tensor:
    """[s, p]: 0 on each layer's rows of A and columns of B beyond the first `ranks: [s, layers]`, 1 on all else."""
    keep = ranks.new_ones(len(ranks), p)
    for place, rank in zip(layers, ranks.T, strict=True):
        first = (torch.arange(place.r, device=ranks.device) < rank[:, None]).to(ranks)
        place.part(keep, "A").copy_(first[:, :, None].expand(-1, -1, place.k))
        place.part(keep, "B").copy_(first[:, None].expand(-1, place.m, -1))
    return keep


def drawn(w0: Tensor) -> Callable[[np.ndarray], Tensor]:
    """A function from the keys of clients' names, [n], to a number in [0, 1) for each."""
    return lambda keys: torch.as_tensor(uniform(key_of("rank"), keys)).to(w0)


def ranks(layers: Iterable[Place], draw: Tensor, least: int | None) -> Tensor:
    """[s, layers]: clients' ranks by `draw: [s]`, between `least` (None: all) and each layer's own."""
    if least is None:
        return torch.stack([torch.full_like(draw, place.r) for place in layers], 1)
    return torch.stack([_between(draw, min(least, place.r), place.r) for place in layers], 1)


def _between(draw: Tensor, least: int, most: int) -> Tensor:
    return least + (draw * (most + 1 - least)).floor()


def mean_of_products(B: Tensor, A: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """sum_i p_i B_i A_i as factors of its rank, p the weights over their sum. B: [s, m, r]; A: [s, r, k]"""
    root = (weights / weights.sum()).sqrt().to(B)[:, None, None]
    return product((root * B).movedim(0, 1).flatten(1), (root * A).flatten(0, 1))


def product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """left [m, n] times right [n, k] as U sqrt(S) and sqrt(S) V', by falling S, without rounding noise."""
    # QR of both and the SVD of an n x n matrix, in O((m + k) n^2): the m x k product is never made
    Q, S = torch.linalg.qr(left)
    P, T = torch.linalg.qr(right.T)
    middle = S @ T.T
    if not middle.isfinite().all():
        return left, right  # whose product is not finite either, for what follows to notice
    U, values, Vh = torch.linalg.svd(middle, full_matrices=False)
    some = values > S.norm() * T.norm() * max(len(left), right.shape[1]) * torch.finfo(left.dtype).eps
    q = int(some.sum())
    U, V = Q @ U[:, :q], P @ Vh[:q].T
    turn = torch.where((U * U.abs()).sum(0) < 0, -1, 1).to(U)  # of the two signs the same in whatever order they came
    root = values[:q].sqrt()
    return U * (turn * root), (V * (turn * root)).T


def means(layers: dict[str, Place], own: Tensor, weights: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """`mean_of_products` of every layer's factors in the clients' numbers. own: [s, p]"""
    return {
        name: mean_of_products(place.part(own, "B"), place.part(own, "A"), weights) for name, place in layers.items()
    }


def missed(layers: dict[str, Place], w: Tensor, more: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """The norm of `more`, which the product of mean factors in `w: [p]` lacks of the mean product, over its norm."""
    lacks = {name: left @ right for name, (left, right) in more.items()}
    whole = [lacks[name] + place.part(w, "B") @ place.part(w, "A") for name, place in layers.items()]
    least = torch.finfo(w.dtype).tiny
    return _length(lacks.values()) / _length(whole).clamp(min=least)


def _length(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.square().sum() for part in parts]).sum().sqrt()


class Ranked(Algorithm, abstract=True):
    """Base: every client has a rank of its own, by a draw that it is sent."""

    def init_server(self, task, w0, n):
        return Server({"w": w0, **noted(places(task.layout, self))}, drawn={"draw": drawn(w0)})

    def downlink(self, server, round):
        return Down(shared={"w": server["w"]}, each={"draw": server["draw"][round.ids]})


class Merging(Algorithm, abstract=True):
    """Base: updates are merged into a matrix R beside B A, which goes down as factors where these are smaller.

    Server state: w [p] with all of R; per layer its place, and `U.<name>`, `V.<name>` with R = U V where these are
    fewer numbers than R. A layer of which nothing has been merged sends nothing of R.
    """

    adapter_train = "residual"
    weighted: bool
    made = "R"  # parts of a layer that clients make themselves, and the message "w" leaves out

    def init_server(self, task, w0, n):
        layers = places(task.layout, self)
        ranks = {f"rank.{name}": torch.tensor(0) for name in layers}
        return {"w": w0, **noted(layers), **ranks}

    def merged(self, server: State, w: Tensor, more: dict[str, tuple[Tensor, Tensor]]) -> State:
        """The state with `w: [p]`, into whose R of each layer the product of two factors is merged."""
        new = {name: t for name, t in server.items() if name[:2] not in ("U.", "V.")} | {"w": w}
        for name, place in known(server).items():
            left, right = more[name]
            place.part(w, "R").add_(left @ right)
            if int(server[f"rank.{name}"]) and f"U.{name}" not in server:
                continue  # of a rank too high for factors
            if f"U.{name}" in server:
                left, right = torch.cat([server[f"U.{name}"], left], 1), torch.cat([server[f"V.{name}"], right])
            U, V = product(left, right)
            new[f"rank.{name}"] = torch.tensor(len(V))
            if 0 < U.numel() + V.numel() < place.m * place.k:
                new[f"U.{name}"], new[f"V.{name}"] = U, V
        return new

    def downlink(self, server, round):
        layers = known(server)
        message = {"w": split(without(layers.values(), len(server["w"]), self.made), server["w"])[0]}
        for name, place in layers.items():
            if f"U.{name}" in server:
                message |= {key: server[key] for key in (f"U.{name}", f"V.{name}")}
            elif int(server[f"rank.{name}"]):
                message[f"R.{name}"] = place.part(server["w"], "R")
        return Down(shared=message)

    def uploaded(self, server: State, up: Uplinks, round: Round) -> tuple[Tensor, Tensor, Tensor]:
        """(the clients' numbers [s, p] without R, the trained ones [p], weights [s]) out of uplinks."""
        p = len(server["w"])
        trained = without(known(server).values(), p, "R")
        own = assemble(trained, up["w"], up["w"].new_zeros(len(up["w"]), p - up["w"].shape[1]))
        return own, trained, round.samples if self.weighted else torch.ones_like(round.samples)

    def received(self, task, down: State) -> tuple[Tensor, dict[str, Place], Tensor]:
        """(models [s, p], layers, the trained numbers [p]) out of a downlink."""
        layers = places(task.layout, self)
        trained, sent = (without(layers.values(), task.p, names) for names in ("R", self.made))
        one = {name: t[0] for name, t in down.items()}  # the same for all clients
        w = assemble(sent, one["w"], one["w"].new_zeros(task.p - len(one["w"])))
        for name, place in layers.items():
            if f"U.{name}" in one:
                place.part(w, "R").copy_(one[f"U.{name}"] @ one[f"V.{name}"])
            elif f"R.{name}" in one:
                place.part(w, "R").copy_(one[f"R.{name}"])
        return w.expand(len(down["w"]), -1), layers, trained

    def deployment(self, server, round):
        return Down(shared={"w": server["w"]})
