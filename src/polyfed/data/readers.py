"""Readers of data files into numpy arrays, never unpickled; a malformed file is one DataError line that names it."""

import codecs
import csv
import gzip
import hashlib
import io
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import isfinite, prod
from pathlib import Path

import numpy as np

from polyfed.base.errors import DataError, few
from polyfed.base.text import nfc

OTHER = (  # files of data that are not read
    ".tsv", ".tab", ".csv.gz", ".tsv.gz", ".xls", ".ods", ".feather", ".sav", ".dta", ".sas7bdat",
)  # fmt: skip
MORE = (".parquet", ".xlsx")  # tables that the package polyfed_tables reads
TABLES = (".csv", *MORE)
EXPECTED = (
    "expected a file ending in .csv, .parquet, .xlsx or .npz; in Python, pf.data.from_frames takes what pandas reads"
)
UNPACKED, RATIO = 1 << 30, 200  # largest size of unpacked data, in bytes or in multiples of the packed size
BLOCK = 256  # rows that are turned into columns at a time; of many the collector of garbage takes most of the time
BLANKS = ' \t\f\v\x1c\x1d\x1e\x1f"'  # one of which a file of ASCII has where a cell has a blank at an end
LARGEST = 2**53  # whole numbers up to this are exact in every number format that a file may use
GAPS = ("", "na", "n/a", "nan", "null", "?", ".", "-")
SEP = re.compile(r'"?sep=(.)"?\r?(?=\n)', re.IGNORECASE)  # Excel's own first line: what parts the cells
LEFT = ("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx", "@eadir", "#recycle", "$recycle.bin",
        "system volume information", "lost+found")  # fmt: skip
APPLE = b"\x00\x05\x16\x07"  # first bytes of a ._file
HEAD = 100  # rows that tell a header from a row of data


class NotUTF8(DataError):
    """A text file in another encoding, `guess` or another one."""

    def __init__(self, line: str, raw: bytes):
        super().__init__(line)
        self.guess = "utf-16" if raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "cp1252"


def read_bytes(path: str | Path) -> bytes:
    """The content of a file, unzipped if it begins as gzip. Raises DataError for a zip bomb, too."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise DataError(f"{path}: cannot be read; expected a file")
        with open(path, "rb") as f:
            if f.read(2) != b"\x1f\x8b":
                f.seek(0)
                return f.read()
        most = unpacked_at_most(Path(path).stat().st_size)
        with gzip.open(path) as f:
            raw = f.read(most + 1)
    except EOFError:
        raise DataError(f"{path}: the gzip file is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as e:
        raise DataError(f"{path}: the gzip file is damaged ({e})") from None
    except (OSError, ValueError) as e:
        raise DataError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    if len(raw) > most:
        raise DataError(f"{path}: unpacks to more than {most:,} bytes; unpack it by hand if that is right")
    return raw


def unpacked_at_most(size: int) -> int:
    """Bytes that `size` compressed bytes may become."""
    return max(UNPACKED, RATIO * size)


def read_npz(path: str | Path, required: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The arrays of an npz file, never unpickled; a header must promise the size that is there."""
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path}: not an npz archive, or cut short; numpy.savez(path, x=..., y=...) writes one")
    try:
        with zipfile.ZipFile(path) as z:
            members = {m.filename.removesuffix(".npy"): m for m in z.infolist()}
            missing = [name for name in required if name not in members]
            if missing:
                names = ", ".join(members) or "none"
                raise DataError(f"{path}: array {missing[0]!r} is missing; it has {names}")
            most = unpacked_at_most(Path(path).stat().st_size)
            if (size := sum(m.file_size for m in members.values())) > most:
                raise DataError(f"{path}: unpacks to {size:,} bytes; save it with numpy.savez if that is right")
            return {name: _read_npy(path, z, m) for name, m in members.items()}
    except DataError:
        raise
    except Exception as e:  # numpy, zipfile and the decompressors raise a dozen kinds for damaged bytes
        raise DataError(f"{path}: not a readable npz file ({line_of(e)})") from None


