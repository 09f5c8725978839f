"""What a method cannot be asked for is refused in one line: settings, layers that are not there, models and losses."""

import pytest
from problems import fit_labels, labelled, two_layers
from torch import nn

import polyfed as pf
from polyfed.algorithms import shipped
from polyfed.base.errors import ConfigError, ModelError
from polyfed.core.algorithm import REGISTRY
from polyfed.models.memory import Memory
from polyfed.models.mixture import Mixture


@pytest.mark.parametrize(
    ("method", "key", "settings"),
    [
        (pf.CFL, "eps1", {"eps1": -1.0}),
        (pf.CFL, "gamma_max", {"gamma_max": 1.0}),
        (pf.CFL, "linkage", {"linkage": "ward"}),
        (pf.CFL, "min_size", {"min_size": 1}),
        (pf.FedBABU, "tune", {"tune": "neck"}),
        (pf.FPFC, "rho", {"rho": 0.37}),
        (pf.FPFC, "rho", {"rho": 0.5, "a": 3.0}),
        (pf.FPFC, "lam", {"lam": 1e-5}),
        (pf.FPFC, "lam", {"lam": 1e-4}),
        (pf.FPFC, "lam", {"lam": -1.0}),
        (pf.FPFC, "penalty", {"penalty": "l2"}),
        (pf.FPFC, "solver", {"solver": "dual"}),
        (pf.FPFC, "xi", {"solver": "device-dual", "xi": 0.0}),
        (pf.IFCA, "k", {"k": 0}),
        (pf.IFCA, "init_scale", {"init_scale": 0.0}),
        (pf.IFCA, "averaging", {"averaging": "median"}),
        (pf.PACFL, "basis", {"basis": 0}),
        (pf.PACFL, "threshold", {"threshold": -1.0}),
        (pf.PACFL, "angle", {"angle": "largest"}),
        (pf.PACFL, "linkage", {"linkage": "ward"}),
    ],
)
def test_settings_that_make_no_sense_are_named(method, key, settings):
    with pytest.raises(ConfigError, match=f"algorithm.{key} of {method.__name__}: found"):
        method(**settings)


@pytest.mark.parametrize(("lr", "lam"), [(0.25, 4.0), (0.1, 15.0), (1.0, 2.0)])
def test_a_step_of_pfedme_that_reaches_the_personal_model(lr, lam):
    """1 - lr lam is what is left of w_i - theta_i: nothing at 1, the other side of theta_i beyond."""
    line = rf"algorithm.lr of PFedMe: found {lr}, expected a number below 1 / lam = {1 / lam:.4g}"
    with pytest.raises(ConfigError, match=line):
        pf.PFedMe(lr, lam=lam)
    assert pf.PFedMe(0.99 / lam, lam=lam).lr < lr


@pytest.mark.parametrize(
    ("method", "key"),
    [(pf.FPFC, "shared_layers"), (pf.FedPer, "head"), (pf.FedBABU, "head"), (pf.IFCA, "shared_layers")],
)
def test_an_unknown_layer_is_named(method, key):
    with pytest.raises(ConfigError, match="no layer 'conv9'"):
        fit_labels(labelled(), method(**{key: ("conv9",) if method is pf.IFCA else "conv9"}), 1)


ON_FEATURES = (pf.FedProto, pf.MOON, pf.FedNTD, pf.FedDBE, pf.FedAS, pf.FedPAC, pf.FedLC, pf.FedRoD)
MIXTURE, SHARED = (Mixture(*(nn.Linear(4, 3) for _ in range(2)), classes=classes).double() for classes in (None, 3))
MEMORY = Memory(two_layers(), rows=40, k=3).double()
NO_BIAS = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False)).double()
SQUASHED = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()


def squares(output, target):
    return output.square().mean()


@pytest.mark.parametrize(
    ("method", "model", "loss", "line"),
    [
        *((m(), SQUASHED, "cross-entropy", "its last layer is Tanh") for m in ON_FEATURES),
        *((m(), NO_BIAS, "cross-entropy", "expected a trained linear layer with a bias") for m in ON_FEATURES),
        (pf.FedEM(), two_layers(), "cross-entropy", "found no mixture, expected one for fedem to train"),
        (pf.FedEM(), SHARED, "cross-entropy", "found no mixture.*for fedem to train"),
        (pf.FedRC(), MIXTURE, "cross-entropy", "found no mixture.*for fedrc to train"),
        (pf.FedEM(), MIXTURE, squares, "expects: it mixes probabilities of classes"),
        (pf.KNNPer(), two_layers(), "cross-entropy", "found no memory, expected one for knn-per to fill"),
        (pf.KNNPer(), MEMORY, squares, "expects: it mixes probabilities of classes"),
        (pf.Recalibrated(), NO_BIAS, "cross-entropy", "recalibrated: the model's last layer has no bias"),
        (pf.Recalibrated(), SQUASHED, "cross-entropy", "outputs do not move with the bias of the model's last layer"),
        (pf.Recalibrated(), two_layers(), squares, "knows the losses cross-entropy and mse, found squares"),
    ],
)  # fmt: skip
def test_a_model_or_loss_that_a_method_cannot_train_is_refused(method, model, loss, line):
    with pytest.raises(ModelError, match=line):
        fit_labels(labelled(), method, 1, model, loss=loss)


def numbers():
    """Three clients whose targets are numbers."""
    data = [(x.numpy(), x[:, 0].numpy()) for x, _ in map(labelled().train.client, range(3))]
    return pf.Federation.from_arrays(data, test=data)


def one_number():
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double()


@pytest.mark.parametrize("method", [pf.FedLC(), pf.FedRoD(), pf.FedAS(), pf.FedGH()])
def test_margins_and_centres_are_of_classes(method):
    with pytest.raises(ModelError, match="loss: found mse, expected cross-entropy"):
        fit_labels(numbers(), method, model=one_number(), loss="mse")


@pytest.mark.parametrize("name", shipped())
def test_numbers_are_trained_on_or_refused_before_anything_is_written(name, tmp_path):
    out = tmp_path / "run"
    try:
        fit_labels(numbers(), REGISTRY[name](), 1, model=one_number(), loss="mse", out=out)
    except (ConfigError, ModelError):
        assert not out.exists()


def test_a_mixture_has_a_net_and_a_memory_a_linear_end():
    with pytest.raises(ModelError, match="found no net"):
        Mixture()
    with pytest.raises(ModelError, match="ends in ReLU, expected Linear"):
        Memory(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), 5)


@pytest.mark.parametrize("method", [pf.FedPer(), pf.FedRep(), pf.FedBABU(), pf.LGFedAvg(top="")], ids=lambda m: m.name)
def test_sharing_nothing_is_refused_before_training(method, tmp_path):
    with pytest.raises(ConfigError, match=r"would share nothing .*\(weight, bias\) stays with the client"):
        fit_labels(labelled(), method, 1, nn.Linear(4, 3).double(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
