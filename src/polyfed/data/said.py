"""Types of a site's description of its file before the first round: `schema.File` says it, `schema.settle` hears it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

LARGE = 1 << 53  # from which a whole number is no count of anything
DIMS = 8  # of a tensor at most
Count = Annotated[int, Field(ge=0, lt=LARGE)]
Shape = Annotated[list[Count], Field(max_length=DIMS)]


class Strict(BaseModel):
    """Every field of its type, and no other field."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Dropped(Strict):
    """A column that the experiment leaves out, or that holds weights."""

    dropped: Literal[True] = True


class Cells(Strict):
    """Contents of a column in one site's file: enough to tell, from those of all sites, what the column is.

    numbers: how many cells hold one     texts: distinct ones (`sheets.spelt`); None where a site says only that there
    are many     whole: whether all texts are integers     dates: whether all are dates
    distinct: whether no text occurs twice     notation: whether most texts look like numbers in another notation
    unmatched: how many cells match no declared value     respelt: how many of its texts match another one
    """

    cells: Count
    gaps: Count
    numbers: Count
    texts: list[str] | None
    whole: bool
    dates: bool
    distinct: bool
    notation: bool
    unmatched: Count
    respelt: Count

    @property
    def there(self) -> int:
        """Cells with something in them."""
        return self.cells - self.gaps


def facts(cells: Cells, **others: Any) -> dict[str, Any]:
    """What there is in any cells, but for others."""
    return {name: getattr(cells, name) for name in Cells.model_fields} | others


class Column(Cells):
    """What a site says of a column: of its texts those that say nothing of a row.

    one: the number that all cells are     train, gap: values and gaps of training rows
    """

    one: Annotated[float, Field(allow_inf_nan=False)] | None
    train: list[str] | None
    gap: bool


class Csv(Strict):
    """A table. weighted: whether its rows' weights differ"""

    kind: Literal["table"] = "table"
    target: str
    columns: dict[str, Dropped | Column]
    weighted: bool

    @property
    def used(self) -> dict[str, Column]:
        """The columns that are not dropped."""
        return {name: c for name, c in self.columns.items() if isinstance(c, Column)}


Finite = Annotated[float, Field(allow_inf_nan=False)]
End = Annotated[list[Finite], Field(min_length=2, max_length=2)]  # a number, and how many rows have it


class Part(Strict):
    """One column at one site, for the audit between sites.

    quantiles: of its numbers, where all its values are: 5, 25, 50, 75 and 95 %     values: rows of each value, where
    there are few     odd: rows of numbers that look like codes of a gap     low, high: the least and the largest number
    with their rows, where many rows have them     repeats: rows that repeat another's, of identifiers
    """

    rows: Count
    gaps: Count
    distinct: Count = 0
    quantiles: Annotated[list[Finite], Field(min_length=5, max_length=5)] | None = None
    values: Annotated[dict[str, Count], Field(max_length=100)] | None = None
    odd: Annotated[dict[str, Count], Field(max_length=100)] | None = None
    low: End | None = None
    high: End | None = None
    repeats: Count = 0

    @property
    def there(self) -> int:
        """Rows with a value."""
        return self.rows - self.gaps

    @property
    def shown(self) -> str:
        """Median and quartiles, or the commonest values, in short."""
        if self.quantiles is not None and self.distinct > 2:
            low, middle, high = self.quantiles[1:4]
            return f"{middle:.4g} ({low:.4g} to {high:.4g})"
        common = sorted((self.values or {}).items(), key=lambda v: -v[1])[:3]
        return ", ".join(f"{text[:12]} {rows / max(self.there, 1):.0%}" for text, rows in common)


class Npz(Strict):
    """Arrays. inputs, targets: shapes of one sample     integers, numbers: whether inputs are integers, targets floats

    given: whether it has test samples of its own     labels: where there are few, or the experiment needs them
    """

    kind: Literal["arrays"] = "arrays"
    inputs: Shape
    targets: Shape
    integers: bool
    numbers: bool
    given: bool
    labels: list[int] | None = None
