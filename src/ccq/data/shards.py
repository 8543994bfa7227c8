"""Tokens on disk: a folder of raw shards that are mapped into memory, and an index that says what they hold.

    index.json                 what was tokenised how, counts, checksums; written last
    tokenizer.json             the tokenizer, as the `tokenizers` library reads it
    train-00000.tokens         token ids, uint16 or uint32, little-endian, nothing else
    train-00000.documents      where documents start in that shard, uint32, little-endian, counted in tokens
    held_out-00000.tokens ...  the same for the documents that no training may see
    progress.json, *.partial   only while the folder is being prepared

A part (train, held_out) is one stream of tokens, cut into shards of equal length without regard to documents; the last
one holds the rest. A document belongs to the shard in which it starts. Every file but those of the last line is whole
or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypedDict

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ccq.files import sha256_of_file, write_json_atomically

SCHEMA = "ccq-shards/1"
PROGRESS_SCHEMA = "ccq-shards-progress/1"
INDEX_FILE, PROGRESS_FILE, TOKENIZER_FILE = "index.json", "progress.json", "tokenizer.json"
PARTS = ("train", "held_out")
MOST_SHARD_TOKENS = 2**31
"""Positions in a shard are uint32."""

_POSITION = np.dtype("<u4")
_PARTIAL = ".partial"
_NAMED_PROBLEMS = 5


class ShardEntry(TypedDict):
    """What the index says of one shard."""

    tokens: int
    documents: int
    """Documents that start in it."""
    sha256: str
    documents_sha256: str


class TokenStream(Protocol):
    """Tokens of many documents, one after the other."""

    @property
    def tokens(self) -> int: ...

    @property
    def documents(self) -> int: ...

    @property
    def sha256(self) -> str:
        """Hash of the tokens and of the document boundaries."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.integer[Any]]:
        """Tokens start ... stop - 1. Raises IndexError outside 0 <= start <= stop <= tokens."""
        ...

    def document_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Positions in the stream, from start to stop - 1, at which a document starts; rising."""
        ...


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest dtype of a shard that holds the ids 0 ... vocabulary_size - 1: uint16 or uint32, little-endian."""
    if not 1 <= vocabulary_size <= 2**32:
        raise ValueError(f"the vocabulary has {vocabulary_size:,} tokens; shards hold 1 to {2**32:,} (uint32)")
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


class TokenArray:
    """A token stream in memory.

    Args:
        array: integer [tokens].
        document_starts: position of the first token of each document, rising; by default one document starts at 0.

    Raises:
        TypeError: the array is not a one-dimensional integer array.
        ValueError: a document starts outside the array, or the starts do not rise.
    """

    def __init__(self, array: NDArray[np.integer[Any]], document_starts: Sequence[int] | None = None) -> None:
        if not isinstance(array, np.ndarray) or array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"tokens are {found}; give a one-dimensional integer numpy array")
        default = [0] if len(array) else []
        self._starts = np.asarray(default if document_starts is None else document_starts, dtype=np.int64)
        bounded = not len(self._starts) or 0 <= self._starts[0] <= self._starts[-1] < len(array)
        if not bounded or (np.diff(self._starts) <= 0).any():
            raise ValueError(
                f"document_starts must rise within 0 ... {len(array) - 1}, got {self._starts[:8].tolist()}"
            )
        self._array = array

    @property
    def tokens(self) -> int:
        return len(self._array)

    @property
    def documents(self) -> int:
        return len(self._starts)

    @cached_property
    def sha256(self) -> str:
        little_endian = self._array.astype(self._array.dtype.newbyteorder("<"), copy=False)
        digest = hashlib.sha256(f"{little_endian.dtype.str} {self.tokens} {self.documents}\n".encode())
        digest.update(np.ascontiguousarray(little_endian).data)
        digest.update(self._starts.astype("<i8").data)
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> NDArray[np.integer[Any]]:
        _check_range(start, stop, self.tokens)
        return self._array[start:stop]

    def document_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        _check_range(start, stop, self.tokens)
        first, end = np.searchsorted(self._starts, (start, stop))
        return self._starts[first:end]


