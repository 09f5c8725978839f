"""A site from the first message to the last: it says what its file is like, makes its part of the settled experiment
out of nothing but messages and its own file, trains and evaluates, and keeps its model.

Asked again, a site answers the same bits again. What goes wrong comes back as Failed: the part of the error that is for
others (see `PolyfedError.outside`); the site's screen has all of it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, DataError, PolyfedError, Refusal, RunError
from polyfed.base.part import Strict
from polyfed.base.randomness import client_keys
from polyfed.base.settings import kebab
from polyfed.compute.augment import augmentation
from polyfed.compute.batches import Work
from polyfed.compute.check import check
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.core.algorithm import State
from polyfed.core.algorithm import check as check_algorithm
from polyfed.core.messages import Form
from polyfed.core.schedule import Uniform
from polyfed.core.uplinks import Wanted
from polyfed.data.federation import Outline, loss_for
from polyfed.data.preparation import Preparation, Settled
from polyfed.data.prepare import Cut
from polyfed.data.readers import digest as file_digest
from polyfed.data.said import Column, Csv, Dropped
from polyfed.data.schema import File, settle
from polyfed.data.tables import repairs_said
from polyfed.engines.local import pick_device
from polyfed.metrics.scores import LOSS
from polyfed.runs.folder import version_of
from polyfed.runs.privacy import Privacy, privacy_of
from polyfed.runs.rehearsal import Forms, forms, sums
from polyfed.runs.schema import finite
from polyfed.runs.steps import local_steps_of
from polyfed.runs.trained import raw
from polyfed.studies.export import write_model
from polyfed_privacy.accounts import rho_of
from polyfed_privacy.guard import Guard
from polyfed_privacy.ledger import Budget, Ledger, Spent
from polyfed_privacy.plan import planned
from polyfed_sites import units
from polyfed_sites import wire as m
from polyfed_sites.agreed import Experiment, digest, experiment, frozen, mark, unlike, versions
from polyfed_sites.answered import NAME as ANSWERED
from polyfed_sites.answered import Answered
from polyfed_sites.client import Client
from polyfed_sites.consent import RAW, SUMS, Consent, Terms, words
from polyfed_sites.door import Door
from polyfed_sites.keys import fingerprint
from polyfed_sites.policy import Policy, allowance
from polyfed_sites.rows import PARTS, STEP, Book, aligned, apart
from polyfed_sites.sums import Hidden, fewest, refuse_rows, sent_forms
from polyfed_sites.vault import Vault
from polyfed_sites.wire import Message, misfit, request

Sums = Mapping[tuple[int, int], Wanted]
WAYS = 255  # thresholds at a time in the server's search for a median
QUESTIONS = {"counts": 9, "sums": 2, "squares": 1}  # different ones: for medians; for fillings, means; for deviations
LATE = 2  # different models that are evaluated on each part of the rows once the last round has been trained
FIRST = 1 << 24  # bytes of tensors in a message before the model is known
LEDGER = "privacy.ledger"  # beside the vaults: what runs have spent of a file's privacy
BEGUN = "begin.message"  # in the vault: what the run began with here
AUDIT = {
    "counts": "rows, gaps, and rows of each value that many have, of each column",
    "quantiles": "rows, gaps, rows of each value that many have, and five quantiles in two digits, of each column",
}
HONEST = (
    "no epsilon: units of a model that few rows tell apart are kept back, where layers show it; beyond that the bounds "
    "hold for a server that sends the models of this method: one that makes models up for the purpose can read rows"
)
ASKED = {"pooled": "for sums", "labels": "for labels", "begin": "to begin"}


class Agreed(NamedTuple):
    """What a site has joined for, with its file as it was then."""

    join: m.Join
    file: File
    about: m.Joined  # what it says of the file
    answered: Answered

    @property
    def columns(self) -> Mapping[str, Dropped | Column]:
        """What it says of the columns of a table."""
        return self.about.file.columns if isinstance(self.about.file, Csv) else {}


class Begun(NamedTuple):
    """A site's part of a settled experiment."""

    head: m.Begin
    experiment: Experiment
    client: Client
    forms: Forms  # of what may leave
    preparation: Preparation | None
    most: int  # bytes of tensors in a message to it
    terms: str  # digits that stand for what it has joined for
    rounds: int  # trainings that it answers, repeats included
    answered: Answered


