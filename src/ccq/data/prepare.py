"""Text in, token shards out: parallel, in bounded memory, and able to go on after a kill at any moment.

Documents are read in order, tokenised by a pool of processes in batches, and written in order by one process, so the
files do not depend on the number of workers. Every few seconds the writer commits: all files are flushed, and the
journal says how far the source was read. The same call goes on from the last commit and ends with the same bytes as a
call that was never interrupted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ccq.data.corpora import stable_hash
from ccq.data.shards import (
    INDEX_FILE,
    MOST_SHARD_TOKENS,
    PROGRESS_FILE,
    PROGRESS_SCHEMA,
    TOKENIZER_FILE,
    ShardWriter,
    TokenFolder,
    remove_leftovers,
    token_dtype,
)
from ccq.data.sources import BEGINNING, Position, Source
from ccq.data.tokenizer import BYTES, train_byte_level_bpe
from ccq.files import lock_folder, setting_differences, write_bytes_atomically, write_json_atomically

DEFAULT_SHARD_TOKENS = 100_000_000
DEFAULT_HELD_OUT = 0.01
TOKENIZER_CHARACTERS = 200_000_000
"""Text that `train_tokenizer=N` looks at, in Unicode code points: more hardly changes 32,000 pieces."""
COMMIT_SECONDS = 5.0
"""Time between commits; what a kill can cost."""

END_OF_TEXT = "<|endoftext|>"
_KNOWN_EOS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1 << 12
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer of the `tokenizers` library as a file.

    Attributes:
        data: the JSON that `tokenizers.Tokenizer.save` writes.
        source: where it comes from, for messages.
        eos: the token that ends a text, where the tokenizer's own settings name one.
    """

    data: bytes
    source: str
    eos: str | None = None

    def load(self) -> tokenizers.Tokenizer:
        """The tokenizer, without padding and truncation.

        Raises:
            ValueError: the data is no tokenizer.
        """
        try:
            loaded = tokenizers.Tokenizer.from_buffer(self.data)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"{self.source} is not a tokenizer of the `tokenizers` library ({error}); give a tokenizer.json"
            ) from error
        loaded.no_padding()
        loaded.no_truncation()
        return loaded


