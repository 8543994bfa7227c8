"""Which local files are taken, what is read of them, and what a missing one is called."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ccq.evals.local_data import EMBEDDED, read_text, row_files, text_source


def documents(folder: Path, name: str) -> list[str]:
    return [text for text, _ in text_source(name, folder, None).documents()]


def test_texts_by_name(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a whole file\n")
    (tmp_path / "lines.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n')
    inner = tmp_path / "many[1]" / "deep"
    inner.mkdir(parents=True)
    (inner / "b.txt").write_text("b")
    (inner.parent / "a.txt").write_text("a")
    (inner.parent / ".hidden").write_text("no")
    assert documents(tmp_path, "one") == ["a whole file\n"]
    assert documents(tmp_path, "lines") == ["first", "second"]
    assert sorted(documents(tmp_path, "many[1]")) == ["a", "b"]
    with pytest.raises(ValueError, match=r"holds no text 'none'; put there none\.txt, none\.jsonl .*folder none/"):
        text_source("none", tmp_path, None)
    with pytest.raises(ValueError, match=r"no text 'none' is known; give --data FOLDER with none\.txt"):
        text_source("none", None, None)


def test_every_machine_has_a_text(tmp_path: Path) -> None:
    text = read_text(text_source(EMBEDDED, tmp_path, None), characters=1000, limit=None)
    assert sum(map(len, text.documents)) >= 1000


def test_text_is_read_as_far_as_needed_and_hashed(tmp_path: Path) -> None:
    lines = ["aaaa", " \n", "bbb", "cc"]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    source = text_source("t", tmp_path, None)
    read = read_text(source, characters=6, limit=None)
    assert read.documents == ["aaaa", "bbb"]
    assert (read.description["documents"], read.description["characters"]) == (2, 7)
    assert read.description["sha256"] == hashlib.sha256(b"aaaa\0bbb\0").hexdigest()
    assert read_text(source, characters=99, limit=1).documents == ["aaaa"]
    assert read_text(source, characters=99, limit=None).documents == ["aaaa", "bbb", "cc"]
    (tmp_path / "empty.txt").write_text(" ")
    with pytest.raises(ValueError, match="there is no text in"):
        read_text(text_source("empty", tmp_path, None), characters=1, limit=None)


def test_rows_by_name_and_split(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "test.parquet").touch()
    (tmp_path / "b.json").touch()
    assert row_files(tmp_path, ["a"], "test") == tmp_path / "a" / "test.parquet"
    assert row_files(tmp_path, ["b"], "test") == tmp_path / "b.json"
    with pytest.raises(ValueError, match=r"holds no data of 'a'; put there a/validation\.jsonl"):
        row_files(tmp_path, ["a"], "validation")
