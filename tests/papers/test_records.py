"""The records of the experiments: choices at an edge of what was tried, and the boards' pages against them."""

import csv
import gzip
import hashlib
import json
import re
from collections import defaultdict
from functools import cache
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest

from polyfed.algorithms import shipped
from polyfed.base.errors import DataError
from polyfed.core.algorithm import REGISTRY
from polyfed.data.datasets import default_dir
from polyfed.report.verdicts import bearing
from polyfed_papers import board as common
from polyfed_papers.adapters import absent
from polyfed_papers.recipes.record import Again, _Over, load, verify

PAGES = Path(__file__).parents[2] / "docs" / "experiments"


def choices():
    """(record, key, edges, trials) of every choice of settings that has a number of trials."""
    for path in sorted((PAGES / "records").glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            kept = json.loads(line) if line.startswith('{"kept"') else {}
            value = kept.get("value")
            if isinstance(value, dict) and "trials" in value:
                yield path.name.removesuffix(".jsonl.gz"), kept["kept"], value["edges"], value["trials"]


def test_no_choice_by_the_one_rule_is_at_an_edge():
    found = {
        (record, re.sub(r"-choice\d+$", "", key)): edges
        for record, key, edges, _ in sorted(choices(), key=itemgetter(3))
    }
    assert len(found) > 10
    assert [one for one, edges in found.items() if edges] == []  # that of most trials counts


@cache
def cells_of(record):
    """({(setting, method): digest of its models}, {(setting, method): mean accuracy in percent}), by the runs alone."""
    digests, scores = defaultdict(list), defaultdict(list)
    for line in gzip.decompress((PAGES / "records" / f"{record}.jsonl.gz").read_bytes()).decode().splitlines():
        if not line.startswith('{"run"'):
            continue
        run = json.loads(line)
        setting, label, end = run["run"].split("/")
        digests[setting, label].append((int(end.rsplit("seed")[1]), run["summary"]["digest"]["models"]))
        if run["summary"]["status"] != "diverged":
            scores[setting, label].append(run["clients"])
    short = {k: hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:8] for k, found in digests.items()}
    return short, {k: 100 * mean_of(found) for k, found in scores.items()}


def mean_of(runs):
    """Over seeds, and the clients that test ten samples in the mean over seeds, see `bearing`."""
    names, tested = runs[0]["client"], np.mean([run["test_samples"] for run in runs], 0)
    able = bearing(dict(zip(names, tested, strict=True)))
    return float(np.mean([run["test_accuracy"] for run in runs], 0)[[names.index(n) for n in able]].mean())


def shown(cells, mean):
    """True where a row's accuracy is the mean, to the digit that is shown; a tie may go either way."""
    return abs(float(cells[2].split(" ")[0]) - mean) < 0.05 + 1e-9


def rows_of(page, setting_of):
    """{(setting, method): cells} of a page's tables, in files beside it. setting_of: a heading -> its setting"""
    rows, setting = {}, ""
    for line in (PAGES / page).read_text().splitlines():
        setting = setting_of(line) if line.startswith("#") else setting
        if table := re.fullmatch(r"\[Table\]\((\S+\.csv)\)", line):
            for cells in csv.reader((PAGES / table[1]).read_text().splitlines()):
                if len(cells) > 9:
                    rows[setting, cells[0].strip("* ")] = [cell.strip("* ") for cell in cells]
    return rows


@pytest.mark.parametrize("board", ["clusters", "full", "images"])
def test_the_rows_of_a_board_are_those_of_its_record(board):
    """The accuracy of every cell, and the digest of its models, by the lines of its runs alone."""
    digests, means = cells_of(f"board-{board}-small")
    digests = {key: digest for key, digest in digests.items() if key[1] != "alone"}  # what is held to a loop of torch
    rows = rows_of(f"board-{board}.md", lambda heading: heading[3:].split(":")[0])
    best = {setting: cells.index("best round, %") for (setting, label), cells in rows.items() if label == "method<"}
    rows = {key: cells for key, cells in rows.items() if key in digests}
    assert set(rows) == set(digests)
    for key, cells in rows.items():
        assert shown(cells, means[key]), key
        assert float(cells[best[key[0]]]) > means[key] - 0.06, key  # no round is better than the best
        assert cells[-1].strip("`") == digests[key], key


def test_the_record_of_the_board_lacks_no_method_that_it_trains():
    """Else `polyfed verify` would refuse all its cells. A method without a cell refuses the setting."""
    have = {*cells_of("board-full-small")[0]}
    for name, setting in common.SMALL.items():
        for label in shipped():
            if label not in common.APART and (name, label) not in have:
                cls = REGISTRY[label]
                assert common.refusal(setting, cls), (name, label)


@pytest.mark.parametrize(
    ("record", "heading"),
    [
        ("sentences-heads", "Sentences"),
        ("images-heads", "Images"),
        ("sentences-lora", "Sentences, LoRA"),
        ("groups", ""),
    ],
)
def test_the_rows_on_adapters_are_those_of_their_records(record, heading):
    digests, means = cells_of(f"adapters-{record}-small")
    rows = rows_of("adapters.md", lambda line: line.strip("# "))
    for (setting, label), digest in digests.items():
        where = f"{heading}, {setting} clients" if record != "groups" else "Are planted groups of tasks found?"
        cells = rows[where, label]
        assert shown(cells, means[setting, label]), (setting, label)
        assert cells[-1] == digest, (setting, label)


@pytest.mark.parametrize("path", sorted((PAGES / "records").glob("*.gz")), ids=lambda path: path.name.split(".")[0])
def test_a_recipe_makes_the_last_run_of_its_record(path, monkeypatch):
    """What comes before it is read, and it would be trained: with these settings, by this version."""
    record, seeds = load(path), [1000, 2000]  # and those of choices; some parts of a recipe have more than it counts
    last = [run for run in record.runs if int(run.rpartition("seed")[2]) in (*record.about.seeds, *seeds)][-1:]
    if "natural" in path.name and not (default_dir() / "tiny_shakespeare").exists():
        pytest.skip("its last run is of tiny_shakespeare, which the folder of data has not")
    if missing := absent("images" if "images" in path.name else "sentences") if "adapters" in path.name else []:
        pytest.skip(f"not installed: {', '.join(missing)}")
    trained = []

    def train(self, name, *_):
        trained.append(name)
        raise _Over

    monkeypatch.setattr(Again, "_train", train)
    try:
        if last:
            verify(path, last[0], default_dir(), print)
    except DataError as e:
        pytest.skip(str(e))
    assert trained == last
