"""Numbers as people read them: bytes, durations, metrics with their spread."""

import math

from polyfed.metrics.metric import Metric

MINUS = "−"

DIGITS = {None: "four figures", 2: "two decimals", 3: "three decimals"}
LEVELLED = "levelled"  # how a leg of a search ended that was trained for as many rounds as the other regime's best


def size(count: float) -> str:
    """Bytes in decimal units with three figures: 1 GB = 1e9 bytes."""
    if not math.isfinite(count):
        return "–"
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= 0.9995 * scale:
            return f"{figures(count / scale)} {unit}"
    return f"{count:.0f} B"


def figures(value: float, digits: int = 3) -> str:
    """A number with `digits` significant figures; no exponent between 1e-4 and 1e6."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    decimals = digits - 1 - math.floor(math.log10(abs(round(value, decimals))))
    if -3 <= decimals <= digits + 3:
        return f"{value:.{max(decimals, 0)}f}"
    return f"{value:.{digits - 1}e}"


def duration(seconds: float) -> str:
    """Seconds as `45.0 ms`, `12.3 s`, `4 min 05 s`, `2 h 13 min`."""
    if not math.isfinite(seconds):
        return "–"
    if 0 < seconds < 0.9995:
        return f"{figures(1000 * seconds)} ms"
    if seconds < 99.95:
        return f"{figures(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


class Scale:
    """Way to write a metric: a share in per cent with one decimal, others with their decimals or four figures."""

    def __init__(self, metric: Metric):
        self.metric = metric
        self.percent = metric.unit == "%"
        self.factor = 100.0 if self.percent else 1.0
        self.name = metric.title or metric.name
        self.header = f"{self.name}, %" if self.percent else self.name
        self.mean = self.header  # of a mean over clients
        if not metric.sign:
            self.header += f" ({metric.aim:g} is best)"
            self.mean += f": distance from {metric.aim:g}"
        figures = "a tenth of a point" if self.percent else f"{DIGITS.get(metric.decimals)}"
        self.same = f"the same to {figures}"  # of a gain below what is printed
        self.unit = " %" if self.percent else ""
        self.difference_unit = " points" if self.percent else ""
        self.points = f",{self.difference_unit}" * self.percent  # after the header of differences

    def gained(self, split: str) -> str:
        """What a difference is of: `points of test accuracy`, or `test AUC`."""
        return f"{'points of ' * self.percent}{split} {self.name}"

    def step(self, level: float) -> float:
        """The smallest gain that shows: half a unit of the last figure that is printed, of values of such a size."""
        figures = 3 - math.floor(math.log10(level)) if 0 < level < math.inf else math.inf
        return 0.5 * 10.0 ** -(3 if self.percent else figures if self.metric.decimals is None else self.metric.decimals)

    def number(self, value: float) -> str:
        if not math.isfinite(value):
            return "–"
        return self._plain(value, 4)

    def _plain(self, value: float, digits: int) -> str:
        """A number with `digits` significant figures, unless the metric has its own number of decimals."""
        if self.percent:
            return f"{value * 100:.1f}"
        if self.metric.decimals is None:
            return figures(value, digits)
        text = f"{value:.{self.metric.decimals}f}"
        return text.removeprefix("-") if float(text) == 0 else text

    def spread(self, mean: float, std: float) -> str:
        """`81.3 ± 0.4`, or the mean alone if there is no spread."""
        if not math.isfinite(std):
            return self.number(mean)
        return f"{self.number(mean)} ± {self._plain(std, 2)}"

    def signed(self, value: float) -> str:
        """A difference with its sign: `+3.2`, `−0.4`."""
        if not math.isfinite(value):
            return "–"
        text = self._plain(abs(value), 3)
        return text if float(text) == 0 else ("+" if value > 0 else MINUS) + text

    def range(self, low: float, high: float) -> str:
        return f"{self.signed(low)} to {self.signed(high)}"


def count(number: int, noun: str) -> str:
    """`1 client`, `3 clients`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(words: list[str], limit: int = 3) -> str:
    """`a`, `a and b`, `a, b and 4 more`."""
    if len(words) > limit:
        words = [*words[: limit - 1], f"{len(words) - limit + 1} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
