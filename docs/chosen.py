"""A closed list of what a server may choose: for every field of every request who bounds it, what it is counted as, and
what changing it alone can tell. `tests/sites/test_fields.py` walks the types of the wire, and fails for one without an
entry; security.md shows the list.

All of it is in the digest that noise, the ledger and a yes are made of, which is of the message as it is serialised;
but for `keep`, by which a site only forgets.
"""

from collections.abc import Iterator
from typing import NamedTuple, get_args

from polyfed.base.columns import Columns
from polyfed.base.settings import kebab, settings_of
from polyfed.runs.privacy import Privacy
from polyfed_sites import wire as m


class Chosen(NamedTuple):
    """bound: policy's key, "text" (of the consent), or "protocol"     counted: by which limit     tells: alone"""

    bound: str
    counted: str
    tells: str


TERMS, RUN = "most-joins, most-agreements", "most-rounds, epsilon"
NOTHING, MODEL = "nothing", "what a model of the method tells; with epsilon, noise of its own"
COMMON = "whether least-count rows or more have it"

FIELDS: dict[str, Chosen] = {
    "*.kind": Chosen("protocol", "", NOTHING),
    "Join.versions": Chosen("protocol", TERMS, "which versions are installed"),
    "Join.experiment": Chosen("text", TERMS, NOTHING),
    "Join.training": Chosen("text, most-steps, least-batch, separable", TERMS, MODEL),
    "Join.algorithm": Chosen("methods", TERMS, MODEL),
    "Join.model": Chosen("models, most-parameters", TERMS, MODEL),
    "Join.columns": Chosen("columns, text", TERMS, "see columns.*"),
    "Join.cut": Chosen(
        "least-count (parts differ by none or so many rows)", TERMS, "sums that differ by least-count rows"
    ),
    "Join.test": Chosen(
        "least-count (parts differ by none or so many rows)", TERMS, "sums that differ by least-count rows"
    ),
    "Join.validation": Chosen("least-count (parts differ by none or so many rows)", TERMS, "as test"),
    "Join.needs": Chosen("pooled, --allow", TERMS, NOTHING),
    "Join.rounds": Chosen("most-rounds", TERMS, NOTHING),
    "Join.evaluations": Chosen("most-evaluations", TERMS, NOTHING),
    "Join.steps": Chosen("most-steps", TERMS, MODEL),
    "Join.keys": Chosen("peers, text", TERMS, NOTHING),
    "Join.cohort": Chosen("least-sites, peers", TERMS, NOTHING),
    "Agreed.joined": Chosen("as Join", "most-agreements", "as Join"),
    "Agreed.peers": Chosen("protocol (signed by each site)", "most-agreements", NOTHING),
    "Agreed.settled": Chosen("protocol (columns of the terms)", "most-agreements, most-cells", "sums; see pooled"),
    "Pooled.what": Chosen("pooled, --allow", "most-cells", "sums of least-count rows or more; medians: a column"),
    "Pooled.columns": Chosen("pooled, --allow", "most-cells", "counts, with pooled = medians"),
    "Pooled.tensors": Chosen(
        "pooled, --allow", "most-cells", "for each agreement two questions of sums, one of squares"
    ),
    "Audit.joined": Chosen("audit", "most-agreements, most-cells", "what the policy's audit says, once"),
    "Begin.run": Chosen("protocol (one run a vault)", "most-runs", NOTHING),
    "Begin.loss": Chosen("text", "most-agreements", MODEL),
    "Begin.weights": Chosen("text", "most-agreements", MODEL),
    "Turn.run": Chosen("protocol (one run a vault)", "", NOTHING),
    "Turn.base": Chosen("protocol (versions in the vault)", RUN, MODEL),
    "Turn.keep": Chosen("protocol", "", NOTHING),
    "Train.t": Chosen("most-rounds", RUN, MODEL),
    "Train.phase": Chosen("protocol (exchanges of the method)", RUN, MODEL),
    "Train.n": Chosen("protocol", RUN, MODEL),
    "Train.scale": Chosen("protocol", RUN, MODEL),
    "Train.cohort": Chosen("terms, least-sites, peers, absent", RUN, NOTHING),
    "Train.tensors": Chosen(
        "least-count (units that few rows tell apart)", RUN, "what such units do not show; bounded by epsilon alone"
    ),
    "Evaluate.split": Chosen("least-count", "most-evaluations, most-cells", "scores in steps of least-count rows"),
    "Evaluate.round": Chosen("protocol", "most-evaluations", NOTHING),
    "Evaluate.tensors": Chosen("protocol (forms of the terms)", "most-evaluations, most-cells", "as split"),
    "End.tensors": Chosen("protocol (forms of the terms)", "once", NOTHING),
    "Open.what": Chosen("protocol (what was answered)", "once", NOTHING),
    "Open.cohort": Chosen("protocol (what was answered)", "once", NOTHING),
    "Open.digest": Chosen("protocol (what was answered)", "once", NOTHING),
    "Open.least": Chosen("protocol (what was answered)", "once", NOTHING),
    "Open.limbs": Chosen("protocol (what was answered)", "once", NOTHING),
    "Open.present": Chosen("absent, least-sites, protocol (one group a model)", "once", "the sum over these sites"),
    "Open.sealed": Chosen("protocol (sealed by each site)", "once", NOTHING),
    "Peer.key": Chosen("protocol (signed by its site)", "", NOTHING),
    "Peer.rows": Chosen("protocol (signed by its site)", "", NOTHING),
    "Peer.signature": Chosen("peers", "", NOTHING),
}
SHAPES = ("target", "task", "time", "event", "text", "image", "weights", "drop", "numbers", "group", "missing-target")
COLUMNS = {
    **dict.fromkeys(SHAPES, Chosen("columns, text", TERMS, "kind and common values of columns that the policy lists")),
    **dict.fromkeys(("gaps", "categories", "labels", "limits"), Chosen("least-count, text", TERMS, COMMON)),
    "site": Chosen("least-count (changes of units, common texts), text", TERMS, COMMON),
}
REST = Chosen("text", TERMS, MODEL)  # how columns become inputs
PRIVACY = {
    "sums": Chosen("sums", TERMS, NOTHING),
    "threshold": Chosen("least-sites", TERMS, NOTHING),
    "unit": Chosen("unit", TERMS, NOTHING),
    "epsilon": Chosen("epsilon", TERMS, NOTHING),
    "delta": Chosen("delta", TERMS, NOTHING),
    "noise": Chosen("noise", TERMS, NOTHING),
    "absent": Chosen("absent, peers", TERMS, NOTHING),
    "clip": Chosen("protocol (noise grows with it)", TERMS, NOTHING),
}
OTHERS = ("quantile", "per", "runs", "ledger")  # of [privacy]: a site refuses or ignores them
TENSORS = (m.Pooled, m.Train, m.Evaluate, m.End)


