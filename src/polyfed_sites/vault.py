"""The vault: a site's private state of one run, as it was after each exchange that may still count.

A version is written when a reply is computed and counts from the moment when a later message builds on it: a reply
that was lost, or dropped by the server, leaves a version that nothing refers to. So a site can be stopped between any
two bytes, and a server can go back to its last checkpoint.
"""

import json
from bisect import bisect
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from polyfed.base.checkpoint import reason
from polyfed.base.errors import Refusal
from polyfed.base.settings import table_in
from polyfed.core.messages import State
from polyfed_sites.keys import put

Version = tuple[int, int]  # (round, exchange within it)
START: Version = (-1, -1)  # before the first exchange


class Vault:
    """Versions of one site's private tensors in one folder; a vault of another run is refused."""

    def __init__(self, folder: Path, run: str, site: str):
        self.folder, self.site, self.run = folder, site, run
        card = folder / "vault.json"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not card.exists():
                put(card, json.dumps({"run": run, "site": site}).encode())
            facts = table_in(card.read_bytes())
        except (OSError, ValueError) as e:
            raise self._refusal(f": not a vault ({reason(e)})") from None
        for key, mine in (("site", site), ("run", run)):
            if facts.get(key) != mine:
                other = f"the vault of {key} {facts.get(key)!r}, expected {mine!r}"
                raise self._refusal(f": {other}; give each run and site its own; --stay gives each run one")

    def _refusal(self, line: str) -> Refusal:
        """An error about the folder, whose place is nobody else's business."""
        return Refusal(f"{self.folder}{line}", f"its vault{line}")

    def same(self, key: str, value: str, otherwise: str) -> None:
        """Note a fact about the run when it is first said; raise Refusal where it is another one later."""
        card = self.folder / "vault.json"
        facts = table_in(card.read_bytes())
        if facts.setdefault(key, value) != value:
            raise Refusal(otherwise)
        self.keep(card.name, json.dumps(facts).encode())

    def keep(self, name: str, data: bytes) -> None:
        """Write a file beside the versions."""
        try:
            put(self.folder / name, data)
        except OSError as e:
            raise self._refusal(f"/{name}: cannot be written ({reason(e)})") from None

    def versions(self) -> list[Version]:
        """What is there, oldest first."""
        names = sorted(path.stem for path in self.folder.glob("[0-9]*-[0-9]*.safetensors"))
        return [(int(name[:8]), int(name[9:])) for name in names]

    def load(self, version: Version) -> State:
        """The private tensors of a version."""
        try:
            return load_file(self._at(version))
        except FileNotFoundError:
            there = self.versions()
            older = bisect(there, version)  # how many
            newest = f"it ends with round {there[older - 1][0]}" if older else "it is newer" if there else "it is empty"
            raise self._refusal(
                f": no state of round {version[0]}, which the server builds on; {newest}. Restore the vault's latest "
                "copy, or start the run again"
            ) from None
        except (OSError, SafetensorError) as e:
            name = self._at(version).name
            raise self._refusal(f"/{name} is damaged ({reason(e)}); restore the vault's latest copy") from None

    def save(self, version: Version, state: State, keep: Version) -> None:
        """Write a version, and forget those before `keep`, the oldest that the server may still go back to."""
        self.keep(self._at(version).name, save({n: t.detach().cpu().contiguous().clone() for n, t in state.items()}))
        for old in self.versions():
            if old < keep:
                self._at(old).unlink(missing_ok=True)

    def _at(self, version: Version) -> Path:
        return self.folder / f"{version[0]:08d}-{version[1]}.safetensors"
