"""Checkpoints: whole or not there at all, and a damaged one is never believed."""

import contextlib
import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from polyfed.base import checkpoint
from polyfed.base.errors import RunError


def tensors(t: int) -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(10.0) + t,
        "d": torch.full((2, 3), t, dtype=torch.float64),
        "flag": torch.tensor([True, False]),
        "one": torch.tensor(1.5),
        "none": torch.zeros(0, 6),
    }


def fill(folder, rounds: int = 3) -> None:
    for t in range(1, rounds + 1):
        checkpoint.save(folder, t, tensors(t), {"t": t, "records": [{"loss": float("nan")}]})


def round_of(folder) -> tuple[int, list[str]]:
    found, meta, warnings = checkpoint.load(folder)
    assert found.keys() == tensors(0).keys()
    for name, value in tensors(meta["t"]).items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    return meta["t"], warnings


def test_the_newest_is_loaded_and_two_are_kept(tmp_path):
    fill(tmp_path)
    assert round_of(tmp_path) == (3, [])
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["round-00000002", "round-00000003"]
    assert not list(tmp_path.glob(".writing*"))
    names = sorted(p.name for p in (tmp_path / "round-00000003").iterdir())
    assert names == ["meta.json", "tensors.safetensors"]


def test_saving_a_round_again_replaces_it(tmp_path):
    fill(tmp_path, 1)
    checkpoint.save(tmp_path, 1, tensors(1) | {"w": torch.zeros(10)}, {"t": 1})
    assert checkpoint.load(tmp_path)[0]["w"].sum() == 0


def test_drafts_of_ended_processes_are_removed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    for pid in (child.pid, ended.stdout.strip(), os.getpid()):
        (tmp_path / f".writing-{pid}").mkdir()
        (tmp_path / f".writing-{pid}" / "tensors.safetensors").write_bytes(bytes(100))
    fill(tmp_path, 1)
    assert [p.name for p in tmp_path.glob(".writing*")] == [f".writing-{child.pid}"]
    child.communicate(b"\n")
    checkpoint.save(tmp_path, 2, tensors(2), {"t": 2})
    assert not list(tmp_path.glob(".writing*"))


def test_what_a_checkpoint_refers_to_is_checked_with_it(tmp_path):
    fill(tmp_path)

    def check(found):
        if found["d"][0, 0] == 3:
            raise RunError("its rows are damaged")

    _, meta, warnings = checkpoint.load(tmp_path, check)
    assert meta["t"] == 2
    assert warnings == ["checkpoint round-00000003 is damaged (its rows are damaged); trying the one before"]
    checkpoint.forget(tmp_path, len(warnings))
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["round-00000002"]


def test_saving_a_round_again_never_leaves_less_than_there_was(tmp_path, monkeypatch):
    """Killed at any rename or removal, with leftovers of the same round from earlier kills: one sound copy stays."""
    fill(tmp_path, 2)
    replace, rmtree = checkpoint.os.replace, checkpoint.shutil.rmtree

    class Killed(BaseException):
        pass

    def sometimes(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*args, **kwargs)

        return call

    for after in (0, 1, 2, 3, 0, 2, 1, 1, 3, 4):
        left = [after]
        monkeypatch.setattr(checkpoint.os, "replace", sometimes(replace))
        monkeypatch.setattr(checkpoint.shutil, "rmtree", sometimes(rmtree))
        with contextlib.suppress(Killed):
            checkpoint.save(tmp_path, 2, tensors(2), {"t": 2})
        assert round_of(tmp_path) == (2, [])
    monkeypatch.undo()
    checkpoint.save(tmp_path, 2, tensors(2), {"t": 2})
    assert len(checkpoint.checkpoints(tmp_path)) == 2
    checkpoint.save(tmp_path, 3, tensors(3), {"t": 3})
    assert round_of(tmp_path) == (3, [])


def flipped(at):
    return lambda raw: raw[:at] + bytes([raw[at] ^ 1]) + (raw[at + 1 :] if at != -1 else b"")


