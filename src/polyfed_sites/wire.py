"""Messages: all that a server and a site say to each other, as types and as bytes. Nothing is unpickled.

    server         site                       tensors down                     tensors up
    Join           Joined                     -                                -
    Pooled         Sums                       thresholds, fillings, means      sums over training rows
    Labels         Labelled                   -                                -
    Begin          Begun                      -                                -
    Train          Trained or Diverged        what the method sends            what the method sends
    Evaluate       Measured                   what clients deploy with         -
    End            Stored                     what clients deploy with         -
    Open           Opened                     -                                -
    Over           Stored                     -                                -

Where sums are secure, Masked takes the place of Sums, Labelled, Trained and Measured, and Open asks for what opens one.

To all of them a site may answer Failed. As bytes a message is a file of safetensors, its head JSON in the metadata.
What it says of itself (names, types, shapes, sizes) is read and checked before a byte of its tensors is. Its head is
parsed here and nowhere else: no field more or less than the type has, each of its type and within its bounds.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, cast

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as _save

from polyfed.base.columns import Columns
from polyfed.base.errors import PolyfedError, RunError
from polyfed.base.part import LARGE, Count, Part, Strict
from polyfed.base.settings import shown
from polyfed.base.values import LONGEST, MOST
from polyfed.core.messages import Form, State, form_of, size
from polyfed.data.preparation import Settled
from polyfed.data.said import DIMS, Csv, Npz

FORMAT = 7  # of messages: another one is refused at joining, so it changes with whatever changes here
HEAD = 1 << 20  # bytes of a head at most
FIRST = 1 << 24  # bytes of tensors in a message before the model is known
LINE = 1000  # characters of an error
ROWS = 1 << 27  # from which a site's number of rows is not believed: the server makes a label for each
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


# heads


def _table(kind: type, read: Callable[[Any], Any]) -> PlainValidator:
    """A field that is a table with a reader of its own."""

    def made(given: Any) -> Any:
        try:
            return given if isinstance(given, kind) else read(given)
        except (PolyfedError, TypeError) as e:  # pydantic asks for a ValueError
            raise ValueError(str(e)) from None

    return PlainValidator(made)


Table = dict[str, Any]  # of an experiment file, which `agreed` reads with the parser of these
Made = Literal["labels", "pooled"]  # of samples, and not by training
Word = Annotated[str, Field(max_length=LONGEST)]
Rows = Annotated[int, Field(ge=0, lt=ROWS)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Hex = Annotated[str, Field(pattern="^([0-9a-f]{2})*$", max_length=1000)]
ByName = Annotated[dict[Word, Hex], Field(max_length=10_000)]
Names = Annotated[list[Word], Field(max_length=10_000)]
At = Annotated[int, Field(ge=-1, lt=LARGE)]
Version = Annotated[
    tuple[At, At], BeforeValidator(lambda v: tuple(v) if type(v) is list else v)
]  # of a site's private state, see `Vault`


class Join(Strict):
    """The terms of an experiment, for one site; answered after the operator's consent."""

    kind: Literal["join"] = "join"
    versions: Annotated[dict[Word, Word], Field(max_length=100)]
    experiment: Word
    training: Table
    algorithm: Table
    model: Table
    columns: Annotated[Columns, _table(Columns, lambda c: Columns(**c)), PlainSerializer(lambda c: c.given)]
    cut: Annotated[int, Field(ge=0, le=MOST)]  # seed of the division of rows, with these shares
    test: Share
    validation: Share
    needs: Annotated[list[Made], Field(max_length=2)]
    rounds: Count  # at most
    evaluations: Count  # at most
    steps: int | None  # local ones of the site, where they are not epochs
    keys: dict[Word, Annotated[str, Field(max_length=1000)]] = Field(default={})  # that sites of secure sums sign with
    cohort: Count = 0  # sites in a round


class Peer(Strict):
    """A site among those whose sums are secure. key: its public one of this run     rows: that it trains on"""

    key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    rows: Rows
    signature: Hex


class Agreed(Strict):
    """Says what the site has joined for: one that was started again then joins anew. peers: where sums are secure"""

    joined: Join
    peers: dict[Word, Peer] = Field(default={}, max_length=10_000)
    settled: Annotated[Settled, _table(Settled, Settled.read), PlainSerializer(lambda s: s.dump())]


class Pooled(Agreed):
    """Asks for sums over the site's training rows. columns: those whose values are counted"""

    kind: Literal["pooled"] = "pooled"
    what: Literal["counts", "sums", "squares"]
    columns: list[str]


class Labels(Agreed):
    """Asks for the number of training rows of each class."""

    kind: Literal["labels"] = "labels"


class Audit(Strict):
    """Asks for counts and quantiles of each column, before anything is settled; only of sites that say they answer."""

    kind: Literal["audit"] = "audit"
    joined: Join


