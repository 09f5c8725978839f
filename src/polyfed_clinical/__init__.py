"""The regressions that clinical studies report, fitted across sites to the digits of a pooled fit: logistic, Poisson,
linear and stratified Cox, with standard errors, intervals, heterogeneity and the meta-analysis beside it.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from polyfed_clinical.models import concordance as concordance
    from polyfed_clinical.models import loss as loss
    from polyfed_clinical.regression import fit as fit
    from polyfed_clinical.summary import ClinicalFit as ClinicalFit

_HOMES = {"concordance": "models", "loss": "models", "fit": "regression", "ClinicalFit": "summary"}
__all__ = ["ClinicalFit", "concordance", "fit", "loss"]


def __getattr__(name: str) -> _Any:  # late, so that `polyfed --help`, which lists our command, does not wait
    if name not in _HOMES:
        raise AttributeError(f"module 'polyfed_clinical' has no attribute {name!r}")
    return getattr(_import_module(f"polyfed_clinical.{_HOMES[name]}"), name)
