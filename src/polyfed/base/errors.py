"""Errors that a user can act on: one line that says what, where, what was found and what was expected.

The command line prints the line and exits non-zero; a traceback means a bug in polyfed, not in the input.
"""

from collections.abc import Iterable


class PolyfedError(Exception):
    """Base of every error meant for the user. `str(error)` is one complete line."""

    key: str = ""  # the setting at fault, where there is one

    def __str__(self) -> str:
        """The line; newlines and control characters in a user's name or path are escaped."""
        return printable(super().__str__())


class ConfigError(PolyfedError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(PolyfedError):
    """A data file or a client's data cannot be used as it is."""


class ModelError(PolyfedError):
    """A model cannot be trained as it is (BatchNorm, wrong output shape, ...)."""


class MethodError(PolyfedError):
    """A method of the user's own fails, or gives back what it must not. Names the file and the line."""


class Diverged(PolyfedError):
    """Training produced a number that is not finite. Names the round and the client."""


class RunError(PolyfedError):
    """A run folder or checkpoint is missing, damaged, or does not fit what is asked of it."""


def printable(text: str) -> str:
    """The text with newlines and control characters escaped, which a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def few(names: Iterable[object], most: int = 5) -> str:
    """The first `most` names, and how many more there are."""
    listed = list(map(str, names))
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def closest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest known name, or an empty string."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
