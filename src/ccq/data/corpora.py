"""Real text to train and evaluate on: a folder of text files, or the Python sources every installation carries.

Nothing is downloaded. A corpus is a pure function of the files it is read from: names and contents give the split, the
order, the part taken under a cap, and the recorded hash.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_FRACTION = 0.1
MINIMUM_CHARACTERS = 20_000
DEFAULT_MAX_CHARACTERS = 4_000_000

# Tests repeat themselves, the others are tables made by programs, or packages that are not the standard library.
_STDLIB_FOLDERS_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "__pycache__"}
)
_STDLIB_GENERATED_PREFIX = "_sysconfigdata"


@dataclass(frozen=True)
class Corpus:
    """Text documents, split once and for all into a training and a held-out part.

    Attributes:
        source: what was read, in words for a report, such as "Python 3.11.7 standard library".
        train: (name, text) of every training document, sorted by name; a name is the path below the folder, with "/"
            between parts.
        held_out: the same for the documents no training and no tokenizer may see.
        characters: Unicode code points in both parts.
        sha256: hash over names and contents of both parts, in hexadecimal.
    """

    source: str
    train: tuple[tuple[str, str], ...]
    held_out: tuple[tuple[str, str], ...]
    characters: int
    sha256: str


def read_corpus(folder: Path | None = None, *, max_characters: int = DEFAULT_MAX_CHARACTERS) -> Corpus:
    """Read a corpus from a folder of text files, or from the Python standard library.

    Args:
        folder: every file below it is read as UTF-8 text, unchanged. Names starting with "." are skipped, links to
            folders are not followed. None reads the standard library's own `*.py` files, without its tests, idlelib,
            generated tables and site-packages.
        max_characters: upper limit of the corpus, in Unicode code points. Whole files are taken in the order of a hash
            of their names; a file that no longer fits is left out, and the search ends when less than 1 % of the limit
            is open.

    About 10 % of the files are held out, chosen by another hash of the name: a file stays on its side when others are
    added, removed, or left out by the limit. Only a corpus in which one side would be empty moves the one file nearest
    the border. Files with nothing but white space are left out.

    Raises:
        ValueError: the folder is missing, holds fewer than two files with text or fewer than 20,000 characters, or
            holds a file that is binary, not UTF-8, or not readable (the message names it). Only in the standard library
            such files are skipped.
    """
    if max_characters < MINIMUM_CHARACTERS:
        raise ValueError(
            f"max_characters is {max_characters}; give at least {MINIMUM_CHARACTERS:,}, or there is too little text"
        )
    if folder is None:
        root = Path(sysconfig.get_path("stdlib"))
        source = f"Python {platform.python_version()} standard library"
        names = [name for name in _names_below(root, _STDLIB_FOLDERS_LEFT_OUT) if _is_stdlib_source(name)]
    else:
        root = Path(folder)
        if not root.is_dir():
            found = "it is a file" if root.exists() else "it does not exist"
            raise ValueError(f"corpus folder {root}: {found}; give a folder that holds UTF-8 text files")
        source = f"text files of the folder {root.resolve().name}"
        names = _names_below(root, frozenset())

    texts: dict[str, str] = {}
    open_characters = max_characters
    for name in sorted(names, key=lambda name: stable_hash("order", name)):
        if open_characters < max_characters / 100:
            break
        path = root / name
        try:
            text = read_text(path, open_characters)
        except ValueError:
            if folder is None:
                continue
            raise
        if text is not None and text.strip() and len(text) <= open_characters:
            texts[name] = text
            open_characters -= len(text)

    characters = max_characters - open_characters
    if len(texts) < 2 or characters < MINIMUM_CHARACTERS:
        if folder is None:
            remedy = "this Python carries no readable sources of its library: give a folder of UTF-8 text files instead"
        else:
            remedy = (
                f"needed are at least 2 files (one is held out) and {MINIMUM_CHARACTERS:,} characters: "
                "add text, split a single file into several, or raise max_characters"
            )
        raise ValueError(
            f"too little text in {root}: of {len(names)} files, {len(texts)} with {characters:,} characters "
            f"could be taken (max_characters is {max_characters:,}); {remedy}"
        )
    train, held_out = _split(texts)
    return Corpus(source=source, train=train, held_out=held_out, characters=characters, sha256=_sha256(train, held_out))


def _names_below(root: Path, folders_left_out: frozenset[str]) -> list[str]:
    """Sorted relative paths of all files below `root`; hidden names and the given folders are not entered."""

    def unreadable(error: OSError) -> None:
        raise ValueError(
            f"corpus folder {error.filename} cannot be read ({error.strerror}); make it readable or move it away"
        )

    names = []
    for parent, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in folders_left_out]
        names += [(Path(parent) / file).relative_to(root).as_posix() for file in files if not file.startswith(".")]
    return sorted(names)


def _is_stdlib_source(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(_STDLIB_GENERATED_PREFIX)


def read_text(path: Path, most_characters: int = sys.maxsize) -> str | None:
    """The file as text; None, without reading it, when its size rules out that it has at most `most_characters`.

    Raises:
        ValueError: the file is binary, not UTF-8, or not readable.
    """
    accepted = "every file of a corpus folder must be readable UTF-8 text"
    try:
        information = path.stat()
        if not stat.S_ISREG(information.st_mode):
            raise ValueError(f"{path} is not a regular file; {accepted}: move it out of the folder")
        if information.st_size > 4 * most_characters:  # UTF-8 spends at most 4 bytes on a character
            return None
        data = path.read_bytes()
    except OSError as error:
        remedy = "make it readable or move it out of the folder"
        raise ValueError(f"{path} cannot be read ({error.strerror}); {accepted}: {remedy}") from error
    if b"\0" in data:
        remedy = "convert it to text or move it out of the folder (names starting with a dot are skipped)"
        raise ValueError(f"{path} is binary (NUL byte at offset {data.index(0)}); {accepted}: {remedy}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        remedy = "convert it to UTF-8 (for instance with iconv) or move it out of the folder"
        raise ValueError(
            f"{path} is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start}); {accepted}: {remedy}"
        ) from error


def stable_hash(purpose: str, text: str) -> int:
    """64 bits of a name or a text; the purpose keeps the order under a cap independent of the split."""
    return int.from_bytes(hashlib.sha256(f"{purpose}\0{text}".encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _split(texts: dict[str, str]) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    by_hash = sorted(texts, key=lambda name: stable_hash("split", name))
    held_out_count = sum(stable_hash("split", name) < HELD_OUT_FRACTION * 2**64 for name in by_hash)
    held_out_count = min(max(held_out_count, 1), len(by_hash) - 1)

    def part(names: list[str]) -> tuple[tuple[str, str], ...]:
        return tuple((name, texts[name]) for name in sorted(names))

    return part(by_hash[held_out_count:]), part(by_hash[:held_out_count])


def _sha256(*parts: Iterable[tuple[str, str]]) -> str:
    """Each name and text is preceded by its length in bytes, so that no two corpora spell the same stream."""
    digest = hashlib.sha256()
    for name, text in sorted(document for part in parts for document in part):
        for data in (name.encode("utf-8", "surrogateescape"), text.encode()):
            digest.update(len(data).to_bytes(8, "big"))
            digest.update(data)
    return digest.hexdigest()
