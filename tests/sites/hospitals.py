"""Small hospitals with a CSV file each, run on one machine and as sites that only messages reach."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from direct import Direct, Raw, raw

from polyfed.base.errors import PolyfedError
from polyfed.face import Run, fit
from polyfed.runs.build import Parts
from polyfed.runs.config import resolve
from polyfed.runs.result import Result
from polyfed_sites.consent import Consent
from polyfed_sites.policy import Policy
from polyfed_sites.server import serve
from polyfed_sites.site import Site

NAMES = ("bern", "oslo", "riga")
FEDAVG = 'name = "fedavg"\nlr = 0.1'
CLIENT, POOLED = ('[columns]\nstandardise = "client"', '[columns]\nstandardise = "pooled"')
ALL = Consent(frozenset({"pooled", "labels", "signature", "prototypes", "mass", "moments", "mean"}))
# all that the default policy keeps from so small files, so that the numbers are those of one machine
OPEN = Policy(
    least_rows=1, least_batch=1, least_count=1, most_rounds=10**6, most_evaluations=10**6, most_runs=10**6,
    pooled="medians", digits=17, separable=True,
)  # fmt: skip
SIZES = {"bern": 21, "oslo": 30, "riga": 16}


def rows(name: str, regression: bool = False) -> list[str]:
    """The lines of a hospital's file: numbers with gaps, a category that bern has a value less of, a constant."""
    rng = np.random.default_rng([*name.encode()])
    kinds = ["mild", "severe"] if name == "bern" else ["mild", "severe", "none"]
    found = ["age,pressure,unit,pain,outcome"]
    for _ in range(SIZES[name]):
        age, kind = rng.normal(60, 9), rng.choice(kinds)
        pressure = "" if rng.random() < 0.15 else f"{rng.normal(130, 15):.1f}"
        risk = (age - 60) / 9 + (kind == "severe") - 0.3 + rng.normal(0, 0.5)
        outcome = f"{risk:.3f}" if regression else ("ill" if risk > 0 else "well")
        found.append(f"{age:.2f},{pressure},7,{kind},{outcome}")
    return found


def folder(path: Path, regression: bool = False) -> Path:
    path.mkdir()
    for name in NAMES:
        (path / f"{name}.csv").write_text("\n".join(rows(name, regression)) + "\n")
    return path


def experiment(path: Path, method: str, data: str = "", **top: object) -> Path:
    """An experiment file. method: the lines of [algorithm]     data: further lines, of [data] and [columns]"""
    settings = {"rounds": 3, "local-epochs": 2, "batch-size": 8, "seed": 3, "device": "cpu"} | top
    lines = [f"{key} = {value!r}".replace("'", '"').replace("True", "true") for key, value in settings.items()]
    path.write_text("\n".join([*lines, "[algorithm]", method, "[data]", data]) + "\n")
    return path


def on_one_machine(file: Path, data: Path, **settings: object) -> Run:
    """The experiment as `polyfed run` has it, on a folder with all files, clients one by one; gaps as at sites."""
    found = resolve(file, {"data": {"name": str(data)}})
    if found.columns.missing is None and found.columns.standardise in (None, "pooled") and any(data.glob("*.csv")):
        found = resolve(file, {"data": {"name": str(data)}, "columns": {"missing": "mean"}})
    parts, method = Parts(found), found.methods[0].algorithm
    training = replace(parts.training(found.seeds[0]), chunk=1, workers=1, **settings)
    return fit(parts.model(found.seeds[0]), parts.federation(found.seeds[0]), method, training)


