"""docs/hospitals.md as printed: its commands in order, the flags that it shows, and in the long tests its numbers."""

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
import six_hospitals as six

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "hospitals.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'```(sh|toml|text)(?: title="([^"]+)")?\n(.*?)```', re.S)
REPAIRED = re.compile(r"^(gaps|temp|sex|glucose) = .*\n|^\[columns\.site\.(graz|lyon)\]\n", re.M)


def walk(cli, folder, short):
    six.write(folder / "hospitals")
    said, shown = [], ""
    for kind, title, body in BLOCK.findall(PAGE):
        if title:
            (folder / title).write_text(body, encoding="utf-8")
        elif kind == "text":
            shown = body
        for line in body.replace("\\\n", " ").splitlines() if kind == "sh" else ():
            _, *words = shlex.split(line)
            said.append((words, cli(*words, *["--seeds", "1", "--rounds", "3"] * (short and words[0] == "run"))))
    return said, shown


def check(said, shown):
    (first, looked), *rest = said
    assert (first[:2], looked.status) == (["data", "inspect"], 1)  # limits and missing outcomes stand in the way
    found = [line for line in looked.out.splitlines() if line.startswith("! ")]
    assert " ".join(found).split() == shown.split()
    for words, done in rest:
        assert done.status == 0, f"{words}\n{done.out}{done.err}"
    assert Path("predictions.csv").is_file()


def test_the_page_goes_as_printed(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(*walk(cli, tmp_path, short=True))


@pytest.mark.long
def test_the_pages_table_is_what_its_commands_give(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(*walk(cli, tmp_path, short=False))
    before = REPAIRED.sub("", Path("six.toml").read_text(encoding="utf-8"))
    Path("before.toml").write_text(before, encoding="utf-8")
    assert cli("run", "before.toml", "--out", "before", "--quiet").status == 0
    rows = dict(re.findall(r"^\| (\w+, \w+) \| ([\d. |]+) \|$", PAGE, re.M))
    for name, folder in (("before", "before"), ("repaired", "answer")):
        results = pd.read_csv(f"{folder}/results.csv")
        for method in ("local", "fedavg"):
            wanted = [float(x) for x in rows[f"{method}, {name}"].split("|")]
            of = results[results["method"] == method]
            by_seed = of.groupby("seed")["test_auc"].mean()
            assert [*by_seed, by_seed.mean()] == pytest.approx(wanted, abs=1e-3)
