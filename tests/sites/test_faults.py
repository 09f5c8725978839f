"""What goes wrong in mid-run: the numbers are those of the undisturbed run, or the log says what was lost."""

import re
import shutil

import pytest
import torch
from direct import Direct, Raw, raw
from hospitals import CLIENT, FEDAVG, NAMES, POOLED, Between, Sites, at_sites, on_one_machine, same, study

from polyfed.base.errors import PolyfedError
from polyfed.core.schedule import Replay
from polyfed_sites.wire import FORMAT, size

SCAFFOLD = 'name = "scaffold"'
QUIET = {"evaluate-every": 0}


class Restarted(Sites):
    """Every site is stopped after every message and begins again with its vault."""

    def answer(self, name, data):
        if raw(data).head["kind"] in ("train", "evaluate", "end"):
            self.members.pop(name)
        return super().answer(name, data)


def test_sites_that_are_restarted_before_every_message(tmp_path, monkeypatch):
    """Also by messages that are larger than those before a run may be."""
    monkeypatch.setattr("polyfed_sites.site.FIRST", 0)
    file, data, _ = study(tmp_path, SCAFFOLD, rounds=2, **QUIET)
    sites = Restarted(tmp_path, data)
    same(on_one_machine(file, data), at_sites(file, sites), sites)


class Killed(BaseException):
    """Nothing can be saved any more."""


def test_a_server_that_is_killed_goes_back_to_its_checkpoint_and_the_sites_with_it(tmp_path):
    file, data, sites = study(tmp_path, SCAFFOLD, rounds=6, **{"checkpoint-every": 2})

    def kill(name, question):
        if question.head.get("t") == 4 and name == "riga":
            raise Killed
        return question

    with pytest.raises(Killed):
        at_sites(file, sites, Between(sites, asked=kill))
    shutil.rmtree(sites.place / "run" / "checkpoint" / "round-00000004")  # as if it had died before this one
    there = at_sites(file, sites, resume=True)
    assert there.rounds == 6
    same(on_one_machine(file, data), there, sites)


def test_a_vault_of_another_run_or_of_other_data_is_refused(tmp_path):
    file, data, sites = study(tmp_path, SCAFFOLD)
    at_sites(file, sites)
    said = r"bern: its vault: the vault of run '[\w-]+', expected '[\w-]+'; give each run"
    with pytest.raises(PolyfedError, match=said):
        at_sites(file, Sites(tmp_path, data), out="another")
    path = data / "oslo.csv"
    path.write_text(path.read_text().replace("mild", "severe", 1))
    with pytest.raises(PolyfedError, match=r"oslo: its data have changed since the run began; restore the file"):
        at_sites(file, Sites(tmp_path, data), resume=True)


def test_a_vault_that_is_older_than_the_server_is_refused_with_what_to_do(tmp_path):
    file, data, sites = study(tmp_path, SCAFFOLD)
    lost = Direct(NAMES, lambda name, data: b"" if raw(data).head.get("t") == 2 else sites.answer(name, data))
    with pytest.raises(PolyfedError, match=r"round 2: 0 of 3 sites have answered, expected 3 \(bern: not a message"):
        at_sites(file, sites, lost)
    (tmp_path / "vaults" / "riga" / "00000001-0.safetensors").unlink()
    said = r"riga: its vault: no state of round 1, which the server builds on; it ends with round 0\. Restore"
    with pytest.raises(PolyfedError, match=said):
        at_sites(file, Sites(tmp_path, data), resume=True)


# a reply of riga's that cannot be


def put(name, t):
    return lambda reply: reply._replace(tensors=reply.tensors | {name: t})


def head(**said):
    return lambda reply: reply.saying(**said)


def filled(name, value):
    return lambda reply: put(name, torch.full_like(reply.tensors[name], value))(reply)


def less(name):
    return lambda r: r._replace(head={key: value for key, value in r.head.items() if key != name})


def do(kind, **more):
    return lambda head: head["kind"] == kind and not head.get("phase") and head.items() >= more.items()


def from_riga(sites, when, corrupt):
    def said(name, question, reply):
        return corrupt(reply) if name == "riga" and when(question.head) else reply

    return Between(sites, said)