class Site:
    """One site and its data."""

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
        self.finished, self.terms = False, ""  # terms: digest of those that were agreed to
        self._over = False  # the run has ended here, by the vault's word
        self._agreed: Agreed | None = None  # what was consented to
        self._refused: m.Join | None = None
        self._book = Book(self.vault.parent, name, consent.dry)
        self._rows: dict[str, str] = {}  # the file's parts as sets of rows: all, "train", ...
        self._cells = ("", dict[int, int]())  # digest of a file, and of its rows
        self._train_rows = np.zeros(0, dtype=np.uint64)  # digests of those to train on, in order
        self._begun: Begun | None = None

    def answer(self, data: bytes) -> bytes:
        """The answer to a message. An error is one too."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._answer(data).pack()
        except PolyfedError as e:
            if self.consent.dry:
                raise
            whole, outside = str(e), e.outside if isinstance(e, Refusal) else f"{e.outside}; the site's screen says why"
        except Exception as e:  # a bug; the server hears no more of it than that
            whole = f"this is a bug in polyfed: {type(e).__name__}: {reason(e)}"
            outside = f"a bug in polyfed ({type(e).__name__}); the site's screen says more"
        finally:
            torch.set_num_threads(threads)
        if whole != outside:
            self.warn(f"{self.name}: {whole}")
        self.say(outside := f"{self.name}: {outside}")
        return Message(m.Failed(error=outside[: m.LINE])).pack()

    def _answer(self, data: bytes) -> Message[Strict]:
        try:
            asked, tensors = request(data, FIRST if self._begun is None else self._begun.most, "the server")
        except RunError as e:
            raise Refusal(str(e)) from None  # it is about the server's own words
        self._permit(asked)
        forms = self._forms(asked) if isinstance(asked, m.Train) else None
        found = self._found(asked, tensors, data)
        split = self._going().client.data.get(asked.split) if isinstance(asked, m.Evaluate) else None
        rows = 0 if split is None else len(split.x)
        return Door(self.policy, self.consent, self._hide(asked), rows).out(Message(asked, tensors), found, forms)

    def _hide(self, asked: m.Request) -> Callable[[Message[Any], Message[Strict]], Message[Strict]] | None:
        """What makes an answer a part of a sum; None where replies are open."""
        p = self._privacy(asked)
        if p is None or p.sums == "open":
            return None
        scores = [LOSS, *self._begun.client.task.scores] if self._begun is not None else []
        names = sorted(of.name for of in scores)
        if isinstance(asked, m.Train):
            self.hidden.within(asked, self._drawn(asked))
        return lambda asked, found: self.hidden.masked(asked, found, names, p)

    def _drawn(self, asked: m.Train) -> list[str]:
        """The cohort of a round, by the terms."""
        begun = self._going()
        names, t = [*begun.head.peers], begun.experiment.training
        if asked.t == 0 and begun.experiment.method.needs.everyone_first:
            return names
        ids = t.schedule_for(names).cohort(t.seed, asked.t, client_keys(names))
        return [names[int(k)] for k in ids]

    def _privacy(self, asked: m.Request) -> Privacy | None:
        """The table [privacy] of what was agreed to."""
        if isinstance(asked, m.Open | m.Join):
            return None
        join = asked.joined if isinstance(asked, m.Agreed | m.Audit) else self._going().head.joined
        return _privacy_of(join)

    def _found(self, asked: m.Request, tensors: State, data: bytes) -> Message[Strict]:
        """What a request comes to, before the door."""
        match asked:
            case m.Join():
                return Message(self._own.about)
            case m.Pooled():
                return self._pooled(asked, tensors, data)
            case m.Audit():
                return self._audit(asked)
            case m.Labels():
                return self._labels(asked)
            case m.Begin():
                return self._begin(asked, data)
            case m.Train():
                return self._train(asked, tensors)
            case m.Evaluate():
                return self._evaluate(asked, tensors)
            case m.End():
                return self._end(asked, tensors)
            case m.Open():
                return self.hidden.open(asked)

    def _permit(self, asked: m.Request) -> None:
        """Raise Refusal for what this site does not do. Every request passes here before it is answered."""
        if isinstance(asked, m.Turn):
            if asked.run != (run := self._going().head.run):
                then = "give each run a vault of its own"
                raise self._of_vault(f"is the vault of run {run!r}, and the server asks for run {asked.run!r}; {then}")
            if self._over and not isinstance(asked, m.End | m.Evaluate):
                raise Refusal("is asked to train, and the run is over")
        elif isinstance(asked, m.Open):
            return  # of a sum that this site has answered for, which is checked there
        elif isinstance(asked, m.Join):
            self._agree(asked)
        elif isinstance(asked, m.Audit):
            if self.policy.audit == "none":
                self.policy.forbid("audit", "counts and quantiles of its columns")
            if (p := _privacy_of(asked.joined)) is not None and p.sums != "open":
                raise Refusal("is asked for its own counts and quantiles, and has joined for sums alone")
            self._agree(asked.joined)
        else:
            what = ASKED[asked.kind]
            if asked.kind in RAW:
                self.consent.check({asked.kind: RAW[asked.kind]})
            if isinstance(asked, m.Pooled):
                self.policy.summing(asked.what)
            self._agree(asked.joined)
            self._count("agreements", mark(asked.joined))
            self._meet(asked)
            if asked.kind in RAW and asked.kind not in asked.joined.needs:
                raise Refusal(f"is asked {what}, which it has not joined for")
            if (p := asked.settled.preparation) is not None:
                for column in (*(i.name for i in p.inputs), p.target):
                    if isinstance(self._own.columns.get(column), Dropped):
                        raise Refusal(f"is asked {what} with column {column!r}, which it was told is dropped")
                if isinstance(table := self._own.about.file, Csv) and p.target != table.target:
                    raise Refusal(f"is asked {what} with target {p.target!r}, and has joined for another")

    def _meet(self, asked: m.Agreed) -> None:
        """Take the keys of the sites whose sums are secure, if theirs are."""
        p = _privacy_of(asked.joined)
        if p is not None and p.sums == "secure":
            self.hidden.meet(asked.joined, asked.peers)

    # before the first round

    def _agree(self, join: m.Join) -> None:
        """Read the file and ask the operator, unless this is what was agreed to."""
        if self._agreed is not None and join == self._agreed.join:
            return
        mine = versions(sorted(join.versions))
        if why := unlike(mine, join.versions, "the server"):
            raise Refusal(why)
        own = self._read(join)
        self.terms = self._ask(own)
        for part in PARTS:
            if part in self._rows:
                self._book.note(part, _cut_of(join), self._rows[part])
        self._agreed = self._introduced(own)

    def _read(self, join: m.Join) -> Agreed:
        """The file as the terms have it, and what the site says of it."""
        cut, columns = Cut(join.cut, join.test, join.validation), join.columns
        if columns.text is not None:
            if self.backbone is None:
                raise Refusal("needs the tokenizer of texts; name its folder here with --backbone")
            place = self.backbone if self.backbone.is_dir() else self.backbone.parent
            columns = dataclasses.replace(columns, tokenizer=str(place / "tokenizer.json"))
        ids, policy = self._identified(), self.policy
        self._book.spend(
            "join", mark(join), self._rows["all"], lambda n: policy.most("most_joins", n, f"join {n} on the same rows")
        )
        file = File(self.data, self.name, columns, cut, policy.columns, policy.least_count)
        self._part(join, file, aligned(file, ids))
        audited = policy.audit != "none" and file.sheet is not None
        about = m.Joined(
            site=self.name, versions=versions(), cpu=torch.backends.cpu.get_cpu_capability(), file=file.schema(),
            counts=m.Counts(**file.counts), audit=audited,
        )  # fmt: skip
        return Agreed(join, file, about, Answered(self.vault, file_digest(self.data), policy))

    def _identified(self) -> dict[int, int]:
        """The rows of the file as it is now, by line."""
        found = file_digest(self.data)
        if self._cells[0] != found:
            self._cells = found, self._book.identify(self.data, self.policy.columns)
        if not self._book.asked and any(self.vault.parent.glob(f"*/{ANSWERED}")):
            then = "from now on; what an older version has booked counts for every row"
            self.say(f"{self.name}: what is asked is counted by rows, over all versions of the file, {then}")
        everything = np.array([*self._cells[1].values()], dtype=np.uint64)
        self._rows = {"all": self._book.keep(apart(everything))}
        return self._cells[1]

    def _part(self, join: m.Join, file: File, ids: np.ndarray) -> None:
        """Cut the rows as they were cut before. Raises Refusal for parts whose sums would tell of a few rows."""
        least = self.policy.least_count
        self._book.cut(file, ids, _cut_of(join), least)
        rows = [file.rows[part] for part in PARTS if part in file.rows]
        order = np.concatenate(rows)
        at = dict(zip(order.tolist(), apart(ids[order]).tolist(), strict=True))
        self._train_rows = np.array([at[k] for k in file.rows["train"].tolist()], dtype=np.uint64)
        for part in PARTS:
            mine = file.rows.get(part, order[:0])
            if part == "train" or (self.consent.metrics != "none" and len(mine) >= least):
                self._rows[part] = self._book.keep(np.array([at[k] for k in mine.tolist() if k in at], dtype=np.uint64))
        if not self._book.differs([self._rows[p] for p in PARTS if p in self._rows], least):
            earlier = {what for kind, what, _, _ in self._book.asked if kind == "train"}
            same = (
                f"with {min(earlier)}, and no fewer than {least} rows more or less, they would not" if earlier else ""
            )
            self.policy.forbid("least_count", f"parts that differ from earlier ones by too few rows ({same})")

    def _count(self, kind: str, what: str, weight: float = 1) -> None:
        """Count an agreement, or cells, of the file's rows."""
        key = f"most_{kind}"
        words = (
            "{} agreements on the same rows" if kind == "agreements" else "{} sums, counts and scores on the same rows"
        )
        self._book.spend(kind, what, self._rows["all"], lambda n: self.policy.most(key, n, words.format(n)), weight)

    def _introduced(self, own: Agreed) -> Agreed:
        """The same where it also says its key, if sums are secure."""
        p = _privacy_of(own.join)
        if p is None or p.sums == "open":
            return own
        peer = self.hidden.introduce(own.join, own.about.counts.train)
        return own._replace(about=own.about.model_copy(update={"peer": peer}))

    def _ask(self, own: Agreed) -> str:
        """Show what would leave; returns the terms' digest. Raises Refusal where it may not."""
        join, file, about, _ = own
        raw = RAW | ({"pooled": SUMS} if self.policy.pooled == "sums" else {})
        needs = {key: raw[key] for key in join.needs if key != "pooled" or file.sheet is not None}
        try:
            alone = settle({self.name: about.file}, file.columns)
        except DataError:  # of one class only, say; what it comes to with the others is known at "begin"
            alone = Settled((8,), 2, 2)
        t, method, table, _ = whole = experiment(join, alone, backbone=self.backbone)
        self._hold(own, whole)
        task = t.task(self._started(whole), loss_for(alone.classes, alone.tokens), "cpu", metrics=())
        up = forms(method, task, alone.inputs, alone.classes, alone.outputs).up
        discloses = method.needs.discloses
        needs |= {name: discloses[name] for tensors in up.values() for name in tensors if name in discloses}
        title = f"{method.name}, {join.experiment}; shapes as of this site's own columns"
        local = f"local steps {join.steps}" if join.steps else f"{t.epochs} passes over the training rows"
        asked = join.model
        on = f" on the backbone {asked['backbone']} ({asked['backbone-digest']})" if "backbone" in asked else ""
        work = (
            f"model {table['name']}{on}; at most {join.rounds} rounds of {local}, "
            f"in steps of {t.batch_size or 'all'} rows",
            f"at most {join.evaluations} evaluations, each of one part of the rows",
            *starmap(repairs_said, join.columns.site.items()),
            *_tables(join),
            *([f"once, for the audit between sites: {AUDIT[self.policy.audit]}"] if about.audit else []),
        )
        if t.privacy is not None:
            refuse_rows(method)
        elif self.policy.least_count > 1:
            work = (*work, HONEST)
        private = _private_words(join, t.privacy)
        text = words(Terms(title, about, work, up, needs, discloses, self.policy.words(), private), self.consent)
        terms = mark(text, join)
        self.show(f"{text}\n  all of this is {terms}; agree with --yes {terms}")
        self.say(f"{self.name}: has been shown what would leave it for {method.name}: {terms}")
        self.consent.check(needs)
        self._consent(own, text, terms)
        return terms

    def _started(self, e: Experiment) -> torch.nn.Module:
        return e.start(self.policy.sized(getattr(e.method, "k", 1)))

    def _hold(self, own: Agreed, whole: Experiment) -> None:
        (join, file, about, _), consent = own, self.consent
        read = consent.ask is not None or bool(consent.agreed)
        self.policy.terms(join, whole, about, file.rarest(about.file), consent.metrics != "none", read)

    def _consent(self, own: Agreed, text: str, terms: str) -> None:
        """Ask the operator, unless these terms were agreed to before."""
        consent = self.consent
        if consent.agreed and terms not in consent.agreed:
            then = f"read them, then agree with --yes {terms}"
            known = ", ".join(sorted(consent.agreed))
            raise Refusal(f"its operator has agreed to {known}, and the terms are {terms}; {then}")
        if consent.ask is None or consent.agreed or (not consent.dry and own.answered.knows("agreed", terms)):
            return
        if own.join != self._refused and not consent.ask(text):
            self._refused = own.join  # asked again, the answer is the same
        if own.join == self._refused:
            raise Refusal("its operator did not consent, so nothing was sent")
        own.answered.add("agreed", terms)

    @property
    def _own(self) -> Agreed:
        assert self._agreed is not None, "it has joined"
        return self._agreed

    def _pooled(self, asked: m.Pooled, tensors: State, data: bytes) -> Message[m.Sums]:
        if (blank := asked.settled.preparation) is None:
            raise Refusal("is asked for sums of a file that has none")
        if asked.what == "counts":
            some = tuple(i for i in blank.inputs if i.values is not None or i.name in asked.columns)
            blank = blank.with_inputs(some)
            for i in some:
                known = self._own.columns.get(i.name)
                if i.values is None and not i.gap and not (isinstance(known, Column) and known.some):
                    raise Refusal(f"is asked to count values of {i.name!r}, a column without gaps")
        if len(tensors.get("at", ())) > 2 * WAYS:
            raise Refusal("is asked for more sums than medians, means and deviations take")
        numbers = sum(i.values is None for i in blank.inputs)
        if wrong := misfit(tensors, _asking(asked.what, numbers, numbers + (blank.labels is None))):
            raise Refusal(wrong)
        terms = mark(asked.joined)
        asks = hashlib.sha256(data).hexdigest()
        self._own.answered.spend(f"{asked.what} {terms}", asks, QUESTIONS[asked.what], "sums")
        found = self._own.file.sums(blank, asked.what, {name: t.numpy() for name, t in tensors.items()})
        self._count("cells", asks, sum(np.size(a) for a in found.values()))
        return Message(m.Sums(), {name: torch.as_tensor(np.asarray(a)) for name, a in found.items()})

    def _audit(self, asked: m.Audit) -> Message[m.Audited]:
        self._own.answered.spend(f"audit {mark(asked.joined)}", mark(asked), 1, "audits")
        self._count("agreements", mark(asked.joined))
        self._count("cells", f"audit {mark(asked)}", len(parts := self._own.file.parts()))
        return Message(m.Audited(columns=parts))

    def _labels(self, asked: m.Labels) -> Message[m.Labelled]:
        self._own.answered.spend(f"labels {mark(asked.joined)}", mark(asked), 1, "numbers of rows of each class")
        rows = self._own.file.labels(asked.settled)
        self._count("cells", f"labels {mark(asked)}", len(rows))
        return Message(m.Labelled(rows=rows))

    def _begin(self, asked: m.Begin, data: bytes) -> Message[m.Begun]:
        begun = self._begins(asked, self._own)
        if (guard := begun.client.guard) is not None and guard.plan.private:
            try:
                guard.check_budget(0)
            except Spent as e:
                raise Refusal(str(e)) from None
        self._begun = begun
        begun.client.vault.keep(BEGUN, data)
        sent = {name for tensors in begun.forms.up.values() for name in tensors}
        self.say(
            f"{self.name}: begins {begun.client.algorithm.name} with {begun.client.task.p:,} parameters; "
            f"what is sent: {', '.join(sorted(sent)) or 'nothing'}, {begun.forms.largest:,} bytes at most"
        )
        return Message(m.Begun(w0=digest(begun.client.task.w0), frozen=frozen(begun.client.task)))

    def _begins(self, head: m.Begin, own: Agreed) -> Begun:
        """The client of the settled experiment, with this site's data."""
        settled, vault = head.settled, Vault(self.vault, head.run, self.name)
        t, method, table, _ = whole = experiment(head.joined, settled, head.loss, self.backbone)
        task = t.task(self._started(whole), t.loss or head.loss, pick_device(t.device), class_weights=head.weights)
        check_algorithm(method, task.dtype)
        preparation, data = own.file.fitted(settled)
        check(task, data["train"], settled.classes, str(table["name"]))
        placed = {key: task.place(split) for key, split in data.items()}
        vault.same("data", _digest_of(placed), "its data have changed since the run began; restore the file as it was")
        steps = local_steps_of(head.joined.steps, [self.name])
        work = Work(t.epochs, steps, t.batch_size, augmentation(t.augment, settled.inputs))
        guard, wanted = None, dict[tuple[int, int], Wanted]()
        if t.privacy is not None:
            wanted, _ = sums(method, task, settled.inputs, settled.classes, settled.outputs)
            try:
                guard = self._guard(head, whole, task, placed, work, wanted)
            except ConfigError as e:
                raise Refusal(str(e)) from None  # it is about the server's own settings
        client = Client(self.name, task, placed, method, work, t.seed, vault, guard, wanted)
        found = forms(method, task, settled.inputs, settled.classes, settled.outputs)
        most = 2 * max(found.largest_down, 8 * task.p) + FIRST
        terms = mark(head.joined)
        self._over = own.answered.knows("ended", terms)
        return Begun(head, whole, client, found, preparation, most, terms, allowance(head.joined.rounds), own.answered)

    def _guard(
        self, head: m.Begin, e: Experiment, task: Task, data: Mapping[str, Split], work: Work, wanted: Sums
    ) -> Guard | None:
        """What uplinks pass through, by the site's own plan and ledger."""
        s, p, join, counts = head.settled, e.training.privacy, head.joined, data["train"].counts
        sizes = {key: split.counts.tolist() for key, split in data.items()}
        own = Outline.of([self.name], sizes, s)
        assert p is not None
        plan = planned(e.method, task, own, p, work, Uniform(), join.rounds, wanted, join.cohort)
        if not plan.guards:
            return None
        everybody = np.array([peer.rows for peer in head.peers.values()] or counts)
        ledger = Ledger(self.vault.parent / LEDGER, self._book.heaviest)
        secret, train = self.hidden.secret, data["train"]
        guard = Guard(plan, [self.name], counts, secret, ledger, self._rows["train"], train, everybody=everybody)
        if plan.private:
            guard.budget = Budget(self.policy.epsilon or plan.budget.epsilon, p.delta)
            guard.limit = rho_of(*guard.budget)
        return guard

    # rounds

    def _going(self) -> Begun:
        """What has begun here, by the vault's word after the site was stopped."""
        if self._begun is None:
            if self.consent.dry:
                raise self._of_vault("is of a run under way; --dry-run takes a new one")
            path = self.vault / BEGUN
            if not path.is_file():
                raise self._of_vault("has no run; start the server again, so that this site joins")
            head = request(path.read_bytes(), FIRST, str(path)).head
            if not isinstance(head, m.Begin):
                raise RunError(f"{path}: found a message of kind {head.kind!r}, expected begin")
            own = self._read(head.joined)
            self._meet(head)
            begun = self._begins(head, own)
            self._hold(own, begun.experiment)
            self._agreed, self._begun = self._introduced(own), begun
        return self._begun

    def _of_vault(self, line: str) -> Refusal:
        return Refusal(f"{self.vault} {line}", f"its vault {line}")

    def _whole(self, asked: m.Turn, tensors: State) -> str:
        """Digest of a question and of all that it is asked in, by which it is counted, booked and given noise."""
        parts = self._going().head, Message(asked, tensors), self._rows["train"]
        return hashlib.sha256(" ".join([Message(parts[0]).digest, parts[1].digest, parts[2]]).encode()).hexdigest()

    def _train(self, asked: m.Train, tensors: State) -> Message[m.Exchanged]:
        begun = self._going()
        join, client = begun.head.joined, begun.client
        phases = client.algorithm.needs.phases(asked.t)
        if asked.t >= join.rounds or asked.phase >= phases:
            raise Refusal(f"is asked for exchange {asked.phase} of round {asked.t}; has agreed to {join.rounds} rounds")
        if wrong := misfit(tensors, begun.forms.to(phases, asked.phase), finite=False):
            raise Refusal(wrong)
        work, rows = client.worker.work, int(client.data["train"].counts[0])
        self.policy.steps(work, rows, asked.t, self.name, begun.experiment.training.seed)
        asks = self._whole(asked, tensors)
        begun.answered.spend(f"train {asked.phase}", asks, begun.rounds, "training")
        if client.guard is not None:
            client.guard.asked = asks.encode()
        try:
            found = client.train(asked, tensors)
        except Spent as e:
            raise Refusal(str(e)) from None
        few = self.policy.least_count > 1 and client.guard is None and isinstance(found.head, m.Trained)
        return self._kept_back(asks, asked, tensors, found) if few else found

    def _kept_back(
        self, asks: str, asked: m.Train, tensors: State, found: Message[m.Exchanged]
    ) -> Message[m.Exchanged]:
        """An answer without what fewer than `least_count` rows have made of it."""
        begun = self._going()
        task, split = begun.client.task, begun.client.data["train"]
        models = units.models(tensors, found.tensors, task.p)
        if not models.received:  # a part of a model; the rest is this site's
            models = models._replace(received=[*begun.client.personal(asked.base, tensors)[0]])
        rows = self._train_rows
        rows = rows if len(rows) == len(split.x) else np.arange(len(split.x), dtype=np.uint64) * STEP
        some = units.Units(self._book, self.policy.least_count).kept_back(asks, models, task, split, rows)
        if some:
            self._count("cells", f"units {asks}", len(some))
            which = ", ".join(f"{len(u)} of layer {name}" for name, _, u in some)
            why = f"fewer than {self.policy.least_count} rows tell some of them from others"
            self.say(f"{self.name}: round {asked.t}: keeps back units of the model ({which}): {why}")
        return found._replace(tensors=units.withheld(found.tensors, tensors, task.layout, some))

    def _forms(self, asked: m.Train) -> Mapping[str, Form]:
        """Of the tensors that may leave in an exchange."""
        begun = self._going()
        client, phases = begun.client, begun.client.algorithm.needs.phases(asked.t)
        found = begun.forms.of(phases, asked.phase)
        return found if client.guard is None else sent_forms(found, client.sums.get((phases, asked.phase), {}))

    def _evaluate(self, asked: m.Evaluate, tensors: State) -> Message[m.Measured]:
        begun = self._going()
        join, client = begun.head.joined, begun.client
        if wrong := misfit(tensors, begun.forms.deployed, finite=False):
            raise Refusal(wrong)
        self._permit_evaluation(join, asked, self._whole(asked, tensors))
        found = client.evaluate(asked, tensors)
        line = {"round": asked.round, "split": asked.split, **(found.head.metrics or {})}
        client.vault.add("metrics.jsonl", json.dumps(finite(line)))
        return found

    def _permit_evaluation(self, join: m.Join, asked: m.Evaluate, asks: str) -> None:
        if self._going().answered.knows("evaluate", asks):
            return
        last = self._going().client.vault.versions()[-1:]
        if self._over:
            raise Refusal("is asked for an evaluation, and the run is over")
        if last and last[0][0] >= join.rounds - 1:
            self._going().answered.spend(f"late {asked.split}", asks, LATE, "evaluations after the last round")
        self._going().answered.spend("evaluate", asks, allowance(join.evaluations), "evaluations")
        if self.consent.metrics != "none":
            self._count("cells", f"evaluate {asks}", 1 + len(self._going().client.task.scores))

    def _end(self, asked: m.End, tensors: State) -> Message[m.Stored]:
        begun = self._going()
        if wrong := misfit(tensors, begun.forms.deployed, finite=False):
            raise Refusal(wrong)
        begun.answered.add("ended", begun.terms)
        self._over = True
        w, _ = begun.client.personal(asked.base, tensors)
        _export(begun, w[0], self.vault / "model.safetensors")
        begun.client.vault.keep("report.md", begun.client.report().encode())
        self.finished = True
        self.say(f"{self.name}: the run is over; this site's model is model.safetensors in its vault")
        return Message(m.Stored())


