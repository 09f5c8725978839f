"""What goes wrong in mid-run: the numbers are those of the undisturbed run, or the log says what was lost."""

import re
import shutil

import pytest
import torch
from direct import Direct, Raw, raw
from hospitals import ALL, NAMES, OPEN, Sites, at_sites, experiment, folder, on_one_machine, same

from polyfed.base.errors import PolyfedError
from polyfed.core.schedule import Replay
from polyfed_sites.site import Site
from polyfed_sites.wire import FORMAT, size

FEDAVG = 'name = "fedavg"\nlr = 0.1'
SCAFFOLD = 'name = "scaffold"'
CLIENT = '[columns]\nstandardise = "client"'


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
        if raw(data).head["kind"] in ("train", "evaluate", "end"):
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
        if raw(message).head.get("t") == 4 and name == "riga":
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
    with pytest.raises(
        PolyfedError, match=r"bern: its vault: the vault of run '[\w-]+', expected '[\w-]+'; give each run"
    ):
        at_sites(file, Sites(tmp_path, data), out="another")
    path = data / "oslo.csv"
    path.write_text(path.read_text().replace("mild", "severe", 1))
    with pytest.raises(PolyfedError, match=r"oslo: its data have changed since the run began; restore the file"):
        at_sites(file, Sites(tmp_path, data), resume=True)


def test_a_vault_that_is_older_than_the_server_is_refused_with_what_to_do(study, tmp_path):
    file, data, sites = study(SCAFFOLD)

    def answer(name, message):
        if raw(message).head.get("t") == 2:
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
    "numbers that are too large": (
        with_tensor("dw", torch.full((14,), 3e38)), "tensor 'dw' holds numbers up to 3e.38, whose squares no float32"
    ),
    "a wrong shape": (with_tensor("dw", torch.zeros(13)), r"tensor 'dw' is float32 \[13\], expected float32 \[14\]"),
    "a wrong type": (with_tensor("dw", torch.zeros(14).double()), r"tensor 'dw' is float64 \[14\], expected float32"),
    "one too many": (with_tensor("more", torch.zeros(2)), "the message has tensor 'more', expected dc, dw"),
    "one too few": (lambda r: r._replace(tensors={"dw": r.tensors["dw"]}), "the message lacks tensor 'dc'"),
    "too large": (with_tensor("dw", torch.zeros(1 << 23)), "not a message .*most of them 'dw', expected at most 65,"),
    "a damaged head": (lambda r: r.saying(seconds="x"), "its reply is damaged"),
    "not a message": (None, "not a message"),
}  # fmt: skip


