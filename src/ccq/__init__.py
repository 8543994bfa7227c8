"""Curvature-Conditioned Query: read a linear-attention memory with q - lambda Cov(keys) q (arXiv 2606.01294)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ccq.models import CCQConfig, CCQForCausalLM, attach
    from ccq.nn import CurvatureConditionedQuery, GatedDeltaNet, GatedLinearAttention
    from ccq.ops.gated_delta_rule import gated_delta_rule
    from ccq.ops.gla import gated_linear_attention
    from ccq.ops.query import KeyStatistics, curvature_conditioned_query

__version__ = "0.1.0"

_HOMES = {
    "CCQConfig": "ccq.models",
    "CCQForCausalLM": "ccq.models",
    "CurvatureConditionedQuery": "ccq.nn",
    "GatedDeltaNet": "ccq.nn",
    "GatedLinearAttention": "ccq.nn",
    "KeyStatistics": "ccq.ops.query",
    "attach": "ccq.models",
    "curvature_conditioned_query": "ccq.ops.query",
    "gated_delta_rule": "ccq.ops.gated_delta_rule",
    "gated_linear_attention": "ccq.ops.gla",
}

__all__ = [
    "CCQConfig",
    "CCQForCausalLM",
    "CurvatureConditionedQuery",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KeyStatistics",
    "attach",
    "curvature_conditioned_query",
    "gated_delta_rule",
    "gated_linear_attention",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home when it is first asked for, so that `import ccq` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ccq' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
