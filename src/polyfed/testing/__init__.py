"""The conformance table for anybody's method: `check_method(Momentum())` runs every row and names the one that fails.

Every row is a function `(method) -> None` on one small federation; it raises `NotConformant` or passes, or returns a
sentence where it does not apply. The project's own tests run the same rows on every built-in method.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from polyfed.base.errors import ConfigError, MethodError, PolyfedError
from polyfed.core.algorithm import Algorithm
from polyfed.runs.userfile import blamed
from polyfed.testing.rows import ROWS


class NotConformant(AssertionError):
    """A method breaks a row of the table. `str(error)` is one line: method, row, what was found."""


class Row(NamedTuple):
    """The outcome of one row.

    Parameters
    ----------
    name : str
        The fact that was tested, in words.
    outcome : str
        "passed", or why the row does not apply.
    """

    name: str
    outcome: str


def check_method(method: Algorithm, rows: str | None = None) -> list[Row]:
    """Run the conformance table on a method; it takes some seconds.

    Parameters
    ----------
    method : Algorithm
        An instance of a class that derives from `Algorithm`.
    rows : str or None
        Only the rows whose name contains this word.

    Returns
    -------
    list of Row
        One for each row that was run.

    Raises
    ------
    NotConformant
        For the first row that fails.
    MethodError
        A function of the method fails, or gives back what it must not; names its file and line.
    ConfigError
        `method` is not an instance of such a class, or `rows` is in no row's name.
    """
    if not isinstance(method, Algorithm):
        raise ConfigError(
            f"method: found {method!r}, expected an instance of a class that derives from polyfed.Algorithm"
        )
    if rows is not None and not isinstance(rows, str):
        raise ConfigError(f"rows: found {rows!r}, expected text")
    chosen = [(row.__name__.replace("_", " "), row) for row in ROWS]
    chosen = [(name, row) for name, row in chosen if rows is None or rows in name]
    if not chosen:
        raise ConfigError(f"rows: found {rows!r}, expected a part of a row's name, such as seed")
    found: list[Row] = []
    for name, row in chosen:
        with _named(method, name):
            found.append(Row(name, row(method) or "passed"))
    return found


@contextmanager
def _named(method: Algorithm, row: str) -> Iterator[None]:
    modules = {cls.__module__ for cls in type(method).__mro__}
    own = tuple(name for name in modules if name.split(".")[0] not in ("polyfed", "builtins"))
    try:
        yield
    except MethodError:
        raise
    except Exception as e:
        if (mistake := blamed(e, own)) is not None:
            raise mistake from e
        if not isinstance(e, AssertionError | PolyfedError):
            raise
        raise NotConformant(f"{method.name}: {row}: {' '.join(str(e).split()) or 'it does not hold'}") from e
