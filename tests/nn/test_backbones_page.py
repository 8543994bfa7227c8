"""The worked example of docs/backbones.md, run as it stands: RetNet against its recurrence, token by token."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from tests.nn.token_loop import covariance, gate_of, unit
from torch import Tensor, nn

from ccq.nn import CurvatureConditionedQuery

PAGE = (Path(__file__).parents[2] / "docs" / "backbones.md").read_text(encoding="utf-8")
HIDDEN, HEADS, SIZE, VALUE = 12, 2, 4, 6


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    return found


def recurrence(layer: nn.Module, x: Tensor) -> Tensor:
    """x [T, hidden] -> [T, hidden]: S <- gamma S + k v^T, o = S^T q / sqrt(D)."""
    read = layer.read
    presplit, keys, values, gates = (x @ p.weight.T for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj))
    columns = []
    for h, (q, k, v, g) in enumerate(
        zip(*(y.chunk(layer.num_heads, 1) for y in (presplit, keys, values, gates)), strict=True)
    ):
        memory, rows = torch.zeros(k.shape[1], v.shape[1], dtype=x.dtype), []
        for t in range(len(x)):
            query = q[t]
            if read is not None:
                query = unit(q[t])
                if read.enabled:
                    strength = gate_of(read, presplit[t], query, h)
                    query = query - strength * (covariance(unit(k[: t + 1])) @ query)
            memory = (1 - 2.0 ** (-5 - h)) * memory + torch.outer(k[t], v[t])
            out = memory.T @ query / math.sqrt(len(query))
            out = out / (out.square().mean() + layer.norm.eps).sqrt() * layer.norm.weight
            rows.append(out * g[t] / (1 + torch.exp(-g[t])))
        columns.append(torch.stack(rows))
    return torch.cat(columns, 1) @ layer.o_proj.weight.T


def test_the_page_continues_its_prompt(example: dict[str, Any]) -> None:
    x = torch.cat((example["prompt"], example["token"]), 1)[0]
    layer = example["layer"]
    assert_close("last output", example["output"][0, 0], recurrence(layer, x)[-1], 1e-5)
    assert example["state"].statistics.count.tolist() == [101]


@pytest.mark.parametrize("read", ["none", "on", "off"])
def test_values_and_gradients_of_padded_packed_and_cut_input(example: dict[str, Any], read: str) -> None:
    step = None if read == "none" else CurvatureConditionedQuery(HEADS, SIZE)
    layer = example["Retention"](HIDDEN, HEADS, SIZE, VALUE, read=step).double()
    if step is not None:
        step.enabled = read == "on"
        for parameter in step.parameters():
            nn.init.normal_(parameter)
    used = {name: p for name, p in layer.named_parameters() if read == "on" or not name.startswith("read.")}
    documents = [torch.randn(n, HIDDEN).double() for n in (70, 0, 1, 9)]
    upstream = [torch.randn_like(d) for d in documents]
    expected = [recurrence(layer, d) if len(d) else d for d in documents]
    loss = sum((a * b).sum() for a, b in zip(expected, upstream, strict=True))
    expected_gradients = torch.autograd.grad(loss, list(used.values()))

    lengths = [len(d) for d in documents]
    mask = torch.zeros(4, 72)
    padded = torch.randn(4, 72, HIDDEN).double()
    for row, (d, start) in enumerate(zip(documents, (1, 0, 71, 60), strict=True)):
        padded[row, start : start + len(d)], mask[row, start : start + len(d)] = d, 1
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    packed, state = layer(torch.cat(documents).unsqueeze(0), cu_seqlens=boundaries)
    first, before = layer(padded[:, :65], mask=mask[:, :65])
    second, after = layer(padded[:, 65:], state=before, mask=mask[:, 65:])
    results = {
        "packed": [packed[0, a:b] for a, b in pairwise(boundaries.tolist())],
        "padded and cut": [row[m.bool()] for row, m in zip(torch.cat((first, second), 1), mask, strict=True)],
    }
    for kind, outputs in results.items():
        for n, (a, b) in enumerate(zip(outputs, expected, strict=True)):
            assert_close(f"{kind} {n}", a, b, 1e-12)
        loss = sum((a * b).sum() for a, b in zip(outputs, upstream, strict=True))
        gradients = torch.autograd.grad(loss, list(used.values()))
        for name, a, b in zip(used, gradients, expected_gradients, strict=True):
            assert_close(f"{kind} {name}", a, b, 1e-9)
    assert_close("memory", after.memory, state.memory, 1e-12)
    assert (state.statistics is None) == (read != "on")
