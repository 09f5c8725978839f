"""polyfed keys: who may take part in a federation of real sites."""

from datetime import UTC, datetime

from polyfed.cli.commands import KeysAdd, KeysInit, KeysList, KeysRevoke
from polyfed.sites.keys import Keys, private, split


@private()
def keys_init(o: KeysInit) -> None:
    here, address = Keys(o.keys), "{}:{}".format(*split(o.address))
    here.make(address, o.also or ())
    print(f"{o.keys}: certificate for {address}, good until {here.until():%Y-%m-%d}; next: polyfed keys add SITE")


@private()
def keys_add(o: KeysAdd) -> None:
    path = Keys(o.keys).add(o.site, o.out)
    print(f"{path}: send it to {o.site} in confidence, and delete it here")


def keys_list(o: KeysList) -> None:
    here, now = Keys(o.keys), datetime.now(UTC)
    found = here.sites()
    wide = max(map(len, found), default=0)
    print(f"server {here.address}, certificate good until {here.until():%Y-%m-%d}")
    for name, e in sorted(found.items()):
        print(f"{name:{wide}}  {e.state(now):7}  until {(e.revoked or e.until):%Y-%m-%d}")
    for line in here.warnings():
        print(f"note: {line}")


@private()
def keys_revoke(o: KeysRevoke) -> None:
    Keys(o.keys).revoke(o.site)
    print(f"{o.site}: its key is not accepted any more")
