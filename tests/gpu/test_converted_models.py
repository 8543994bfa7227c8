"""Converted models against flash-linear-attention's own, and attached ones on transformers' kernels."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from tests.models.small import VOCABULARY, make, random_tokens
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

import ccq
from ccq.models import detach, from_flash_linear_attention, to_flash_linear_attention

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of that library
]
DEVICE = "cuda"
SIZES: dict[str, Any] = {"hidden_size": 32, "head_dim": 16, "value_head_dim": 32, "gate_logit_normalizer": 16}


@pytest.mark.parametrize("arm", ["gla", "gated-deltanet"])
@torch.no_grad()
def test_that_library_gives_the_logits_of_what_is_written_for_it(arm: str, tmp_path: Path) -> None:
    pytest.importorskip("fla")
    model = make(arm, torch.float32, **SIZES)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    to_flash_linear_attention(model, tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps({**config, "fuse_cross_entropy": False}))
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert type(theirs).__module__.startswith("fla.")
    # Up to 64 tokens it takes its recurrent kernels, which have no products in TF32.
    tokens = random_tokens(2, 60).to(DEVICE)
    expected = theirs.eval().to(DEVICE)(tokens, use_cache=False).logits
    assert_close("logits", model.to(DEVICE)(tokens).logits, expected, 1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    back = from_flash_linear_attention(tmp_path / "theirs")
    for (name, a), (other, b) in zip(back.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b.cpu())


def attached(dtype: torch.dtype) -> Any:
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=32,
        initializer_range=0.1,
    )
    return ccq.attach(Qwen3_5ForCausalLM(config).eval().to(DEVICE, dtype))


@torch.no_grad()
def test_attaching_changes_no_more_than_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels normalise q and k themselves in bfloat16; with a read step it is done before them."""
    # Where flash-linear-attention is installed, transformers calls its kernels for tensors on a CPU too.
    in_torch = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    model = attached(torch.bfloat16)
    tokens, mask = random_tokens(2, 150).to(DEVICE), torch.ones(2, 150, dtype=torch.int64, device=DEVICE)
    mask[0, :20] = 0
    plain = detach(copy.deepcopy(model))
    with monkeypatch.context() as patch:
        patch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", in_torch)
        exact = detach(copy.deepcopy(model).cpu().float())(tokens.cpu(), attention_mask=mask.cpu()).logits
    real = mask.bool().cpu()
    rounding = assert_close("plain", plain(tokens, attention_mask=mask).logits.cpu()[real], exact[real], 0.1)
    assert_close("attached", model(tokens, attention_mask=mask).logits.cpu()[real], exact[real], 2 * rounding)
