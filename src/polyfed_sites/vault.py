"""The vault: a site's private state of one run, as it was after each exchange that may still count.

A version is written when a reply is computed and counts from the moment when a later message builds on it: a reply
that was lost, or dropped by the server, leaves a version that nothing refers to. So a site can be stopped between any
two bytes, and a server can go back to its last checkpoint.
"""

import json
import os
from bisect import bisect
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from polyfed.base.checkpoint import flush, reason
from polyfed.base.errors import Refusal
from polyfed.base.settings import table_in
from polyfed.core.messages import State
from polyfed_sites import journal

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
                self._write(card, json.dumps({"run": run, "site": site}).encode())
            said = table_in(card.read_bytes())
        except (OSError, ValueError) as e:
            raise self._refusal(f": not a vault ({reason(e)})") from None
        for key, mine in (("site", site), ("run", run)):
            if said.get(key) != mine:
                other = f"the vault of {key} {said.get(key)!r}, expected {mine!r}"
                raise self._refusal(f": {other}; give each run and site its own; --stay gives each run one")

    def _refusal(self, line: str) -> Refusal:
        """An error about the folder, whose place is nobody else's business."""
        return Refusal(f"{self.folder}{line}", f"its vault{line}")

    def same(self, key: str, value: str, otherwise: str) -> None:
        """Note a fact about the run when it is first said; raise Refusal where it is another one later."""
        card = self.folder / "vault.json"
        said = table_in(card.read_bytes())
        if said.setdefault(key, value) != value:
            raise Refusal(otherwise)
        self.keep(card.name, json.dumps(said).encode())

    def keep(self, name: str, data: bytes) -> None:
        """Write a file beside the versions."""
        try:
            self._write(self.folder / name, data)
        except OSError as e:
            raise self._refusal(f"/{name}: cannot be written ({reason(e)})") from None

    def add(self, name: str, line: str) -> None:
        """Append a line to a file beside the versions, below one that was cut off when the site was stopped."""
        try:
            with (self.folder / name).open("a+b") as f:
                f.seek(max(0, f.tell() - 1))
                torn = f.read() not in (b"", b"\n")
                f.write(b"\n" * torn + f"{line}\n".encode())
        except OSError as e:
            raise self._refusal(f"/{name}: cannot be written ({reason(e)})") from None

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The tables that `add` has written as JSON, without lines that were cut off."""
        return [*journal.lines(self.folder / name)]

    def versions(self) -> list[Version]:
        """What is there, oldest first."""
        names = sorted(path.stem for path in self.folder.glob("[0-9]*-[0-9]*.safetensors"))
        return [(int(name[:8]), int(name[9:])) for name in names]

    def load(self, version: Version, start: State) -> State:
        """The private tensors of a version. start: those before the first exchange."""
        if version == START:
            return start
        try:
            return load_file(self._at(version))
        except FileNotFoundError:
            there = self.versions()
            older = bisect(there, version)  # how many
            said = f"it ends with round {there[older - 1][0]}" if older else "it is newer" if there else "it is empty"
            raise self._refusal(
                f": no state of round {version[0]}, which the server builds on; {said}. Restore the vault's latest "
                "copy, or start the run again"
            ) from None
        except (OSError, SafetensorError) as e:
            name = self._at(version).name
            raise self._refusal(f"/{name} is damaged ({reason(e)}); restore the vault's latest copy") from None

    def save(self, version: Version, state: State, keep: Version) -> None:
        """Write a version, and forget those before `keep`, the oldest that the server may still go back to."""
        path = self._at(version)
        draft = path.with_suffix(".draft")
        try:
            save_file({name: t.detach().cpu().contiguous().clone() for name, t in state.items()}, draft)
            self._put(draft, path)
        except (OSError, SafetensorError) as e:
            raise self._refusal(f"/{path.name}: cannot write the site's state ({reason(e)})") from None
        for old in self.versions():
            if old < keep:
                self._at(old).unlink(missing_ok=True)

    def _at(self, version: Version) -> Path:
        return self.folder / f"{version[0]:08d}-{version[1]}.safetensors"

    def _write(self, path: Path, data: bytes) -> None:
        draft = path.with_suffix(".draft")
        draft.write_bytes(data)
        self._put(draft, path)

    def _put(self, draft: Path, path: Path) -> None:
        flush(draft)
        os.replace(draft, path)
        flush(self.folder)
