"""polyfed attack: what a server that means harm would read of a file under a policy."""

import tempfile
from pathlib import Path

from polyfed_attack.adversaries import attacked, table
from polyfed_attack.commands import Attack
from polyfed_sites.policy import Policy, read


def attack(o: Attack) -> None:
    policy = read(o.policy) if o.policy else Policy()
    with tempfile.TemporaryDirectory() as place:
        print(table(attacked(o.data, policy, frozenset(o.allow or ()), Path(place))))
