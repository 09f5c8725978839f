"""What a site has answered in a run: a line for each different question, on the disk before its answer leaves. So what
a policy counts survives a kill, and the same question asked again costs nothing.
"""

from pathlib import Path

from polyfed.base.errors import Refusal
from polyfed_sites import journal
from polyfed_sites.policy import Policy

NAME = "answered.jsonl"


class Answered:
    """The questions in a vault, which are about the file with the digest `file`."""

    def __init__(self, vault: Path, file: str, policy: Policy):
        self.path, self.file, self.policy = vault / NAME, file, policy
        self._known = _lines(self.path)

    def knows(self, kind: str, asked: str) -> bool:
        """Whether it was answered before."""
        return (kind, asked) in self._known

    def spend(self, kind: str, asked: str, most: int, what: str) -> None:
        """Count a question before it is answered; asked again it costs nothing. Raises Refusal beyond `most`."""
        if (kind, asked) in self._known:
            return
        if sum(known == kind for known, _ in self._known) >= most:
            raise Refusal(f"is asked for more {what} than it has agreed to")
        if ("file", self.file) not in self._known:
            others = (path for path in self.path.parent.parent.glob(f"*/{NAME}") if path != self.path)
            run = 1 + sum(("file", self.file) in _lines(path) for path in others)
            self.policy.most("most_runs", run, f"run {run} on the same file")
        self.add(kind, asked)

    def add(self, kind: str, asked: str) -> None:
        """Write a question down. Raises Refusal where that fails: then it is not answered."""
        new = [entry for entry in (("file", self.file), (kind, asked)) if entry not in self._known]
        journal.append(self.path, *new)
        self._known |= dict.fromkeys(new)


def _lines(path: Path) -> dict[tuple[str, str], None]:
    """The questions of a file, without a line that was cut off."""
    return {(kind, str(asked)): None for kind, asked in journal.pairs(path)}
