"""What a site has joined for: the terms of a run, held once against its file, its policy and its operator; and its
answers to what is asked under them before anything is trained.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.base.errors import DataError, Refusal
from polyfed.base.part import Strict
from polyfed.core.messages import Form
from polyfed.data.federation import loss_for
from polyfed.data.preparation import Settled
from polyfed.data.prepare import Cut
from polyfed.data.readers import digest as file_digest
from polyfed.data.said import Column, Csv, Dropped
from polyfed.data.schema import File, settle
from polyfed.runs.rehearsal import forms
from polyfed_audit.parts import told
from polyfed_sites import wire as m
from polyfed_sites.agreed import Experiment, experiment, mark, unlike, versions
from polyfed_sites.answered import NAME as ANSWERED
from polyfed_sites.answered import Answered
from polyfed_sites.consent import RAW, SUMS, Consent, words
from polyfed_sites.door import Door
from polyfed_sites.policy import Policy
from polyfed_sites.rows import Book, Rows
from polyfed_sites.sums import Hidden, refuse_rows
from polyfed_sites.wire import Message, misfit

WAYS = 255  # thresholds at a time in the server's search for a median
QUESTIONS = {"counts": 9, "sums": 2, "squares": 1}  # different ones: for medians; for fillings, means; for deviations
ASKED = {"pooled": "for sums", "labels": "for labels", "begin": "to begin"}


class Own:
    """What is a site's own: its file, the folder of its state, and what its operator lets it do."""

    def __init__(
        self,
        name: str,
        data: Path,  # its CSV or npz file, or folder of images
        vault: Path,  # the folder of its private state of one run
        consent: Consent,
        say: Callable[[str], None] = lambda _: None,  # logs a line: no path, no cell of the file, no value of a column
        show: Callable[[str], None] | None = None,  # the terms, for the operator's eyes alone; None: as `say`
        policy: Policy = Policy(),  # noqa: B008  (immutable)
        sign: Callable[[bytes], bytes] | None = None,  # by the site's key, which secure sums need
        backbone: Path | None = None,  # where pretrained weights are here
        warn: Callable[[str], None] | None = None,  # why something failed, for the operator's eyes; None: as `show`
    ):
        self.hidden = Hidden(Path(vault), name, sign, policy)
        self.name, self.data, self.vault, self.consent, self.say = name, Path(data), Path(vault), consent, say
        self.show, self.warn, self.policy = show or say, warn or show or say, policy
        self.backbone = None if backbone is None else backbone.expanduser().resolve()  # the model's file names it
        self.book = Book(self.vault.parent, name, consent.dry)
        self.terms = ""  # digest of those that were agreed to
        self.ended = False  # by the server, before the first round
        self.declined: m.Join | None = None  # terms that the operator has said no to

    def about_vault(self, line: str) -> Refusal:
        """An error about the vault, whose place is nobody else's business."""
        return Refusal(f"{self.vault} {line}", f"its vault {line}")

    def start(self, e: Experiment) -> torch.nn.Module:
        """The model as all sites start, if the policy allows one of its size."""
        return e.start(self.policy.sized(getattr(e.method, "k", 1)))


