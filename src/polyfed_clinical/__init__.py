"""The regressions that clinical studies report, fitted across sites to the digits of a pooled fit: logistic, Poisson,
linear and stratified Cox, with standard errors, intervals, heterogeneity and the meta-analysis beside it.
"""

from typing import TYPE_CHECKING
from typing import Any as _Any

from polyfed.base.lazy import attribute as _attribute
from polyfed.base.lazy import homes as _homes

if TYPE_CHECKING:
    from polyfed_clinical.models import concordance as concordance
    from polyfed_clinical.models import loss as loss
    from polyfed_clinical.regression import fit as fit
    from polyfed_clinical.summary import ClinicalFit as ClinicalFit

_HOMES = _homes(__file__)
__all__ = ["ClinicalFit", "concordance", "fit", "loss"]


def __getattr__(name: str) -> _Any:  # late, so that `polyfed --help`, which lists our command, does not wait
    return _attribute(__name__, _HOMES, name)
