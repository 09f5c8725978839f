"""One column at one site in counts and quantiles: what a site says to the audit, a folder keeps and a report draws."""

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

CHECK = "check before use: "  # before what the audit flags
EVERY = "all sites"
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
    beyond: Annotated[dict[str, Count], Field(max_length=2)] | None = None  # rows that cannot be, as "< 0"
    by: Annotated[dict[str, list[Finite]], Field(max_length=20)] | None = None  # quartiles in each class, then its rows

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


class Flag(NamedTuple):
    """A finding to look at; `column` is None where it is about whole rows."""

    site: str
    column: str | None
    text: str
    repair: Mapping[str, Any] = MappingProxyType({})  # what would go into the table [columns]

    def __str__(self) -> str:
        """The finding, and its repair as an experiment file has it."""
        return pasted(f"{self.site}: {self.text}", self.repair)


def pasted(text: str, repair: Mapping[str, Any]) -> str:
    """A finding, and its repair as an experiment file has it."""
    lines = [f"{key} = {toml(value)}" for key, value in repair.items() if key != "site"]
    for site, columns in repair.get("site", {}).items():
        listed = ", ".join(f"{toml_key(key)} = {toml(value)}" for key, value in columns.items())
        lines.append(f"[columns.site.{toml_key(site)}] {listed}")
    between = "" if not lines else " " if text.endswith("?") else "; "
    return f"{text}{between}{'; '.join(lines)}"


def toml_key(name: str) -> str:
    """A key as TOML has it."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def toml(value: Any) -> str:
    """A text, a list or a table in one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{toml_key(k)} = {toml(v)}' for k, v in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


class Audit(NamedTuple):
    """What an audit between sites has found."""

    parts: Parts = MappingProxyType({})
    flags: Sequence[Flag] = ()
    facts: Sequence[Flag] = ()  # to know, and nothing to mend
    skipped: str = ""  # why there is none

    @property
    def lines(self) -> list[str]:
        """What a report says of it."""
        first = [self.skipped] if self.skipped else []
        return [*first, *(f"{CHECK}{flag}" for flag in self.flags), *map(str, self.facts)]

    @property
    def flagged(self) -> dict[str, list[str]]:
        """Columns, and the sites where each is flagged."""
        sites: dict[str, list[str]] = {}
        for flag in self.flags:
            if flag.column and flag.site != EVERY and flag.site not in sites.setdefault(flag.column, []):
                sites[flag.column].append(flag.site)
        return sites

    @property
    def kept(self) -> dict[str, Any]:
        """The flagged columns at every site, as a run folder keeps them for the report's figure."""
        return {
            name: {"flagged": sites, "sites": {site: part.model_dump() for site, part in self.parts[name].items()}}
            for name, sites in self.flagged.items()
            if not any(part.repeats for part in self.parts[name].values())  # identifiers
        }
