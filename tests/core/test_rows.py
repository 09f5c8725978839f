"""The clients' private rows: a store in files answers like one in memory, survives crashes and sees damage."""

import numpy as np
import pytest
import torch

from polyfed.base.errors import RunError
from polyfed.core.rows import MappedRows, MemoryRows, check

N = 9
START = {
    "w": torch.tensor([0.5, -1.0, 2.0]),
    "d": torch.zeros(2, 2, dtype=torch.float64),
    "a": torch.tensor(3.0),
    "k": torch.tensor([7, 8]),
    "flag": torch.tensor(True),
}
EVERYONE = torch.arange(N)


def draw(rng: np.random.Generator, s: int) -> dict[str, torch.Tensor]:
    return {
        "w": torch.tensor(rng.normal(size=(s, 3)), dtype=torch.float32),
        "d": torch.tensor(rng.normal(size=(s, 2, 2))),
        "a": torch.tensor(rng.normal(size=s), dtype=torch.float32),
        "k": torch.tensor(rng.integers(0, 9, (s, 2))),
        "flag": torch.tensor(rng.integers(0, 2, s).astype(bool)),
    }


def read(rows) -> dict[str, torch.Tensor]:
    got = rows.gather(EVERYONE)
    return {name: got[name].clone() for name in START}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def ids_of(rng) -> torch.Tensor:
    return torch.tensor(np.sort(rng.choice(N, rng.integers(1, N), replace=False)))


@pytest.mark.parametrize("seed", range(8))
def test_mapped_rows_answer_like_rows_in_memory(seed, tmp_path):
    rng = np.random.default_rng(seed)
    memory, mapped = MemoryRows(N, START), MappedRows(N, START, tmp_path)
    for _ in range(40):
        action = rng.integers(0, 5)
        ids = ids_of(rng)
        if action < 2:
            state = draw(rng, len(ids))
            memory.scatter(ids, state)
            mapped.scatter(ids, state)
        elif action == 2:
            a, b = memory.gather(ids), mapped.gather(ids)
            for name in START:
                assert torch.equal(a[name], b[name])
        elif action == 3:
            saved = {k: v.clone() for k, v in mapped.snapshot().items()}
            mapped.committed()
            if rng.integers(0, 2):
                mapped = MappedRows(N, START, tmp_path)  # the process ended and began again
                mapped.restore(saved)
        else:
            order = torch.tensor(rng.permutation(len(ids)))
            a, b = memory.gather(ids[order]), mapped.gather(ids[order])
            assert torch.equal(a["w"], b["w"])
    assert same(read(memory), read(mapped))


@pytest.mark.parametrize("store", ["memory", "mapped"])
def test_what_is_gathered_is_a_copy(store, tmp_path):
    rows = MemoryRows(N, START) if store == "memory" else MappedRows(N, START, tmp_path)
    state = draw(np.random.default_rng(0), 2)
    rows.scatter(torch.tensor([1, 4]), state)
    before = read(rows)
    rows.gather(EVERYONE)["w"].fill_(9)
    for t in state.values():
        t.zero_()
    assert same(read(rows), before)
    assert torch.equal(START["w"], torch.tensor([0.5, -1.0, 2.0]))


@pytest.mark.parametrize("store", ["memory", "mapped"])
def test_a_tensor_that_an_update_leaves_out_stays(store, tmp_path):
    rows = MemoryRows(N, START) if store == "memory" else MappedRows(N, START, tmp_path)
    ids = torch.tensor([2, 3])
    rows.scatter(ids, draw(np.random.default_rng(0), 2))
    before = read(rows)
    rows.scatter(ids, {"a": torch.tensor([10.0, 11.0])})
    before["a"][ids] = torch.tensor([10.0, 11.0])
    assert same(read(rows), before)
    rows.snapshot()
    rows.committed()
    assert same(read(rows), before)


@pytest.mark.parametrize("seed", [*range(19), 334])
def test_either_of_the_last_two_checkpoints_is_found_whole_at_any_moment(seed, tmp_path):
    """Rows are written and kept, checkpoints taken, lost, saved; processes end. The store is like a list of copies."""
    rng = np.random.default_rng(seed)
    rows, kept = MappedRows(N, START, tmp_path), []
    best = rows.keep(None), read(rows)

    def restored(saved, best):
        rows = MappedRows(N, START, tmp_path)
        rows.restore(saved)
        rows.keep(best[0])
        return rows

    for _ in range(60):
        action = rng.integers(0, 7)
        if action < 3:
            ids = ids_of(rng)
            rows.scatter(ids, draw(rng, len(ids)))
        elif action < 5:
            saved, state = {k: v.clone() for k, v in rows.snapshot().items()}, read(rows)
            if rng.random() < 0.2:
                continue  # the checkpoint could not be written
            kept = [*kept[-1:], (saved, state, best)]
            if rng.random() < 0.8:
                rows.committed()
                continue
            rows = restored(saved, best)  # killed before the store was told
        elif action == 5:
            best = {k: v.clone() for k, v in rows.keep(None).items()}, read(rows)
        for saved, state in [best, *(pair for s, t, of in kept for pair in ((s, t), of))]:
            check(tmp_path, saved)
            other = MappedRows(N, START, tmp_path)
            other.restore(saved)
            assert same(read(other), state)
        if action == 6 and kept:
            if rng.random() < 0.5:
                kept = kept[:1]  # the newest is damaged
            saved, state, best = kept[-1]
            rows = restored(saved, best)
            assert same(read(rows), state)


