"""Where documents come from: files of this machine, a Hugging Face data set, or the embedded corpus.

A source is a list of pieces (files, or the shards of a data set), each a list of rows. Documents are read one after the
other, and reading goes on from any (piece, row) without reading the pieces before it.
"""

from __future__ import annotations

import glob
import importlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from ccq.data.corpora import read_corpus, read_text

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PARQUET_ROWS = 1024
_NEEDS_EXTRA = "pip install 'ccq-attention[data]'"


class Position(NamedTuple):
    """How far a source has been read."""

    piece: int
    row: int


BEGINNING = Position(0, 0)


@dataclass(frozen=True)
class Piece:
    """A part of a source that is read from its start; `rows(n)` gives its rows but for the first n."""

    name: str
    rows: Callable[[int], Iterator[Any]]


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order.

    Attributes:
        description: what is read, as JSON; two sources with equal descriptions are taken for the same.
        pieces: in the order in which they are read.
    """

    description: dict[str, Any]
    pieces: Sequence[Piece]

    def documents(self, start: Position = BEGINNING) -> Iterator[tuple[str, Position]]:
        """Text of every document from `start` on, each with the position after it. A missing value is "".

        Raises:
            ValueError: a piece is not what it should be, or a row has no text; the message names piece and row.
            OSError: a piece cannot be read.
        """
        for number in range(start.piece, len(self.pieces)):
            piece = self.pieces[number]
            row = start.row if number == start.piece else 0
            rows = piece.rows(row)
            while True:
                try:
                    text = next(rows, None)
                except ValueError as error:
                    raise ValueError(f"{piece.name}, row {row + 1}: {error}") from error
                except OSError as error:
                    raise OSError(f"{piece.name}, row {row + 1}: {error}") from error
                if text is None:
                    break
                row += 1
                yield text, Position(number, row)


def embedded_source() -> Source:
    """The Python standard library's sources (`ccq.data.corpora`), every file a document."""
    corpus = read_corpus(max_characters=2**40)
    documents = sorted(corpus.train + corpus.held_out)
    return Source(
        {"kind": "embedded", "name": corpus.source, "documents": len(documents), "sha256": corpus.sha256},
        [Piece(name, _TextRows(text)) for name, text in documents],
    )


TEXT_FIELD = "text"
"""Where the text of a row is, unless another field is named."""


def file_source(patterns: Sequence[str], *, text_field: str | None = None) -> Source:
    """Local files, in the order of their sorted names.

    Args:
        patterns: file names or globs (`**` enters folders). JSON lines (.jsonl, .ndjson, .json; also compressed: .gz,
            .zst, .bz2) and Parquet (.parquet) give a document a row; a file with any other name is one document of
            UTF-8 text.
        text_field: the field that holds the text; default "text".

    Raises:
        ValueError: a pattern matches no file, the files are of several kinds, or a field is named and they have none.
    """
    paths: set[Path] = set()
    for pattern in patterns:
        found = {Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()}
        if not found:
            raise ValueError(f"no file matches {pattern!r} (in {Path.cwd()}); give a file or a quoted glob")
        paths |= found
    kinds = {_kind(path): path for path in sorted(paths, reverse=True)}
    if len(kinds) > 1:
        shown = ", ".join(f"{path} ({kind})" for kind, path in sorted(kinds.items()))
        raise ValueError(f"the files are of several kinds: {shown}; prepare one kind at a time")
    (kind,) = kinds
    files = sorted(paths)
    if kind == "text":
        if text_field is not None:
            raise ValueError(
                f"{files[0]} is plain text, which has no field {text_field!r}; leave text_field (--text-field) out, or "
                "give JSON lines or Parquet"
            )
        pieces = [Piece(str(path), _FileRows(path)) for path in files]
    else:
        text_field = TEXT_FIELD if text_field is None else text_field
        rows = _JsonRows if kind == "json" else _ParquetRows
        pieces = [Piece(str(path), rows(path, text_field)) for path in files]
    described = [{"name": str(path), "bytes": path.stat().st_size} for path in files]
    fields = {} if kind == "text" else {"text_field": text_field}
    return Source({"kind": kind, **fields, "files": described}, pieces)


def dataset_source(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_field: str | None = None,
) -> Source:
    """A data set of the Hugging Face hub, streamed, or a local folder that `datasets` can load.

    The hub's current commit is looked up and pinned, so that a run that goes on days later reads the same text.

    Args:
        name: such as "HuggingFaceFW/fineweb-edu".
        config, split, revision: as `datasets.load_dataset` has them.
        text_field: the column that holds the text; default "text".

    Raises:
        ConnectionError: the hub cannot be reached.
        ValueError: there is no such data set, configuration or split.
    """
    text_field = TEXT_FIELD if text_field is None else text_field
    datasets = _import_extra("datasets")
    datasets.disable_progress_bars()
    if not Path(name).is_dir():
        revision = _pinned_revision(name, revision)
    try:
        stream = datasets.load_dataset(name, config, split=split, revision=revision, streaming=True)
    except ConnectionError as error:
        raise ConnectionError(_unreachable(name, error)) from error
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"data set {name!r}: {error}") from error
    count = stream.num_shards
    rows = [_StreamRows(stream.shard(count, number, contiguous=True), text_field) for number in range(count)]
    pieces = [Piece(f"{name}, shard {number} of {count}", shard) for number, shard in enumerate(rows)]
    description = {
        "kind": "dataset",
        "name": name,
        "config": config,
        "split": split,
        "revision": revision,
        "text_field": text_field,
        "shards": count,
    }
    return Source(description, pieces)


