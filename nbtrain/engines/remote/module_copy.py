"""A copy of the modules beside the notebook, on a node that does not see the notebook's folder."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from .dependencies import Fingerprint, fingerprint


class ModuleCopy:
    """Keeps the copy in a temporary folder, and that folder in the `sys.path` of this process.

    Ranks that are started later get this `sys.path`. There is no copy before `unpack`.
    """

    def __init__(self) -> None:
        self._path = list(sys.path)
        self._files: Fingerprint = ()
        self._place = ""

    def is_needed(self, folder: str, files: Fingerprint) -> bool:
        """Return whether this node needs a copy of some files in `folder`, the notebook's.

        It does not if it sees these files there, or has a copy of them. Any other copy is deleted.
        """
        if files == self._files:
            return False
        self.delete()
        return bool(files) and fingerprint(Path(folder)) != files

    def unpack(self, folder: str, files: Fingerprint, packed: bytes) -> None:
        """Make the copy from a zip. It comes before `folder` in `sys.path`.

        It is a new folder each time: bytecode of an earlier module with the same size would be
        used for a module that was changed within a second. Raises `OSError`.
        """
        self._place = tempfile.mkdtemp(prefix="nbtrain-modules-")
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(self._place)
        path = []
        for entry in self._path:
            if Path(entry).is_relative_to(folder):  # it may also be a folder in `folder`
                copy = os.path.join(self._place, os.path.relpath(entry, folder))
                path += [os.path.normpath(copy)] if os.path.isdir(copy) else []
            path.append(entry)
        sys.path[:], self._files = path, files

    def delete(self) -> None:
        """Delete the copy, if there is one."""
        sys.path[:] = self._path
        if self._place:
            shutil.rmtree(self._place, ignore_errors=True)
        self._place, self._files = "", ()
