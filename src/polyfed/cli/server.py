"""polyfed server: an experiment over real sites, which keep their data."""

import time
from pathlib import Path

from polyfed import report
from polyfed.base.errors import ConfigError, closest
from polyfed.cli.commands import Server
from polyfed.cli.console import results, stderr
from polyfed.cli.events import Events
from polyfed.cli.folders import claimed
from polyfed.runs import stop
from polyfed.sites.flower import Flower
from polyfed.sites.keys import Keys, host_of
from polyfed.sites.serve import serve


<<<<<<< HEAD
def server(o: Server) -> int:
    """Wait for the sites, train, and report."""
    host_of(o.host)
    if o.quorum is not None and o.wait is None:
=======
def server(
    experiment: Annotated[Path, Argument(help="Experiment file (TOML).", metavar="FILE.toml", show_default=False)],
    sites: Annotated[
        str | None,
        Option(
            help="Who takes part: these sites, or the first N that connect. Default: all with a key.", metavar="N|A,B"
        ),
    ] = None,
    keys: Annotated[Path, Option(help="Folder made by polyfed keys.", metavar="DIR")] = Path("keys"),
    host: Annotated[str, Option(help="Address of this machine to listen at.", metavar="HOST")] = "0.0.0.0",
    port: Annotated[
        int | None,
        Option(help="Port to listen at. Default: that of the keys' address.", metavar="PORT", min=1, max=65535),
    ] = None,
    wait: Annotated[
        float | None,
        Option(
            help="Seconds to wait for all sites of a round before --quorum will do. Default: for ever.",
            metavar="S",
            min=0,
        ),
    ] = None,
    quorum: Annotated[
        int | None,
        Option(help="After --wait, go on when N sites of a round have answered. Default: all.", metavar="N", min=1),
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run in --out.")] = False,
    out: o.Out = None,
    force: o.Force = False,
    quiet: o.Quiet = False,
) -> int:
    """Train over real sites: the same experiment, with the hospitals' data where they are.

    Starts Flower's SuperLink, waits for the sites (polyfed client), trains, and writes a run as polyfed run does. No
    sample and no private state of a site is ever here; each site keeps its own model.

    [dim]polyfed server experiment.toml --sites 4 --out runs/heart[/dim]
    """
    from polyfed.cli.console import results, stderr
    from polyfed.cli.events import Events
    from polyfed.cli.folders import claimed
    from polyfed.report import read, write_report
    from polyfed.runs import stop
    from polyfed.sites.flower import Flower
    from polyfed.sites.keys import Keys, host_of
    from polyfed.sites.server import serve

    host_of(host)
    if quorum is not None and wait is None:
>>>>>>> w_sites
        raise ConfigError("--quorum: found without --wait, the seconds after which fewer sites will do")
    since = stop.interruptions()
    here = Keys(o.keys)
    wanted = _wanted(o.sites, [*here.accepted().values()], o.keys)
    with claimed(o.out, o.experiment.stem, o.force, o.resume) as folder:
        say = Events(folder, o.quiet)
        for line in here.warnings():
            say(f"note: {line}")
        transport = Flower(here, folder / "flower", say, o.host, o.port)
        say(f"listening at {o.host}:{transport.port}")
        try:
            names = _first(transport, wanted, say) if isinstance(wanted, int) else wanted
            run = serve(
                o.experiment, transport, folder, sites=names, resume=o.resume, wait=o.wait, quorum=o.quorum, say=say
            )
        finally:
            transport.close()
        if run.status == "interrupted":
            stderr.print(f"polyfed: interrupted; continue with the same command and --resume --out {folder}")
            return stop.status(since)
        results(report.read(folder), report.write_report(folder))
    return 0


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


def _first(transport: Flower, n: int, say: Events) -> list[str]:
    """The first n sites that connect."""
    said = -1
    while len(found := transport.sites()) < n:
        if len(found) != said:
            said = len(found)
            say(f"waiting for {n} sites; {said} connected")
        time.sleep(0.5)
    return list(found)[:n]
