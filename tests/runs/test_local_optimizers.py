"""Local optimisers as settings of a run: the whole way from the setting to the model against torch.optim, refusals, and
where they are shown."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import polyfed as pf
from polyfed.base.errors import ConfigError, PolyfedError
from polyfed.compute.optimizers import optimizer_of
from polyfed.core.algorithm import REGISTRY
from polyfed.runs.config import resolve

rng = np.random.default_rng(4)
FED = pf.Federation.from_arrays(
    [(rng.normal(size=(n, 4)), np.arange(n) % 3) for n in (9, 14)], test=[(rng.normal(size=(3, 4)), np.arange(3))] * 2
)
LR, ROUNDS, STEPS = 0.1, 6, 3
SETTINGS = {
    "momentum:0.6": lambda q, lr: torch.optim.SGD(q, lr, momentum=0.6, weight_decay=0.1),
    "adam:beta1=0.8,beta2=0.99,eps=1e-5": lambda q, lr: torch.optim.Adam(
        q, lr, betas=(0.8, 0.99), eps=1e-5, weight_decay=0.1
    ),
    "adamw:0.8": lambda q, lr: torch.optim.AdamW(q, lr, betas=(0.8, 0.999), eps=1e-8, weight_decay=0.1),
}


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def fit(method: pf.Algorithm | None = None, **settings) -> pf.Run:
    base = {"rounds": ROUNDS, "local_steps": STEPS, "batch_size": None, "evaluate_every": 0}
    return pf.fit(net(), FED, method or pf.FedAvg(LR, weighted=False), **(base | settings))


def by_torch(make, factors=(1.0, 1.0, 1.0), clip=None):
    """FedAvg by hand: a new torch.optim at every client in every round."""
    w = parameters_to_vector(net().parameters()).detach()
    for factor in factors:
        ends = []
        for i in range(FED.n):
            module, (x, y) = net(), FED.train.client(i)
            vector_to_parameters(w.clone(), module.parameters())
            optimizer = make([*module.parameters()], LR * factor)
            for _ in range(STEPS):
                optimizer.zero_grad()
                F.cross_entropy(module(x.double()), y).backward()
                assert clip is None or clip_grad_norm_(module.parameters(), clip) > clip
                optimizer.step()
            ends.append(parameters_to_vector(module.parameters()).detach())
        w = torch.stack(ends).mean(0)
    return w


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_is_torchs_optimiser_at_every_client(name):
    """With step sizes along warm-up and cosine: pi (t - 2) / 4 in the rounds 2 to 5 is half a cosine of four rounds."""
    run = fit(optimizer=name, weight_decay=0.1, lr_schedule="cosine:6,warmup=2")
    expected = by_torch(SETTINGS[name], [0.5, 1.0, *((1 + np.cos(np.pi * k / 4)) / 2 for k in range(4))])
    assert torch.allclose(run.server["w"], expected, rtol=0, atol=1e-12)


def test_clipping_is_by_the_clients_own_norm():
    expected = by_torch(torch.optim.SGD, clip=0.2)
    assert torch.allclose(fit(clip_norm=0.2, rounds=3).server["w"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"optimizer": "adan"}, "optimizer: unknown 'adan' (did you mean 'adam'?); known: adam, adamw, momentum, sgd"),
        (
            {"optimizer": "adam:momentum=0.9"},
            "optimizer: found 'momentum=0.9' in 'adam:momentum=0.9', expected settings",
        ),
        ({"optimizer": "adam:beta1=1.0"}, "optimizer.beta1 of Adam: found '1.0', expected a number from 0 to below 1"),
        ({"clip_norm": 0}, "clip_norm: found 0, expected a number above 0"),
        (
            {"lr_schedule": "constant:-1"},
            "lr-schedule.warmup of Constant: found '-1', expected an integer of at least 0",
        ),
        (
            {"lr_schedule": "exponential"},
            "lr-schedule.factor: is missing; exponential needs a number above 0 and at mos",
        ),
        ({"lr_schedule": "cosine:8,8"}, "lr-schedule.rounds of Cosine: found 8, expected more than warmup = 8"),
        ({"rounds": 9, "lr_schedule": "cosine:8"}, "rounds: found 9, expected at most the 8 of lr-schedule"),
    ],
)
def test_refusals(settings, line):
    with pytest.raises(ConfigError) as error:
        fit(**settings)
    assert str(error.value).startswith(line)


class OwnSteps(pf.FedAvg):
    """A method of the user's whose local steps do not go through local_sgd."""

    def local_update(self, task, client, down, data, round):
        w = down["w"].clone()
        for batch in data:
            task.descend_(w[: batch.rows], batch, self.lr)
        return {}, {"w": w}


del REGISTRY["ownsteps"]


def test_a_method_that_takes_its_own_steps_is_found_out():
    """Nothing states it: a rehearsal shows that the optimiser is never asked."""
    with pytest.raises(
        PolyfedError, match=r"^optimizer: .* with ownsteps: its local steps are not those of local_sgd$"
    ):
        fit(OwnSteps(LR), optimizer="adam")
    assert torch.allclose(fit(OwnSteps(LR)).server["w"], fit(pf.FedAvg(LR)).server["w"])


def test_a_method_that_takes_plain_sgd_alone_says_so_and_why(cli):
    cli("run", "--algorithm", "fedcet", "--optimizer", "adam", "--rounds", "2", "--seeds", "1").line(
        2, "optimizer: found 'adam', expected plain sgd with fedcet"
    )
    assert REGISTRY["fedcet"].needs.plain_sgd in " ".join(cli("algorithms", "fedcet").out.split())
    assert "Any local optimiser." in cli("algorithms", "ditto").out


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ({"optimizer": "adamw", "beta1": 0.8}, {"optimizer": "adamw:beta1=0.8"}),
        ({"lr-decay": 0.9, "lr-decay-every": 2, "warmup": 1}, {"lr-schedule": "exponential:0.9,2,1"}),
        ({"lr-decay": 1.0, "warmup": 1, "cosine": 200}, {"lr-schedule": "cosine:200,1"}),
        ({"warmup": 3, "cosine": 0}, {"lr-schedule": "constant:3"}),
        ({"lr-decay": 1.0, "lr-decay-every": 5, "warmup": 0}, {}),
        ({"engine": "ray", "address": "10.0.0.1:6379"}, {"engine": "ray:10.0.0.1:6379"}),
    ],
)
def test_a_file_with_the_earlier_keys_trains_as_it_did(earlier, now, tmp_path):
    old, new = (tmp_path / name for name in ("old.toml", "new.toml"))
    for path, table in ((old, earlier), (new, now)):
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()))
    was, is_now = (resolve(path).settings for path in (old, new))
    assert (was.step_sizes, was.engine) == (is_now.step_sizes, is_now.engine)
    assert optimizer_of(was.optimizer) == optimizer_of(is_now.optimizer)
