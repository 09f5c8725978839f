"""polyfed server: an experiment over real sites, which keep their data."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from polyfed.cli import options as o

if TYPE_CHECKING:
    from polyfed.cli.events import Events
    from polyfed.engines.flower import Flower


def server(
    experiment: Annotated[Path, Argument(help="Experiment file (TOML).", metavar="FILE.toml", show_default=False)],
    sites: Annotated[
        str | None,
        Option(
            help="Begin with these sites, or with the first N that connect; all with a key otherwise.", metavar="N|A,B"
        ),
    ] = None,
    keys: Annotated[Path, Option(help="Folder made by polyfed keys.", metavar="DIR")] = Path("keys"),
    host: Annotated[str, Option(help="Address of this machine to listen at.", metavar="HOST")] = "0.0.0.0",
    port: Annotated[int | None, Option(help="Port to listen at; that of the keys' address otherwise.")] = None,
    wait: Annotated[float | None, Option(help="Seconds that a round waits for its sites.", metavar="S")] = None,
    quorum: Annotated[int | None, Option(help="Go on when N of a round's sites have answered.", metavar="N")] = None,
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
    from polyfed.engines.flower import Flower
    from polyfed.experiment import stop
    from polyfed.experiment.remote import serve
    from polyfed.report import read, write_report
    from polyfed.sites.keys import Keys

    since = stop.interruptions()
    here = Keys(keys)
    known = here.accepted().values()
    with claimed(out, experiment.stem, force, resume) as folder:
        say = Events(folder, quiet)
        for line in here.warnings():
            say(f"note: {line}")
        transport = Flower(here, folder / "flower", say, host, port)
        say(f"listening at {host}:{transport.port}")
        try:
            if sites is None or sites.isdigit():
                names = _first(transport, int(sites or len(known)), say)
            else:
                names = [name.strip() for name in sites.split(",")]
            run = serve(experiment, transport, folder, sites=names, resume=resume, wait=wait, quorum=quorum, say=say)
        finally:
            transport.close()
        if run.status == "interrupted":
            stderr.print(f"polyfed: interrupted; continue with the same command and --resume --out {folder}")
            return stop.status(since)
        results(read(folder), write_report(folder))
    return 0


def _first(transport: "Flower", n: int, say: "Events") -> list[str]:
    """The first n sites that connect."""
    said = -1
    while len(found := transport.sites()) < n:
        if len(found) != said:
            said = len(found)
            say(f"waiting for {n} sites; {said} connected")
        time.sleep(0.5)
    return list(found)[:n]