def read_tokenizer(path: str | os.PathLike[str]) -> TokenizerFile:
    """Read a tokenizer.json, or the one in a folder, with the end-of-text token that a tokenizer_config.json beside it
    names.

    Raises:
        ValueError: there is no such file, or it is not a tokenizer.
    """
    path = Path(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give a tokenizer.json, a folder with one, or --train-tokenizer N")
    eos = None
    config = file.with_name("tokenizer_config.json")
    if file.name == TOKENIZER_FILE and config.is_file():
        eos = json.loads(config.read_bytes()).get("eos_token")
        eos = eos["content"] if isinstance(eos, dict) else eos
    found = TokenizerFile(file.read_bytes(), str(file), eos)
    found.load()
    return found


def find_tokenizer(name: str, read_other: Callable[[str], tuple[bytes, str | None]]) -> TokenizerFile:
    """The tokenizer of a name: a tokenizer.json, a folder with one, or whatever else `read_other` reads.

    Args:
        name: as given.
        read_other: gives the JSON and the token that ends a text; this room knows nothing of transformers.

    Raises:
        ValueError: there is no such file, it is not a tokenizer, or as `read_other` says.
    """
    if name.endswith(".json") or any(path.is_file() for path in (Path(name), Path(name, TOKENIZER_FILE))):
        return read_tokenizer(name)
    data, eos = read_other(name)
    return TokenizerFile(data, name, eos)


def prepare_shards(
    out: str | os.PathLike[str],
    source: Source,
    tokenizer: TokenizerFile | int,
    *,
    held_out: int | float = DEFAULT_HELD_OUT,
    tokens: int | None = None,
    eos: str | None = None,
    bos: str | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    workers: int = 1,
    console: Console | None = None,
) -> TokenFolder:
    """Tokenise a source into the shards of a folder (`ccq.data.shards`), or go on with it, or open it if it is done.

    Text is encoded without the tokenizer's own special tokens, and text that spells one stays ordinary text, so the
    special tokens in the shards are those that `eos` and `bos` put there. Documents without text are left out and
    counted.

    Args:
        out: the folder; made if missing. Nothing else may be in it.
        source: see `ccq.data.sources`.
        tokenizer: the tokenizer, or the size of the byte-level BPE to train on the first 200 M characters of the
            training documents, special tokens included.
        held_out: a whole number holds out the first so many documents, and leaves out (and counts) later documents of
            the same text; a float below 1 holds out about that share, chosen by a hash of the text, so that equal texts
            are on one side and a document stays on its side when others come and go. 0 holds out nothing.
        tokens: stop with the document in which the training part reaches so many tokens; None reads everything.
        eos: the token put after every document; by default the one that the tokenizer's settings name, else a
            well-known one that it has.
        bos: a token put before every document; by default none.
        shard_tokens: tokens in a shard.
        workers: processes that tokenise; 1 tokenises in this one. The files do not depend on it. Memory grows by a few
            batches of about a million characters (or one document, if it is longer) a worker.
        console: shows a progress bar; None shows nothing.

    Raises:
        ValueError: the folder was prepared with other settings or holds something else, the source has no documents or
            no such field, or the tokenizer has no such token. The message says what to do.
        OSError: the disk is full or the source cannot be read. What was committed stays; the same call goes on.
    """
    _check_arguments(tokenizer, held_out, tokens, shard_tokens, workers)
    if isinstance(tokenizer, TokenizerFile):
        described: dict[str, Any] = {"sha256": hashlib.sha256(tokenizer.data).hexdigest()}
        eos = eos or tokenizer.eos or _known_eos(tokenizer)
    else:
        described = {"train": tokenizer, "characters": TOKENIZER_CHARACTERS}
        eos = eos or END_OF_TEXT
    settings = {
        "source": source.description,
        "tokenizer": described,
        "eos": eos,
        "bos": bos,
        "held_out": held_out,
        "tokens": tokens,
        "shard_tokens": shard_tokens,
    }
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder for the shards, which is made if missing")
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, "preparation"):
        record = _claim(folder, settings)
        if record is not None:
            preparation = _Preparation(folder, source, settings, record, workers, console)
            try:
                preparation.run(tokenizer)
            except ValueError:
                preparation.release_if_empty()
                raise
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                raise OSError(
                    error.errno,
                    f"{folder}: {error.strerror}; what was committed is kept: free some space, and the same command "
                    "goes on",
                ) from error
        return TokenFolder.open(folder)


class _Counts(NamedTuple):
    """Documents read so far."""

    with_text: int = 0
    empty: int = 0
    same_as_held_out: int = 0


class _Encoded(NamedTuple):
    """A batch of documents: tokens of each, special ones included (none without text), and the hash of its text."""

    documents: list[NDArray[np.integer[Any]]]
    hashes: list[int]


