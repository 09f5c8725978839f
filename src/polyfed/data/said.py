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
    """Contents of a column in one site's file, enough to tell, from those of all sites, the kind of the column."""

    cells: Count
    gaps: Count
    numbers: Count
    texts: list[str] | None  # as `csv_files.spelt` has them; None: a site says only that there are many
    whole: bool  # all texts are integers
    dates: bool
    distinct: bool  # no text occurs twice
    numbered: bool  # they number the rows, beyond chance
    notation: bool  # most texts look like numbers in another notation
    unmatched: Count  # cells that match no declared value
    respelt: Count  # texts that match another one

    @property
    def there(self) -> int:
        """Cells with something in them."""
        return self.cells - self.gaps


def facts(cells: Cells, /, **others: Any) -> dict[str, Any]:
    """Fields of `Cells`, and others."""
    return {name: getattr(cells, name) for name in Cells.model_fields} | others


class Column(Cells):
    """A site's description of a column: counts of training rows, none of them of fewer rows than its least-count."""

    one: Annotated[float, Field(allow_inf_nan=False)] | None  # the number in all cells
    train: list[str] | None  # values of training rows
    gap: bool  # a training row has a gap
    some: bool  # any row has a gap


class Csv(Strict):
    """A table."""

    kind: Literal["table"] = "table"
    target: str
    columns: dict[str, Dropped | Column]
    weighted: bool  # the weights of its rows differ

    @property
    def used(self) -> dict[str, Column]:
        """The columns that are not dropped."""
        return {name: c for name, c in self.columns.items() if isinstance(c, Column)}


class Npz(Strict):
    """Arrays."""

    kind: Literal["arrays"] = "arrays"
    inputs: Shape  # of one sample
    targets: Shape
    integers: bool  # inputs are integers
    numbers: bool  # targets are floats
    given: bool  # it has test samples of its own
    labels: list[int] | None = None  # where there are few, or the experiment needs them
