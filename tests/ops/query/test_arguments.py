"""Wrong input to the read step: each is refused, and the message names what was given and what is accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ccq.ops.query import KeyStatistics, curvature_conditioned_query

Q = torch.randn(2, 6, 3, 4)
STATISTICS = KeyStatistics.zeros(2, 3, 4, dtype=torch.float32, device=torch.device("cpu"))

WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "q is a list": (TypeError, "q must be a tensor, got list", {"q": [1.0]}),
    "q has three dimensions": (ValueError, r"q must have shape \[B, T, H, D\], got \[6, 3, 4\] float32", {"q": Q[0]}),
    "q is an integer tensor": (
        TypeError,
        "q must be float64, float32, float16 or bfloat16, got .*int64",
        {"q": Q.long()},
    ),
    "k of other shape": (ValueError, r"k must have shape \[2, 6, 3, 4\], got \[2, 5, 3, 4\]", {"k": Q[:, 1:]}),
    "k of other dtype": (TypeError, "k must have the dtype of q, float32, got .*float64", {"k": Q.double()}),
    "k on another device": (ValueError, "k must be on the device of q, cpu, got .*meta; move it", {"k": Q.to("meta")}),
    "gate is text": (TypeError, r"gate must be a tensor \[B, T, H\] or a number, got str", {"gate": "0.1"}),
    "gate is a truth value": (TypeError, "gate must be a tensor .* got bool", {"gate": True}),
    "gate of other shape": (
        ValueError,
        r"gate must have shape \[2, 6, 3\], got \[2, 6, 1\]",
        {"gate": torch.rand(2, 6, 1)},
    ),
    "gate of integers": (
        TypeError,
        "gate must be a floating-point tensor",
        {"gate": torch.ones(2, 6, 3, dtype=torch.int64)},
    ),
    "gate is infinite": (ValueError, "gate must be finite, got inf", {"gate": float("inf")}),
    "gate holds NaN": (ValueError, "gate must be finite, got 36 NaN", {"gate": torch.full((2, 6, 3), float("nan"))}),
    "mask of other shape": (ValueError, r"mask must have shape \[2, 6\], got \[2, 5\]", {"mask": torch.ones(2, 5)}),
    "mask has a hole": (
        ValueError,
        r"hole in row 1.*\[1, 0, 1, 1, 1, 1\]",
        {"mask": torch.tensor([[1] * 6, [1, 0, 1, 1, 1, 1]])},
    ),
    "mask is not 0 or 1": (ValueError, "only 0 .* and 1", {"mask": torch.full((2, 6), 0.5)}),
    "mask is a list": (TypeError, "mask must be a tensor, got list", {"mask": [1]}),
    "mask and boundaries": (
        ValueError,
        "mask and cu_seqlens exclude each other",
        {"mask": torch.ones(2, 6), "cu_seqlens": torch.tensor([0, 6])},
    ),
    "boundaries with two rows": (ValueError, "one row.*got 2 rows", {"cu_seqlens": torch.tensor([0, 6])}),
    "boundaries end early": (
        ValueError,
        "start at 0 and end at T = 6, got 0 and 5",
        {"q": Q[:1], "k": Q[:1], "gate": 0.1, "cu_seqlens": torch.tensor([0, 5])},
    ),
    "boundaries start late": (
        ValueError,
        "start at 0 and end at T = 6, got 1 and 6",
        {"q": Q[:1], "k": Q[:1], "gate": 0.1, "cu_seqlens": torch.tensor([1, 6])},
    ),
    "boundaries fall": (
        ValueError,
        r"never fall, got \[0, 4, 3, 6\]",
        {"q": Q[:1], "k": Q[:1], "gate": 0.1, "cu_seqlens": torch.tensor([0, 4, 3, 6])},
    ),
    "boundaries of floats": (
        ValueError,
        "int32 or int64",
        {"q": Q[:1], "k": Q[:1], "gate": 0.1, "cu_seqlens": torch.tensor([0.0, 6.0])},
    ),
    "statistics of another batch": (
        ValueError,
        "belongs to 1 sequences, but the input has 2",
        {"statistics": KeyStatistics(*(field[:1] for field in STATISTICS))},
    ),
    "statistics of other heads": (
        ValueError,
        r"second_moment must have shape \[2, 3, 4, 4\], got \[2, 1, 4, 4\]",
        {"statistics": KeyStatistics(STATISTICS[0][:, :1], STATISTICS[1][:, :1], STATISTICS[2])},
    ),
    "statistics of other dtype": (
        TypeError,
        "second_moment must be float32 for float32 input, got .*float64",
        {"statistics": KeyStatistics(STATISTICS[0].double(), STATISTICS[1], STATISTICS[2])},
    ),
    "count of other dtype": (
        TypeError,
        "count must be int64, got torch.float32",
        {"statistics": STATISTICS._replace(count=STATISTICS.count.float())},
    ),
    "count of another batch": (
        ValueError,
        r"count must have shape \[2\]",
        {"statistics": STATISTICS._replace(count=STATISTICS.count[:1])},
    ),
    "statistics are a tuple": (TypeError, "must be a KeyStatistics", {"statistics": tuple(STATISTICS)}),
    "another dtype of the query": (
        ValueError,
        "query_dtype must be float32 for float32 input, got float16",
        {"query_dtype": torch.float16},
    ),
    "dtype of the query by name": (ValueError, "query_dtype must be .*, got 'float32'", {"query_dtype": "float32"}),
    "another normalisation": (ValueError, "True, 'queries', 'keys' or False, got 'values'", {"normalize": "values"}),
    "unknown backend": (
        ValueError,
        "backend must be one of auto, reference, torch, triton; got 'cuda'",
        {"backend": "cuda"},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name: str) -> None:
    error, message, change = WRONG[name]
    arguments: dict[str, Any] = {"q": Q, "k": Q, "gate": torch.full((2, 6, 3), 0.1)} | change
    with pytest.raises(error, match=message):
        curvature_conditioned_query(arguments.pop("q"), arguments.pop("k"), arguments.pop("gate"), **arguments)
