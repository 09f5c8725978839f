"""Errors that a user can act on, in one line: what, where, what was found and what was expected."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class PolyfedError(Exception):
    """Base of every error meant for the user. `str(error)` is one complete line."""

    key: str = ""  # the setting at fault, where there is one
    # for other machines: the line may name paths and cells, which are for the machine's own user
    outside: str = "it failed"

    def __str__(self) -> str:
        """The line; newlines and control characters in a user's name or path are escaped."""
        return printable(super().__str__())


class ConfigError(PolyfedError):
    """A setting is unknown, of the wrong type or out of range."""

    outside = "a setting does not fit"


class DataError(PolyfedError):
    """A data file or a client's data cannot be used; `column`, the one at fault, may be named outside."""

    outside = "its file does not fit"

    def __init__(self, line: str, column: str = ""):
        super().__init__(line)
        if column:
            self.outside = f"{self.outside}, column {column!r}"


class Fault(str):
    """One line on what stands in the way, and what in the table [columns] would mend it."""

    repair: Mapping[str, Any]

    def __new__(cls, line: str, repair: Mapping[str, Any] | None = None) -> "Fault":
        fault = super().__new__(cls, line)
        fault.repair = repair or {}
        return fault


class Faults(DataError):
    """All that stands in the way of using some files; a terminal shows it as a list."""

    def __init__(self, where: str, faults: Sequence[str]):
        self.where, self.faults = where, faults
        alone = all(fault.startswith(where) for fault in faults)
        super().__init__(f"{'' if alone else f'{where}: '}{'; '.join(faults)}")


class ModelError(PolyfedError):
    """A model cannot be trained as it is (BatchNorm, wrong output shape, ...)."""

    outside = "the model does not fit"


class MethodError(PolyfedError):
    """A method of the user's own fails, or gives back what it must not. Names the file and the line."""

    outside = "the method failed"


class Diverged(PolyfedError):
    """Training produced a number that is not finite. Names the round and the client."""

    outside = "training diverged"


class RunError(PolyfedError):
    """A run folder or checkpoint is missing, damaged, or does not fit what is asked of it."""

    outside = "it cannot go on"


class Refusal(RunError):
    """A site does not do what it is asked; the server is told `outside`, or the whole line without it."""

    def __init__(self, line: str, outside: str = ""):
        super().__init__(line)
        self.outside = outside or line


class Forbidden(Refusal):
    """A site's policy forbids what is asked, by its setting `key`."""

    def __init__(self, line: str, key: str):
        super().__init__(line)
        self.key = key


def printable(text: str) -> str:
    """The text with newlines and control characters escaped, which a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def few(names: Iterable[object], most: int = 5) -> str:
    """The first `most` names, and how many more there are."""
    listed = list(map(str, names))
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def closest(word: str, names: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest known name, or an empty string."""
    import difflib

    near = difflib.get_close_matches(word, list(names), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
