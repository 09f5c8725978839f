"""polyfed client: a site of a federation."""

from polyfed.base.errors import ConfigError, Refusal, closest
from polyfed.cli.commands import MADE, Client
from polyfed.cli.events import Events
from polyfed.sites.consent import Consent
from polyfed.sites.flower_site import Attendance
from polyfed.sites.keys import site_key, warning
from polyfed.sites.site import Site


def client(o: Client) -> int:
    """Take part until the server has finished."""
    allowed = [word.strip() for words in o.allow or () for word in words.split(",")]
    for word in allowed:
        if word not in MADE:
            raise ConfigError(f"--allow: found {word!r}{closest(word, MADE)}, expected {', '.join(MADE)}")
    if not o.data.is_file():
        raise ConfigError(f"--data: {o.data} is not a file")
    given, say = site_key(o.key), Events(o.vault, o.quiet)
    if line := warning("this site's key", given.until, "ask the server's operator for a new one"):
        say(f"note: {line}")
    consent = Consent(frozenset(allowed), o.metrics, _leave if o.dry_run else None if o.yes else _ask)
    site = Site(given.site, o.data, o.vault, consent, say, say.show)
    Attendance(given, site.answer, lambda: site.finished, o.vault / "flower", say, o.server).run()
    return 0


def _leave(text: str) -> bool:
    """The text has been shown; without an answer, the server goes on waiting for this site."""
    raise SystemExit(0)


def _ask(text: str) -> bool:
    try:
        return input("Join? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise Refusal("found no terminal to ask at; read what would leave the site, then agree with --yes") from None
