"""Files that are whole or absent: a reader, or a run that was killed while writing, never meets half a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_bytes_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace `path` by `data` so that a kill at any moment leaves either the old file or the new one.

    The bytes go to a temporary file in the same folder (a rename is atomic only inside one file system), are flushed to
    the disk, and the file is renamed over `path`. The folder must exist.

    Raises:
        OSError: it cannot be written; the error names `path`, not the temporary file.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_json_atomically(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. NaN and infinities are refused: they are not JSON."""
    write_bytes_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Hash of the file's content, in hexadecimal, read piece by piece."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def lock_folder(folder: str | os.PathLike[str], activity: str) -> Iterator[None]:
    """Hold a folder for this process, through the file `.lock` in it. The lock ends with the process.

    Args:
        folder: it must exist.
        activity: what is running in the folder, for the message, such as "comparison".

    Raises:
        ValueError: another process holds the folder.
    """
    folder = Path(folder)
    with open(folder / ".lock", "w") as file:
        try:
            import fcntl
        except ImportError:  # not on Windows, where two processes in one folder are not guarded against
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another {activity} is running in {folder}; wait for it to end") from None
        yield


def claim_folder(
    folder: Path,
    name: str,
    settings: dict[str, Any],
    activity: str,
    *,
    compared: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """Make a folder that of an activity with these settings, or find that it already is.

    Args:
        folder: made if missing.
        name: the file with the settings, which marks the folder.
        settings: JSON values.
        activity: what runs in the folder, for messages, such as "comparison".
        compared: the part of the settings that must stay as it is; all of it unless given.

    Raises:
        ValueError: the folder belongs to other settings (the message names them), or holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --out takes the folder of a {activity}, which is made if missing")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    asked = json.loads(json.dumps(settings))
    if not file.exists():
        strangers = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        if strangers:
            raise ValueError(
                f"{folder} holds other files ({', '.join(strangers[:5])}) and no {activity}; choose an empty or new "
                "folder with --out"
            )
        write_json_atomically(file, asked)
        return
    try:
        different = setting_differences(compared(json.loads(file.read_bytes())), compared(asked))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete {folder} or choose another --out") from error
    if different:
        raise ValueError(
            f"{folder} holds a {activity} with other settings: {'; '.join(different)}. Choose another --out, or delete "
            "the folder"
        )


def setting_differences(found: Any, asked: Any, name: str = "") -> list[str]:
    """The settings in which a folder differs from what is asked for, as text; both are JSON values."""
    if isinstance(found, dict) and isinstance(asked, dict):
        prefix = f"{name}." if name else ""
        return [
            line
            for key in dict.fromkeys((*found, *asked))
            for line in setting_differences(found.get(key), asked.get(key), prefix + key)
        ]
    if found == asked:
        return []
    return [f"{name} is {json.dumps(found)} there and {json.dumps(asked)} here"]
