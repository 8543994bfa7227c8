"""The folder of a comparison, and what may happen to it.

    settings.json            what was asked for; written first, never changed
    corpus.json              what the text was
    tokenizer.json           the BPE trained on it
    train.npy, held_out.npy  the text as tokens
    arms/ARM-seedS/          training/ with checkpoints and metrics, model/ and result.json at the end
    results.json             every figure; written last
    report.html, figure.png

and of a grid of them:

    grid.json                what was asked for first
    tasks/TASK/arms/ARM-seedS/
                             training/, model/ and result.json as above; readings.json: read in other ways
    tasks/TASK/              corpus.json, tokenizer.json, train.npy, held_out.npy of a task on text
    results.json, report.html, figure.png

Every file is whole or absent, so that a comparison killed at any moment goes on where it was.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ccq.compare.grid import Cell, GridSettings
from ccq.compare.settings import CompareSettings
from ccq.data.corpora import read_corpus
from ccq.data.tokenizer import TokenizedCorpus, Tokenizer, tokenize, train_tokenizer
from ccq.evals.results import CorpusResult
from ccq.files import claim_folder, lock_folder, write_bytes_atomically, write_json_atomically


@dataclass(frozen=True)
class _Folder:
    """What the folder of a comparison and that of a grid have in common."""

    path: Path
    activity: ClassVar[str]

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def figure(self) -> Path:
        return self.path / "figure.png"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; a second call in it is refused. The lock ends with the process."""
        with lock_folder(self.path, self.activity):
            yield


class RunFolder(_Folder):
    """The folder of one comparison."""

    activity = "comparison"

    def arm(self, arm: str, seed: int) -> Path:
        """The folder of one trained model."""
        return self.path / "arms" / f"{arm}-seed{seed}"

    def claim(self, settings: CompareSettings) -> None:
        """Make the folder this comparison's, or find that it already is.

        Raises:
            ValueError: it holds a comparison with other settings (the message names them), or something else.
        """
        claim_folder(self.path, "settings.json", settings.to_dict(), self.activity)

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


class GridFolder(_Folder):
    """The folder of a grid."""

    activity = "grid"

    def text(self, task: str) -> RunFolder:
        """Where the text of a task lies, and its runs."""
        return RunFolder(self.path / "tasks" / task)

    def cell(self, cell: Cell) -> Path:
        """The folder of one trained model."""
        return self.text(cell.task).arm(cell.arm, cell.seed)

    def claim(self, settings: GridSettings) -> None:
        """Make the folder this grid's, or find that it already is. Interventions may be others than before: trained
        models are evaluated with those that are new.

        Raises:
            ValueError: it holds a grid with other settings (the message names them), or something else.
        """
        claim_folder(self.path, "grid.json", what_is_learned(settings), self.activity)

    def release(self) -> None:
        """Undo `claim` where a text could not be prepared and nothing was trained."""
        if not list(self.path.glob("tasks/*/arms")):
            shutil.rmtree(self.path / "tasks", ignore_errors=True)
            (self.path / "grid.json").unlink(missing_ok=True)


def what_is_learned(settings: GridSettings) -> dict[str, Any]:
    """A grid's settings without what trained models do not depend on."""
    values = settings.to_dict()
    return {name: value for name, value in values.items() if name not in ("interventions", "system")}
