"""The tokenizer: exact round trips, a slow BPE as second opinion, and needle tokens out of reach of any text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ccq.data.corpora import Corpus
from ccq.data.tokenizer import KEY_WORDS, VALUE_WORDS, Tokenizer, tokenize, train_tokenizer

TRAIN = (
    ("one.py", "def read(path):\n    return open(path).read()\n" * 30),
    ("two.py", "class Reader:\n    def read(self):\n        return self.path\n" * 30),
    ("ünï.txt", "déjà vu — 漢字\n" * 20),
)
HELD_OUT = (("three.py", "def write(path):\n    zzqzzq = 1\n" * 50), ("four.py", "zzq\n"))


def corpus_of(train: tuple[tuple[str, str], ...], held_out: tuple[tuple[str, str], ...]) -> Corpus:
    return Corpus(source="test", train=train, held_out=held_out, characters=0, sha256="")


CORPUS = corpus_of(TRAIN, HELD_OUT)
TOKENIZER = train_tokenizer(CORPUS, vocabulary=360)
FIRST_SPECIAL = TOKENIZER.separator


def byte_alphabet() -> dict[str, int]:
    """Byte of every character of the printable alphabet, rebuilt from its definition: printable bytes stand for
    themselves, the others for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


@given(st.text())
@example("<|recall|> <|remember|><|heron|>\n<|separator|>")
@example("\x00\u2028\U0001f9ff e\u0301 \r\n\t  ")
@example("")
def test_round_trip_and_no_special_tokens(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= token < FIRST_SPECIAL for token in ids)


def test_text_that_spells_special_tokens_is_ordinary_text() -> None:
    vocabulary = TOKENIZER.needle_vocabulary
    for token in range(FIRST_SPECIAL, TOKENIZER.vocabulary_size):
        spelled = TOKENIZER.decode([token])
        ids = TOKENIZER.encode(spelled)
        assert len(ids) > 1
        assert max(ids) < FIRST_SPECIAL
        assert TOKENIZER.decode(ids) == spelled
    shown = TOKENIZER.decode([vocabulary.remember, vocabulary.keys[0], vocabulary.values[0], vocabulary.recall])
    assert shown == "<|remember|><|heron|><|red|><|recall|>"


def test_special_ids_are_distinct_and_fill_the_rest_of_the_vocabulary() -> None:
    vocabulary = TOKENIZER.needle_vocabulary
    special = [TOKENIZER.separator, vocabulary.remember, vocabulary.recall, *vocabulary.keys, *vocabulary.values]
    assert len(vocabulary.keys) == 32
    assert len(vocabulary.values) == 16
    assert sorted(special) == list(range(360 - 51, 360))
    assert TOKENIZER.vocabulary_size == 360
    words = [*KEY_WORDS, *VALUE_WORDS, "separator", "remember", "recall"]
    assert len(set(words)) == len(words) == 64 + 32 + 3
    spelled = {TOKENIZER.decode([token]) for token in special}
    assert len(spelled) == len(special)


def test_pieces_are_bytes_and_their_merges() -> None:
    alphabet = byte_alphabet()
    assert {alphabet[piece] for piece in TOKENIZER.pieces[:256]} == set(range(256))
    for rank, (left, right) in enumerate(TOKENIZER.merges):
        assert TOKENIZER.pieces[256 + rank] == left + right


