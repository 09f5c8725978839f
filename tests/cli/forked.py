"""The command line in a process of its own, forked from this one, so that torch is not imported once more."""

import multiprocessing
import sys
from pathlib import Path

from polyfed.cli import main


class Process(multiprocessing.get_context("fork").Process):
    """One command, running; its status will be `exitcode`, what it says is in the file `err`."""

    def __init__(self, *words: object):
        super().__init__()
        self.words, self.err = [str(w) for w in words], Path("stderr").absolute()
        self.start()

    def run(self):
        with self.err.open("w", buffering=1) as sys.stderr, open("/dev/null", "w") as sys.stdout:
            main(self.words)