class _Preparation:
    """One sitting of `prepare_shards` in a folder that this process holds."""

    def __init__(
        self,
        folder: Path,
        source: Source,
        settings: dict[str, Any],
        record: dict[str, Any],
        workers: int,
        console: Console | None,
    ) -> None:
        self._folder, self._source, self._settings, self._record = folder, source, settings, record
        self._workers, self._console = workers, console
        self._committed = record["position"] is not None
        self._position = Position(*record["position"]) if self._committed else BEGINNING
        self._counts = _Counts(**record["counts"]) if self._committed else _Counts()

    def run(self, given: TokenizerFile | int) -> None:
        split = _Split.of(self._settings["held_out"], self._source)
        tokenizer = self._tokenizer(given, split)
        encoder = _Encoder(tokenizer.data, self._settings["bos"], self._settings["eos"])
        shard_tokens = self._settings["shard_tokens"]
        writer = ShardWriter(self._folder, encoder.dtype, shard_tokens, self._record if self._committed else None)
        try:
            self._write(writer, encoder, split)
            if not writer.tokens("train"):
                self._committed = False
                if writer.tokens("held_out"):
                    raise ValueError("every document was held out; give a smaller --held-out")
                raise ValueError("the source holds no text; check the files, and that --text-field names the text")
            index = {
                "dtype": encoder.dtype.name,
                "vocabulary": encoder.vocabulary_size,
                "tokenizer": {"file": TOKENIZER_FILE, "sha256": hashlib.sha256(tokenizer.data).hexdigest()},
                "eos": {"token": self._settings["eos"], "id": encoder.eos},
                "bos": None if encoder.bos is None else {"token": self._settings["bos"], "id": encoder.bos},
                "left_out": {"empty": self._counts.empty, "same_as_held_out": self._counts.same_as_held_out},
                "settings": self._settings,
                "made_with": {"tokenizers": tokenizers.__version__},
            }
            writer.finish(self._journal(), index)
        finally:
            writer.close()

    def release_if_empty(self) -> None:
        """Leave the folder free for other settings where nothing was committed in it."""
        if not self._committed:
            remove_leftovers(self._folder)
            (self._folder / TOKENIZER_FILE).unlink(missing_ok=True)

    def _tokenizer(self, given: TokenizerFile | int, split: _Split) -> TokenizerFile:
        file = self._folder / TOKENIZER_FILE
        if isinstance(given, int):
            if file.exists():  # trained in an earlier sitting
                return read_tokenizer(file)
            special = [token for token in (self._settings["eos"], self._settings["bos"]) if token is not None]
            given = _train(_training_texts(self._source, split), given, special, self._console)
        write_bytes_atomically(file, given.data)
        return given

    def _write(self, writer: ShardWriter, encoder: _Encoder, split: _Split) -> None:
        limit = self._settings["tokens"]
        shards, last_commit = writer.finished_shards, time.perf_counter()
        with _ProgressBar(self._console, limit, writer) as bar:
            if limit is not None and writer.tokens("train") >= limit:
                return
            batches = _batches(self._source, self._position)
            with closing(_encode_in_order(batches, encoder, self._workers)) as encoded:
                for batch, position in encoded:
                    reached = self._append(batch, writer, split)
                    self._position = position
                    bar.update(self._counts)
                    if reached:
                        return
                    due = time.perf_counter() - last_commit >= COMMIT_SECONDS
                    if due or writer.finished_shards > shards:
                        writer.commit(self._journal())
                        self._committed = True
                        shards, last_commit = writer.finished_shards, time.perf_counter()

    def _append(self, batch: _Encoded, writer: ShardWriter, split: _Split) -> bool:
        """Write a batch; whether the training part has reached its limit, after which nothing more is written."""
        limit = self._settings["tokens"]
        for document, text_hash in zip(batch.documents, batch.hashes, strict=True):
            counts = self._counts
            if not len(document):
                self._counts = counts._replace(empty=counts.empty + 1)
                continue
            part = split.part_of(counts.with_text, text_hash)
            counts = counts._replace(with_text=counts.with_text + 1)
            if part is None:
                self._counts = counts._replace(same_as_held_out=counts.same_as_held_out + 1)
                continue
            self._counts = counts
            writer.append(part, document)
            if limit is not None and writer.tokens("train") >= limit:
                return True
        return False

    def _journal(self) -> dict[str, Any]:
        return {"settings": self._settings, "position": self._position, "counts": self._counts._asdict()}


