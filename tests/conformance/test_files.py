"""Private rows in files: killed anywhere, damaged anywhere, a run comes out the same or says in one line why not.

Every run is compared with an undisturbed one in memory, bit for bit."""

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from halfway import STATEFUL, Crash, crash_after, half, in_files, killed, rows_of, same
from instances import METHODS, train

from polyfed.base import checkpoint
from polyfed.base.errors import RunError
from polyfed.core import algorithm
from polyfed.core.rows import MappedRows, MemoryRows
from polyfed.engines import local
from polyfed.runs import trainer as trainer_module

each_stateful = pytest.mark.parametrize("name", STATEFUL)
each_damaged = pytest.mark.parametrize("name", ["ditto", "scaffold"])


@cache
def undisturbed(name: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "make_rows", local.make_rows)
        patch.setattr(local, "memory", lambda: 8 << 30)
        return half(name)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """A function: the folder of a run of the method `name`, with the checkpoints of rounds 1 and 2; a fresh copy."""
    root, made = tmp_path_factory.mktemp("crashed"), {}

    def folder(name: str, at: Path) -> Path:
        if name not in made:
            made[name] = root / name
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trainer_module, "make_rows", in_files)
                with pytest.raises(Crash):
                    half(name, out=made[name], checkpoint_every=1, callbacks=[crash_after(3)])
        return shutil.copytree(made[name], at / "run")

    return folder


# killed

WHENS = [
    ("after", 0), ("after", 1), ("after", 3), ("draft", 1), ("draft", 2), ("rename", 1), ("rename", 2), ("rename", 3),
    ("commit", 1), ("commit", 2), ("row", 1), ("row", 2), ("row", 3),
]  # fmt: skip
FEW = (("after", 3), ("draft", 2), ("rename", 2), ("commit", 1), ("row", 2))
DEATHS = [(name, when, t) for name in STATEFUL for when, t in (WHENS if name == "ditto" else FEW)]


@pytest.fixture(scope="module")
def graves(tmp_path_factory):
    return killed(tmp_path_factory.mktemp("killed"), DEATHS, "files")


@cache
def whole(name: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "make_rows", local.make_rows)
        return train(METHODS[name])


@pytest.mark.parametrize(("name", "when", "t"), DEATHS, ids=[f"{m}-{when}-{t}" for m, when, t in DEATHS])
def test_kill_minus_nine_then_resume_gives_the_same_bits(name, when, t, graves, files):
    run = train(METHODS[name], out=graves[name, when, t], checkpoint_every=1, resume=True)
    assert isinstance(run.trained.engine.rows, MappedRows)
    assert same(run, whole(name))
    assert not list((graves[name, when, t] / "checkpoint").glob(".writing*"))


# damaged


