"""Shared by all tests: one seed and one intra-op thread, so that they say the same everywhere; where data files lie;
the command line, called in this process: `cli(...)` gives the exit status and what was printed.

`make test` leaves to `make test-long` some of what nightly.txt names, with the seconds that it takes: a function whose
cases take ALONE seconds each, and of others all but every STRIDE-th case; what is marked `daily` stays. `--all`, -k and
names of tests run everything. `--fast` is what `make fast-test` runs: the first case of every function that slow.txt
does not name. `--measure` writes both files anew. Nothing is believed because it passed before."""

import os
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import polyfed.algorithms  # noqa: F401  (offers the methods)
from polyfed.base.errors import ConfigError, DataError
from polyfed.cli import call
from polyfed.core.algorithm import REGISTRY

torch.set_num_threads(1)
REGISTRY.load()
os.fsync = lambda handle: None  # tests kill processes, not machines: what was written is there

TESTS = Path(__file__).parent
SLOW, NIGHTLY = TESTS / "slow.txt", TESTS / "nightly.txt"
LIMIT = 0.1  # seconds of a first case, from which slow.txt names its function
DEAR, ALONE = 1.0, 1.5  # seconds of a function from which nightly.txt names it, and of each case
STRIDE = 12  # one case of so many stays
PROMISES = {"sites": 4.0, "privacy": 4.0}  # seconds up to which all cases of these rooms stay


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="the first case of every test that slow.txt does not name")
    parser.addoption("--without", default="", help="A,B: packages that tests do not find, nor processes of theirs")
    parser.addoption("--measure", action="store_true", help="write slow.txt and nightly.txt anew")
    parser.addoption("--all", action="store_true", help="also what nightly.txt leaves out")


def pytest_configure(config):
    if without := config.getoption("--without"):
        hide(config, without.split(","))
    if config.getoption("--measure") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())


def picked(config) -> bool:
    """Whether some tests were asked for, by -k, by name, or as those that failed."""
    return bool(config.option.keyword or config.getoption("lf", False)) or any("::" in arg for arg in config.args)


def hide(config, packages: list[str]) -> None:
    """In this process, and in those that tests start: Python imports sitecustomize as it starts."""
    sys.modules |= dict.fromkeys(packages)
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    Path(folder.name, "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({packages})\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder.name, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that needs a package which --without hides is skipped."""
    try:
        return (yield)
    except ConfigError as e:
        if item.config.getoption("--without") and "needs the package polyfed_" in str(e):
            pytest.skip(str(e))
        raise


def function_of(nodeid: str) -> str:  # of the conformance table, the row
    name, _, case = nodeid.partition("[")
    return f"{name}[{case.rpartition('-')[2]}" if name.endswith("::test_row") else name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The cases of a file go to one worker, which makes once what they share; of the conformance table, a method's."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.rpartition("-")[0] if "::test_row[" in nodeid else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Files(config, log)


@pytest.hookimpl(trylast=True)  # of the cases that markers and -k have left
def pytest_collection_modifyitems(config, items):
    measure, fast = config.getoption("--measure"), config.getoption("--fast")
    kept = items
    if not (measure or config.getoption("--all") or picked(config)):
        kept = [item for cases in by_function(kept).values() for item in daily(cases)]
    if fast:
        slow = set(SLOW.read_text().split())
        kept = [cases[0] for name, cases in by_function(kept).items() if name not in slow]
    wanted = {id(item) for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in wanted])
    items[:] = [item for item in items if id(item) in wanted]


def by_function(items) -> dict[str, list]:
    found: dict[str, list] = {}
    for item in items:
        found.setdefault(function_of(item.nodeid), []).append(item)
    return found


@cache
def nightly() -> dict[str, float]:
    words = NIGHTLY.read_text().split()
    return dict(zip(words[1::2], map(float, words[::2]), strict=True))


def daily(cases: list) -> list:
    """The cases of a function that `make test` runs: of rows, which share a method's runs, the same methods."""
    name = function_of(cases[0].nodeid)
    seconds = nightly().get(name, 0.0)
    if seconds <= PROMISES.get(name.split("/")[1], DEAR):
        return cases
    shift = 0 if "[" in name else zlib.crc32(name.encode())
    kept = cases[shift % min(STRIDE, len(cases)) :: STRIDE] if seconds <= ALONE * len(cases) else []
    return kept + [case for case in cases if case.get_closest_marker("daily") and case not in kept]