def _cut_of(join: m.Join) -> str:
    """What decides the parts of the rows, in words."""
    of = f", by {join.columns.group}" if join.columns.group is not None else ""
    return f"[data] seed = {join.cut}, test-fraction = {join.test:g}, validation-fraction = {join.validation:g}{of}"


def _privacy_of(join: m.Join) -> Privacy | None:
    given = join.training.get("privacy")
    try:
        return None if given is None else privacy_of(given)
    except (ConfigError, TypeError, ValueError, AttributeError) as e:
        raise Refusal(f"is asked for privacy that does not fit ({e})") from None


def _private_words(join: m.Join, p: Privacy | None) -> list[str]:
    """What is hidden, and from whom, for the operator to read."""
    if p is None:
        return []
    found: list[str] = []
    if p.sums == "secure":
        each = ", ".join(f"{name} (key {fingerprint(key)})" for name, key in join.keys.items())
        found.append(
            f"sums: secure; the server reads sums over at least {fewest(p, join.cohort)} of {join.cohort} sites, and "
            "no number of this one alone; numbers of rows, columns and their values below are not hidden"
        )
        found.append(f"hidden by keys of: {each}; ask them whether these are their keys")
    if p.epsilon is not None:
        found.append(
            f"differential privacy of one {p.unit}: epsilon {p.epsilon:g} at delta {p.delta:g} for the whole run, clip "
            f"{p.clip:g}, noise {p.noise}, absent {p.absent}"
        )
    return found


