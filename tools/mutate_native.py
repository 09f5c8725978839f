"""Mutations of the compiled kernel for `mutate.py`: one library holds all of them, and an environment variable says
which one is made. The sources that are installed know nothing of it."""

import os
import shlex
import subprocess
import sysconfig
import tempfile
import tomllib
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "src/polyfed/native"
TESTS = [
    f"tests/native/test_{name}.py"
    for name in ("networks", "chains", "kernel", "convolutions", "channels", "recurrent", "attention")
] + ["tests/core/test_schedule.py"]
SWITCH = "POLYFED_MUTANT"
MUTATIONS = (  # what was there, a statement or an expression, and what is
    ("for (int64_t o = l.out; o < l.ldz; o++) z[i * l.ldz + o] = 0;", ";"),
    ("(v > top) | (v != v)", "(v >= top) | (v != v)"),
    ("moved > 1e-24 * std::max(1.0, length)", "moved > 0"),
    ("(T)2 / ((T)b * (T)l.out)", "(T)2 / (T)b"),
    ("a <= 0 ? V<T>{} : V<T>{} + 1", "a < 0 ? V<T>{} : V<T>{} + 1"),
    ("1 - a * a", "1 - a"),
    ("x = x < lowest ? lowest : x;", ";"),
    ("found[m * N + n] + (bias ? bias[n] : 0)", "found[m * N + n]"),
    ("(bias ? bias[k / C] : 0)", "0"),
    ("load<T>(bias + k % N * L)", "V<T>{}"),
    ("if (add) old += load<T>(add + i);", "if (add) old += keep * load<T>(add + i);"),
    ("(k ? into[i] : 0)", "0"),
    ("(c == 0 || job.only_each)", "(c == 0)"),
    ("if (l.bias_some && l.bias_some[o] == 0) continue;", ";"),
    ("keep * l.bias[o] + (l.bias_add ? l.bias_add[o] : 0)", "l.bias[o] + (l.bias_add ? l.bias_add[o] : 0)"),
    ("std::fill(w + o * l.ld + l.in, w + (o + 1) * l.ld, (T)0);", ";"),
    ("(k / c.pool_wide * c.width + k % c.pool_wide)", "(k % c.pool_wide * c.width + k / c.pool_wide)"),
    ("std::fill(c.gradient + r * c.ld + c.in, c.gradient + (r + 1) * c.ld, (T)0);", ";"),
    ("only && only[i] == 0 ? w[i] : kept[i] * w[i]", "kept[i] * w[i]"),
    ("times(l->bias, l->bias_kept, l->bias_some, l->biases)", "times(l->bias, l->bias_kept, nullptr, 0)"),
    ("found < 0 || found >= classes", "found < 0 || found > classes"),
    ("first ? sum[m][c] : load<T>(to) + sum[m][c]", "sum[m][c]"),
    ("from + vectors * L", "from + vectors * L + 1"),
    ("squares[l] += squared<T>(w + l * p + from, vectors);", "squares[l] = squared<T>(w + l * p + from, vectors);"),
    ("keep * load<T>(held + i + k * L)", "load<T>(held + i + k * L)"),
    ("z < 0 ? tail : 1 - tail", "tail"),
    ("below + z * e * (T)0.3989422804014327", "below"),
    ("z * gate * (1 - gate)", "z * gate"),
    ("std::fill(seen + l.in, seen + l.ldz, (T)0);", ";"),
    ("std::fill(back + l.in, back + l.ldz, (T)0);", ";"),
    ("load<T>(back + o) - mean - share * load<T>(seen + o)", "load<T>(back + o) - mean"),
    ("std::fill(l.*biases + l.biases, l.*biases + l.ldb, (T)0);", ";"),
    ("x = x ^ x >> 16 ^ low;", "x = x ^ x >> 16;"),
    ("(l.dropouts + 1)", "(uint32_t)1"),
    ("if (l.more) g += load<T>(l.more + i);", ";"),
    ("if (added) a += load<T>(added + o);", ";"),
    ("found > -1 && found < (T)p.rows", "found > -1 && found <= (T)p.rows"),
    ("first * rows + j * std::min(2 * L, ld - first) + o - first", "first * rows + j * 2 * L + o - first"),
    ("load<T>(rows + k * ld + o + m)", "load<T>(rows + k * ld + o)"),
    ("groups * high * wide * down * right == 1 && !up && !left", "groups * high * wide == 1"),
    ("store<T>(turned_back + panel(rows, whole(in), o, j), load<T>(w + j));", ";"),
    ("(load<T>(row + o) - top) * scale", "(load<T>(row + o) - top)"),
    ("std::fill(row + n, row + ld, top[0]);", ";"),
    (
        "load<T>(a.share + o) * (load<T>(l.slope + o) - sum) * scale",
        "load<T>(a.share + o) * load<T>(l.slope + o) * scale",
    ),
    ("l.seen + (i * l.grid.groups + h) * n * whole(n)", "l.seen + h * n * whole(n)"),
    ("learn(l.slope, a.query, apart, into + l.out);", ";"),
    ("learn(a.share, delta, l.ldz, into + 2 * l.out);", ";"),
    ("std::fill(a.made, a.made + n * whole(d), (T)0);", ";"),
    ("copy_rows(a.made, whole(d), into, apart, n, d);", ";"),
    ("load<T>(l.input[i] + o) + load<T>(l.w + i % l.spots * l.ld + o)", "load<T>(l.input[i] + o) + load<T>(l.w + o)"),
    ("load<T>(l.w + at + o) + load<T>(l.delta + i * l.ldz + o)", "load<T>(l.delta + i * l.ldz + o)"),
    ("least = std::min(least, g);", "least = g;"),
    ("for (auto &p : parts) std::fill(p.gradient, p.gradient + p.rows * p.ld, (T)0);", ";"),
    ("load<T>(before + o) - by[2]", "load<T>(before + o)"),
    ("a += by[0] * b, last = b;", "a += b, last = b;"),
    ("by[1] * load<T>(cell + o) + by[0] * by[2]", "by[0] * by[2]"),
    ("found[2] * last * a * (1 - a)", "found[2] * a * (1 - a)"),
    ("store<T>(carry, d * b);", "store<T>(carry, d);"),
    ("load<T>(held) + d * out * (1 - bend * bend)", "d * out * (1 - bend * bend)"),
    ("gru && g == 2 ? found[g] * a : found[g]", "found[g]"),
    ("store<T>(carried + i, load<T>(carried + i) + load<T>(sums + i));", "store<T>(carried + i, load<T>(sums + i));"),
    ("std::fill(carried, part, (T)0);", ";"),
    ("load<T>(w + r * skip + (r * wide + j) * ld + o)", "load<T>(w + (r * wide + j) * ld + o)"),
    ("x + r * down + j * ld + o", "x + r * down + o"),
    ("sum[m] = load<T>(gradient + m * ld + o);", "sum[m] = V<T>{};"),
    ("std::fill(l.band, l.band + g.high * g.wide * l.ldz, (T)0);", ";"),
    ("l.turned_back[turned * back + o]", "l.turned_back[(r * l.in + j) * back + o]"),
    ("((g.up - y) % g.every + g.every) % g.every", "(int64_t)0"),
    ("l ? l->flat(i) : i", "i"),
    ("l.taps ? l.before : 1", "1"),
    ("found * share", "found"),
    ("by && l.rows ? sums[o] * l.w[o] : sums[o]", "sums[o]"),
    ("(T)(per * l.spots)", "(T)per"),
    ("g - load<T>(mean + o) - load<T>(share + o) * load<T>(seen + k + o)", "g - load<T>(mean + o)"),
    ("spread(l, mean, true);", "spread(l, mean, false);"),
    ("right == 1 && channels == ld", "right == 1"),
    ("g.cells_high * g.cells_wide * g.high * g.wide == l.before", "true"),
    ("g.high == g.down && g.wide == g.right", "true"),
    ("if (l.frozen || l.learnt) return;", "if (l.frozen) return;"),
    ("l.steep ? v : activated<T>(v, l.kind)", "v"),
    ("l.kind == NONE && !l.steep && !l.more", "l.kind == NONE && !l.steep"),
)


