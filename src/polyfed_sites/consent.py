"""Consent: what leaves a site, in words, before anything does; and what its operator has allowed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from polyfed.base.errors import Refusal
from polyfed.core.messages import Form
from polyfed.data.said import Csv, Npz
from polyfed_sites.wire import Joined

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


class Terms(NamedTuple):
    """What a text is made of."""

    title: str
    about: Joined
    work: Sequence[str]  # how long it trains, in words
    up: Mapping[str, Mapping[str, Form]]  # tensors by exchange
    needs: Mapping[str, str]  # what is made of samples, and what it is
    discloses: Mapping[str, str]
    policy: str  # in words
    private: Sequence[str] = ()  # what is hidden, and from whom; empty where replies are open


def words(terms: Terms, consent: Consent) -> str:
    """What will leave a site, for its operator to read."""
    about, needs = terms.about, terms.needs
    rows = about.counts.model_dump(exclude_none=True)
    said = [f"What leaves the site {about.site!r} ({terms.title}):", *(f"  {line}" for line in terms.work)]
    said += [f"  {line}" for line in terms.private]
    said += ["  once, before the first round:"]
    said += [f"    numbers of rows: {', '.join(f'{key} {n}' for key, n in rows.items())}"]
    said += [f"    {line}" for line in _of_file(about.file)]
    said += ["  in every round that it takes part in:"]
    forms = {name: form for tensors in terms.up.values() for name, form in tensors.items()}
    for name, form in forms.items():
        meaning = terms.discloses.get(name) or MEANING.get(name, "a tensor of the method, see its description")
        mark = ", MADE OF SAMPLES" if name in terms.discloses else ""
        said.append(f"    {name}: {form}, {form.bytes:,} bytes: {meaning}{mark}")
    secure = any(line.startswith("sums: secure") for line in terms.private)
    said += [f"    {'nothing' if not forms else 'all of it hidden' if secure else 'seconds and number of steps'}"]
    said += [
        {
            "own": "  metrics: this site's numbers" + ", hidden in a sum over sites" * secure,
            "aggregate": "  metrics: this site's numbers, "
            + ("hidden in a sum over sites" if secure else "which the server only writes down averaged over sites"),
            "none": "  metrics: none",
        }[consent.metrics]
    ]
    for name, meaning in needs.items():
        if name not in forms:
            said.append(f"  {name}: {meaning}, MADE OF SAMPLES")
    refused = [name for name in needs if name not in consent.allow]
    if refused:
        said.append(f"  not allowed, so the site does not join: {', '.join(refused)} (--allow {','.join(refused)})")
    return "\n".join([*said, f"  by this site's policy: {terms.policy}"])


def _of_file(file: Csv | Npz) -> list[str]:
    if isinstance(file, Npz):
        labels = f", labels {', '.join(map(str, file.labels))}" if file.labels else ""
        return [f"shapes of one sample: inputs {file.inputs}, targets {file.targets}{labels}"]
    counted = "how many cells are empty, numbers or no declared value, how many values are written in several ways"
    said = [f"names of columns, {counted}: {', '.join(file.columns)}"]
    return said + [f"values of {name}: {', '.join(c.texts)}" for name, c in file.used.items() if c.texts]
