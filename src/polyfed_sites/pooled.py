"""The server's side of "standardise = pooled": medians, means and deviations of columns over the rows of all sites,
from sums that each site makes of its own.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Literal

import numpy as np
import torch

from polyfed.core.messages import Form, State
from polyfed.data.moments import deviation, medians, total
from polyfed.data.preparation import Preparation, Settled
from polyfed.data.said import Csv
from polyfed_sites import wire as m
from polyfed_sites.asking import Asking
from polyfed_sites.joining import WAYS
from polyfed_sites.sums import Opener
from polyfed_sites.wire import Message, misfit

What = Literal["counts", "sums", "squares"]


class Pooling:
    """Sums over the rows of all sites, those of `moments` and `median` over the rows in their order, to the bit."""

    def __init__(
        self,
        asking: Asking,
        joins: Mapping[str, m.Join],
        settled: Settled,
        blank: Preparation,  # that is settled, without statistics
        said: Mapping[str, m.Joined],
        peers: Mapping[str, m.Peer],  # where sums are secure
        opener: Opener | None = None,  # the same
    ):
        self.asking, self.joins, self.blank, self.peers, self.opener = asking, joins, blank, dict(peers), opener
        self.bill, self.train = np.zeros((3, len(said))), {name: about.counts.train for name, about in said.items()}
        self.numbers = [i.name for i in blank.inputs if i.values is None]
        files = [about.file.used for about in said.values() if isinstance(about.file, Csv)]
        self.gaps = gaps = [name for name in self.numbers if any(columns[name].some for columns in files)]
        inputs = tuple(dataclasses.replace(i, gap=i.gap or i.name in gaps) for i in blank.inputs)  # also of test rows
        self.settled, self.gapped = settled, dataclasses.replace(settled, preparation=blank.with_inputs(inputs))
        self.columns = len(self.numbers) + (blank.labels is None)

    def statistics(self) -> tuple[Settled, np.ndarray]:
        """What is settled with everybody's medians, means and deviations; [3, n] messages, bytes down and bytes up."""
        fill, n = self._fill(), sum(self.train.values())
        mean = total([s["sums"].numpy() for s in self._sums(fill)]) / n
        given = {"fill": torch.as_tensor(fill), "mean": torch.as_tensor(mean)}
        squares = [s["squares"].numpy() for s in self._ask("squares", given, {"squares": (self.columns,)})]
        scale = deviation(mean, total(squares) / n)
        without = [k for k, name in enumerate(self.numbers) if name not in self.gaps]
        fill[without] = mean[without]  # new rows may have gaps where no file has one
        return self.settled.with_statistics(fill, mean, scale), self.bill

    def _sums(self, fill: np.ndarray) -> list[State]:
        return self._ask("sums", {"fill": torch.as_tensor(fill)}, {"n": (len(fill),), "sums": (self.columns,)})

    def _fill(self) -> np.ndarray:
        """[numbers] for gaps: means or medians of what is there."""
        fill = np.zeros(len(self.numbers))
        if self.gaps and self.blank.missing == "mean":
            sums = self._sums(fill)
            there = torch.stack([s["n"] for s in sums]).sum(0).clamp(min=1)
            fill = total([s["sums"][: len(fill)].numpy() for s in sums]) / there.numpy()
        elif self.gaps:
            fill[[self.numbers.index(name) for name in self.gaps]] = medians(self._count, len(self.gaps), WAYS)
        return fill

    def _count(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = self._ask("counts", {"at": torch.as_tensor(at)}, {"n": (len(self.gaps),), "counts": at.shape})
        there, most = (torch.stack([s[key] for s in counts]).sum(0).numpy() for key in ("n", "counts"))
        return there, most

    def _ask(self, what: What, tensors: State, shapes: Mapping[str, tuple[int, ...]]) -> list[State]:
        """The sums of each site; with an opener one answer, that of all sites together."""
        about, dtype = (self.gaps, torch.int64) if what == "counts" else ([], torch.float64)
        messages = {
            name: Message(m.Pooled(joined=j, peers=self.peers, settled=self.gapped, what=what, columns=about), tensors)
            for name, j in self.joins.items()
        }
        forms = {k: Form(torch.int64 if k == "n" else dtype, of, math.prod(of)) for k, of in shapes.items()}
        if self.opener is not None:
            size = sum(form.most for form in forms.values())
            totals = iter(self.opener.ask(messages, size, "pooled sums"))
            flat = {key: np.array([next(totals) for _ in range(forms[key].most)]) for key in sorted(forms)}
            self.bill += np.array([[1, message.bytes, 16 * size] for message in messages.values()]).T
            return [{key: torch.as_tensor(flat[key]).to(forms[key].dtype).view(shapes[key]) for key in flat}]
        replies = self.asking.all(messages, "pooled sums", m.Sums, partial(self._wrong, what, forms))
        self.bill += np.array([[1, messages[name].bytes, reply.bytes] for name, reply in replies.items()]).T
        return [reply.tensors for reply in replies.values()]

    def _wrong(self, what: What, forms: Mapping[str, Form], name: str, reply: Message[m.Sums]) -> str:
        if misfits := misfit(reply.tensors, forms):
            return misfits
        least, most = -math.inf if what == "sums" else 0, self.train[name] if what == "counts" else math.inf
        within = {k: (0, self.train[name]) if k == "n" else (least, most) for k in reply.tensors}
        right = all(bool(((t >= within[k][0]) & (t <= within[k][1])).all()) for k, t in reply.tensors.items())
        return "" if right else "its sums are damaged"
