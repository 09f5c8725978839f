"""A site's part in a server's runs: in one, or in as many as there are, each with a vault and an audit log."""

import re
from collections.abc import Callable

from polyfed.base.system import DEVICE
from polyfed_sites.audit import Audit, audited
from polyfed_sites.site import Site
from polyfed_sites.wire import Failed, Message

OPEN = 32  # runs that are held in memory; a site is made again from its vault
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)  # of a run, which names a folder here


class Runs:
    """A site's `Site`s by run, each made by the name of its vault in the folder of all; "": that folder itself."""

    def __init__(self, name: str, site: Callable[[str], Site], many: bool = False):
        self.name, self.site, self.many = name, site, many
        self._open: dict[str, tuple[Site, Callable[[str, bytes], bytes]]] = {}  # the one that was asked last at the end

    def answer(self, run: str, data: bytes) -> bytes:
        """The answer to a message of a run."""
        place = run if self.many else ""
        if not NAME.fullmatch(run) or DEVICE.fullmatch(run):
            return Message(Failed(error=f"{self.name}: is asked for a run that has no name")).pack()
        if place not in self._open:
            site = self.site(place)
            self._open[place] = site, audited(site.answer, Audit(site.vault, self.name), lambda: site.terms)
        site, answer = self._open[place] = self._open.pop(place)
        reply = answer(run, data)
        if self.many and (site.finished or len(self._open) > OPEN):
            self._open.pop(place if site.finished else next(iter(self._open)))
        return reply

    def over(self) -> bool:
        """Whether there is nothing more to answer."""
        return not self.many and any(site.finished for site, _ in self._open.values())

    def ended(self) -> bool:
        """Whether that is since the server has given the run up."""
        return not self.many and any(site.ended for site, _ in self._open.values())
