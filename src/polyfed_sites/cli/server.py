"""polyfed server: experiments over real sites, which keep their data."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from polyfed import report
from polyfed.base.errors import ConfigError, PolyfedError, closest
from polyfed.cli.console import results, stderr
from polyfed.cli.folders import claimed
from polyfed.runs import stop
from polyfed.runs.result import Result
from polyfed_sites.audit import SERVER, Audit
from polyfed_sites.cli.events import Events
from polyfed_sites.commands import Server
from polyfed_sites.hub import Channel, Hub
from polyfed_sites.keys import Keys, host_of, private
from polyfed_sites.server import is_over, serve
from polyfed_sites.status import status_page

AT_ONCE = 4
LOOK = 0.5  # seconds between two looks at a folder of experiments
Say = Callable[[str], None]


@private()
def server(o: Server) -> int:
    """Wait for the sites, train, and report."""
    if not o.host.startswith("unix:"):
        host_of(o.host)
    since = stop.interruptions()
    here, alone = Keys(o.keys), len(o.experiment) == 1 and not o.experiment[0].is_dir()
    names = [path.stem for path in o.experiment if not path.is_dir()]
    if alone and o.at_once is not None:
        raise ConfigError("--at-once: has no effect with one experiment")
    for k, name in enumerate(names):
        if name in names[:k]:
            raise ConfigError(f"{o.experiment[k]}: found a second experiment named {name!r}, expected one")
    wanted = Wanted(o.sites or (), here, None if any(path.is_dir() for path in o.experiment) else names)
    with stop.interruptible(terminable=True) as asked:
        if alone:
            with claimed(o.out, names[0], o.force, o.resume) as folder, served(o, here, folder) as hub:
                status = train(o, o.experiment[0], folder, wanted(names[0]), hub, hub.say)
        else:
            folder = o.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-server"
            with served(o, here, folder) as hub:
                status = Queue(o, hub, folder, wanted).run(asked)
    return stop.status(since) if status == stop.STOPPED else status


class Wanted:
    """Which sites take part in a run, by its name: names, or a number; what would be waited for in vain is refused."""

    def __init__(self, given: "list[str] | tuple[()]", keys: Keys, runs: list[str] | None):
        self.known, self.folder = sorted({name for name, _ in keys.accepted().values()}), keys.folder
        self.of: dict[str, int | list[str]] = {"": self._read(str(len(self.known)))}
        for text in given:
            run, _, sites = text.rpartition("=")
            if run and runs is not None and run not in runs:
                raise ConfigError(f"--sites: found no run {run!r}{closest(run, runs)}, expected {', '.join(runs)}")
            self.of[run] = self._read(sites)

    def __call__(self, run: str) -> int | list[str]:
        return self.of.get(run, self.of[""])

    def _read(self, sites: str) -> int | list[str]:
        then = f"{self.folder}; polyfed keys add"
        if sites.isdigit():
            if not 1 <= int(sites) <= len(self.known):
                n = len(self.known)
                raise ConfigError(f"--sites: found {sites}, and {n} sites have a valid key in {then}")
            return int(sites)
        names = [name.strip() for name in sites.split(",")]
        for k, name in enumerate(names):
            if name in names[:k]:
                raise ConfigError(f"--sites: found {name!r} twice, expected each once")
            if name not in self.known:
                near = closest(name, self.known)
                raise ConfigError(f"--sites: {name!r} has no valid key in {self.folder}{near}; polyfed keys add")
        return names


@contextmanager
def served(o: Server, keys: Keys, folder: Path) -> Generator[Hub]:
    """The server's port, open inside. folder: of its events"""
    say = Events(folder, o.quiet)
    for line in keys.warnings(o.certificate):
        say(f"note: {line}")
    with closing(Hub(keys, say, o.host, o.port, status_page, o.certificate, o.clients)) as hub:
        say(f"listening at {hub.gate.where}; status: https://{keys.address}{hub.path}")
        yield hub


def train(o: Server, file: Path, folder: Path, sites: int | list[str], hub: Hub, say: Say) -> int:
    """One run, in a folder that is claimed. Returns the exit status."""
    there, begun = Channel(hub, folder, audit=Audit(folder, SERVER)), time.monotonic()

    def noted(line: str) -> None:
        there.said = line
        say(line)

    try:
        run = serve(
            file, there, folder, sites=sites, resume=o.resume, wait=o.wait, quorum=o.quorum, most_share=o.most_share,
            say=noted, trained=partial(_report, folder),
        )  # fmt: skip
        there.over = "Finished" if run.status == "finished" else "Stopped"
    except BaseException as e:
        there.over = f"Ended: {e}" if isinstance(e, PolyfedError) else "Stopped"
        raise
    finally:
        there.close()
    say(f"the run took {time.monotonic() - begun:.0f} s, with joining and the end")
    if run.status == "interrupted":
        stderr.print(f"polyfed: interrupted; continue with the same command and --resume --out {folder}")
        return stop.STOPPED
    return 0


_reporting = threading.Lock()  # figures are drawn by one thread at a time


def _report(folder: Path, run: Result) -> None:
    if run.status == "finished":
        with _reporting:
            results(report.read(folder), report.write_report(folder))


class Queue:
    """Runs at one port, each in a thread and a folder of its own; folders of experiments are looked at again."""

    def __init__(self, o: Server, hub: Hub, folder: Path, wanted: Wanted):
        self.o, self.hub, self.folder, self.wanted = o, hub, folder, wanted
        self.files: dict[str, Path] = {}  # by the run's name
        self.threads: dict[str, threading.Thread] = {}
        self.statuses: dict[str, int] = {}

    def run(self, asked: threading.Event) -> int:
        """Until all are over, or it is asked to stop. Returns the largest exit status."""
        stays = any(path.is_dir() for path in self.o.experiment)
        while not asked.is_set():
            self._look()
            going = sum(t.is_alive() for t in self.threads.values())
            for name in self.hub.queued[: (self.o.at_once or AT_ONCE) - going]:
                self.threads[name] = threading.Thread(target=self._train, args=(name,), daemon=True)
                self.threads[name].start()
                self.hub.queued.remove(name)
            if not (stays or self.hub.queued or any(t.is_alive() for t in self.threads.values())):
                break
            asked.wait(LOOK)
        for thread in self.threads.values():
            thread.join()
        return stop.STOPPED if asked.is_set() else max(self.statuses.values(), default=0)

    def _look(self) -> None:
        inside = [path.glob("*.toml") if path.is_dir() else [path] for path in self.o.experiment]
        for path in (path for paths in inside for path in sorted(paths)):
            if path.stem not in self.files:
                self.files[path.stem] = path
                self.hub.queued.append(path.stem)

    def _train(self, name: str) -> None:
        place, file = self.folder / name, self.files[name]
        if self.o.resume and is_over(place):
            self.hub.say(f"{name}: is over")
            return
        self.statuses[name] = 1
        try:
            with claimed(place, name, self.o.force, self.o.resume) as folder:
                say = Events(folder, self.o.quiet, f"{name}: ")
                self.statuses[name] = train(self.o, file, folder, self.wanted(name), self.hub, say)
        except KeyboardInterrupt:
            self.statuses[name] = stop.STOPPED
        except PolyfedError as e:
            self.hub.say(f"{name}: {e}")
        except Exception as e:
            self.hub.say(f"{name}: unexpected {type(e).__name__}: {e}; this is a bug in polyfed")
