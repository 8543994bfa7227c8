"""One token of a write rule in Triton: the state decays, takes in the token and is read, in one pass.

Legend: N sequences, H heads of values, G of keys and queries, D key size and V value size per head (BD the next power
of two of D, BV columns a program).

Columns of a state know nothing of each other, so a program has BV of them whole, all in registers:

    S' = diag(a) S      S_new = S' + k u^T      o = scale S_new^T q

with u = v, or u = beta (v - S'^T k) for the gated delta rule. The decay a has one value for all key channels of a head,
or one for each. Nothing else is read of a state, so the new one may take its place.

On an H200 (8 sequences, 6 heads of 256 / 512) that takes 16 us, and the bytes 12. flash-linear-attention's kernels
write the new state elsewhere, and that of gated linear attention leaves parts of a sum for another kernel: 32 us with
the copy to where the old state was.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.early_launch import early_launch, follow

COLUMNS = 16
"""BV"""
WARPS = 4


@triton.jit
def _token_kernel(
    q,
    k,
    v,
    log_decay,
    beta,
    state,
    output,
    new,
    scale,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    EARLY: tl.constexpr,
):
    """With CHANNELS a decay for each key channel. SHARE heads have a key and a query in common, H / G."""
    follow(EARLY)
    blocks: tl.constexpr = (V + BV - 1) // BV
    head = tl.program_id(0).to(tl.int64) // blocks
    group = head // SHARE
    key, value = tl.arange(0, BD), tl.program_id(0) % blocks * BV + tl.arange(0, BV)
    has_key, has_value = key < D, value < V
    at, fits = head * D * V + key[:, None] * V + value, has_key[:, None] & has_value
    b_s = tl.load(state + at, mask=fits, other=0.0)
    b_q = tl.load(q + group * D + key, mask=has_key, other=0.0).to(tl.float32)
    b_k = tl.load(k + group * D + key, mask=has_key, other=0.0).to(tl.float32)
    b_u = tl.load(v + head * V + value, mask=has_value, other=0.0).to(tl.float32)
    if CHANNELS:
        b_s *= tl.exp(tl.load(log_decay + head * D + key, mask=has_key, other=0.0).to(tl.float32))[:, None]
    else:
        b_s *= tl.exp(tl.load(log_decay + head).to(tl.float32))
    if DELTA:
        b_u = tl.load(beta + head).to(tl.float32) * (b_u - tl.sum(b_s * b_k[:, None], 0))
    b_s += b_k[:, None] * b_u
    # Several threads may load the same number; all must have it before one of them overwrites it.
    tl.debug_barrier()
    tl.store(new + at, b_s, mask=fits)
    b_o = scale * tl.sum(b_s * b_q[:, None], 0)
    tl.store(output + head * V + value, b_o.to(output.dtype.element_ty), mask=has_value)


def write_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    scale: float,
    *,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """q, k [N, 1, G, D], v [N, 1, H, V], log_decay [N, 1, H] or [N, 1, H, D], beta [N, 1, H], state [N, H, D, V]
    float32, all contiguous -> output like v, and the state, new or overwritten.
    """
    sequences, _, heads, value_size = v.shape
    groups, size = q.shape[2:]
    output, new = torch.empty_like(v), state if in_place else torch.empty_like(state)
    # A pointer that a kernel does not use must still be one.
    _token_kernel[(sequences * heads * triton.cdiv(value_size, COLUMNS),)](
        q, k, v, log_decay, log_decay if beta is None else beta, state, output, new, scale,
        SHARE=heads // groups, D=size, V=value_size, BD=max(16, triton.next_power_of_2(size)), BV=COLUMNS,
        CHANNELS=log_decay.ndim == 4, DELTA=beta is not None, num_warps=WARPS, **early_launch(q.device),
    )  # fmt: skip
    return output, new
