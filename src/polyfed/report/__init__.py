"""From run folders to an answer: tables, figures and one page. Reads files only, so it works on runs from anywhere."""

from typing import TYPE_CHECKING, Any

from polyfed.base.lazy import attribute, homes
from polyfed.report.clients import client_table, gain_table
from polyfed.report.read import read
from polyfed.report.summary import answer
from polyfed.report.table import Table
from polyfed.report.tables import compare_table, cost_table, results
from polyfed.report.verdicts import Study

if TYPE_CHECKING:
    from polyfed.report.curves import metric_figure as metric_figure
    from polyfed.report.figures import client_figure as client_figure
    from polyfed.report.figures import gain_figure as gain_figure
    from polyfed.report.figures import spread_figure as spread_figure
    from polyfed.report.maps import partition_figure as partition_figure
    from polyfed.report.notebook import cell as cell
    from polyfed.report.notebook import sentence as sentence
    from polyfed.report.page import write_report as write_report
    from polyfed.report.style import save as save

_DRAWN = homes(__file__)  # what imports matplotlib, when it is asked for


def __getattr__(name: str) -> Any:
    return attribute(__name__, _DRAWN, name)


__all__ = [
    "Study",
    "Table",
    "answer",
    "client_figure",
    "client_table",
    "compare_table",
    "cost_table",
    "gain_figure",
    "gain_table",
    "metric_figure",
    "partition_figure",
    "read",
    "results",
    "save",
    "spread_figure",
    "write_report",
]
