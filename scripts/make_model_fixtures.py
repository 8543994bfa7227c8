"""Write the fixtures of tests/models/test_conversion.py: weights, configuration, tokens and logits of
flash-linear-attention's GLA and Gated DeltaNet models.

The library's kernels run on a CPU in Triton's interpreter, with a helper module `fla_on_cpu` that stands in for the
GPU driver:

    TRITON_INTERPRET=1 PYTHONPATH=<flash-linear-attention>:<folder of fla_on_cpu.py> python
    scripts/make_model_fixtures.py tests/models/fixtures

Made with flash-linear-attention 0.6.0, transformers 5.24.0, torch 2.13.0, triton 3.7.1, in float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fla_on_cpu  # isort: skip - before fla and before any kernel is defined
import fla
import safetensors.torch
import torch
from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM, GLAConfig, GLAForCausalLM

SIZES = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "initializer_range": 0.2,
    "fuse_cross_entropy": False,
}
# Above 64 tokens the library's GLA takes its chunked kernel, at 64 and below its recurrent one. What a configuration
# leaves out is worth a case: the inner size of the SwiGLU, which then follows from hidden_ratio.
CASES = {
    "gla": (GLAForCausalLM, GLAConfig(**SIZES, eos_token_id=5), 70),
    "gla_variant": (
        GLAForCausalLM,
        GLAConfig(
            **SIZES | {"hidden_size": 16, "intermediate_size": None, "num_hidden_layers": 1},
            hidden_ratio=2,
            expand_k=1.0,
            expand_v=2.0,
            use_short_conv=True,
            conv_size=3,
            fuse_norm=False,
            tie_word_embeddings=True,
            pad_token_id=0,
        ),
        30,
    ),
    "gated_deltanet": (GatedDeltaNetForCausalLM, GatedDeltaNetConfig(**SIZES, head_dim=8, expand_v=1.5), 70),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    fla_on_cpu.patch_ranges()
    for name, (kind, config, tokens) in CASES.items():
        torch.manual_seed(0)
        model = kind(config).eval()
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "norm" in key:  # ones, where a mistake in their use would not show
                    value.add_(torch.randn_like(value), alpha=0.3)
        ids = torch.randint(SIZES["vocab_size"], (2, tokens))
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
        weights = dict(model.state_dict())
        if config.tie_word_embeddings:
            del weights["lm_head.weight"]
        tensors = {f"weights.{key}": value.contiguous() for key, value in weights.items()}
        tensors |= {"tokens": ids, "logits": logits}
        about = {"flash-linear-attention": fla.__version__, "torch": torch.__version__}
        safetensors.torch.save_file(
            tensors, folder / f"{name}.safetensors", {**about, "config": config.to_json_string()}
        )
        print(f"{name}: {(folder / f'{name}.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    main()
