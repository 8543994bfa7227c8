"""comba: y = q - d k with the key of the same token, the read of Comba (Hu et al., arXiv:2506.02475), as a peer.

d is one number a head. It needs no state. Comba's own key on this side is k times a second number a head, which d
takes in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ccq.ops.checks import check_device, check_shape
from ccq.ops.query.reference import NORM_EPSILON
from ccq.ops.reads.common import QueryResult, read_inputs


def comba_query(
    q: Tensor,
    k: Tensor,
    strength: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    normalize: bool | str = True,
    query_dtype: torch.dtype | None = None,
) -> QueryResult:
    """q - strength * k. Arguments: see `ccq.ops.reads.ReadOptions`; strength [H]. With normalize="keys", which leaves q
    its length, the result is that of the unit query times |q|. There are no statistics.
    """
    inputs = read_inputs(
        q,
        k,
        1.0,
        cu_seqlens=cu_seqlens,
        mask=mask,
        normalize=normalize,
        query_dtype=query_dtype,
    )
    check_shape("strength", strength, (q.shape[2],))
    check_device("strength", strength, q)
    with torch.autocast(q.device.type, enabled=False):
        correction = inputs.key
        if normalize == "keys":
            correction = correction * (inputs.query.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt()
        query = inputs.query - strength.to(correction.dtype).unsqueeze(-1) * correction
        return QueryResult(inputs.finish(query), correction, None)
