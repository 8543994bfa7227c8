"""The configuration of a language model, and the names of arms."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ccq.nn.read import check_gate
from ccq.nn.reads import READS as READ_KINDS

BACKBONES = ("gla", "gla-hedgehog", "gated-deltanet", "mamba2", "transformer")
READS = tuple(READ_KINDS)
"""The read steps, see `ccq.nn.reads.READS`."""
# Softmax attention has no memory that a changed query could read: its scores are not linear in it.
_LINEAR = tuple(backbone for backbone in BACKBONES if backbone != "transformer")
ARMS = tuple(
    name for backbone in BACKBONES for name in (backbone, *((f"{backbone}+ccq",) if backbone in _LINEAR else ()))
)
"""The backbones, and each with the read step of the paper; every other read step makes an arm, too."""
_EVERY_ARM = (*ARMS, *(f"{backbone}+{read}" for backbone in _LINEAR for read in READS if read != "ccq"))

# What transformers itself writes into a configuration file or passes on, beside the fields of its own class.
_OF_TRANSFORMERS = frozenset(
    "model_type auto_map name_or_path torch_dtype num_labels attn_implementation experts_implementation "
    "output_attentions per_layer_config quantization_config tie_last_hidden_states".split()
)

NOT_IN_A_CALL = frozenset(
    "min_a max_a dt_min dt_max initializer_range max_position_embeddings use_cache bos_token_id eos_token_id "
    "pad_token_id".split()
)
"""Fields that change where a model starts or what programs do with it, but nothing that it computes."""


def parse_arm(arm: str) -> tuple[str, str | None]:
    """BACKBONE or BACKBONE+READ -> (backbone, read step or None). Read step "none" is None: the backbone as it is."""
    if not isinstance(arm, str):
        raise TypeError(f"arm must be a string, got {type(arm).__name__}; accepted: {', '.join(ARMS)}")
    if arm not in _EVERY_ARM:
        others = ", ".join(read for read in READS if read != "ccq")
        raise ValueError(
            f"unknown arm {arm!r}{nearest(arm, _EVERY_ARM)}; an arm is BACKBONE or BACKBONE+READ: {', '.join(ARMS)}, "
            f"or with another READ in place of ccq: {others}"
        )
    backbone, _, read = arm.partition("+")
    return backbone, None if read in ("", "none") else read


class CCQConfig(PreTrainedConfig):
    """Everything that determines a `CCQForCausalLM` except its weights. All arguments are keywords.

    An unknown name is an error that names the nearest known one, and so is a value that cannot work.
    """

    model_type = "ccq"
    attribute_map: ClassVar[dict[str, str]] = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embeddings": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    # transformers makes a configuration without arguments to learn the defaults, so every field needs one.
    arm: str = "gla+ccq"
    """BACKBONE or BACKBONE+READ, see `BACKBONES` and `READS`."""
    vocab_size: int = 32_000
    hidden_size: int = 2048
    num_layers: int = 21
    num_heads: int = 6
    head_dim: int = 256
    """Key and query size per head, D. Mamba2: its state size."""
    value_head_dim: int = 512
    """Value size per head, V. Mamba2: its head size."""
    intermediate_size: int | None = 5632
    """Inner size of the SwiGLU layers; None for blocks without one, as those of Mamba2 are."""
    gate: str | float | list[list[float]] = "presplit"
    """The read step: form of lambda, see `ccq.nn.read.GatedReadStep`; or a fixed lambda for each layer and head."""
    centred: bool = True
    """The read step "ccq": covariance (True) or second moment."""
    keep_length: bool = False
    """The read step: keep the length of the query. It matters where the backbone's own queries are raw: GLA, Mamba2."""
    read_options: dict[str, Any] | None = None
    """Options of single read steps, see `ccq.nn.reads.READS`: {"steps": 5} for richardson."""
    short_convolution: int | None = 4
    """Kernel size of the convolutions on q, k and v, or None for none, which GLA alone accepts."""
    gate_logit_normalizer: float = 16
    """GLA: log decay = logsigmoid(..) / gate_logit_normalizer."""
    num_groups: int = 1
    """Mamba2: how many sets of keys and queries the heads share."""
    min_a: float = 1.0
    """Mamba2: A at the start is uniform in [min_a, max_a]."""
    max_a: float = 16.0
    """Gated DeltaNet: A at the start is uniform in (0, max_a]; Mamba2: see min_a."""
    dt_min: float = 0.001
    """Gated DeltaNet, Mamba2: softplus(dt_bias) at the start is log-uniform in [dt_min, dt_max]."""
    dt_max: float = 0.1
    num_kv_heads: int | None = None
    """Transformer: heads of keys and values, shared by groups of query heads; None for one each."""
    rope_base: float = 10_000.0
    """Transformer: base of the rotary embedding."""
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    """Standard deviation of linear layers and embeddings at the start."""
    tie_word_embeddings: bool = False
    """Use the embeddings as the head."""
    max_position_embeddings: int = 4096
    """The training length. It limits nothing; programs that cut their input to a model's length read it."""
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **others: Any) -> None:
        for name in others:
            if name not in _OF_TRANSFORMERS and name not in self.attribute_map and not name.startswith("_"):
                own = own_fields()
                raise ValueError(f"unknown model option {name!r}{nearest(name, own)}; accepted: {', '.join(own)}")
        super().__post_init__(**others)
        self.check()

    def check(self) -> None:
        """Refuse what cannot work. Called when a configuration is made, and again when a model is made of it, because
        fields can be set in between.
        """
        parse_arm(self.arm)
        self._check_read_options()
        for name in (
            "vocab_size hidden_size num_layers num_heads head_dim value_head_dim num_groups max_position_embeddings"
        ).split():
            _check_size(name, getattr(self, name))
        if self.intermediate_size is not None:
            _check_size("intermediate_size", self.intermediate_size, ", or None for blocks without SwiGLU")
        for name in ("centred", "keep_length", "tie_word_embeddings", "use_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("gate_logit_normalizer min_a max_a dt_min dt_max rope_base norm_eps initializer_range").split():
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min must not be above dt_max, got {self.dt_min} and {self.dt_max}")
        kernel = self.short_convolution
        if kernel is not None and (not isinstance(kernel, int) or isinstance(kernel, bool) or kernel < 1):
            raise ValueError(f"short_convolution must be a kernel size of at least 1, or None for none; got {kernel!r}")
        if kernel is None and self.backbone in ("gated-deltanet", "mamba2"):
            raise ValueError(
                f"short_convolution must be a kernel size for {self.backbone}; only gla and gla-hedgehog go without"
            )
        self._check_heads()
        self._check_gate()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            for token in ids:
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name} must be a token id in 0 ... {self.vocab_size - 1}, got {value!r}")

    def _check_read_options(self) -> None:
        given = self.read_options
        if given is None:
            return
        if not isinstance(given, dict):
            raise ValueError(f"read_options must be a table of names and values, or None; got {given!r}")
        accepted = READ_KINDS[self.read or "none"].options
        for name, value in given.items():
            if name not in accepted:
                raise ValueError(
                    f"unknown option {name!r} of read step {self.read or 'none'}{nearest(name, accepted)}; "
                    f"accepted in read_options: {', '.join(accepted) or 'none'}"
                )
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"read_options: {name} must be a whole number of at least 1, got {value!r}")

    def _check_gate(self) -> None:
        heads = self.num_groups if self.backbone == "mamba2" else self.num_heads
        if not isinstance(self.gate, list):
            check_gate(self.gate, heads)
            return
        if len(self.gate) != self.num_layers:
            raise ValueError(f"gate must have a list for each of the {self.num_layers} layers, got {len(self.gate)}")
        for layer, gate in enumerate(self.gate):
            if not isinstance(gate, list):
                raise ValueError(f"gate must have a list of {heads} numbers for layer {layer}, got {gate!r}")
            check_gate(gate, heads)

    def _check_heads(self) -> None:
        if self.num_kv_heads is not None:
            _check_size("num_kv_heads", self.num_kv_heads, ", or None for one a query head")
            if self.num_heads % self.num_kv_heads:
                raise ValueError(
                    f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}: "
                    "every head of keys serves the same number of query heads"
                )
        if self.backbone == "mamba2":
            if self.min_a > self.max_a:
                raise ValueError(f"min_a must not be above max_a, got {self.min_a} and {self.max_a}")
            if self.num_heads % self.num_groups:
                raise ValueError(
                    f"num_groups must divide num_heads, got {self.num_groups} and {self.num_heads}: every group of "
                    "keys and queries serves the same number of heads"
                )
        if self.backbone in ("transformer", "gla-hedgehog") and self.head_dim % 2:
            reason = (
                "rotary embeddings turn pairs" if self.backbone == "transformer" else "its feature map has two halves"
            )
            raise ValueError(f"head_dim must be even for {self.backbone} ({reason}), got {self.head_dim}")

    @property
    def backbone(self) -> str:
        """One of `BACKBONES`."""
        return parse_arm(self.arm)[0]

    @property
    def read(self) -> str | None:
        """One of `READS` but "none", or None for the backbone as it is."""
        return parse_arm(self.arm)[1]

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """The configuration that `to_dict` or a config.json describes. `arm` and the sizes must be there."""
        if not isinstance(config_dict, Mapping):
            raise TypeError(
                f"a model configuration must be a table of names and values, got {type(config_dict).__name__}"
            )
        required = ("arm", "vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim", "value_head_dim")
        missing = [name for name in (*required, "intermediate_size") if name not in config_dict]
        if missing:
            raise ValueError(f"model configuration lacks {', '.join(missing)}")
        return super().from_dict(dict(config_dict), **kwargs)


def own_fields() -> list[str]:
    """The names of this library's fields, in their order."""
    return [name for name in CCQConfig.__annotations__ if not name.startswith(("attribute_map", "keys_", "base_"))]


def _check_size(name: str, value: Any, other: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1{other}, got {value!r}")


def nearest(name: str, accepted: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no accepted name is close."""
    matches = difflib.get_close_matches(name, list(accepted), 1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
