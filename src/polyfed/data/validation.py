"""Validation samples of a federation that has none."""

import dataclasses

from polyfed.data.federation import LEARNT, Federation

VALIDATION = 0.2  # share of the training samples, where the federation holds out none
LEAKED = (
    "validation samples were held out after inputs had been scaled or filled in by them; "
    "partition(validation_fraction=0.2) holds them out before"
)


def validated(federation: Federation, seed: int) -> Federation:
    """A federation with validation samples: its own, or `VALIDATION` of its training samples."""
    if federation.validation is not None and len(federation.validation.x):
        return federation
    cut = dataclasses.replace(federation, validation=None).with_validation(VALIDATION, seed)
    leaked = any(key in cut.meta for key in LEARNT)  # the samples held out had a part in preparing the inputs
    return dataclasses.replace(cut, meta={**cut.meta, "notes": [*cut.notes, LEAKED]}) if leaked else cut
