"""How a trained model came to be: the file training.json beside its weights, from which evaluations know the seed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from ccq.files import write_json_atomically

TRAINING_FILE = "training.json"


class TrainingRecord(TypedDict):
    """`seed` is that of the weights at the start and of the order of the data; `settings` is everything else that
    determines the training. Models whose records differ in the seed alone are repetitions of each other.
    """

    seed: int
    steps: int
    tokens: int
    settings: dict[str, Any]


def write_training_record(
    folder: str | os.PathLike[str], *, seed: int, steps: int, tokens: int, settings: Mapping[str, Any]
) -> None:
    """Write the record of the model in `folder`, whole or not at all. The folder is made if need be."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    record = TrainingRecord(seed=seed, steps=steps, tokens=tokens, settings=dict(settings))
    write_json_atomically(Path(folder) / TRAINING_FILE, record)


def read_training_record(folder: str | os.PathLike[str]) -> TrainingRecord | None:
    """The record of the model in `folder`; None where it has none, as models of other libraries.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder) / TRAINING_FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
        return TrainingRecord(
            seed=int(found["seed"]),
            steps=int(found["steps"]),
            tokens=int(found["tokens"]),
            settings=dict(found["settings"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}); delete it to go on without the seed of the training"
        ) from error