@given(st.sampled_from("abcdefghijklmnopqrstuvwxyzRS"), st.lists(st.sampled_from(["re", "turn", "ad", "self", "pa"])))
def test_one_word_is_merged_as_by_the_textbook(first: str, parts: list[str]) -> None:
    word = first + "".join(parts)
    ranks = {pair: rank for rank, pair in enumerate(TOKENIZER.merges)}
    pieces = list(word)
    while True:
        candidates = [(ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not candidates:
            break
        _, i = min(candidates)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    assert TOKENIZER.encode(word) == [TOKENIZER.pieces.index(piece) for piece in pieces]


def test_first_merge_is_the_most_frequent_pair_of_the_training_text() -> None:
    corpus = corpus_of((("a", "qj qj qj ab ab qj"),), (("b", "ab " * 1000),))
    tokenizer = train_tokenizer(corpus, vocabulary=256 + 51 + 1)
    assert tokenizer.merges == (("q", "j"),)


def test_held_out_text_is_never_looked_at() -> None:
    other = dataclasses.replace(CORPUS, held_out=(("x", "entirely different " * 500),))
    assert train_tokenizer(other, vocabulary=360) == TOKENIZER
    assert not any("zq" in piece for piece in TOKENIZER.pieces)


def test_training_gives_the_same_bytes_in_another_process() -> None:
    program = (
        "import sys; from ccq.data import Corpus, train_tokenizer\n"
        f"corpus = Corpus(source='', train={TRAIN!r}, held_out=(), characters=0, sha256='')\n"
        "print(train_tokenizer(corpus, vocabulary=360).sha256)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == hashlib.sha256(TOKENIZER.to_bytes()).hexdigest() == TOKENIZER.sha256


def test_a_small_corpus_gives_fewer_merges() -> None:
    tokenizer = train_tokenizer(corpus_of((("a", "abab"),), ()), vocabulary=512, keys=2, values=3)
    assert tokenizer.vocabulary_size == 256 + len(tokenizer.merges) + 3 + 2 + 3 < 512
    assert tokenizer.needle_vocabulary.values[-1] == tokenizer.vocabulary_size - 1
    assert tokenizer.decode(tokenizer.encode("abab z")) == "abab z"


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(path)
    loaded = Tokenizer.load(path)
    assert loaded == TOKENIZER
    assert path.read_bytes() == loaded.to_bytes()
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded.encode(TRAIN[1][1]) == TOKENIZER.encode(TRAIN[1][1])
    assert loaded.needle_vocabulary == TOKENIZER.needle_vocabulary


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    content = json.loads(TOKENIZER.to_bytes())
    broken = {
        "not JSON": b"\xff\xfe",
        "schema is None": json.dumps([1, 2]).encode(),
        "schema is 'other/1'": json.dumps(content | {"schema": "other/1"}).encode(),
        "field 'merges' is missing": json.dumps({k: v for k, v in content.items() if k != "merges"}).encode(),
        "does not fit together": json.dumps(content | {"merges": [["never", "seen"]]}).encode(),
    }
    for message, data in broken.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"tokenizer\.json: .*{message}.*accepted is JSON of schema"):
            Tokenizer.load(path)


def test_tokenize_joins_documents_with_one_separator() -> None:
    streams = tokenize(CORPUS, TOKENIZER)
    for stream, documents in ((streams.train, TRAIN), (streams.held_out, HELD_OUT)):
        assert stream.dtype == np.uint16
        expected: list[int] = []
        for index, (_, text) in enumerate(documents):
            expected += ([TOKENIZER.separator] if index else []) + TOKENIZER.encode(text)
        assert stream.tolist() == expected
        assert TOKENIZER.decode(stream) == "<|separator|>".join(text for _, text in documents)
    assert tokenize(corpus_of(TRAIN, ()), TOKENIZER).held_out.tolist() == []


def test_bytes_cut_inside_a_character_do_not_fail() -> None:
    bytes_only = train_tokenizer(corpus_of((("a", ""),), ()), vocabulary=512)
    assert bytes_only.merges == ()
    ids = bytes_only.encode("漢")
    assert len(ids) == 3
    assert "\ufffd" in bytes_only.decode(ids[:2])


@pytest.mark.parametrize("token", [-1, 360, 10**9])
def test_unknown_ids_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=rf"token id {token} does not exist; this tokenizer has ids 0 to 359"):
        TOKENIZER.decode([0, token])


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lone surrogate U\+D800 at character 2"):
        TOKENIZER.encode("ab\ud800")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary": 306}, r"vocabulary is 306; .*give 307 to 65536"),
        ({"vocabulary": 65537}, r"vocabulary is 65537; .*give 307 to 65536"),
        ({"keys": 65}, r"keys is 65; there are words for 1 to 64"),
        ({"keys": 0}, r"keys is 0; there are words for 1 to 64"),
        ({"values": 33}, r"values is 33; there are words for 1 to 32"),
    ],
)
def test_impossible_sizes_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_tokenizer(CORPUS, **arguments)
