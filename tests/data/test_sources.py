"""Sources: every kind of file gives the same documents, from any position on, and names what is wrong."""

from __future__ import annotations

import bz2
import gzip
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from ccq.data.sources import Position, Source, choose_source, dataset_source, embedded_source, file_source

TEXTS = ["first", "", "zwei\r\nZeilen\u2028", "漢字 \U0001f9ff", "2020-01-01", "{}", "null", "last"]


def json_lines(texts: list[str | None]) -> bytes:
    rows = [json.dumps({"number": number, "text": text}) for number, text in enumerate(texts)]
    return ("\n".join(rows) + "\n\n").encode()


def write_json(folder: Path, texts: list[str]) -> str:
    (folder / "a.jsonl").write_bytes(json_lines(list(texts[:3])))
    (folder / "b.jsonl").write_bytes(b"")
    (folder / "c.jsonl").write_bytes(json_lines(list(texts[3:])))
    return str(folder / "*.jsonl")


def write_compressed(folder: Path, texts: list[str]) -> str:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(list(texts[:3]))))
    (folder / "b.json.bz2").write_bytes(bz2.compress(json_lines(list(texts[3:4]))))
    with pyarrow.CompressedOutputStream(str(folder / "c.ndjson.zst"), "zstd") as file:
        file.write(json_lines(list(texts[4:])))
    return str(folder / "**")


def write_parquet(folder: Path, texts: list[str]) -> str:
    for name, part in (("a", texts[:3]), ("b", []), ("c", texts[3:])):
        columns = {"number": list(range(len(part))), "text": pyarrow.array(part, pyarrow.large_string())}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet", row_group_size=2)
    return str(folder / "*.parquet")


def write_text(folder: Path, texts: list[str]) -> str:
    for number, text in enumerate(texts):
        (folder / f"{number}.md").write_bytes(text.encode())
    return str(folder / "*.md")


def documents(source: Source, start: Position = Position(0, 0)) -> list[str]:  # noqa: B008
    return [text for text, _ in source.documents(start)]


@pytest.mark.parametrize("write", [write_json, write_compressed, write_parquet, write_text])
def test_files_of_every_kind_give_their_texts_from_any_position_on(
    tmp_path: Path, write: Callable[[Path, list[str]], str]
) -> None:
    source = file_source([write(tmp_path, TEXTS)])
    read = list(source.documents())
    assert [text for text, _ in read] == TEXTS
    for number, (_, position) in enumerate(read):
        assert documents(source, position) == TEXTS[number + 1 :]


def test_a_local_data_set_gives_its_texts_from_any_position_on(tmp_path: Path) -> None:
    # datasets infers one type for a column of texts, so none of these may look like something else.
    texts = [f"text {number} ü" for number in range(9)]
    write_json(tmp_path, texts)
    (tmp_path / "b.jsonl").unlink()
    source = dataset_source(str(tmp_path))
    assert len(source.pieces) == source.description["shards"] == 2
    read = list(source.documents())
    assert [text for text, _ in read] == texts
    for number, (_, position) in enumerate(read):
        assert documents(source, position) == texts[number + 1 :]


def test_parquet_row_groups_larger_than_a_batch_are_skipped_exactly(tmp_path: Path) -> None:
    texts = [str(number) for number in range(5000)]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3000)
    source = file_source([str(tmp_path / "a.parquet")])
    for row in (1023, 1024, 1025, 2999, 3000, 3001, 4999, 5000):
        assert documents(source, Position(0, row)) == texts[row:]


def test_missing_values_are_empty_and_other_fields_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": 1}\n{"body": null, "text": 2}\n')
    assert documents(file_source([str(tmp_path / "a.jsonl")], text_field="body")) == ["x", ""]
    (tmp_path / "a.txt").write_text("body")
    with pytest.raises(ValueError, match=r"a\.txt is plain text, which has no field 'body'; leave text_field"):
        file_source([str(tmp_path / "a.txt")], text_field="body")


def test_the_embedded_corpus_is_the_standard_library() -> None:
    source = embedded_source()
    root = Path(sysconfig.get_path("stdlib"))
    names = [piece.name for piece in source.pieces]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    number = names.index("argparse.py")
    assert documents(source, Position(number, 0))[0] == (root / "argparse.py").read_bytes().decode()
    assert documents(source, Position(len(names) - 1, 1)) == []


def test_a_source_is_chosen_by_what_is_given(tmp_path: Path) -> None:
    pattern = write_json(tmp_path, TEXTS)
    chosen = choose_source(files=[pattern], text_field="text")
    assert chosen.description == file_source([pattern]).description and documents(chosen) == TEXTS
    assert choose_source().description == embedded_source().description
    folder = {"dataset": str(tmp_path), "split": "train", "config": None, "text_field": "text"}
    assert documents(choose_source(**folder)) == documents(dataset_source(str(tmp_path)))
    with pytest.raises(ValueError, match="--text-field is of files and of a --dataset"):
        choose_source(text_field="body")
    for options in ({"split": "test"}, {"files": [pattern], "revision": "main"}):
        with pytest.raises(ValueError, match="--config, --split and --revision are of a --dataset"):
            choose_source(**options)


