"""The regressions that clinical studies report, fitted across sites to the digits of a pooled fit: logistic, Poisson,
linear and stratified Cox, with standard errors, intervals, heterogeneity and the meta-analysis beside it.
"""

from polyfed_clinical.models import concordance as concordance
from polyfed_clinical.models import loss as loss
from polyfed_clinical.regression import fit as fit
from polyfed_clinical.summary import ClinicalFit as ClinicalFit
