"""polyfed server: an experiment over real sites, which keep their data."""

import time
from functools import partial
from pathlib import Path

from polyfed import report
from polyfed.base.errors import ConfigError, closest
from polyfed.cli.commands import Server
from polyfed.cli.console import results
from polyfed.cli.events import Events
from polyfed.cli.folders import claimed
from polyfed.cli.screen import interrupted
from polyfed.runs import stop
from polyfed.runs.result import Result
from polyfed.sites.audit import SERVER, Audit
from polyfed.sites.flower import Flower, Hub
from polyfed.sites.keys import Keys, host_of, private
from polyfed.sites.server import serve


@private()
def server(o: Server) -> int:
    host_of(o.host)
    if o.quorum is not None and o.wait is None:
        raise ConfigError("--quorum: found without --wait, the seconds after which fewer sites will do")
    since = stop.interruptions()
    here = Keys(o.keys)
    wanted = _wanted(o.sites, [*here.accepted().values()], o.keys)
    with claimed(o.out, o.experiment.stem, o.force, o.resume) as folder:
        say = Events(folder, o.quiet)
        for line in here.warnings():
            say(f"note: {line}")
        hub = Hub(here, say, o.host, o.port)
        say(f"listening at {o.host}:{hub.port}")
        try:
            begun = time.monotonic()
            run = serve(
                o.experiment, Flower(hub, folder, audit=Audit(folder, SERVER)), folder,
                sites=wanted, resume=o.resume, wait=o.wait, quorum=o.quorum,
                most_share=o.most_share, say=say, trained=partial(_report, folder),
            )  # fmt: skip
            say(f"the run took {time.monotonic() - begun:.0f} s, with joining and the end")
        finally:
            hub.close()
        if run.status == "interrupted":
            return interrupted(f"continue with the same command and --resume --out {folder}", since)
    return 0


def _report(folder: Path, run: Result) -> None:
    if run.status == "finished":
        results(report.read(folder), report.write_report(folder))


def _wanted(sites: str | None, known: list[str], keys: Path) -> int | list[str]:
    """Names, or a number. Raises ConfigError for sites that would be waited for in vain."""
    if sites is not None and not sites.isdigit():
        names = [name.strip() for name in sites.split(",")]
        for k, name in enumerate(names):
            if name in names[:k]:
                raise ConfigError(f"--sites: found {name!r} twice, expected each once")
            if name not in known:
                raise ConfigError(
                    f"--sites: {name!r} has no valid key in {keys}{closest(name, known)}; polyfed keys add"
                )
        return names
    n = len(known) if sites is None else int(sites)
    if not 1 <= n <= len(known):
        raise ConfigError(f"--sites: found {n}, and {len(known)} sites have a valid key in {keys}; polyfed keys add")
    return n
