"""Messages as bytes: what is packed comes back, and nothing else is taken in."""

import json
import re
import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hospitals import OPEN, Between, at_sites, study

from polyfed.base.errors import RunError
from polyfed.core.messages import Form, form_of
from polyfed_sites import wire
from polyfed_sites.wire import misfit, pack, size, unpack

MOST = 1 << 20
PRIVACY = ("peer", "peers", "keys", "cohort")  # left out where replies are open


HEAD = {"kind": "train", "t": 4}


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6, dtype=torch.float64).view(2, 3), "n": torch.tensor(3), "mask": torch.ones(5) > 0}


def test_what_is_packed_comes_back_to_the_bit():
    head, found = unpack(pack(HEAD, tensors()), MOST, "oslo")
    assert head == HEAD
    assert found.keys() == tensors().keys()
    for name, t in tensors().items():
        assert torch.equal(found[name], t)
        assert found[name].dtype == t.dtype
    assert size(found) == 6 * 8 + 8 + 5
    with pytest.raises(RunError, match="expected at most 60"):  # before its numbers are read
        unpack(pack(HEAD, tensors()), 60, "oslo")
    base = torch.arange(12.0).view(3, 4)
    shown = {"row": base[1], "column": base[:, 2], "all": base.expand(2, 3, 4)}
    found = unpack(pack({}, shown), MOST, "oslo")[1]
    assert all(torch.equal(found[name], t) for name, t in shown.items()), "views are sent as what they show"


def headed(says: dict, body: bytes = b"") -> bytes:
    text = json.dumps(says).encode()
    return struct.pack("<Q", len(text)) + text + body


META = {"__metadata__": {"head": "{}"}}
BAD = {
    "nothing": b"",
    "a few bytes": b"abc",
    "a head longer than the message": struct.pack("<Q", 1 << 40) + b"{}",
    "a pickle": b"\x80\x04\x95" + bytes(40),
    "no head": headed({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "a head that is no table": headed({"__metadata__": {"head": "[1]"}}),
    "an unknown type": headed(META | {"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "more than there is": headed(META | {"w": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}),
    "bytes that belong to nothing": pack(HEAD, tensors()) + b"more",
    "a negative size": headed(META | {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
    "many dimensions": headed(META | {"w": {"dtype": "F32", "shape": [9] * 200_000, "data_offsets": [0, 4]}}, bytes(4)),
    "deep nesting": struct.pack("<Q", 100_000) + b"[" * 100_000,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_anything_else_is_refused_in_one_line_that_says_who_sent_it(data):
    with pytest.raises(RunError, match=r"^oslo: not a message \(.+\)$"):
        unpack(data, MOST, "oslo")


@pytest.mark.parametrize("seed", range(200))
def test_damaged_bytes_give_a_message_or_a_refusal(seed):
    rng = np.random.default_rng(seed)
    data = bytearray(pack(HEAD, tensors()))
    for _ in range(rng.integers(1, 4)):
        data[rng.integers(len(data))] = rng.integers(256)
    with suppress(RunError):
        assert size(unpack(bytes(data[: rng.integers(len(data) - 2, len(data) + 1)]), MOST, "oslo")[1]) <= MOST


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"v": torch.zeros(1)}, "has tensor 'v', expected mask, n, w"),
        ({"w": None}, "lacks tensor 'w'"),
        ({"w": torch.zeros(3, 2, dtype=torch.float64)}, r"'w' is float64 \[3, 2\], expected float64 \[2, 3\]"),
        ({"w": torch.zeros(2, 3)}, "'w' is float32"),
        ({"w": torch.full((2, 3), torch.nan, dtype=torch.float64)}, "'w' holds NaN or infinity"),
    ],
)
def test_a_reply_of_another_form_is_refused_by_name(change, said):
    sent = {k: t for k, t in (tensors() | change).items() if t is not None}
    assert re.search(said, misfit(sent, {k: form_of(t) for k, t in tensors().items()}))


def test_a_size_that_differs_from_message_to_message_is_bounded():
    form = {"values": Form(torch.float32, (None,), 5), "at": Form(torch.int32, (None,), 5, optional=True)}
    assert not misfit({"values": torch.zeros(4)}, form)
    assert not misfit({"values": torch.full((5,), 3e18)}, form)
    assert "numbers up to 3e+38, whose squares no float32 adds up" in misfit({"values": torch.full((5,), 3e38)}, form)
    for wrong in (torch.zeros(6), torch.zeros(2, 2), torch.zeros(4).double()):
        assert "'values' is" in misfit({"values": wrong}, form)


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """[(its reader, a message)] of all that is said in a run, one of each kind at either end."""
    place, found = tmp_path_factory.mktemp("run"), {}
    file, _, sites = study(place, 'name = "scaffold"', "", rounds=1, **{"class-weights": "balanced"})
    sites.policy, passed = replace(OPEN, audit="quantiles"), Between(sites)
    at_sites(file, sites, passed)
    for _, question, reply in passed.heard:
        found.setdefault(question.head["kind"], (wire.request, question))
        found.setdefault(reply.head["kind"], (wire.reply, reply))
    return [*found.values()]


def test_a_head_with_a_field_more_or_less_or_of_another_type_is_refused_by_name(heard):
    """In one line that says who has sent it, what was found and what was expected."""
    assert len(heard) == 16
    fields, damaged = 0, "(the message|its reply) is damaged"
    for read, whole in heard:
        assert read(whole.pack(), MOST, "oslo").head.kind == whole.head["kind"]
        for key in whole.head.keys() - {"format", "kind"}:
            fields += 1
            wrong = whole.saying(**{key: [["odd"]]})
            with pytest.raises(RunError, match=rf"^oslo: {damaged} \({key}\b.*: found.*odd.*\)$"):
                read(wrong.pack(), MOST, "oslo")
            less = whole._replace(head={k: v for k, v in whole.head.items() if k != key})
            if key not in ("aggregate", "labels", *PRIVACY):
                with pytest.raises(RunError, match=rf"^oslo: {damaged} \(it lacks {key}\)$"):
                    read(less.pack(), MOST, "oslo")
        with pytest.raises(RunError, match=r"is damaged \(it has more, which this version does not know\)$"):
            read(whole.saying(more=1).pack(), MOST, "oslo")
        with pytest.raises(RunError, match=r"is damaged \(it is of kind 'other', which this version does not know\)$"):
            read(whole.saying(kind="other").pack(), MOST, "oslo")
    assert fields > 50
