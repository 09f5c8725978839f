"""What a server that means harm reads of a site: the adversaries, on the operator's own machine, against their own file
and policy. Nothing leaves; vaults lie in a folder of their own, and each attack begins with a new one.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from polyfed.base.columns import Columns
from polyfed.base.errors import PolyfedError
from polyfed.data.csv_files import cells_of
from polyfed.data.moments import ordered
from polyfed.data.repairs import read
from polyfed.metrics.scores import ACCURACY
from polyfed_sites import wire as m
from polyfed_sites.consent import Consent
from polyfed_sites.keys import fingerprint
from polyfed_sites.policy import Policy
from polyfed_sites.running import Run
from polyfed_sites.server import serve
from polyfed_sites.site import Site
from polyfed_sites.wire import Message

NAME, MOST, TRIES, UNITS = "site", 1 << 28, 60, 1000
OPEN = Policy(
    least_rows=1, least_batch=1, least_count=1, most_rounds=10**6, pooled="medians", digits=17, separable=True
)
FILE = """rounds = 1
batch-size = "full"
local-steps = 1
evaluate-every = 1
seed = 1
device = "cpu"
[algorithm]
name = "fedavg"
lr = 1.0
[columns]
standardise = "client"
drop = {drop}
{model}"""
MLP = f'[model]\nname = "mlp"\nhidden = [{UNITS}]\n'


Asked = dict[str, Message[Any]]  # the first message of each kind


class Read(NamedTuple):
    """What an attack has read. of: how many it tried for     what: rows, cells, ...     by: what stopped it"""

    attack: str
    read: int
    of: int
    what: str
    by: str


class _Room:
    """A server in one room with sites: it carries messages, and keeps what it has asked. keys: public ones, by name"""

    def __init__(self, answer: Callable[[str, bytes], bytes | str], keys: dict[str, str] | None = None):
        self.answer, self.most, self.run, self.asked = answer, MOST, "", list[Message[Any]]()
        self._given, self.keys = dict[str, bytes](), keys or {}

    def sites(self) -> Sequence[str]:
        return [*self.keys] or [NAME]

    def register(self) -> dict[str, str]:
        return self.keys

    def push(self, messages: Any) -> None:
        self.asked += messages.values()
        self._given |= {name: message.pack() for name, message in messages.items()}

    def pull(
        self, names: Sequence[str], enough: int | None = None, seconds: float | None = None
    ) -> dict[str, bytes | str]:
        return {name: self.answer(name, self._given.pop(name)) for name in names if name in self._given}

    def close(self) -> None:
        self._given.clear()


class Attacks:
    """data: the operator's file     policy: theirs     allow: as `polyfed client` has it     place: for vaults"""

    def __init__(self, data: Path, policy: Policy, allow: frozenset[str], place: Path):
        self.data, self.policy, self.place, self.consent = data, policy, place, Consent(allow)
        self.sheet = read(data)
        cells = {name: cells_of(self.sheet, name, Columns()) for name in self.sheet.columns}
        cells.popitem()  # the target
        self.words = [n for n, c in cells.items() if c.numbers < c.there and c.distinct]
        self.numbers = [n for n, c in cells.items() if c.numbers == c.there and n not in self.words]
        self._vaults = itertools.count()

    def site(self, policy: Policy | None = None) -> Site:
        """The operator's site with a new vault."""
        vault = self.place / str(next(self._vaults)) / NAME
        return Site(NAME, self.data, vault, self.consent, policy=policy or self.policy)

    def study(self, model: str) -> Path:
        """An experiment's file. model: its last tables"""
        drop = str(self.words).replace("'", '"')
        (file := self.place / "study.toml").write_bytes(FILE.format(drop=drop, model=model).encode())
        return file

    def honest(self, model: str = "") -> Asked:
        """The messages of a run at a site without a policy, by kind, from which the others are made."""
        room, site = _Room(lambda _, data: site.answer(data)), self.site(OPEN)
        serve(self.study(model), room, self.place / f"run{next(self._vaults)}", sites=[NAME])
        return {message.head.kind: message for message in reversed(room.asked)}

    @staticmethod
    def ask(site: Site, message: Message[Any]) -> tuple[Message[Any] | None, str]:
        """An answer, or None and what has refused it."""
        answer = m.reply(site.answer(message.pack()), MOST, NAME)
        if isinstance(answer.head, m.Failed):
            return None, key_of(answer.head.error)
        return answer, ""

    def all(self) -> Iterator[Read]:
        """Every attack, as it ends."""
        linear, network, word = self.honest(), self.honest(MLP), (self.words or self.numbers)[-1]
        for attack, what, found in (
            ("joins that name a number as a gap", "cells", partial(self.joins, linear, self.numbers[0])),
            ("joins that name a text as a gap", "names", partial(self.joins, linear, word)),
            ("agreements whose parts are nested", "rows", partial(self.agreements, linear)),
            ("a search for medians", "cells", partial(self.medians, linear)),
            ("steps on one row", "rows", partial(self.batches, linear)),
            ("a line that moves", "rows", partial(self.line, linear)),
            ("scores of such lines", "rows", partial(self.scores, linear)),
            ("a model of thresholds", "rows", partial(self.thresholds, network, False)),
            ("thresholds of one column", "cells", partial(self.thresholds, network, True)),
            ("one question twice", "noise taken off", partial(self.twice, linear)),
            ("sums with keys of the server's", "replies", partial(self.strangers, linear)),
            ("a sum of three sites, two the server's", "replies", partial(self.cohorts, True)),
            ("a sum without one site", "replies", partial(self.cohorts, False)),
        ):
            read, of, by = found()
            yield Read(attack, read, of, what, by)

    # before anybody trains: (what is read, of how many, what has stopped the rest)

    def told(self, site: Site, join: m.Join, **columns: Any) -> tuple[str, str]:
        """What a site says of its file where the server names other settings of columns."""
        other = dataclasses.replace(join.columns, **columns)
        answer, by = self.ask(site, Message(join.model_copy(update={"columns": other})))
        return ("" if answer is None else answer.head.file.model_dump_json()), by

    def joins(self, asked: Asked, column: str) -> tuple[int, int, str]:
        """Cells that are told apart from texts that nobody has; what many rows have is nobody's."""
        site, join, read = self.site(), asked["join"].head, 0
        cells = [c for c, n in Counter(self.sheet.columns[column]).items() if c and n < Policy().least_count][:TRIES]
        kept = [name for name in self.words if name != column]
        plain, by = self.told(site, join, drop=kept, gaps=["nobody has this"])
        for cell in cells:
            told, why = self.told(site, join, drop=kept, gaps=[cell])
            by, read = why or by, read + bool(told and plain and told != plain)
        return read, len(cells), ", ".join(dict.fromkeys(["least-count", *([by] if by else [])]))

    def pooled(self, asked: Asked, what: Any, tensors: dict[str, torch.Tensor], **terms: Any) -> Message[Any]:
        begin = asked["begin"].head
        join = begin.joined.model_copy(update={"needs": ["pooled"], **terms})
        columns = self.numbers[:1] if what == "counts" else []
        return Message(m.Pooled(joined=join, settled=begin.settled, what=what, columns=columns), tensors)

    def agreements(self, asked: Asked) -> tuple[int, int, str]:
        """Sums over parts that are a row larger each time, subtracted."""
        site, n, sums, by = self.site(), len(self.sheet.lines), list[Any](), ""
        d = sum(i.values is None for i in asked["begin"].head.settled.preparation.inputs)
        for k in range(TRIES // 2):
            question = self.pooled(asked, "sums", {"fill": torch.zeros(d).double()}, test=(n // 5 + k) / n)
            answer, why = self.ask(site, question)
            sums, by = ([*sums, answer.tensors] if answer else sums), why or by
        alone = [a for a, b in itertools.pairwise(sums) if 0 < abs(float((a["n"] - b["n"]).sum())) <= d]
        return len(alone), TRIES // 2 - 1, by

    def medians(self, asked: Asked) -> tuple[int, int, str]:
        values = self.sheet.numbers(self.numbers[0])
        grid = np.unique(values[~np.isnan(values)])[:250]
        question = self.pooled(asked, "counts", {"at": torch.as_tensor(ordered(grid[:, None]))})
        prepared = question.head.settled.preparation
        inputs = tuple(dataclasses.replace(i, gap=True) for i in prepared.inputs if i.name == self.numbers[0])
        settled = dataclasses.replace(question.head.settled, preparation=prepared.with_inputs(inputs))
        answer, by = self.ask(
            self.site(), question._replace(head=question.head.model_copy(update={"settled": settled}))
        )
        return (0 if answer is None else int(answer.tensors["counts"].max())), len(self.sheet.lines), by

    # training

    def begun(self, asked: Asked, **terms: Any) -> tuple[Site, str]:
        """A site that has begun, and what has refused it."""
        site, begin = self.site(), asked["begin"].head
        training = begin.joined.training | terms.pop("training", {})
        joined = begin.joined.model_copy(update={"rounds": 40, "training": training, **terms})
        return site, self.ask(site, Message(begin.model_copy(update={"joined": joined})))[1]

    def steps(self, site: Site, asked: Asked, models: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
        """By how much a site moves models of the server's own, one a round."""
        train, moves, by = asked["train"], list[torch.Tensor](), ""
        for t, w in enumerate(models):
            head = train.head.model_copy(update={"t": t, "base": (-1, -1)})
            reply, why = self.ask(site, Message(head, {"w": w.to(train.tensors["w"])}))
            by = why or by
            moves += [w.double() - reply.tensors["w"].double()] if reply else []
        return moves, by

    def rows(self, site: Site, guesses: Sequence[torch.Tensor] | torch.Tensor, d: int | None = None) -> int:
        """How many rows of the site are among guesses [k, d], to a hundredth. d: how many columns count"""
        if not isinstance(site.state, Run) or not len(guesses):
            return 0
        x = site.state.client.data["train"].x.double().flatten(1)[:, :d]
        return int((torch.cdist(x, torch.stack([*guesses]), p=float("inf")).min(1).values < 1e-2).sum())

    def layers(self, site: Site, w: torch.Tensor) -> list[torch.Tensor]:
        assert isinstance(site.state, Run)
        return [*site.state.client.task.layout.named(w.double()).values()]

    def batches(self, asked: Asked) -> tuple[int, int, str]:
        site, by = self.begun(asked, training={"batch-size": 1})
        moves, why = ([], "") if by else self.steps(site, asked, [asked["train"].tensors["w"] * 0 + 0.01] * 20)
        guesses = [weight[0] / bias[0] for weight, bias in (self.layers(site, v)[:2] for v in moves)]
        return self.rows(site, guesses), 20, by or why

    def cuts(self, site: Site, asked: Asked) -> list[torch.Tensor]:
        """Linear models that are sure of either class on either side of a line, which moves."""
        like = self.layers(site, asked["train"].tensors["w"])
        v, models = torch.linspace(1, 0.2, like[0].shape[1]).double(), list[torch.Tensor]()
        for level in np.linspace(1.0, 2.2, 40).tolist():
            weight, bias = torch.zeros_like(like[0]), torch.zeros_like(like[1])
            weight[0], bias[0] = 1e4 * v / v.norm(), -1e4 * level
            models.append(torch.cat([weight.flatten(), bias]))
        return models

    def line(self, asked: Asked) -> tuple[int, int, str]:
        """Steps that are longer than single precision rounds such models."""
        site, by = self.begun(asked, algorithm={"name": "fedavg", "lr": 1000.0})
        if by:
            return 0, 40, by
        moves, by = self.steps(site, asked, self.cuts(site, asked))
        apart = [self.layers(site, b - a) for a, b in itertools.pairwise(moves)]
        guesses = [weight[0] / bias[0] for weight, bias in apart if abs(float(bias[0])) > 1e-9]
        return self.rows(site, guesses), 40, by or "least-count"

    def scores(self, asked: Asked) -> tuple[int, int, str]:
        site, by = self.begun(asked, evaluations=200)
        if by:
            return 0, 39, by
        assert isinstance(site.state, Run)
        counts, n = list[float](), len(site.state.client.data["train"].x)
        for w in self.cuts(site, asked):
            head = asked["evaluate"].head.model_copy(update={"split": "train", "base": (-1, -1)})
            answer, why = self.ask(site, Message(head, {"w": w.to(asked["train"].tensors["w"])}))
            counts, by = ([*counts, answer.head.metrics.get(ACCURACY.name, 0) * n] if answer else counts), why or by
        one = sum(abs(abs(a - b) - 1) < 0.1 for a, b in itertools.pairwise(counts))
        return one, 39, by or "least-count"

    def thresholds(self, asked: Asked, axis: bool) -> tuple[int, int, str]:
        """Units of one direction whose thresholds follow each other: gradients of two differ by the rows between, and
        second differences of what leaves them bend where a row is."""
        site, by = self.begun(asked)
        if by:
            return 0, 1, by
        first, bias, last, end = self.layers(site, asked["train"].tensors["w"])
        v = torch.eye(first.shape[1])[0].double() if axis else torch.linspace(1, 0.3, first.shape[1]).double()
        weight, cut = (v / v.norm()).expand_as(first), torch.linspace(-3, 3, len(bias)).double()
        out = torch.zeros_like(last)
        out[0] = 1e-3
        moves, by = self.steps(site, asked, [torch.cat([weight.flatten(), -cut, out.flatten(), torch.zeros_like(end)])])
        if not moves:
            return 0, 1, by
        dw, db, bent = self.layers(site, moves[0])[:3]
        bent, dw, db = bent[0].diff().diff().abs(), dw[:-1] - dw[1:], db[:-1] - db[1:]
        guesses, d = (dw / db[:, None])[db.abs() > 1e-9], None
        if axis:
            guesses, d = cut[1:-1][bent > 1e-6 * bent.max().clamp(min=1e-12)][:, None], 1
        return self.rows(site, guesses, d), len(self.sheet.lines), "least-count"

    def twice(self, asked: Asked) -> tuple[int, int, str]:
        """One question with two step sizes: noise that both share is their difference."""
        privacy = {"epsilon": self.policy.epsilon or 1.0, "delta": self.policy.delta, "clip": 1.0, "noise": "own"}
        site, by = self.begun(asked, training={"privacy": privacy})
        train, words = asked["train"], list[torch.Tensor]()
        for scale in (1.0, 100.0) if not by else ():
            head = train.head.model_copy(update={"scale": scale, "base": (-1, -1)})
            answer, why = self.ask(site, Message(head, {"w": train.tensors["w"].double()}))
            by, words = why or by, [*words, *(t.double() / scale for t in (answer.tensors.values() if answer else ()))]
        shared = len(words) == 2 and float((words[0] - words[1]).abs().min()) < 1e-6 * float(words[0].abs().max())
        return int(shared), 1, by or "other noise, booked"

    def strangers(self, asked: Asked) -> tuple[int, int, str]:
        """A secure sum whose other sites are the server's."""
        keys = {n: _public(ec.generate_private_key(ec.SECP256R1())) for n in (NAME, "a", "b")}
        site, join = self.site(), asked["join"].head
        site.hidden.sign = lambda text: b"signed"
        privacy = {"training": join.training | {"privacy": {"sums": "secure"}}, "keys": keys, "cohort": 3}
        answer, by = self.ask(site, Message(join.model_copy(update=privacy)))
        return int(answer is not None), 1, by

    def cohorts(self, fewer: bool) -> tuple[int, int, str]:
        """A secure sum of four pinned sites. fewer: the server names three in its request, or opens three replies"""
        made = {name: ec.generate_private_key(ec.SECP256R1()) for name in (NAME, "a", "b", "c")}
        keys, sites = {n: _public(k) for n, k in made.items()}, dict[str, Site]()
        for name, key in made.items():
            policy = self.policy if name == NAME else dataclasses.replace(OPEN, absent=1)
            policy = dataclasses.replace(policy, peers=[fingerprint(k) for k in keys.values()])
            vault = self.place / str(next(self._vaults)) / name
            sign = partial(key.sign, signature_algorithm=ec.ECDSA(hashes.SHA256()))
            sites[name] = Site(name, self.data, vault, self.consent, policy=policy, sign=sign)

        def answer(name: str, data: bytes) -> bytes | str:
            asked = m.request(data, MOST, name)
            if isinstance(asked.head, m.Train) and not fewer and name == "c":
                return "no answer"
            if isinstance(asked.head, m.Train) and fewer and name == NAME:
                data = asked._replace(head=asked.head.model_copy(update={"cohort": ["a", "b", NAME]})).pack()
            return sites[name].answer(data)

        file, by, place = self.study('[privacy]\nsums = "secure"\n'), "", self.place / f"run{next(self._vaults)}"
        try:
            serve(file, _Room(answer, keys), place, sites=[*keys], wait=30, quorum=None if fewer else 3)
        except PolyfedError as e:
            by = key_of(str(e))
        return int(not by), 1, by


def _public(key: ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def key_of(error: str) -> str:
    """Key of the policy that has refused, or the words of the error."""
    refusal = re.search(r"its policy has (\S+) =", error)
    return refusal[1] if refusal else "terms" if "and has agreed to" in error else error


def attacked(data: Path, policy: Policy, allow: frozenset[str], place: Path) -> list[Read]:
    """All attacks. Raises PolyfedError for a file that no run fits."""
    try:
        return [*Attacks(data, policy, allow, place).all()]
    except IndexError:
        raise PolyfedError(f"{data}: found no column of numbers beside the target, expected one to attack") from None


def table(reads: Sequence[Read]) -> str:
    """What was read, in lines."""
    rows = [f"| {r.attack} | {r.read} of {r.of} {r.what} | {r.by or '–'} |" for r in reads]
    return "\n".join(["| attack | read | stopped by |", "|---|---|---|", *rows])