def jobs() -> list[dict]:
    """Every mutation as `mutate.py` has them, with its line."""
    source = (ROOT / FOLDER / "train.inc").read_text()
    return [
        {"file": "native/train", "line": source.split(was)[0].count("\n") + 1, "in": "", "kind": "by hand",
         "was": was, "is": put} for was, put in MUTATIONS
    ]  # fmt: skip


def switched(source: str) -> str:
    """train.inc with all mutations, none of which is made where the switch is 0."""
    for k, (was, put) in enumerate(MUTATIONS, 1):
        assert source.count(was) == 1, was
        if was.endswith(";"):
            source = source.replace(was, f"if (MUTANT == {k}) {{ {put} }} else {{ {was} }}")
        else:
            source = source.replace(was, f"(MUTANT == {k} ? ({put}) : ({was}))")
    return source


@cache
def library() -> bytes:
    """The kernel with the switch, compiled once, as it is when installed but for less optimisation."""
    (module,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    switch = f'static const int MUTANT = std::getenv("{SWITCH}") ? std::atoi(std::getenv("{SWITCH}")) : 0;\n'
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "train.inc").write_text(switched((ROOT / FOLDER / "train.inc").read_text()))
        kernel = (ROOT / FOLDER / "kernel.cpp").read_text()
        (place / "kernel.cpp").write_text(kernel.replace("enum Activation", switch + "enum Activation", 1))
        compiler = shlex.split(sysconfig.get_config_var("CXX") or "c++")
        words = [*compiler, *module["extra-compile-args"], "-O1", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
        subprocess.run(words, cwd=place, check=True)
        return (place / "kernel.so").read_bytes()


@contextmanager
def made(m: dict, copy: Path):
    """One mutation, in a copy of the checkout and for the processes that begin meanwhile."""
    folder = copy / FOLDER
    for old in folder.glob("_kernel*.so"):
        old.unlink()
    (folder / "_kernel.so").write_bytes(library())
    os.environ[SWITCH] = str(1 + MUTATIONS.index((m["was"], m["is"])))
    try:
        yield
    finally:
        del os.environ[SWITCH]