class Stopwatch:
    """Seconds of each test, with what is set up for it."""

    def __init__(self):
        self.cases: dict[str, Counter] = defaultdict(Counter)  # function -> case -> seconds

    def pytest_runtest_logreport(self, report):
        if "::runTest" not in report.nodeid:  # of hypothesis
            self.cases[function_of(report.nodeid)][report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        slow = [n for n, of in self.cases.items() if next(iter(of.values())) > LIMIT]
        SLOW.write_text("".join(f"{name}\n" for name in sorted(slow)))
        dear = sorted((n, of.total()) for n, of in self.cases.items() if of.total() > DEAR)
        NIGHTLY.write_text("".join(f"{seconds:.1f} {name}\n" for name, seconds in dear))


@pytest.fixture(autouse=True)
def seeded():
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a stack for every device that might be there


@pytest.fixture(autouse=True)
def no_methods_of_other_tests(request):
    """A test sees the methods of its own file; names of a user's file may be taken again by another test."""
    from polyfed.core.algorithm import REGISTRY

    own = ("polyfed", request.module.__name__)
    others = {n: c for n, c in REGISTRY.items() if not c.__module__.startswith(own)}
    for name in others:
        del REGISTRY[name]
    yield
    for name in [name for name, cls in REGISTRY.items() if cls.__module__.startswith("polyfed_user_")]:
        del REGISTRY[name]
    REGISTRY.update(others)
    if userfile := sys.modules.get("polyfed.runs.userfile"):
        userfile._execute.cache_clear()


@pytest.fixture
def undrawn(monkeypatch):
    """No figures, which are most of what a short run costs: for tests that look at no page."""
    monkeypatch.setattr("polyfed.report.page.to_svg", lambda figure, name, title, description="": "<svg></svg>")
    monkeypatch.setattr("polyfed.report.style.save", lambda figure, path: path.touch())  # once page.py has the real one


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Install the package of docs/packages.md, or files like its, for this test; a second call adds another."""
    import acme

    def add(files=acme.FILES, name="site", version=None):
        monkeypatch.syspath_prepend(str(acme.install(tmp_path / name, files, version)))

    yield add
    acme.forget()


@pytest.fixture(scope="session")
def data_dir():
    """A function: the folder of data files, or skip when `wanted` is not in it."""
    root = Path(os.environ.get("POLYFED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")

    def find(wanted):
        if not (root / wanted).exists():
            pytest.skip(f"{wanted} is not in {root}; set POLYFED_DATA")
        return root

    return find


@pytest.fixture(scope="session")
def refused():
    """A context: the block must raise DataError, in one line that holds every given word."""

    @contextmanager
    def check(*words):
        with pytest.raises(DataError) as caught:
            yield caught
        line = str(caught.value)
        assert line
        for word in words:
            assert str(word) in line, line

    return check


class Said(NamedTuple):
    status: int
    out: str
    err: str

    def done(self) -> "Said":
        """Itself, if it has succeeded."""
        assert self.status == 0, self.err
        return self

    def line(self, status: int | tuple[int, ...], *facts: str) -> None:
        """It has failed with this status, or one of these, and with a line, or a list, that holds the facts."""
        assert self.status in (status if isinstance(status, tuple) else (status,)), self
        assert sum(not line.startswith("  - ") for line in self.err.splitlines()) == 1, self.err
        assert all(fact in self.err for fact in facts), self.err


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch) -> Callable[..., Said]:
    """Run a command in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Said:
        capsys.readouterr()
        status = call([str(w) for w in words])
        return Said(status, *capsys.readouterr())

    return run


# A method that presses Ctrl-C in its second round, the first time it gets there.
STOPPER = '''
import signal
from dataclasses import dataclass
from pathlib import Path

from polyfed import Personal, local_sgd


@dataclass(frozen=True)
class Stopper(Personal):
    """Local training that interrupts itself once."""

    lr: float = 0.1
    marker: str = "stopped"

    def local_update(self, task, client, down, data, round):
        return {"w": local_sgd(task, client["w"], data, self.lr)}, {"w": client["w"]}

    def aggregate(self, server, up, round):
        if round.t == 1 and round.n > 2 and not Path(self.marker).exists():  # not in the rehearsal
            Path(self.marker).touch()
            signal.raise_signal(signal.SIGINT)
        return {"w": up["w"].mean(0)}
'''


@pytest.fixture
def stopper(tmp_path):
    path = tmp_path / "stopper.py"
    path.write_text(STOPPER)
    return path
