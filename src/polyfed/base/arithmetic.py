"""Arithmetic and conditions of columns, "(x - 32) / 1.8" and "time < 0", read from syntax and never run as code."""

import ast
import keyword
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

from polyfed.base.errors import ConfigError
from polyfed.base.plugins import sibling
from polyfed.base.text import nfc
from polyfed.base.values import shown

SIGNS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
COMPARED: dict[type, Any] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
OWN = "x"  # the column that is computed
QUOTED = re.compile("`([^`]+)`")  # a name that is no word
LONGEST, HIGHEST = 200, 10  # characters; power
FEW, LARGE = 3, 1e6  # constants of a change of units, and their size: more, and larger ones, make steps by rounding
ARITHMETIC = "arithmetic of x or of columns with + - * / ** and brackets, such as x / 18.02, or units, such as lb -> kg"
CONDITION = "a condition on columns, such as time < 0, age > 120 or sex == 'u'"


@dataclass(frozen=True)
class Formula:
    """Arithmetic or a condition: what it says of columns, whose numbers `of(name)` has.

    A condition is 1 where it surely holds and 0 where it surely does not; a gap makes it uncertain. `of(name, text)` is
    where cells are a text.
    """

    text: str
    names: tuple[str, ...]  # of the columns; x, its own
    value: Callable[[Callable[..., Any]], Any]


def arithmetic(text: str, column: str = "") -> Formula:
    """Arithmetic such as "x / 18.02" or "weight / height ** 2", or units such as "lb -> kg", of a column's name.

    Raises ConfigError, in one line, for anything else.
    """
    read = _Syntax(plain(text, column), ARITHMETIC, column)
    value = read.number(read.tree)
    if not read.names:
        raise read.wrong
    return Formula(text, tuple(read.names), value)


def plain(text: str, column: str) -> str:
    """A change of units as arithmetic of x; other arithmetic as it is."""
    if "->" not in text and "→" not in text:
        return text
    return str(sibling("polyfed_audit.changes", f"units: {shown(text)}").change(text, column))


def condition(text: str) -> Formula:
    """A condition such as "time < 0 or sex == 'u'", with and, or, not and brackets. Raises ConfigError."""
    read = _Syntax(text, CONDITION)
    value = read.truth(read.tree)
    if not read.names:
        raise read.wrong
    return Formula(text, tuple(read.names), value)


def word(name: str) -> str:
    """A column's name as formulas have it: `in brackets such as these` where it is no word."""
    return name if name.isidentifier() and not keyword.iskeyword(name) and name != OWN else f"`{name}`"


class _Syntax:
    """The functions that a text's syntax tree stands for, and the names of columns in it, in order."""

    def __init__(self, text: str, expected: str, column: str = ""):
        self.wrong = ConfigError(f"found {shown(text)}, expected {expected}")
        self.column, self.names, self.quoted = column, dict[str, None](), dict[str, str]()
        for k, name in enumerate(QUOTED.findall(text)):
            self.quoted[f"_{k}_"] = nfc(name)
            text = text.replace(f"`{name}`", f"_{k}_", 1)
        try:
            self.tree = ast.parse(text.strip(), mode="eval").body if len(text) <= LONGEST else ast.Constant("")
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise self.wrong from None

    def name(self, word: str) -> str:
        """The column of a word."""
        name = self.quoted.get(word, nfc(word))
        name = OWN if name == self.column else name
        self.names[name] = None
        return name

    def number(self, node: ast.expr) -> Callable[[Callable[..., Any]], Any]:
        match node:
            case ast.Name(id=word):
                name = self.name(word)
                return lambda of: of(name)
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return lambda _: float(value)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() | float() as power)):
                if isinstance(power, bool) or power > HIGHEST:
                    raise self.wrong
                base = self.number(left)
                return lambda of: base(of) ** power
            case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS:
                sign, a, b = SIGNS[type(op)], self.number(left), self.number(right)
                return lambda of: sign(a(of), b(of))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
                sign, a = SIGNS[type(op)], self.number(operand)
                return lambda of: sign(a(of))
            case _:
                raise self.wrong

    def truth(self, node: ast.expr) -> Callable[[Callable[..., Any]], Any]:
        """Of 1 and 0 and what is between, `and` is the product: it is 1 only of two that are sure."""
        match node:
            case ast.BoolOp(op=ast.And(), values=values):
                parts = [self.truth(v) for v in values]
                return lambda of: reduce(operator.mul, [part(of) for part in parts])
            case ast.BoolOp(op=ast.Or(), values=values):
                parts = [self.truth(v) for v in values]
                return lambda of: 1 - reduce(operator.mul, [1 - part(of) for part in parts])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                part = self.truth(operand)
                return lambda of: 1 - part(of)
            case ast.Compare(
                left=ast.Name(id=word),
                ops=[ast.Eq() | ast.NotEq() as op],
                comparators=[ast.Constant(value=str() as text)],
            ):
                name, unlike = self.name(word), isinstance(op, ast.NotEq)
                return lambda of: abs(unlike - of(name, text))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARED for op in ops):
                sides, signs = [self.number(side) for side in (left, *others)], [COMPARED[type(op)] for op in ops]
                return lambda of: reduce(operator.mul, _compared([side(of) for side in sides], signs))
            case _:
                raise self.wrong


def _compared(values: list[Any], signs: list[Any]) -> list[Any]:
    """Each comparison of two neighbours, 1 or 0; between them where one is a gap."""
    gaps = [((a != a) | (b != b)) * 0.5 for a, b in pairwise(values)]
    return [gap + (gap == 0) * sign(a, b) for gap, sign, (a, b) in zip(gaps, signs, pairwise(values), strict=True)]


def affine(text: str, column: str = "") -> bool:
    """True for arithmetic that is a x + b of few constants: a change of units, which no value is singled out by."""
    from numpy.polynomial import Polynomial  # slow to import

    formula = arithmetic(text, column)
    tree = _Syntax(plain(text, column), ARITHMETIC, column).tree
    numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if formula.names != (OWN,) or len(numbers) > FEW:
        return False
    if any(v and not 1 / LARGE <= abs(v) <= LARGE for v in map(float, numbers)):  # pyrefly: ignore[bad-argument-type]
        return False
    try:
        polynomial = formula.value(lambda _: Polynomial([0.0, 1.0]))
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        return False
    return polynomial.trim().degree() <= 1
