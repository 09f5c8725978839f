"""Unbiased compressors C: E C(v) = v and E|C(v) - v|^2 <= omega |v|^2, with draws of each client's own."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.randomness import Rekeyed
from polyfed.core.algorithm import State


class Compressor(NamedTuple):
    """omega(keep); pack(v [m, d], keep, keys [m, 2]) -> message; unpack(message, d, keep, keys) -> [m, d]."""

    omega: Callable[[float], float]
    pack: Callable[[Tensor, float, np.ndarray], State]
    unpack: Callable[[State, int, float, np.ndarray], Tensor]


def places(d: int, keep: float, keys: np.ndarray) -> Tensor:
    """[m, k] the k = ceil(keep d) coordinates that each client draws, which the server draws too."""
    rng, k = Rekeyed(), math.ceil(keep * d - 1e-9)
    return torch.from_numpy(np.stack([rng(key).permutation(d)[:k] for key in keys]))


def _pack_some(v: Tensor, keep: float, keys: np.ndarray) -> State:
    at = places(v.shape[1], keep, keys).to(v.device)
    return {"d": v.gather(1, at) * (v.shape[1] / at.shape[1])}


def _unpack_some(message: State, d: int, keep: float, keys: np.ndarray) -> Tensor:
    values = message["d"]
    return values.new_zeros(len(values), d).scatter_(1, places(d, keep, keys).to(values.device), values)


def _pack_powers(v: Tensor, keep: float, keys: np.ndarray) -> State:
    """To one of the two nearest powers of two, as sign (exponent + 4000) in 16 bits; 0 stays 0."""
    mantissa, exponent = v.abs().frexp()  # in [1/2, 1)
    rng = Rekeyed()
    draw = torch.from_numpy(np.stack([rng(key).random(v.shape[1]) for key in keys])).to(v.device)
    power = exponent - 1 + (draw < 2 * mantissa.double() - 1).to(exponent.dtype)
    return {"d": (v.sign() * (power + 4000)).to(torch.int16)}


def _unpack_powers(message: State, d: int, keep: float, keys: np.ndarray) -> Tensor:
    code = message["d"].double()
    return code.sign() * torch.exp2(code.abs() - 4000)


COMPRESSORS = {
    "rand": Compressor(lambda keep: 1 / keep - 1, _pack_some, _unpack_some),
    "natural": Compressor(lambda keep: 1 / 8, _pack_powers, _unpack_powers),
}