class Begin(Agreed):
    """The settled experiment. run: what the run is known by     loss, weights: what joining left open"""

    kind: Literal["begin"] = "begin"
    run: Annotated[str, Field(max_length=100)]
    loss: Word
    weights: list[Amount] | None


class Turn(Strict):
    """base: the private state to start from     keep: the oldest one that may still be asked for"""

    run: Annotated[str, Field(max_length=100)]
    base: Version
    keep: Version


class Train(Turn):
    """One exchange of a round."""

    kind: Literal["train"] = "train"
    t: Count  # round
    phase: Count  # exchange within it
    n: Annotated[Count, Field(ge=1)]  # clients
    scale: Amount  # factor of the step sizes
    cohort: Names = Field(default=[])  # who is asked, where the site must know


class Evaluate(Turn):
    """Asks how good the model is that the site would deploy. round: for the site's own list"""

    kind: Literal["evaluate"] = "evaluate"
    split: Word
    round: Count


class End(Turn):
    """The last message, by which the site makes its own model."""

    kind: Literal["end"] = "end"


class Open(Strict):
    """Asks for what opens a sum of a `secure.Context`."""

    kind: Literal["open"] = "open"
    what: Word
    cohort: Names
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    least: Count
    limbs: Literal[1, 2]
    present: Names  # who has answered
    sealed: ByName  # their shares for this site


class Over(Strict):
    """The run has ended before its first round."""

    kind: Literal["over"] = "over"


class Counts(Strict):
    """Rows of each part."""

    train: Rows
    validation: Rows | None = None
    test: Rows


class Joined(Strict):
    """What the site's file is like. audit: whether its policy lets it answer an audit     pooled: the policy's"""

    kind: Literal["joined"] = "joined"
    site: Word
    versions: Annotated[dict[Word, Word], Field(max_length=100)]
    cpu: Word
    file: Annotated[Csv | Npz, Field(discriminator="kind")]
    counts: Counts
    audit: bool
    pooled: Literal["none", "sums", "medians"]
    removed: Count  # rows that drop-rows left out, none of fewer than least-count
    peer: Peer | None = None


class Sums(Strict):
    kind: Literal["sums"] = "sums"


class Labelled(Strict):
    kind: Literal["labelled"] = "labelled"
    rows: list[Rows]


class Audited(Strict):
    """Columns in counts and quantiles."""

    kind: Literal["audited"] = "audited"
    columns: dict[str, Part]


class Begun(Strict):
    """w0: digest of the start vector     frozen: digest of each tensor that is not trained, by name"""

    kind: Literal["begun"] = "begun"
    w0: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    frozen: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{16}$")]]


class Exchanged(Strict):
    """t, phase: as in the message that it answers"""

    t: Count
    phase: Count


class Trained(Exchanged):
    kind: Literal["trained"] = "trained"
    steps: Count
    seconds: Amount


class Diverged(Exchanged):
    kind: Literal["diverged"] = "diverged"


class Measured(Strict):
    """metrics: None where they stay at the site     aggregate: whether the server may write down a mean only"""

    kind: Literal["measured"] = "measured"
    metrics: Annotated[dict[Word, float], Field(max_length=100)] | None
    parameters: Count
    aggregate: bool = False


class Stored(Strict):
    kind: Literal["stored"] = "stored"


class Masked(Strict):
    """Answers with hidden numbers. context: of the exchange, as the site knows it     others: as in `secure.Masked`"""

    kind: Literal["masked"] = "masked"
    context: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    sealed: ByName
    commitments: ByName
    pairs: ByName


class Opened(Strict):
    kind: Literal["opened"] = "opened"
    shares: ByName
    keys: ByName


class Failed(Strict):
    """error: one line, with nothing of the file or the machine"""

    kind: Literal["failed"] = "failed"
    error: Annotated[str, Field(max_length=LINE)]


Request = Join | Audit | Pooled | Labels | Begin | Train | Evaluate | End | Open | Over
Reply = Joined | Audited | Sums | Labelled | Begun | Trained | Diverged | Measured | Stored | Masked | Opened | Failed
H = TypeVar("H", bound=Strict, covariant=True)
REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])


# messages


class Message(NamedTuple, Generic[H]):
    """What one side says to the other."""

    head: H
    tensors: State = {}  # noqa: RUF012  (never written to)

    def pack(self) -> bytes:
        """The message as bytes."""
        return pack({"format": FORMAT} | self.head.model_dump(), self.tensors)

    @property
    def digest(self) -> str:
        """Of all that it says; but for `keep`, by which a site only knows what to forget."""
        head = self.head.model_copy(update={"keep": (-1, -1)}) if isinstance(self.head, Turn) else self.head
        return hashlib.sha256(Message(head, self.tensors).pack()).hexdigest()

    @property
    def bytes(self) -> int:
        """Of the tensors, as the ledger counts them."""
        return size(self.tensors)


