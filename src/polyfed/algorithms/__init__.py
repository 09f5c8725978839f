"""One paper, one file. A method is registered when its file is imported: when it or its class is asked for by name."""

from typing import TYPE_CHECKING, Any

from polyfed.base.lazy import attribute, homes
from polyfed.core.algorithm import REGISTRY

if TYPE_CHECKING:
    from polyfed.algorithms.apfl import APFL as APFL
    from polyfed.algorithms.apple import APPLE as APPLE
    from polyfed.algorithms.cfl import CFL as CFL
    from polyfed.algorithms.ditto import Ditto as Ditto
    from polyfed.algorithms.fedacs import FedACS as FedACS
    from polyfed.algorithms.fedala import FedALA as FedALA
    from polyfed.algorithms.fedamp import FedAMP as FedAMP
    from polyfed.algorithms.fedamp import HeurFedAMP as HeurFedAMP
    from polyfed.algorithms.fedas import FedAS as FedAS
    from polyfed.algorithms.fedasync import FedAsync as FedAsync
    from polyfed.algorithms.fedavg import FedAvg as FedAvg
    from polyfed.algorithms.fedavgft import FedAvgFT as FedAvgFT
    from polyfed.algorithms.fedavgm import FedAvgM as FedAvgM
    from polyfed.algorithms.fedbabu import FedBABU as FedBABU
    from polyfed.algorithms.fedbn import FedBN as FedBN
    from polyfed.algorithms.fedbuff import FedBuff as FedBuff
    from polyfed.algorithms.fedcet import FedCET as FedCET
    from polyfed.algorithms.feddbe import FedDBE as FedDBE
    from polyfed.algorithms.feddyn import FedDyn as FedDyn
    from polyfed.algorithms.fedem import FedEM as FedEM
    from polyfed.algorithms.fedexp import FedExP as FedExP
    from polyfed.algorithms.fedfomo import FedFomo as FedFomo
    from polyfed.algorithms.fedgh import FedGH as FedGH
    from polyfed.algorithms.fedlc import FedLC as FedLC
    from polyfed.algorithms.fedlin import FedLin as FedLin
    from polyfed.algorithms.fednova import FedNova as FedNova
    from polyfed.algorithms.fedntd import FedNTD as FedNTD
    from polyfed.algorithms.fedopt import FedAdagrad as FedAdagrad
    from polyfed.algorithms.fedopt import FedAdam as FedAdam
    from polyfed.algorithms.fedopt import FedYogi as FedYogi
    from polyfed.algorithms.fedpac import FedPAC as FedPAC
    from polyfed.algorithms.fedper import FedPer as FedPer
    from polyfed.algorithms.fedproto import FedProto as FedProto
    from polyfed.algorithms.fedprox import FedProx as FedProx
    from polyfed.algorithms.fedrc import FedRC as FedRC
    from polyfed.algorithms.fedrep import FedRep as FedRep
    from polyfed.algorithms.fedrod import FedRoD as FedRoD
    from polyfed.algorithms.fedslr import FedSLR as FedSLR
    from polyfed.algorithms.fedsoft import FedSoft as FedSoft
    from polyfed.algorithms.fedspa import FedSpa as FedSpa
    from polyfed.algorithms.fedtgp import FedTGP as FedTGP
    from polyfed.algorithms.fedtrack import FedTrack as FedTrack
    from polyfed.algorithms.fesem import FeSEM as FeSEM
    from polyfed.algorithms.flexcfl import FlexCFL as FlexCFL
    from polyfed.algorithms.fpfc import FPFC as FPFC
    from polyfed.algorithms.gpgd import GPGD as GPGD
    from polyfed.algorithms.hypcluster import HypCluster as HypCluster
    from polyfed.algorithms.ifca import IFCA as IFCA
    from polyfed.algorithms.knnper import KNNPer as KNNPer
    from polyfed.algorithms.lgfedavg import LGFedAvg as LGFedAvg
    from polyfed.algorithms.local import Local as Local
    from polyfed.algorithms.lpgd import LPGD as LPGD
    from polyfed.algorithms.moon import MOON as MOON
    from polyfed.algorithms.pacfl import PACFL as PACFL
    from polyfed.algorithms.perfedavg import PerFedAvg as PerFedAvg
    from polyfed.algorithms.pfedhn import PFedHN as PFedHN
    from polyfed.algorithms.pfedme import PFedMe as PFedMe
    from polyfed.algorithms.qfedavg import QFedAvg as QFedAvg
    from polyfed.algorithms.recalibrated import Recalibrated as Recalibrated
    from polyfed.algorithms.scaffold import Scaffold as Scaffold
    from polyfed.algorithms.stocfl import StoCFL as StoCFL
    from polyfed_adapters.feddpa import FedDPA as FedDPA
    from polyfed_adapters.fedexlora import FedExLoRA as FedExLoRA
    from polyfed_adapters.fedrpca import FedRPCA as FedRPCA
    from polyfed_adapters.fedsalora import FedSALoRA as FedSALoRA
    from polyfed_adapters.ffalora import FFALoRA as FFALoRA
    from polyfed_adapters.flexlora import FlexLoRA as FlexLoRA
    from polyfed_adapters.flora import FLoRA as FLoRA
    from polyfed_adapters.hetlora import HetLoRA as HetLoRA
    from polyfed_adapters.rolora import RoLoRA as RoLoRA
    from polyfed_exact.compressedscaffnew import CompressedScaffnew as CompressedScaffnew
    from polyfed_exact.gradskip import GradSkip as GradSkip
    from polyfed_exact.led import LED as LED
    from polyfed_exact.locodl import LoCoDL as LoCoDL
    from polyfed_exact.scafflix import Scafflix as Scafflix
    from polyfed_exact.scaffnew import Scaffnew as Scaffnew
    from polyfed_exact.tamuna import TAMUNA as TAMUNA
    from polyfed_groups.clove import CLoVE as CLoVE
    from polyfed_groups.pfedgraph import PFedGraph as PFedGraph
    from polyfed_groups.srfca import SRFCA as SRFCA

_HOMES = homes(__file__)
__all__ = sorted(_HOMES)
REGISTRY.offer({name.lower(): module for name, module in _HOMES.items()})


def shipped() -> dict[str, Any]:
    """The methods that come with polyfed, by name; those of a package beside it that is missing are left out."""
    return {
        name: cls for name, cls in sorted(REGISTRY.items()) if cls.__module__.startswith(_HOMES.get(cls.__name__, "-"))
    }


def __getattr__(name: str) -> Any:
    return attribute(__name__, _HOMES, name)
