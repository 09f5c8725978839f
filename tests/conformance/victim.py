"""Runs that are killed: one process that imports torch once and forks a child per run, which ends by SIGKILL.

Reads runs as JSON from stdin: [[method, rows, [[when, round, folder], ...]], ...]; `rows` is "files" for private rows
in files, or "memory"; `when` is one of MOMENTS:
    "row"      a row of `round` is half written to its file
    "after"    round's callback: metrics are written, the checkpoint is not
    "draft"    the tensors of the checkpoint of `round` are half written
    "rename"   the checkpoint of `round` is complete but not yet in its place
    "commit"   the checkpoint of `round` is in its place, and the store of rows in files has not been told
At the last of its moments the run is killed; at each before it its folder is copied, since what a killed process leaves
is what lies on disk at that moment. Prints how every child ended, as JSON."""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import torch
from halfway import in_files
from instances import METHODS, train

from polyfed.base import checkpoint
from polyfed.core import rows
from polyfed.runs import trainer

MOMENTS = ("row", "after", "draft", "rename", "commit")  # in the order in which a round comes to them


def run(method: str, where: str, deaths: list) -> None:
    deaths = sorted(deaths, key=lambda d: (d[1], MOMENTS.index(d[0])))
    to_come, out = {(when, t): Path(folder) for when, t, folder in deaths}, Path(deaths[-1][2])
    round, saved = 0, []

    def moment(when: str, t: int, spoil=lambda folder: None) -> None:
        if (folder := to_come.pop((when, t), None)) is None:
            return
        if folder != out:
            shutil.copytree(out, folder)
        spoil(folder)
        if folder == out:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(progress) -> None:
        nonlocal round
        round = progress.round
        moment("after", round)

    save_file, replace = checkpoint.save_file, os.replace
    write, committed = rows.SlotFile.write, rows.SlotFile.committed

    def half_write(tensors, path) -> None:
        save_file(tensors, path)
        saved.append(path)
        moment("draft", len(saved), lambda at: os.truncate(at / path.relative_to(out), path.stat().st_size // 2))

    def no_rename(source, target) -> None:
        if os.path.basename(target).startswith("round-"):
            moment("rename", int(os.path.basename(target).removeprefix("round-")))
        replace(source, target)

    def half_row(file, ids, values) -> None:
        def spoil(at) -> None:
            with (at / file.path.relative_to(out)).open("r+b") as f:
                f.seek(int(file.slot[ids[0]]) * file.size)
                f.write(bytes(file.size // 2))

        write(file, ids, values)
        moment("row", round + 1, spoil)

    def not_told(file) -> None:
        moment("commit", len(saved))
        committed(file)

    checkpoint.save_file, os.replace = half_write, no_rename
    rows.SlotFile.write, rows.SlotFile.committed = half_row, not_told
    if where == "files":
        trainer.make_rows = in_files
    train(METHODS[method], out=out, checkpoint_every=1, callbacks=[watch])


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:  # so that no child pays for what is loaded at first use
        train(METHODS["fpfc"], out=folder, rounds=1)
    ends = []
    for each in runs:
        child = os.fork()
        if child == 0:
            try:
                run(*each)
            finally:
                os._exit(1)
        ends.append(os.waitpid(child, 0)[1])
    json.dump(ends, sys.stdout)
