"""Files that are whole or absent: a reader, or a run that was killed while writing, never meets half a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_bytes_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace `path` by `data` so that a kill at any moment leaves either the old file or the new one.

    The bytes go to a temporary file in the same folder (a rename is atomic only inside one file system), are flushed to
    the disk, and the file is renamed over `path`. The folder must exist.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json_atomically(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. NaN and infinities are refused: they are not JSON."""
    write_bytes_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())
