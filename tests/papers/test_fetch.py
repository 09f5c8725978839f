"""Downloads, from a folder that stands in for the network: checked, atomic, and one line when they fail."""

import hashlib
import io
import tarfile

import numpy as np
import pytest

from polyfed.data import fetch, load
from polyfed_papers.fetch import HOMES


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder with a small stand-in for MNIST, whose checksums are taken for the published ones."""
    from test_image_files import idx

    folder = tmp_path / "mirror"
    folder.mkdir()
    rng = np.random.default_rng(0)
    sums = {}
    for file in HOMES["mnist"].files:
        n = 30 if file.startswith("train") else 20
        array = rng.integers(0, 256, (n, 28, 28)) if "images" in file else np.arange(n) % 10
        content = idx(array.astype(np.uint8))
        (folder / file).write_bytes(content)
        sums[file] = hashlib.md5(content).hexdigest()
    monkeypatch.setitem(HOMES["mnist"].__dict__, "files", sums)
    return folder


def test_fetched_files_load(mirror, tmp_path):
    paths = fetch("mnist", tmp_path / "data", url=mirror.as_uri())
    assert [p.parent.name for p in paths] == ["mnist"] * 4
    data = load("mnist", tmp_path / "data")
    assert data.x.shape == (30, 1, 28, 28)
    assert any("not the published file" in note for note in data.notes)
    before = paths[0].stat().st_mtime_ns
    assert fetch("mnist", tmp_path / "data", url="http://127.0.0.1:9/") == paths  # nothing left to download
    assert paths[0].stat().st_mtime_ns == before


def test_wrong_checksum_leaves_nothing_behind(mirror, tmp_path, refused):
    file = "t10k-labels-idx1-ubyte.gz"
    (mirror / file).write_bytes(b"something else")
    with refused(file, "MD5", HOMES["mnist"].files[file]):
        fetch("mnist", tmp_path / "data", url=mirror.as_uri())
    left = sorted(p.name for p in (tmp_path / "data" / "mnist").iterdir())
    assert file not in left
    assert not [name for name in left if name.endswith(".part")]
    fetch("mnist", tmp_path / "data", url=mirror.as_uri(), verify=False)
    with refused(file, "delete the file"):
        fetch("mnist", tmp_path / "data", url=mirror.as_uri())


def test_no_network_and_an_unknown_name_are_one_line(tmp_path, refused):
    with refused("cannot download", "http://127.0.0.1:9/", "by hand"):
        fetch("mnist", tmp_path, url="http://127.0.0.1:9/", timeout=2)
    with refused("cannot download", "train-images"):
        fetch("mnist", tmp_path, url=(tmp_path / "nowhere").as_uri())
    assert not list((tmp_path / "mnist").iterdir())
    with refused("'heart-disease'", "known: mnist"):
        fetch("heart-disease", tmp_path)


def test_what_is_not_there_and_what_has_no_such_name_is_said_in_one_line(cli):
    for words, facts in (
        (("run", "--data", "mnist", "--data-dir", "."), ["mnist", "polyfed data fetch mnist"]),
        (("data", "fetch", "mnits"), ["'mnits'", "'mnist'"]),
    ):
        cli(*words).line(1, *facts)


def test_archives_give_their_bin_files_only(tmp_path, monkeypatch, refused):
    folder = tmp_path / "mirror"
    folder.mkdir()
    archive = folder / "cifar-10-binary.tar.gz"
    row = np.zeros((2, 3073), np.uint8)
    with tarfile.open(archive, "w:gz") as tar:
        for name in [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin", "../../escape.bin", "evil.py"]:
            row[:, 0] = len(name) % 10
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = row.nbytes
            tar.addfile(info, io.BytesIO(row.tobytes()))
        link = tarfile.TarInfo("link.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)

    def published():
        sums = {archive.name: hashlib.md5(archive.read_bytes()).hexdigest()}
        monkeypatch.setitem(HOMES["cifar10"].__dict__, "files", sums)

    published()
    fetch("cifar10", tmp_path / "data", url=folder.as_uri())
    assert not {"evil.py", "link.bin"} & {p.name for p in (tmp_path / "data" / "cifar10").iterdir()}
    assert not (tmp_path / "escape.bin").exists()
    assert load("cifar10", tmp_path / "data").x.shape == (10, 3, 32, 32)
    archive.write_bytes(b"not a tar file")
    published()
    with refused("cifar-10-binary.tar.gz", "cannot be unpacked"):
        fetch("cifar10", tmp_path / "other", url=folder.as_uri())
