"""In a limit of its settings a method is another one: the same models, of one problem and one run's work."""

import pytest
import torch
from certify import certifies
from problems import LeastSquares, balanced, fit_labels, labelled, two_layers

import polyfed as pf

LR = 0.05
PLAIN, MEAN, LOCAL = pf.FedAvg(LR, weighted=False), pf.FedAvg(LR), pf.Local(LR)
SOME = {"fraction": 0.5, "batch_size": 8}


def is_(method, other, *marks, **how):
    """A row: both are trained so; `how` may name a tensor of the server, by which they are compared."""
    return pytest.param(method, other, how, marks=marks, id=f"{method.name} is {other.name}")


@pytest.fixture(scope="module")
def problem():
    return LeastSquares(seed=3, clients=6, dim=5)


def close(a, b, common=None):
    mine, other = ((r.server[common] if common else r.personal) for r in (a, b))
    assert torch.allclose(mine, other, rtol=0, atol=1e-13)
    assert mine.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("method", "other", "how"),
    [
        is_(pf.APFL(LR, alpha=0.0), PLAIN, certifies(pf.APFL, by="identity at alpha = 0"), **SOME),
        is_(pf.APFL(LR, alpha=1.0), LOCAL, certifies(pf.APFL, by="identity at alpha = 1"), **SOME),
        is_(pf.APFL(LR, alpha=0.3, adaptive=True), PLAIN, certifies(pf.APFL, by="identity, common model"), common="w"),
        is_(pf.FedProx(LR, mu=0.0), MEAN, certifies(pf.FedProx, by="identity at mu = 0")),
        is_(pf.Ditto(LR, lam=0.0, personal_epochs=5), LOCAL, certifies(pf.Ditto, by="identity at lam = 0")),
        is_(pf.Ditto(LR, lam=1.0), MEAN, certifies(pf.Ditto, by="identity, common model"), common="w"),
        is_(pf.FedAvgFT(LR), MEAN, certifies(pf.FedAvgFT, by="identity, common model"), common="w", **SOME),
        is_(pf.FedAvgFT(LR, weighted=False), PLAIN, common="w", **SOME),
        is_(pf.FedAvgM(LR, beta=0.0), MEAN, certifies(pf.FedAvgM, by="identity at beta = 0"), **SOME),
        is_(pf.FedAvgM(LR, beta=0.0, weighted=False), PLAIN, **SOME),
        is_(pf.FedBABU(LR, head=""), MEAN, certifies(pf.FedBABU, by="identity without a head"), common="w", **SOME),
        is_(
            pf.FedRep(LR, body_epochs=3, head=""), PLAIN, certifies(pf.FedRep, by="identity without a head"),
            fraction=0.5, steps=None, local_epochs=3,
        ),
        is_(pf.FedPer(LR, head=""), PLAIN, certifies(pf.FedPer, by="identity without a head"), **SOME),
        is_(pf.PerFedAvg(LR, alpha=0.0), PLAIN, certifies(pf.PerFedAvg, by="identity at alpha = 0"), common="w"),
        is_(pf.PerFedAvg(LR, alpha=0.0, order="hf"), PLAIN, common="w"),
        is_(pf.PerFedAvg(LR, alpha=0.0, order="exact"), PLAIN, common="w"),
        is_(pf.QFedAvg(LR, q=0.0), PLAIN, certifies(pf.QFedAvg, by="identity with FedAvg at zero")),
        is_(pf.QFedAvg(LR, q=0.0, form="afl"), PLAIN),
        is_(pf.QFedAvg(LR, q=0.0, form="term"), MEAN),
        is_(pf.FedSoft(LR, lam=0.0, init_scale=1.0), LOCAL, certifies(pf.FedSoft, by="identity without a pull")),
        is_(pf.FeSEM(LR, k=1), PLAIN, certifies(pf.FeSEM, by="identities with FedAvg at one centre, with Local at n")),
        is_(pf.FeSEM(LR, k=1, weighted=True), MEAN),
        is_(pf.FeSEM(LR, k=6), LOCAL),
        is_(pf.CLoVE(LR, k=1), MEAN, certifies(pf.CLoVE, by="identity with FedAvg at k = 1"), fraction=0.5),
        is_(pf.IFCA(LR, k=1), PLAIN, certifies(pf.IFCA, by="identity at k = 1, both kinds of averaging")),
        is_(pf.IFCA(LR, k=1, averaging="gradient"), PLAIN, steps=1),
        is_(pf.HypCluster(LR, k=1), MEAN, certifies(pf.HypCluster, by="identity at k = 1")),
        is_(
            pf.HypCluster(LR, init_scale=1.0), pf.IFCA(LR, init_scale=1.0, weighted=True),
            certifies(pf.HypCluster, by="identity with IFCA"),
        ),
        is_(pf.PACFL(LR, threshold=90.0), MEAN, certifies(pf.PACFL, by="identity at a large threshold")),
        is_(pf.CFL(LR, eps2=1e6), MEAN),
        is_(pf.StoCFL(LR, tau=-1.0, mu=0.0), PLAIN, certifies(pf.StoCFL, by="identities at the ends of tau")),
        is_(pf.StoCFL(LR, tau=1.1, mu=0.0), LOCAL),
        is_(pf.FedNova(LR), MEAN, certifies(pf.FedNova, by="identity with FedAvg at equal steps")),
        is_(pf.FedFomo(LR, models=0, validation=0.0), LOCAL, certifies(pf.FedFomo, by="identity with Local")),
        is_(
            pf.FedLin(5 * LR), pf.FedTrack(LR), certifies(pf.FedLin, pf.FedTrack, by="identity without compression"),
            fraction=0.5,
        ),
        is_(pf.FedLin(5 * LR, keep_up=1.0, keep_down=1.0), pf.FedTrack(LR)),
        is_(pf.FedAsync(LR, alpha=1.0, mu=0.0), MEAN, certifies(pf.FedAsync, by="identity at alpha = 1"), fraction=0.2),
        is_(pf.FedBuff(LR, buffer=6), PLAIN, certifies(pf.FedBuff, by="identity with a cohort per buffer")),
        is_(pf.FedSpa(LR, density=1.0), PLAIN, certifies(pf.FedSpa, by="identity at density 1"), **SOME),
        is_(pf.FedSpa(LR, density=1.0, search="rsm"), PLAIN, **SOME),
        is_(pf.LPGD(LR, lam=0.0), PLAIN, certifies(pf.LPGD, by="identity at lam = 0"), fraction=0.5),
        is_(pf.GPGD(LR, lam=0.0), PLAIN, certifies(pf.GPGD, by="identity at lam = 0"), fraction=0.5),
        is_(pf.HeurFedAMP(LR, lam=0.0, self_weight=1.0), LOCAL, certifies(pf.HeurFedAMP, by="identity with Local")),
        is_(pf.FedAMP(LR, lam=0.0, sigma=1e-9), LOCAL, certifies(pf.FedAMP, by="identity as sigma falls"), rounds=3),
    ],
)  # fmt: skip
def test_a_method_in_a_limit_is_another(problem, method, other, how):
    settings = {"rounds": 5} | how
    common = settings.pop("common", None)
    close(*(problem.fit(m, **settings) for m in (method, other)), common)


