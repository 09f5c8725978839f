"""Settings typed on the command line: `--set key=value`, methods, delays and augmentations as text."""

from hypothesis import given
from hypothesis import strategies as st

import polyfed as pf
from fuzz import HOSTILE, bounded, survives
from polyfed.base.text import parse, value_of
from polyfed.compute.augment import steps_of
from polyfed.core.schedule import Delays
from polyfed.data.partition import PARTITIONERS
from polyfed.runs.config import assign, resolve

KEYS = [
    "rounds", "seeds", "seed", "fraction", "batch-size", "local-steps", "workers", "weight-decay", "loss", "algorithms",
    "attack", "attack.name", "attack.scale", "robust.name", "schedule.name", "schedule.delays", "data", "data.dir",
    "data.options.x", "model.file", "model.hidden", "algorithm.name", "algorithm.lr", "algorithm.file", "", ".",
    "a.b.c.d.e.f", "x\0y",
]  # fmt: skip
TEXTS = st.one_of(
    HOSTILE.map(str),
    st.sampled_from(
        ["[" * 2000, "{a=" * 500, "9" * 5000, "'''", '"\\ud800"', "2020-01-01", "1_000", "0x" + "f" * 300, "nan"]
    ),
    st.text(alphabet="[]{}=,.'\"\\\n\0 19aex-+:", max_size=30),
)


@given(st.sampled_from(KEYS), TEXTS)
@bounded(300)
def test_set(key, text):
    def attempt():
        command: dict = {}
        assign(command, f"{key}={text}")
        resolve(None, command)

    survives((key, text), attempt)


HEADS = ["", "fedavg:", "ditto:lam=", "flip:", "crop:", "uniform:", "log-normal:1,", "iid+label-swap:"]
HEADS += [f"{word}:" for word in PARTITIONERS]


@given(TEXTS, st.sampled_from(HEADS))
@bounded(200)
def test_the_one_grammar(text, head):
    whole = head + text
    survives(whole, lambda: value_of(text))
    survives(whole, lambda: parse(whole, "value"))
    survives(whole, lambda: steps_of(whole))
    survives(whole, lambda: pf.data.parse(whole))
    survives(whole, lambda: Delays.from_text(whole, ()))
    survives(whole, lambda: resolve(None, {}, [whole]))


@given(st.text(max_size=20), st.lists(st.text(alphabet="abc123", min_size=1), max_size=3), st.text(alphabet="xyz"))
@bounded(100)
def test_what_is_written_is_read(name, values, key):
    """name:value,...,key=value comes back as its parts."""
    name = name.replace(":", "").replace("\0", "").replace("[", "").replace("{", "")
    text = f"{name}:{','.join(values)}" + (f",{key}=1" if key else "")
    assert parse(text, "value") == (name.strip(), values, {key: "1"} if key else {})
