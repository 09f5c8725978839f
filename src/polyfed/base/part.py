"""One column at one site in counts and quantiles: what a site says to the audit, a folder keeps and a report draws."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

CHECK = "check before use: "  # before what the audit flags
LARGE = 1 << 53  # from which a whole number is no count of anything
Count = Annotated[int, Field(ge=0, lt=LARGE)]


class Strict(BaseModel):
    """Every field of its type, and no other field."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


Finite = Annotated[float, Field(allow_inf_nan=False)]
End = Annotated[list[Finite], Field(min_length=2, max_length=2)]  # a number, and how many rows have it


class Part(Strict):
    """One column at one site, for the audit between sites."""

    rows: Count
    gaps: Count
    distinct: Count = 0
    # 5, 25, 50, 75 and 95 %, where all values are numbers
    quantiles: Annotated[list[Finite], Field(min_length=5, max_length=5)] | None = None
    values: Annotated[dict[str, Count], Field(max_length=100)] | None = None  # rows of each, where there are few
    odd: Annotated[dict[str, Count], Field(max_length=100)] | None = None  # rows of numbers like codes of a gap
    low: End | None = None  # where many rows have it
    high: End | None = None
    repeats: Count = 0  # rows that repeat another's, of identifiers

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


Parts = Mapping[str, Mapping[str, Part]]  # by column and site