class TokenPart:
    """One part of a prepared folder as one token stream.

    Shards are mapped into memory when they are first read, so nothing is copied and processes of one machine share the
    pages. Pickling carries the paths, not the tokens.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], shards: Sequence[ShardEntry]) -> None:
        self.folder, self.name, self.dtype, self.shards = folder, name, dtype, tuple(shards)
        self._ends = np.cumsum([shard["tokens"] for shard in shards], dtype=np.int64)
        self._document_ends = np.cumsum([shard["documents"] for shard in shards], dtype=np.int64)
        self._mapped: dict[tuple[int, str], NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}

    @property
    def tokens(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def documents(self) -> int:
        return int(self._document_ends[-1]) if len(self._document_ends) else 0

    @property
    def sha256(self) -> str:
        return _part_sha256(self.dtype, self.shards)

    def read(self, start: int, stop: int) -> NDArray[np.integer[Any]]:
        """Tokens start ... stop - 1, read-only; a view of the mapped file where one shard holds them all."""
        _check_range(start, stop, self.tokens)
        pieces = [
            self._map(shard, ".tokens")[max(start - offset, 0) : stop - offset]
            for shard, offset in self._shards_between(start, stop)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    def document_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        _check_range(start, stop, self.tokens)
        found = [np.empty(0, np.int64)]
        for shard, offset in self._shards_between(start, stop):
            positions = self._map(shard, ".documents")
            first, end = np.searchsorted(positions, (max(start - offset, 0), stop - offset))
            found.append(positions[first:end].astype(np.int64) + offset)
        return np.concatenate(found)

    def document(self, number: int) -> NDArray[np.integer[Any]]:
        """All tokens of a document, counted from 0. Raises IndexError where there is none of that number."""
        if not 0 <= number < self.documents:
            raise IndexError(f"document {number} does not exist; {self.name} has {self.documents:,}, counted from 0")
        stop = self._start_of(number + 1) if number + 1 < self.documents else self.tokens
        return self.read(self._start_of(number), stop)

    def _start_of(self, document: int) -> int:
        shard = int(np.searchsorted(self._document_ends, document, side="right"))
        before = int(self._document_ends[shard - 1]) if shard else 0
        return self._offset(shard) + int(self._map(shard, ".documents")[document - before])

    def _shards_between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Number and first token of every shard that holds a token of start ... stop - 1."""
        if start == stop:
            return
        first, last = np.searchsorted(self._ends, (start, stop - 1), side="right")
        for shard in range(int(first), int(last) + 1):
            yield shard, self._offset(shard)

    def _offset(self, shard: int) -> int:
        return int(self._ends[shard - 1]) if shard else 0

    def _map(self, shard: int, kind: str) -> NDArray[Any]:
        if (shard, kind) not in self._mapped:
            path = shard_path(self.folder, self.name, shard, kind)
            dtype = self.dtype if kind == ".tokens" else _POSITION
            # An empty file cannot be mapped: a shard inside of one long document has no start.
            empty = kind == ".documents" and not self.shards[shard]["documents"]
            self._mapped[shard, kind] = np.empty(0, dtype) if empty else np.memmap(path, dtype, mode="r")
        return self._mapped[shard, kind]