DAMAGE = {
    **{f"a bit at {where}": lambda raw, where=where: flipped(int(where * len(raw)))(raw) for where in (0, 0.3, 0.7)},
    "the last bit": flipped(-1),
    "empty": lambda raw: b"",
    "half": lambda raw: raw[: len(raw) // 2],
    "gone": None,
    **{f"text {text[:9]}": lambda raw, text=text: text.encode() for text in
       ("[]", "3", "null", '{"sha256": 3}', "{}", "[" * 100_000, '{"a":' * 100_000)},
}  # fmt: skip


@pytest.mark.parametrize("name", ["tensors.safetensors", "meta.json"])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_falls_back_with_a_warning(name, how, tmp_path):
    fill(tmp_path)
    path = tmp_path / "round-00000003" / name
    if DAMAGE[how] is None:
        path.unlink()
    else:
        path.write_bytes(DAMAGE[how](path.read_bytes()))
    t, (warning,) = round_of(tmp_path)
    assert t == 2
    assert "round-00000003 is damaged" in warning
    assert "\n" not in warning


def test_every_single_flipped_bit_of_the_description_is_noticed(tmp_path):
    fill(tmp_path, 2)
    path = tmp_path / "round-00000002" / "meta.json"
    whole = path.read_bytes()
    for at in range(len(whole) - 1):
        path.write_bytes(flipped(at)(whole))
        assert round_of(tmp_path)[0] == 1, at


def test_none_usable_is_one_line(tmp_path):
    fill(tmp_path)
    for path in tmp_path.glob("round-*/tensors.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(RunError, match=r"no usable checkpoint in .*round-00000003 is damaged"):
        checkpoint.load(tmp_path)
    with pytest.raises(RunError, match="no usable checkpoint"):
        checkpoint.load(tmp_path / "nowhere")


def test_a_full_disk_is_one_line_and_keeps_the_earlier_one(tmp_path, monkeypatch):
    fill(tmp_path, 2)

    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RunError, match=r"checkpoint of round 3 .*the disk is full; earlier ones are kept"):
        checkpoint.save(tmp_path, 3, tensors(3), {"t": 3})
    assert round_of(tmp_path) == (2, [])
    assert not list(tmp_path.glob(".writing*"))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write the checkpoint of round 1"):
        checkpoint.save(tmp_path / "file", 1, tensors(1), {})


def test_tensors_that_share_memory_are_saved(tmp_path):
    """A method's server may hold one tensor under two names; a message to one client is a view of the server's."""
    w = torch.arange(4.0)
    checkpoint.save(tmp_path, 1, {"a": w, "b": w, "c": w[:2], "d": w.expand(1, 4), "e": w.expand(3, 4)}, {"t": 1})
    found, _, _ = checkpoint.load(tmp_path)
    assert torch.equal(found["a"], w)
    assert torch.equal(found["b"], w)
    assert torch.equal(found["c"], w[:2])
    assert torch.equal(found["d"], w[None])
    assert torch.equal(found["e"], w.expand(3, 4))


def rows(m: int) -> torch.Tensor:
    return torch.arange(8.0 * m, dtype=torch.float64).view(m, 8)


def test_a_ledger_is_written_in_steps_that_do_not_grow_with_it(tmp_path):
    sizes = []
    for t in range(1, 40):
        checkpoint.save(tmp_path, t, {"w": torch.zeros(3), "ledger": rows(100 * t)}, {"t": t})
        sizes.append((tmp_path / "ledger.rows").stat().st_size)
    assert max(np.diff(sizes)) < 1.2 * sizes[0] < 6400
    assert sum(f.stat().st_size for f in tmp_path.rglob("tensors.safetensors")) < 500
    found, meta, _ = checkpoint.load(tmp_path)
    assert torch.equal(found["ledger"], rows(3900))
    assert "ledger" not in meta


def test_a_damaged_ledger_is_read_as_far_as_the_checkpoint_before_has_it(tmp_path):
    for t in (1, 2):
        checkpoint.save(tmp_path, t, {"ledger": rows(100 * t)}, {"t": t})
    path = tmp_path / "ledger.rows"
    path.write_bytes(path.read_bytes()[:-1])
    found, meta, warnings = checkpoint.load(tmp_path)
    assert (meta["t"], len(warnings)) == (1, 1)
    assert torch.equal(found["ledger"], rows(100))
    checkpoint.forget(tmp_path, 1)
    checkpoint.save(tmp_path, 3, {"ledger": rows(300)}, {"t": 3})
    assert torch.equal(checkpoint.load(tmp_path)[0]["ledger"], rows(300))
