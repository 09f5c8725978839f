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
from polyfed.data.csv_files import cells_of, read
from polyfed.data.moments import ordered
from polyfed.metrics.scores import ACCURACY
from polyfed_sites import wire as m
from polyfed_sites.consent import Consent
from polyfed_sites.keys import fingerprint
from polyfed_sites.policy import Policy
from polyfed_sites.server import serve
from polyfed_sites.site import Site
from polyfed_sites.wire import Message

NAME, MOST, TRIES, UNITS = "site", 1 << 28, 60, 1000
OPEN = Policy(
    least_rows=1, least_batch=1, least_count=1, most_rounds=10**6, pooled="medians", digits=17, separable=True
)
FILE = """rounds = 40
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


Asked = dict[str, list[Message[Any]]]  # messages by their kind


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
        seen = {name: cells_of(self.sheet, name, Columns()) for name in self.sheet.columns}
        self.target = [*seen][-1]
        self.words = [n for n, c in seen.items() if c.numbers < c.there and c.distinct and n != self.target]
        self.numbers = [n for n, c in seen.items() if c.numbers == c.there and n != self.target and n not in self.words]
        self._vaults = itertools.count()

    def site(self, policy: Policy | None = None) -> Site:
        """The operator's site with a new vault."""
        vault = self.place / str(next(self._vaults)) / NAME
        return Site(NAME, self.data, vault, self.consent, policy=policy or self.policy)

    def study(self, model: str) -> Path:
        """An experiment's file. model: its last tables"""
        drop = str(self.words).replace("'", '"')
        (file := self.place / "study.toml").write_text(
            FILE.format(drop=drop, model=model).replace("rounds = 40", "rounds = 1")
        )
        return file

    def honest(self, model: str = "") -> Asked:
        """The messages of a run at a site without a policy, by kind, from which the others are made."""
        room, site = _Room(lambda _, data: site.answer(data)), self.site(OPEN)
        serve(self.study(model), room, self.place / f"run{next(self._vaults)}", sites=[NAME])
        kinds = dict[str, list[Message[Any]]]()
        for message in room.asked:
            kinds.setdefault(message.head.kind, []).append(message)
        return kinds

    @staticmethod
    def ask(site: Site, message: Message[Any]) -> tuple[Message[Any] | None, str]:
        """An answer, or None and what has refused it."""
        found = m.reply(site.answer(message.pack()), MOST, NAME)
        if isinstance(found.head, m.Failed):
            return None, key_of(found.head.error)
        return found, ""

    def all(self) -> Iterator[Read]:
        """Every attack, as it ends."""
        linear = self.honest()
        yield from (attack(linear) for attack in (self.joins, self.names, self.agreements, self.medians))
        yield from (attack(linear) for attack in (self.batches, self.thresholds, self.scores))
        network = self.honest(MLP)
        yield self.imprint(network)
        yield self.kinks(network)
        yield self.twice(linear)
        yield self.strangers(linear)
        yield self.cohorts("a sum of three sites, two the server's", fewer=True)
        yield self.cohorts("a sum without one site", fewer=False)

    # before anybody trains

    def told(self, site: Site, join: m.Join, **columns: Any) -> tuple[str, str]:
        """What a site says of its file where the server names other settings of columns."""
        other = dataclasses.replace(join.columns, **columns)
        found, by = self.ask(site, Message(join.model_copy(update={"columns": other})))
        return ("" if found is None else found.head.file.model_dump_json()), by

    def present(self, attack: str, what: str, join: m.Join, column: str) -> Read:
        """Cells that are told apart from texts that nobody has; what many rows have is nobody's."""
        site, by, read = self.site(), "", 0
        cells = [c for c, n in Counter(self.sheet.columns[column]).items() if c and n < Policy().least_count][:TRIES]
        kept = [name for name in self.words if name != column]
        plain, by = self.told(site, join, drop=kept, gaps=["nobody has this"])
        for cell in cells:
            said, why = self.told(site, join, drop=kept, gaps=[cell])
            by, read = why or by, read + bool(said and plain and said != plain)
        return Read(attack, read, len(cells), what, ", ".join(dict.fromkeys(["least-count", *([by] if by else [])])))

    def joins(self, asked: Asked) -> Read:
        return self.present("joins that name a number as a gap", "cells", asked["join"][0].head, self.numbers[0])

    def names(self, asked: Asked) -> Read:
        column = (self.words or self.numbers)[-1]
        return self.present("joins that name a text as a gap", "names", asked["join"][0].head, column)

    def pooled(self, asked: Asked, what: Any, tensors: dict[str, torch.Tensor], **terms: Any) -> Message[Any]:
        begin = asked["begin"][0].head
        join = begin.joined.model_copy(update={"needs": ["pooled"], **terms})
        columns = self.numbers[:1] if what == "counts" else []
        return Message(m.Pooled(joined=join, settled=begin.settled, what=what, columns=columns), tensors)

    def agreements(self, asked: Asked) -> Read:
        """Sums over parts that are a row larger each time, subtracted."""
        site, n, sums, by = self.site(), len(self.sheet.lines), list[Any](), ""
        d = sum(i.values is None for i in asked["begin"][0].head.settled.preparation.inputs)
        for k in range(TRIES // 2):
            question = self.pooled(asked, "sums", {"fill": torch.zeros(d).double()}, test=(n // 5 + k) / n)
            found, why = self.ask(site, question)
            sums, by = ([*sums, found.tensors] if found else sums), why or by
        alone = [a for a, b in itertools.pairwise(sums) if 0 < abs(float((a["n"] - b["n"]).sum())) <= d]
        return Read("agreements whose parts are nested", len(alone), TRIES // 2 - 1, "rows", by)

    def medians(self, asked: Asked) -> Read:
        values = self.sheet.numbers(self.numbers[0])
        grid = np.unique(values[~np.isnan(values)])[:250]
        question = self.pooled(asked, "counts", {"at": torch.as_tensor(ordered(grid[:, None]))})
        prepared = question.head.settled.preparation
        inputs = tuple(dataclasses.replace(i, gap=True) for i in prepared.inputs if i.name == self.numbers[0])
        settled = dataclasses.replace(question.head.settled, preparation=prepared.with_inputs(inputs))
        found, by = self.ask(self.site(), question._replace(head=question.head.model_copy(update={"settled": settled})))
        counts = 0 if found is None else int(found.tensors["counts"].max())
        return Read("a search for medians", counts, len(self.sheet.lines), "cells", by)

    # training

    def begun(self, site: Site, asked: Asked, **terms: Any) -> str:
        """Have a site begin; what has refused it."""
        begin = asked["begin"][0].head
        training = begin.joined.training | terms.pop("training", {})
        joined = begin.joined.model_copy(update={"rounds": 40, "training": training, **terms})
        return self.ask(site, Message(begin.model_copy(update={"joined": joined})))[1]

    def steps(self, site: Site, asked: Asked, models: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
        """By how much a site moves models of the server's own, one a round."""
        train, found, by = asked["train"][0], list[torch.Tensor](), ""
        for t, w in enumerate(models):
            head = train.head.model_copy(update={"t": t, "base": (-1, -1)})
            said, why = self.ask(site, Message(head, {"w": w.to(train.tensors["w"])}))
            by = why or by
            found += [w.double() - said.tensors["w"].double()] if said else []
        return found, by

    def rows(self, site: Site, guesses: torch.Tensor, d: int | None = None) -> int:
        """How many rows of the site are among guesses [k, d], to a hundredth. d: how many columns count"""
        going = site._begun
        if going is None or not len(guesses):
            return 0
        x = going.client.data["train"].x.double().flatten(1)[:, :d]
        return int((torch.cdist(x, guesses, p=float("inf")).min(1).values < 1e-2).sum())

    def layers(self, site: Site, w: torch.Tensor) -> list[torch.Tensor]:
        going = site._begun
        assert going is not None
        return [*going.client.task.layout.named(w.double()).values()]

    def batches(self, asked: Asked) -> Read:
        site, start = self.site(), asked["train"][0].tensors["w"]
        by = self.begun(site, asked, training={"batch-size": 1})
        moves, why = self.steps(site, asked, [start * 0 + 0.01] * 20) if not by else ([], "")
        guesses = [weight[0] / bias[0] for weight, bias in (self.layers(site, v)[:2] for v in moves)]
        return Read("steps on one row", self.rows(site, torch.stack(guesses)) if guesses else 0, 20, "rows", by or why)

    def cuts(self, site: Site, asked: Asked) -> tuple[list[torch.Tensor], list[float]]:
        """Linear models that are sure of either class on either side of a line, which moves."""
        like = self.layers(site, asked["train"][0].tensors["w"])
        d, levels = like[0].shape[1], np.linspace(1.0, 2.2, 40).tolist()
        v = torch.linspace(1, 0.2, d).double()
        v, models = v / v.norm(), list[torch.Tensor]()
        for level in levels:
            weight, bias = torch.zeros_like(like[0]), torch.zeros_like(like[1])
            weight[0], bias[0] = 1e4 * v, -1e4 * level
            models.append(torch.cat([weight.flatten(), bias]))
        return models, levels

    def thresholds(self, asked: Asked) -> Read:
        site, steps = self.site(), {"name": "fedavg", "lr": 1000.0}  # longer than single precision rounds such models
        if by := self.begun(site, asked, algorithm=steps):
            return Read("a line that moves", 0, 40, "rows", by)
        moves, by = self.steps(site, asked, self.cuts(site, asked)[0])
        apart = [self.layers(site, b - a) for a, b in itertools.pairwise(moves)]
        guesses = [weight[0] / bias[0] for weight, bias in apart if abs(float(bias[0])) > 1e-9]
        read = self.rows(site, torch.stack(guesses)) if guesses else 0
        return Read("a line that moves", read, 40, "rows", by or "least-count")

    def scores(self, asked: Asked) -> Read:
        site = self.site()
        if by := self.begun(site, asked, evaluations=200):
            return Read("scores of such lines", 0, 39, "rows", by)
        going, counts = site._begun, list[float]()
        assert going is not None
        n, by = len(going.client.data["train"].x), ""
        for w in self.cuts(site, asked)[0]:
            head = asked["evaluate"][0].head.model_copy(update={"split": "train", "base": (-1, -1)})
            found, why = self.ask(site, Message(head, {"w": w.to(asked["train"][0].tensors["w"])}))
            counts, by = ([*counts, found.head.metrics.get(ACCURACY.name, 0) * n] if found else counts), why or by
        one = sum(abs(abs(a - b) - 1) < 0.1 for a, b in itertools.pairwise(counts))
        return Read("scores of such lines", one, 39, "rows", by or "least-count")

    def thresholded(self, attack: str, what: str, asked: Asked, axis: bool) -> Read:
        """Units of one direction whose thresholds follow each other: gradients of two differ by the rows between, and
        second differences of what leaves them bend where a row is."""
        site = self.site()
        if by := self.begun(site, asked):
            return Read(attack, 0, 1, what, by)
        first, bias, last, end = self.layers(site, asked["train"][0].tensors["w"])
        v = torch.eye(first.shape[1])[0].double() if axis else torch.linspace(1, 0.3, first.shape[1]).double()
        weight, cut = (v / v.norm()).expand_as(first), torch.linspace(-3, 3, len(bias)).double()
        out = torch.zeros_like(last)
        out[0] = 1e-3
        moves, by = self.steps(site, asked, [torch.cat([weight.flatten(), -cut, out.flatten(), torch.zeros_like(end)])])
        if not moves:
            return Read(attack, 0, 1, what, by)
        dw, db, bent = self.layers(site, moves[0])[:3]
        bent, dw, db = bent[0].diff().diff().abs(), dw[:-1] - dw[1:], db[:-1] - db[1:]
        guesses, d = (dw / db[:, None])[db.abs() > 1e-9], None
        if axis:
            guesses, d = cut[1:-1][bent > 1e-6 * bent.max().clamp(min=1e-12)][:, None], 1
        return Read(attack, self.rows(site, guesses, d), len(self.sheet.lines), what, "least-count")

    def imprint(self, asked: Asked) -> Read:
        return self.thresholded("a model of thresholds", "rows", asked, False)

    def kinks(self, asked: Asked) -> Read:
        return self.thresholded("thresholds of one column", "cells", asked, True)

    def twice(self, asked: Asked) -> Read:
        """One question with two step sizes: noise that both share is their difference."""
        epsilon, site = self.policy.epsilon or 1.0, self.site()
        privacy = {"epsilon": epsilon, "delta": self.policy.delta, "clip": 1.0, "noise": "own"}
        by = self.begun(site, asked, training={"privacy": privacy})
        train, words = asked["train"][0], list[torch.Tensor]()
        for scale in (1.0, 100.0) if not by else ():
            head = train.head.model_copy(update={"scale": scale, "base": (-1, -1)})
            found, why = self.ask(site, Message(head, {"w": train.tensors["w"].double()}))
            by, words = why or by, [*words, *(t.double() / scale for t in (found.tensors.values() if found else ()))]
        shared = len(words) == 2 and float((words[0] - words[1]).abs().min()) < 1e-6 * float(words[0].abs().max())
        return Read("one question twice", int(shared), 1, "noise taken off", by or "other noise, booked")

    def strangers(self, asked: Asked) -> Read:
        """A secure sum whose other sites are the server's."""
        keys = {n: _public(ec.generate_private_key(ec.SECP384R1())) for n in (NAME, "a", "b")}
        site = self.site()
        site.hidden.sign = lambda text: b"signed"
        join = asked["join"][0].head
        privacy = {"training": join.training | {"privacy": {"sums": "secure"}}, "keys": keys, "cohort": 3}
        found, by = self.ask(site, Message(join.model_copy(update=privacy)))
        return Read("sums with keys of the server's", int(found is not None), 1, "replies", by)

    def cohorts(self, attack: str, fewer: bool) -> Read:
        """A secure sum of four pinned sites. fewer: the server names three in its request, or opens three replies"""
        made = {name: ec.generate_private_key(ec.SECP384R1()) for name in (NAME, "a", "b", "c")}
        keys, sites = {n: _public(k) for n, k in made.items()}, dict[str, Site]()
        for name, key in made.items():
            policy = self.policy if name == NAME else dataclasses.replace(OPEN, absent=1)
            policy = dataclasses.replace(policy, peers=[fingerprint(k) for k in keys.values()])
            vault = self.place / str(next(self._vaults)) / name
            sites[name] = Site(name, self.data, vault, self.consent, policy=policy)
            sites[name].hidden.sign = partial(key.sign, signature_algorithm=ec.ECDSA(hashes.SHA256()))

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
        return Read(attack, int(not by), 1, "replies", by)


def _public(key: ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def key_of(error: str) -> str:
    """Key of the policy that has refused, or the words of the error."""
    found = re.search(r"its policy has (\S+) =", error)
    return found[1] if found else "terms" if "and has agreed to" in error else error


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
