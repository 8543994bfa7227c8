"""Checkpoints: everything a run needs to go on exactly where it was, in one file that is whole or absent."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ccq.files import write_bytes_atomically

FORMAT = "ccq-checkpoint/1"


class Checkpoint(NamedTuple):
    """The state of a training run after `step` optimizer steps."""

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    curve: list[dict[str, Any]]
    seconds: float
    """Time spent in training so far, interruptions left out."""


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint at `path`; a kill leaves the old one or the new one."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **checkpoint._asdict()}, buffer)
    write_bytes_atomically(path, buffer.getvalue())


def load_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, or None where there is none.

    Raises:
        ValueError: the file is damaged or is not a checkpoint of this version.
    """
    if not path.exists():
        return None
    remedy = "delete it to train this model again from the start"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damaged bytes make the unpickler raise errors of any kind
        # torch's own message advises loading without its safety check; it is no advice for a damaged file.
        raise ValueError(f"{path} is damaged or is not a checkpoint; {remedy}") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this version of ccq, {FORMAT}; {remedy}")
    return Checkpoint(**content)
