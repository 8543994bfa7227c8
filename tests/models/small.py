"""Small models for tests: large weights and a gate away from its start, so that every part shows in the logits."""

from __future__ import annotations

from typing import Any

import torch
from tests.helpers import assert_close
from torch import Tensor

from ccq.models import ARMS, CCQCache, CCQConfig, CCQForCausalLM, preset
from ccq.nn.mixers import AttentionState, LayerState, map_state, state_tensors

VOCABULARY = 23
CASES = [(arm, "on") for arm in ARMS] + [(arm, "off") for arm in ARMS if arm.endswith("+ccq")]
"""Every arm; those with a read step also with their correction switched off."""


def small(arm: str, **changes: Any) -> CCQConfig:
    sizes = {"hidden_size": 12, "num_layers": 2, "head_dim": 4, "value_head_dim": 6, "initializer_range": 0.3}
    if not arm.startswith("mamba2"):
        sizes["intermediate_size"] = 20
    return preset(f"{arm}-tiny", vocab_size=VOCABULARY, **{**sizes, **changes})


def make(arm: str, dtype: torch.dtype = torch.float64, read: str = "on", **changes: Any) -> CCQForCausalLM:
    model = CCQForCausalLM(small(arm, **changes)).eval()
    with torch.no_grad():
        for step in model.read_steps():
            for parameter in step.parameters():
                parameter.normal_()
    if model.read_steps():
        model.set_read(read)
    return model.to(dtype)


def checkpoint_blocks(model: CCQForCausalLM, reentrant: bool) -> None:
    # Renamed in the course of transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape)


def sequence(state: LayerState | None, row: int) -> LayerState:
    """One sequence of a state; of softmax attention only the slots that are filled."""
    assert state is not None
    one = map_state(state, lambda x: x[row : row + 1])  # type: ignore[type-var]
    if isinstance(one, AttentionState):
        filled = int(one.count)
        return one._replace(keys=one.keys[:, :filled], values=one.values[:, :filled])
    return one


def assert_same_sequence(actual: CCQCache, row: int, expected: CCQCache, expected_row: int, tolerance: float) -> None:
    for a, b in zip(actual.layers, expected.layers, strict=True):
        ours, theirs = (state_tensors(sequence(*pair)) for pair in ((a.state, row), (b.state, expected_row)))
        assert ours.keys() == theirs.keys()
        for name, x in ours.items():
            assert_close(name, x, theirs[name], tolerance)


def assert_same_cache(actual: CCQCache, expected: CCQCache, tolerance: float) -> None:
    assert actual.batch_size == expected.batch_size
    for row in range(actual.batch_size):
        assert_same_sequence(actual, row, expected, row, tolerance)


def greedy(model: CCQForCausalLM, prompt: Tensor, new: int) -> Tensor:
    """[1, T] -> the next tokens [1, new], by reading the whole text again for each."""
    text = prompt
    with torch.no_grad():
        for _ in range(new):
            text = torch.cat((text, model(text, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return text[:, prompt.shape[1] :]