@dataclass(frozen=True)
class _Split:
    """Which part a document belongs to: a function of its number among those with text, and of its text."""

    share: float
    number: int
    hashes: frozenset[int]
    """Of the first `number` texts."""

    @classmethod
    def of(cls, held_out: int | float, source: Source) -> _Split:
        if isinstance(held_out, float):
            return cls(held_out, 0, frozenset())
        hashes: list[int] = []
        for text, _ in source.documents() if held_out else ():
            if text:
                hashes.append(stable_hash("split", text))
                if len(hashes) == held_out:
                    break
        return cls(0.0, held_out, frozenset(hashes))

    def part_of(self, number: int, text_hash: int) -> str | None:
        """ "train", "held_out", or None for a later document that repeats one held out by number."""
        if number < self.number or text_hash < self.share * 2**64:
            return "held_out"
        return None if text_hash in self.hashes else "train"


class _Encoder:
    """Text to tokens, for one process."""

    def __init__(self, data: bytes, bos: str | None, eos: str) -> None:
        self.arguments = (data, bos, eos)
        self._tokenizer = TokenizerFile(data, TOKENIZER_FILE).load()
        # Text that spells a special token is ordinary text.
        self._tokenizer.encode_special_tokens = True
        self.vocabulary_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.dtype = token_dtype(self.vocabulary_size)
        self.eos = _token_id(self._tokenizer, eos, "--eos")
        self.bos = None if bos is None else _token_id(self._tokenizer, bos, "--bos")

    def __call__(self, texts: Sequence[str]) -> _Encoded:
        before = [] if self.bos is None else [self.bos]
        documents = []
        for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            ids = encoding.ids
            documents.append(np.array([*before, *ids, self.eos] if ids else [], self.dtype))
        return _Encoded(documents, [stable_hash("split", text) for text in texts])


def _batches(source: Source, start: Position) -> Iterator[tuple[list[str], Position]]:
    """Texts of about a million characters, with the position in the source after them."""
    texts: list[str] = []
    characters, position = 0, start
    for text, position in source.documents(start):
        texts.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(texts) == _BATCH_DOCUMENTS:
            yield texts, position
            texts, characters = [], 0
    if texts:
        yield texts, position


def _encode_in_order(
    batches: Iterable[tuple[list[str], Position]], encoder: _Encoder, workers: int
) -> Generator[tuple[_Encoded, Position], None, None]:
    """Encode batches, several at a time, and give them back in order; about two a worker are under way."""
    if workers == 1:
        for texts, position in batches:
            yield encoder(texts), position
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=encoder.arguments)
    pending: deque[tuple[Future[_Encoded], Position]] = deque()
    try:
        for texts, position in batches:
            pending.append((pool.submit(_encode_in_worker, texts), position))
            if len(pending) > 2 * workers:
                future, position = pending.popleft()
                yield future.result(), position
        for future, position in pending:
            yield future.result(), position
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process that tokenises has died, perhaps for want of memory; what was committed is kept: the same "
            "command goes on, and fewer --workers need less memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_encoder: _Encoder


def _start_worker(data: bytes, bos: str | None, eos: str) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that writes
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_encoder = _Encoder(data, bos, eos)


