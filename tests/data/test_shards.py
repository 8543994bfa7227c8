"""Shards against plain lists: every range, every document, every kind of damage."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from ccq.data.shards import ShardWriter, TokenArray, TokenFolder, TokenStream, token_dtype


def write(
    folder: Path, train: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]] = (), *, shard: int = 10**6
) -> TokenFolder:
    """A finished folder that holds these documents."""
    folder.mkdir(exist_ok=True)
    vocabulary = 1 + max(token for document in (*train, *held_out) for token in document)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0}, "word"))
    tokenizer.save(str(folder / "tokenizer.json"))
    sha256 = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    dtype = token_dtype(vocabulary)
    writer = ShardWriter(folder, dtype, shard)
    for part, documents in (("train", train), ("held_out", held_out)):
        for document in documents:
            writer.append(part, np.array(document, dtype))
    index = {"dtype": dtype.name, "vocabulary": vocabulary, "tokenizer": {"file": "tokenizer.json", "sha256": sha256}}
    writer.finish({}, index)
    return TokenFolder.open(folder)


def check_stream(stream: TokenStream, documents: Sequence[Sequence[int]]) -> None:
    """Every range of the stream, and every document start in it, against the lists."""
    tokens = [token for document in documents for token in document]
    starts = [sum(map(len, documents[:number])) for number in range(len(documents))]
    assert (stream.tokens, stream.documents) == (len(tokens), len(documents))
    for start in range(len(tokens) + 1):
        for stop in range(start, len(tokens) + 1):
            assert stream.read(start, stop).tolist() == tokens[start:stop]
            inside = [position for position in starts if start <= position < stop]
            assert stream.document_starts(start, stop).tolist() == inside
    for start, stop in ((-1, 0), (2, 1), (0, len(tokens) + 1)):
        with pytest.raises(IndexError, match="outside of a stream"):
            stream.read(start, stop)


DOCUMENTS = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=12), min_size=1, max_size=6)


@given(train=DOCUMENTS, held_out=DOCUMENTS, shard=st.integers(1, 9))
@example(train=[[1], [2] * 12, [3]], held_out=[[4] * 9], shard=3)
def test_every_range_and_document_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, train: list[list[int]], held_out: list[list[int]], shard: int
) -> None:
    folder = write(tmp_path_factory.mktemp("shards"), train, held_out, shard=shard)
    for part, documents in ((folder.train, train), (folder.held_out, held_out)):
        check_stream(part, documents)
        assert [part.document(number).tolist() for number in range(part.documents)] == documents
        assert [entry["tokens"] for entry in part.shards[:-1]] == [shard] * (len(part.shards) - 1)
    assert list(folder.verify()) == [None] * len(folder.files())


@given(documents=DOCUMENTS)
def test_tokens_in_memory_are_the_same_stream(documents: list[list[int]]) -> None:
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    stream = TokenArray(np.concatenate([np.array(document) for document in documents]), starts.tolist())
    check_stream(stream, documents)


def test_shards_are_raw_little_endian_numbers(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3], [256, 5], [6]], [[65535]], shard=4)
    assert (tmp_path / "train-00000.tokens").read_bytes() == b"\1\0\2\0\3\0\0\1"
    assert (tmp_path / "train-00001.tokens").read_bytes() == b"\5\0\6\0"
    assert (tmp_path / "train-00000.documents").read_bytes() == b"\0\0\0\0\3\0\0\0"
    assert (tmp_path / "train-00001.documents").read_bytes() == b"\1\0\0\0"
    assert (tmp_path / "held_out-00000.tokens").read_bytes() == b"\xff\xff"
    names = {"train-00000", "train-00001", "held_out-00000"}
    shards = {f"{name}.{kind}" for name in names for kind in ("tokens", "documents")}
    assert {path.name for path in tmp_path.iterdir()} == shards | {"index.json", "tokenizer.json"}


@pytest.mark.parametrize(("largest", "dtype", "size"), [(65_535, "uint16", 2), (65_536, "uint32", 4)])
def test_the_smallest_dtype_that_holds_the_vocabulary(tmp_path: Path, largest: int, dtype: str, size: int) -> None:
    folder = write(tmp_path, [[0, largest, 1]])
    assert folder.index["dtype"] == dtype
    assert folder.train.read(0, 3).tolist() == [0, largest, 1]
    assert (tmp_path / "train-00000.tokens").stat().st_size == 3 * size
    assert token_dtype(2**32).itemsize == 4
    for vocabulary in (0, 2**32 + 1):
        with pytest.raises(ValueError, match="shards hold 1 to 4,294,967,296"):
            token_dtype(vocabulary)


def test_reading_maps_the_file_and_copies_only_across_shards(tmp_path: Path) -> None:
    part = write(tmp_path, [list(range(10))], shard=5).train
    assert isinstance(part.read(1, 4).base, np.memmap)
    assert isinstance(part.read(0, 5), np.memmap)
    assert not part.read(1, 4).flags.writeable
    assert part.read(4, 6).tolist() == [4, 5]


def test_a_pickled_part_carries_paths_and_not_tokens(tmp_path: Path) -> None:
    part = write(tmp_path, [list(range(5000))]).train
    part.read(0, 5000)
    data = pickle.dumps(part)
    assert len(data) < 2000
    assert pickle.loads(data).read(10, 13).tolist() == [10, 11, 12]


def test_hashes_follow_the_content(tmp_path: Path) -> None:
    documents = [[1, 2], [3, 4]]
    one = write(tmp_path / "one", documents).train.sha256
    assert write(tmp_path / "two", documents).train.sha256 == one
    others = [write(tmp_path / "three", [[1, 2], [3, 5]]), write(tmp_path / "four", [[1], [2, 3, 4]])]
    assert len({one, *(folder.train.sha256 for folder in others)}) == 3
    arrays = [TokenArray(np.array([1, 2, 3, 4])), TokenArray(np.array([1, 2, 3, 4]), [0, 2])]
    assert len({array.sha256 for array in arrays}) == 2
    assert TokenArray(np.array([1, 2, 3, 4])).sha256 == arrays[0].sha256


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train-00001.tokens", cut, r"train-00001\.tokens is cut off: 5 bytes instead of 6\. Copy"),
        ("held_out-00000.documents", cut, r"held_out-00000\.documents is cut off: 3 bytes instead of 4\. Copy"),
        ("train-00000.tokens", lengthen, r"train-00000\.tokens is too long: 7 bytes instead of 6\. Copy"),
        ("train-00002.documents", Path.unlink, r"train-00002\.documents is missing\. Copy"),
        ("index.json", cut, r"index\.json is damaged .*copy it again"),
        ("index.json", Path.unlink, r"holds no index\.json; give a folder made by `ccq data prepare`"),
    ],
)
def test_damaged_files_are_named_with_what_to_do(tmp_path: Path, name: str, damage: object, message: str) -> None:
    write(tmp_path, [[1, 2], [3, 4], [5, 6], [7, 8]], [[9, 9]], shard=3)
    path = tmp_path / name
    path.write_bytes(path.read_bytes().rstrip())  # a cut index must lose more than its last line break
    assert callable(damage)
    damage(path)
    with pytest.raises(ValueError, match=message):
        TokenFolder.open(tmp_path)


def test_many_missing_shards_are_counted(tmp_path: Path) -> None:
    write(tmp_path, [[1]] * 8, shard=1)
    for path in tmp_path.glob("train-*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"train-00000.tokens is missing; .*00002.tokens is missing; and 11 more"):
        TokenFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["train-00001.tokens", "train-00000.documents", "tokenizer.json"])
def test_a_flipped_bit_is_found_by_verify(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, [[1, 2], [3, 4]], [[5]], shard=3)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    problems = dict(zip(folder.files(), folder.verify(), strict=True))
    assert [found for found, problem in problems.items() if problem] == [path]
    assert problems[path] == f"{path} is damaged: its checksum is another"
    path.unlink()
    assert [problem for problem in folder.verify() if problem] == [f"{path} is missing"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["parts"]["train"]["shards"][0].update(documents=1), "the checksums of train do not fit"),
        (lambda index: index["parts"].pop("held_out"), "index.json is damaged"),
        (lambda index: index.update(dtype="float32"), "index.json is damaged"),
        (lambda index: index.update(schema="ccq-shards/9"), "has the schema 'ccq-shards/9'; this version reads"),
    ],
)
def test_an_edited_index_is_refused(tmp_path: Path, change: object, message: str) -> None:
    write(tmp_path, [[1, 2], [3, 4]])
    index = json.loads((tmp_path / "index.json").read_bytes())
    assert callable(change)
    change(index)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        TokenFolder.open(tmp_path)


def test_what_is_no_finished_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        TokenFolder.open(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is not a folder"):
        TokenFolder.open(tmp_path / "file")
    ShardWriter(tmp_path, token_dtype(10), 5).commit({})
    with pytest.raises(ValueError, match="is not finished; run its `ccq data prepare` command again"):
        TokenFolder.open(tmp_path)


def test_a_writer_goes_on_from_its_record_and_drops_what_came_later(tmp_path: Path) -> None:
    dtype = token_dtype(100)
    documents = [np.arange(number, number + 7).astype(dtype) for number in range(20)]
    writer = ShardWriter(tmp_path, dtype, 10)
    for document in documents[:9]:
        writer.append("train", document)
    writer.commit({"read": 9})
    record = json.loads((tmp_path / "progress.json").read_bytes())
    for document in documents[9:15]:
        writer.append("train", document[::-1])  # lost: never committed
    writer.close()
    assert record["read"] == 9
    writer = ShardWriter(tmp_path, dtype, 10, record)
    for document in documents[9:]:
        writer.append("train", document)
    writer.finish({}, {"dtype": dtype.name, "vocabulary": 100})
    part = TokenFolder.open(tmp_path).train
    assert part.read(0, part.tokens).tolist() == np.concatenate(documents).tolist()
    assert not list(tmp_path.glob("*.partial"))


def test_a_writer_says_when_committed_files_are_gone(tmp_path: Path) -> None:
    dtype = token_dtype(100)
    writer = ShardWriter(tmp_path, dtype, 10)
    writer.append("train", np.arange(17, dtype=dtype))
    writer.commit({})
    writer.close()
    record = json.loads((tmp_path / "progress.json").read_bytes())
    cut(tmp_path / "train-00001.tokens.partial")
    with pytest.raises(ValueError, match=r"train-00001.tokens.partial has 13 bytes instead of 14.* delete"):
        ShardWriter(tmp_path, dtype, 10, record)
    (tmp_path / "train-00000.tokens").unlink()
    with pytest.raises(ValueError, match=r"train-00000.tokens is missing, so the preparation cannot go on; delete"):
        ShardWriter(tmp_path, dtype, 10, record)


def test_a_writer_refuses_other_dtypes_and_empty_documents(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, token_dtype(65_536), 10)
    with pytest.raises(TypeError, match="tokens are uint32; these shards hold uint16"):
        writer.append("train", np.array([65_536], np.uint32))
    with pytest.raises(ValueError, match="at least one token"):
        writer.append("train", np.array([], np.uint16))


@pytest.mark.parametrize(
    ("array", "starts", "message"),
    [
        (np.zeros((2, 2), int), None, r"tokens are int64 \[2, 2\]"),
        (np.zeros(3), None, r"tokens are float64 \[3\]"),
        ([1, 2], None, "tokens are list"),
        (np.zeros(3, int), [0, 3], r"must rise within 0 ... 2, got \[0, 3\]"),
        (np.zeros(3, int), [1, 1], r"must rise within 0 ... 2, got \[1, 1\]"),
    ],
)
def test_arrays_that_are_no_stream_are_refused(array: object, starts: list[int] | None, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        TokenArray(array, starts)  # type: ignore[arg-type]
