"""Shared by all tests: one seed and one intra-op thread, so that they say the same everywhere; where data files lie;
the command line, called in this process: `cli(...)` gives the exit status and what was printed.

`--fast` is what `make fast-test` runs: of every test function the first case, without those that slow.txt names.
`--measure` runs the first case of all and writes slow.txt anew: the functions whose case took more than LIMIT seconds.

What takes long, the tests of the folders of `CERTIFICATES` and `WHOLE` that slow.txt names and any that is marked
`steady`, is run where a file that it reaches has changed since its file last passed, which steady.txt knows; comments
and docstrings do not count. Outside of those folders it is any file of the package, or of the docs for theirs.
`--all`, as in `make test-long`, runs all of them, and writes it anew. What is chosen by -k or by name is run.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from graph import digest, digest_of_all
from polyfed.cli import call

torch.set_num_threads(1)
os.fsync = lambda handle: None  # tests kill processes, not machines: what was written is there

TESTS = Path(__file__).parent
SLOW = TESTS / "slow.txt"
LIMIT = 0.25
STEADY = TESTS / "steady.txt"
TRAINING = {"native", "compute", "core", "engines", "algorithms", "threats", "models"}  # rooms that decide numbers
CERTIFICATES = {  # folders of tests, and the rooms and packages in which a change calls for their slow ones again
    "compute": {"native", "compute"},
    "algorithms": TRAINING,
    "papers": TRAINING | {"recipes", "polyfed_papers"},
    "recipes": {"recipes", "polyfed_papers"},
}
WHOLE = {"clinical", "conformance", "engines", "report", "studies", "threats"}  # which go by all files that they reach


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="the first case of every test that slow.txt does not name")
    parser.addoption("--without", default="", help="A,B: packages that tests do not find, nor processes of theirs")
    parser.addoption("--measure", action="store_true", help="write slow.txt anew")
    parser.addoption("--all", action="store_true", help="certificates too whose files have not changed")


def pytest_configure(config):
    if without := config.getoption("--without"):
        hide(config, without.split(","))
    if config.getoption("--measure") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())
    if config.getoption("--all") and not picked(config) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Steady())


def picked(config) -> bool:
    """Whether some tests were asked for, by -k or by name."""
    return bool(config.option.keyword) or any("::" in arg for arg in config.args)


def hide(config, packages: list[str]) -> None:
    """In this process, and in those that tests start: Python imports sitecustomize as it starts."""
    sys.modules |= dict.fromkeys(packages)
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    Path(folder.name, "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({packages})\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder.name, *filter(None, [os.environ.get("PYTHONPATH")])])


def function_of(nodeid: str) -> str:
    return nodeid.split("[")[0]


def folder_of(nodeid: str) -> str:
    return nodeid.split("/")[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The cases of a file go to one worker, which makes once what they share; of the conformance table, a method's."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.rpartition("-")[0] if "::test_row[" in nodeid else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Files(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["same"] = [] if node.config.getoption("--all") else unchanged()


@pytest.hookimpl(trylast=True)  # of the cases that markers and -k have left
def pytest_collection_modifyitems(config, items):
    measure, slow = config.getoption("--measure"), set(SLOW.read_text().split())
    if not measure and not config.getoption("--all") and not picked(config):
        same = config.workerinput["same"] if hasattr(config, "workerinput") else unchanged()
        skip = pytest.mark.skip("nothing that it reaches has changed since it passed (make test-long)")
        for item in items:
            by_time = function_of(item.nodeid) in slow and folder_of(item.nodeid) in CERTIFICATES.keys() | WHOLE
            if (by_time or item.get_closest_marker("steady")) and item.nodeid.split("::")[0] in same:
                item.add_marker(skip)
    if measure or config.getoption("--fast"):
        slow = set() if measure else slow
        first = {function_of(item.nodeid): item for item in reversed(items)}
        kept = [item for name, item in first.items() if name not in slow]
        wanted = {id(item) for item in kept}
        left = [item for item in items if id(item) not in wanted]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if id(item) in wanted]


def passed() -> dict[str, str]:
    """The state in which a file of certificates last passed."""
    return dict(line.split() for line in STEADY.read_text().splitlines())


@cache
def unchanged() -> list[str]:
    """Files of certificates that would pass as they last did."""
    return [file for file, of in passed().items() if of == state(file)]


def state(file: str) -> str:
    """Of a file of tests, by its path from the root, and of what it reaches."""
    path, folder = TESTS.parent / file, folder_of(file)
    if not path.is_file():
        return ""
    if folder in CERTIFICATES.keys() | WHOLE:
        return digest(path, CERTIFICATES.get(folder, TRAINING), folder in WHOLE)
    return digest_of_all(path)


class Steady:
    """The certificates' files, all of whose tests have passed."""

    def __init__(self):
        self.failed = dict[str, bool]()

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.split("::")[0]
        if folder_of(file) in CERTIFICATES.keys() | WHOLE or "mark.steady" in (TESTS.parent / file).read_text():
            self.failed[file] = self.failed.get(file, False) or report.failed

    def pytest_sessionfinish(self):
        known = passed() | {file: state(file) for file, failed in self.failed.items() if not failed}
        STEADY.write_text(
            "".join(f"{file} {of}\n" for file, of in sorted(known.items()) if (TESTS.parent / file).is_file())
        )


class Stopwatch:
    """Seconds of each test, with what is set up for it."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[function_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self):
        slow = sorted(n for n, seconds in self.seconds.items() if seconds > LIMIT and not n.endswith("::runTest"))
        SLOW.write_text("".join(f"{name}\n" for name in slow))


@pytest.fixture(autouse=True)
def seeded():
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a stack for every device that might be there


@pytest.fixture(autouse=True)
def no_methods_of_other_tests(request):
    """Of the methods that files of tests define, a test sees its own; a user's file registers its methods under names
    that a file of another test may take again."""
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


class Said(NamedTuple):
    """What one command did."""

    status: int
    out: str
    err: str


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch) -> Callable[..., Said]:
    """Run a command in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Said:
        capsys.readouterr()
        status = call([str(w) for w in words])
        return Said(status, *capsys.readouterr())

    return run
