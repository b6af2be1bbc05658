"""Has this process touched an accelerator? Asked of the driver itself, without touching it.

A process in which ``cuInit`` has succeeded cannot be forked into one that uses CUDA, and torch's
own flag misses half of the ways to get there. The driver knows: before ``cuInit`` each of its
calls returns CUDA_ERROR_NOT_INITIALIZED, and asking changes nothing (measured on an H200).
"""

from __future__ import annotations

import ctypes
import os

from . import loaded

_SUCCESS = 0


def cuda_is_initialized() -> bool:
    """Whether CUDA is initialised in this process; False wherever its driver is not even loaded."""
    paths = loaded.libraries("libcuda.so")
    if not paths:
        return False
    try:
        driver = ctypes.CDLL(paths[0], mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        code: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):  # unloaded meanwhile; not the driver it is named after
        return False
    return code == _SUCCESS