def _read_npy(path: str | Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One array, once its header is known to fit the bytes that are there: numpy allocates what a header promises."""
    name = member.filename.removesuffix(".npy")
    with archive.open(member) as f:
        if not member.filename.endswith(".npy"):
            raise DataError(f"{path}: {name!r} is not an array (.npy); numpy.savez(path, x=..., y=...) writes arrays")
        old = np.lib.format.read_magic(f) == (1, 0)
        header = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(f)
        if dtype.hasobject:
            raise DataError(f"{path}: array {name!r} holds objects, which are never unpickled")
        there, promised = member.file_size - f.tell(), prod(shape) * dtype.itemsize
        if there != promised or min(shape, default=0) < 0:
            raise DataError(
                f"{path}: array {name!r}: found {there} bytes, expected {promised} for the "
                f"shape {list(shape)} in its header"
            )
    with archive.open(member) as f:
        return np.lib.format.read_array(f, allow_pickle=False)


def read_csv(path: str | Path) -> tuple[list[str], np.ndarray]:
    """A comma-separated file of numbers with one header line: (column names, values [N, columns] float64)."""
    header, lines, columns, _ = read_cells(path)
    values = [floats(cells) for cells in columns]
    bad = [(_first_odd(columns[k]), k) for k, column in enumerate(values) if column is None]
    if bad:
        row, k = min(bad)
        cell = columns[k][row][:40]
        raise DataError(f"{path}, line {lines[row]}, column {header[k]!r}: found {cell!r}, expected a number")
    return header, np.array(values, dtype=np.float64).T.copy()


def read_cells(
    path: str | Path, delimiters: str = ",", encoding: str | None = None, files: str | None = None
) -> tuple[list[str], list[int], list[list[str]], str]:
    """A table with one header line as text: (names, [N] line numbers, columns of [N] cells, the delimiter).

    Cells are NFC without blanks around them, except in the column of paths, `files`. The delimiter is the one that the
    first line has most of, unless the file names its own, as Excel's sep=. `encoding` is for files that are not UTF-8.
    """
    text = _decoded(path, encoding)
    if named := SEP.match(text):
        text = text[named.end() :]
    first = text.lstrip("\r\n").partition("\n")[0]
    delimiter = named[1] if named else max(delimiters, key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    try:
        first = next(filter(None, reader), [])
        lines, columns, ragged = list[int](), [list[str]() for _ in first], ""
        while block := [(reader.line_num, row) for row in islice(reader, BLOCK)]:
            rows = [(k, row) for k, row in block if row]
            if wrong := next(((k, len(row)) for k, row in rows if len(row) != len(first)), None):
                ragged = ragged or f"line {wrong[0]}: found {wrong[1]} cells, expected {len(first)} as in the header"
            elif rows:
                lines += [k for k, _ in rows]
                for column, cells in zip(columns, zip(*(row for _, row in rows), strict=True), strict=True):
                    column += cells
    except csv.Error as e:
        raise DataError(f"{path}: not a readable CSV file ({line_of(e)})") from None
    if not first:
        raise DataError(f"{path}: the file is empty")
    header = [nfc(name.strip()) for name in first]
    if not text.isascii() or any(blank in text for blank in BLANKS):
        columns = [[*map(str.strip, cells)] for cells in columns]
    if all(number(cell) is not None for cell in header) or headless(header, columns):
        raise DataError(f"{path}: found a row of data in the first line, expected a header line with column names")
    if "" in header:
        then = "; if it counts the rows, leave it out (pandas: to_csv(path, index=False))" * (header[0] == "")
        then = then or ", expected a header line with a name for each"
        raise DataError(f"{path}: column {header.index('') + 1} has no name{then}")
    if len(set(header)) < len(header):
        twice = next(name for i, name in enumerate(header) if name in header[:i])
        raise DataError(f"{path}: two columns are called {twice!r}")
    if ragged:
        raise DataError(f"{path}, {ragged}")
    if nfc(text) is not text:
        columns = [c if name == files else [*map(nfc, c)] for name, c in zip(header, columns, strict=True)]
    return header, lines, columns, delimiter


def headless(header: Sequence[str], columns: Sequence[Sequence[str]]) -> bool:
    """True where the names of columns are themselves a row of data."""

    def of(text: str) -> float | None:
        value = number(text.replace(",", ".") if "." not in text else text)
        return value if value is not None and isfinite(value) else None

    over: list[float | None] = []
    texts: list[bool] = []
    for name, column in zip(header, columns, strict=True):
        there = [c for c in column[:HEAD] if c.lower() not in GAPS]
        if there and all(of(c) is not None for c in there):
            over += [] if name.lower() in GAPS or name.startswith("Unnamed: ") else [of(name)]
        elif there:
            texts.append(name != "" and name in column)
    values = [v for v in over if v is not None]
    if not over or len(values) < len(over):
        return not over and 2 * sum(texts) > max(len(texts), 1)
    steps = {b - a for a, b in pairwise(values)}  # names that count on, as 0, 1, 2 or years do, are names
    on = steps == {1} or (len(values) > 2 and len(steps) == 1 and min(steps) > 0) or values in ([0], [1])
    return any(texts) or not (on and values[0] % 1 == 0)


def _decoded(path: str | Path, encoding: str | None) -> str:
    """The text of a file: UTF-8 wherever it can be that, else `encoding`."""
    raw = read_bytes(path)
    if raw.startswith(APPLE):
        raise DataError(f"{path}: is what macOS keeps beside a file (AppleDouble) and no table; leave it out")
    try:
        text = raw.decode("utf-8-sig")
        if encoding is None or "\0" not in text:  # as ASCII in UTF-16 has
            return text
    except UnicodeDecodeError:
        if Path(path).suffix.lower() in OTHER:
            raise DataError(f"{path}: {EXPECTED}") from None
        if encoding is None:
            then = "save it as one (in Excel: CSV UTF-8), or name its encoding, as in --encoding cp1252"
            raise NotUTF8(f"{path}: not a text file in UTF-8; {then}", raw) from None
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode(encoding).removeprefix("\ufeff")
    except UnicodeError:
        raise DataError(f"{path}: a text file neither in UTF-8 nor in {encoding}, as columns.encoding says") from None


def images(x: np.ndarray) -> np.ndarray:
    """uint8 pixels [N, height, width (, channels)] as float32 in [0, 1], channels first; other arrays as they are."""
    if x.dtype != np.uint8 or x.ndim < 3:
        return x
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = np.moveaxis(x, -1, 1)
    return np.ascontiguousarray(x, dtype=np.float32) / np.float32(255)


@dataclass(frozen=True, eq=False)
class ClientFile:
    """Contents of one client's file: name, (x, y) and, in an npz, perhaps a test set of its own."""

    name: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray] | None = None


