"""The server's side of "standardise = pooled": medians, means and deviations of columns over the rows of all sites,
from sums that each site makes of its own.
"""

import dataclasses
import math
from collections.abc import Mapping
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


def pooled(
    asking: Asking,
    joins: Mapping[str, m.Join],
    settled: Settled,
    blank: Preparation,  # that is settled, without statistics
    said: Mapping[str, m.Joined],
    peers: Mapping[str, m.Peer],  # where sums are secure
    opener: Opener | None = None,  # the same
) -> tuple[Settled, np.ndarray]:
    """What is settled with everybody's medians, means and deviations; and [3, n] messages, bytes down and bytes up.

    The sums are those of `moments` and `median` over the sites' rows in their order, to the bit.
    """
    bill, train = np.zeros((3, len(said))), {name: about.counts.train for name, about in said.items()}
    numbers = [i.name for i in blank.inputs if i.values is None]
    files = [about.file.used for about in said.values() if isinstance(about.file, Csv)]
    gaps = [name for name in numbers if any(columns[name].some for columns in files)]
    inputs = tuple(dataclasses.replace(i, gap=i.gap or i.name in gaps) for i in blank.inputs)  # also those of test rows
    gapped = dataclasses.replace(settled, preparation=blank.with_inputs(inputs))
    columns = len(numbers) + (blank.labels is None)

    def ask(what: What, tensors: State, shapes: Mapping[str, tuple[int, ...]]) -> list[State]:
        about, dtype = gaps if what == "counts" else [], torch.int64 if what == "counts" else torch.float64
        messages = {
            name: Message(m.Pooled(joined=join, peers=dict(peers), settled=gapped, what=what, columns=about), tensors)
            for name, join in joins.items()
        }
        expected = {
            key: Form(torch.int64 if key == "n" else dtype, shape, math.prod(shape)) for key, shape in shapes.items()
        }

        def wrong(name: str, reply: Message[m.Sums]) -> str:
            if misfits := misfit(reply.tensors, expected):
                return misfits
            least, most = -math.inf if what == "sums" else 0, train[name] if what == "counts" else math.inf
            within = {k: (0, train[name]) if k == "n" else (least, most) for k in reply.tensors}
            right = all(bool(((t >= within[k][0]) & (t <= within[k][1])).all()) for k, t in reply.tensors.items())
            return "" if right else "its sums are damaged"

        if opener is not None:  # one answer, that of all sites together
            size = sum(form.most for form in expected.values())
            totals = iter(opener.ask(messages, size, "pooled sums"))
            flat = {key: np.array([next(totals) for _ in range(expected[key].most)]) for key in sorted(expected)}
            bill.__iadd__(np.array([[1, message.bytes, 16 * size] for message in messages.values()]).T)
            return [{key: torch.as_tensor(flat[key]).to(expected[key].dtype).view(shapes[key]) for key in flat}]
        replies = asking.all(messages, "pooled sums", m.Sums, wrong)
        bill.__iadd__(np.array([[1, messages[name].bytes, reply.bytes] for name, reply in replies.items()]).T)
        return [reply.tensors for reply in replies.values()]

    fill, n, zero = np.zeros(len(numbers)), sum(train.values()), {"fill": torch.zeros(len(numbers)).double()}
    shapes = {"n": (len(numbers),), "sums": (columns,)}
    if gaps and blank.missing == "mean":
        sums = ask("sums", zero, shapes)
        there = torch.stack([s["n"] for s in sums]).sum(0).clamp(min=1)
        fill = total([s["sums"][: len(numbers)].numpy() for s in sums]) / there.numpy()
    elif gaps:

        def count(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            shapes = {"n": (len(gaps),), "counts": at.shape}
            counts = ask("counts", {"at": torch.as_tensor(at)}, shapes)
            there, most = (torch.stack([s[key] for s in counts]).sum(0).numpy() for key in ("n", "counts"))
            return there, most

        fill[[numbers.index(name) for name in gaps]] = medians(count, len(gaps), WAYS)
    sums = [s["sums"].numpy() for s in ask("sums", {"fill": torch.as_tensor(fill)}, shapes)]
    mean = total(sums) / n
    given = {"fill": torch.as_tensor(fill), "mean": torch.as_tensor(mean)}
    squares = [s["squares"].numpy() for s in ask("squares", given, {"squares": (columns,)})]
    scale = deviation(mean, total(squares) / n)
    without = [k for k, name in enumerate(numbers) if name not in gaps]
    fill[without] = mean[without]  # new rows may have gaps where no file has one
    return settled.with_statistics(fill, mean, scale), bill
