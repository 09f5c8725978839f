"""Arithmetic of one unknown, such as "(x - 32) / 1.8", read from its syntax tree and never run as code."""

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polyfed.base.errors import ConfigError
from polyfed.base.values import shown

if TYPE_CHECKING:
    import numpy as np

SIGNS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LONGEST = 200  # characters
FEW, LARGE = 3, 1e6  # constants of a change of units, and their size: more, and larger ones, make steps by rounding


def formula(text: str) -> "Callable[[np.ndarray], np.ndarray]":
    """Arithmetic such as "x / 18.02" as a function of [N] numbers; a division by 0 gives one that is not finite."""
    compute = arithmetic(text)

    def computed(x: "np.ndarray") -> "np.ndarray":
        import numpy as np  # here, because settings are read without it

        with np.errstate(all="ignore"):
            try:
                return np.asarray(compute(x), dtype=np.float64)
            except (ZeroDivisionError, OverflowError):  # of numbers alone
                return np.full(len(x), np.nan)

    return computed


def arithmetic(text: str) -> Callable[[Any], Any]:
    """Arithmetic as a function of anything that has these operations. Raises ConfigError as `formula`."""
    wrong = ConfigError(f"found {shown(text)}, expected arithmetic of x with + - * / and brackets, such as x / 18.02")
    try:
        tree = ast.parse(text.strip(), mode="eval").body if len(text) <= LONGEST else ast.Constant("")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise wrong from None

    def made(node: ast.expr) -> Callable[[Any], Any]:
        match node:
            case ast.Name(id="x"):
                return lambda x: x
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return lambda _: float(value)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS:
                sign, a, b = SIGNS[type(op)], made(left), made(right)
                return lambda x: sign(a(x), b(x))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
                sign, a = SIGNS[type(op)], made(operand)
                return lambda x: sign(a(x))
            case _:
                raise wrong

    function = made(tree)
    if not any(isinstance(node, ast.Name) for node in ast.walk(tree)):
        raise wrong
    return function


def affine(text: str) -> bool:
    """True for arithmetic that is a x + b of few constants: a change of units, which no value is singled out by."""
    from numpy.polynomial import Polynomial  # slow to import

    numbers = [node.value for node in ast.walk(ast.parse(text.strip())) if isinstance(node, ast.Constant)]
    if len(numbers) > FEW or any(v and not 1 / LARGE <= abs(v) <= LARGE for v in map(float, numbers)):  # pyrefly: ignore[bad-argument-type]
        return False
    try:
        polynomial = arithmetic(text)(Polynomial([0.0, 1.0]))
    except (TypeError, ZeroDivisionError, OverflowError):
        return False
    return polynomial.trim().degree() <= 1
