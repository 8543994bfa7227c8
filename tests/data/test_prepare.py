"""Prepared shards against direct tokenisation, whatever the workers, the shard length and the moment of a kill."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ccq.cli import main
from ccq.data.prepare import TokenizerFile, find_tokenizer, prepare_shards, read_tokenizer
from ccq.data.shards import TokenFolder, TokenPart
from ccq.data.sources import Source, file_source
from ccq.files import lock_folder

EOS, BOS = "<|endoftext|>", "<s>"
TEXTS = [
    "the first document\n",
    "",
    "déjà vu — 漢字 \U0001f9ff\r\n\t",
    f"spelled {EOS} and {BOS} are text",
    "\x00\u2028",
    *(f"document {number} " + "word " * (number % 7) for number in range(60)),
    "long " * 300,
    "the first document\n",
]


def bpe(texts: Sequence[str], vocabulary: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=2, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def small_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = bpe(TEXTS, 300)
    tokenizer.add_special_tokens([EOS, BOS])
    return tokenizer


TOKENIZER = TokenizerFile(small_tokenizer().to_str().encode(), "small")


def bpe_without_special() -> tokenizers.Tokenizer:
    """In which no text is special, since the special tokens are not even known."""
    content = json.loads(TOKENIZER.data)
    return tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": []}))


PLAIN = bpe_without_special()
EOS_ID = small_tokenizer().token_to_id(EOS)


def tokens_of(text: str, before: Sequence[int] = ()) -> list[int]:
    return [*before, *PLAIN.encode(text).ids, EOS_ID]


def is_in_share(text: str, share: float) -> bool:
    return int(hashlib.sha256(b"split\0" + text.encode()).hexdigest()[:16], 16) < share * 2**64


def documents(part: TokenPart) -> list[list[int]]:
    return [part.document(number).tolist() for number in range(part.documents)]


def lines(folder: Path, texts: Sequence[str]) -> Source:
    """A source of two files with these texts."""
    folder.mkdir(exist_ok=True)
    for name, part in (("a", texts[: len(texts) // 2]), ("b", texts[len(texts) // 2 :])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return file_source([str(folder / "*.jsonl")])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tokens_on_disk_are_the_direct_tokenisation(tmp_path: Path) -> None:
    folder = prepare_shards(tmp_path / "out", lines(tmp_path / "text", TEXTS), TOKENIZER, held_out=0.3)
    texts = [text for text in TEXTS if text]
    assert documents(folder.train) == [tokens_of(text) for text in texts if not is_in_share(text, 0.3)]
    assert documents(folder.held_out) == [tokens_of(text) for text in texts if is_in_share(text, 0.3)]
    assert folder.held_out.documents > 5
    assert folder.index["left_out"] == {"empty": 1, "same_as_held_out": 0}
    assert folder.index["eos"] == {"token": EOS, "id": EOS_ID}
    assert folder.index["bos"] is None
    assert folder.index["vocabulary"] == folder.vocabulary_size == EOS_ID + 2
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == TOKENIZER.data
    assert folder.index["tokenizer"]["sha256"] == hashlib.sha256(TOKENIZER.data).hexdigest()
    assert list(folder.verify()) == [None] * len(folder.files())
    # Of the two special tokens only the one that was put there appears, and only at the end of documents.
    tokens = folder.train.read(0, folder.train.tokens)
    assert (tokens == EOS_ID).sum() == folder.train.documents
    assert tokens.max() == EOS_ID


@settings(max_examples=8)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=20),
    shard=st.integers(1, 40),
)
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, texts: list[str], shard: int) -> None:
    texts = [*texts, "one at least"]
    path = tmp_path_factory.mktemp("any")
    folder = prepare_shards(path / "out", lines(path / "text", texts), TOKENIZER, held_out=0, shard_tokens=shard)
    decoded = [PLAIN.decode(document[:-1]) for document in documents(folder.train)]
    assert decoded == [text for text in texts if text]


def test_a_begin_token_stands_before_every_document(tmp_path: Path) -> None:
    folder = prepare_shards(tmp_path / "out", lines(tmp_path / "text", TEXTS), TOKENIZER, held_out=0, eos=EOS, bos=BOS)
    bos = folder.index["bos"]["id"]
    assert folder.index["bos"] == {"token": BOS, "id": EOS_ID + 1}
    assert documents(folder.train) == [tokens_of(text, [bos]) for text in TEXTS if text]


@pytest.mark.parametrize("shard", [7, 10**6])
def test_workers_and_batches_change_no_byte(tmp_path: Path, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = lines(tmp_path / "text", TEXTS)
    prepare_shards(tmp_path / "one", source, TOKENIZER, held_out=5, shard_tokens=shard)
    monkeypatch.setattr("ccq.data.prepare._BATCH_DOCUMENTS", 3)
    prepare_shards(tmp_path / "two", source, TOKENIZER, held_out=5, shard_tokens=shard, workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    sizes = [entry["tokens"] for entry in TokenFolder.open(tmp_path / "two").train.shards]
    assert sizes[:-1] == [shard] * (len(sizes) - 1)


def test_a_number_is_held_out_exactly_and_never_trained_on(tmp_path: Path) -> None:
    texts = [text for text in TEXTS if text]
    folder = prepare_shards(tmp_path / "out", lines(tmp_path / "text", TEXTS), TOKENIZER, held_out=3)
    assert documents(folder.held_out) == [tokens_of(text) for text in texts[:3]]
    assert documents(folder.train) == [tokens_of(text) for text in texts[3:-1]]  # the last repeats the first
    assert folder.index["left_out"] == {"empty": 1, "same_as_held_out": 1}


def test_a_document_stays_on_its_side_when_others_come_and_go(tmp_path: Path) -> None:
    first = prepare_shards(tmp_path / "one", lines(tmp_path / "a", TEXTS), TOKENIZER, held_out=0.3)
    mixed = ["new", *reversed(TEXTS[3:]), "newer"]
    second = prepare_shards(tmp_path / "two", lines(tmp_path / "b", mixed), TOKENIZER, held_out=0.3)
    for one, other in ((first.train, second.held_out), (second.train, first.held_out)):
        assert not {tuple(document) for document in documents(one)} & {tuple(document) for document in documents(other)}


@pytest.mark.parametrize("limit", [1, 19, 20, 200])
def test_a_token_limit_ends_with_the_document_that_reaches_it(tmp_path: Path, limit: int) -> None:
    folder = prepare_shards(tmp_path / "out", lines(tmp_path / "text", TEXTS), TOKENIZER, held_out=0, tokens=limit)
    expected: list[list[int]] = []
    for text in filter(None, TEXTS):
        if sum(map(len, expected)) >= limit:
            break
        expected.append(tokens_of(text))
    assert documents(folder.train) == expected


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_largest_id_decides_the_dtype(tmp_path: Path, size: int, dtype: str) -> None:
    words = {f"w{number}": number for number in range(size - 1)} | {"[EOS]": size - 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    given = TokenizerFile(tokenizer.to_str().encode(), "words")
    folder = prepare_shards(tmp_path / "out", lines(tmp_path / "text", [f"w1 w{size - 2}", " "]), given, held_out=0)
    assert folder.index["dtype"] == dtype
    assert documents(folder.train) == [[1, size - 2, size - 1]]
    assert folder.index["left_out"]["empty"] == 1  # no token, so no document


def test_a_trained_tokenizer_never_sees_held_out_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"zzqzzq {number}" for number in range(9)] + ["zzqzzq 3", *TEXTS] * 3
    source = lines(tmp_path / "text", texts)
    folder = prepare_shards(tmp_path / "out", source, 290, held_out=9)
    seen = [text for text in texts[9:] if text and text not in texts[:9]]
    expected = bpe(seen, 289)
    expected.add_special_tokens([EOS])
    assert folder.tokenizer().to_str() == expected.to_str()
    assert folder.vocabulary_size == 290
    assert folder.index["eos"] == {"token": EOS, "id": 289}
    # The sample is bounded: the text that reaches the bound is the last one.
    monkeypatch.setattr("ccq.data.prepare.TOKENIZER_CHARACTERS", len(seen[0]) + 1)
    bounded = prepare_shards(tmp_path / "bounded", source, 290, held_out=9)
    assert bounded.tokenizer().get_vocab().keys() == {*bpe(seen[:2], 289).get_vocab(), EOS}


def test_the_end_token_is_found(tmp_path: Path) -> None:
    source = lines(tmp_path / "text", TEXTS)
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(TOKENIZER.data)
    for number, stated in enumerate((BOS, {"content": BOS, "lstrip": False})):
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
        found = prepare_shards(tmp_path / f"stated{number}", source, read_tokenizer(model)).index["eos"]
        assert found == {"token": BOS, "id": EOS_ID + 1}
    (model / "tokenizer_config.json").unlink()
    known = read_tokenizer(model / "tokenizer.json")
    assert prepare_shards(tmp_path / "known", source, known).index["eos"]["token"] == EOS
    unknown = TokenizerFile(bpe(TEXTS, 300).to_str().encode(), "mine.json")
    with pytest.raises(ValueError, match=r"mine.json does not say which token ends a text; name it with --eos .*none"):
        prepare_shards(tmp_path / "unknown", source, unknown)
    with pytest.raises(ValueError, match=r"the tokenizer has no token '<end>'; name another with --eos"):
        prepare_shards(tmp_path / "unknown", source, TOKENIZER, eos="<end>")
    assert prepare_shards(tmp_path / "unknown", source, TOKENIZER).train.tokens  # the folder stayed free


def test_a_tokenizer_is_found_by_its_name(tmp_path: Path) -> None:
    asked: list[str] = []

    def other(name: str) -> tuple[bytes, str | None]:
        asked.append(name)
        return TOKENIZER.data, BOS

    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.data)
    for path in (tmp_path / "tokenizer.json", tmp_path):
        assert find_tokenizer(str(path), other) == TokenizerFile(TOKENIZER.data, str(tmp_path / "tokenizer.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"absent.json does not exist; give a tokenizer.json"):
        find_tokenizer("absent.json", other)
    assert asked == []
    for name in ("somebody/something", str(tmp_path / "empty")):
        assert find_tokenizer(name, other) == TokenizerFile(TOKENIZER.data, name, BOS)
    assert asked == ["somebody/something", str(tmp_path / "empty")]


def test_the_parts_begin_with_their_first_tokens(tmp_path: Path) -> None:
    folder = prepare_shards(tmp_path / "out", lines(tmp_path / "text", TEXTS), TOKENIZER, held_out=2)
    first = {"train": TEXTS[3], "held_out": TEXTS[0]}
    assert folder.beginnings(1000) == {name: f"{text}{EOS}" for name, text in first.items()}
    tokenizer = bpe_without_special()
    short = {name: tokenizer.decode(tokenizer.encode(text).ids[:4]) for name, text in first.items()}
    assert folder.beginnings(4) == short
    nothing = prepare_shards(tmp_path / "whole", lines(tmp_path / "text", TEXTS), TOKENIZER, held_out=0)
    assert list(nothing.beginnings()) == ["train"]


def test_a_finished_folder_is_opened_and_not_made_again(tmp_path: Path) -> None:
    source = lines(tmp_path / "text", TEXTS)
    first = prepare_shards(tmp_path / "out", source, TOKENIZER)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.name != ".lock"}
    again = prepare_shards(tmp_path / "out", source, TOKENIZER)
    assert again.index == first.index
    assert times == {path: path.stat().st_mtime_ns for path in times}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 0.2}, r"held_out is 0.01 there and 0.2 here"),
        ({"shard_tokens": 5}, r"shard_tokens is 100000000 there and 5 here"),
        ({"bos": BOS}, r'bos is null there and "<s>" here'),
        ({"tokenizer": 300}, r"tokenizer.sha256 is .* tokenizer.train is null there and 300 here"),
    ],
)
def test_other_settings_are_refused_and_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = lines(tmp_path / "text", TEXTS)
    prepare_shards(tmp_path / "out", source, TOKENIZER)
    before = content(tmp_path / "out")
    with pytest.raises(ValueError, match=rf"prepared with other settings: .*{message}.* Choose another --out"):
        prepare_shards(tmp_path / "out", source, **{"tokenizer": TOKENIZER, **options})
    assert content(tmp_path / "out") == before


def test_folders_in_use_or_with_other_files_are_refused(tmp_path: Path) -> None:
    source = lines(tmp_path / "text", TEXTS)
    with pytest.raises(ValueError, match=r"holds other files \(a.jsonl, b.jsonl\); give an empty or new folder"):
        prepare_shards(tmp_path / "text", source, TOKENIZER)
    with pytest.raises(ValueError, match=r"a.jsonl is a file; give a folder"):
        prepare_shards(tmp_path / "text" / "a.jsonl", source, TOKENIZER)
    (tmp_path / "out").mkdir()
    with (
        lock_folder(tmp_path / "out", "preparation"),
        pytest.raises(ValueError, match=r"another preparation is running in .*out"),
    ):
        prepare_shards(tmp_path / "out", source, TOKENIZER)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["", ""], {}, "the source holds no text"),
        (["a", "b"], {"held_out": 2}, "every document was held out; give a smaller --held-out"),
        (["a"], {"held_out": 1.0}, "held_out is 1.0; give a number of documents, or a share"),
        (["a"], {"held_out": -1}, "held_out is -1"),
        (["a"], {"tokens": 0}, "tokens is 0; give at least 1"),
        (["a"], {"shard_tokens": 2**31 + 1}, "shard_tokens is 2147483649; give at least 1 and at most 2,147,483,648"),
        (["a"], {"workers": 0}, "workers is 0"),
        (["a"], {"tokenizer": 257}, "a tokenizer of 257 tokens cannot be trained; give 258 to"),
        (
            ["a"],
            {"tokenizer": TokenizerFile(b"{}", "my.json")},
            "my.json is not a tokenizer of the `tokenizers`",
        ),
    ],
)
def test_what_cannot_be_prepared_is_refused(
    tmp_path: Path, texts: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_shards(tmp_path / "out", lines(tmp_path / "text", texts), **{"tokenizer": TOKENIZER, **options})
    # Nothing is left that would refuse other settings.
    assert prepare_shards(tmp_path / "out", lines(tmp_path / "more", ["a", "b"]), TOKENIZER, held_out=0).train.tokens


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    source = lines(tmp_path / "text", TEXTS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "progress.json").write_text("{")
    with pytest.raises(ValueError, match=r"progress.json is damaged .*; delete .*out"):
        prepare_shards(tmp_path / "out", source, TOKENIZER)


# One process forks a child for every moment: importing everything anew would take seconds each time.
KILL_AT_EVERY_MOMENT = """
import itertools, os, shutil, signal, sys
from pathlib import Path
import ccq.data.prepare as prepare
from ccq.data.sources import file_source

