"""What goes wrong in mid-run: the numbers are those of the undisturbed run, or the log says what was lost."""

import re
import shutil

import pytest
import torch
from hospitals import ALL, NAMES, Sites, at_sites, experiment, folder, on_one_machine, same

from polyfed.core.errors import PolyfedError
from polyfed.core.schedule import Replay
from polyfed.engines.remote import Direct
from polyfed.experiment.member import Member
from polyfed.sites import Message, pack, unpack

FEDAVG = 'name = "fedavg"\nlr = 0.1'
SCAFFOLD = 'name = "scaffold"'
CLIENT = '[columns]\nstandardise = "client"'
MOST = 1 << 24


@pytest.fixture
def study(tmp_path):
    """(experiment file, its data, the sites) for a method's lines and further settings."""

    def make(method, **top):
        data = folder(tmp_path / "data")
        return experiment(tmp_path / "study.toml", method, CLIENT, **top), data, Sites(tmp_path, data)

    return make


class Restarted(Sites):
    """Every site is stopped after every message and begins again with its vault."""

    def answer(self, name, data):
        if unpack(data, MOST, name).head["do"] in ("train", "evaluate", "end"):
            self.members.pop(name)
        return super().answer(name, data)


@pytest.mark.parametrize(("method", "rounds"), [(SCAFFOLD, 2), ('name = "fedcet"\nlr = 0.01', 1)])
def test_sites_that_are_restarted_before_every_message(method, rounds, study, tmp_path):
    file, data, _ = study(method, rounds=rounds, **{"evaluate-every": 0})
    sites = Restarted(tmp_path, data)
    same(on_one_machine(file, data), at_sites(file, sites), sites)


class Killed(BaseException):
    """Nothing can be saved any more."""


def test_a_server_that_is_killed_goes_back_to_its_checkpoint_and_the_sites_with_it(study):
    file, data, sites = study(SCAFFOLD, rounds=6, **{"checkpoint-every": 2})

    def answer(name, message):
        if unpack(message, MOST, name).head.get("t") == 4 and name == "riga":
            raise Killed
        return sites.answer(name, message)

    with pytest.raises(Killed):
        at_sites(file, sites, Direct(NAMES, answer))
    shutil.rmtree(sites.place / "run" / "checkpoint" / "round-00000004")  # as if it had died before this one
    there = at_sites(file, sites, resume=True)
    assert there.rounds == 6
    same(on_one_machine(file, data), there, sites)


def test_a_vault_of_another_run_or_of_other_data_is_refused(study, tmp_path):
    file, data, sites = study(SCAFFOLD)
    at_sites(file, sites)
    with pytest.raises(PolyfedError, match=r"bern: its vault: the vault of run '\w+', expected '\w+'; give each run"):
        at_sites(file, Sites(tmp_path, data), out="another")
    path = data / "oslo.csv"
    path.write_text(path.read_text().replace("mild", "severe", 1))
    with pytest.raises(PolyfedError, match=r"oslo: its data have changed since the run began; restore the file"):
        at_sites(file, Sites(tmp_path, data), resume=True)


def test_a_vault_that_is_older_than_the_server_is_refused_with_what_to_do(study, tmp_path):
    file, data, sites = study(SCAFFOLD)

    def answer(name, message):
        if unpack(message, MOST, name).head.get("t") == 2:
            return b""
        return sites.answer(name, message)

    with pytest.raises(PolyfedError, match=r"round 2: 0 of 3 sites have answered, expected 3 \(bern: not a message"):
        at_sites(file, sites, Direct(NAMES, answer))
    (tmp_path / "vaults" / "riga" / "00000001-0.safetensors").unlink()
    said = r"riga: its vault: no state of round 1, which the server builds on; it ends with round 0\. Restore"
    with pytest.raises(PolyfedError, match=said):
        at_sites(file, Sites(tmp_path, data), resume=True)


def with_tensor(name, t):
    return lambda reply: reply._replace(tensors=reply.tensors | {name: t})


CORRUPTIONS = {
    "NaN": (with_tensor("dw", torch.full((14,), torch.nan)), "tensor 'dw' holds NaN or infinity"),
    "a wrong shape": (with_tensor("dw", torch.zeros(13)), r"tensor 'dw' is float32 \[13\], expected float32 \[14\]"),
    "a wrong type": (with_tensor("dw", torch.zeros(14).double()), r"tensor 'dw' is float64 \[14\], expected float32"),
    "one too many": (with_tensor("more", torch.zeros(2)), "the message has tensor 'more', expected dc, dw"),
    "one too few": (lambda r: r._replace(tensors={"dw": r.tensors["dw"]}), "the message lacks tensor 'dc'"),
    "too large": (with_tensor("dw", torch.zeros(1 << 23)), "not a message .*most of them 'dw', expected at most 65,"),
    "a damaged head": (lambda r: r._replace(head=r.head | {"seconds": "x"}), "its reply is damaged"),
    "not a message": (None, "not a message"),
}  # fmt: skip


@pytest.mark.parametrize(("corrupt", "said"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_reply_that_cannot_be_is_refused_and_its_site_is_missing_for_the_round(corrupt, said, study):
    file, data, sites = study(SCAFFOLD, **{"evaluate-every": 0})

    def answer(name, message):
        reply = sites.answer(name, message)
        if name != "riga" or unpack(message, MOST, name).head.get("t") != 1:
            return reply
        return reply[:-3] if corrupt is None else pack(corrupt(unpack(reply, MOST, name)))

    there = at_sites(file, sites, Direct(NAMES, answer), quorum=2, wait=0.0)
    log = (sites.place / "run" / "log.txt").read_text()
    assert any(re.search(f"round 1: riga is missing: {said}", line) for line in log.splitlines()), log
    same(on_one_machine(file, data, schedule=Replay.of(there.ledger)), there, sites)


def test_a_server_that_asks_for_what_a_site_does_not_know_hears_why(study, tmp_path):
    _, data, _ = study(SCAFFOLD)
    member = Member("bern", data / "bern.csv", tmp_path / "vault", ALL)
    for message, said in (
        (b"nonsense", "the server: not a message"),
        (pack(Message({"do": "leave"})), "asks for 'leave'"),
        (pack(Message({"no": 1})), "the message is damaged"),
        (pack(Message({"do": "train", "run": "x"})), "its vault has no run"),
        (pack(Message({"do": "begin"})), "asked to begin before it has joined"),
    ):
        error = unpack(member.answer(message), MOST, "bern").head["error"]
        assert said in error
        assert error.startswith("bern: ")
        assert str(tmp_path) not in error
