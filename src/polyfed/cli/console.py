"""Output on the terminal: progress while training, and the results. Plain lines where output is not a terminal."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from polyfed.cli.screen import say, stderr, stdout
from polyfed.metrics.metric import short
from polyfed.report import Study, Table, client_table, compare_table
from polyfed.report.caveats import doubts
from polyfed.report.summary import details, headline, lines
from polyfed.report.table import STYLES
from polyfed.report.tables import quantile_table
from polyfed.report.words import duration
from polyfed.runs.schema import CROWD
from polyfed.runs.watching import Callback, noted
from polyfed.runs.watching import Progress as Step
from polyfed.studies.jobs import Done, Watch

TENTHS = 10  # plain progress lines per run, when there is one run only
LOOK, LONG = 5, 60  # seconds: of rounds, before an estimate; of time left, from which one is shown


class Show(Watch):
    """Progress of one run or of many: bars on a terminal; otherwise lines, as it goes for a single run, for one of many
    when it is over.
    """

    def __init__(self, single: bool, quiet: bool = False, seeds: Sequence[int] = (), notes: Sequence[str] = ()):
        self.single, self.quiet, self.live = single, quiet, stderr.is_terminal and not quiet
        self.total, self.done, self._told = 1, 0, set[tuple[str, int]]()
        self.least = 0  # runs that are counted in any case
        named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        self.first = [*([named] if seeds else []), *notes]  # said before the first run
        self._from: tuple[int, float] | None = None  # a round of the run in hand, and when it was over
        self._estimated = False
        self._began: dict[tuple[str, int], float] = {}
        self._planned: set[str] = set()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}"),
            console=stderr,
            refresh_per_second=5,
            transient=True,
        )
        self._all = self._bars.add_task("runs", total=None, note="", visible=not single)
        self._one = self._bars.add_task("", total=None, note="", visible=False)

    def __enter__(self) -> "Show":
        if self.live:
            self._bars.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live:
            self._bars.stop()

    def start(self, total: int, done: int = 0) -> None:
        self.total, self.done, self._began = max(total, self.least), done, {}
        self._bars.update(self._all, total=self.total, completed=done)

    def begin(self, label: str, seed: int) -> None:
        for line in () if self.quiet else self.first:
            say(line, stderr)
        self.first = []
        self._began[label, seed], self._from = time.monotonic(), None
        many = len(self._began)
        self._bars.update(self._all, description="runs" if many == 1 else f"runs, {many} side by side")
        self._bars.reset(self._one, description=f"{label}, seed {seed}", total=None, note="", visible=many == 1)

    def callbacks(self) -> Sequence[Callback]:
        return (self._step,)

    def _step(self, step: Step) -> None:
        note = ""
        made = f"{step.run.algorithm}, {step.run.outline.n} clients"
        if made not in self._planned and not self.quiet:
            self._planned.add(made)
            plan = step.run.plan or ""
            if (solver := plan.partition(";")[0]) not in {"", *self._planned}:  # what follows may change along a path
                self._planned.add(solver)
                say(f"{step.run.algorithm.name}: {plan}", stderr)
        if step.records:
            note = noted(step)
            self._bars.update(self._one, note=note)
        self._bars.update(self._one, completed=step.round, total=step.rounds)
        self._from = first, since = self._from or (step.round, time.monotonic())
        if (passed := time.monotonic() - since) > LOOK and step.round > first:
            rest = step.rounds - step.round + step.rounds * (self.total - self.done - 1)
            self._estimate(passed / (step.round - first) * rest)
        tenth = max(1, step.rounds // TENTHS)
        if self.single and not self.live and not self.quiet and note and step.round % tenth == 0:
            say(f"round {step.round}/{step.rounds}  {note}", stderr)

    def _estimate(self, seconds: float) -> None:
        """Say once how long the rest will take, where that is long."""
        if seconds > LONG and not self._estimated and not self.quiet:
            more = "at this pace" if self.total == 1 else "if all take as long and run one after another"
            say(f"about {duration(seconds)} to go, {more}", stderr)
            self._estimated = True

    def over(self, label: str, seed: int) -> float:
        """A run is over; returns the seconds that it took, 0 where it was only read back."""
        self.done += 1
        self._bars.update(self._all, completed=self.done)
        if (label, seed) not in self._began:
            return 0.0
        seconds = time.monotonic() - self._began.pop((label, seed))
        self._estimate(seconds * (self.total - self.done))
        return seconds

    def end(self, result: Done, resumed: bool) -> None:
        seconds = self.over(result.label, result.seed)
        told, self._told = self._told, {*self._told, (result.label, result.seed)}
        if self.live or self.quiet or self.single or (result.label, result.seed) in told:
            return
        words = [f"[{self.done}/{self.total}]", f"{result.label} seed {result.seed}:"]
        if result.summary and result.status == "finished":
            split, final, name = result.summary.split, result.summary.final, result.summary.metric
            words.append("nothing held out" if split == "train" else f"{split} {name} {short(final[split].mean)}")
            if common := final.get("global"):
                words.append(f"(global {short(common.mean)})")
        else:
            words.append(result.status)
        words.append("(from before)" if resumed else f"({seconds:.1f} s)")
        say(" ".join(words), stderr)


def show_table(table: Table) -> None:
    """Print a table; where it is too wide, without the verdicts, which stand above it line by line."""
    wide = Measurement.get(stdout, stdout.options.update(width=1000), table.to("rich")).maximum > stdout.width
    if wide:
        keep = [k for k, h in enumerate(table.headers) if not h.startswith(("verdict", "gain over", "95 %", "advice"))]
        rows = tuple(tuple(row[k] for k in keep) for row in table.rows)
        table = Table(table.title, tuple(table.columns[k] for k in keep), rows, table.notes)
    stdout.print(table.to("rich"))


def results(study: Study, page: Path) -> None:
    """The answer, a line per client, the tables of clients and methods, caveats of the data, and where the page is."""
    stdout.print()
    if study.first.n > CROWD:
        show_table(quantile_table(study))
        say(f"\nreport: {page}")
        return
    stdout.print(Text(headline(study), "bold"))
    for line in doubts(study):
        stdout.print(Text(f"- {line}"))
    against, each = lines(study)
    if each:
        stdout.print(Text(f"\n{against}:", "dim"))
        wide = max(len(line.name) for line in each)
        for line in each:
            verdict = (f"{line.verdict}, ", STYLES[line.mark]) if line.verdict else ""
            stdout.print(Text.assemble(f"{line.name:{wide}}  ", verdict, line.text))
    rest = " ".join(details(study))
    stdout.print(Text(f"\n{rest}\n" if rest else "", "dim"))
    if study.first.n > 1 and any(r.clients is not None for r in study.runs):
        show_table(client_table(study))
        stdout.print()
    show_table(compare_table(study))
    notes = dict.fromkeys(n for r in study.runs for n in r.about.notes)
    if notes:
        stdout.print(Text("\nAbout these data", "bold"))
        for note in notes:
            stdout.print(Text(f"- {note}"))
    say(f"\nreport: {page}")
