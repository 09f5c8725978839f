"""The fuzzers at length, `make fuzz`: new inputs in every run, one line per kind, and the input of every failure.

The checks are those of the test files beside it. `--n 100` tries 100 of each kind. A
failure is printed with its input; `--seed` gives the same inputs again.
"""

import argparse
import collections
import contextlib
import secrets
import signal
import sys
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path
from unittest import mock

import test_fuzz_api as api
import test_fuzz_config as config
import test_fuzz_files as files
import test_fuzz_folders as folders
import test_fuzz_runs as runs
import test_fuzz_settings as texts
from face import Face
from hypothesis import Phase, given, seed
from hypothesis import strategies as st

from fuzz import bounded
from polyfed.runs import build

LIMIT = 60  # seconds for one input, on a busy machine; those asked to train long are not trained


class Hang(BaseException):
    """One input took longer than LIMIT."""


class Stop(BaseException):
    """Enough (SIGTERM): what was tried so far is printed."""


def kinds(place):
    """What is tried: (name, how many, inputs, check)."""
    whole = folders.runs(tempfile.mkdtemp(dir=place))
    face = Face(Path(tempfile.mkdtemp(dir=place)))
    typed = st.one_of(
        st.tuples(st.just(texts.check), st.tuples(st.sampled_from(texts.KEYS), texts.TEXTS)),
        st.tuples(st.just(texts.read), st.tuples(texts.TEXTS, st.sampled_from(texts.HEADS))),
        st.tuples(st.just(api.make), st.tuples(api.HYPER)),
    )
    return (
        ("configurations", 20_000, config.tables(), config.check),
        ("settings", 5_000, typed, lambda pair: pair[0](*pair[1])),
        ("calls of fit", 2_000, api.arguments(3), api.fit),
        ("runs", 500, runs.CASES, runs.check),
        ("public calls", 20_000, api.misuses(face), lambda pair: face.misuse(*pair)),
        ("files", 10_000, files.files(), lambda file: files.check(place, *file)),
        ("folders", 2_000, folders.damages(), lambda damage: folders.check(place, whole, *damage, figures=True)),
    )


def run(name, count, inputs, check, at):
    """Try `count` inputs; (how often which outcome, the failures' texts, the slowest input's seconds)."""
    found, failures, slowest = collections.Counter(), {}, 0.0

    def ended(number, _):
        raise Hang if number == signal.SIGALRM else Stop

    signal.signal(signal.SIGALRM, ended)
    signal.signal(signal.SIGTERM, ended)

    @seed(at)
    @bounded(count, phases=[Phase.generate], derandomize=False)
    @given(inputs)
    def attempt(one):
        nonlocal slowest
        start = time.perf_counter()
        signal.alarm(LIMIT)
        try:
            outcome = check(one)
        except Exception as e:
            outcome, cause = "failed", e.__cause__ or e
            where = cause.__traceback__
            while where.tb_next is not None:
                where = where.tb_next
            at = f"{where.tb_frame.f_code.co_filename.rpartition('polyfed/')[2]}:{where.tb_lineno}"
            failures.setdefault(f"{type(cause).__name__} at {at}", f"{one!r}: {e}")
        except Hang:
            outcome = "failed"
            failures.setdefault("hang", repr(one))
        signal.alarm(0)
        slowest = max(slowest, time.perf_counter() - start)
        found[outcome] += 1

    with contextlib.suppress(Stop):
        attempt()
    return found, failures, slowest


def main(argv=None) -> int:
    """Print one line per kind; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = "configurations, settings, calls, runs, public, files, folders"
    parser.add_argument("kinds", nargs="*", help=f"{names}; default: all")
    parser.add_argument("--n", type=int, help="inputs of each kind; default: as many as `kinds` has")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    asked = parser.parse_args(argv)
    at = secrets.randbelow(2**32) if asked.seed is None else asked.seed
    print(f"seed {at}", flush=True)
    bad = 0
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.chdir(place),  # where a file that is called "x" does no harm
        warnings.catch_warnings(),
        mock.patch.object(build, "load", read_once(build.load)),
    ):
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)  # a cast that overflows is silent nonsense
        for name, count, inputs, check in kinds(place):
            if asked.kinds and name.split()[0] not in asked.kinds:
                continue
            start = time.perf_counter()
            found, failures, slowest = run(name, asked.n or count, inputs, check, at)
            took = f"{time.perf_counter() - start:.0f} s, slowest {slowest:.1f} s"
            print(
                f"{name}: tried {found.total()}, worked {found['worked']}, refused {found['refused']}, "
                f"failed {found['failed']} ({took})",
                flush=True,
            )
            for kind, text in failures.items():
                print(f"  {kind}: {text[:1500]}", flush=True)
            bad += found["failed"]
    return int(bad > 0)


def read_once(load):
    """Read a named data set once; what is refused is refused anew."""
    read = cache(lambda name, folder, options: load(name, folder, **dict(options)))

    def cached(name, folder=None, **options):
        try:
            return read(name, folder, tuple(options.items()))
        except TypeError:  # a value that has no hash
            return load(name, folder, **options)

    return cached


if __name__ == "__main__":
    sys.exit(main())