def test_no_more_than_three_slots_a_row(tmp_path):
    rows, rng = MappedRows(N, START, tmp_path), np.random.default_rng(0)
    for _ in range(20):
        for _ in range(3):
            rows.scatter(EVERYONE, draw(rng, N))
        rows.snapshot()
        rows.committed()
    for name, t in START.items():
        assert (tmp_path / f"{name}.rows").stat().st_size <= 3 * N * t.numel() * t.element_size()


def whole(folder) -> tuple[MappedRows, dict, dict]:
    """A store whose rows are all written and saved."""
    rows = MappedRows(N, START, folder)
    rows.scatter(EVERYONE, draw(np.random.default_rng(0), N))
    saved = rows.snapshot()
    rows.committed()
    return rows, saved, read(rows)


def refused(folder, rows, saved, name: str) -> None:
    for look in (lambda: check(folder, saved), lambda: rows.read(name, EVERYONE)):
        with pytest.raises(RunError, match=rf"{name}\.rows"):
            look()


@pytest.mark.parametrize("name", START)
def test_a_flipped_bit_anywhere_and_any_length_is_seen(name, tmp_path):
    rows, saved, state = whole(tmp_path)
    path = tmp_path / f"{name}.rows"
    raw = path.read_bytes()
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        with pytest.raises(RunError, match="is damaged"):
            check(tmp_path, saved)
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        refused(tmp_path, rows, saved, name)
        path.write_bytes(raw[:length] + bytes(len(raw) - length))
        if path.read_bytes() != raw:
            refused(tmp_path, rows, saved, name)
    path.unlink()
    refused(tmp_path, rows, saved, name)
    path.write_bytes(raw)
    check(tmp_path, saved)
    assert same(read(rows), state)


def test_rows_of_another_client_are_not_taken(tmp_path):
    """A write that went to the wrong place leaves sound rows, of somebody else."""
    rows, saved, _ = whole(tmp_path)
    path, size = tmp_path / "w.rows", 12
    raw = path.read_bytes()
    path.write_bytes(raw[size : 2 * size] + raw[:size] + raw[2 * size :])
    refused(tmp_path, rows, saved, "w")


def test_a_full_disk_is_one_line(tmp_path):
    rows, _, _ = whole(tmp_path)
    (tmp_path / "w.rows").unlink()
    (tmp_path / "w.rows").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"cannot write .*w\.rows: the disk is full"):
        rows.scatter(EVERYONE, {"w": torch.ones(N, 3)})


def test_rows_in_memory_move_to_files_bit_for_bit(tmp_path):
    start = {"w": torch.tensor([0.0, 1.0]), "d": torch.zeros(2, dtype=torch.float64)}
    memory = MemoryRows(N, start)
    memory.scatter(torch.tensor([1, 2, 3]), {"w": torch.tensor([[-0.0, 1.0], [float("nan"), 2.0], [0.0, 1.0]])})
    rows = MappedRows(N, start, tmp_path)
    rows.restore(memory.snapshot())
    for name in start:
        ours, theirs = (r.read(name, EVERYONE).contiguous().view(torch.uint8) for r in (rows, memory))
        assert torch.equal(ours, theirs)
    assert (tmp_path / "w.rows").stat().st_size == 2 * 8  # rows 1 and 2; row 3 is the start value
    assert (tmp_path / "d.rows").stat().st_size == 0


def test_rows_of_another_form_are_refused(tmp_path):
    memory, mapped = MemoryRows(N, START), MappedRows(N, START, tmp_path)
    older = {"commit": torch.tensor(3), "ids": torch.tensor([1]), "rows.w": torch.ones(1, 3)}
    for rows, saved in (
        (memory, mapped.snapshot()),
        (memory, older),
        (mapped, older),
        (mapped, {"w": memory.tensors["w"]}),
        (mapped, {"index.w": mapped.snapshot()["index.w"]}),
    ):
        with pytest.raises(RunError, match=r"client rows of this checkpoint do not fit: found .*expected a, d"):
            rows.restore(saved)


def test_rows_never_written_take_no_space(tmp_path):
    p, n = 50_000, 200
    rows = MappedRows(n, {"w": torch.ones(p)}, tmp_path)
    ids = torch.tensor([3, 150])
    rows.scatter(ids, {"w": torch.full((2, p), 2.0)})
    rows.snapshot()
    rows.committed()
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert used < 4 * (2 * p * 4)
    assert rows.gather(torch.tensor([0, 3]))["w"].mean(1).tolist() == [1, 2]
