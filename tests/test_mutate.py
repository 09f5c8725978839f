"""The mutation script: it knows the files of methods and of the core, and finds results whose lines have moved."""

import ast

import mutate
import mutate_native
import mutate_promises


def test_every_mutant_changes_its_file_and_results_move_with_their_lines():
    ways = {file: mutate.mutants(file) for file in ("fedopt", "fedavgm", "recalibrated", "newcomer")}
    for file, found in ways.items():
        source = mutate.source_of(mutate.ROOT, file).read_text()
        for m in found[:3]:
            assert ast.unparse(ast.parse(mutate.changed(source, m))) != ast.unparse(ast.parse(source))
    known = [m | {"line": m["line"] + 5} for m in ways["fedopt"]]
    assert {mutate.key(m) for m in mutate.moved(known, ways)} <= {mutate.key(m) for m in ways["fedopt"]}
    assert mutate.moved([ways["fedopt"][0] | {"was": "what is no more"}], ways) == []


def test_what_is_changed_by_hand_stands_once_in_its_file():
    for file, was, _ in mutate.BY_HAND:
        assert mutate.source_of(mutate.ROOT, file).read_text().count(was) == 1, (file, was)


def test_the_kernels_mutations_are_made_by_a_switch_that_its_sources_know_nothing_of():
    source = (mutate.ROOT / mutate_native.FOLDER / "train.inc").read_text()
    switched = mutate_native.switched(source)
    for k, (_, put) in enumerate(mutate_native.MUTATIONS, 1):
        assert switched.count(f"MUTANT == {k})") + switched.count(f"MUTANT == {k} ") == 1
        assert put in switched
    assert "MUTANT" not in source


def test_what_breaks_a_promise_makes_another_source_and_nine_of_ten_still_apply():
    made, gone = mutate_promises.jobs([]), 0
    assert len({tuple(m.items()) for m in made}) == len(made)
    for m in made:
        assert m["file"] in mutate_promises.TESTS
        source = (mutate.ROOT / "src" / m["file"]).read_text()
        gone += source.count(m["was"]) != 1
        ast.parse(source.replace(m["was"], m["is"]))
    assert gone <= len(made) / 10
