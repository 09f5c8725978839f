"""FPFC: `method` is the algorithm; `pairs` and `devicedual` are its server; `window` is advice on lambda."""

from polyfed.algorithms.fpfc.method import FPFC
from polyfed.algorithms.fpfc.window import Window, lambda_window

__all__ = ["FPFC", "Window", "lambda_window"]