def is_url(place: str | Path) -> bool:
    """True for the URL of a database."""
    return isinstance(place, str) and "://" in place


def located(place: str, folder: Path = Path()) -> str:
    """A path in full, seen from a folder; of a URL that of a file of SQLite."""
    head, scheme, rest = place.rpartition("sqlite:///")
    if is_url(place) and not scheme:
        return place
    return head + scheme + str((folder / Path(rest).expanduser()).resolve())


def files_of(place: Path) -> list[Path]:
    """The one CSV or npz file that a path names, or those of a folder, by name. Raises DataError as `client_files`."""
    if not place.is_file():
        return client_files(place)
    if place.suffix.lower() not in (*TABLES, ".npz"):
        raise DataError(f"{place}: {EXPECTED}")
    return [place]


def inside(folder: Path, pattern: str = "*") -> list[Path]:
    """The files of a folder by name, without those of systems and office programs: hidden files, locks, ..."""
    files = sorted(folder.glob(pattern), key=lambda f: [*map(nfc, f.parts)])  # in one order on every system
    of = {f: f.relative_to(folder).parts for f in files}
    return [f for f in files if not any(n[0] in ".~" or n[-1] == "~" or n.lower() in LEFT for n in of[f])]


def pictures(folder: Path) -> list[Path]:
    """The files of a folder LABEL/IMAGE, by their names; without folders in it its own files. Hidden ones are none."""
    return [f for f in inside(folder, "*/*") or inside(folder) if f.is_file()]


