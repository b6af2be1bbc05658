"""Pickles functions with the file, or the cell, that they were written in."""

from __future__ import annotations

import types
from typing import Any

import cloudpickle

_FILENAME = 10
"""The place of the file's name among the arguments of `types.CodeType` (Python 3.8 to 3.14)."""


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle whose functions still know where their source is.

    Since 3.1.3, cloudpickle writes "<dynamic-code>" in place of the file's name, so that equal
    functions are equal bytes. With that, a traceback has no line of a function of the notebook,
    `inspect.getsource` fails, and a debugger shows nothing.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.CodeType:
            make, arguments = self.dispatch_table[types.CodeType](obj)
            named = (*arguments[:_FILENAME], obj.co_filename, *arguments[_FILENAME + 1 :])
            return make, named
        return super().reducer_override(obj)
