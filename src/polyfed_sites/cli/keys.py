"""polyfed keys: who may take part in a federation of real sites."""

from datetime import UTC, datetime

from polyfed.base.errors import ConfigError, printable
from polyfed.cli.screen import asked
from polyfed_sites.commands import KeysAdd, KeysInit, KeysList, KeysRevoke
from polyfed_sites.keys import Keys, private, split


@private()
def keys_init(o: KeysInit) -> None:
    here, address = Keys(o.keys), "{}:{}".format(*split(o.address))
    here.make(address, o.also or ())
    print(f"{o.keys}: certificate for {address}, good until {here.until():%Y-%m-%d}; next: polyfed keys add SITE")


@private()
def keys_add(o: KeysAdd) -> None:
    here = Keys(o.keys)
    path = here.add(o.site, o.out, rotate=o.rotate, passphrase=_passphrase() if o.passphrase else None)
    print(f"{path}: send it to {o.site} in confidence, and delete it here")
    for e in here.sites()[o.site][:-1]:
        if e.state(datetime.now(UTC)) == "valid":
            then = f"to end it before: polyfed keys revoke {o.site} --key {e.mark}"
            print(f"{o.site}'s key {e.mark} is accepted until {e.until:%Y-%m-%d}; {then}")


def _passphrase() -> bytes:
    passphrase = asked("Passphrase: ")
    if not passphrase or asked("Again: ") != passphrase:
        raise ConfigError("--passphrase: found nothing, or two different ones")
    return passphrase


def keys_list(o: KeysList) -> None:
    here, now = Keys(o.keys), datetime.now(UTC)
    sites, origins = here.sites(), here.seen()
    wide = max(map(len, sites), default=0)
    print(f"server {here.address}, certificate good until {here.until():%Y-%m-%d}")
    for name, keys in sorted(sites.items()):
        for e in keys:
            came = f"  from {', '.join(addresses)}" if (addresses := origins.get(e.mark)) else ""
            why = f"  ({printable(e.why)})" if e.why else ""
            print(f"{name:{wide}}  {e.state(now):7}  until {(e.revoked or e.until):%Y-%m-%d}  key {e.mark}{came}{why}")
    for line in here.warnings():
        print(f"note: {line}")


@private()
def keys_revoke(o: KeysRevoke) -> None:
    marks = Keys(o.keys).revoke(o.site, o.key, o.why or "")
    print(f"{o.site}: " + (f"not accepted any more: key {', '.join(marks)}" if marks else "was revoked before"))
