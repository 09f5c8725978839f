"""--portable: the same bits on every x86-64 processor with AVX2. Which instructions torch, MKL, oneDNN, OpenBLAS and
numpy use decides the last bits; they choose when they are imported, so the variables are set before.
"""

import gzip
import json
import os
import sys
import tomllib
import zlib
from pathlib import Path

from polyfed.base.errors import ConfigError
from polyfed.base.system import again

VARIABLES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",  # MKL promises equal bits on processors of different makers for nothing above it
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "POLYFED_NATIVE": "avx2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL",
}
own_process = False  # whether this is the program, which may be started again, and not a call from another one


def pin() -> None:
    """Set the variables; where torch or numpy is there already, start the program again with them.

    Raises ConfigError where that cannot be: called from a program that goes on, or without AVX2.
    """
    if all(os.environ.get(name) == value for name, value in VARIABLES.items()):
        _check()
    elif not {"torch", "numpy"} & sys.modules.keys():
        os.environ.update(VARIABLES)
        _check()
    elif own_process:
        sys.stdout.flush()
        again(**VARIABLES)
    else:
        names = ", ".join(f"{k}={v}" for k, v in list(VARIABLES.items())[:3])
        raise ConfigError(f"--portable: torch is loaded already; set {names}, ... before, or use the command polyfed")


def _check() -> None:
    import torch

    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        capability = torch.backends.cpu.get_cpu_capability()
        raise ConfigError(f"--portable: found a processor with {capability}, expected x86-64 with AVX2")


def asked_by(path: Path) -> bool:
    """True where a file, or that of a run or comparison folder, or a record's first line says portable = true.

    Damage is reported later.
    """
    try:
        with gzip.open(path) as f:
            return json.loads(f.readline(1000)).get("portable") is True
    except (OSError, EOFError, zlib.error, ValueError, AttributeError):
        pass
    for place in (path, path / "comparison.toml", path / "config.toml"):
        try:
            return tomllib.loads(place.read_text("utf-8")).get("portable") is True
        except (OSError, ValueError, RecursionError):
            continue
    return False