def digest(path: Path) -> str:
    """SHA-256 of a file, or of a folder's images, names and contents. Raises DataError for one that cannot be read."""
    if not path.is_dir():
        try:
            with path.open("rb") as f:
                return hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as e:
            raise DataError(f"{path}: cannot be read ({e.strerror})") from None
    h = hashlib.sha256()
    for file in pictures(path):
        h.update(f"{nfc(file.relative_to(path).as_posix())}\0{digest(file)}\n".encode())
    return h.hexdigest()


def picture_folders(path: Path) -> list[Path]:
    """The clients' folders of a folder CLIENT/LABEL/IMAGE; none where it has files of its own, or no such images."""
    there = inside(path) if path.is_dir() else []
    if not there or not all(f.is_dir() for f in there):
        return []
    return there if all(inside(f, "*/*.*") for f in there) else []


def client_files(path: str | Path) -> list[Path]:
    """The CSV or the npz files of a folder, by name. Raises DataError for none, both, or data of another kind."""
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    there = [f for f in inside(folder) if f.is_file()]
    if other := [f.name for f in there if f.name.lower().endswith(OTHER)]:
        expected = "each site's file as .csv (cells parted by commas, semicolons or tabs), .parquet, .xlsx or .npz; "
        expected += "in Python, pf.data.from_frames takes what pandas reads"
        raise DataError(f"{folder}: found {few(other)}, expected {expected}")
    files = [f for f in there if f.suffix.lower() in (*TABLES, ".npz")]
    if not files:
        raise DataError(f"{folder}: found no CSV or npz file, expected one per client")
    if strange := [f.name for f in files if (f.suffix.lower() == ".npz") != (files[0].suffix.lower() == ".npz")]:
        raise DataError(f"{folder}: found {files[0].name} and {strange[0]}, expected tables alone or npz files alone")
    return files


TASKS = ("auto", "binary", "classification", "regression", "tokens")


def read_clients(paths: Sequence[str | Path], target: str | None = None) -> list[ClientFile]:
    """One client per npz file (see `Federation.from_files`), or per CSV file of numbers alone."""
    clients: list[ClientFile] = []
    for path in map(Path, paths):
        if path.suffix.lower() == ".csv":
            header, values = read_csv(path)
            if target is not None and target not in header:
                raise DataError(f"{path}: no column {target!r}; it has {', '.join(header)}")
            if len(header) < 2:
                raise DataError(f"{path}: found one column, expected inputs and a target")
            t = header.index(target) if target is not None else len(header) - 1
            with np.errstate(over="ignore"):  # infinite then, which is refused with the client's name
                x = np.delete(values, t, axis=1).astype(np.float32)
            clients.append(ClientFile(path.stem, (x, values[:, t])))
            continue
        if path.suffix.lower() != ".npz":
            raise DataError(f"{path}: {EXPECTED}")
        z = read_npz(path, ["x", "y"])
        if ("x_test" in z) != ("y_test" in z):
            raise DataError(f"{path}: found one of x_test and y_test, expected both or neither")
        test = (images(z["x_test"]), z["y_test"]) if "x_test" in z else None
        clients.append(ClientFile(path.stem, (images(z["x"]), z["y"]), test))
    have = [c.test is not None for c in clients]
    if any(have) and not all(have):
        raise DataError(f"{paths[have.index(False)]}: no x_test and y_test, though other clients have them")
    return clients


def number(cell: str) -> float | None:
    """The number that a cell holds; Python's own 1_000 is none."""
    try:
        return float(cell) if "_" not in cell else None
    except ValueError:
        return None


def floats(cells: Sequence[str]) -> np.ndarray | None:
    """[N] the numbers of cells that all hold one, as `number` reads them; None where one does not."""
    if "_" in "".join(cells):
        return None
    try:
        return np.array(cells, dtype=object).astype(np.float64)
    except ValueError:
        return None


def _first_odd(cells: Sequence[str]) -> int:
    return next(row for row, cell in enumerate(cells) if number(cell) is None)


def line_of(e: BaseException) -> str:
    """The first line of an error, or its type."""
    return (str(e).strip() or type(e).__name__).splitlines()[0]