ALIKE = [labelled().train.client(0)] * 3
FEDERATIONS = {
    "unlike": labelled(),
    "balanced": balanced(),
    "of two classes": balanced(classes=2),
    "alike": pf.Federation.from_arrays(ALIKE, test=ALIKE, classes=3),
}


@pytest.mark.parametrize(
    ("method", "other", "how"),
    [
        is_(pf.FedExP(LR), MEAN, certifies(pf.FedExP, by="identity of equal clients"), common="w", of="alike"),
        is_(pf.FedBN(LR), MEAN, certifies(pf.FedBN, by="identity with FedAvg of equal clients"), of="alike"),
        is_(pf.FedALA(LR), MEAN, of="alike"),
        is_(pf.FedALA(LR, eta=0.0), MEAN, certifies(pf.FedALA, by="identity with FedAvg"), common="w"),
        is_(pf.FedALA(LR, layers=""), MEAN, common="w"),
        is_(pf.FedLC(LR), MEAN, certifies(pf.FedLC, by="identity with FedAvg of equal margins"), of="balanced"),
        is_(pf.FedLC(LR, tau=0.0), MEAN),
        is_(
            pf.FedRoD(LR), MEAN, certifies(pf.FedRoD, by="identity with FedAvg of equal margins"), of="balanced",
            common="w",
        ),
        is_(pf.FedRoD(LR, gamma=0.0), MEAN, common="w"),
        is_(pf.MOON(LR, mu=5.0), MEAN, certifies(pf.MOON, by="identity with FedAvg of two equal models"), rounds=1),
        is_(pf.MOON(LR, mu=0.0), MEAN),
        is_(
            pf.FedNTD(LR), MEAN, certifies(pf.FedNTD, by="identity with FedAvg: two classes, one step, or beta = 0"),
            of="of two classes",
        ),
        is_(pf.FedNTD(LR), MEAN, local_steps=1),
        is_(pf.FedNTD(LR, beta=0.0), MEAN),
        is_(pf.FedProto(LR, lam=0.0, deployed="head"), LOCAL, certifies(pf.FedProto, by="identity without a pull")),
        is_(pf.FedTGP(LR, lam=0.0, deployed="head"), LOCAL, certifies(pf.FedTGP, by="identity without a pull")),
        is_(pf.FedGH(LR), LOCAL, certifies(pf.FedGH, by="identity with Local in the first round"), rounds=1),
        is_(
            pf.FedAS(LR, align_lr=0.0), pf.FedPer(LR), certifies(pf.FedAS, by="identity with FedPer of equal traces"),
            of="alike",
        ),
        is_(
            pf.FedPAC(LR, head_lr=LR, lam=0.0, head_epochs=2, body_epochs=3, least=0.999),
            pf.FedRep(LR, head_epochs=2, body_epochs=3),
            certifies(pf.FedPAC, by="identity with FedRep without pull and mixture"), of="balanced",
        ),
        is_(
            pf.FPFC(LR, lam=0.5, shared_layers="body head"), MEAN, certifies(pf.FPFC, by="identity, all layers shared"),
            **SOME,
        ),
        is_(pf.FPFC(LR, lam=0.5, shared_layers="body head", solver="device-dual"), MEAN, **SOME),
        is_(pf.IFCA(LR, k=3, shared_layers=("body", "head")), PLAIN, **SOME),
        is_(pf.LGFedAvg(LR, top="0 2"), PLAIN, certifies(pf.LGFedAvg, by="identity with all layers shared"), **SOME),
        is_(
            pf.FedPer(LR, head="2"), pf.LGFedAvg(LR, top="0"),
            certifies(pf.FedPer, pf.LGFedAvg, by="identity of the two that share one layer"), **SOME,
        ),
        is_(pf.Recalibrated(LR), MEAN, certifies(pf.Recalibrated, by="identity, common model"), common="w"),
        is_(pf.Recalibrated(LR, weighted=False), PLAIN, common="w"),
    ],
)  # fmt: skip
def test_a_method_of_classes_or_layers_in_a_limit_is_another(method, other, how):
    settings = {"rounds": 3, "local_steps": 4} | how
    common, fed = settings.pop("common", None), FEDERATIONS[settings.pop("of", "unlike")]
    model = two_layers(outputs=fed.classes, norm=method.name == "fedbn")
    close(*(fit_labels(fed, m, model=model, **settings) for m in (method, other)), common)


@pytest.mark.parametrize("method", [pf.FedAMP(LR), pf.HeurFedAMP(LR), pf.APPLE(LR, weight_lr=0.0), pf.FedACS(LR)])
def test_a_lone_client_trains_alone(method):
    close(*(LeastSquares(seed=2, clients=1, dim=3).fit(m, rounds=3, steps=1) for m in (method, LOCAL)))
