"""Corpora against what is on the disk: brute-force walks, known splits, and the words of every refusal."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ccq.data.corpora import Corpus, read_corpus


def write_files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


def many_files(root: Path, count: int = 40, characters: int = 1000) -> Path:
    return write_files(root, {f"part{i % 3}/text{i:03}.txt": f"{i:04}\n" * (characters // 5) for i in range(count)})


def documents(corpus: Corpus) -> dict[str, str]:
    return dict(corpus.train + corpus.held_out)


def split_hash(name: str) -> float:
    return int(hashlib.sha256(b"split\0" + name.encode()).hexdigest()[:16], 16) / 2**64


def test_every_text_file_is_read_as_it_is(tmp_path: Path) -> None:
    texts = {
        "b.txt": "first\r\nsecond\t" + "x" * 20_000,
        "a/deep/er.md": "\ufeffünïcode 漢字 \U0001f9ff\n",
        "no-suffix": "  leading and trailing  \n\n",
        "a.txt": "a.txt comes before a/ when sorted\n",
    }
    write_files(tmp_path, texts | {"empty.txt": "", "blank.txt": " \n\t", ".hidden": "no", ".git/config": "no"})
    corpus = read_corpus(tmp_path)
    assert documents(corpus) == texts
    assert corpus.characters == sum(map(len, texts.values()))
    assert corpus.source == f"text files of the folder {tmp_path.name}"
    for part in (corpus.train, corpus.held_out):
        assert list(part) == sorted(part)


def test_split_follows_the_hash_of_the_name_and_is_about_a_tenth(tmp_path: Path) -> None:
    corpus = read_corpus(many_files(tmp_path, 400, 100))
    expected = {name for name in documents(corpus) if split_hash(name) < 0.1}
    assert {name for name, _ in corpus.held_out} == expected
    assert {name for name, _ in corpus.train} == set(documents(corpus)) - expected
    assert 20 <= len(expected) <= 60


def test_a_file_stays_on_its_side_when_others_come_and_go(tmp_path: Path) -> None:
    before = read_corpus(many_files(tmp_path, 100))
    write_files(tmp_path, {f"new{i}.txt": "new text\n" for i in range(100)})
    for path in sorted(tmp_path.glob("part0/*"))[:10]:
        path.unlink()
    after = read_corpus(tmp_path)
    common = documents(before).keys() & documents(after).keys()
    assert len(common) > 50
    assert {n for n, _ in before.held_out} & common == {n for n, _ in after.held_out} & common


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 5))
def test_neither_side_is_ever_empty(tmp_path_factory: pytest.TempPathFactory, seed: int, count: int) -> None:
    folder = tmp_path_factory.mktemp("few")
    corpus = read_corpus(write_files(folder, {f"{seed}-{i}.txt": "text " * 4000 for i in range(count)}))
    assert corpus.train
    assert corpus.held_out
    assert len(corpus.train) + len(corpus.held_out) == count
    # Whoever is held out has smaller hashes than whoever is not.
    assert max(split_hash(n) for n, _ in corpus.held_out) < min(split_hash(n) for n, _ in corpus.train)


def test_files_that_would_all_be_held_out_leave_one_to_train(tmp_path: Path) -> None:
    names = [name for name in (f"{i}.txt" for i in range(200)) if split_hash(name) < 0.1][:3]
    corpus = read_corpus(write_files(tmp_path, dict.fromkeys(names, "text " * 4000)))
    assert [name for name, _ in corpus.train] == [max(names, key=split_hash)]
    assert len(corpus.held_out) == 2


def test_sha256_is_over_lengths_names_and_contents(tmp_path: Path) -> None:
    texts = {"b.txt": "ü" * 15_000, "a.txt": "x" * 15_000}
    corpus = read_corpus(write_files(tmp_path, texts))
    stream = b""
    for name in sorted(texts):
        for data in (name.encode(), texts[name].encode()):
            stream += len(data).to_bytes(8, "big") + data
    assert corpus.sha256 == hashlib.sha256(stream).hexdigest()
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    assert read_corpus(tmp_path).sha256 != corpus.sha256


def test_cap_takes_whole_files_in_hash_order_and_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    many_files(tmp_path, 60, 1000)
    write_files(tmp_path, {"large.txt": "ab" * 40_000})
    corpus = read_corpus(tmp_path, max_characters=25_500)
    every = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    order = sorted(every, key=lambda name: hashlib.sha256(b"order\0" + name.encode()).digest()[:8])
    expected = [name for name in order if name != "large.txt"][:25]
    assert sorted(documents(corpus)) == sorted(expected)
    assert corpus.characters == 25_000
    assert read_corpus(tmp_path, max_characters=25_500) == corpus


def test_cap_counts_characters_not_bytes(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{i}.txt": "\U0001f9ff" * 10_000 for i in range(4)})
    assert read_corpus(tmp_path, max_characters=40_000).characters == 40_000
    assert read_corpus(tmp_path, max_characters=39_999).characters == 30_000


def test_standard_library_is_real_source_without_tests_and_tables() -> None:
    corpus = read_corpus(max_characters=10**9)
    root = Path(sysconfig.get_path("stdlib"))
    names = set(documents(corpus))
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py", "os.py"} <= names
    assert documents(corpus)["argparse.py"] == (root / "argparse.py").read_bytes().decode()
    left_out = re.compile(
        r"(^|/)(tests?|idlelib|encodings|pydoc_data|site-packages|dist-packages|__pycache__)/|^_sysconfigdata|^\."
    )
    by_hand = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.read_bytes().strip()}
    by_hand = {name for name in by_hand if not left_out.search(name) and "/." not in name}
    assert names <= by_hand
    # Only what is not UTF-8 text may be missing.
    for name in by_hand - names:
        with pytest.raises(UnicodeDecodeError):
            (root / name).read_bytes().decode()
    assert corpus.source == f"Python {'.'.join(map(str, sys.version_info[:3]))} standard library"
    assert str(root) not in corpus.source


def test_standard_library_default_is_capped_and_repeatable() -> None:
    corpus = read_corpus()
    assert 3_900_000 < corpus.characters <= 4_000_000
    assert read_corpus(None) == corpus


def test_unreadable_files_are_skipped_in_the_standard_library_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_files(tmp_path)
    for path in list(tmp_path.rglob("*.txt")):
        path.rename(path.with_suffix(".py"))
    (tmp_path / "latin.py").write_bytes(b"# \xe9t\xe9\n")
    (tmp_path / "binary.py").write_bytes(b"MZ\0\0")
    with pytest.raises(ValueError, match=r"latin\.py|binary\.py"):
        read_corpus(tmp_path)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert len(documents(read_corpus())) == 40


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc\0def", r"odd\.txt is binary \(NUL byte at offset 3\).*UTF-8 text.*move it out"),
        (b"caf\xe9 au lait", r"odd\.txt is not UTF-8 \(byte 0xe9 at offset 3\).*convert it to UTF-8"),
    ],
)
def test_a_file_that_is_not_text_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    many_files(tmp_path)
    (tmp_path / "odd.txt").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_corpus(tmp_path)


def test_a_dangling_link_and_a_pipe_are_named(tmp_path: Path) -> None:
    many_files(tmp_path / "texts")
    link = tmp_path / "texts" / "dangling.txt"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"dangling\.txt cannot be read \(No such file"):
        read_corpus(tmp_path / "texts")
    link.unlink()
    os.mkfifo(tmp_path / "texts" / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file"):
        read_corpus(tmp_path / "texts")


def test_missing_folder_file_and_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: it does not exist; give a folder"):
        read_corpus(tmp_path / "nowhere")
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(ValueError, match=r"file\.txt: it is a file; give a folder"):
        read_corpus(tmp_path / "file.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"too little text.*of 0 files, 0 with 0 characters"):
        read_corpus(tmp_path / "empty")


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    write_files(tmp_path, {"one.txt": "x" * 50_000})
    with pytest.raises(
        ValueError, match=r"of 1 files, 1 with 50,000 characters.*at least 2 files.*split a single file"
    ):
        read_corpus(tmp_path)
    write_files(tmp_path / "small", {"a.txt": "x" * 9_000, "b.txt": "x" * 9_000})
    with pytest.raises(ValueError, match=r"2 with 18,000 characters.*20,000 characters: add text"):
        read_corpus(tmp_path / "small")
    with pytest.raises(ValueError, match="max_characters is 100; give at least 20,000"):
        read_corpus(tmp_path, max_characters=100)
