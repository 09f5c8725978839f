"""Mutations of what is promised beside the methods: privacy, policies, thresholds, folders. One thing is changed at a
time in a copy, and the tests that hold the promise must fail: `make mutate-promises`, or

    python tools/mutate_promises.py [WORD ...] [--timeout SECONDS]

WORD: part of a file's name (none: all). promises.jsonl has the mutations.
"""

import argparse
import importlib
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import mutate

WARM = (
    "polyfed.cli",
    "polyfed.face",
    "polyfed.algorithms",
    "polyfed_sites.site",
    "polyfed_sites.server",
    "sklearn.metrics",
)
GUESSES = " ".join(
    f"tests/privacy/test_privacy_audit.py::test_{name}"
    for name in (
        "two_hundred_right_guesses_show_epsilon_four",
        "randomised_response_is_bounded_from_below_in_nineteen_of_twenty",
    )
)
WIDE = " ".join(
    f"tests/sites/test_secure_sums.py::test_{name}"
    for name in ("wide_numbers_come_back_to_the_bit", "what_would_wrap_is_refused_with_its_number")
)
FOLDERS = " ".join(
    f"tests/cli/test_folders.py::test_{name}"
    for name in (
        "a_folder_of_somebody_else_is_refused_and_force_is_not_proposed",
        "whatever_the_last_step_of_a_forced_command_is_no_file_is_lost",
        "what_failed_gives_the_folder_its_name_back_and_results_stay_unasked",
        "a_servers_logs_stay_where_a_start_has_failed",
    )
)
GONE = "the source is another now"
TESTS = {  # files of src, and the tests that hold what they promise
    "polyfed_privacy/secure.py": "tests/privacy/test_secure.py",
    "polyfed_privacy/guard.py": "tests/privacy/test_guard.py",
    "polyfed_privacy/ledger.py": "tests/privacy/test_privacy_ledger.py",
    "polyfed_privacy/accounts.py": f"tests/privacy/test_accounts.py {GUESSES}",
    "polyfed_privacy/shares.py": "tests/privacy/test_shares.py",
    "polyfed_privacy/masks.py": "tests/privacy/test_masks.py tests/privacy/test_secure.py",
    "polyfed_privacy/fixed.py": f"tests/privacy/test_fixed.py {WIDE}",
    "polyfed_privacy/noise.py": "tests/privacy/test_noise.py",
    "polyfed_sites/policy.py": "tests/sites/test_thresholds.py",
    "polyfed/runs/ownership.py": FOLDERS,
    "polyfed/cli/folders.py": FOLDERS,
    "polyfed/base/system.py": "tests/privacy/test_privacy_ledger.py",
    "polyfed/runs/features.py": "tests/runs/test_frozen_backbone.py -k features",
    **{
        f"polyfed_audit/{f}.py": "tests/audit/test_audit_thresholds.py"
        for f in ("parts", "units", "codes", "rows", "outcome")
    },
    "polyfed/algorithms/flexcfl.py": "tests/algorithms/test_groups.py",
    "polyfed/algorithms/pfedhn.py": "tests/algorithms/test_mixing.py",
    "polyfed_clinical/secured.py": "tests/clinical/test_pooled_fit.py -k one_outcome",
    "polyfed_clinical/sites.py": "tests/clinical/test_pooled_fit.py -k one_outcome",
}


def jobs(words: list[str]) -> list[dict[str, str]]:
    """The mutations of files that have one of the words in their names: file, was, is."""
    lines = (Path(__file__).parent / "promises.jsonl").read_text().splitlines()
    return [m for m in map(json.loads, lines) if not words or any(word in m["file"] for word in words)]


def judged(copy: Path, m: dict[str, str], timeout: float) -> str:
    """The first test that fails with the mutation, "" if none does."""
    path = copy / "src" / m["file"]
    whole = path.read_text()
    if whole.count(m["was"]) != 1:
        return GONE
    path.write_text(whole.replace(m["was"], m["is"]))
    try:
        return failing(copy, TESTS[m["file"]], timeout, m["file"])
    finally:
        path.write_text(whole)


def failing(copy: Path, tests: str, timeout: float, file: str = "") -> str:
    """The first test that fails in a fork of this process, which imports a file and its users anew."""
    plugin = mutate.Rows(set(), copy / "notes", set(), Counter())
    plugin.wanted = lambda item: True
    plugin.pytest_configure = lambda config: forget(file.removesuffix(".py").replace("/", ".")) if file else None
    return mutate.fails(copy, tests.split(), plugin, timeout)[0]


def forget(name: str) -> None:
    """Take a module, and all that import it, out of what is loaded."""
    loaded = {n: m for n, m in sys.modules.items() if n.startswith("polyfed") and getattr(m, "__file__", None)}
    uses = {n: imports(Path(str(m.__file__)).read_text()) for n, m in loaded.items() if n != "polyfed"}
    gone, more = {name}, {name}
    while more:
        more = {n for n, of in uses.items() if n not in gone and of & gone}
        gone |= more
    registry = sys.modules["polyfed.core.algorithm"].REGISTRY
    for key in [key for key, cls in registry.items() if cls.__module__ in gone]:
        del registry[key]
    for n in gone & loaded.keys():
        del sys.modules[n]
    for module in [m for n, m in loaded.items() if n not in gone and hasattr(m, "__path__")]:
        for key, value in list(vars(module).items()):
            of = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(of, str) and of in gone:
                delattr(module, key)


def imports(source: str) -> set[str]:
    """What a file may import of ours, by its text."""
    found = re.findall(r"from (polyfed[\w.]*) import (\([^)]*\)|[^\n]*)|import (polyfed[\w.]+)", source)
    names = {f"{base}.{n}" for base, of, _ in found for n in re.findall(r"\w+", of)}
    return names | {base or module for base, _, module in found}


def main() -> int:
    """Print one line per mutation; 1 if any survived."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("words", nargs="*")
    ask.add_argument("--timeout", type=float, default=300.0)
    given = ask.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True  # two mutants of one second and one length would share it
    for heavy in mutate.HEAVY:
        importlib.import_module(heavy)
    survived, todo = 0, jobs(given.words)
    with mutate.copied() as copy:
        sys.path.insert(0, str(copy / "src"))
        for module in [n for n in sys.modules if n.startswith("polyfed")]:
            del sys.modules[module]
        for ours in WARM:
            importlib.import_module(ours)
        for tests in dict.fromkeys(TESTS[m["file"]] for m in todo):
            if failed := failing(copy, tests, 600):
                print(f"{failed} fails without a mutation: nothing can be said", file=sys.stderr)
                return 1
        for m in todo:
            began = time.monotonic()
            by = judged(copy, m, given.timeout)
            survived += not by
            ended = "gone" if by == GONE else "caught" if by else "SURVIVED"
            change = f"{m['file']}: {m['was']!r}  ->  {m['is']!r}"
            print(f"{ended:9} {time.monotonic() - began:5.1f} s  {change}   {by}", flush=True)
    print(f"{len(todo)} mutations, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
