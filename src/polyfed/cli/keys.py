"""polyfed keys: who may take part in a federation of real sites."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke the keys of a federation's sites.")
Folder = Annotated[Path, Option("--keys", help="Folder with the federation's keys; keep it safe.", metavar="DIR")]
HERE = Path("keys")


@keys.command()
def init(
    address: Annotated[
        str, Argument(help="HOST or HOST:PORT at which the sites reach the server.", metavar="HOST[:PORT]")
    ],
    also: Annotated[list[str] | None, Option(help="Another name of the host; repeatable.", metavar="NAME")] = None,
    keys: Folder = HERE,
) -> None:
    """Make a certificate authority and the server's certificate; again, to renew the latter or to change the address.

    [dim]polyfed keys init fed.example.org:8000[/dim]
    """
    from polyfed.sites.keys import Keys, split

    here, address = Keys(keys), "{}:{}".format(*split(address))
    here.make(address, also or ())
    print(f"{keys}: certificate for {address}, good until {here.until():%Y-%m-%d}; next: polyfed keys add SITE")


@keys.command()
def add(
    site: Annotated[str, Argument(help="Name of the site.", show_default=False)],
    out: Annotated[Path, Option(help="Folder for the site's file.", metavar="DIR")] = Path(),
    keys: Folder = HERE,
) -> None:
    """Make the file with which a site joins: its key, the server's address and the authority's certificate.

    Send it to the site over a channel that both trust, and delete it here: who has it is the site.
    """
    from polyfed.sites.keys import Keys

    path = Keys(keys).add(site, out)
    print(f"{path}: send it to {site} in confidence, and delete it here")


@keys.command("list")
def list_(keys: Folder = HERE) -> None:
    """Show the sites, whether their keys are accepted and until when, and what ends soon."""
    from datetime import UTC, datetime

    from polyfed.sites.keys import Keys

    here, now = Keys(keys), datetime.now(UTC)
    found = here.sites()
    wide = max(map(len, found), default=0)
    print(f"server {here.address}, certificate good until {here.until():%Y-%m-%d}")
    for name, e in sorted(found.items()):
        print(f"{name:{wide}}  {e.state(now):7}  until {(e.revoked or e.until):%Y-%m-%d}")
    for line in here.warnings():
        print(f"note: {line}")


@keys.command()
def revoke(site: Annotated[str, Argument(help="Name of the site.", show_default=False)], keys: Folder = HERE) -> None:
    """Refuse a site's key from now on, also in a run that is under way."""
    from polyfed.sites.keys import Keys

    Keys(keys).revoke(site)
    print(f"{site}: its key is not accepted any more")