class Joined:
    """The terms that a site has joined for, and its file as it was then."""

    def __init__(self, own: Own, join: m.Join):
        policy, columns = own.policy, join.columns
        if columns.text is not None:
            if own.backbone is None:
                raise Refusal("needs the tokenizer of texts; name its folder here with --backbone")
            place = own.backbone if own.backbone.is_dir() else own.backbone.parent
            columns = dataclasses.replace(columns, tokenizer=str(place / "tokenizer.json"))
        if not own.book.asked and any(own.vault.parent.glob(f"*/{ANSWERED}")):
            then = "from now on; what an older version has booked counts for every row"
            own.say(f"{own.name}: what is asked is counted by rows, over all versions of the file, {then}")
        self.own, self.join, self.mark, self.rows = own, join, mark(join), Rows(own.book, policy, own.data)
        self.rows.spend("join", self.mark)
        cut = Cut(join.cut, join.test, join.validation)
        self.file = File(own.data, own.name, columns, cut, policy.columns, policy.least_count)
        self.rows.part(self.file, self.cut, own.consent.metrics != "none")
        self.removed = 0 if self.file.sheet is None else self.file.sheet.removed
        self.about = m.Joined(
            site=own.name, versions=versions(), cpu=torch.backends.cpu.get_cpu_capability(), file=self.file.schema(),
            counts=m.Counts(**self.file.counts), audit=policy.audit != "none" and self.file.sheet is not None,
            pooled=policy.pooled, removed=self.removed if self.removed >= policy.least_count else 0,
        )  # fmt: skip
        self.columns = self.about.file.columns if isinstance(self.about.file, Csv) else {}
        self.answered = Answered(own.vault, file_digest(own.data), policy)
        try:
            self.alone = settle({own.name: self.about.file}, self.file.columns)
        except DataError:  # of one class only, say; what it comes to with the others is known at "begin"
            self.alone = Settled((8,), 2, 2)
        self.experiment = experiment(join, self.alone, backbone=own.backbone)
        self.privacy = self.experiment.training.privacy
        self.secure = None if self.privacy is None or self.privacy.sums == "open" else self.privacy

    @staticmethod
    def agreed(own: Own, join: m.Join) -> "Joined":
        """After the operator has seen what would leave. Raises Refusal where it may not."""
        if why := unlike(versions(sorted(join.versions)), join.versions, "the server"):
            raise Refusal(why)
        joined = Joined(own, join)
        joined._ask()
        joined.rows.note(joined.cut)
        return joined

    @property
    def cut(self) -> str:
        """What decides the parts of the rows, in words."""
        join, by = self.join, "" if self.join.columns.group is None else f", by {self.join.columns.group}"
        by += "" if join.columns.split is None else f", split {join.columns.split}"
        return f"[data] seed = {join.cut}, test-fraction = {join.test:g}, validation-fraction = {join.validation:g}{by}"

    def hold(self, e: Experiment) -> None:
        """Hold the terms of an experiment against the policy."""
        consent = self.own.consent
        read, rarest = consent.ask is not None or bool(consent.agreed), self.file.rarest(self.about.file)
        self.own.policy.terms(self.join, e, self.about, rarest, consent.metrics != "none", read)

    def _ask(self) -> None:
        own, alone, e, method = self.own, self.alone, self.experiment, self.experiment.method
        self.hold(e)
        task = e.training.task(own.start(e), loss_for(alone.classes, alone.tokens), "cpu", metrics=())
        up, discloses = forms(method, task, alone.inputs, alone.classes, alone.outputs).up, method.needs.discloses
        raw = RAW | ({"pooled": SUMS} if own.policy.pooled == "sums" else {})
        needs = {key: raw[key] for key in self.join.needs if key != "pooled" or self.file.sheet is not None}
        needs |= {name: discloses[name] for tensors in up.values() for name in tensors if name in discloses}
        if self.privacy is not None:
            refuse_rows(method)
        text = words(self.join, e, self.about, up, needs, own.policy, own.consent)
        terms = mark(text, self.join)
        if self.removed:
            own.show(f"{own.name}: drop-rows leaves out {self.removed} rows of {self.own.data}")
        own.show(f"{text}\n  all of this is {terms}; agree with --yes {terms}")
        own.say(f"{own.name}: has been shown what would leave it for {method.name}: {terms}")
        own.consent.check(needs)
        self._consent(text, terms)
        own.terms = terms

    def _consent(self, text: str, terms: str) -> None:
        """Ask the operator, unless these terms were agreed to before."""
        own, consent = self.own, self.own.consent
        if consent.agreed and terms not in consent.agreed:
            then = f"read them, then agree with --yes {terms}"
            others = ", ".join(sorted(consent.agreed))
            raise Refusal(f"its operator has agreed to {others}, and the terms are {terms}; {then}")
        if consent.ask is None or consent.agreed or (not consent.dry and self.answered.knows("agreed", terms)):
            return
        if self.join != own.declined and not consent.ask(text):
            own.declined = self.join  # asked again, the answer is the same
        if self.join == own.declined:
            raise Refusal("its operator did not consent, so nothing was sent")
        self.answered.add("agreed", terms)

    # what is asked under the terms

    def answer(self, asked: Message[Any]) -> Message[Strict]:
        """The answer to a question before the first round, as it leaves."""
        match asked.head:
            case m.Audit():
                reply = self._audit(asked.head)
            case m.Pooled():
                reply = self._pooled(asked)
            case m.Labels():
                reply = self._labels(asked.head)
            case _:
                reply = Message(self._introduced())
        hide = None if self.secure is None else partial(self.own.hidden.masked, names=(), privacy=self.secure)
        return Door(self.own.policy, self.own.consent, hide).out(asked, reply)

    def _introduced(self) -> m.Joined:
        """What it says of its file, and its key if sums are secure."""
        if self.secure is None:
            return self.about
        peer = self.own.hidden.introduce(self.join, self.about.counts.train)
        return self.about.model_copy(update={"peer": peer})

    def permit(self, asked: m.Pooled | m.Labels | m.Begin) -> None:
        """Count the terms, and refuse what the server has settled otherwise than they have it."""
        what, prepared = f"is asked {ASKED[asked.kind]}", asked.settled.preparation
        if asked.kind in RAW:
            self.own.consent.check({asked.kind: RAW[asked.kind]})
            if asked.kind not in self.join.needs:
                raise Refusal(f"{what}, which it has not joined for")
        self.rows.spend("agreements", self.mark)
        if self.secure is not None:
            self.own.hidden.meet(self.join, asked.peers)
        if prepared is None:
            return
        for column in (*(i.name for i in prepared.inputs), prepared.target):
            if isinstance(self.columns.get(column), Dropped):
                raise Refusal(f"{what} with column {column!r}, which it was told is dropped")
        if isinstance(self.about.file, Csv) and prepared.target != self.about.file.target:
            raise Refusal(f"{what} with target {prepared.target!r}, and has joined for another")

    def _audit(self, asked: m.Audit) -> Message[m.Audited]:
        if self.own.policy.audit == "none":
            self.own.policy.forbid("audit", "counts and quantiles of its columns")
        if self.secure is not None:
            raise Refusal("is asked for its own counts and quantiles, and has joined for sums alone")
        self.answered.spend(f"audit {self.mark}", mark(asked), 1, "audits")
        self.rows.spend("agreements", self.mark)
        assert self.file.sheet is not None  # by `about.audit`
        target = self.about.file.target if isinstance(self.about.file, Csv) else ""
        parts = told(self.file.sheet, self.file.columns, target)
        self.rows.spend("cells", f"audit {mark(asked)}", sum(1 + len(p.by or ()) for p in parts.values()))
        return Message(m.Audited(columns=parts))

    def _pooled(self, question: Message[m.Pooled]) -> Message[m.Sums]:
        asked, tensors = question
        self.own.policy.summing(asked.what)
        self.permit(asked)
        if (blank := asked.settled.preparation) is None:
            raise Refusal("is asked for sums of a file that has none")
        if asked.what == "counts":
            some = tuple(i for i in blank.inputs if i.values is not None or i.name in asked.columns)
            blank = blank.with_inputs(some)
            for i in some:
                column = self.columns.get(i.name)
                if i.values is None and not i.gap and not (isinstance(column, Column) and column.some):
                    raise Refusal(f"is asked to count values of {i.name!r}, a column without gaps")
        if len(tensors.get("at", ())) > 2 * WAYS:
            raise Refusal("is asked for more sums than medians, means and deviations take")
        numbers = sum(i.values is None for i in blank.inputs)
        if wrong := misfit(tensors, _asking(asked.what, numbers, numbers + (blank.labels is None))):
            raise Refusal(wrong)
        self.answered.spend(f"{asked.what} {self.mark}", question.digest, QUESTIONS[asked.what], "sums")
        sums = self.file.sums(blank, asked.what, {name: t.numpy() for name, t in tensors.items()})
        self.rows.spend("cells", question.digest, sum(np.size(a) for a in sums.values()))
        return Message(m.Sums(), {name: torch.as_tensor(np.asarray(a)) for name, a in sums.items()})

    def _labels(self, asked: m.Labels) -> Message[m.Labelled]:
        self.permit(asked)
        self.answered.spend(f"labels {self.mark}", mark(asked), 1, "numbers of rows of each class")
        rows = self.file.labels(asked.settled)
        self.rows.spend("cells", f"labels {mark(asked)}", len(rows))
        return Message(m.Labelled(rows=rows))


def _asking(what: str, numbers: int, columns: int) -> Mapping[str, Form]:
    """The forms of what comes with a question about sums. numbers: columns of inputs     columns: with the target"""
    if what == "counts":
        return {"at": Form(torch.int64, (None, numbers), 2 * WAYS * numbers)}
    fill = {"fill": Form(torch.float64, (numbers,), numbers)}
    return fill if what == "sums" else fill | {"mean": Form(torch.float64, (columns,), columns)}
