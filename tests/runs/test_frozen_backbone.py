"""Runs on kept features: the same numbers as through the backbone, which is run once."""

import copy
import shutil
from collections import OrderedDict

import numpy as np
import pytest
import torch
from elsewhere import DEVICE, Elsewhere
from safetensors.torch import load_file
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed.compute.batches import Batch
from polyfed.compute.task import Task
from polyfed.core.worker import Worker
from polyfed.runs import features, trainer

RNG = np.random.default_rng(0)
X = torch.as_tensor(RNG.normal(size=(5, 4)))
FED = pf.Federation.from_arrays([(RNG.normal(size=(30, 4)), np.arange(30) % 3) for _ in range(4)])


class Counting(nn.Sequential):
    """A backbone that counts the samples it has seen."""

    seen = 0

    def forward(self, x):
        type(self).seen += len(x)
        return super().forward(x)


def model() -> nn.Module:
    torch.manual_seed(0)
    body = Counting(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).requires_grad_(False)
    return nn.Sequential(OrderedDict(backbone=body, relu=nn.ReLU(), head=nn.Linear(5, 3))).double()


def run(method=None, **settings):
    method = method or pf.FedAvg(lr=0.1)
    return pf.fit(model(), FED, method, **{"rounds": 4, "batch_size": 8, "dtype": torch.float64, **settings})


METHODS = (pf.FedAvg(lr=0.1), pf.Scaffold(lr=0.1), pf.Ditto(lr=0.1), pf.FedCET(), pf.FPFC())


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_heads_are_those_of_the_frozen_backbone(method, monkeypatch):
    kept = run(method)
    monkeypatch.setattr(trainer, "kept", lambda *_: None)
    whole = run(method)
    assert torch.allclose(kept.personal, whole.personal, rtol=0, atol=1e-12)
    for split in ("train", "test"):
        assert np.allclose(kept.final[split]["loss"], whole.final[split]["loss"], rtol=1e-10)
    assert kept.ledger["up_bytes"].sum() == whole.ledger["up_bytes"].sum()


def test_rounds_and_evaluations_do_not_run_the_backbone():
    seen = []
    for rounds in (1, 20):
        features._loaded.clear()
        Counting.seen = 0
        run(rounds=rounds, evaluate_every=1)
        seen.append(Counting.seen)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("method", METHODS[:3:2], ids=lambda m: m.name)
def test_on_a_device_features_are_made_once_and_training_waits_for_nothing(method, monkeypatch, tmp_path):
    """In blocks there, by one thread; the models are the processor's, from memory and from files."""
    expected, chunk = run(method), Worker._chunk
    monkeypatch.setattr(trainer, "pick_device", lambda _: DEVICE)
    monkeypatch.setattr(features, "cores", lambda: 8)
    seen = []
    for rounds, out, most in ((1, None, 1 << 28), (4, None, 1 << 28), (4, tmp_path / "run", 0)):
        monkeypatch.setattr(features, "MAPPED", most)
        features._loaded.clear()
        Counting.seen = 0
        with Elsewhere() as device:

            def strict(self, *args, device=device, **kwargs):
                device.strict = True
                made = chunk(self, *args, **kwargs)
                device.strict = False
                return made

            monkeypatch.setattr(Worker, "_chunk", strict)
            found = run(method, device="cuda", rounds=rounds, out=out, evaluate_every=1)
            assert found.trained.task.device == DEVICE
            models = found.personal.held
        seen.append(Counting.seen)
        if rounds == 4:
            torch.testing.assert_close(models, expected.personal, rtol=0, atol=1e-12)
    features._loaded.clear()
    assert len({*seen}) == 1


def test_a_run_beside_it_has_the_same_files_and_a_resumed_one_goes_on(tmp_path):
    whole = run(out=tmp_path / "whole")
    features._loaded.clear()
    run(out=tmp_path / "part", rounds=2)
    again = run(out=tmp_path / "part", resume=True)
    assert torch.equal(again.personal, whole.personal)
    files = [tmp_path / "whole" / "fixed.safetensors", *(tmp_path / "whole").glob("features/*.npy")]
    assert len(files) > 1
    assert all(file.samefile(tmp_path / "part" / file.relative_to(tmp_path / "whole")) for file in files)


def test_large_features_stay_in_their_file(monkeypatch, tmp_path):
    features._loaded.clear()
    monkeypatch.setattr(features, "MAPPED", 0)
    for out in (None, tmp_path / "run"):
        found = run(out=out)
        features._loaded.clear()
        monkeypatch.setattr(features, "MAPPED", 1 << 28)
        assert torch.equal(found.personal, run().personal)


def test_augmentation_of_samples_whose_features_are_kept_is_refused():
    """Not of a model whose lowest layer is trained."""
    images = pf.Federation.from_arrays([(RNG.normal(size=(8, 1, 4, 4)).astype(np.float32), np.arange(8) % 2)] * 2)
    below, head = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()).requires_grad_(False), nn.Linear(8, 2)
    for augment, found in (("flip", "flip"), (lambda x, draws: x, "a function")):
        with pytest.raises(ConfigError, match=f"augment: found {found} with nothing trained below '1', so that one"):
            pf.fit(nn.Sequential(below, head), images, pf.FedAvg(), rounds=1, augment=augment)
    below[0].requires_grad_(True)
    pf.fit(nn.Sequential(below, head), images, pf.FedAvg(), rounds=1, augment="flip")