def choose_source(
    *,
    files: Sequence[str] | None = None,
    dataset: str | None = None,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_field: str | None = None,
) -> Source:
    """`file_source` or `dataset_source`, whichever is given, else `embedded_source`.

    Raises:
        ValueError: config, split or revision without a data set, a field without rows, or as these functions say.
        ConnectionError: the hub cannot be reached.
    """
    if dataset is not None:
        return dataset_source(dataset, config=config, split=split, revision=revision, text_field=text_field)
    if (config, split, revision) != (None, "train", None):
        raise ValueError("--config, --split and --revision are of a --dataset; leave them out")
    if files is not None:
        return file_source(files, text_field=text_field)
    if text_field is not None:
        raise ValueError("--text-field is of files and of a --dataset; leave it out")
    return embedded_source()


@dataclass(frozen=True)
class _TextRows:
    text: str

    def __call__(self, skip: int) -> Iterator[str]:
        return iter([self.text][skip:])


@dataclass(frozen=True)
class _FileRows:
    path: Path

    def __call__(self, skip: int) -> Iterator[str]:
        if skip == 0:
            text = read_text(self.path)
            yield "" if text is None else text


# The builders of `datasets` read local files too, but guess types from the values (a block of texts that look like
# dates comes back as timestamps) and refuse empty files. Lines and columns need no guess.


@dataclass(frozen=True)
class _JsonRows:
    """Lines of one file; lines without anything but white space are no rows."""

    path: Path
    text_field: str

    def __call__(self, skip: int) -> Iterator[str]:
        with _open_lines(self.path) as file:
            for line in file:
                if not line.strip():
                    continue
                if skip:
                    skip -= 1
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"the line holds {type(row).__name__}; a JSON object on every line is needed")
                text = _text(row, self.text_field)
                if b"\\u" in line:
                    text.encode()  # raises where an escape made a lone surrogate, which is no text
                yield text


@dataclass(frozen=True)
class _ParquetRows:
    path: Path
    text_field: str

    def __call__(self, skip: int) -> Iterator[str]:
        parquet = _import_extra("pyarrow.parquet")
        with parquet.ParquetFile(self.path) as file:
            names = file.schema_arrow.names
            if self.text_field not in names:
                raise ValueError(_missing_field(self.text_field, names))
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if skip >= rows:
                    skip -= rows
                    continue
                for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=[self.text_field]):
                    texts = batch.column(0).to_pylist()
                    for text in texts[skip:]:
                        yield _text({self.text_field: text}, self.text_field)
                    skip = max(skip - len(texts), 0)


@dataclass(frozen=True)
class _StreamRows:
    stream: Any
    """`datasets.IterableDataset`."""
    text_field: str

    def __call__(self, skip: int) -> Iterator[str]:
        for row in self.stream.skip(skip) if skip else self.stream:
            yield _text(row, self.text_field)


def _text(row: dict[str, Any], field: str) -> str:
    if field not in row:
        raise ValueError(_missing_field(field, row))
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"field {field!r} holds {type(text).__name__}, not text; name another with --text-field")
    return text or ""


def _missing_field(field: str, fields: Iterable[str]) -> str:
    return f"there is no field {field!r}, but {', '.join(map(repr, fields))}; name one with --text-field"


def _open_lines(path: Path) -> IO[bytes]:
    codec = _COMPRESSIONS.get(path.suffix.lower())
    if codec is None:
        return open(path, "rb")
    return io.BufferedReader(_import_extra("pyarrow").input_stream(str(path), compression=codec), 1 << 20)


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in _COMPRESSIONS
    if compressed:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in _JSON_SUFFIXES:
        return "json"
    if compressed:
        raise ValueError(f"{path} is compressed; JSON lines may be (such as .jsonl.gz), other files must be unpacked")
    return "parquet" if last == ".parquet" else "text"


def _import_extra(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"this source needs the package {name.split('.')[0]!r}: {_NEEDS_EXTRA}") from error


def _pinned_revision(name: str, revision: str | None) -> str | None:
    """The commit that a branch, a tag or the default branch stands for now."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return HfApi().dataset_info(name, revision=revision).sha
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"the Hugging Face hub has no data set {name!r}, or it is private (`hf auth login`); local files are "
            "given with --files"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{name!r} is neither a folder nor the name of a data set: {error}") from error
    except HfHubHTTPError as error:
        raise ValueError(f"data set {name!r}, revision {revision!r}: {error}") from error
    except Exception as error:  # which HTTP library raises its own errors here depends on the release
        raise ConnectionError(_unreachable(name, error)) from error


def _unreachable(name: str, error: Exception) -> str:
    return (
        f"data set {name!r}: the Hugging Face hub cannot be reached ({error}); try again later, or give local files "
        "with --files"
    )
