from zlib import crc32

import pytest


@pytest.fixture(autouse=True)
def without_the_kernel(request, monkeypatch):
    """Every other certificate is shown without the kernel, so that both paths are shown at no cost."""
    if crc32(request.node.nodeid.partition("@")[0].encode()) % 2:
        monkeypatch.setenv("POLYFED_NATIVE", "0")