@pytest.mark.parametrize(("corrupt", "said"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_reply_that_cannot_be_is_refused_and_its_site_is_missing_for_the_round(corrupt, said, study):
    file, data, sites = study(SCAFFOLD, **{"evaluate-every": 0})

    def answer(name, message):
        reply = sites.answer(name, message)
        if name != "riga" or raw(message).head.get("t") != 1:
            return reply
        return reply[:-3] if corrupt is None else corrupt(raw(reply)).pack()

    there = at_sites(file, sites, Direct(NAMES, answer), quorum=2, wait=0.0)
    log = (sites.place / "run" / "log.txt").read_text()
    assert any(re.search(f"round 1: riga is missing: {said}", line) for line in log.splitlines()), log
    same(on_one_machine(file, data, schedule=Replay.of(there.ledger)), there, sites)


def test_a_server_that_asks_for_what_a_site_does_not_know_hears_why(study, tmp_path):
    _, data, _ = study(SCAFFOLD)
    site = Site("bern", data / "bern.csv", tmp_path / "vault", ALL, policy=OPEN)
    turn = {"run": "x", "base": [-1, -1], "keep": [-1, -1], "t": 0, "phase": 0, "n": 3, "scale": 1.0}
    for message, said in (
        (b"nonsense", "the server: not a message"),
        (
            Raw({"kind": "leave"}).pack(),
            "the message is damaged (it is of kind 'leave', which this version does not know)",
        ),
        (Raw({"no": 1}).pack(), "the message is damaged (it is of kind None"),
        (Raw({"kind": "train"} | turn).pack(), "its vault has no run"),
        (Raw({"kind": "train"} | turn | {"t": "x"}).pack(), "damaged (t: found 'x', expected a valid integer)"),
        (Raw({"kind": "train"} | turn | {"cells": 1}).pack(), "damaged (it has cells, which this version does not"),
        (Raw({"kind": "begin"}).pack(), "the message is damaged (it lacks joined)"),
        (
            Raw({"kind": "train", "format": FORMAT + 1} | turn).pack(),
            f"found messages of format {FORMAT + 1}, expected {FORMAT}; install the same",
        ),
    ):
        error = raw(site.answer(message)).head["error"]
        assert said in error
        assert error.startswith("bern: ")
        assert str(tmp_path) not in error


@pytest.mark.parametrize("kind", ["train", "evaluate", "end"])
def test_a_model_of_another_shape_is_refused_before_anything_is_computed_with_it(kind, study):
    """The compiled kernel would read and write beyond it."""
    file, _, sites = study(FEDAVG, rounds=1, **{"evaluate-every": 1})
    sent = {}

    def answer(name, message):
        sent[raw(message).head["kind"]] = raw(message)
        return sites.answer(name, message)

    at_sites(file, sites, Direct(NAMES, answer))
    site = sites.members.pop(NAMES[-1])
    (site.vault / "answered.jsonl").unlink()
    asked = sent[kind]._replace(tensors={"w": torch.zeros(3)})
    error = raw(sites.member(NAMES[-1]).answer(asked.pack())).head["error"]
    assert "tensor 'w' is float32 [3], expected float32 [14]" in error


def with_head(**said):
    return lambda reply: reply.saying(**said)


def filled(name, value):
    return lambda reply: with_tensor(name, torch.full_like(reply.tensors[name], value))(reply)


def round_1(head):
    return head["kind"] == "train" and head["t"] == 1


def last_loss(head):
    return head["kind"] == "evaluate" and head["round"] == 2


LOSSES = {"metrics": {"loss": 10**400}}
NUMBERS = {
    "steps": (FEDAVG, with_head(steps=10**30), round_1, r"damaged \(steps: found 10+, expected less"),
    "seconds": (FEDAVG, with_head(seconds=10**400), round_1, "its reply is damaged"),
    "another round's": (FEDAVG, with_head(t=0), round_1, "it answers another message"),
    "parameters": (FEDAVG, with_head(parameters=10**30), last_loss, r"\(parameters: found 10+, expected less"),
    "an accuracy": (
        FEDAVG, with_head(metrics={"loss": 1.0, "accuracy": 17.0}), last_loss,
        "found accuracy 17, expected a number from 0 to 1",
    ),
    "a loss below 0": (FEDAVG, with_head(metrics={"loss": -1.0}), last_loss, "found loss -1, expected a number from 0"),
    "a loss": (FEDAVG, with_head(metrics={"loss": 1e308}), last_loss, "found loss 1e.308, expected a number from 0"),
    "a metric": (FEDAVG, with_head(**LOSSES), last_loss, r"damaged \(metrics\.loss: found 10"),
    "no metrics": (FEDAVG, lambda r: Raw({"kind": "stored"}), last_loss, "it answers another message"),
    "a cluster": ('name = "ifca"\nk = 2', filled("cluster", 7), round_1, "found cluster 7, expected 0 to 1"),
    "a cluster below 0": ('name = "ifca"\nk = 2', filled("cluster", -1), round_1, "found cluster -1"),
    "a position": ('name = "fedlin"\nkeep_up = 0.5', filled("at", 10**6), round_1, "are not rising ones from 0 to 13"),
    "a mask": ('name = "fedspa"', filled("mask", 255), round_1, "its mask keeps 12 entries of a layer, expected 5"),
    "a mask without biases": (
        'name = "fedspa"', lambda r: with_tensor("mask", r.tensors["mask"] & torch.tensor([255, 15]).byte())(r),
        round_1, "its mask lacks biases or norms",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("method", "corrupt", "when", "said"), NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_cannot_be_costs_its_site_the_round_and_nobody_the_run(method, corrupt, when, said, study):
    file, _, sites = study(method, rounds=2, **{"evaluate-every": 2 * (when is last_loss)})

    def answer(name, message):
        head, reply = raw(message).head, sites.answer(name, message)
        if name != "riga" or not when(head) or head.get("phase"):
            return reply
        return corrupt(raw(reply)).pack()

    there = at_sites(file, sites, Direct(NAMES, answer), quorum=2, wait=0.0)
    assert there.rounds == 2
    assert any(re.search(rf": riga is missing: .*{said}", line) for line in sites.lines), sites.lines


def test_a_reply_to_another_message_is_asked_for_again_and_then_the_answer_counts(study):
    file, data, sites = study(FEDAVG, rounds=2, **{"evaluate-every": 0})
    early: list[bytes] = []

    def answer(name, message):
        reply = sites.answer(name, message)
        if name == "riga" and round_1(raw(message).head) and early:
            return early.pop()
        early[:] = [reply] if name == "riga" and raw(message).head.get("t") == 0 else early
        return reply

    same(on_one_machine(file, data), at_sites(file, sites, Direct(NAMES, answer)), sites)
    assert not early


def do(it, **more):
    return lambda head: head["kind"] == it and head.items() >= more.items()


def less(name):
    return lambda r: r._replace(head={key: value for key, value in r.head.items() if key != name})


ENDLESS = {
    "kind": "arrays", "inputs": [1], "integers": False, "targets": [float("inf")], "numbers": True, "given": False
}  # fmt: skip
LESS = r"damaged \(counts\.train: found 10+, expected less than 134217728\)"
SUMS = {"sums": torch.zeros(1, dtype=torch.float64)}
POOLED, PLAIN, BALANCED = '[columns]\nstandardise = "pooled"', {}, {"class-weights": "balanced"}
JOINING = {
    "no versions": (less("versions"), do("join"), PLAIN, r"its reply is damaged \(it lacks versions\)"),
    "a count": (with_head(counts={"train": 10**30, "test": 1}), do("join"), PLAIN, LESS),
    "rows that nobody has": (with_head(counts={"train": 10**12, "test": 1}), do("join"), PLAIN, LESS),
    "a schema": (with_head(file=ENDLESS), do("join"), PLAIN, r"targets\.0: found inf, expected a"),
    "labels": (with_head(rows="abc"), do("labels"), BALANCED, r"\(rows: found 'abc', expected a valid list\)"),
    "labels of others": (with_head(rows=[5, 5]), do("labels"), BALANCED, "by class are"),
    "other sums": (lambda r: r._replace(tensors={"x": SUMS["sums"]}), do("pooled"), PLAIN, "lacks tensor 'counts'"),
    "fewer sums": (with_tensor("sums", SUMS["sums"]), do("pooled", what="sums"), PLAIN, r"expected float64 \[2\]"),
    "more values than rows": (filled("n", 99), do("pooled", what="counts"), PLAIN, "its sums are damaged"),
    "squares below 0": (filled("squares", -1), do("pooled", what="squares"), PLAIN, "its sums are damaged"),
}  # fmt: skip


@pytest.mark.parametrize(("corrupt", "when", "top", "said"), JOINING.values(), ids=JOINING)
def test_a_site_that_says_what_cannot_be_before_the_first_round_is_named(corrupt, when, top, said, tmp_path):
    data = folder(tmp_path / "data")
    file, sites = experiment(tmp_path / "study.toml", FEDAVG, POOLED, **top), Sites(tmp_path, data)

    def answer(name, message):
        reply = sites.answer(name, message)
        if name != "riga" or not when(raw(message).head):
            return reply
        return corrupt(raw(reply)).pack()

    with pytest.raises(PolyfedError, match=rf"\(riga: .*{said}"):
        at_sites(file, sites, Direct(NAMES, answer))


@pytest.mark.parametrize("what", ["pooled", "labels", "begin"])
def test_a_site_that_is_started_again_before_the_first_round_joins_again(what, tmp_path):
    data = folder(tmp_path / "data")
    file = experiment(tmp_path / "study.toml", FEDAVG, POOLED, rounds=1, **{"class-weights": "balanced"})
    sites, stopped = Sites(tmp_path, data), []

    def answer(name, message):
        head = raw(message).head
        if name == "riga" and what == head["kind"]:
            stopped.append(sites.members.pop(name))
        return sites.answer(name, message)

    same(on_one_machine(file, data), at_sites(file, sites, Direct(NAMES, answer)), sites)
    assert stopped


def test_a_line_of_metrics_that_was_cut_off_is_left_out_of_the_sites_report(study):
    file, _, sites = study(FEDAVG, **{"evaluate-every": 1})

    def answer(name, message):
        head, reply = raw(message).head, sites.answer(name, message)
        if name == "riga" and head["kind"] == "evaluate" and head["round"] == 1 and head["split"] == "test":
            path = sites.place / "vaults" / "riga" / "metrics.jsonl"
            path.write_bytes(path.read_bytes()[:-20])
            sites.members.pop(name)
        return reply

    at_sites(file, sites, Direct(NAMES, answer))
    assert sites.members["riga"].finished
    report = (sites.place / "vaults" / "riga" / "report.md").read_text()
    assert report.count("| test |") == 3


def weighed(sites, fails):
    """(a site's answers, or none where `fails` says so; the bytes down and up of the messages of rounds, each once)"""
    down, up = {}, {}

    def answer(name, message):
        asked = raw(message)
        if asked.head["kind"] != "train":
            return sites.answer(name, message)
        key = name, asked.head["t"], asked.head["phase"]
        down[key] = size(asked.tensors)
        if name == "riga" and fails(asked.head):
            return Raw({"kind": "failed", "error": "no"}).pack()
        reply = sites.answer(name, message)
        up[key] = up.get(key, 0) + size(raw(reply).tensors)
        return reply

    return answer, down, up


def test_a_message_to_a_site_that_is_lost_weighs_what_it_does_in_either_kind_of_time(study):
    file, _, sites = study('name = "fedbuff"', rounds=4, **{"evaluate-every": 0})
    file.write_text(f'{file.read_text()}[schedule]\nname = "asynchronous"\n')
    answer, down, _ = weighed(sites, lambda head: head["t"] == 0)
    ledger = at_sites(file, sites, Last(NAMES, answer)).ledger
    lost = ledger[(ledger["up_bytes"] == 0) & (ledger["round"] >= 0)]
    (size,) = {*down.values()}
    assert [(int(row["client"]), int(row["down_bytes"])) for _, row in lost.iterrows()] == [(2, size)]


class Last(Direct):
    """The last of the sites answers first."""

    def pull(self, names, enough=None, seconds=None):
        return super().pull([*names][::-1], enough, seconds)


def test_replies_to_an_exchange_that_does_not_count_weigh_too(study):
    """One site is lost in the second exchange: the round is done again without it."""
    file, _, sites = study('name = "fedlin"', rounds=2, **{"evaluate-every": 0})
    answer, _, up = weighed(sites, lambda head: head["t"] == head["phase"] == 1)
    ledger = at_sites(file, sites, Direct(NAMES, answer), quorum=2, wait=0.0).ledger
    billed = ledger[ledger["round"] >= 0].groupby("client")["up_bytes"].sum()
    for k, name in enumerate(NAMES):
        assert billed[k] == sum(size for key, size in up.items() if key[0] == name)