class TokenFolder:
    """A prepared folder. Made by `TokenFolder.open`.

    Attributes:
        path: the folder.
        index: the content of index.json.
        train, held_out: the two token streams.
    """

    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        self.path, self.index = path, index
        dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[index["dtype"]])
        self.train, self.held_out = (
            TokenPart(path, part, dtype, index["parts"][part]["shards"]) for part in ("train", "held_out")
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TokenFolder:
        """Open a prepared folder and check the size of every file; `verify` checks the contents.

        Raises:
            ValueError: the folder is missing or not finished, its index is damaged, or shards are missing or have
                another size than the index says; the message names the files and what to do.
        """
        path = Path(path)
        file = path / INDEX_FILE
        if not file.exists():
            if (path / PROGRESS_FILE).exists():
                raise ValueError(
                    f"{path} is not finished; run its `ccq data prepare` command again, it goes on from there"
                )
            found = "holds no index.json" if path.is_dir() else "is not a folder" if path.exists() else "does not exist"
            raise ValueError(f"{path} {found}; give a folder made by `ccq data prepare`")
        remedy = "copy it again from where it was prepared, or delete the folder and prepare it again"
        try:
            index = json.loads(file.read_bytes())
            schema = index["schema"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}); {remedy}") from error
        if schema != SCHEMA:
            raise ValueError(
                f"{file} has the schema {schema!r}; this version reads {SCHEMA!r}: prepare the folder again"
            )
        try:
            folder = cls(path, index)
            for part in folder._parts:
                if part.sha256 != index["parts"][part.name]["sha256"]:
                    raise ValueError(f"the checksums of {part.name} do not fit together")
            problems = [problem for part in folder._parts for problem in _size_problems(part)]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}); {remedy}") from error
        if problems:
            more = len(problems) - _NAMED_PROBLEMS
            shown = "; ".join(problems[:_NAMED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
            raise ValueError(f"{shown}. Copy what is named again, or delete {path} and prepare it again")
        return folder

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return int(self.index["vocabulary"])

    @property
    def tokenizer_file(self) -> Path:
        return self.path / TOKENIZER_FILE

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer the text was encoded with. Raises ValueError where its file is missing or damaged."""
        try:
            return tokenizers.Tokenizer.from_file(str(self.tokenizer_file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{self.tokenizer_file} is missing or damaged ({error}); copy it again") from error

    def beginnings(self, tokens: int = 60) -> dict[str, str]:
        """The text of the first so many tokens of each part that has a document, special tokens included."""
        tokenizer = self.tokenizer()
        return {
            part.name: tokenizer.decode(part.document(0)[:tokens].tolist(), skip_special_tokens=False)
            for part in self._parts
            if part.documents
        }

    def files(self) -> list[Path]:
        """Every file with a checksum."""
        return [self.tokenizer_file, *(path for part in self._parts for path, _ in _checksums(part))]

    def verify(self) -> Iterator[str | None]:
        """Read every file of `files` in turn and compare its checksum: None if it is right, else one line that names
        the file.
        """
        checksums = [(self.tokenizer_file, self.index["tokenizer"]["sha256"])]
        for path, expected in checksums + [pair for part in self._parts for pair in _checksums(part)]:
            try:
                yield None if sha256_of_file(path) == expected else f"{path} is damaged: its checksum is another"
            except FileNotFoundError:
                yield f"{path} is missing"

    @property
    def _parts(self) -> tuple[TokenPart, TokenPart]:
        return self.train, self.held_out


def shard_path(folder: Path, part: str, number: int, kind: str) -> Path:
    """Path of a shard's file; `kind` is ".tokens" or ".documents"."""
    return folder / f"{part}-{number:05}{kind}"


class ShardWriter:
    """Writes the shards of a folder, document by document, so that a kill at any moment loses only the documents since
    the last `commit`.

    An unfinished shard is a file `*.partial` that only grows. `commit` flushes it to the disk and records its length;
    a writer that goes on from that record cuts off whatever was written later.

    Args:
        folder: it must exist.
        dtype: see `token_dtype`.
        shard_tokens: tokens in a shard.
        record: what the last `commit` wrote to progress.json; None to start anew.

    Raises:
        ValueError: files that the record names are missing or too short.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], shard_tokens: int, record: dict[str, Any] | None = None
    ) -> None:
        self.folder, self._dtype = folder, dtype
        parts = {} if record is None else record["parts"]
        self._parts = {part: _PartWriter(folder, part, dtype, shard_tokens, parts.get(part)) for part in PARTS}

    def tokens(self, part: str) -> int:
        """Tokens of the part so far."""
        return self._parts[part].total_tokens

    @property
    def finished_shards(self) -> int:
        """Of both parts."""
        return sum(len(part.shards) for part in self._parts.values())

    def append(self, part: str, document: NDArray[np.integer[Any]]) -> None:
        """Append the tokens of one document [tokens], at least one, of the writer's dtype."""
        self._parts[part].append(document)

    def commit(self, record: dict[str, Any]) -> None:
        """Put all documents so far on the disk, together with `record`, which must be JSON."""
        state = {name: part.flush() for name, part in self._parts.items()}
        write_json_atomically(self.folder / PROGRESS_FILE, {"schema": PROGRESS_SCHEMA, **record, "parts": state})
        for part in self._parts.values():
            part.name_finished()

    def finish(self, record: dict[str, Any], index: dict[str, Any]) -> None:
        """Commit, write `index` with the parts added to it, and remove what only an unfinished folder has."""
        for part in self._parts.values():
            part.finish()
        self.commit(record)
        parts = {
            name: {
                "tokens": part.total_tokens,
                "documents": sum(shard["documents"] for shard in part.shards),
                "sha256": _part_sha256(self._dtype, part.shards),
                "shards": part.shards,
            }
            for name, part in self._parts.items()
        }
        write_json_atomically(self.folder / INDEX_FILE, {"schema": SCHEMA, **index, "parts": parts})
        remove_leftovers(self.folder)

    def close(self) -> None:
        """Let go of the files, committed or not."""
        for part in self._parts.values():
            part.close()


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed writer may have left behind in a finished folder."""
    for path in (folder / PROGRESS_FILE, *folder.glob(f"*{_PARTIAL}"), *folder.glob(".*.json.*.tmp")):
        path.unlink(missing_ok=True)


class _PartState(TypedDict):
    shards: list[ShardEntry]
    tokens: int
    """Of the unfinished shard."""
    documents: int


class _PartWriter:
    """One part of a `ShardWriter`: finished shards, and at most one unfinished shard."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], shard_tokens: int, state: _PartState | None
    ) -> None:
        self._folder, self._name, self._dtype, self._shard_tokens = folder, name, dtype, shard_tokens
        self.shards: list[ShardEntry] = [] if state is None else list(state["shards"])
        self._tokens, self._documents = (0, 0) if state is None else (state["tokens"], state["documents"])
        self.total_tokens = sum(shard["tokens"] for shard in self.shards) + self._tokens
        self._named = 0
        self._open: tuple[BinaryIO, BinaryIO] | None = None
        self.name_finished()
        for path in folder.glob(f"{name}-*{_PARTIAL}"):
            if path not in (self._partial(".tokens"), self._partial(".documents")):
                path.unlink()
        for kind, size in ((".tokens", self._tokens * dtype.itemsize), (".documents", self._documents * 4)):
            self._cut(self._partial(kind), size)

    def append(self, document: NDArray[np.integer[Any]]) -> None:
        if document.dtype != self._dtype:
            raise TypeError(f"tokens are {document.dtype}; these shards hold {self._dtype}")
        if not len(document):
            raise ValueError("a document needs at least one token")
        _, documents = self._files()
        documents.write(np.array(self._tokens, _POSITION).tobytes())
        self._documents += 1
        while len(document):
            piece = document[: self._shard_tokens - self._tokens]
            self._files()[0].write(piece.tobytes())
            self._tokens += len(piece)
            self.total_tokens += len(piece)
            document = document[len(piece) :]
            if self._tokens == self._shard_tokens:
                self.finish()

    def finish(self) -> None:
        """End the shard that is being written, if there is one."""
        if not self._tokens:
            return
        self.flush()
        self.close()
        checksums = [sha256_of_file(self._partial(kind)) for kind in (".tokens", ".documents")]
        self.shards.append(
            {
                "tokens": self._tokens,
                "documents": self._documents,
                "sha256": checksums[0],
                "documents_sha256": checksums[1],
            }
        )
        self._tokens = self._documents = 0

    def flush(self) -> _PartState:
        for file in self._open or ():
            file.flush()
            os.fsync(file.fileno())
        return {"shards": self.shards, "tokens": self._tokens, "documents": self._documents}

    def name_finished(self) -> None:
        """Give finished shards their names; the record must know of them, or a restart would not."""
        for number in range(self._named, len(self.shards)):
            shard = self.shards[number]
            sizes = {".tokens": shard["tokens"] * self._dtype.itemsize, ".documents": shard["documents"] * 4}
            for kind, size in sizes.items():
                path, partial = shard_path(self._folder, self._name, number, kind), self._partial(kind, number)
                if partial.exists():
                    os.replace(partial, path)
                _check_size(path, size, self._folder)
        self._named = len(self.shards)

    def close(self) -> None:
        for file in self._open or ():
            try:
                file.close()
            except OSError:  # what could not be written is not committed either
                continue
        self._open = None

    def _files(self) -> tuple[BinaryIO, BinaryIO]:
        if self._open is None:
            self._open = (open(self._partial(".tokens"), "ab"), open(self._partial(".documents"), "ab"))  # noqa: SIM115
        return self._open

    def _partial(self, kind: str, number: int | None = None) -> Path:
        path = shard_path(self._folder, self._name, len(self.shards) if number is None else number, kind)
        return path.with_name(path.name + _PARTIAL)

    def _cut(self, path: Path, size: int) -> None:
        if path.exists():
            _check_size(path, size, self._folder, at_least=True)
            os.truncate(path, size)
        elif size:
            _check_size(path, size, self._folder)


def _check_size(path: Path, size: int, folder: Path, *, at_least: bool = False) -> None:
    found = path.stat().st_size if path.exists() else None
    if found == size or (at_least and found is not None and found > size):
        return
    state = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
    raise ValueError(f"{path} {state}, so the preparation cannot go on; delete {folder} and prepare it again")


def _size_problems(part: TokenPart) -> Iterable[str]:
    for number, shard in enumerate(part.shards):
        for kind, size in (
            (".tokens", shard["tokens"] * part.dtype.itemsize),
            (".documents", shard["documents"] * _POSITION.itemsize),
        ):
            path = shard_path(part.folder, part.name, number, kind)
            found = path.stat().st_size if path.exists() else None
            if found is None:
                yield f"{path} is missing"
            elif found != size:
                yield f"{path} is {'cut off' if found < size else 'too long'}: {found:,} bytes instead of {size:,}"


def _checksums(part: TokenPart) -> Iterator[tuple[Path, str]]:
    for number, shard in enumerate(part.shards):
        yield shard_path(part.folder, part.name, number, ".tokens"), shard["sha256"]
        yield shard_path(part.folder, part.name, number, ".documents"), shard["documents_sha256"]


def _part_sha256(dtype: np.dtype[Any], shards: Sequence[ShardEntry]) -> str:
    entries = [[shard["tokens"], shard["documents"], shard["sha256"], shard["documents_sha256"]] for shard in shards]
    return hashlib.sha256(json.dumps([dtype.name, entries]).encode()).hexdigest()


def _check_range(start: int, stop: int, tokens: int) -> None:
    if not 0 <= start <= stop <= tokens:
        raise IndexError(f"tokens {start} to {stop} are outside of a stream of {tokens:,}")
