"""A run that has begun at a site: it trains and evaluates on the site's file, out of nothing but messages and the state
in its vault, and makes the site's model at the end.
"""

import hashlib
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from polyfed.base.errors import ConfigError, Refusal, RunError
from polyfed.base.part import Strict
from polyfed.base.randomness import client_keys
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
from polyfed.data.federation import Outline
from polyfed.engines.local import pick_device
from polyfed.metrics.scores import LOSS
from polyfed.runs.folder import version_of
from polyfed.runs.privacy import Privacy
from polyfed.runs.rehearsal import forms, sums
from polyfed.runs.schema import finite
from polyfed.runs.steps import local_steps_of
from polyfed.runs.trained import raw
from polyfed_export.export import write_model
from polyfed_privacy.accounts import rho_of
from polyfed_privacy.guard import Guard
from polyfed_privacy.ledger import Budget, Ledger, Spent
from polyfed_privacy.plan import planned
from polyfed_sites import journal, units
from polyfed_sites import wire as m
from polyfed_sites.agreed import digest, experiment, frozen
from polyfed_sites.client import METRICS, Client
from polyfed_sites.door import Door
from polyfed_sites.joining import Joined, Own
from polyfed_sites.policy import allowance
from polyfed_sites.rows import STEP
from polyfed_sites.sums import sent_forms
from polyfed_sites.vault import Vault
from polyfed_sites.wire import FIRST, Message, misfit, request

LATE = 2  # different models that are evaluated on each part of the rows once the last round has been trained
LEDGER = "privacy.ledger"  # beside the vaults: what runs have spent of a file's privacy
BEGUN = "begin.message"  # in the vault: what the run began with here


