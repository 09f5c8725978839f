"""The records of the papers' experiments: how many of the choices in them are at an edge of what was tried."""

import gzip
import json
from collections import Counter
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "experiments"
OLDER = {f"fpfc-table{which}-paper" for which in ("1", "2", "-e1", "-e2", "-e3", "-e4")}  # made before the one rule


def choices():
    """(record, key, edges) of every choice of settings that has a number of trials."""
    for path in sorted((PAGES / "records").glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            kept = json.loads(line) if line.startswith('{"kept"') else {}
            value = kept.get("value")
            if isinstance(value, dict) and "trials" in value:
                yield path.name.removesuffix(".jsonl.gz"), kept["kept"], value["edges"]


def test_no_choice_by_the_one_rule_is_at_an_edge():
    found = [one for one in choices() if one[0] not in OLDER]
    assert len(found) > 10
    assert [one for one in found if one[2]] == []


def test_the_index_says_how_many_older_choices_are():
    found = [(key, edges) for record, key, edges in choices() if record in OLDER]
    at = Counter(key.split("-choice-")[1].rsplit("-seed", 1)[0] for key, edges in found if edges)
    said = f"{at.total()} of {len(found)} choices at an edge (CFL {at['CFL']}, PACFL {at['PACFL']}, FPFC {at['FPFC']})"
    assert said in (PAGES / "index.md").read_text()