ROUND_1, LAST_LOSS = do("train", t=1), do("evaluate", round=2)
IFCA = 'name = "ifca"\nk = 2'
NUMBERS = {
    "NaN": (SCAFFOLD, put("dw", torch.full((14,), torch.nan)), ROUND_1, "tensor 'dw' holds NaN or infinity"),
    "numbers that are too large": (
        SCAFFOLD, put("dw", torch.full((14,), 3e38)), ROUND_1, "holds numbers up to 3e.38, whose squares no float32"
    ),
    "too large": (
        SCAFFOLD, put("dw", torch.zeros(1 << 23)), ROUND_1, "not a message .*most of them 'dw', expected at most 65,"
    ),
    "a damaged head": (SCAFFOLD, head(seconds="x"), ROUND_1, "its reply is damaged"),
    "not a message": (SCAFFOLD, lambda r: r.pack()[:-3], ROUND_1, "not a message"),
    "steps": (FEDAVG, head(steps=10**30), ROUND_1, r"damaged \(steps: found 10+, expected less"),
    "seconds": (FEDAVG, head(seconds=10**400), ROUND_1, "its reply is damaged"),
    "another round's": (FEDAVG, head(t=0), ROUND_1, "it answers another message"),
    "an accuracy": (
        FEDAVG, head(metrics={"loss": 1.0, "accuracy": 17.0}), LAST_LOSS,
        "found accuracy 17, expected a number from 0 to 1",
    ),
    "a loss": (FEDAVG, head(metrics={"loss": 1e308}), LAST_LOSS, "found loss 1e.308, expected a number from 0"),
    "no metrics": (FEDAVG, lambda r: Raw({"kind": "stored"}), LAST_LOSS, "it answers another message"),
    "a cluster": (IFCA, filled("cluster", 7), ROUND_1, "found cluster 7, expected 0 to 1"),
    "a position": ('name = "fedlin"\nkeep_up = 0.5', filled("at", 10**6), ROUND_1, "are not rising ones from 0 to 13"),
    "a mask": ('name = "fedspa"', filled("mask", 255), ROUND_1, "its mask keeps 12 entries of a layer, expected 5"),
    "a mask without biases": (
        'name = "fedspa"', lambda r: put("mask", r.tensors["mask"] & torch.tensor([255, 15]).byte())(r), ROUND_1,
        "its mask lacks biases or norms",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("method", "corrupt", "when", "said"), NUMBERS.values(), ids=NUMBERS)
def test_a_reply_that_cannot_be_costs_its_site_the_round_and_nobody_the_run(method, corrupt, when, said, tmp_path):
    """The run is that of a schedule without the site in that round."""
    file, data, sites = study(tmp_path, method, rounds=2, **{"evaluate-every": 2 * (when is LAST_LOSS)})
    there = at_sites(file, sites, from_riga(sites, when, corrupt), quorum=2, wait=0.0)
    assert there.rounds == 2
    assert any(re.search(f": riga is missing: .*{said}", line) for line in sites.lines), sites.lines
    if method == SCAFFOLD:
        assert re.search(f"round 1: riga is missing: .*{said}", (sites.place / "run" / "log.txt").read_text())
        same(on_one_machine(file, data, schedule=Replay.of(there.ledger)), there, sites)


ENDLESS = {
    "kind": "arrays", "inputs": [1], "integers": False, "targets": [float("inf")], "numbers": True, "given": False
}  # fmt: skip
LESS = r"damaged \(counts\.train: found 10+, expected less than 134217728\)"
SUMS = torch.zeros(1, dtype=torch.float64)
PLAIN, BALANCED = {}, {"class-weights": "balanced"}
JOINING = {
    "no versions": (less("versions"), do("join"), PLAIN, r"its reply is damaged \(it lacks versions\)"),
    "a count": (head(counts={"train": 10**30, "test": 1}), do("join"), PLAIN, LESS),
    "rows that nobody has": (head(counts={"train": 10**12, "test": 1}), do("join"), PLAIN, LESS),
    "a schema": (head(file=ENDLESS), do("join"), PLAIN, r"targets\.0: found inf, expected a"),
    "labels": (head(rows="abc"), do("labels"), BALANCED, r"\(rows: found 'abc', expected a valid list\)"),
    "labels of others": (head(rows=[5, 5]), do("labels"), BALANCED, "by class are"),
    "other sums": (lambda r: r._replace(tensors={"x": SUMS}), do("pooled"), PLAIN, "lacks tensor 'counts'"),
    "fewer sums": (put("sums", SUMS), do("pooled", what="sums"), PLAIN, r"expected float64 \[2\]"),
    "more values than rows": (filled("n", 99), do("pooled", what="counts"), PLAIN, "its sums are damaged"),
    "squares below 0": (filled("squares", -1), do("pooled", what="squares"), PLAIN, "its sums are damaged"),
}  # fmt: skip


@pytest.mark.parametrize(("corrupt", "when", "top", "said"), JOINING.values(), ids=JOINING)
def test_a_site_that_says_what_cannot_be_before_the_first_round_is_named(corrupt, when, top, said, tmp_path):
    file, _, sites = study(tmp_path, columns=f'{POOLED}\nmissing = "median"', **top)
    with pytest.raises(PolyfedError, match=rf"\(riga: .*{said}"):
        at_sites(file, sites, from_riga(sites, when, corrupt))


def test_a_server_that_asks_for_what_a_site_does_not_know_hears_why(tmp_path):
    _, _, sites = study(tmp_path, SCAFFOLD)
    turn = {"kind": "train", "run": "x", "base": [-1, -1], "keep": [-1, -1], "t": 0, "phase": 0, "n": 3, "scale": 1.0}
    for question, said in (
        (b"nonsense", "the server: not a message"),
        ({"no": 1}, "the message is damaged (it is of kind None"),
        (turn, "its vault has no run"),
        (turn | {"t": "x"}, "damaged (t: found 'x', expected a valid integer)"),
        ({"kind": "begin"}, "the message is damaged (it lacks joined)"),
        (turn | {"format": FORMAT + 1}, f"found messages of format {FORMAT + 1}, expected {FORMAT}; install the same"),
    ):
        data = question if isinstance(question, bytes) else Raw(question).pack()
        error = raw(sites.answer("bern", data)).head["error"]
        assert said in error
        assert error.startswith("bern: ")
        assert str(tmp_path) not in error


@pytest.mark.parametrize("kind", ["train", "evaluate", "end"])
def test_a_model_of_another_shape_is_refused_before_anything_is_computed_with_it(kind, tmp_path):
    """The compiled kernel would read and write beyond it."""
    file, _, sites = study(tmp_path, rounds=1, **{"evaluate-every": 1})
    wire = Between(sites)
    at_sites(file, sites, wire)
    (sites.members.pop("riga").vault / "answered.jsonl").unlink()
    error = sites.error("riga", wire.first(kind, "riga")._replace(tensors={"w": torch.zeros(3)}))
    assert "tensor 'w' is float32 [3], expected float32 [14]" in error


@pytest.mark.parametrize("what", ["pooled", "labels", "begin"])
def test_a_site_that_is_started_again_before_the_first_round_joins_again(what, tmp_path):
    file, data, sites = study(tmp_path, columns=POOLED, rounds=1, **BALANCED)
    stopped = []

    def asked(name, question):
        if name == "riga" and what == question.head["kind"]:
            stopped.append(sites.members.pop(name))
        return question

    same(on_one_machine(file, data), at_sites(file, sites, Between(sites, asked=asked)), sites)
    assert stopped


def test_a_line_of_metrics_that_was_cut_off_is_left_out_of_the_sites_report(tmp_path):
    file, _, sites = study(tmp_path, **{"evaluate-every": 1})

    def cut(reply):
        path = sites.place / "vaults" / "riga" / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-20])
        sites.members.pop("riga")
        return reply

    at_sites(file, sites, from_riga(sites, do("evaluate", round=1, split="test"), cut))
    assert sites.members["riga"].finished
    report = (sites.place / "vaults" / "riga" / "report.md").read_text()
    assert report.count("| test |") == 3


