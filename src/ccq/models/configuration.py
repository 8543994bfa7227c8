"""The configuration of a language model, and the names of arms."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ccq.nn.read import check_gate

BACKBONES = ("gla", "gated-deltanet")
READS = ("ccq",)
ARMS = tuple(name for backbone in BACKBONES for name in (backbone, *(f"{backbone}+{read}" for read in READS)))


def parse_arm(arm: str) -> tuple[str, str | None]:
    """BACKBONE or BACKBONE+READ -> (backbone, read step or None)."""
    if not isinstance(arm, str):
        raise TypeError(f"arm must be a string, got {type(arm).__name__}; accepted: {', '.join(ARMS)}")
    backbone, plus, read = arm.partition("+")
    if backbone not in BACKBONES or (plus and read not in READS):
        raise ValueError(
            f"unknown arm {arm!r}{_nearest(arm, ARMS)}; an arm is BACKBONE or BACKBONE+READ: {', '.join(ARMS)}"
        )
    return backbone, read or None


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a `CausalLanguageModel` except its weights."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    """Key and query size per head, D."""
    value_head_dim: int
    """Value size per head, V."""
    arm: str
    """One of `ARMS`."""
    intermediate_size: int
    """Inner size of the SwiGLU layers."""
    gate: str | float = "presplit"
    """The read step: form of lambda, see `ccq.nn.CurvatureConditionedQuery`."""
    centred: bool = True
    """The read step: covariance (True) or second moment."""
    keep_length: bool = False
    """The read step: keep the length of the query. It matters for GLA, whose own queries are raw."""
    short_convolution: int | None = 4
    """Kernel size of the convolutions on q, k and v, or None for none, which GLA alone accepts."""
    gate_logit_normalizer: float = 16
    """GLA: log decay = logsigmoid(..) / gate_logit_normalizer."""
    max_a: float = 16.0
    """Gated DeltaNet: A at the start is uniform in (0, max_a]."""
    dt_min: float = 0.001
    """Gated DeltaNet: softplus(dt_bias) at the start is log-uniform in [dt_min, dt_max]."""
    dt_max: float = 0.1
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    """Standard deviation of linear layers and embeddings at the start."""

    def __post_init__(self) -> None:
        parse_arm(self.arm)
        check_gate(self.gate)
        sizes = (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "head_dim",
            "value_head_dim",
            "intermediate_size",
        )
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("centred", "keep_length"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("gate_logit_normalizer", "max_a", "dt_min", "dt_max", "norm_eps", "initializer_range"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min must not be above dt_max, got {self.dt_min} and {self.dt_max}")
        kernel = self.short_convolution
        if kernel is not None and (not isinstance(kernel, int) or isinstance(kernel, bool) or kernel < 1):
            raise ValueError(f"short_convolution must be a kernel size of at least 1, or None for none; got {kernel!r}")
        if kernel is None and self.backbone == "gated-deltanet":
            raise ValueError("short_convolution must be a kernel size for gated-deltanet; only gla goes without")

    @property
    def backbone(self) -> str:
        """One of `BACKBONES`."""
        return parse_arm(self.arm)[0]

    @property
    def read(self) -> str | None:
        """One of `READS`, or None for the backbone as it is."""
        return parse_arm(self.arm)[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`. An unknown key is an error that names the nearest known one, a missing one is
        named too.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"a model configuration must be a table of names and values, got {type(values).__name__}")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                raise ValueError(
                    f"unknown model option {name!r}{_nearest(str(name), fields)}; accepted: {', '.join(fields)}"
                )
        missing = [
            name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values
        ]
        if missing:
            raise ValueError(f"model configuration lacks {', '.join(missing)}")
        return cls(**values)


def _nearest(name: str, accepted: tuple[str, ...] | Mapping[str, Any]) -> str:
    matches = difflib.get_close_matches(name, list(accepted), 1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
