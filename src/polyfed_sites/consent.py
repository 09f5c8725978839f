"""Consent: what leaves a site, in words, before anything does; and what its operator has allowed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Literal

from polyfed.base.errors import Refusal
from polyfed.base.settings import kebab
from polyfed.core.messages import Form
from polyfed.data.said import Csv, Npz
from polyfed.data.tables import repairs_said
from polyfed.runs.privacy import Privacy
from polyfed_sites.agreed import Experiment
from polyfed_sites.keys import fingerprint
from polyfed_sites.policy import Policy
from polyfed_sites.sums import fewest
from polyfed_sites.wire import Join, Joined

MEANING = {
    "w": "a model, after training here",
    "dw": "the change of the model by training here",
    "u": "a mixture of models",
    "h": "the gradient of this site's loss",
    "g": "the gradient of this site's loss",
    "z": "the model after a step, with its correction",
    "dc": "the change of this site's control variate (a mean gradient)",
    "common": "the shared part of the model, after training here",
    "cluster": "which of the server's models fits this site best",
    "version": "which model the reply is made from",
    "mask": "which parameters this site trains",
    "smoothness": "an estimate of how fast this site's gradient changes",
    "values": "the largest entries of the gradient of this site's loss",
    "at": "where they are",
}
SUMS = "sums and sums of squares of every column over this site's training rows"
RAW = {
    "pooled": f"{SUMS}; for columns with gaps, here or at another site, also how many values are at most some "
    "thresholds, from which THE WHOLE COLUMN can be read",
    "labels": "the number of training rows of each class",
}
AUDIT = {
    "counts": "rows, gaps, and rows of each value that many have, of each column",
    "quantiles": "rows, gaps, rows of each value that many have, rows that cannot be, "
    "and five quantiles in two digits, of each column; three of them also in each class of the target",
}
HONEST = (
    "no epsilon: units of a model that few rows tell apart are kept back, where layers show it; beyond that the bounds "
    "hold for a server that sends the models of this method: one that makes models up for the purpose can read rows"
)


@dataclass(frozen=True)
class Consent:
    """What an operator lets leave the site.

    metrics: how good models are here. "own": the server writes down this site's numbers; "aggregate": only their mean
    over two or more sites that say so, by its program and no cryptography; "none": they stay here
    """

    allow: frozenset[str] = frozenset()  # what is made of samples and not of training: "pooled", "labels", ...
    metrics: Literal["none", "aggregate", "own"] = "own"
    ask: Callable[[str], bool] | None = None  # shown the text before anything is sent; None: whatever the policy allows
    agreed: frozenset[str] = frozenset()  # digests of terms that the operator, who is not asked then, has agreed to
    dry: bool = False  # nothing is answered: the text is shown though the vault may remember a yes

    def check(self, needs: Mapping[str, str]) -> None:
        """Raise Refusal for what is made of samples, asked for, and not allowed."""
        for name, words in needs.items():
            if name not in self.allow:
                raise Refusal(f"{name!r} is made of samples ({words}) and not allowed here; --allow {name}")


def at_terminal(text: str) -> bool:
    """Whether the operator agrees to a text that has been shown. Raises Refusal where there is no terminal."""
    try:
        return input("Join? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise Refusal("found no terminal to ask at; read the terms, then agree with --yes and their digest") from None


def words(
    join: Join,
    e: Experiment,
    about: Joined,
    up: Mapping[str, Mapping[str, Form]],  # tensors that leave, by exchange
    needs: Mapping[str, str],  # what is made of samples, and what it is
    policy: Policy,
    consent: Consent,
) -> str:
    """What will leave a site, for its operator to read."""
    lines, discloses, p = _before(join, e, about, policy), e.method.needs.discloses, e.training.privacy
    forms = {name: form for tensors in up.values() for name, form in tensors.items()}
    hidden = p is not None and p.sums == "secure"
    lines += ["  in every round that it takes part in:"]
    for name, form in forms.items():
        meaning = discloses.get(name) or MEANING.get(name, "a tensor of the method, see its description")
        made = ", MADE OF SAMPLES" if name in discloses else ""
        lines.append(f"    {name}: {form}, {form.bytes:,} bytes: {meaning}{made}")
    lines += [f"    {'nothing' if not forms else 'all of it hidden' if hidden else 'seconds and number of steps'}"]
    lines += [
        {
            "own": "  metrics: this site's numbers" + ", hidden in a sum over sites" * hidden,
            "aggregate": "  metrics: this site's numbers, "
            + ("hidden in a sum over sites" if hidden else "which the server only writes down averaged over sites"),
            "none": "  metrics: none",
        }[consent.metrics]
    ]
    lines += [f"  {name}: {what}, MADE OF SAMPLES" for name, what in needs.items() if name not in forms]
    if refused := [name for name in needs if name not in consent.allow]:
        lines.append(f"  not allowed, so the site does not join: {', '.join(refused)} (--allow {','.join(refused)})")
    return "\n".join([*lines, f"  by this site's policy: {policy.words()}"])


def _before(join: Join, e: Experiment, about: Joined, policy: Policy) -> list[str]:
    """The terms, and what leaves before the first round."""
    t, rows = e.training, about.counts.model_dump(exclude_none=True)
    steps = f"local steps {join.steps}" if join.steps else f"{t.epochs} passes over the training rows"
    backbone = (
        " on the backbone {backbone} ({backbone-digest})".format_map(join.model) if "backbone" in join.model else ""
    )
    lines = [
        f"What leaves the site {about.site!r} ({e.method.name}, {join.experiment}; shapes as of this site's own "
        "columns):",
        f"  model {e.model['name']}{backbone}; at most {join.rounds} rounds of {steps}, "
        f"in steps of {t.batch_size or 'all'} rows",
        f"  at most {join.evaluations} evaluations, each of one part of the rows",
        *(f"  {line}" for line in starmap(repairs_said, join.columns.site.items())),
        *_tables(join),
    ]
    if about.audit:
        lines.append(f"  once, for the audit between sites: {AUDIT[policy.audit]}")
    if t.privacy is not None:
        lines += _private(join, t.privacy)
    elif policy.least_count > 1:
        lines.append(f"  {HONEST}")
    lines.append("  once, before the first round:")
    lines.append(f"    numbers of rows: {', '.join(f'{key} {n}' for key, n in rows.items())}")
    return lines + [f"    {line}" for line in _of_file(about.file)]


def _private(join: Join, p: Privacy) -> list[str]:
    """What is hidden, and from whom."""
    lines: list[str] = []
    if p.sums == "secure":
        each = ", ".join(f"{name} (key {fingerprint(key)})" for name, key in join.keys.items())
        lines = [
            f"  sums: secure; the server reads sums over at least {fewest(p, join.cohort)} of {join.cohort} sites, and "
            "no number of this one alone; numbers of rows, columns and their values below are not hidden",
            f"  hidden by keys of: {each}; ask them whether these are their keys",
        ]
    if p.epsilon is not None:
        lines.append(
            f"  differential privacy of one {p.unit}: epsilon {p.epsilon:g} at delta {p.delta:g} for the whole run, "
            f"clip {p.clip:g}, noise {p.noise}, absent {p.absent}"
        )
    return lines


def _tables(join: Join) -> list[str]:
    """Every setting that shapes an answer, as the server has written it."""
    columns = {kebab(key): value for key, value in join.columns.given.items() if key != "site"}
    tables = {"training": join.training, "algorithm": join.algorithm, "model": join.model, "columns": columns}
    tables["data"] = {"seed": join.cut, "test-fraction": join.test, "validation-fraction": join.validation}
    return [
        f"  [{name}] {', '.join(f'{key} = {json.dumps(value, default=str)}' for key, value in table.items())}"
        for name, table in tables.items()
        if table
    ]


def _of_file(file: Csv | Npz) -> list[str]:
    if isinstance(file, Npz):
        labels = f", labels {', '.join(map(str, file.labels))}" if file.labels else ""
        return [f"shapes of one sample: inputs {file.inputs}, targets {file.targets}{labels}"]
    counted = "how many cells are empty, numbers or no declared value, how many values are written in several ways"
    values = [f"values of {name}: {', '.join(c.texts)}" for name, c in file.used.items() if c.texts]
    return [f"names of columns, {counted}: {', '.join(file.columns)}", *values]
