"""Downloads of public data sets, checked by MD5 and put in place atomically: a file is there whole or not at all."""

import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from polyfed.base.arguments import checked
from polyfed.base.errors import DataError, closest
from polyfed.base.system import move
from polyfed.data.datasets import default_dir
from polyfed.data.readers import UNPACKED
from polyfed_papers.images import IDX_FILES, IDX_MD5, md5


@dataclass(frozen=True)
class Home:
    """Published location of a data set: base URL, {file: MD5}, the folder for it; of archives, *.bin is unpacked."""

    url: str
    files: dict[str, str]
    folder: str


IDX = {name: dict(zip(IDX_FILES, sums, strict=True)) for name, sums in IDX_MD5.items()}
FASHION, CIFAR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", "https://www.cs.toronto.edu/~kriz/"
HOMES = {
    "mnist": Home("https://ossci-datasets.s3.amazonaws.com/mnist/", IDX["mnist"], "mnist"),
    "fashion-mnist": Home(FASHION, IDX["fashion-mnist"], "fashion_mnist"),
    "cifar10": Home(CIFAR, {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}, "cifar10"),
    "cifar100": Home(CIFAR, {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}, "cifar100"),
}


@checked
def fetch(
    name: str, data_dir: str | Path | None = None, *, verify: bool = True, url: str | None = None, timeout: float = 30.0
) -> list[Path]:
    """Download a public data set into data_dir/<its folder>; files that are there already are kept.

    Parameters
    ----------
    name : str
        mnist, fashion-mnist, cifar10 or cifar100.
    data_dir : str, Path or None
        Folder to download to; None: `default_dir()`.
    verify : bool
        Compare the MD5 of each file, new or already there, with the published one.
    url : str or None
        Another address with the same files.
    timeout : float
        Seconds without an answer.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    DataError
        Unknown name, no network, or a checksum that differs.
    """
    if name not in HOMES:
        raise DataError(f"{name!r} cannot be fetched{closest(name, HOMES)}; known: {', '.join(HOMES)}")
    home = HOMES[name]
    folder = (Path(data_dir) if data_dir is not None else default_dir()) / home.folder
    base = (url or home.url).rstrip("/") + "/"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DataError(f"{folder}: cannot be made ({e.strerror or e})") from None
    out = []
    for file, expected in home.files.items():
        path = folder / file
        if not path.exists():
            _download(base + file, path, expected if verify else None, timeout)
        elif verify and (found := md5(path)) != expected:
            raise DataError(f"{path}: found MD5 {found}, expected {expected}; delete the file to fetch it again")
        out += _unpack(path, folder) if file.endswith(".tar.gz") else [path]
    return out


def _download(url: str, path: Path, expected: str | None, timeout: float) -> None:
    """To a temporary file next to `path`, checked, then renamed."""
    digest = hashlib.md5(usedforsecurity=False)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        try:
            with os.fdopen(descriptor, "wb") as out, urllib.request.urlopen(url, timeout=timeout) as answer:
                length = int(answer.headers.get("Content-Length") or -1)
                received = 0
                while block := answer.read(1 << 20):
                    out.write(block)
                    digest.update(block)
                    received += len(block)
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as e:
            reason = str(getattr(e, "reason", "") or e or type(e).__name__).splitlines()[0]
            raise DataError(f"cannot download {url} ({reason}); put the file at {path} by hand") from None
        if length not in (-1, received):
            raise DataError(f"{url}: the download stopped after {received} of {length} bytes; try again")
        if expected is not None and digest.hexdigest() != expected:
            raise DataError(f"{url}: found MD5 {digest.hexdigest()}, expected {expected}; nothing was kept")
        move(Path(part), path)
    finally:
        Path(part).unlink(missing_ok=True)


def _unpack(archive: Path, folder: Path) -> list[Path]:
    """The plain *.bin files of a tar.gz, by their last name only, each put in place atomically."""
    out = []
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                target = folder / PurePosixPath(member.name).name
                if not member.isfile() or target.suffix != ".bin":
                    continue
                if member.size > UNPACKED:
                    raise DataError(
                        f"{archive}: {member.name!r} unpacks to {member.size:,} bytes, which no data set does"
                    )
                source = tar.extractfile(member)
                if source is None:
                    continue
                part = target.with_suffix(".part")
                part.write_bytes(source.read())
                move(part, target)
                out.append(target)
    except (tarfile.TarError, zlib.error, EOFError, OSError) as e:
        raise DataError(
            f"{archive}: cannot be unpacked ({str(e).splitlines()[0] if str(e) else type(e).__name__})"
        ) from None
    if not out:
        raise DataError(f"{archive}: no .bin files in it")
    return out