def test_files_are_sorted_and_taken_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "w[ei]rd.txt").write_text("w")
    source = file_source([str(tmp_path / "**/*.txt"), str(tmp_path / "b.txt")])
    assert documents(source) == ["a.txt", "b.txt", "deep/c.txt", "w"]
    assert source.description == {
        "kind": "text",
        "files": [
            {"name": str(tmp_path / name), "bytes": size}
            for name, size in (("a.txt", 5), ("b.txt", 5), ("deep/c.txt", 10), ("w[ei]rd.txt", 1))
        ],
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no file matches '.*\*' \(in .*\); give a file or a quoted glob"),
        ({"a.jsonl": b"", "b.txt": b""}, r"several kinds: .*a.jsonl \(json\), .*b.txt \(text\); prepare one kind"),
        ({"a.txt.gz": b""}, r"a.txt.gz is compressed; JSON lines may be .* must be unpacked"),
        (
            {"a.jsonl": b'{"body": "x", "n": 1}\n'},
            r"a.jsonl, row 1: there is no field 'text', but 'body', 'n'; name one",
        ),
        (
            {"a.jsonl": b'{"text": "x"}\n{"text": 3}\n'},
            r"a.jsonl, row 2: field 'text' holds int, not text; name another",
        ),
        ({"a.jsonl": b'{"text": "x"}\n{"text": \n'}, r"a.jsonl, row 2: Expecting value"),
        ({"a.jsonl": b'{"text": "a\\ud800b"}\n'}, r"a.jsonl, row 1: .*surrogates not allowed"),
        ({"a.jsonl": b'{"text": "caf\xe9"}\n'}, r"a.jsonl, row 1: 'utf-8' codec can't decode"),
        ({"a.json": b'[{"text": "x"}]\n'}, r"a.json, row 1: the line holds list; a JSON object on every line"),
        ({"a.jsonl.gz": gzip.compress(json_lines(list(TEXTS)))[:-9]}, r"a.jsonl.gz, row 1: .*[Tt]runcated"),
        ({"a.parquet": b"PAR1 and no more"}, r"a.parquet, row 1: .*[Pp]arquet"),
        ({"a.py": b"\xff"}, r"a.py is not UTF-8"),
        ({"a.py": b"\0"}, r"a.py is binary"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message):
        documents(file_source([str(tmp_path / "*")]))


def test_a_parquet_file_without_the_field_names_those_it_has(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"a.parquet, row 1: there is no field 'text', but 'body', 'id'; name one with"
    ):
        documents(file_source([str(tmp_path / "a.parquet")]))
    with pytest.raises(ValueError, match=r"field 'id' holds int, not text"):
        documents(file_source([str(tmp_path / "a.parquet")], text_field="id"))


def test_a_data_set_without_the_field_names_those_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "id": 7}\n')
    with pytest.raises(ValueError, match=r"shard 0 of 1, row 1: there is no field 'text', but 'body', 'id'; name one"):
        documents(dataset_source(str(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, r"data set .*: Bad split: test. Available splits: \['train'\]"),
        ({"config": "other"}, r"data set .*: BuilderConfig 'other' not found"),
    ],
)
def test_an_unknown_split_or_configuration_is_named(tmp_path: Path, arguments: dict[str, str], message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(list(TEXTS)))
    with pytest.raises(ValueError, match=message):
        dataset_source(str(tmp_path), **arguments)


def not_found(*arguments: object, **options: object) -> None:
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    raise huggingface_hub.errors.RepositoryNotFoundError("no such repository", response=response)


def offline(*arguments: object, **options: object) -> None:
    raise huggingface_hub.errors.OfflineModeIsEnabled("offline mode is enabled")


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            offline,
            ConnectionError,
            r"'who/what': the Hugging Face hub cannot be reached \(offline mode is enabled\); try",
        ),
        (not_found, ValueError, r"the Hugging Face hub has no data set 'who/what', or it is private"),
    ],
)
def test_a_hub_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, answer: object, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)
    with pytest.raises(error, match=message):
        dataset_source("who/what")


def test_the_commit_of_a_data_set_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    (tmp_path / "a.jsonl").write_bytes(json_lines(["x", "y"]))
    stream = datasets.load_dataset(str(tmp_path), split="train", streaming=True)
    asked: list[Any] = []

    def commit(self: object, name: str, revision: str | None) -> SimpleNamespace:
        asked.append((name, revision))
        return SimpleNamespace(sha="c0ffee")

    def load(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return stream

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", commit)
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = dataset_source("who/what", config="small", revision="main")
    assert asked == [
        ("who/what", "main"),
        (("who/what", "small"), {"split": "train", "revision": "c0ffee", "streaming": True}),
    ]
    assert source.description["revision"] == "c0ffee"
    assert documents(source) == ["x", "y"]