def _exit_with_parent() -> None:
    """A pool's workers outlive a parent that was killed: they hold both ends of the queue they wait for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(texts: list[str]) -> _Encoded:
    return _worker_encoder(texts)


def _training_texts(source: Source, split: _Split) -> Iterator[str]:
    """What a tokenizer may see: training documents, up to a bounded number of characters."""
    number = characters = 0
    for text, _ in source.documents():
        if not text:
            continue
        if split.part_of(number, stable_hash("split", text)) == "train":
            yield text
            characters += len(text)
            if characters >= TOKENIZER_CHARACTERS:
                return
        number += 1


def _train(texts: Iterator[str], vocabulary: int, special: list[str], console: Console | None) -> TokenizerFile:
    if console is not None:
        console.print(f"Training a tokenizer of {vocabulary:,} tokens")
    bpe = train_byte_level_bpe(texts, vocabulary - len(special))
    bpe.add_special_tokens(special)
    return TokenizerFile(bpe.to_str().encode(), "the trained tokenizer", special[0])


def _known_eos(tokenizer: TokenizerFile) -> str:
    loaded = tokenizer.load()
    for token in _KNOWN_EOS:
        if loaded.token_to_id(token) is not None:
            return token
    special = sorted(token.content for token in loaded.get_added_tokens_decoder().values() if token.special)
    shown = ", ".join(special[:20]) or "none"
    raise ValueError(
        f"{tokenizer.source} does not say which token ends a text; name it with --eos (its special tokens: {shown})"
    )


def _token_id(tokenizer: tokenizers.Tokenizer, token: str, option: str) -> int:
    number: int | None = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token!r}; name another with {option}")
    return number


def _claim(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Make the folder this preparation's, or find that it already is. Returns its journal; None if it is finished."""
    if (folder / INDEX_FILE).exists():
        found = TokenFolder.open(folder).index["settings"]
    elif (folder / PROGRESS_FILE).exists():
        try:
            record = json.loads((folder / PROGRESS_FILE).read_bytes())
            found = record["settings"]
            known = record["schema"] == PROGRESS_SCHEMA
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / PROGRESS_FILE} is damaged ({error}); delete {folder}") from error
        if not known:
            raise ValueError(f"{folder} was begun by another version of ccq; delete it and prepare it again")
    else:
        strangers = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        if strangers:
            shown = ", ".join(strangers[:5])
            raise ValueError(f"{folder} holds other files ({shown}); give an empty or new folder with --out")
        record = {"settings": settings, "position": None}
        write_json_atomically(folder / PROGRESS_FILE, {"schema": PROGRESS_SCHEMA, **record})
        return record
    different = setting_differences(found, json.loads(json.dumps(settings)))
    if different:
        raise ValueError(
            f"{folder} was prepared with other settings: {'; '.join(different)}. Choose another --out, or delete the "
            "folder"
        )
    if (folder / INDEX_FILE).exists():
        remove_leftovers(folder)
        return None
    return dict(record)


def _check_arguments(
    tokenizer: TokenizerFile | int, held_out: int | float, tokens: int | None, shard_tokens: int, workers: int
) -> None:
    if isinstance(tokenizer, int) and not BYTES + 2 <= tokenizer <= 2**24:
        raise ValueError(f"a tokenizer of {tokenizer} tokens cannot be trained; give {BYTES + 2} to {2**24:,}")
    if held_out < 0 or (isinstance(held_out, float) and held_out >= 1):
        raise ValueError(f"held_out is {held_out}; give a number of documents, or a share of at least 0 and below 1")
    for name, given, most in (("tokens", tokens, None), ("shard_tokens", shard_tokens, MOST_SHARD_TOKENS)):
        if given is not None and (given < 1 or (most is not None and given > most)):
            raise ValueError(f"{name} is {given}; give at least 1" + ("" if most is None else f" and at most {most:,}"))
    if workers < 1:
        raise ValueError(f"workers is {workers}; give at least 1")


class _ProgressBar:
    """Documents, tokens and speed; silent without a console."""

    def __init__(self, console: Console | None, limit: int | None, writer: ShardWriter) -> None:
        self._writer, self._limit = writer, limit
        self._began, self._tokens_before = time.perf_counter(), self._tokens
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, disable=console is None)
        self._task: TaskID = self._progress.add_task("Tokenising", total=limit, shown="")

    def __enter__(self) -> _ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, counts: _Counts) -> None:
        tokens = self._tokens
        speed = (tokens - self._tokens_before) / max(time.perf_counter() - self._began, 1e-9)
        shown = f"{counts.with_text:,} documents, {tokens:,} tokens, {speed:,.0f} tokens/s"
        self._progress.update(self._task, completed=self._writer.tokens("train"), shown=shown)

    @property
    def _tokens(self) -> int:
        return self._writer.tokens("train") + self._writer.tokens("held_out")
