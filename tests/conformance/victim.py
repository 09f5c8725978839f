"""Runs that are killed: one process that imports torch once and forks a child per case, which ends by SIGKILL.

Reads cases as JSON from stdin: [[method, folder, when, round, rows], ...]; `rows` is "files" for private rows in files,
or left out; `when` is
    "after"    round's callback: metrics are written, the checkpoint is not
    "draft"    the tensors of the checkpoint of `round` are half written
    "rename"   the checkpoint of `round` is complete but not yet in its place
    "commit"   the checkpoint of `round` is in its place, and the store of rows in files has not been told
    "row"      a row of `round` is half written to its file
Prints how every child ended, as JSON.
"""

import json
import os
import signal
import sys
import tempfile

import torch
from instances import METHODS, train

from polyfed.core import checkpoint, rows
from polyfed.experiment import fit


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_files(algorithm, task, n, cohort, folder, saved=None, added=False):
    return rows.MappedRows(n, algorithm.init_client(task, task.w0), folder / "rows")


def run(method: str, folder: str, when: str, round: int, where: str = "memory") -> None:
    done = [0]

    def watch(progress) -> None:
        done[0] = progress.round
        if when == "after" and progress.round == round:
            die()

    save_file, replace, saved = checkpoint.save_file, os.replace, []

    def half_write(tensors, path) -> None:
        save_file(tensors, path)
        saved.append(path)
        if when == "draft" and len(saved) == round:
            os.truncate(path, path.stat().st_size // 2)
            die()

    def no_rename(source, target) -> None:
        if when == "rename" and os.path.basename(target) == f"round-{round:08d}":
            die()
        replace(source, target)

    write, committed = rows.SlotFile.write, rows.SlotFile.committed

    def half_row(file, ids, values) -> None:
        write(file, ids, values)
        if when == "row" and done[0] == round - 1:
            with file.path.open("r+b") as f:
                f.seek(int(file.slot[ids[0]]) * file.size)
                f.write(bytes(file.size // 2))
            die()

    def not_told(file) -> None:
        if when == "commit" and len(saved) == round:
            die()
        committed(file)

    checkpoint.save_file, os.replace = half_write, no_rename
    rows.SlotFile.write, rows.SlotFile.committed = half_row, not_told
    if where == "files":
        fit.make_rows = in_files
    train(METHODS[method], out=folder, checkpoint_every=1, callbacks=[watch])


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:  # so that no child pays for what is loaded at first use
        for name in {case[0] for case in cases}:
            train(METHODS[name], out=os.path.join(folder, name), rounds=1)
    ends = []
    for case in cases:
        child = os.fork()
        if child == 0:
            try:
                run(*case)
            finally:
                os._exit(1)
        ends.append(os.waitpid(child, 0)[1])
    json.dump(ends, sys.stdout)
