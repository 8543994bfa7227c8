"""comba: y = q - d k with the key of the same token, the read of Comba (Hu et al., arXiv:2506.02475), as a peer.

d is one number a head. It needs no state. Comba's own key on this side is k times a second number a head, which d
takes in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ccq.ops.checks import check_backend, check_device, check_input, check_shape
from ccq.ops.query.reference import NORM_EPSILON
from ccq.ops.reads.comba.operator import comba_read
from ccq.ops.reads.common import QueryResult, read_inputs
from ccq.ops.reads.triton_backend import check_call, choose_backend

BACKENDS = ("auto", "torch", "triton")
"""There are no sums over tokens, so that the form in PyTorch is the definition."""


def comba_query(
    q: Tensor,
    k: Tensor,
    strength: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    query_dtype: torch.dtype | None = None,
    return_correction: bool = True,
    backend: str = "auto",
) -> QueryResult:
    """q - strength * k. Arguments: see `ccq.ops.reads.ReadOptions`; strength [H]. With normalize="keys", which leaves q
    its length, the result is that of the unit query times |q|. There are no statistics.
    """
    check_backend(backend, BACKENDS)
    check_input("q", q, ("B", "T", "H", "D"))
    check_shape("strength", strength, (q.shape[2],))
    check_device("strength", strength, q)
    if choose_backend(backend, q) == "triton":
        call = check_call(q, k, cu_seqlens=cu_seqlens, mask=mask, normalize=normalize, query_dtype=query_dtype)
        query, correction = comba_read(
            q, k, strength, call.mask, call.unit_queries, call.unit_keys, return_correction, call.query_dtype != q.dtype
        )
        return QueryResult(query, correction if return_correction else None, None)
    inputs = read_inputs(
        q,
        k,
        1.0,
        cu_seqlens=cu_seqlens,
        mask=mask,
        normalize=normalize,
        query_dtype=query_dtype,
    )
    with torch.autocast(q.device.type, enabled=False):
        correction = inputs.key
        if normalize == "keys":
            correction = correction * (inputs.query.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt()
        query = inputs.query - strength.to(correction.dtype).unsqueeze(-1) * correction
        return QueryResult(inputs.finish(query), correction if return_correction else None, None)
