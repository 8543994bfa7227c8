"""A small byte-level BPE for one corpus, with needle tokens that no text can produce.

Merges are learned and applied by the `tokenizers` library. It never hears of the special tokens: their ids follow its
own, so text that spells `<|recall|>` is encoded as ordinary characters.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ccq.data.corpora import Corpus
from ccq.files import write_bytes_atomically

SCHEMA = "ccq-tokenizer/1"
BYTES = 256
LARGEST_VOCABULARY = 2**16  # token streams are uint16

SEPARATOR, REMEMBER, RECALL = "separator", "remember", "recall"
_ANIMALS = (
    "heron otter badger lynx falcon beaver gecko walrus ibex raven marten bison turtle weasel moose osprey "
    "hedgehog panther lizard donkey pelican ferret jackal mantis newt puffin quail rabbit seal tapir urchin viper "
    "wombat yak zebra alpaca baboon camel dolphin eagle flamingo gibbon hamster iguana jaguar koala lemur magpie "
    "narwhal ocelot penguin raccoon stork toad vulture wolf antelope buffalo cricket dingo ermine gorilla hyena llama"
)
_COLOURS = (
    "red blue green yellow purple orange black white brown grey pink silver golden violet crimson turquoise "
    "indigo scarlet amber ivory maroon navy beige teal magenta lavender emerald ochre bronze azure lilac cyan"
)
KEY_WORDS = tuple(_ANIMALS.split())
VALUE_WORDS = tuple(_COLOURS.split())


@dataclass(frozen=True)
class NeedleVocabulary:
    """Token ids of the needle task: `remember KEY VALUE` states a pair, `recall KEY` asks for the VALUE."""

    remember: int
    recall: int
    keys: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class TokenizedCorpus:
    """Token streams of a corpus, uint16 [tokens] each; documents in the corpus's order, one separator token between
    neighbours.
    """

    train: NDArray[np.uint16]
    held_out: NDArray[np.uint16]


@dataclass(frozen=True)
class Tokenizer:
    """Byte-level BPE and special tokens. Ids: first `pieces`, then separator, remember, recall, the keys, the values.

    Attributes:
        pieces: spelling of every BPE token in the order of its id, in the printable byte alphabet of byte-level BPE.
        merges: pairs of pieces in the order of their rank.
        key_words, value_words: readable words of the needle keys and values; the token of "heron" is shown as
            `<|heron|>`.
    """

    pieces: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    key_words: tuple[str, ...]
    value_words: tuple[str, ...]

    @property
    def vocabulary_size(self) -> int:
        """All tokens, special ones included."""
        return len(self.pieces) + len(self._special_words)

    @property
    def separator(self) -> int:
        """Id of the token between two documents."""
        return len(self.pieces)

    @cached_property
    def needle_vocabulary(self) -> NeedleVocabulary:
        first_key = self.separator + 3
        first_value = first_key + len(self.key_words)
        return NeedleVocabulary(
            remember=self.separator + 1,
            recall=self.separator + 2,
            keys=tuple(range(first_key, first_value)),
            values=tuple(range(first_value, self.vocabulary_size)),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of ordinary text; never a special token, whatever the text spells.

        Raises:
            ValueError: the text holds a lone surrogate, which has no UTF-8 form.
        """
        return self._encode_all([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special tokens appear as `<|word|>`. Exact inverse of `encode`; bytes cut inside a
        character become U+FFFD.

        Raises:
            ValueError: an id is outside 0 ... vocabulary_size - 1.
        """
        parts: list[str] = []
        ordinary: list[int] = []
        for token in map(int, ids):
            if not 0 <= token < self.vocabulary_size:
                raise ValueError(
                    f"token id {token} does not exist; this tokenizer has ids 0 to {self.vocabulary_size - 1}"
                )
            if token < len(self.pieces):
                ordinary.append(token)
                continue
            parts += [self._bpe.decode(ordinary), f"<|{self._special_words[token - len(self.pieces)]}|>"]
            ordinary = []
        parts.append(self._bpe.decode(ordinary))
        return "".join(parts)

    def to_bytes(self) -> bytes:
        """The whole tokenizer as JSON; equal tokenizers give equal bytes."""
        content = {
            "schema": SCHEMA,
            "pieces": self.pieces,
            "merges": self.merges,
            "key_words": self.key_words,
            "value_words": self.value_words,
        }
        return (json.dumps(content, indent=0) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str = "the given bytes") -> Tokenizer:
        """Inverse of `to_bytes`. `source` names the data in error messages.

        Raises:
            ValueError: the data is not a tokenizer of this schema.
        """
        remedy = (
            f'accepted is JSON of schema "{SCHEMA}" as written by Tokenizer.save: train and save the tokenizer again'
        )
        try:
            content = json.loads(data)
        except ValueError as error:
            raise ValueError(f"{source}: not JSON ({error}); {remedy}") from error
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"{source}: schema is {schema!r}; {remedy}")
        try:
            tokenizer = cls(
                pieces=tuple(map(str, content["pieces"])),
                merges=tuple((str(left), str(right)) for left, right in content["merges"]),
                key_words=tuple(map(str, content["key_words"])),
                value_words=tuple(map(str, content["value_words"])),
            )
            tokenizer._bpe  # noqa: B018  builds the merges now, so that a broken file is refused here
        except KeyError as error:
            raise ValueError(f"{source}: field {error} is missing; {remedy}") from error
        except Exception as error:  # the library raises plain Exception on merges that do not fit the pieces
            raise ValueError(f"{source}: the content does not fit together ({error}); {remedy}") from error
        return tokenizer

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_bytes()`, whole or not at all. The folder must exist."""
        write_bytes_atomically(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a file written by `save`. Raises ValueError naming the file when it is something else."""
        return cls.from_bytes(Path(path).read_bytes(), source=str(path))

    def to_tokenizers(self) -> tokenizers.Tokenizer:
        """All of it as a tokenizer of the `tokenizers` library, with the same ids. Unlike `encode`, that one takes text
        which spells `<|recall|>` for the token.
        """
        bpe = tokenizers.Tokenizer.from_str(self._bpe.to_str())
        words = [
            tokenizers.AddedToken(f"<|{word}|>", special=word == SEPARATOR, normalized=False)
            for word in self._special_words
        ]
        bpe.add_tokens(words)
        return bpe

    @cached_property
    def sha256(self) -> str:
        """Hash of `to_bytes()`, in hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @cached_property
    def _special_words(self) -> tuple[str, ...]:
        return (SEPARATOR, REMEMBER, RECALL, *self.key_words, *self.value_words)

    @cached_property
    def _bpe(self) -> tokenizers.Tokenizer:
        vocabulary = {piece: token for token, piece in enumerate(self.pieces)}
        return _byte_level(tokenizers.models.BPE(vocabulary, list(self.merges)))

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                found = f"U+{ord(text[error.start]):04X} at character {error.start}"
                raise ValueError(
                    f"text holds the lone surrogate {found}; accepted is text with a UTF-8 form: replace it"
                ) from error
        return [encoding.ids for encoding in self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)]


def train_tokenizer(corpus: Corpus, *, vocabulary: int = 512, keys: int = 32, values: int = 16) -> Tokenizer:
    """Learn a byte-level BPE from the training documents alone; the held-out ones are never looked at.

    Args:
        corpus: its `train` part is used. The result depends on nothing else.
        vocabulary: tokens in total, special ones included. A corpus too small for so many merges gives fewer.
        keys, values: how many key and value tokens the needle task has; chance is 1 / values.

    Raises:
        ValueError: keys or values exceed the word lists (64 and 32), or the vocabulary is outside
            256 bytes + special tokens ... 65536.
    """
    for name, given, words in (("keys", keys, KEY_WORDS), ("values", values, VALUE_WORDS)):
        if not 1 <= given <= len(words):
            raise ValueError(f"{name} is {given}; there are words for 1 to {len(words)}")
    special = 3 + keys + values
    if not BYTES + special <= vocabulary <= LARGEST_VOCABULARY:
        raise ValueError(
            f"vocabulary is {vocabulary}; it must hold {BYTES} bytes and {special} special tokens and fit uint16: "
            f"give {BYTES + special} to {LARGEST_VOCABULARY}"
        )
    bpe = train_byte_level_bpe((text for _, text in corpus.train), vocabulary - special)
    model = json.loads(bpe.to_str())["model"]
    return Tokenizer(
        pieces=tuple(sorted(model["vocab"], key=model["vocab"].__getitem__)),
        merges=tuple((left, right) for left, right in model["merges"]),
        key_words=KEY_WORDS[:keys],
        value_words=VALUE_WORDS[:values],
    )


def tokenize(corpus: Corpus, tokenizer: Tokenizer) -> TokenizedCorpus:
    """Encode both parts of a corpus into one token stream each."""
    return TokenizedCorpus(train=_stream(corpus.train, tokenizer), held_out=_stream(corpus.held_out, tokenizer))


def _stream(documents: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> NDArray[np.uint16]:
    parts: list[NDArray[np.uint16]] = []
    for ids in tokenizer._encode_all([text for _, text in documents]):
        if parts:
            parts.append(np.array([tokenizer.separator], dtype=np.uint16))
        parts.append(np.array(ids, dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)


def train_byte_level_bpe(texts: Iterable[str], vocabulary: int) -> tokenizers.Tokenizer:
    """A byte-level BPE without special tokens, learned from `texts`: 256 bytes, then merges of pairs seen at least
    twice, `vocabulary` pieces at most.
    """
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe = _byte_level(tokenizers.models.BPE())
    bpe.train_from_iterator(texts, trainer=trainer)
    return bpe


def _byte_level(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    return bpe
