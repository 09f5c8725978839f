"""scores.safetensors: what every test sample adds to its client's metrics, and which sample it is."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import polyfed as pf
from polyfed.runs.numbers import Numbers

CLIENTS = 3


def data(seed, classes):
    """Clients of the same 20, 25 and 30 samples whatever the seed, which decides who is tested."""
    rng = np.random.default_rng(0)
    pairs = []
    for n in (20, 25, 30):
        x = rng.normal(size=(n, 4)).astype(np.float32)
        pairs.append((x, (x[:, 0] > 0).astype(int) if classes else (x[:, 0] + rng.normal(size=n)).astype(np.float32)))
    return pf.Federation.from_arrays(pairs, test_fraction=0.4, seed=seed)


def trained(folder, seed, classes, method=None, **settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2 if classes else 1)
    fed = data(seed, classes)
    settings.setdefault("loss", "cross-entropy" if classes else "mse")
    return pf.fit(model, fed, method or pf.FedAvg(lr=0.1), rounds=2, seed=seed, out=folder, **settings)


@pytest.mark.parametrize(("classes", "metrics"), [(True, ["accuracy", "auc"]), (False, ["rmse"])])
@pytest.mark.parametrize("method", [pf.FedAvg(lr=0.1), pf.Local(lr=0.1)])
def test_means_over_a_clients_samples_are_its_metrics(tmp_path, classes, metrics, method):
    run = trained(tmp_path / "run", 0, classes, method, metrics=metrics)
    scores = load_file(tmp_path / "run/scores.safetensors")
    for metric in (*metrics, "loss"):
        means = [part.mean() for part in np.split(scores[metric], np.cumsum(scores["counts"])[:-1])]
        assert means == pytest.approx(run.clients[f"test_{metric}"].tolist(), rel=1e-5)
    if classes:  # of samples, where the mean over clients is another number
        assert run.history.iloc[-1]["pooled"] == pytest.approx(scores["accuracy"].mean(), abs=1e-6)


def test_a_sample_has_one_number_under_every_seed(tmp_path):
    whole = np.concatenate([data(0, True).train.x.numpy(), data(0, True).test.x.numpy()])
    inputs = {}
    for seed in (0, 1):
        trained(tmp_path / str(seed), seed, True)
        ids = load_file(tmp_path / str(seed) / "scores.safetensors")["id"]
        for number, x in zip(ids.tolist(), data(seed, True).test.x.tolist(), strict=True):
            assert inputs.setdefault(number, x) == x
        assert ids.dtype == np.int64
    assert len(ids) < len(inputs) < len(whole)


def test_a_loss_of_ones_own_leaves_the_score(tmp_path):
    """A callable gives one number per batch; accuracy is still known per sample."""

    trained(tmp_path / "run", 0, True, loss=lambda output, target: torch.nn.functional.cross_entropy(output, target))
    scores = load_file(tmp_path / "run/scores.safetensors")
    assert scores.keys() == {"accuracy", "counts", "id", "class", "probability"}


@pytest.mark.parametrize("outputs", [2, 1])
def test_of_two_classes_the_probability_of_the_second_is_kept(tmp_path, outputs):
    """The models' own, of which the mean squared error is the Brier score."""

    def logistic(output, target):
        return torch.nn.functional.binary_cross_entropy_with_logits(output.reshape(-1), target.to(output.dtype))

    loss = "cross-entropy" if outputs == 2 else logistic
    fed = data(0, True)
    run = pf.fit(torch.nn.Linear(4, outputs), fed, pf.Local(lr=0.1), rounds=2, loss=loss, out=tmp_path / "run",
                 metrics=["brier"])  # fmt: skip
    found = Numbers.of(tmp_path / "run").probabilities
    assert list(found) == list(fed.names)
    for i, name in enumerate(fed.names):
        x, y = fed.test.client(i)
        out = run.model(i)(x).detach()
        p, true = found[name]
        expected = out.softmax(1)[:, 1] if outputs == 2 else out.sigmoid()[:, 0]
        assert p == pytest.approx(expected.numpy(), abs=1e-6)
        assert true.tolist() == (y.reshape(-1) > 0).tolist()
        assert np.mean((p - true) ** 2) == pytest.approx(run.clients["test_brier"][i], abs=1e-6)
    trained(tmp_path / "numbers", 0, False)
    assert not Numbers.of(tmp_path / "numbers").probabilities


def test_an_attacker_has_no_scores(tmp_path):
    run = trained(tmp_path / "run", 0, True, attack=pf.threats.SignFlip(ratio=0.4))
    scores = load_file(tmp_path / "run/scores.safetensors")
    parts = np.split(scores["accuracy"], np.cumsum(scores["counts"])[:-1])
    missing = [bool(np.isnan(part).all()) for part in parts]
    assert missing == run.clients["test_accuracy"].isna().tolist()
    assert 0 < sum(missing) < CLIENTS
    assert len(Numbers.of(tmp_path / "run").probabilities) == CLIENTS - sum(missing)