FOLLOWED = {"one by one": (False, False), "vmapped": (True, False), "grouped": (True, True)}


@pytest.mark.parametrize(("together", "grouped"), FOLLOWED.values(), ids=FOLLOWED)
def test_a_module_of_which_nothing_is_trained_drops_nothing_and_any_other_does(together, grouped):
    """The rule of dropout, whichever way a step is taken and in whatever mode the model was handed over."""

    def gradient(frozen: float, trained: float, train: bool) -> torch.Tensor:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 6), nn.Dropout(frozen), nn.Sequential(nn.Dropout(frozen), nn.Linear(6, 6)))
        block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(trained), nn.Linear(6, 6).requires_grad_(False))
        task = Task(nn.Sequential(body.requires_grad_(False), block, nn.Tanh(), nn.Linear(6, 3)).double().train(train))
        task.net.stacked, task.net.vectorised, task.net.grouped = None, together, grouped
        x, y = X.expand(2, -1, -1), torch.arange(5).expand(2, -1) % 3
        return task.gradient(task.w0.expand(2, -1), Batch(x, y, seed=lambda: np.arange(2, dtype=np.uint64)))[0]

    for train in (True, False):
        assert torch.equal(gradient(0.5, 0.0, train), gradient(0.0, 0.0, train))
        assert not torch.allclose(gradient(0.0, 0.5, train), gradient(0.0, 0.0, train))
        assert torch.equal(gradient(0.0, 0.5, train), gradient(0.0, 0.5, not train))


@pytest.mark.parametrize("words", ["probe", "lora:r=2", "lora:r=2,train=factors"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_in_memory_and_computes_as_if_widened(words, half, tmp_path):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Linear(4, 8), nn.Tanh(), encoder, nn.Flatten(), nn.Linear(8, 3))
    narrow = pf.models.adapted(net.to(half), words)
    wide = copy.deepcopy(narrow).float()
    runs = [pf.fit(m, FED, pf.Ditto(lr=0.1), rounds=2, out=tmp_path / str(i)) for i, m in enumerate((narrow, wide))]
    assert torch.equal(runs[0].personal, runs[1].personal)
    assert np.array_equal(runs[0].clients["test_loss"], runs[1].clients["test_loss"])
    kept = [{name: t.dtype for name, t in run.trained.task.net.fixed.items()} for run in runs]
    assert kept[0]["1.base.weight" if "lora" in words else "1.weight"] == half
    sizes = [(tmp_path / str(i) / "fixed.safetensors").stat().st_size for i in range(2)]
    assert sizes[0] < sizes[1]
    with torch.no_grad():
        outs = [pf.models.merged(run.model(1)).eval()(X.float()) for run in runs]
    assert torch.allclose(*outs, rtol=0, atol=1e-5)


def test_exports_share_one_file_of_the_backbone(tmp_path):
    found = run(out=tmp_path / "run")
    paths = [found.export(i, tmp_path / "home" / f"{i}.safetensors")[0] for i in range(4)]
    (shared,) = (tmp_path / "home").glob("backbone-*.safetensors")
    assert (tmp_path / "run" / "fixed.safetensors").samefile(shared)
    assert all(load_file(path).keys() == {"head.weight", "head.bias"} for path in paths)
    whole = model()
    whole.load_state_dict(load_file(shared) | load_file(paths[2]))
    assert torch.equal(whole(X), found.model(2)(X))


@pytest.mark.parametrize(
    "wrong", ["a row short", "a row long", "a feature short", "another type", "one axis", "cut", "text", "empty"]
)
def test_whatever_lies_under_a_features_name_the_run_is_the_same(wrong, tmp_path):
    """What is not such a file is made anew, of each split by itself, and not taken from a folder beside it."""
    right = run(out=tmp_path / "right")
    for path in sorted((tmp_path / "right/features").glob("*.npy")):
        shutil.rmtree(tmp_path / "wrong", ignore_errors=True)
        place = tmp_path / "wrong" / "features"
        place.mkdir(parents=True)
        whole = np.load(path)
        given = {
            "a row short": whole[:-1], "a row long": np.concatenate([whole, whole[:1]]),
            "a feature short": whole[:, :-1],
            "another type": whole.astype(np.float32), "one axis": whole.ravel(),
        }  # fmt: skip
        if wrong in given:
            np.save(place / path.name, given[wrong])
        else:
            data = path.read_bytes()
            (place / path.name).write_bytes({"cut": data[: len(data) // 2], "text": b"features", "empty": b""}[wrong])
        for out in (tmp_path / "beside", place.parent):
            features._loaded.clear()
            assert torch.equal(run(out=out).personal, right.personal)
            assert np.array_equal(np.load(out / "features" / path.name), whole)
            shutil.rmtree(tmp_path / "beside", ignore_errors=True)