class Sites:
    """The hospitals' members. `consent` and `data` may be changed before they are asked.

    lines: what their operators see and the server says     log: what of it their logs keep"""

    def __init__(
        self, place: Path, data: Path, consent: Consent = ALL, names: tuple[str, ...] = NAMES, policy: Policy = OPEN
    ):
        self.place, self.names, self.policy, self.lines, self.log = place, names, policy, [], []
        self.data = {name: next(data.glob(f"{name}*")) for name in names}
        self.consent = dict.fromkeys(names, consent)
        self.members: dict[str, Site] = {}

    def member(self, name: str) -> Site:
        if name not in self.members:
            vault = self.place / "vaults" / name
            given = self.consent[name]
            self.members[name] = Site(name, self.data[name], vault, given, self.noted, self.lines.append, self.policy)
        return self.members[name]

    def noted(self, line: str) -> None:
        self.lines.append(line)
        self.log.append(line)

    def answer(self, name: str, data: bytes) -> bytes:
        return self.member(name).answer(data)

    def error(self, name: str, question: Raw) -> str:
        """Why a site does not answer, "" where it does."""
        return raw(self.answer(name, question.pack())).head.get("error", "")

    def direct(self, kind: Callable[..., Direct] = Direct) -> Direct:
        return kind(self.names, self.answer)

    def model(self, name: str) -> torch.Tensor:
        from safetensors.torch import load_file

        return torch.cat([t.flatten() for t in load_file(self.place / "vaults" / name / "model.safetensors").values()])


class Between(Direct):
    """The sites, with somebody in between.

    asked: (name, question) -> the question that the site is given     said: (name, question, reply) -> the reply, or
    bytes, that the server is given     heard: [(name, question, reply)]"""

    def __init__(self, sites: Sites, said: Callable = lambda _, __, reply: reply, asked: Callable = lambda _, q: q):
        super().__init__(sites.names, self._passed)
        self.at, self.change_reply, self.change_question, self.heard = sites, said, asked, []

    def _passed(self, name: str, data: bytes) -> bytes:
        question = self.change_question(name, raw(data))
        answer = self.at.answer(name, question.pack())
        reply = self.change_reply(name, question, raw(answer))
        self.heard.append((name, question, reply))
        return reply if isinstance(reply, bytes) else reply.pack()

    def asked(self, name: str = "oslo") -> list[Raw]:
        return [question for who, question, _ in self.heard if who == name]

    def said(self, name: str = "oslo") -> list[Raw]:
        return [reply for who, _, reply in self.heard if who == name]

    def first(self, kind: str, name: str = "oslo", **head: object) -> Raw:
        """A site's first question of a kind."""
        return next(q for q in self.asked(name) if q.head.items() >= {"kind": kind, **head}.items())


def study(place: Path, method: str = FEDAVG, columns: str = CLIENT, **top: object) -> tuple[Path, Path, Sites]:
    """(an experiment file, the folder of the sites' files, the sites)"""
    data = folder(place / "data")
    return experiment(place / "study.toml", method, columns, **top), data, Sites(place, data)


def tables(path: Path, head: str, row: Callable[..., str], n: int = 60) -> Path:
    """A file of n rows for each of two sites. row: (generator, row, site) -> a line"""
    path.mkdir()
    for k, name in enumerate(NAMES[:2]):
        rng = np.random.default_rng(k)
        (path / f"{name}.csv").write_text("\n".join([head, *(row(rng, i, k) for i in range(n))]) + "\n")
    return path


def listened(
    place: Path, data: Path, policy: Policy, columns: str, method: str = FEDAVG, consent: Consent = ALL,
    hands: tuple[Callable, ...] = (), **top: object,
) -> tuple[Between, Sites, str]:  # fmt: skip
    """(what passed in a run of two sites, the sites, how it ended)"""
    place.mkdir(exist_ok=True)
    sites = Sites(place, data, consent, NAMES[:2], policy)
    wire = Between(sites, *hands)
    try:
        at_sites(experiment(place / "study.toml", method, columns, **top), sites, wire)
    except PolyfedError as e:
        return wire, sites, str(e)
    return wire, sites, ""


def at_sites(file: Path, sites: Sites, transport: Direct | None = None, out: str = "run", **how: object) -> Result:
    return serve(file, transport or sites.direct(), sites.place / out, sites=sites.names, say=sites.lines.append, **how)


def same(here: Result, there: Result, sites: Sites) -> None:
    assert here.server.keys() == there.server.keys()
    for name, t in here.server.items():
        assert torch.equal(t, there.server[name]), f"server {name}"
    for i, name in enumerate(sites.names):
        named = here.trained.task.layout.named(here.personal[i])
        mine = torch.cat([named[key].flatten() for key in sorted(named)])
        from safetensors.torch import load_file

        found = load_file(sites.place / "vaults" / name / "model.safetensors")
        assert torch.equal(mine, torch.cat([found[key].flatten() for key in sorted(found)])), f"model of {name}"
