"""polyfed config: every key of an experiment file with its default."""

import dataclasses

import pytest

from polyfed.base.settings import kebab
from polyfed.cli.config import keys
from polyfed.runs.config import COMPARED, resolve
from polyfed.runs.training import Columns, Data, Model, Settings

OWN = [
    f"{f'{t.table}.' if t.table else ''}{kebab(f.name)}"
    for t in (Settings, Data, Columns, Model)
    for f in dataclasses.fields(t)
]


def test_every_key_is_listed_with_what_it_means(cli):
    listed = {line.split()[0]: line for line in cli("config").out.splitlines() if line and not line[0].isspace()}
    for name in OWN:
        known = {"schedule": "schedule.name", "attack": "attack.name", "robust": "robust.name"}
        assert known.get(name, name.replace("model.options", "model.OPTION")) in listed
    for key in keys():
        assert key.meaning.endswith("."), f"{key.name} has no meaning: {key.meaning!r}"
        assert key.takes


def test_the_printed_file_sets_every_default_and_runs(cli, tmp_path):
    said = cli("config", "--toml").done()
    (tmp_path / "x.toml").write_text(said.out)
    found = resolve(tmp_path / "x.toml")
    assert (found.settings, found.data, found.model) == (Settings(), Data(), Model())
    assert [m.algorithm.name for m in found.methods] == list(COMPARED)
    cli("run", "x.toml", "--rounds", 1, "--quiet", "--out", "runs/x").done()


def test_each_commented_key_of_the_printed_file_is_one_that_a_file_may_have(cli, tmp_path):
    """A key whose default is shown in a comment is accepted with that default."""
    of = {"schedule": "asynchronous", "attack": "sign-flip", "robust": "median"}
    for key in keys():
        table = key.name.partition(".")[0]
        if key.default is None or table not in of:
            continue
        name = (*key.only_for, of[table])[0]
        (tmp_path / "x.toml").write_text(f'{table}.name = "{name}"\n{key.name} = {key.value()}\n')
        resolve(tmp_path / "x.toml")


def test_one_key_a_table_or_the_same_name_in_two_tables(cli):
    def named(word):
        return [line.split()[0] for line in cli("config", word).out.splitlines()[1:] if not line.startswith(" ")]

    assert named("local_steps") == ["local-steps"]
    assert named("data.seed") == ["data.seed"]
    assert named("name") == ["schedule.name", "attack.name", "robust.name", "data.name", "model.name"]
    assert all(name.startswith("model.") for name in named("model"))


@pytest.mark.parametrize(("word", "near"), [("test-fractoin", "test-fraction"), ("data.partitions", "data.partition")])
def test_an_unknown_key_is_refused_with_the_nearest(cli, word, near):
    cli("config", word).line(2, f"{word!r} (did you mean {near!r}?)")


def test_a_file_holds_all_keys(cli):
    assert cli("config", "rounds", "--toml").status == 2
