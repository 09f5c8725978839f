"""Units that sites mix: "lb -> kg", or "mg/dl -> mmol/l" of a substance, as a change x * scale + shift.

A repair says both units, the file's and the one that the others use: `weight = "lb -> kg"`. The substance is the
column's, by its name, or is said: `bz = "mg/dl -> mmol/l of glucose"`.
"""

import re
from typing import NamedTuple

from polyfed.base.errors import ConfigError, closest
from polyfed.base.text import nfc
from polyfed.base.values import shown

ARROW = re.compile(r"(.+?)\s*(?:->|→)\s*(.+?)(?:\s+of\s+(.+))?")
# of each kind, its units with all their names, in multiples of one of them
SIZES: dict[str, dict[str, float]] = {
    "time": {"seconds sec s": 1, "minutes min": 60, "hours hour hr h": 3600, "days day d": 86400,
             "weeks week wk": 604800, "months month mo": 30.4375 * 86400, "years year yr y a": 365.25 * 86400},
    "mass": {"kg": 1e3, "g gram grams": 1, "mg": 1e-3, "µg ug mcg": 1e-6, "ng": 1e-9, "pg": 1e-12,
             "lb lbs pound pounds": 453.59237, "oz ounces": 28.349523125, "st stone": 6350.29318},
    "amount": {"mol": 1, "mmol": 1e-3, "µmol umol": 1e-6, "nmol": 1e-9, "pmol": 1e-12},
    "length": {"m": 1, "cm": 1e-2, "mm": 1e-3, "km": 1e3, "in inch inches": 0.0254, "ft feet foot": 0.3048},
    "volume": {"l": 1, "dl 100ml": 0.1, "cl": 1e-2, "ml": 1e-3, "µl ul mm3 mm³": 1e-6},
    "pressure": {"mmHg torr": 133.322387415, "kPa": 1e3, "hPa mbar": 100, "Pa": 1, "cmH2O": 98.0665, "bar": 1e5},
    "energy": {"kJ": 1, "J": 1e-3, "kcal": 4.184, "cal": 4.184e-3},
    "share": {"1 share fraction": 1, "% percent": 1e-2, "‰ permille": 1e-3},
    "activity": {"kat": 1, "µkat ukat": 1e-6, "nkat": 1e-9, "U IU": 1e-6 / 60, "mU mIU": 1e-9 / 60,
                 "kU": 1e-3 / 60, "µU uU µIU uIU": 1e-12 / 60},
    "count": {"cells": 1, "10^3 10³ K Tsd thousand": 1e3, "10^6 10⁶ Mio million": 1e6, "10^9 10⁹ G Gpt": 1e9,
              "10^12 10¹² T Tpt": 1e12},
    "equivalents": {"meq": 1e-3, "eq": 1},
}  # fmt: skip
UNITS = {
    name: (kind, float(size)) for kind, by in SIZES.items() for names, size in by.items() for name in names.split()
}
FOLDED = {name.casefold(): unit for name, unit in reversed(UNITS.items())}
DEGREES = {"k": (1.0, 0.0), "c": (1.0, 273.15), "f": (1 / 1.8, 459.67 / 1.8)}  # kelvin = degrees * a + b
# g/mol of substances, by parts of the names of their columns
SUBSTANCES = {
    name: mass
    for names, mass in {
        "gluc gluk glc sugar zucker blutzucker": 180.156, "crea krea kreat": 113.118, "chol ldl hdl": 386.65,
        "trig tg": 885.7, "bili": 584.66, "urea harnstoff uree": 60.055, "bun": 28.0134, "urate uric harnsäure": 168.11,
        "lact lakt": 90.078, "haemoglobin hemoglobin hämoglobin hb hgb": 16114.0, "albumin alb": 66500.0,
        "calc kalz": 40.078, "magn": 24.305, "phos": 30.974,
        "iron eisen ferrum": 55.845, "potass kali": 39.098, "sodium natri": 22.990,
        "vitd vitamind vitamin_d 25oh": 400.64, "b12 cobal": 1355.37, "folat folic": 441.4, "cortisol kortisol": 362.46,
        "testost": 288.42, "estradiol oestradiol": 272.38, "t4 thyrox": 776.87, "t3": 650.97, "ammon": 17.031,
        "homocys": 135.18, "insulin": 5808.0, "transferrin": 79570.0,
    }.items()
    for name in names.split()
}  # fmt: skip


class Change(NamedTuple):
    """A change of units: x * scale + shift."""

    scale: float
    shift: float = 0.0

    def __str__(self) -> str:
        """As arithmetic of x."""
        return f"x * {self.scale!r}" + (f" + {self.shift!r}" if self.shift else "")


def change(text: str, column: str) -> Change:
    """The change that a repair of a column names, as "mg/dl -> mmol/l".

    Raises ConfigError for a unit that is not known, for two that measure different things, and for a mass and an amount
    of a substance that is not known.
    """
    if (match := ARROW.fullmatch(nfc(text).strip())) is None:
        raise ConfigError(f"found {shown(text)}, expected two units, such as lb -> kg")
    before, after, substance = match.groups()
    (kind, *a), (other, *b) = _unit(before), _unit(after)
    if {kind, other} == {"share", "amount/amount"} and "a1c" in (substance or column).casefold():
        ifcc = Change(10.929, -23.497)  # mmol/mol of % (IFCC, NGSP)
        return ifcc if kind == "share" else Change(_short(1 / ifcc.scale), _short(-ifcc.shift / ifcc.scale))
    scale = 1.0
    if kind != other:
        (top, *below), (other_top, *other_below) = kind.split("/"), other.split("/")
        if {top, other_top} != {"mass", "amount"} or below != other_below:
            raise ConfigError(
                f"found {shown(text)}, expected two units of one kind; {before} is {kind}, {after} {other}"
            )
        scale = _mass(substance or column, text) ** (1 if top == "amount" else -1)
    return Change(_short(a[0] * scale / b[0]), _short((a[1] - b[1]) / b[0]))


def _short(value: float) -> float:
    """A factor without the noise of its last digits."""
    return float(f"{value:.12g}")


def _mass(name: str, text: str) -> float:
    """The molar mass of a substance, by the longest part of the name that is known."""
    found = [part for part in SUBSTANCES if part in name.casefold().replace(" ", "")]
    if not found:
        then = f"expected of what at its end, as in {text} of glucose"
        raise ConfigError(f"found {shown(text)} of {shown(name)}, whose molar mass is not known, {then}")
    return SUBSTANCES[max(found, key=len)]


def _unit(text: str) -> tuple[str, float, float]:
    """(kind, scale, shift) of a unit: x * scale + shift is in the unit of its kind."""
    plain = text.strip().replace("μ", "µ").replace(" ", "")
    degree = plain.casefold().removeprefix("°").removeprefix("deg").removesuffix("elsius").removesuffix("ahrenheit")
    if degree.removesuffix("elvin") in DEGREES:
        return ("temperature", *DEGREES[degree.removesuffix("elvin")])
    top, slash, below = plain.partition("/")
    kinds, size = list[str](), 1.0
    for part, sign in ((top, 1), (below, -1)) if slash else ((top, 1),):
        unit = ("count", 1.0) if slash and not part and sign > 0 else UNITS.get(part) or FOLDED.get(part.casefold())
        if unit is None:
            few = "kg, lb, cm, days, months, °F, mmHg, %, mg/dl, µmol/l or 10^9/l"
            raise ConfigError(f"found the unit {shown(text)}{closest(part, UNITS)}, expected one such as {few}")
        kinds.append(unit[0])
        size *= unit[1] ** sign
    return "/".join(kinds), size, 0.0