class Run:
    """A site's part of a settled experiment."""

    def __init__(self, joined: Joined, head: m.Begin):
        self.own, self.joined, self.head = joined.own, joined, head
        self.settled, self.vault = head.settled, Vault(self.own.vault, head.run, self.own.name)
        s = self.settled
        t, method, table, _ = self.experiment = experiment(joined.join, s, head.loss, self.own.backbone)
        device, model = pick_device(t.device), self.own.start(self.experiment)
        task = t.task(model, t.loss or head.loss, device, class_weights=head.weights)
        check_algorithm(method, task.dtype)
        self.preparation, data = joined.file.fitted(s)
        check(task, data["train"], s.classes, str(table["name"]))
        data = {key: task.place(split) for key, split in data.items()}
        then = "its data have changed since the run began; restore the file as it was"
        self.vault.same("data", _digest_of(data), then)
        steps = local_steps_of(joined.join.steps, [self.own.name])
        work = Work(t.epochs, steps, t.batch_size, augmentation(t.augment, s.inputs))
        guard, wanted = None, dict[tuple[int, int], Wanted]()
        if t.privacy is not None:
            wanted, _ = sums(method, task, s.inputs, s.classes, s.outputs)
            try:
                guard = self._guard(t.privacy, task, data, work, wanted)
            except ConfigError as e:
                raise Refusal(str(e)) from None  # it is about the server's own settings
        self.client = Client(self.own.name, task, data, method, work, t.seed, self.vault, guard, wanted)
        self.forms = forms(method, task, s.inputs, s.classes, s.outputs)  # of what may leave
        self.most = 2 * max(self.forms.largest_down, 8 * task.p) + FIRST  # bytes of tensors in a message to it
        self.digest, self.finished = Message(head).digest, False

    def _guard(
        self, p: Privacy, task: Task, data: Mapping[str, Split], work: Work, wanted: Mapping[tuple[int, int], Wanted]
    ) -> Guard | None:
        """What uplinks pass through, by the site's own plan and ledger."""
        own, join, train = self.own, self.joined.join, data["train"]
        alone = Outline.of([own.name], {key: split.counts.tolist() for key, split in data.items()}, self.settled)
        method = self.experiment.method
        plan = planned(method, task, alone, p, work, Uniform(), join.rounds, wanted, join.cohort)
        if not plan.guards:
            return None
        everybody = np.array([peer.rows for peer in self.head.peers.values()] or train.counts)
        ledger, rows = Ledger(own.vault.parent / LEDGER, own.book.heaviest), self.joined.rows.sets["train"]
        guard = Guard(plan, [own.name], train.counts, own.hidden.secret, ledger, rows, train, everybody=everybody)
        if plan.private:
            guard.budget = Budget(own.policy.epsilon or plan.budget.epsilon, p.delta)
            guard.limit = rho_of(*guard.budget)
        return guard

    @staticmethod
    def begun(joined: Joined, asked: Message[m.Begin]) -> "Run":
        """What a server settles under the terms. Raises Refusal for what is settled otherwise than they have it."""
        joined.permit(asked.head)
        run = Run(joined, asked.head)
        client, own = run.client, joined.own
        if client.guard is not None and client.guard.plan.private:
            try:
                client.guard.check_budget(0)
            except Spent as e:
                raise Refusal(str(e)) from None
        run.vault.keep(BEGUN, asked.pack())
        sent = {name for tensors in run.forms.up.values() for name in tensors}
        own.say(
            f"{own.name}: begins {client.algorithm.name} with {client.task.p:,} parameters; "
            f"what is sent: {', '.join(sorted(sent)) or 'nothing'}, {run.forms.largest:,} bytes at most"
        )
        return run

    @staticmethod
    def resumed(own: Own) -> "Run":
        """What has begun here, by the vault's word after the site was stopped."""
        if own.consent.dry:
            raise own.about_vault("is of a run under way; --dry-run takes a new one")
        path = own.vault / BEGUN
        if not path.is_file():
            raise own.about_vault("has no run; start the server again, so that this site joins")
        head = request(path.read_bytes(), FIRST, str(path)).head
        if not isinstance(head, m.Begin):
            raise RunError(f"{path}: found a message of kind {head.kind!r}, expected begin")
        joined = Joined(own, head.joined)
        if joined.secure is not None:
            own.hidden.meet(joined.join, head.peers)
        run = Run(joined, head)
        joined.hold(run.experiment)
        return run

    @property
    def over(self) -> bool:
        """Whether it has ended here, by the vault's word."""
        return self.joined.answered.knows("ended", self.joined.mark)

    def answer(self, asked: Message[Any]) -> Message[Strict]:
        """The answer to the message that it began with, or to one of a round, as it leaves."""
        head, hide, sent, rows = asked.head, None, None, 0
        if isinstance(head, m.Turn) and head.run != self.head.run:
            then = "give each run a vault of its own"
            raise self.own.about_vault(
                f"is the vault of run {self.head.run!r}, and the server asks for run {head.run!r}; {then}"
            )
        match head:
            case m.Begin():
                task = self.client.task
                reply = Message(m.Begun(w0=digest(task.w0), frozen=frozen(task)))
            case m.Train():
                reply, sent = self._train(head, asked), self._sent(head)
            case m.Evaluate():
                reply, rows = self._evaluate(head, asked), len(self.client.data[head.split].x)
            case _:
                reply = self._end(head, asked.tensors)
        if self.joined.secure is not None:
            names = sorted(of.name for of in (LOSS, *self.client.task.scores))
            hide = partial(self.own.hidden.masked, names=names, privacy=self.joined.secure)
        return Door(self.own.policy, self.own.consent, hide).out(asked, reply, sent, rows)

    def _mark(self, asked: Message[Any]) -> str:
        """Digest of a question and of all that it is asked in, by which it is counted, booked and given noise."""
        parts = self.digest, asked.digest, self.joined.rows.sets["train"]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def _train(self, head: m.Train, asked: Message[Any]) -> Message[m.Exchanged]:
        own, client, rounds = self.own, self.client, self.joined.join.rounds
        if self.over:
            raise Refusal("is asked to train, and the run is over")
        phases = client.algorithm.needs.phases(head.t)
        if head.t >= rounds or head.phase >= phases:
            raise Refusal(f"is asked for exchange {head.phase} of round {head.t}; has agreed to {rounds} rounds")
        if wrong := misfit(asked.tensors, self.forms.to(phases, head.phase), finite=False):
            raise Refusal(wrong)
        if self.joined.secure is not None:
            own.hidden.within(head, self._cohort(head.t))
        seed, rows = self.experiment.training.seed, int(client.data["train"].counts[0])
        own.policy.steps(client.worker.work, rows, head.t, own.name, seed)
        question = self._mark(asked)
        self.joined.answered.spend(f"train {head.phase}", question, allowance(rounds), "training")
        if client.guard is not None:
            client.guard.asked = question.encode()
        try:
            reply = client.train(head, asked.tensors)
        except Spent as e:
            raise Refusal(str(e)) from None
        few = own.policy.least_count > 1 and client.guard is None and isinstance(reply.head, m.Trained)
        return self._kept_back(question, asked, reply) if few else reply

    def _kept_back(self, question: str, asked: Message[Any], reply: Message[m.Exchanged]) -> Message[m.Exchanged]:
        """An answer without what fewer than `least_count` rows have made of it."""
        own, task, split, received = self.own, self.client.task, self.client.data["train"], asked.tensors
        models = units.models(received, reply.tensors, task.p)
        if not models.received:  # a part of a model; the rest is this site's
            models = models._replace(received=[*self.client.personal(asked.head.base, received)[0]])
        rows = self.joined.rows.train
        rows = rows if len(rows) == len(split.x) else np.arange(len(split.x), dtype=np.uint64) * STEP
        some = self._units.kept_back(question, models, task, split, rows)
        if some:
            self.joined.rows.spend("cells", f"units {question}", len(some))
            which = ", ".join(f"{len(u)} of layer {name}" for name, _, u in some)
            why = f"fewer than {own.policy.least_count} rows tell some of them from others"
            own.say(f"{own.name}: round {asked.head.t}: keeps back units of the model ({which}): {why}")
        return reply._replace(tensors=units.withheld(reply.tensors, received, task.layout, some))

    @cached_property
    def _units(self) -> units.Units:
        return units.Units(self.own.book, self.own.policy.least_count)

    def _sent(self, head: m.Train) -> Mapping[str, Form]:
        """The forms of the tensors that may leave in an exchange."""
        phases = self.client.algorithm.needs.phases(head.t)
        up = self.forms.of(phases, head.phase)
        return up if self.client.guard is None else sent_forms(up, self.client.sums.get((phases, head.phase), {}))

    def _cohort(self, t: int) -> list[str]:
        """Who takes part in a round, by the terms."""
        names, training = [*self.head.peers], self.experiment.training
        if t == 0 and self.experiment.method.needs.everyone_first:
            return names
        ids = training.schedule_for(names).cohort(training.seed, t, client_keys(names))
        return [names[int(k)] for k in ids]

    def _evaluate(self, head: m.Evaluate, asked: Message[Any]) -> Message[m.Measured]:
        client, question = self.client, self._mark(asked)
        if wrong := misfit(asked.tensors, self.forms.deployed, finite=False):
            raise Refusal(wrong)
        if not self.joined.answered.knows("evaluate", question):
            self._permit_evaluation(head.split, question)
        reply = client.evaluate(head, asked.tensors)
        line = {"round": head.round, "split": head.split, **(reply.head.metrics or {})}
        journal.append(self.own.vault / METRICS, finite(line))
        return reply

    def _permit_evaluation(self, split: str, question: str) -> None:
        join, answered, last = self.joined.join, self.joined.answered, self.vault.versions()[-1:]
        if self.over:
            raise Refusal("is asked for an evaluation, and the run is over")
        if last and last[0][0] >= join.rounds - 1:
            answered.spend(f"late {split}", question, LATE, "evaluations after the last round")
        answered.spend("evaluate", question, allowance(join.evaluations), "evaluations")
        if self.own.consent.metrics != "none":
            self.joined.rows.spend("cells", f"evaluate {question}", 1 + len(self.client.task.scores))

    def _end(self, head: m.Turn, tensors: State) -> Message[m.Stored]:
        if wrong := misfit(tensors, self.forms.deployed, finite=False):
            raise Refusal(wrong)
        self.joined.answered.add("ended", self.joined.mark)
        w, _ = self.client.personal(head.base, tensors)
        self._export(w[0], self.own.vault / "model.safetensors")
        self.vault.keep("report.md", self.client.report().encode())
        self.finished = True
        self.own.say(f"{self.own.name}: the run is over; this site's model is model.safetensors in its vault")
        return Message(m.Stored())

    def _export(self, w: Tensor, path: Path) -> None:
        """Write the site's model, with what `polyfed predict` needs beside it."""
        name, task, training = self.own.name, self.client.task, self.experiment.training
        facts: dict[str, Any] = {
            "client": name,
            "shared_by_all_clients": False,
            "model": self.experiment.model,
            "classes": self.settled.classes,
            "inputs": list(self.settled.inputs),
            "outputs": self.settled.outputs,
            "loss": training.loss,
            "dtype": str(task.dtype).removeprefix("torch."),
            "algorithm": self.joined.join.algorithm,
            "data": {"name": "this site's"},
            "seed": training.seed,
            "run": self.head.run,
            "polyfed": version_of("polyfed"),
        }
        if self.preparation is not None:
            facts["preparation"] = self.preparation.only(name).dump()
        write_model(path, task.layout.named(w) | task.net.fixed, facts)


def _digest_of(data: Mapping[str, Split]) -> str:
    h = hashlib.sha256()
    for key in sorted(data):
        for t in (data[key].x, data[key].y):
            h.update(f"{key} {t.dtype} {list(t.shape)}".encode() + raw(t))
    return h.hexdigest()
