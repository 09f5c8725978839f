"""Many sites at one server: seconds a round and memory there, by threads that speak the protocol, without a model.

    python benchmarks/sites.py [--sites 200] [--rounds 5] [--megabytes 1]

The server is this process, the sites are threads of another one, over TLS on loopback.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import psutil
import torch

sys.path += [str(Path(__file__).parents[1] / name) for name in ("examples/network", "tests/sites")]

from demo import free_port
from direct import Raw

from polyfed_sites.attendance import Attendance
from polyfed_sites.hub import Channel, Hub
from polyfed_sites.keys import Keys, site_key


def sites(folder: Path) -> None:
    """Every key's site, each in a thread, answers with what it was sent, until this process is ended."""

    def one(path: Path) -> None:
        key = site_key(path)
        place = folder / key.site
        place.mkdir()
        Attendance(key, lambda run, data: data, lambda: False, place, lambda line: None).run()

    for path in folder.glob("*.key"):
        threading.Thread(target=one, args=(path,), daemon=True).start()
    threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--at", type=Path)
    given = parser.parse_args()
    if given.at is not None:
        sites(given.at)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        keys, names = Keys(folder / "keys"), [f"site-{k:04}" for k in range(given.sites)]
        keys.make(f"127.0.0.1:{free_port()}")
        for name in names:
            keys.add(name, folder)
        hub = Hub(keys, lambda line: None, "127.0.0.1")
        (folder / "server").mkdir()
        channel = Channel(hub, folder / "server", int(given.megabytes * 2e6))
        channel.run = "run"
        me, begun = psutil.Process(), time.monotonic()
        before = me.memory_info().rss
        others = subprocess.Popen([sys.executable, __file__, "--at", place])
        try:
            while len(channel.sites()) < len(names):
                time.sleep(0.1)
            print(f"{len(names)} sites connected after {time.monotonic() - begun:.1f} s")
            w, took, cpu = torch.zeros(int(given.megabytes * 250_000)), list[float](), sum(me.cpu_times()[:2])
            for n in range(given.rounds):
                begun = time.monotonic()
                channel.push({name: Raw({"n": n}, {"w": w}) for name in names})
                channel.pull(names)
                took.append(time.monotonic() - begun)
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before / 1e6
                print(f"round {n}: {took[-1]:.3f} s; peak {peak:.0f} MB more than before", flush=True)
            used = (sum(me.cpu_times()[:2]) - cpu) / given.rounds
            print(f"median {median(took):.3f} s a round; the server's processor time {used:.3f} s a round")
        finally:
            others.kill()
            others.wait()
            hub.close()


if __name__ == "__main__":
    main()
