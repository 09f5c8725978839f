"""The conformance table for anybody's method: `check_method(Momentum())` runs every row and names those that fail."""

from typing import NamedTuple

from polyfed.base.errors import ConfigError, MethodError, PolyfedError
from polyfed.base.plugins import ours
from polyfed.core.algorithm import Algorithm
from polyfed.runs.userfile import blamed
from polyfed_testing.rows import ROWS

KEPT = "keep what a client remembers in `client`, and what the server does in its state, not in the method or a module"
DRAWN = "draw with polyfed.base.randomness, from a key of the run's seed, the round and the client"
EACH = "let `local_update` treat each of its clients [s, ...] alone, and `aggregate` weigh them by round.samples"
REMEDIES = {  # of each row, where it is not what was expected that says it
    "every setting has a meaning": "declare each with setting(..., doc=...)",
    "the server state says its axes": "state Server(each=..., pairs=...) for tensors with an axis of clients",
    "same seed same bits": DRAWN,
    "relabelling the clients relabels the result": f"{EACH}; round.ids are places, not weights",
    "chunks and workers do not change the models": f"{EACH}; no sum over them in `local_update`",
    "test samples are for metrics alone": "use `data`, which holds training samples alone",
    "a sample of weight two counts twice": "multiply the loss of a sample by batch.weight, or call task.gradient",
    "no message lies in the memory of a private row": "clone a tensor that is both kept and sent",
    "the downlink is a function of the server state alone": KEPT,
    "a personal model is either the uplink or unknown to it": "make what is sent of the common model alone",
    "sums over clients hold with any cohort": "change what `conserved` states only by what takes part in a round",
    "every byte is billed": "send through Down and the returned uplink alone",
    "numbers stay in the precision of the run": "make tensors like those that are given: torch.zeros_like(w)",
    "a start is the same in both precisions": "draw in one precision and round: torch.randn(size, dtype=...).to(w0)",
    "a client smaller than a batch trains": "iterate over `data`, whose batches are as long as there are samples",
    "a client that is never picked is evaluated": "start client state from the common start, task.w0",
    "a stopped run resumes to the same bits": KEPT,
    "divergence is loud": "do not clean up numbers that are not finite",
    "late replies are taken or refused": 'divide by what has come, or state Needs(synchronous="why")',
    "means are protected by a robust rule": 'average with up.mean(name) or up.sum(name), not over up["name"]',
    "it admits a newcomer": "state the axes of the server's state, and change nothing in `downlink`",
    "newcomers do not see each other": EACH,
}


class Row(NamedTuple):
    """The outcome of one row.

    Parameters
    ----------
    name, outcome : str
        The tested fact, in words; and "passed", the reason why the row does not apply, or the finding where it is
        broken.
    """

    name: str
    outcome: str


class NotConformant(AssertionError):
    """A method breaks rows of the table. `str(error)` is a line for each: method, row, finding.

    Attributes
    ----------
    rows : list of Row
        Every row that was run.
    broken : list of str
        Names of those that it breaks.
    """

    def __init__(self, method: str, rows: list[Row], broken: list[str]):
        super().__init__("\n".join(f"{method}: {row.name}: {row.outcome}" for row in rows if row.name in broken))
        self.rows, self.broken = rows, broken


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
        Rows fail, named after all were run.
    MethodError
        A function of the method fails, or returns something wrong; names its file and line.
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
    results, broken = list[Row](), list[str]()
    for name, row in chosen:
        try:
            results.append(Row(name, row(method) or "passed"))
        except MethodError:
            raise
        except Exception as e:
            if (mistake := blamed(e, _modules(method))) is not None:
                raise mistake from e
            if not isinstance(e, AssertionError | PolyfedError):
                raise
            results.append(Row(name, " ".join(str(e).split()) or "it does not hold"))
            broken.append(name)
    if broken:
        raise NotConformant(method.name, results, broken)
    return results


def _modules(method: Algorithm) -> tuple[str, ...]:
    """Modules of the author's own."""
    modules = {cls.__module__ for cls in type(method).__mro__}
    return tuple(name for name in modules if name != "builtins" and not ours(name))
