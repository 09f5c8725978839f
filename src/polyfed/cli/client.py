"""polyfed client: a site of a federation."""

from pathlib import Path
from typing import Annotated

from typer import Option

from polyfed.cli import options as o


def client(
    key: Annotated[Path, Option(help="The site's file, from polyfed keys add.", metavar="FILE", show_default=False)],
    data: Annotated[Path, Option(help="The site's own file or folder.", metavar="PATH", show_default=False)],
    vault: Annotated[
        Path, Option(help="Folder for what the site keeps: its private state and its model.", show_default=False)
    ],
    server: Annotated[
        str | None, Option(help="HOST:PORT of the server, where it is not the one in the key.", metavar="HOST:PORT")
    ] = None,
    allow: Annotated[
        list[str] | None, Option(help="Let this leave the site, which is made from raw data; repeatable.")
    ] = None,
    metrics: Annotated[
        str, Option(help="What the server learns of this site's metrics: none, aggregate or own.", metavar="HOW")
    ] = "aggregate",
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show what would leave the site, and send nothing else.")
    ] = False,
    yes: Annotated[bool, Option("--yes", help="Agree to what will leave the site without being asked.")] = False,
    quiet: o.Quiet = False,
) -> int:
    """Take part in a federation: train on this site's data, which stay here.

    Shows what will leave the site before it joins. Stops and starts again at any time: it goes on where it was.

    [dim]polyfed client --key cleveland.key --data cleveland.csv --vault vault[/dim]
    """
    from polyfed.cli.events import Events
    from polyfed.engines.flower_site import Attendance
    from polyfed.sites.consent import Consent
    from polyfed.sites.keys import site_key, warning
    from polyfed.sites.member import Member

    given, say = site_key(key), Events(vault, quiet)
    if line := warning("this site's key", given.until, "ask the server's operator for a new one"):
        say(f"note: {line}")
    consent = Consent(frozenset(allow or ()), metrics, None if yes else _ask)
    member = Member(given.site, data, vault, consent)
    Attendance(given, member.answer, lambda: member.finished, vault / "flower", say, server).run()
    return 0


def _ask(text: str) -> bool:
    print(text)
    return input("Join? [y/N] ").strip().lower() in ("y", "yes")