folder, step, options = Path(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3])
prepare.COMMIT_SECONDS = 0.0
prepare._BATCH_DOCUMENTS = 9
source = file_source([str(folder / "text" / "*.jsonl")])
tokenizer = prepare.read_tokenizer(folder / "tokenizer.json") if "train" not in options else options.pop("train")

def killing(function, moments, last):
    def wrapped(*arguments, **keywords):
        if next(moments) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **keywords)
        if next(moments) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapped

def run(out, last):
    '''Whether the run in a child, killed at its moment `last`, was killed.'''
    child = os.fork()
    if child == 0:
        moments = itertools.count()
        for place, name in ((os, "fsync"), (os, "replace"), (os, "truncate"), (Path, "unlink")):
            setattr(place, name, killing(getattr(place, name), moments, last))
        prepare.prepare_shards(out, source, tokenizer, **options)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL

def content(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}

run(folder / "whole", -1)
whole, out = content(folder / "whole"), folder / "out"
for moment in itertools.count(0, step):
    shutil.rmtree(out, ignore_errors=True)
    if not run(out, moment):
        break
    run(out, moment % 11)
    run(out, -1)
    assert content(out) == whole, (moment, {name for name in whole if content(out).get(name) != whole[name]})
print(moment)
"""


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("step", "options"),
    [
        (7, {"held_out": 0.3, "shard_tokens": 200}),
        (31, {"held_out": 4, "tokens": 900, "shard_tokens": 90, "train": 270}),
    ],
)
def test_a_kill_at_any_moment_changes_no_byte(tmp_path: Path, step: int, options: dict[str, Any]) -> None:
    lines(tmp_path / "text", TEXTS)
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.data)
    done = run_script(KILL_AT_EVERY_MOMENT, str(tmp_path), str(step), repr(options))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100  # so many moments there are at least


PREPARE_SLOWLY = """
import sys, time
from pathlib import Path
import ccq.data.prepare as prepare
from ccq.data.sources import file_source

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    prepare.COMMIT_SECONDS = 0.0
    prepare._BATCH_DOCUMENTS = 2
    tokenizer = prepare.read_tokenizer(folder / "tokenizer.json")
    append = prepare.ShardWriter.append
    prepare.ShardWriter.append = lambda *arguments: (time.sleep(0.02), append(*arguments))
    source = file_source([str(folder / "text" / "*.jsonl")])
    prepare.prepare_shards(folder / "out", source, tokenizer, workers=2, shard_tokens=100)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_killed_while_workers_run_it_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    source = lines(tmp_path / "text", TEXTS)
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.data)
    script = tmp_path / "slowly.py"
    script.write_text(PREPARE_SLOWLY)
    for victim, shards in (("worker", 2), ("parent", 6)):
        errors = tmp_path / "errors"
        with open(errors, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(script), str(tmp_path)], stderr=file, start_new_session=True
            )
        try:
            wait_for(lambda shards=shards: (tmp_path / "out" / f"train-{shards - 1:05}.tokens").exists())
            family = session_of(process.pid)
            # Children of the process that the first one starts to fork workers.
            workers = [pid for pid, parent in family.items() if parent in family and parent != process.pid]
            assert len(workers) == 2
            os.kill(workers[-1] if victim == "worker" else process.pid, signal.SIGKILL)
            process.wait(60)
            wait_for(lambda leader=process.pid: not session_of(leader))
        finally:
            process.kill()
            process.wait()
        if victim == "worker":
            assert "a process that tokenises has died" in errors.read_text()
    assert not (tmp_path / "out" / "index.json").exists()
    prepare_shards(tmp_path / "out", source, read_tokenizer(tmp_path / "tokenizer.json"), shard_tokens=100)
    prepare_shards(tmp_path / "whole", source, read_tokenizer(tmp_path / "tokenizer.json"), shard_tokens=100)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def session_of(leader: int) -> dict[int, int]:
    """Living processes of a session, and the parent of each."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(session) == leader and state != "Z":
                found[int(entry.name)] = int(parent)
    return found


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import ccq.data.prepare as prepare
from ccq.data.sources import file_source

folder = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
prepare.COMMIT_SECONDS = 0.0
prepare._BATCH_DOCUMENTS = 3
source = file_source([str(folder / "text" / "*.jsonl")])
try:
    prepare.prepare_shards(folder / "out", source, prepare.read_tokenizer(folder / "tokenizer.json"))
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_a_full_disk_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.data)
    limit = len(TOKENIZER.data) + 100  # the tokenizer fits, the tokens do not
    texts = [*TEXTS, *(f"more {number} " * 40 for number in range(100))]
    source = lines(tmp_path / "text", texts)
    done = run_script(FULL_DISK, str(tmp_path), str(limit))
    assert "what was committed is kept: free some space, and the same command goes on" in done.stdout, done.stderr
    record = json.loads((tmp_path / "out" / "progress.json").read_bytes())
    committed = record["parts"]["train"]["tokens"]
    assert 0 < committed * 2 <= limit
    folder = prepare_shards(tmp_path / "out", source, TOKENIZER)
    prepare_shards(tmp_path / "whole", source, TOKENIZER)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert folder.train.tokens > committed


def test_the_command_prepares_and_inspects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines(tmp_path / "text", TEXTS)
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.data)
    out = str(tmp_path / "out")
    command = ["data", "prepare", "--files", str(tmp_path / "text" / "*"), "--out", out, "--held-out", "0.3"]
    assert main([*command, "--tokenizer", str(tmp_path / "tokenizer.json"), "--workers", "1"]) == 0
    folder = TokenFolder.open(out)
    assert folder.index["settings"]["held_out"] == 0.3
    capsys.readouterr()
    assert main(["data", "inspect", out, "--verify"]) == 0
    shown = capsys.readouterr().out
    for expected in (
        f"{folder.vocabulary_size} tokens in the vocabulary, uint16",
        f"{EOS} ({EOS_ID}) after every document; left out: 1 documents without text, 0 that repeat",
        f"begins: 'the first document\\n{EOS}",
        "All 5 checksums are right.",
    ):
        assert expected in shown
    counts = [line.split() for line in shown.splitlines()]
    for part in (folder.train, folder.held_out):
        assert [part.name, str(part.documents), f"{part.tokens:,}", "1"] in counts
    data = bytearray((tmp_path / "out" / "train-00000.tokens").read_bytes())
    data[0] ^= 1
    (tmp_path / "out" / "train-00000.tokens").write_bytes(data)
    assert main(["data", "inspect", out, "--verify"]) == 1
    error = capsys.readouterr().err
    assert "train-00000.tokens is damaged" in error
    assert "copy what is named again, or delete" in error
    (tmp_path / "out" / "tokenizer.json").write_bytes(b"{")
    assert main(["data", "inspect", out]) == 2
    assert re.search(r"ccq: .*tokenizer.json is missing or damaged .*; copy it again", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train-tokenizer", "300", "--files", "/no/such/*.txt"], "ccq: no file matches '/no/such/*.txt'"),
        (["--stdlib", "--tokenizer", "no/such.json"], "ccq: no/such.json does not exist; give a tokenizer.json"),
        (
            ["--stdlib", "--train-tokenizer", "300", "--split", "test"],
            "ccq: --config, --split and --revision are of a --dataset",
        ),
    ],
)
def test_wrong_input_ends_with_one_clear_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
