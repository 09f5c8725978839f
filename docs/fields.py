"""An extension of griffe, which reads sources: the reference shows what classes with settings make of their fields.

The docstring has the settings as parameters, and a signature their defaults.
"""

import inspect
from dataclasses import MISSING
from importlib import import_module
from typing import Any

import griffe

from polyfed.base.settings import Configured, settings_of


class Fields(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        fields = [a for a in cls.attributes.values() if str(a.value).startswith("setting(")]
        if not fields or cls.docstring is None:
            return
        made: Any = getattr(import_module(cls.module.path), cls.name, None)
        if not (inspect.isclass(made) and issubclass(made, Configured)):
            return
        cls.docstring.value = str(inspect.getdoc(made))
        defaults = {s.name: s.default for s in settings_of(made)}
        for a in fields:
            a.value = None if defaults[a.name] is MISSING else repr(defaults[a.name])
