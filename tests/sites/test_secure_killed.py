"""Secure sums between processes: kill -9 around the two exchanges of a sum, and a search of the server's memory."""

import sys

import numpy as np
import pytest
from hospitals import FEDAVG, experiment, on_one_machine, same
from secured import COLUMNS, DP, FOUR, SECURE

from polyfed_sites import sums
from processes import Network, found_in, killing, repeated

WHOLE = {"batch-size": "full", "local-epochs": 1}
BITS = [("oslo", "before", 0), ("oslo", "between", 1), ("server", "between", 1), ("oslo", "after", 2)]
NOISY = [("server", "after", 1), ("oslo", "between", 2)]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")


@pytest.mark.parametrize(("privacy", "kills"), [("", BITS), (DP, NOISY)])
def test_a_kill_around_either_exchange_repeats_nothing(privacy, kills, data, tmp_path):
    """The bits of a rehearsal, no exchange with two requests, no mask on two vectors, no noise for two messages."""
    file = experiment(tmp_path / "study.toml", FEDAVG, COLUMNS + SECURE + privacy, **WHOLE)
    there = Network(tmp_path, file, data, killing(kills))
    there.run()
    assert there.killed == [who for who, _, _ in kills]
    assert not repeated(there)
    if not privacy:
        here = on_one_machine(file, data)
        same(here, here, there.sites)


def test_the_servers_memory_holds_no_sites_numbers(data, tmp_path, monkeypatch):
    """Searched as two sums wait for their second exchange: what is found is the model that the server has sent."""
    for table in data.iterdir():  # sums that no earlier test can have left in this process, whose fork the server is
        table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")
    hidden = sums.Hidden.masked
    plain = tmp_path / "plain"
    plain.mkdir()

    def noted(self, asked, found, names, privacy):
        for key, t in found.tensors.items():
            (plain / f"{self.name} {asked.head.kind} {key}").write_bytes(t.numpy().tobytes())
        for key, value in (getattr(found.head, "metrics", None) or {}).items():
            (plain / f"{self.name} {key}, as text").write_text(repr(value))
            (plain / f"{self.name} {key}").write_bytes(np.float64(value).tobytes())
        return hidden(self, asked, found, names, privacy)

    searched: dict[str, set[str]] = {}
    model: list[bytes] = []

    def passing(there, name, asked, answer):
        if asked.head["kind"] == "train":
            model[:] = [asked.tensors["w"].numpy().tobytes()]
        what = asked.head.get("what", "").partition(" ")[0]  # of a second exchange
        if model and what in ("train", "evaluate") and what not in searched and not answer:
            wanted = {path.name: path.read_bytes() for path in plain.iterdir()}
            wanted = {key: value for key, value in wanted.items() if len(value) > 7 and len({*value}) > 4}
            assert len([key for key in wanted if "train" in key]) == len(FOUR)
            assert len(wanted) == 5 * len(FOUR)
            wanted["sent"] = model[0]
            searched[what] = found_in(there.processes["server"][0].pid, wanted)

    monkeypatch.setattr(sums.Hidden, "masked", noted)
    file = experiment(tmp_path / "study.toml", FEDAVG, COLUMNS + SECURE, **{"evaluate-every": 1})
    Network(tmp_path, file, data, passing).run()
    assert searched == {"train": {"sent"}, "evaluate": {"sent"}}
