"""All findings of an audit: from rows, or from what sites say of their columns."""

from collections.abc import Sequence

from polyfed.base.columns import RENAME, Columns
from polyfed.base.part import EVERY, Audit, Flag, Parts
from polyfed.data.csv_files import FEW, USABLE
from polyfed.data.tables import Table
from polyfed_audit.codes import codes, odd, piled
from polyfed_audit.coding import exchanged, facts, one_class, turned
from polyfed_audit.outcome import rates, telling
from polyfed_audit.parts import parts_of
from polyfed_audit.rows import copied, doubled, repeated
from polyfed_audit.units import units


def audit(table: Table) -> Audit:
    """What differs between the sites of a table whose rows are here."""
    c, sheets = table.columns, table.sheets
    parts = parts_of(sheets, c)
    raised = flags({n: at for n, at in parts.items() if not table.survey[n].numbers_rows}, c, table.outcome)
    raised += doubled(sheets, c)
    about = [*facts(table.outcome[-1], parts[table.outcome[-1]])]
    inputs, outcome = [i for i in table.inputs if i.kind in USABLE], [table.survey[name] for name in table.outcome]
    if any(i.lacking or (i in outcome and i.gaps) for i in (*inputs, *outcome)):
        return Audit(parts, raised, about)
    raised += copied(sheets, [i.name for i in (*inputs, *outcome)], c.gaps)
    if c.task not in ("regression", "survival") and 1 < len(outcome[-1].values) <= FEW:
        raised += telling(sheets, inputs, outcome[-1], c.gaps)
    if c.task not in ("regression", "survival") and len(outcome[-1].values) == 2:
        flagged = {(f.site, f.column) for f in raised}
        raised += [f for f in turned(sheets, inputs, outcome[-1]) if (f.site, f.column) not in flagged]
    return Audit(parts, raised, about)


def flags(parts: Parts, columns: Columns, outcome: Sequence[str]) -> list[Flag]:
    """The differences between sites to look at before anything is trained."""
    raised: list[Flag] = []
    apart = columns.apart
    for name, at in parts.items():
        raised += [] if name == columns.group else repeated(name, at)
        if name in apart:
            continue
        raised += odd(name, at)
        strange = [*codes(name, at)]
        raised += strange or ([] if name in columns.limits else piled(name, at))
        raised += [] if strange or name not in outcome else rates(name, at)
        raised += one_class(name, at) if name in outcome[-1:] else []
    flagged = {f.column for f in raised if f.site != EVERY}
    raised += units({name: at for name, at in parts.items() if name not in apart and name not in flagged})
    swapped = [*exchanged({name: at for name, at in parts.items() if name not in apart})]
    elsewhere = {(f.site, name) for f in swapped for name in f.repair["site"][f.site][RENAME]}
    return [f for f in raised if (f.site, f.column) not in elsewhere] + swapped