def request(data: bytes, most: int, who: str) -> Message[Request]:
    """What a server asks. most, who: as for `unpack`"""
    return _read(REQUEST, "the message", data, most, who)


def reply(data: bytes, most: int, who: str) -> Message[Reply]:
    """What a site answers. most, who: as for `unpack`"""
    return _read(REPLY, "its reply", data, most, who)


def _read(heads: TypeAdapter[Any], what: str, data: bytes, most: int, who: str) -> Message[Any]:
    says, tensors = unpack(data, most, who)
    if (format := says.pop("format", None)) != FORMAT:
        then = "install the same version of polyfed at the server and at every site"
        raise RunError(f"{who}: found messages of format {shown(format)}, expected {FORMAT}; {then}")
    try:
        return Message(heads.validate_python(says), tensors)
    except ValidationError as e:
        raise RunError(f"{who}: {what} is damaged ({_misfit(e)})") from None


def _misfit(error: ValidationError) -> str:
    """What is wrong with a head: which field, what was found, what was expected."""
    e = error.errors(include_url=False)[0]
    where = ".".join(map(str, e["loc"][1:]))
    if e["type"].startswith("union_tag"):
        return f"it is of kind {shown(e['input'].get('kind'))}, which this version does not know"
    if e["type"] == "missing":
        return f"it lacks {where}"
    if e["type"] == "extra_forbidden":
        return f"it has {where}, which this version does not know"
    says = str(e.get("ctx", {}).get("error", e["msg"]))
    expected = says.removeprefix("Input should be ")
    return f"{where}: found {shown(e['input'])}{'; ' if expected == says else ', expected '}{expected}"


def pack(head: Mapping[str, Any], tensors: State) -> bytes:
    """A head and tensors as bytes."""
    apart = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return _save(apart, {"head": json.dumps(head)})


def unpack(data: bytes, most: int, who: str) -> tuple[dict[str, Any], State]:
    """The head and the tensors, of `most` bytes, in what `who` has sent; RunError for what `pack` has not made."""
    try:
        size = int.from_bytes(data[:8], "little")
        if not 2 <= size <= min(HEAD, len(data) - 8):
            raise ValueError(f"its head says {size} bytes")
        says: dict[str, Any] = json.loads(data[8 : 8 + size])
        head = json.loads(says.pop("__metadata__")["head"])
        if not isinstance(head, dict):
            raise ValueError("its head is no table")
        total, largest = 0, (0, "")
        for name, about in says.items():
            if about["dtype"] not in DTYPES:
                raise ValueError(f"{name!r} is of type {about['dtype']}")
            if len(about["shape"]) > DIMS:
                raise ValueError(f"{name!r} has {len(about['shape'])} dimensions, expected at most {DIMS}")
            numbers = math.prod(int(k) for k in about["shape"])
            size_of_it = numbers * torch.empty((), dtype=DTYPES[about["dtype"]]).element_size()
            total, largest = total + size_of_it, max(largest, (size_of_it, name))
        if total > most or total != len(data) - 8 - size:
            described = f"{total:,} bytes of tensors{largest[1] and f', most of them {largest[1]!r}'}"
            raise ValueError(f"it is said to have {described}, expected at most {most:,}, as sent")
        return cast(dict[str, Any], head), load(data)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SafetensorError) as e:
        raise RunError(f"{who}: not a message ({' '.join(str(e).split()) or type(e).__name__})") from None


def misfit(tensors: State, expected: Mapping[str, Form], finite: bool = True) -> str:
    """What tensors have that is not of the names, shapes and types `expected`, or not finite; "": nothing."""
    needed = {name for name, form in expected.items() if not form.optional}
    for name in sorted((tensors.keys() - expected.keys()) | (needed - tensors.keys())):
        verb = "has" if name in tensors else "lacks"
        return f"the message {verb} tensor {name!r}, expected {', '.join(sorted(expected)) or 'none'}"
    for name, t in tensors.items():
        form = expected[name]
        same = t.dim() == len(form.shape) and all(k in (None, m) for k, m in zip(form.shape, t.shape, strict=True))
        if not same or t.dtype != form.dtype or t.numel() > form.most:
            return f"tensor {name!r} is {form_of(t)}, expected {form}"
        if finite and t.is_floating_point():
            wide = t if t.element_size() > 2 else t.float()
            if not torch.isfinite((wide * wide).sum()):
                largest = float(wide.abs().max())
                numbers = (
                    f"numbers up to {largest:.3g}, whose squares no {str(wide.dtype).removeprefix('torch.')} adds up"
                )
                return f"tensor {name!r} holds {numbers if math.isfinite(largest) else 'NaN or infinity'}"
    return ""
