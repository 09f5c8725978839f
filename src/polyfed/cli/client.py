"""polyfed client: a site of a federation."""

<<<<<<< HEAD
from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.cli.commands import MADE, Client
from polyfed.cli.events import Events
from polyfed.sites.consent import Consent
from polyfed.sites.flower_site import Attendance
from polyfed.sites.keys import site_key, warning
from polyfed.sites.member import Member


def client(o: Client) -> int:
    """Take part until the server has finished."""
    allowed = [word.strip() for words in o.allow or () for word in words.split(",")]
=======
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from polyfed.base.errors import ConfigError, Refusal, closest
from polyfed.cli import options as o

MADE = ("pooled", "labels", "signature")  # what methods and experiments may ask of a site that is made of its samples


def client(
    key: Annotated[
        Path, Option(help="The site's key: a file from polyfed keys add.", metavar="FILE", show_default=False)
    ],
    data: Annotated[Path, Option(help="The site's own file, CSV or npz.", metavar="FILE", show_default=False)],
    vault: Annotated[
        Path,
        Option(
            help="Folder for what the site keeps, its private state and its model: one for each run.",
            metavar="DIR",
            show_default=False,
        ),
    ],
    server: Annotated[
        str | None, Option(help="HOST:PORT of the server, where it is not the one in the key.", metavar="HOST:PORT")
    ] = None,
    allow: Annotated[
        list[str] | None,
        Option(
            help=f"Let leave the site what is made of samples and not by training: {', '.join(MADE)}.",
            metavar="A,B,...",
        ),
    ] = None,
    metrics: Annotated[
        Literal["none", "aggregate", "own"],
        Option(help="What the server writes down of how good models are here: nothing, a mean over sites, or all."),
    ] = "own",
    dry_run: Annotated[
        bool, Option("--dry-run", help="Ask the server what it wants, show what would leave the site, and stop.")
    ] = False,
    yes: Annotated[bool, Option("--yes", help="Agree to what will leave the site without being asked.")] = False,
    quiet: o.Quiet = False,
) -> int:
    """Take part in a federation: train on this site's data, which stay here.

    Shows what will leave the site and asks before anything does. It may be stopped at any time, and goes on where it
    was when it is started again.

    [dim]polyfed client --key cleveland.key --data cleveland.csv --vault vault[/dim]
    """
    from polyfed.cli.events import Events
    from polyfed.sites.consent import Consent
    from polyfed.sites.flower_site import Attendance
    from polyfed.sites.keys import site_key, warning
    from polyfed.sites.site import Site

    allowed = [word.strip() for words in allow or () for word in words.split(",")]
>>>>>>> w_sites
    for word in allowed:
        if word not in MADE:
            raise ConfigError(f"--allow: found {word!r}{closest(word, MADE)}, expected {', '.join(MADE)}")
    if not o.data.is_file():
        raise ConfigError(f"--data: {o.data} is not a file")
    given, say = site_key(o.key), Events(o.vault, o.quiet)
    if line := warning("this site's key", given.until, "ask the server's operator for a new one"):
        say(f"note: {line}")
<<<<<<< HEAD
    consent = Consent(frozenset(allowed), o.metrics, _leave if o.dry_run else None if o.yes else _ask)
    member = Member(given.site, o.data, o.vault, consent, say, say.show)
    Attendance(given, member.answer, lambda: member.finished, o.vault / "flower", say, o.server).run()
=======
    consent = Consent(frozenset(allowed), metrics, _leave if dry_run else None if yes else _ask)
    site = Site(given.site, data, vault, consent, say, say.show)
    Attendance(given, site.answer, lambda: site.finished, vault / "flower", say, server).run()
>>>>>>> w_sites
    return 0


def _leave(text: str) -> bool:
    """The text has been shown; without an answer, the server goes on waiting for this site."""
    raise SystemExit(0)


def _ask(text: str) -> bool:
    try:
        return input("Join? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise Refusal("found no terminal to ask at; read what would leave the site, then agree with --yes") from None
