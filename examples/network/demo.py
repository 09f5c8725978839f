"""Four hospitals over a real network, all on this machine: keys, TLS, a server and four sites, each its own process.

    python examples/network/demo.py [--out FOLDER] [--sites 4] [--experiment FILE.toml] [--secure]

Every command is one that the operators of real sites type; docs/sites.md explains them.
"""

import argparse
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import polyfed as pf

POLYFED = [sys.executable, "-c", "from polyfed.cli import main; main()"]


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


def say(command: list[str]) -> None:
    print(f"$ polyfed {' '.join(command)}", flush=True)


def run(*command: str) -> None:
    say([*command])
    subprocess.run([*POLYFED, *command], check=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/network"))
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--experiment", default=str(Path(__file__).with_name("heart.toml")))
    parser.add_argument("--secure", action="store_true", help="the server has sums over the sites alone")
    given = parser.parse_args()
    began, folder, n = time.monotonic(), given.out, str(given.sites)
    files, keys, out = hospitals(folder / "hospitals", given.sites), str(folder / "keys"), str(folder / "run")
    run("keys", "init", f"127.0.0.1:{free_port()}", "--keys", keys)
    for name in files:
        run("keys", "add", name, "--keys", keys, "--out", str(folder / "hospitals"))
    experiment, policy = Path(given.experiment), folder / "policy.toml"
    if given.secure:
        experiment = folder / experiment.name
        experiment.write_text(Path(given.experiment).read_text() + '\n[privacy]\nsums = "secure"\n')
        listed = subprocess.run([*POLYFED, "keys", "list", "--keys", keys], check=True, capture_output=True, text=True)
        pins = [line.split()[-1] for line in listed.stdout.splitlines()[1:]]
        policy.write_text(f'sums = "secure"\npeers = {pins}\n'.replace("'", '"'))
    server = ["server", str(experiment), "--keys", keys, "--host", "127.0.0.1", "--sites", n, "--out", out]
    processes, threads = [], {"OMP_NUM_THREADS": "1"}
    try:
        for name, path in files.items():
            site = [
                "client",
                "--key",
                str(path.with_suffix(".key")),
                "--data",
                str(path),
                "--vault",
                str(folder / name),
            ]
            site += ["--allow", "pooled", "--yes", "policy", "--quiet"]
            if given.secure:  # each site's operator has asked the others for the digits of their keys
                site += ["--policy", str(policy)]
            say(site)
            processes.append(subprocess.Popen([*POLYFED, *site], env=os.environ | threads))
        say(server)
        status = subprocess.run([*POLYFED, *server], env=os.environ | threads).returncode
        ended = [p.wait(60) for p in processes] if not status else []
    finally:
        for p in processes:
            p.terminate()
    for name in files:
        print(f"{name}'s own model, at {name}: {folder / name / 'model.safetensors'}")
    print(f"{time.monotonic() - began:.0f} seconds")
    return status or max(map(abs, ended), default=0)


if __name__ == "__main__":
    sys.exit(main())
