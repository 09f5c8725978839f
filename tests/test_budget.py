"""The budget of the house: what `tools/house.py` counts stays within budget.toml, whose limits only shrink."""

import ast
import subprocess
import tomllib

import pytest

import house

COUNTS = {"lines": house.lines, "words": house.words, "names": house.names, "exceptions": house.exceptions}


@pytest.mark.daily
@pytest.mark.parametrize("section", COUNTS)
def test_nothing_is_above_its_limit_and_nothing_is_without_one(section):
    counted, limit = COUNTS[section](), house.limits()[section]
    above = {key: (n, limit.get(key)) for key, n in counted.items() if n > limit.get(key, -1)}
    assert above == {}, "counted, limit; see tools/house.py"
    assert limit.keys() == counted.keys()


def test_polyfed_run_loads_no_more_files_than_its_limit():
    assert house.loads()["polyfed run"] <= house.limits()["loads"]["polyfed run"]


def raised(before: house.Counts, after: house.Counts) -> set[str]:
    """Limits that are higher than they were, or gone; new rooms and pages may come, within their sums."""
    old = {(s, k): n for s, by in before.items() for k, n in by.items()}
    return {k for (s, k), n in old.items() if after.get(s, {}).get(k, 0) > n}


def unexplained(keys: set[str], added: str) -> set[str]:
    """Raised limits that no line added to the changelog names together with the word budget."""
    lines = [line for line in added.splitlines() if line.startswith("+") and "budget" in line.lower()]
    return {key for key in keys if not any(key in line for line in lines)}


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=house.ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no history here: {done.stderr.strip()}")
    return done.stdout


def test_a_limit_is_raised_by_a_line_of_the_changelog_alone():
    for commit in git("log", "--format=%H", "--", "budget.toml").split()[:-1]:
        before, after = (tomllib.loads(git("show", f"{at}:budget.toml")) for at in (f"{commit}^", commit))
        if keys := raised(before, after):
            said = git("show", "-U0", "--format=", commit, "--", "CHANGELOG.md")
            late = git("diff", "-U0", f"{commit}^", "HEAD", "--", "CHANGELOG.md")
            assert not unexplained(keys, said + late), commit


def test_a_raised_limit_is_seen_and_a_line_that_names_it_is_an_excuse():
    before, after = {"lines": {"src": 10, "tests": 5}}, {"lines": {"src": 11, "tests": 4, "polyfed_new": 3}}
    assert raised(before, after) == {"src"}
    for line, left in (("+- Faster rounds.", {"src"}), ("+- Budget of src 11: faster rounds.", set())):
        assert unexplained({"src"}, line) == left
    for n in (40, 41):
        text = "def f():\n" + '    """One\n\n    two.\n    """\n' + "    x = 1\n" * n
        assert [*house._lengths(ast.parse(text))] == [n], "a docstring is no line of a function"