class Last(Between):
    """The last site answers first; riga's answers in `lost` are lost. bytes: of rounds' messages, down and up"""

    def __init__(self, sites, lost, backwards=False):
        super().__init__(sites, self.weighed)
        self.lost, self.backwards, self.down, self.up = lost, backwards, {}, {}

    def weighed(self, name, question, reply):
        if question.head["kind"] != "train":
            return reply
        key = name, question.head["t"], question.head["phase"]
        self.down[key] = size(question.tensors)
        if name == "riga" and self.lost(question.head):
            return Raw({"kind": "failed", "error": "no"})
        self.up[key] = self.up.get(key, 0) + size(reply.tensors)
        return reply

    def pull(self, names, enough=None, seconds=None):
        return super().pull([*names][::-1] if self.backwards else names, enough, seconds)


def test_a_message_to_a_site_that_is_lost_weighs_what_it_does_in_either_kind_of_time(tmp_path):
    columns = f'{CLIENT}\n[schedule]\nname = "asynchronous"'
    file, _, sites = study(tmp_path, 'name = "fedbuff"', columns, rounds=4, **QUIET)
    wire = Last(sites, lambda head: head["t"] == 0, backwards=True)
    ledger = at_sites(file, sites, wire).ledger
    lost = ledger[(ledger["up_bytes"] == 0) & (ledger["round"] >= 0)]
    (weight,) = {*wire.down.values()}
    assert [(int(row["client"]), int(row["down_bytes"])) for _, row in lost.iterrows()] == [(2, weight)]


def test_replies_to_an_exchange_that_does_not_count_weigh_too(tmp_path):
    """One site is lost in the second exchange: the round is done again without it."""
    file, _, sites = study(tmp_path, 'name = "fedlin"', rounds=2, **QUIET)
    wire = Last(sites, lambda head: head["t"] == head["phase"] == 1)
    ledger = at_sites(file, sites, wire, quorum=2, wait=0.0).ledger
    billed = ledger[ledger["round"] >= 0].groupby("client")["up_bytes"].sum()
    for k, name in enumerate(NAMES):
        assert billed[k] == sum(weight for key, weight in wire.up.items() if key[0] == name)
