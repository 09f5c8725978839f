"""Tests are laid out like src, so that the tests of a file are found without looking for them: a folder for every room
of polyfed, and one for every package beside it, such as `papers` for polyfed_papers."""

from collections import Counter
from pathlib import Path

import pytest

import polyfed

TESTS, SOURCE = Path(__file__).parent, Path(polyfed.__file__).parent
ACROSS = {
    "conformance": "every method, on every row of the table that polyfed_testing makes public",
    "docs": "the pages, the README and the site",
    "fuzz": "hostile input to everything that takes input",
}


def folders(root: Path) -> set[str]:
    return {path.parent.name for path in root.glob("*/*.py")}


def test_every_folder_of_tests_is_one_of_src_or_cuts_across_and_every_one_of_src_has_its_tests():
    beside = {path.name.removeprefix("polyfed_") for path in SOURCE.parent.glob("polyfed_*")}
    assert folders(TESTS) == folders(SOURCE) | beside | ACROSS.keys()
    assert not folders(SOURCE) & (beside | ACROSS.keys())
    assert not [str(path.relative_to(TESTS)) for path in TESTS.glob("*/*/*.py")], "no folder lies deeper"


def test_a_tests_name_says_which_file_it_is():
    """pytest imports test files and helpers by their bare names, which two folders cannot share."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert {name for name, times in names.items() if times > 1} == set()


@pytest.mark.parametrize("file", ["slow.txt", "nightly.txt"])
def test_the_lists_of_slow_tests_name_tests_that_exist(file):
    """One that was renamed would run daily again."""
    for name in (line.split()[-1] for line in (TESTS / file).read_text().splitlines()):
        path, _, test = name.partition("[")[0].partition("::")
        assert f"def {test.split('::')[-1]}(" in (TESTS.parent / path).read_text(), name
