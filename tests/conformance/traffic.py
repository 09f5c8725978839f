"""What each method sends, from its paper: the table that the ledger is held to, by the class of the method."""

import math
from typing import NamedTuple

import torch

from polyfed.compute.layout import Layout
from polyfed.core.algorithm import Algorithm


class Stated(NamedTuple):
    """Per participant and round, in vectors of p numbers.

    numbers: most single numbers that go either way beside them     whole: densities are rounded to whole entries of
    layers     less_down: factors or nonzeros go down where they are smaller     before: exchanges more before the
    first round     signature: something more up in a client's first round     entry: vectors down that a newcomer takes
    before it trains     merged: down at most, once updates have been merged"""

    down: float
    up: float
    numbers: int = 0
    whole: bool = False
    less_down: bool = False
    before: int = 0
    signature: bool = False
    entry: float = 1.0
    merged: float = 0.0


FEATURES = ("FedProto", "FedTGP", "FedGH", "FedPAC", "FedAS", "FedDBE", "FedNTD", "MOON")
TWO_LAYERS = ("FedPer", "FedRep", "FedBABU", "LGFedAvg")  # they share a part of the layers
ONE_EACH_WAY = (
    *("FedAvg", "FedAvgFT", "Recalibrated", "FedProx", "FedDyn", "Ditto", "FedACS", "FedAMP", "HeurFedAMP"),
    *("FedAvgM", "FedAdagrad", "FedAdam", "FedYogi"),
    *("FedAsync", "APFL", "PFedMe", "PerFedAvg", "LPGD", "CFL", "FPFC"),
    *("FedALA", "FedRoD", "FedLC", "Scaffnew", "LED", "Scafflix", "GradSkip", "FeSEM", "PFedHN", "MOON", "FedNTD"),
)


def stated(method: Algorithm, layout: Layout, size: int = 4, n: int = 6) -> Stated:
    """What a method sends of a model with this layout, numbers of `size` bytes, among n clients."""
    name = type(method).__name__
    if name in ONE_EACH_WAY:
        return Stated(1, 1)
    if name in TWO_LAYERS:
        share = float(layout.mask("head" if name == "LGFedAvg" else "body").double().mean())
        assert 0 < share < 1
        return Stated(share, share)
    if method.adapter_train:
        return _of_factors(method, layout)
    if name == "FedBN":
        share = 1 - float(layout.mask("norm").double().mean())
        return Stated(share, share)
    if name in ("FedEM", "FedRC"):
        share = 1 - float(layout.mask("mixing").double().mean())
        return Stated(share, share, numbers=int(layout.mask("mixing").sum()) if name == "FedRC" else 0)
    if name == "KNNPer":
        share = sum(e.size for e in layout.entries if e.name.startswith("net.")) / layout.p
        return Stated(share, share)
    if name in FEATURES:
        (classes, width), p = layout.head(torch.zeros(layout.p))[0].shape, layout.p
        body, means = 1 - (classes * width + classes) / p, classes * width / p
        return {
            "FedProto": Stated(means, means, numbers=classes),
            "FedTGP": Stated(means, means, numbers=classes),
            "FedGH": Stated(means, means, numbers=classes),
            "FedAS": Stated(body, body, numbers=1),
            "FedPAC": Stated(1 + means, 1 + 2 * means, numbers=classes + 1),
            "FedDBE": Stated(1, 1, numbers=width if getattr(method, "kappa", 0) else 0),
        }[name]
    if name == "FedSoft":
        return Stated(method.k, 1, numbers=method.k)
    if name == "FedFomo":
        models = min(method.models, n - 1)
        return Stated(models, 1, numbers=models)
    if name == "APPLE":  # all core models, their weights p and p0, and the client's place
        return Stated(n, 1, numbers=2 * n + 2)
    if name == "FedLin":
        return Stated(*(1 + _kept(getattr(method, f"keep_{way}"), layout.p, size) for way in ("down", "up")))
    if name == "FedCET":
        return Stated(1, 1, numbers=2 if method.lr == "adaptive" else 1, before=1)
    if name == "CompressedScaffnew":
        return Stated(1, method.senders(n) / n, numbers=2)
    if name == "TAMUNA":  # of the 6 clients or of 3 of them each number is sent by the same share
        return Stated(1 + method.senders(n) / n, method.senders(n) / n, numbers=3)
    if name == "LoCoDL":
        kept = math.ceil(method.keep * layout.p) / layout.p if method.compressor == "rand" else 2 / size
        return Stated(1, kept, numbers=2)
    if name in ("IFCA", "HypCluster"):
        return Stated(method.k, method.k if method.one_hot else 1, numbers=method.k**method.one_hot, entry=method.k)
    if name == "CLoVE":
        return Stated(method.k + 1, 1, numbers=method.k, entry=method.k)
    if name == "PFedGraph":
        return Stated(2 if method.lam else 1, 1)
    if name == "FedSpa":
        return Stated(method.density, method.density + 1 / 32, whole=True)  # the mask: one bit per parameter
    other = {
        "Local": Stated(0, 0),
        "Scaffold": Stated(2, 2),
        "FedTrack": Stated(2, 2),
        "FedBuff": Stated(1, 1, numbers=1),
        "FedSLR": Stated(1, _kept(getattr(method, "keep", None), layout.p, size), less_down=True),
        "GPGD": Stated(1, 1, less_down=True),
        "PACFL": Stated(1, 1, signature=True),
        "FlexCFL": Stated(1, 1, signature=True),
        "SRFCA": Stated(1, 1, signature=True),
        "StoCFL": Stated(2, 2, signature=True),
        "FedNova": Stated(1, 1, numbers=1),
        "FedExP": Stated(1, 1, numbers=1),
        "QFedAvg": Stated(1, 1, numbers=2),
    }
    return other[name]


def _of_factors(method: Algorithm, layout: Layout) -> Stated:
    """A, B, a matrix to merge updates into, and the head, which always travels but with FedSA-LoRA's default."""
    sizes = {e.name.rpartition(".")[2]: e.size / layout.p for e in layout.entries}
    A, B, R = (sizes.get(name, 0.0) for name in "ABR")
    head = 1 - A - B - R
    return {
        "FFALoRA": Stated(B + head, B + head),
        "FedSALoRA": Stated(A, A) if getattr(method, "head", "") == "own" else Stated(A + head, A + head),
        "RoLoRA": Stated(1, min(A, B) + head, numbers=round(abs(A - B) * layout.p)),
        "FedExLoRA": Stated(1 - R, 1 - R, merged=R),
        "FLoRA": Stated(head, 1 - R, merged=R),
        "FlexLoRA": Stated(1, 1, numbers=1),
        "HetLoRA": Stated(1, 1, numbers=1),
        "FedRPCA": Stated(1, 1),
        "FedDPA": Stated(head + (A + B) / 2, head + (A + B) / 2),
    }[type(method).__name__]


def _kept(share: float | None, p: int, size: int) -> float:
    """Vectors that a gradient is as top-k values and positions of 4 bytes; a whole one without positions."""
    return 1.0 if share is None else math.ceil(share * p) * (1 + 4 / size) / p
