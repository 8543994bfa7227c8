"""The folder of a comparison, and what may happen to it.

    settings.json            what was asked for; written first, never changed
    corpus.json              what the text was
    tokenizer.json           the BPE trained on it
    train.npy, held_out.npy  the text as tokens
    arms/ARM-seedS/          training/ with checkpoints and metrics, model/ and result.json at the end
    results.json             every figure; written last
    report.html, figure.png

Every file is whole or absent, so that a comparison killed at any moment goes on where it was.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ccq.compare.settings import CompareSettings
from ccq.data.corpora import read_corpus
from ccq.data.tokenizer import TokenizedCorpus, Tokenizer, tokenize, train_tokenizer
from ccq.evals.results import CorpusResult
from ccq.files import lock_folder, setting_differences, write_bytes_atomically, write_json_atomically


@dataclass(frozen=True)
class RunFolder:
    """The folder of one comparison."""

    path: Path

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def figure(self) -> Path:
        return self.path / "figure.png"

    def arm(self, arm: str, seed: int) -> Path:
        """The folder of one trained model."""
        return self.path / "arms" / f"{arm}-seed{seed}"

    def claim(self, settings: CompareSettings) -> None:
        """Make the folder this comparison's, or find that it already is.

        Raises:
            ValueError: it holds a comparison with other settings (the message names them), or something else.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; --out takes the folder of a comparison, which is made if missing")
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "settings.json"
        asked = json.loads(json.dumps(settings.to_dict()))
        if not file.exists():
            strangers = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
            if strangers:
                raise ValueError(
                    f"{self.path} holds other files ({', '.join(strangers[:5])}) and no comparison; choose an empty or "
                    "new folder with --out"
                )
            write_json_atomically(file, asked)
            return
        try:
            found = json.loads(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); delete {self.path} or choose another --out") from error
        different = setting_differences(found, asked)
        if different:
            raise ValueError(
                f"{self.path} holds a comparison with other settings: {'; '.join(different)}. Choose another --out, or "
                "delete the folder"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; a second comparison in it is refused. The lock ends with the process."""
        with lock_folder(self.path, "comparison"):
            yield

    def prepare(self, settings: CompareSettings) -> None:
        """Read the text, train the tokenizer and store both as tokens, unless that is done. corpus.json comes last."""
        if (self.path / "corpus.json").exists():
            return
        corpus = read_corpus(
            None if settings.text is None else Path(settings.text), max_characters=settings.max_characters
        )
        tokenizer = train_tokenizer(corpus, vocabulary=settings.vocabulary, keys=settings.keys, values=settings.values)
        tokens = tokenize(corpus, tokenizer)
        tokenizer.save(self.path / "tokenizer.json")
        for name, array in (("train", tokens.train), ("held_out", tokens.held_out)):
            buffer = io.BytesIO()
            np.save(buffer, array)
            write_bytes_atomically(self.path / f"{name}.npy", buffer.getvalue())
        described: CorpusResult = {
            "source": corpus.source,
            "files": len(corpus.train) + len(corpus.held_out),
            "held_out_files": len(corpus.held_out),
            "characters": corpus.characters,
            "train_tokens": len(tokens.train),
            "held_out_tokens": len(tokens.held_out),
            "sha256": corpus.sha256,
        }
        write_json_atomically(self.path / "corpus.json", described)

    def release(self) -> None:
        """Undo `claim` where no text could be prepared, so that the folder is free for other settings."""
        if not (self.path / "corpus.json").exists():
            (self.path / "settings.json").unlink(missing_ok=True)

    def corpus(self) -> CorpusResult:
        described: CorpusResult = json.loads((self.path / "corpus.json").read_bytes())
        return described

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path / "tokenizer.json")

    def tokens(self) -> TokenizedCorpus:
        return TokenizedCorpus(np.load(self.path / "train.npy"), np.load(self.path / "held_out.npy"))
