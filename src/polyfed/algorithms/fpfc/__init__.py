"""FPFC: `method` is the algorithm, `pairs` and `devicedual` its server, `window` and `theory` advise on settings."""

from polyfed.algorithms.fpfc.method import FPFC
from polyfed.algorithms.fpfc.theory import proven
from polyfed.algorithms.fpfc.window import Window, lambda_window

__all__ = ["FPFC", "Window", "lambda_window", "proven"]
