"""polyfed client: a site of a federation."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from polyfed.base.errors import ConfigError, RunError, closest
from polyfed.cli.screen import asked
from polyfed.data.readers import pictures
from polyfed_sites.attendance import Attendance
from polyfed_sites.cli.events import Events
from polyfed_sites.commands import MADE, Client
from polyfed_sites.consent import Consent, at_terminal
from polyfed_sites.keys import private, sign, site_key, warning
from polyfed_sites.policy import FILE, Policy, read
from polyfed_sites.runs import Runs
from polyfed_sites.site import OVER, Site

POLICY = "policy"  # what --yes says instead of a digest


@private()
def client(o: Client) -> None:
    allowed = [word.strip() for words in o.allow or () for word in words.split(",")]
    for word in allowed:
        if word not in MADE:
            raise ConfigError(f"--allow: found {word!r}{closest(word, MADE)}, expected {', '.join(MADE)}")
    if o.data.is_dir() and not any(f.parent != o.data for f in pictures(o.data)):
        raise ConfigError(f"--data: {o.data} has no images in it, expected a folder LABEL/IMAGE")
    if not o.data.is_dir() and not o.data.is_file():
        raise ConfigError(f"--data: {o.data} is not a file")
    file = o.policy or o.key.with_name(FILE)
    policy = read(file) if o.policy or file.exists() else Policy()
    given, say = site_key(o.key, partial(_passphrase, o.passphrase)), Events(o.vault, o.quiet)
    if line := warning("this site's key", given.until, "ask the server's operator for a new one"):
        say(f"note: {line}")
    consent = Consent(frozenset(allowed), o.metrics, *_agreement(o))

    def site(run: str) -> Site:
        who = f"{run}: " if run else ""
        show = say.show if consent.ask is None and not consent.dry else say.warn
        said, shown, failed = (lambda line, do=do: do(f"{who}{line}") for do in (say, show, say.warn))
        key, vault = partial(sign, given.private), o.vault / run
        return Site(given.site, o.data, vault, consent, said, shown, policy, key, o.backbone, failed)

    runs = Runs(given.site, site, o.stay)
    ends = policy.tls_ends_at
    ends = str(file.parent / ends) if ends not in (None, "system") else ends
    Attendance(given, runs.answer, runs.over, o.vault, say, o.server, o.proxy, ends, o.certificate).run()
    if runs.ended():
        raise RunError(f"{given.site}: {OVER}")


def _passphrase(file: Path | None) -> bytes:
    return asked("Passphrase of the key: ") if file is None else file.read_bytes().strip()


def _agreement(o: Client) -> tuple[Callable[[str], bool] | None, frozenset[str], bool]:
    """Arguments `ask`, `agreed` and `dry` of a `Consent`, by how the operator agrees."""
    if o.dry_run:
        return _leave, frozenset(), True
    if o.yes in (None, POLICY):
        return None if o.yes else at_terminal, frozenset(), False
    digests = o.yes.split(",")
    if not all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests):
        then = "sixteen digits, as --dry-run shows them, or policy"
        raise ConfigError(f"--yes: found {o.yes!r}, expected the digest of the terms: {then}")
    return None, frozenset(digests), False


def _leave(text: str) -> bool:
    """The text has been shown; without an answer, the server goes on waiting for this site."""
    raise SystemExit(0)
