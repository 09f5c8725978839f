"""From run folders to an answer: tables, figures and one page. Reads files only, so it works on runs from anywhere."""

from polyfed.report.clients import client_table, gain_table
from polyfed.report.figures import client_figure, gain_figure, metric_figure, spread_figure
from polyfed.report.page import write_report
from polyfed.report.paper import paper_table
from polyfed.report.pictures import partition_figure
from polyfed.report.read import Study, read
from polyfed.report.style import save
from polyfed.report.summary import answer
from polyfed.report.table import Table
from polyfed.report.tables import compare_table, cost_table, results

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
    "paper_table",
    "partition_figure",
    "read",
    "results",
    "save",
    "spread_figure",
    "write_report",
]
