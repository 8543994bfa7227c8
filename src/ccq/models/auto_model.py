"""Causal language models by name or folder, of this library or any of transformers', each with its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from ccq.models.attach import are_gates, attach, has_gates_file, read_gates
from ccq.models.auto_tokenizer import load_auto_tokenizer
from ccq.models.intervention import read_steps


def check_device(device: str | torch.device) -> None:
    """An error that names the accepted devices, where torch cannot use this one here.

    Raises:
        ValueError: torch knows no such device, or finds none.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        accepted = ", ".join(("cpu", "cuda", *gpus)) if gpus else "cpu, for torch finds no GPU"
        raise ValueError(f"device is {str(device)!r}, which cannot be used here; accepted: {accepted}") from error


def read_auto_model(
    name: str, *, dtype: torch.dtype, device: str | torch.device, gates: str | os.PathLike[str] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in eval mode and its tokenizer, from a folder or the Hugging Face hub. Where gates of `ccq.attach` lie
    with it, the read step is attached with them, in their own dtype.

    Args:
        name: the folder or the name of the hub.
        dtype, device: of the model.
        gates: a file of `save_gates`, or a folder of `save_pretrained`; default: those in the folder of the model,
            among its weights or in a file of `save_gates` beside them.

    Raises:
        ValueError: there is no such device, model or tokenizer, the hub cannot be reached, or the weights or gates do
            not fit.
        FileNotFoundError: there is no such file of gates.
    """
    check_device(device)
    try:
        tokenizer = load_auto_tokenizer(name)
        model, found = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model {name!r}: {reason} Give a folder with a model and its tokenizer, or a name of the hub"
        ) from error
    config_file = cached_file(name, "config.json", local_files_only=True)
    assert config_file is not None
    attach_stored(model, name, Path(config_file).parent, gates, found["unexpected_keys"])
    return model.to(device).eval(), tokenizer


def attach_stored(
    model: PreTrainedModel,
    name: str,
    folder: Path,
    gates: str | os.PathLike[str] | None = None,
    unexpected: Iterable[str] = (),
) -> None:
    """Attach the read step where there are gates for it; see `read_auto_model`.

    Args:
        model: as it was loaded.
        name: what errors call it.
        folder: that it was loaded from.
        gates: of `read_auto_model`.
        unexpected: names of tensors among its weights that were left behind.
    """
    # transformers' classes know nothing of read steps: they have left gates behind, and said so.
    has_gates = gates is None and (are_gates(unexpected) or has_gates_file(folder))
    try:
        if gates is not None:
            attach(model, gates=gates)
        elif has_gates and read_steps(model):
            read_gates(folder)  # refuses a file beside the weights that disagrees with them
        elif has_gates:
            attach(model, gates=folder)
    except (ImportError, TypeError, ValueError) as error:
        which = "has the gates of an attached read step" if gates is None else f"is to have the gates in {gates}"
        raise ValueError(f"model {name!r} {which}, but {error}") from error
