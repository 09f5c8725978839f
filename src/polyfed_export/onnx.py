"""One client's model as an ONNX file with its preparation in the graph: a CSV row goes in, an answer comes out.

See `Run.onnx` for inputs and outputs. Texts and images go in prepared, as `input_ids` and `attention_mask`
[N, length], or `pixel_values` [N, 3, size, size]; a language model puts out `logits`.
"""

import tempfile
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed.base.arithmetic import OWN, arithmetic
from polyfed.base.checkpoint import reason
from polyfed.base.columns import RENAME, together
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.settings import is_mapping
from polyfed.compute.trial import EMBEDDINGS
from polyfed.data.csv_files import GAPS, canonical, places
from polyfed.data.preparation import Input, Preparation, Statistics
from polyfed.data.raw import Text
from polyfed.data.readers import number
from polyfed.runs.result import Result, position
from polyfed.studies.predict import Predictor, predictor
from polyfed_export.export import target_of

OPSETS = {"": 17, "ai.onnx.ml": 2}
GONE = -2  # the code of a gap in a category of texts; -1: a value that no training part had
OUTPUTS = ("prediction", "probabilities")
TOKENS, PIXELS = ("input_ids", "attention_mask"), "pixel_values"  # as the library transformers calls them


def export_onnx(run: Result, client: int | str, out: Path | None) -> Path:
    """Write one client's model to `out`; of a run on CSV files with the preparation of its columns."""
    names = run.outline.names
    if isinstance(client, str) and client not in names and client.isdecimal():
        client = int(client)
    name = names[position(client, names)]
    by = predictor(run, name) if "preparation" in run.outline.meta else None
    model = run.model(name) if by is None else by.model
    kept = () if run.folder is None else (run.folder,)
    return _write(model, run.outline.input_shape, target_of(out, name, *kept, ending=".onnx"), by)


def onnx_from_vault(vault: Path, out: Path | None) -> Path:
    """Write the model that a site has made at the end of a run."""
    by = Predictor.open(vault / "model.safetensors")
    return _write(by.model, by.preparation.shape, target_of(out, by.client, *vault.iterdir(), ending=".onnx"), by)


def _write(model: nn.Module, shape: Sequence[int], out: Path, by: Predictor | None) -> Path:
    """Write a model, between the preparation and the answer of `by`, or else from `x` [N, *shape] to `output`."""
    if find_spec("onnx") is None:
        raise ConfigError("onnx: is not installed; pip install 'polyfed[onnx]'")
    graph = Graph(_traced(model, shape, "" if by is None else "/"))
    if by is not None:
        graph.around(by.preparation, by.client)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(graph.finished().SerializeToString())
    except OSError as e:
        raise RunError(f"cannot write {out}: {reason(e)}") from None
    return out


def _traced(model: nn.Module, shape: Sequence[int], before: str) -> Any:
    """The model in single precision by torch's exporter, from `x` to `output`, with `before` before the names."""
    exporter: Any = torch.onnx
    embeds = any(isinstance(m, EMBEDDINGS) for m in model.modules())
    example = torch.ones(2, *shape, dtype=torch.int64 if embeds else torch.float32)
    given, made = f"{before}x", f"{before}output"
    axes = {given: {0: "rows"}, made: {0: "rows"}}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its exporter's successor, which needs one more package
        file = f"{folder}/model.onnx"
        try:
            exporter.export(
                model.cpu().float().eval(), (example,), file, dynamo=False, input_names=[given], output_names=[made],
                dynamic_axes=axes, opset_version=OPSETS[""],
            )  # fmt: skip
        except Exception as e:
            raise ConfigError(f"onnx: torch cannot export this model ({' '.join(str(e).split())[:200]})") from e
        return import_module("onnx").load(file)


