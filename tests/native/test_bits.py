"""The compiled kernel's bits: they are its version's, which a run names, and change with it alone."""

import hashlib

import pytest
import torch
from test_attention import drawn as attentive
from test_channels import drawn as images
from test_kernel import BUILT, batches, needed
from test_networks import drawn as networks
from test_recurrent import drawn as recurrent

from polyfed import native
from polyfed.compute.solvers import local_sgd

# of eight cases each: what enters, which torch may draw otherwise elsewhere, and what version 11 makes of it by AVX2
BITS = {
    networks: ("0b8624dca14a", "b3b2eaa2ee0e"),
    images: ("50f7d741c1d5", "66f5bb731fcb"),
    recurrent: ("7595763ba6b0", "484e6441c88e"),
    attentive: ("02c94841e156", "aa724ea2aa86"),
}
OF_TORCH = "toward", "teacher"


@needed
@pytest.mark.parametrize(("drawn", "bits"), BITS.items(), ids=lambda x: getattr(x, "__module__", ""))
def test_bits_change_with_the_version_alone(drawn, bits, monkeypatch):
    if native.SETS.index("avx2") > native.SETS.index(BUILT.set):
        pytest.skip("needs AVX2")
    monkeypatch.setattr(BUILT, "set", "avx2")
    cases = [case for case in map(drawn, range(8)) if not case.curvature and not case.stated.keys() & OF_TORCH]
    enters, leaves = hashlib.sha256(), hashlib.sha256()
    for task, split, work, w, lr, stated, _ in cases:
        for t in (w, split.x, *(t for t in stated.values() if isinstance(t, torch.Tensor))):
            enters.update(t.numpy().tobytes())
        leaves.update(local_sgd(task, w, batches(split, work, True), lr, **stated).numpy().tobytes())
    if enters.hexdigest()[:12] != bits[0]:
        pytest.skip("torch draws other numbers here")
    assert native.VERSION == 11
    assert leaves.hexdigest()[:12] == bits[1]
