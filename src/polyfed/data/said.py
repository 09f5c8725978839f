"""Types of a site's description of its file before the first round: `schema.File` says it, `schema.settle` hears it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from polyfed.base.part import Count, Strict

DIMS = 8  # of a tensor at most
Shape = Annotated[list[Count], Field(max_length=DIMS)]


class Dropped(Strict):
    """A column that the experiment leaves out, or that holds weights."""

    dropped: Literal[True] = True


class Cells(Strict):
    """Contents of a column in one site's file: enough to tell, from those of all sites, what the column is.

    numbers: how many cells hold one     texts: distinct ones (`sheets.spelt`); None where a site says only that there
    are many     whole: whether all texts are integers     dates: whether all are dates
    distinct: whether no text occurs twice     numbered: whether they number the rows, beyond chance
    notation: whether most texts look like numbers in another notation
    unmatched: how many cells match no declared value     respelt: how many of its texts match another one
    """

    cells: Count
    gaps: Count
    numbers: Count
    texts: list[str] | None
    whole: bool
    dates: bool
    distinct: bool
    numbered: bool
    notation: bool
    unmatched: Count
    respelt: Count

    @property
    def there(self) -> int:
        """Cells with something in them."""
        return self.cells - self.gaps


def facts(cells: Cells, /, **others: Any) -> dict[str, Any]:
    """What there is in any cells, but for others."""
    return {name: getattr(cells, name) for name in Cells.model_fields} | others


class Column(Cells):
    """What a site says of a column: of its texts those that say nothing of a row.

    one: the number that all cells are     train, gap: values and gaps of training rows
    some: whether any row has a gap
    The counts are of training rows, and none of them is of fewer rows than the site's least-count.
    """

    one: Annotated[float, Field(allow_inf_nan=False)] | None
    train: list[str] | None
    gap: bool
    some: bool


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
