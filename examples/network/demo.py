"""Four hospitals over a real network, all on this machine: keys, TLS, a server and four sites, each its own process.

    python examples/network/demo.py [--out FOLDER] [--sites 4] [--experiment FILE.toml] [--secure]

Every command is one that the operators of real sites type; docs/sites.md explains them. Where a process can be forked,
they are forked from this one: it loads torch once, and its commands need not.
"""

import argparse
import gc
import multiprocessing
import os
import random
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import polyfed as pf
from polyfed.cli import command_line
from polyfed.cli import main as polyfed
from polyfed_sites.keys import Keys

FORKS = "fork" in multiprocessing.get_all_start_methods()
NEEDED = "polyfed_sites.cli.client", "polyfed_sites.cli.server", "sklearn.compose"


def hospitals(folder: Path, n: int = 4) -> dict[str, Path]:
    """A CSV file for each of n hospitals of the data set that comes with polyfed."""
    data = pf.data.load("heart-disease", standardise=None)
    names, columns, found = data.group_names, data.meta["columns"], {}
    folder.mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(names[:n]):
        here = data.groups == k
        rows = [",".join(f"{v:g}" for v in x) + f",{y}" for x, y in zip(data.x[here], data.y[here], strict=True)]
        found[name] = folder / f"{name}.csv"
        found[name].write_text("\n".join([",".join([*columns, "disease"]), *rows]) + "\n")
    return found


def free_port() -> int:
    """Not one of those that connections are given: one of these might take it before the server does."""
    while True:
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return s.getsockname()[1]


def load() -> None:
    """Load what server and sites need, for the processes that are forked from this one."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of each process
    if FORKS:
        command_line()
        for name in NEEDED:
            import_module(name)
        gc.freeze()


def start(*command: str) -> multiprocessing.process.BaseProcess:
    """A command, in a process of its own."""
    print(f"$ polyfed {' '.join(command)}", flush=True)
    process = multiprocessing.get_context("fork" if FORKS else "spawn").Process(target=polyfed, args=(command,))
    process.start()
    return process


def run(*command: str) -> int:
    """The exit status of a command."""
    process = start(*command)
    process.join()
    return abs(process.exitcode)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/network"))
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--experiment", default=str(Path(__file__).with_name("heart.toml")))
    parser.add_argument("--secure", action="store_true", help="the server has sums over the sites alone")
    given = parser.parse_args()
    began, folder, n = time.monotonic(), given.out, str(given.sites)
    load()
    files, keys, out = hospitals(folder / "hospitals", given.sites), str(folder / "keys"), str(folder / "run")
    status = run("keys", "init", f"127.0.0.1:{free_port()}", "--keys", keys)
    for name in files:
        status = status or run("keys", "add", name, "--keys", keys, "--out", str(folder / "hospitals"))
    if status:
        return status
    experiment, policy = Path(given.experiment), folder / "policy.toml"
    if given.secure:
        experiment = folder / experiment.name
        experiment.write_text(Path(given.experiment).read_text() + '\n[privacy]\nsums = "secure"\n')
        pins = [key.mark for (key,) in Keys(folder / "keys").sites().values()]
        policy.write_text(f'sums = "secure"\npeers = {pins}\n'.replace("'", '"'))
    sites = []
    try:
        for name, path in files.items():
            site = ["--key", str(path.with_suffix(".key")), "--data", str(path), "--vault", str(folder / name)]
            if given.secure:  # each site's operator has asked the others for the digits of their keys
                site += ["--policy", str(policy)]
            sites.append(start("client", *site, "--allow", "pooled", "--yes", "policy", "--quiet"))
        words = ["--keys", keys, "--host", "127.0.0.1", "--sites", n, "--out", out]
        status = run("server", str(experiment), *words)
        for p in sites if not status else ():
            p.join(60)
    finally:
        for p in sites:
            p.terminate()
    for name in files:
        print(f"{name}'s own model, at {name}: {folder / name / 'model.safetensors'}")
    print(f"{time.monotonic() - began:.0f} seconds")
    return status or max(1 if p.exitcode is None else abs(p.exitcode) for p in sites)


if __name__ == "__main__":
    sys.exit(main())
