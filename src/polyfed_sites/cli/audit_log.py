"""polyfed audit-log: whether a server and a site have written down the same."""

from polyfed_sites.audit import compare, read
from polyfed_sites.commands import AuditLog


def audit_log(o: AuditLog) -> None:
    print(compare(read(o.a), read(o.b)))
