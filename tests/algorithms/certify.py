"""The mark of a certificate: a test that proves methods right, independently of their code."""

import pytest

from polyfed.core.algorithm import REGISTRY, Contender


def certifies(*methods: type[Contender], by: str):
    """Mark a test. by: what it compares with, such as "the centralised optimum"

    `python tools/certificates.py` then writes src/polyfed/certificates.json anew, from which `polyfed algorithms` and
    the pages of the methods show it. `pytest -m certifies` runs all certificates."""
    assert methods
    assert all(REGISTRY[m.name] is m for m in methods)
    return pytest.mark.certifies(*methods, by=by)