class Graph:
    """A graph that grows by nodes. Names of columns are its inputs' own; ours begin with a slash."""

    def __init__(self, model: Any):
        onnx = import_module("onnx")
        self.helper, self.numpy, self.checker = onnx.helper, onnx.numpy_helper, onnx.checker
        self.kinds: Any = onnx.TensorProto
        self.model = onnx.compose.add_prefix(model, "/model/", rename_inputs=False, rename_outputs=False)
        self.before, self.constants, self.count = list[Any](), list[Any](), 0
        self.nodes: Any = self.before  # where `do` adds

    def constant(self, value: Any) -> str:
        """The name of an array."""
        name = f"/constant/{len(self.constants)}"
        self.constants.append(self.numpy.from_array(np.asarray(value), name))
        return name

    def do(self, kind: str, *given: str, output: str = "", **attributes: Any) -> str:
        """The name of what an operation makes of these."""
        self.count += 1
        output = output or f"/made/{self.count}"
        self.nodes.append(self.helper.make_node(kind, given, [output], **attributes))
        return output

    def cast(self, name: str, dtype: Any, **more: Any) -> str:
        return self.do("Cast", name, to=self.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), **more)

    def around(self, prep: Preparation, client: str) -> None:
        """Put a client's preparation before the model, and what makes an answer of its outputs behind it."""
        at, self.repairs, self.given = prep.at(client), together(prep.repairs, client), dict[str, Any]()
        self.named = {now: before for before, now in self.repairs.get(RENAME, {}).items()}
        graph = self.model.graph
        del graph.input[:]
        if prep.raw is not None:
            return self.prepared(prep, at)
        blocks = list[str](), list[str](), list[str]()  # in the order of `Preparation.names`
        numbers = iter(zip(at.fill, at.shift, at.scale, strict=True))
        for column in prep.inputs:
            cells, gone = self.repaired(column, prep)
            if column.values is None:
                blocks[0].append(self.scaled(cells, gone, prep, *next(numbers)))
            else:
                blocks[2].append(self.hot(column, cells, gone, prep))
            if column.gap:
                blocks[1].append(self.cast(gone, np.float64))
        if taken := [name for name in self.given if name in OUTPUTS]:
            raise ConfigError(f"onnx: found a column {taken[0]!r}, which is the name of an output; rename it")
        graph.input.extend(self.helper.make_tensor_value_info(n, kind, ["rows"]) for n, kind in self.given.items())
        joined = self.do("Concat", *(name for block in blocks for name in block), axis=1)
        self.cast(joined, np.float32, output="/x")
        self.nodes = graph.node
        return self.answer(prep, at)

    def prepared(self, prep: Preparation, at: Statistics) -> None:
        """Put the inputs of texts or images before the model, as they are prepared, and its answer behind it."""
        shape = prep.shape
        if isinstance(prep.raw, Text):
            given = [self.do("Unsqueeze", name, self.constant([1])) for name in TOKENS]
            self.do("Concat", *given, axis=1, output="/x")
            self.take(TOKENS, self.kinds.INT64, shape[1:])
        else:
            self.do("Identity", PIXELS, output="/x")
            self.take([PIXELS], self.kinds.FLOAT, shape)
        self.nodes = self.model.graph.node
        return self.answer(prep, at)

    def take(self, names: Sequence[str], kind: int, shape: Sequence[int]) -> None:
        made = [self.helper.make_tensor_value_info(name, kind, ["rows", *shape]) for name in names]
        self.model.graph.input.extend(made)

    def kind(self, column: Input) -> int:
        """The type of a column: numbers, or texts where a category has some, at this client if not at others."""
        repair = self.repairs.get(column.name)
        texts = [*(column.values or ()), *(repair if is_mapping(repair) else ())]
        return self.kinds.DOUBLE if column.values is None or _numeric(texts) else self.kinds.STRING

    def codes(self, column: Input, prep: Preparation) -> str:
        """A column as numbers: as it is, or a text by its place among the values."""
        name = self.named.get(column.name, column.name)  # as the site's files have it
        self.given[name] = self.kind(column)
        if column.values is None or self.given[name] == self.kinds.DOUBLE:
            return name
        spelt = [*GAPS, *prep.gaps]
        gaps = dict.fromkeys([t for gap in spelt for t in (gap, gap.upper(), gap.title())], GONE)
        code_of = gaps | places(column.values)
        for word in ("true", "false"):  # which match in any case
            code_of |= {t: code_of[word] for t in (word.upper(), word.title()) if word in code_of}
        repair = self.repairs.get(column.name)
        if is_mapping(repair):
            code_of |= {text: code_of.get(canonical(str(to)), code_of.get(str(to), -1)) for text, to in repair.items()}
        return self.do(
            "LabelEncoder", name, domain="ai.onnx.ml", keys_strings=list(code_of),
            values_int64s=list(code_of.values()), default_int64=-1,
        )  # fmt: skip

    def repaired(self, column: Input, prep: Preparation) -> tuple[str, str]:
        """(cells with the client's repair, which are missing): numbers by a table before that, by arithmetic after."""
        repair = self.repairs.get(column.name)
        formula = arithmetic(repair, column.name) if isinstance(repair, str) else None

        def other(name: str) -> Cells:
            cells, gone = self.repaired(Input(name), prep)
            return Cells(self, self.do("Where", gone, self.constant(np.nan), cells))

        if formula is not None and OWN not in formula.names:
            cells = formula.value(other).name
            return cells, self.do("IsNaN", cells)
        cells = self.do("Unsqueeze", self.codes(column, prep), self.constant([1]))
        if self.kind(column) == self.kinds.STRING:
            return cells, self.do("Equal", cells, self.constant([[GONE]]))
        if is_mapping(repair):
            raw = cells
            for text, to in repair.items():
                if (value := number(text)) is not None:
                    new = number(str(to))
                    here = self.do("Equal", raw, self.constant(value))
                    cells = self.do("Where", here, self.constant(np.nan if new is None else new), cells)
        gone = self.gone(cells, prep)
        if formula is not None:
            own = Cells(self, cells)
            cells = formula.value(lambda name: own if name == OWN else other(name)).name
            gone = self.do("Or", gone, self.do("IsNaN", cells))
        return cells, gone

    def gone(self, cells: str, prep: Preparation) -> str:
        """Mask of missing numbers: NaN, or one that stands for a gap, such as -999."""
        missing = self.do("IsNaN", cells)
        for text in prep.gaps:
            if _numeric([text]):
                missing = self.do("Or", missing, self.do("Equal", cells, self.constant(float(text))))
        return missing

    def scaled(self, cells: str, gone: str, prep: Preparation, fill: float, shift: float, scale: float) -> str:
        """A number, its gaps filled; where gaps are refused, they come out as NaN."""
        if prep.missing != "refuse":
            cells = self.do("Where", gone, self.constant(fill), cells)
        return self.do("Div", self.do("Sub", cells, self.constant(shift)), self.constant(scale))

    def hot(self, column: Input, cells: str, gone: str, prep: Preparation) -> str:
        """An input per value of a category; what is refused comes out as NaN."""
        values = column.values or ()
        texts = self.kind(column) == self.kinds.STRING
        each = np.arange(len(values))[None] if texts else np.array([[float(v) for v in values]])
        hot = self.cast(self.do("Equal", cells, self.constant(each)), np.float64)
        if prep.missing == "refuse":
            hot = self.do("Where", gone, self.constant(np.nan), hot)
        if prep.unseen == "refuse":
            none = self.do("Less", self.do("ReduceSum", hot, self.constant([1]), keepdims=1), self.constant(0.5))
            unseen = self.do("And", none, self.do("Not", gone))
            hot = self.do("Where", unseen, self.constant(np.nan), hot)
        return hot

    def answer(self, prep: Preparation, at: Statistics) -> None:
        """Outputs as `polyfed predict` prints them; of a language model as they are."""
        output = self.cast("/output", np.float64)
        del self.model.graph.output[:]
        if prep.tokens is not None:
            self.do("Identity", "/output", output="logits")
            return self.show("logits", self.kinds.FLOAT, ["rows", prep.shape[1], None])
        if prep.labels is None:
            shift, scale = at.target or (0.0, 1.0)
            flat = self.do("Reshape", output, self.constant([-1]))
            whole = self.do("Mul", flat, self.constant(scale))
            self.do("Add", whole, self.constant(shift), output=OUTPUTS[0])
            return self.show(OUTPUTS[0], self.kinds.DOUBLE, ["rows"])
        p, n = self.do("Softmax", output, axis=1), len(prep.labels)
        first = [self.constant([0]), self.constant([n]), self.constant([1])]
        self.do("Slice", p, *first, output=OUTPUTS[1])
        labels = self.constant(np.array(prep.labels, dtype=object))
        self.do("Gather", labels, self.do("ArgMax", OUTPUTS[1], axis=1, keepdims=0), output=OUTPUTS[0])
        self.show(OUTPUTS[0], self.kinds.STRING, ["rows"])
        return self.show(OUTPUTS[1], self.kinds.DOUBLE, ["rows", n])

    def show(self, name: str, kind: int, shape: list[Any]) -> None:
        self.model.graph.output.append(self.helper.make_tensor_value_info(name, kind, shape))

    def finished(self) -> Any:
        """The model, checked."""
        graph = self.model.graph
        nodes = [*self.before, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        graph.initializer.extend(self.constants)
        del self.model.opset_import[:]
        self.model.opset_import.extend(self.helper.make_opsetid(name, v) for name, v in OPSETS.items())
        self.checker.check_model(self.model)
        return self.model


class Cells:
    """Numbers of a column [rows, 1] in a graph, with which arithmetic adds nodes to it."""

    def __init__(self, graph: Graph, name: str):
        self.graph, self.name = graph, name

    def _made(self, kind: str, a: "Cells | float", b: "Cells | float") -> "Cells":
        names = [v.name if isinstance(v, Cells) else self.graph.constant(float(v)) for v in (a, b)]
        return Cells(self.graph, self.graph.do(kind, *names))

    def __add__(self, other: "Cells | float") -> "Cells":
        return self._made("Add", self, other)

    def __sub__(self, other: "Cells | float") -> "Cells":
        return self._made("Sub", self, other)

    def __rsub__(self, other: float) -> "Cells":
        return self._made("Sub", other, self)

    def __mul__(self, other: "Cells | float") -> "Cells":
        return self._made("Mul", self, other)

    def __truediv__(self, other: "Cells | float") -> "Cells":
        return self._made("Div", self, other)

    def __rtruediv__(self, other: float) -> "Cells":
        return self._made("Div", other, self)

    def __pow__(self, power: float) -> "Cells":
        return self._made("Pow", self, power)

    def __neg__(self) -> "Cells":
        return self * -1.0

    def __pos__(self) -> "Cells":
        return self

    __radd__, __rmul__ = __add__, __mul__


def _numeric(values: Sequence[str]) -> bool:
    return all(number(v) is not None for v in values)