def _tables(join: m.Join) -> list[str]:
    """Every setting that shapes an answer, as the server has written it."""
    columns = {kebab(key): value for key, value in join.columns.given.items() if key != "site"}
    tables = {"training": join.training, "algorithm": join.algorithm, "model": join.model, "columns": columns}
    tables["data"] = {"seed": join.cut, "test-fraction": join.test, "validation-fraction": join.validation}
    return [
        f"[{name}] {', '.join(f'{key} = {json.dumps(value, default=str)}' for key, value in table.items())}"
        for name, table in tables.items()
        if table
    ]


def _asking(what: str, numbers: int, columns: int) -> dict[str, Form]:
    """The forms of what comes with a question about sums. numbers: columns of inputs     columns: with the target"""
    if what == "counts":
        return {"at": Form(torch.int64, (None, numbers), 2 * WAYS * numbers)}
    fill = {"fill": Form(torch.float64, (numbers,), numbers)}
    return fill if what == "sums" else fill | {"mean": Form(torch.float64, (columns,), columns)}


def _export(begun: Begun, w: Tensor, path: Path) -> None:
    """Write the site's model, with what `polyfed predict` needs beside it."""
    head, client, task = begun.head, begun.client, begun.client.task
    facts: dict[str, Any] = {
        "client": client.name,
        "shared_by_all_clients": False,
        "model": begun.experiment.model,
        "classes": head.settled.classes,
        "inputs": list(head.settled.inputs),
        "outputs": head.settled.outputs,
        "loss": begun.experiment.training.loss,
        "dtype": str(task.dtype).removeprefix("torch."),
        "algorithm": head.joined.algorithm,
        "data": {"name": "this site's"},
        "seed": begun.experiment.training.seed,
        "run": head.run,
        "polyfed": version_of("polyfed"),
    }
    if begun.preparation is not None:
        facts["preparation"] = begun.preparation.only(client.name).dump()
    write_model(path, task.layout.named(w) | task.net.fixed, facts)


def _digest_of(data: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for key in sorted(data):
        for t in (data[key].x, data[key].y):
            found.update(f"{key} {t.dtype} {list(t.shape)}".encode() + raw(t))
    return found.hexdigest()
