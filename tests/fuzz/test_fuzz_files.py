"""Damaged data files, thousands of kinds: every reader gives data that are sound, or one line that names the file."""

import gzip
import io
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.io import savemat

from fuzz import bounded
from polyfed import Federation
from polyfed.base.errors import DataError
from polyfed.data import readers

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 3)), np.arange(12) % 3
IDX = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (5, 4, 4)) + bytes(range(80))
CIFAR = np.concatenate([np.array([[1], [9]], np.uint8), RNG.integers(0, 256, (2, 3072), np.uint8)], 1).tobytes()
CSV = ("a,b,c\n" + "".join(f"{a:.3f},{b:.3f},{y}\n" for (a, b, _), y in zip(X, Y, strict=True))).encode()


def npz(compressed):
    out = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(out, x=X, y=Y, x_test=X[:4], y_test=Y[:4])
    return out.getvalue()


def mat():
    out, cells = io.BytesIO(), np.empty((2, 2), dtype=object)
    cells[:] = [[X, Y], [X[:4], Y[:4]]]
    savemat(out, {"x": X, "dataset": cells})
    return out.getvalue()


def rezipped(draw):
    """The npz with damaged members under a directory that is right about them, as its CRC would hide them."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(npz(False))) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        hit = draw(st.sampled_from(old.namelist()))
        for name in old.namelist():
            new.writestr(name, damaged(draw, old.read(name)) if name == hit else old.read(name))
    return out.getvalue()


WORDS = [
    b"nan", b"inf", b"-1", b"1e400", b"9" * 400, b"1_0", b'"', b"\n", b"\r", b",", b"\0", b"((((", b"'|O8'", b"(-1,)",
    b"9" * 11, b"[[[[", b"\xff\xff\xff\xff", b"\x93NUMPY", b"PK\x03\x04", b"\x1f\x8b\x08", b"=1+1", b"\xe2\x80\xa8",
]  # fmt: skip


def damaged(draw, raw):
    """`raw` with bytes changed, removed, repeated or put in."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        at = min(at, draw(st.sampled_from([at, 160])))  # headers come first
        kind = draw(st.sampled_from(["flip", "cut", "drop", "insert", "repeat", "word"]))
        if kind == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 20))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif kind == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 64))] * draw(st.integers(1, 50))
        else:
            data[at:at] = draw(st.sampled_from(WORDS))
    return bytes(data)


def federation(path):
    fed = Federation.from_files([path, path.with_name("other" + path.suffix)], names=["a", "b"])
    for split in (fed.train, fed.test):
        if split is not None and len(split.x):
            assert split.x.isfinite().all()
            assert split.y.isfinite().all()
            if fed.classes is not None:
                assert 0 <= int(split.y.min()) <= int(split.y.max()) < fed.classes


def idx(path):
    found = pytest.importorskip("polyfed_papers.images").read_idx(path)
    raw = readers.read_bytes(path)
    assert found.nbytes == len(raw) - 4 - 4 * found.ndim  # nothing is left out, nothing made up


def cifar(path):
    x, y = pytest.importorskip("polyfed_papers.images").read_cifar(path)
    assert x.shape == (len(y), 3, 32, 32)
    assert y.max() < 10


def matlab(path):
    """SciPy's reader ends the process on some of these."""
    found = pytest.importorskip("polyfed_papers.matlab").read_mat(path, ["x", "dataset"])
    assert sum(array.size for array in found.values()) <= len(readers.read_bytes(path))


PLAIN = {"npz": npz(False), "packed.npz": npz(True), "csv": CSV, "idx": IDX, "cifar": CIFAR, "mat": mat()}
ZIPPED = {f"{name}.gz": gzip.compress(PLAIN[name], mtime=0) for name in ("csv", "idx", "cifar")}


@st.composite
def files(draw):
    """(name, content): a good file of one kind, damaged; gzipped ones before or after packing."""
    name = draw(st.sampled_from([*PLAIN, *ZIPPED, "member.npz"]))
    if name == "member.npz":
        return name, rezipped(draw)
    if name in ZIPPED and draw(st.booleans()):
        return name, gzip.compress(damaged(draw, PLAIN[name.removesuffix(".gz")]), mtime=0)
    return name, damaged(draw, {**PLAIN, **ZIPPED}[name])


pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a cast that overflows is silent nonsense


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@given(file=files())
@bounded(600)
def test_damaged_files(folder, file):
    name, content = file
    kind = name.removesuffix(".gz").rpartition(".")[2]
    path = folder / f"one.{kind}"
    path.write_bytes(content)
    (path.with_name(f"other.{kind}")).write_bytes(PLAIN[kind])
    said = ""
    try:
        {"npz": federation, "csv": federation, "idx": idx, "cifar": cifar, "mat": matlab}[kind](path)
    except DataError as e:
        said = str(e)
    assert not said or any(word in said for word in ("one.", "client", "training samples")), said
