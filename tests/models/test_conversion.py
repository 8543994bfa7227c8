"""Models of flash-linear-attention: the same weights give its logits here, and go back as they came.

The fixtures are written by scripts/make_model_fixtures.py; tests/gpu/test_conversion.py runs against that library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.helpers import assert_close
from tests.models.small import make, random_tokens
from torch import Tensor

import ccq
from ccq.models import CCQConfig, from_flash_linear_attention, preset, save_model, to_flash_linear_attention
from ccq.models.conversion import config_from_flash_linear_attention, config_to_flash_linear_attention

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("gla", "gla_variant", "gated_deltanet")


class Stored:
    """One of that library's models: its configuration file, its weights, and what it makes of some tokens."""

    def __init__(self, name: str) -> None:
        with safe_open(FIXTURES / f"{name}.safetensors", framework="pt") as file:
            self.config: dict[str, Any] = json.loads(file.metadata()["config"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        self.tokens, self.logits = tensors.pop("tokens"), tensors.pop("logits")
        self.weights: dict[str, Tensor] = {key.removeprefix("weights."): x for key, x in tensors.items()}

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, folder / "model.safetensors", {"format": "pt"})
        return folder


@pytest.mark.parametrize("form", ["folder", "state dict"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_its_weights_give_its_logits(name: str, form: str, tmp_path: Path) -> None:
    stored = Stored(name)
    random = torch.get_rng_state()
    if form == "folder":
        model = from_flash_linear_attention(stored.write(tmp_path / "its"))
    else:
        model = from_flash_linear_attention(stored.weights, stored.config)
    assert torch.equal(torch.get_rng_state(), random)
    assert_close("logits", model.eval()(stored.tokens).logits, stored.logits, 1e-5)
    # The read step goes on afterwards, and the model is one of this library in every other way.
    assert torch.equal(ccq.attach(model)(stored.tokens).logits, model(stored.tokens).logits)
    assert model.config.eos_token_id == stored.config["eos_token_id"]


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_configuration_go_back_as_they_came(name: str, tmp_path: Path) -> None:
    stored = Stored(name)
    to_flash_linear_attention(from_flash_linear_attention(stored.weights, stored.config), tmp_path)
    config, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    expected = dict(stored.config)
    if name == "gla_variant":
        # What follows from its other values there is said here.
        expected["intermediate_size"] = 256
    told = {"architectures", "dtype", "model_type"}
    assert {key: value for key, value in config.items() if key not in told} == {
        key: expected[key] for key in config if key not in told
    }
    assert config["model_type"] == expected["model_type"]
    # The rest are values that it takes by itself, or that have no part in the logits.
    no_part = {"fuse_cross_entropy", "fuse_norm", "hidden_ratio", "transformers_version"}
    left_out = {key: value for key, value in expected.items() if key not in {*config, *no_part}}
    assert left_out.items() <= DEFAULTS.items()
    names = {key.replace("g_norm.", "g_norm_swish_gate."): x for key, x in stored.weights.items()}
    assert weights.keys() == names.keys() and all(torch.equal(x, names[key]) for key, x in weights.items())


# Of flash-linear-attention 0.6.0, by its source.
DEFAULTS = {
    "attn": None,
    "attn_mode": "chunk",
    "attnres_block_size": None,
    "allow_neg_eigval": False,
    "clamp_min": None,
    "elementwise_affine": True,
    "feature_map": None,
    "fuse_linear_cross_entropy": False,
    "fuse_swiglu": True,
    "hidden_act": "swish",
    "num_kv_heads": None,
    "num_v_heads": None,
    "output_gate_activation": "swish",
    "use_gate": True,
    "use_gk": True,
    "use_gv": False,
    "use_l2warp": False,
    "use_output_gate": True,
    "use_short_conv": True,  # of Gated DeltaNet; said for GLA
}


@torch.no_grad()
def test_early_checkpoints_hold_both_halves_of_the_swiglu_in_one_weight() -> None:
    stored = Stored("gla")
    fused = dict(stored.weights)
    for layer in range(2):
        gate, up = f"model.layers.{layer}.mlp.gate_proj.weight", f"model.layers.{layer}.mlp.up_proj.weight"
        fused[gate] = torch.cat((fused[gate], fused.pop(up)))
    model = from_flash_linear_attention(fused, stored.config).eval()
    assert_close("logits", model(stored.tokens).logits, stored.logits, 1e-5)


@pytest.mark.parametrize("arm", ["gla", "gated-deltanet"])
@pytest.mark.parametrize(("size", "value_size"), [(6, 5), (7, 11), (3, 1)])
def test_sizes_that_are_no_round_factors_survive(arm: str, size: int, value_size: int, tmp_path: Path) -> None:
    model = make(arm, torch.float32, head_dim=size, value_head_dim=value_size, gate_logit_normalizer=16, num_heads=3)
    to_flash_linear_attention(model, tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    # That library's own formulas.
    config = json.loads((tmp_path / "config.json").read_text())
    if arm == "gla":
        for name, wanted in (("expand_k", size), ("expand_v", value_size)):
            product = config["hidden_size"] * config[name]
            assert round(product) == 3 * wanted and product == pytest.approx(round(product), rel=1e-9)
    else:
        product = config["head_dim"] * config["expand_v"]
        assert int(product) == value_size and product == pytest.approx(value_size, rel=1e-5)
    back, tokens = from_flash_linear_attention(tmp_path).eval(), random_tokens(2, 5)
    assert torch.equal(back(tokens).logits, model(tokens).logits)
    # A smaller model in the same folder leaves no shard of this one.
    to_flash_linear_attention(make(arm, torch.float32, gate_logit_normalizer=16), tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_the_papers_sizes_are_those_of_that_librarys_models() -> None:
    """Its Gated DeltaNet at hidden size 2048 has, without being told, the sizes of the preset of 1.3B parameters."""
    own = config_from_flash_linear_attention({"model_type": "gated_deltanet"})
    expected = preset("gated-deltanet-1.3b")
    for (
        name
    ) in "hidden_size num_layers num_heads head_dim value_head_dim intermediate_size vocab_size norm_eps".split():
        assert getattr(own, name) == getattr(expected, name), name
    assert (own.bos_token_id, own.eos_token_id, own.pad_token_id) == (1, 2, None)
    gla = config_from_flash_linear_attention({"model_type": "gla"})
    assert (gla.num_layers, gla.num_heads, gla.head_dim, gla.value_head_dim) == (24, 4, 256, 512)
    assert gla.short_convolution is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_stays_unless_another_is_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    to_flash_linear_attention(make("gated-deltanet", dtype), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert {p.dtype for p in from_flash_linear_attention(tmp_path).parameters()} == {dtype}
    model = from_flash_linear_attention(tmp_path, dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.model.layers[0].attn.A_log._no_weight_decay


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gla", {"feature_map": "relu"}, r"feature_map='relu' \(accepted: None\)"),
        ("gla", {"use_output_gate": False, "clamp_min": -3.0}, r"use_output_gate=False .*; clamp_min=-3.0"),
        ("gla", {"num_kv_heads": 1}, r"num_kv_heads=1 \(accepted: None or num_heads, 2\)"),
        ("gla", {"elementwise_affine": False}, "elementwise_affine=False"),
        ("gla", {"hidden_act": "powlu"}, "hidden_act='powlu'"),
        ("gla", {"attn": {"layers": [1], "num_heads": 2}}, "attn="),
        ("gla", {"num_heads": 3}, "num_heads must divide the key and value sizes, got 3, 16 and 32"),
        ("gla", {"model_type": "retnet"}, "model_type must be one of 'gla', 'gated_deltanet', got 'retnet'"),
        ("gated_deltanet", {"num_v_heads": 4}, "num_v_heads=4"),
        ("gated_deltanet", {"allow_neg_eigval": True}, "allow_neg_eigval=True"),
        ("gated_deltanet", {"use_gate": False}, "use_gate=False"),
        ("gated_deltanet", {"use_short_conv": False}, "use_short_conv=False"),
        ("gated_deltanet", {"output_gate_activation": "sigmoid"}, r"accepted: 'swish' or 'silu'"),
        ("gated_deltanet", {"attnres_block_size": 4}, "attnres_block_size=4"),
    ],
)
def test_options_without_a_counterpart_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    stored = Stored(name)
    with pytest.raises(ValueError, match=message):
        from_flash_linear_attention(stored.weights, {**stored.config, **changes})


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    stored = Stored("gla")
    weights = dict(stored.weights)
    del weights["model.norm.weight"]
    weights["model.layers.0.attn.h_conv1d.weight"] = torch.zeros(3)
    weights["lm_head.weight"] = torch.zeros(5, 32)
    with pytest.raises(
        ValueError,
        match=r"in the state dict are not those of .* GLAForCausalLM .*: missing model.norm.weight; unexpected "
        r"model.layers.0.attn.h_conv1d.weight; lm_head.weight has shape \[5, 32\], .* asks for \[23, 32\]",
    ):
        from_flash_linear_attention(weights, stored.config)
    with pytest.raises(ValueError, match=r"a state dict needs the configuration"):
        from_flash_linear_attention(stored.weights)
    with pytest.raises(ValueError, match=r"must be of arm gla or gated-deltanet, got 'gla\+ccq'.* ccq.attach"):
        from_flash_linear_attention(stored.weights, preset("gla+ccq-tiny"))
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        from_flash_linear_attention(tmp_path)
    folder = stored.write(tmp_path / "its")
    (folder / "model.safetensors").write_bytes(b"{")
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        from_flash_linear_attention(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"holds no weights as model.safetensors or model-\*-of-\*.saf.* save_pretrained"
    ):
        from_flash_linear_attention(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not a model configuration"):
        from_flash_linear_attention(folder)


def test_models_without_a_counterpart_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for arm, changes, message in (
        ("gla+ccq", {}, r"no counterpart for arm 'gla\+ccq'; .* detach it first"),
        ("mamba2", {}, r"no counterpart for arm 'mamba2'; accepted: gla, gated-deltanet$"),
        ("gla", {"gate_logit_normalizer": 64}, "gate_logit_normalizer=16, this one has 64"),
        ("gated-deltanet", {"intermediate_size": None}, "SwiGLU"),
    ):
        with pytest.raises(ValueError, match=message):
            to_flash_linear_attention(make(arm, **changes), tmp_path / "its")
    with pytest.raises(TypeError, match="must be a CCQForCausalLM, got CCQModel"):
        to_flash_linear_attention(make("gla").model, tmp_path / "its")
    with pytest.raises(TypeError, match="config must be a CCQConfig or a table"):
        config_from_flash_linear_attention("gla")  # type: ignore[arg-type]
    assert not (tmp_path / "its").exists()


def test_a_folder_of_this_library_becomes_one_of_that(tmp_path: Path) -> None:
    """Its configuration takes the place of this library's; the weights are the same."""
    model = make("gated-deltanet", torch.float32)
    save_model(model, tmp_path)
    to_flash_linear_attention(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        **config_to_flash_linear_attention(model.config),
        "dtype": "float32",
    }
    assert isinstance(from_flash_linear_attention(tmp_path).config, CCQConfig)
