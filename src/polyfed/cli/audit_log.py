"""polyfed audit-log: whether a server and a site have written down the same."""

from polyfed.cli.commands import AuditLog
from polyfed.sites.audit import compare, read


def audit_log(o: AuditLog) -> None:
    print(compare(read(o.a), read(o.b)))