DAMAGE = {
    "a third": lambda raw: raw.__delitem__(slice(len(raw) // 3, None)),
    "zeroed": lambda raw: raw.__setitem__(slice(None), bytes(len(raw))),
    "zeroed in the middle": lambda raw: raw.__setitem__(
        slice(len(raw) // 3, 2 * len(raw) // 3), bytes(2 * len(raw) // 3 - len(raw) // 3)
    ),
    "middle bit": lambda raw: raw.__setitem__(len(raw) // 2, raw[len(raw) // 2] ^ 4),
    "swapped": lambda raw: raw.__setitem__(slice(None), raw[len(raw) // 2 :] + raw[: len(raw) // 2]),
    "gone": None,
}


def damage(path: Path, how: str) -> None:
    change = DAMAGE[how]
    if change is None:
        path.unlink()
        return
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["a third", "middle bit", "gone"])  # tests/base/test_checkpoint.py has the others
@pytest.mark.parametrize(("name", "file"), [("ditto", "tensors.safetensors"), ("scaffold", "meta.json")])
def test_a_damaged_newest_checkpoint_falls_back(name, file, how, crashed, files, tmp_path):
    folder = crashed(name, tmp_path)
    damage(folder / "checkpoint" / "round-00000002" / file, how)
    run = half(name, out=folder, checkpoint_every=1, resume=True)
    assert same(run, undisturbed(name))
    log = (folder / "log.txt").read_text()
    assert "round-00000002 is damaged" in log
    assert "resumed at round 1" in log


@pytest.mark.parametrize("how", DAMAGE)
@each_damaged
def test_damaged_rows_are_never_taken_for_numbers(name, how, crashed, files, tmp_path):
    folder = crashed(name, tmp_path)
    found = sorted((folder / "rows").glob("*.rows"))
    assert found
    for path in found:
        copy = shutil.copytree(folder, tmp_path / f"{path.stem} of {how}")
        damage(copy / "rows" / path.name, how)
        try:
            run = half(name, out=copy, checkpoint_every=1, resume=True)
        except RunError as error:
            assert "\n" not in str(error)  # noqa: PT017  (either answer is right, as long as it is an answer)
            assert "is damaged" in str(error) or "cannot read" in str(error)  # noqa: PT017
        else:
            assert same(run, undisturbed(name))


@each_damaged
def test_damage_to_what_only_the_newest_checkpoint_needs_falls_back(name, crashed, files, tmp_path):
    folder = crashed(name, tmp_path)
    newest, _, _ = checkpoint.load(folder / "checkpoint")
    key = next(k for k in newest if k.startswith("client.index."))
    field = key.removeprefix("client.index.")
    fresh = np.setdiff1d(newest[key][:, 1].numpy(), newest[f"client.before.{field}"].numpy())
    path = folder / "rows" / f"{field}.rows"
    raw = bytearray(path.read_bytes())
    raw[int(fresh[0]) * int(newest[f"client.size.{field}"])] ^= 1
    path.write_bytes(raw)
    assert same(half(name, out=folder, checkpoint_every=1, resume=True), undisturbed(name))
    assert "round-00000002 is damaged" in (folder / "log.txt").read_text()


@each_damaged
def test_damage_again_after_a_fallback_falls_back_again(name, crashed, files, tmp_path):
    """The damaged checkpoint must not count as one of the two that are kept."""
    folder = crashed(name, tmp_path)
    damage(folder / "checkpoint" / "round-00000002" / "meta.json", "zeroed")
    with pytest.raises(Crash):  # checkpoint of round 3 alone
        half(name, out=folder, checkpoint_every=3, resume=True, callbacks=[crash_after(4)])
    damage(folder / "checkpoint" / "round-00000003" / "meta.json", "zeroed")
    assert same(half(name, out=folder, checkpoint_every=1, resume=True), undisturbed(name))


def test_rows_damaged_while_a_run_goes_on_end_it_in_one_line(files, tmp_path):
    def watch(progress):
        if progress.round == 2:
            for path in (tmp_path / "rows").glob("*.rows"):
                path.write_bytes(bytes(path.stat().st_size))

    with pytest.raises(RunError, match=r"rows is damaged: the row of client number \d"):
        train(METHODS["ditto"], rounds=4, out=tmp_path, callbacks=[watch])


# other memory


def short(monkeypatch, memory: int) -> None:
    monkeypatch.setattr(local, "memory", lambda: memory)
    monkeypatch.setattr(trainer_module, "free_memory", lambda device: 8 << 30)  # local steps have what they need
    monkeypatch.setattr(algorithm, "SMALL", 0)  # the estimate is that of a large federation


def little(name: str) -> int:
    """So much free memory that the server's state and the cohort fit, and the private rows do not."""
    loop = undisturbed(name).trained
    size = sum(t.element_size() * t[0].numel() for t in rows_of(undisturbed(name)).values())
    server = sum(t.element_size() * t.numel() for t in loop.server.values())
    return 2 * server + 3 * (4 * loop.task.p * 4 + 2 * size) + size


@each_stateful
@pytest.mark.parametrize("first", ["much", "little"])
def test_a_run_goes_on_with_another_amount_of_memory(name, first, monkeypatch, tmp_path):
    amounts = {"much": 8 << 30, "little": little(name)}
    kinds = {"much": MemoryRows, "little": MappedRows}
    seen = []

    def watch(progress):
        seen.append(type(progress.run.trained.engine.rows))
        if progress.round == 2:
            raise Crash

    second = "little" if first == "much" else "much"
    short(monkeypatch, amounts[first])
    with pytest.raises(Crash):
        half(name, out=tmp_path, checkpoint_every=1, callbacks=[watch])
    assert set(seen) == {kinds[first]}
    short(monkeypatch, amounts[second])
    run = half(name, out=tmp_path, checkpoint_every=1, resume=True)
    assert isinstance(run.trained.engine.rows, MappedRows)  # rows that are in files stay there
    assert same(run, undisturbed(name))


@each_stateful
def test_a_checkpoint_of_rows_in_memory_is_a_fallback_for_rows_in_files(name, monkeypatch, tmp_path):
    """Killed after the move to files, with the newest checkpoint damaged, and again with much memory."""
    short(monkeypatch, 8 << 30)
    with pytest.raises(Crash):
        half(name, out=tmp_path, checkpoint_every=1, callbacks=[crash_after(2)])  # round 1, in memory
    short(monkeypatch, little(name))
    with pytest.raises(Crash):
        half(name, out=tmp_path, checkpoint_every=1, resume=True, callbacks=[crash_after(3)])  # round 2, in files
    damage(tmp_path / "checkpoint" / "round-00000002" / "tensors.safetensors", "a third")
    short(monkeypatch, 8 << 30)
    assert same(half(name, out=tmp_path, checkpoint_every=1, resume=True), undisturbed(name))
