"""All findings of an audit: from rows, or from what sites say of their columns."""

from collections.abc import Sequence

from polyfed.base.columns import RENAME, Columns
from polyfed.base.part import EVERY, Audit, Flag, Parts
from polyfed.data.csv_files import FEW, USABLE
from polyfed.data.tables import Table
from polyfed_audit.bounds import impossible, negated
from polyfed_audit.codes import codes, odd, piled
from polyfed_audit.coding import exchanged, facts, one_class, permuted, turned
from polyfed_audit.outcome import expected, rates, telling, there
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
    target = outcome[-1]
    number = c.task == "regression" or (c.task == "auto" and target.kind == "number" and not target.whole)
    two = not number and len(target.values) == 2
    plain = [*rates(target.name, parts[target.name])] if two else []  # `expected` knows the case mix
    raised = [f for f in raised if f not in plain]
    flagged = {(f.site, f.column) for f in raised}
    if not number and 1 < len(target.values) <= FEW:
        raised += telling(sheets, inputs, target, c.gaps)
    if number or two:
        raised += [f for f in turned(sheets, inputs, target, number) if (f.site, f.column) not in flagged]
    elif 2 < len(target.values) <= FEW:
        raised += [f for f in permuted(sheets, inputs, target) if (f.site, f.column) not in flagged]
    if two:
        wrong, right = {f.site for f in raised if f.column == target.name}, {name for _, name in flagged}
        told = [s for s in sheets if s.name not in wrong]
        raised += expected(told, [i for i in inputs if i.name not in right], target)
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
        strange = [*codes(name, at), *negated(name, at)]
        raised += strange or ([] if name in columns.limits else piled(name, at))
        raised += [] if strange or name not in outcome else rates(name, at)
        raised += one_class(name, at) if name in outcome[-1:] else []
    flagged = {f.column for f in raised if f.site != EVERY}
    raised += there(parts, outcome[-1]) if outcome else []
    raised += units({name: at for name, at in parts.items() if name not in apart and name not in flagged})
    raised += [f for name, at in parts.items() if name not in apart for f in impossible(name, at)]
    swapped = [*exchanged({name: at for name, at in parts.items() if name not in apart})]
    elsewhere = {(f.site, name) for f in swapped for name in f.repair["site"][f.site][RENAME]}
    return [f for f in raised if (f.site, f.column) not in elsewhere] + swapped
