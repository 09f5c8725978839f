"""Experiment files with plausible and hostile values: they resolve, build and train a round, or are refused."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import polyfed as pf
import polyfed.algorithms
from fuzz import HOSTILE, METHODS, bounded, survives
from polyfed.base.settings import kebab, settings_of, types_of
from polyfed.core.algorithm import REGISTRY
from polyfed.models import MODELS, options
from polyfed.runs.build import Parts
from polyfed.runs.config import Data, Settings, resolve
from polyfed_threats import ATTACKS, RULES

SCHEDULES = ["uniform", "bernoulli", "asynchronous", "other"]
DELAYS = ["uniform", "uniform:0,1", "uniform:2,1", "uniform:a,b", "log-normal:1,0.5", "log-normal:1e9,101", "file:x"]
STEPS = ["ceil(k/2)", [1, 2], {"cleveland": 3}]
AUGMENT = ["flip", "crop:1", "flip+crop:4,p=0.5", "crop:-1", "flip:2", "flip,p=1,p=1"]
MODEL_KEYS = sorted({key for name in MODELS for key in options(name)} | {"hiden", "file"})


def of_class(table, keys):
    """A table with some of its keys, each plausible or hostile."""
    return st.fixed_dictionaries(table, optional={kebab(key): HOSTILE for key in keys})


def named(registry):
    keys = sorted({s.name for cls in registry.values() for s in settings_of(cls)})
    return of_class({"name": st.sampled_from([*registry, "other"])}, keys)


PLAUSIBLE = {
    "rounds": st.integers(0, 1), "local-epochs": st.integers(1, 2), "batch-size": st.sampled_from([1, 32, "full"]),
    "local-steps": st.sampled_from([1, 2, *STEPS]), "augment": st.sampled_from(AUGMENT), "attack": named(ATTACKS),
    "robust": named(RULES), "dtype": st.sampled_from(["float32", "float64"]), "fraction": st.floats(0.1, 1),
    "schedule": of_class({"name": st.sampled_from(SCHEDULES)}, ["probability", "concurrency", "fraction"]).flatmap(
        lambda table: st.sampled_from([table, *({**table, "delays": text} for text in DELAYS)])
    ),
}  # fmt: skip
TOP = [kebab(key) for key in types_of(Settings) if key not in ("device", "workers")]
DATA = [kebab(key) for key in types_of(Data)]


@st.composite
def tables(draw):
    """A configuration with one to four keys that matter."""
    out = {"rounds": 1}
    for key in draw(st.lists(st.sampled_from(TOP), max_size=2, unique=True)):
        out[key] = draw(st.one_of(PLAUSIBLE.get(key, HOSTILE), HOSTILE))
    name = draw(st.sampled_from(METHODS))
    keys = [s.name for s in settings_of(REGISTRY[name])]
    out["algorithm"] = {"name": name} | draw(of_class({}, draw(st.lists(st.sampled_from(keys), max_size=2))))
    if draw(st.integers(0, 3)) == 0:
        out["data"] = draw(of_class({}, draw(st.lists(st.sampled_from(DATA), max_size=2))))
    if draw(st.integers(0, 3)) == 0:
        name = {"name": st.sampled_from([*MODELS, "other"])}
        out["model"] = draw(of_class(name, draw(st.lists(st.sampled_from(MODEL_KEYS), max_size=2))))
    return out


def long_work(table) -> bool:
    """Whether training is asked to take long, which it then rightly does."""
    counts = (table.get("rounds"), table.get("local-epochs"), table.get("local-steps"), *table["algorithm"].values())
    return any(isinstance(v, int) and not isinstance(v, bool) and 20 < v <= 10**9 for v in counts)


def trained(table) -> None:
    experiment = resolve(None, table)
    parts = Parts(experiment)
    seed, changed = experiment.seeds[0], {"workers": 1}
    if long_work(table) or experiment.settings.rounds > 2:
        changed["rounds"] = 0  # all is checked and set up, and nothing trained
    method = parts.experiment.methods[0].algorithm
    pf.fit(parts.model(seed), parts.federation(seed), method, parts.training(seed), **changed)


@given(tables())
@bounded(100)
def test_configurations(table):
    with np.errstate(all="ignore"):
        survives(table, lambda: trained(table))
