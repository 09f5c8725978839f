"""Arithmetic in the round k, such as "ceil(k/20)" or "uniform(1, 10)": how an experiment file writes a number of local
steps that grows with the rounds or differs between clients.

Nothing is evaluated but numbers, k, + - * / // % **, and ceil, floor, min, max, sqrt, uniform.
"""

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from polyfed.base.errors import ConfigError
from polyfed.base.randomness import key_of, uniform
from polyfed.base.settings import found
from polyfed.base.values import COUNTED
from polyfed.compute.batches import Each

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b, ast.FloorDiv: lambda a, b: a // b, ast.Mod: lambda a, b: a % b, ast.Pow: math.pow,
}  # fmt: skip
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: lambda a: -a, ast.UAdd: lambda a: +a}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil, "floor": math.floor, "min": min, "max": max, "sqrt": math.sqrt,
}  # fmt: skip
DRAW = "uniform"
LONGEST = 200  # characters
ALMOST_ONE = 1 - 2.0**-53  # the largest draw


@dataclass(frozen=True)
class Expression(Each):
    """Local steps of a round: `Expression("ceil(k/20)")(t)` with k = t + 1, the round counted from 1.

    text: arithmetic in k with + - * / // % ** and ceil, floor, min, max, sqrt; a fraction is rounded up.
        uniform(a, b) is an integer drawn from a, ..., b for every client and round, from (seed, round, client):
        "uniform(1, 10)" is the heterogeneous T_i of FPFC (arXiv 2211.04218), "uniform(1, ceil(k/20))" lets it grow.
    Raises ConfigError for anything else, and when a round's value is not a number of at least 1.
    """

    text: str

    def __post_init__(self):
        for u in (0.0, ALMOST_ONE) if not self.equal else (0.0,):
            self._steps(0, [u] * LONGEST)

    @property
    def equal(self) -> bool:
        """Whether all clients take the same number of steps in a round."""
        return self._draws() == 0

    def __call__(self, t: int) -> int:
        """The steps of round t, for an expression that is equal for all clients."""
        return self._steps(t, [])

    def each(self, seed: int, round: int, keys: np.ndarray) -> np.ndarray:
        """[s] steps of the clients with these keys in this round."""
        if self.equal:
            return np.full(len(keys), self(round))
        purpose = key_of("steps")
        drawn = np.stack([uniform(seed, purpose, round, keys, j) for j in range(self._draws())], axis=1)
        return np.array([self._steps(round, u) for u in drawn.tolist()], dtype=np.int64)

    def _draws(self) -> int:
        try:
            nodes = ast.walk(_parsed(self.text))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return 0  # `_steps` says what is wrong
        return sum(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == DRAW for n in nodes)

    def _steps(self, t: int, u: list[float]) -> int:
        try:
            value = _value(_parsed(self.text), t + 1, iter(u))
            steps = math.ceil(value - 1e-9)
        except (SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as e:
            reason = "is no arithmetic" if isinstance(e, SyntaxError) else " ".join(str(e).split())
            raise ConfigError(f"{self._found()}: {reason} (in round k = {t + 1})") from None
        if not 1 <= steps <= COUNTED:
            bound = "at least 1" if steps < 1 else f"at most {COUNTED}"
            raise ConfigError(f"{self._found()}: is {value:g} in round k = {t + 1}, expected {bound}")
        return steps

    def _found(self) -> str:
        expected = 'arithmetic in k such as "ceil(k/20)" or "uniform(1, 10)"'
        return f"local-steps: {found(self.text, expected)}"


@lru_cache(maxsize=64)
def _parsed(text: str) -> ast.AST:
    if len(text) > LONGEST:
        raise ValueError(f"is longer than {LONGEST} characters")
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.AST, k: int, u: Iterator[float]) -> Any:
    """u: the client's draws in [0, 1), one for every `uniform`."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name) and node.id == "k":
        return k
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        return BINARY[type(node.op)](_value(node.left, k, u), _value(node.right, k, u))
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](_value(node.operand, k, u))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        arguments = [_value(a, k, u) for a in node.args]
        if node.func.id == DRAW:
            return _draw(arguments, next(u))
        if node.func.id in FUNCTIONS:
            return FUNCTIONS[node.func.id](*arguments)
        raise ValueError(f"there is no function {node.func.id}; there are {', '.join((*FUNCTIONS, DRAW))}")
    raise ValueError(f"{ast.unparse(node)} is not allowed")


def _draw(ends: list[Any], u: float) -> int:
    """uniform(a, b): an integer from a to b."""
    if len(ends) != 2 or any(math.ceil(e) != e for e in ends) or ends[0] > ends[1]:
        raise ValueError(f"uniform({', '.join(map(str, ends))}) is not allowed, uniform(a, b) takes integers a <= b")
    low, high = map(int, ends)
    return low + int(u * (high - low + 1))
