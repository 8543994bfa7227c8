"""Text and rows that an evaluation reads: files of a folder that the user names, or data sets of the hub."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ccq.data.sources import Source, dataset_source, embedded_source, file_source

TEXT_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
ROW_SUFFIXES = (".jsonl", ".json", ".parquet")
EMBEDDED = "stdlib"
"""The name of the text that every machine has: the sources of Python's standard library."""


class HubText(NamedTuple):
    """Where the hub keeps a text: as `datasets.load_dataset` has it, and the column that holds the text."""

    dataset: str
    config: str | None
    split: str
    field: str


def text_source(name: str, folder: Path | None, hub: HubText | None) -> Source:
    """The text `name`: from `folder` where one is given, else from the hub; `stdlib` is on every machine.

    Raises:
        ValueError: it is not there, or the hub cannot be reached; the message says which file would be taken.
    """
    if name == EMBEDDED:
        return embedded_source()
    files = f"{name}.txt, {name}.jsonl ('text' on every line), {name}.parquet, or a folder {name}/ of such files"
    if folder is not None:
        found = [path for suffix in TEXT_SUFFIXES if (path := folder / f"{name}{suffix}").is_file()][:1]
        if not found and (folder / name).is_dir():
            found = [path for path in (folder / name).rglob("*") if path.is_file() and path.name[0] != "."]
        if not found:
            raise ValueError(f"{folder} holds no text {name!r}; put there {files}")
        return file_source([glob.escape(str(path)) for path in found])
    if hub is None:
        raise ValueError(f"no text {name!r} is known; give --data FOLDER with {files}")
    try:
        return dataset_source(hub.dataset, config=hub.config, split=hub.split, text_field=hub.field)
    except (OSError, ValueError) as error:
        raise ValueError(f"text {name!r}: {error}. For this command: --data FOLDER with {files}") from error


class Text(NamedTuple):
    """Documents and what a results file says of them."""

    documents: list[str]
    description: dict[str, Any]


def read_text(source: Source, *, characters: int, limit: int | None) -> Text:
    """Documents with anything in them, up to the one with which there are at least so many characters, and at most
    `limit` of them.

    Raises:
        ValueError: there are none.
    """
    documents: list[str] = []
    digest, read = hashlib.sha256(), 0
    for document, _ in source.documents():
        if not document.strip():
            continue
        documents.append(document)
        read += len(document)
        digest.update(document.encode() + b"\0")
        if read >= characters or len(documents) == limit:
            break
    if not documents:
        raise ValueError(f"there is no text in {source.description}")
    description = {key: value for key, value in source.description.items() if key != "sha256"}
    return Text(
        documents,
        {"source": description, "documents": len(documents), "characters": read, "sha256": digest.hexdigest()},
    )


def row_files(folder: Path, names: Sequence[str], split: str) -> Path:
    """The file NAME/SPLIT.jsonl (or .json, .parquet), or NAME.jsonl, in `folder`, of the first of `names` that has one.

    Raises:
        ValueError: there is none; the message says which file would be taken.
    """
    for name in names:
        for stem in (f"{name}/{split}", name):
            for suffix in ROW_SUFFIXES:
                if (path := folder / f"{stem}{suffix}").is_file():
                    return path
    name = names[0]
    raise ValueError(
        f"{folder} holds no data of {name!r}; put there {name}/{split}.jsonl (or .parquet) or {name}.jsonl, a JSON "
        "object on every line with the fields of the data set on the hub"
    )