def walked() -> Iterator[tuple[str, Chosen | None]]:
    """Every field that a server may choose, from the types of the wire, with its entry; None: it has none."""
    seen = set[str]()
    for kind in (*get_args(m.Request), m.Peer):
        for cls in reversed(kind.__mro__):
            for name in vars(cls).get("__annotations__", ()):
                key = "*.kind" if name == "kind" else f"{cls.__name__}.{name}"
                if name in kind.model_fields and key not in seen:
                    seen.add(key)
                    yield key, FIELDS.get(key)
    for kind in TENSORS:
        yield f"{kind.__name__}.tensors", FIELDS.get(f"{kind.__name__}.tensors")
    for setting in settings_of(Columns):
        yield f"columns.{kebab(setting.name)}", COLUMNS.get(kebab(setting.name), REST)
    for setting in settings_of(Privacy):
        known = PRIVACY.get(kebab(setting.name), REST if setting.name in OTHERS else None)
        yield f"privacy.{kebab(setting.name)}", known


def rendered() -> str:
    """The list as the page has it; fields that are alike in one line."""
    lines: dict[Chosen, list[str]] = {}
    for key, chosen in walked():
        if chosen is not None:
            lines.setdefault(chosen, []).append(f"`{key}`")
    rows = [f"| {', '.join(keys)} | {c.bound} | {c.counted or '–'} | {c.tells} |" for c, keys in lines.items()]
    return "\n".join(["| field | bounded by | counted by | tells, changed alone |", "|---|---|---|---|", *rows])
