"""Gated linear attention: linear attention whose state forgets at a rate of its own for every key channel."""

from __future__ import annotations

from torch import Tensor

from ccq.ops.checks import check_backend
from ccq.ops.gla.chunked import chunk_length, chunked_gated_linear_attention
from ccq.ops.gla.reference import gated_linear_attention_reference
from ccq.ops.layout import ChunkLayout
from ccq.ops.write_rule import WriteRuleResult, check_gate, check_write_arguments

__all__ = ["chunked_gated_linear_attention", "gated_linear_attention", "gated_linear_attention_reference"]

BACKENDS = ("auto", "reference", "torch")


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> WriteRuleResult:
    """Write keys and values into a decaying state and read it with the queries.

        S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

    (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv:2312.06635.)

    Args:
        q, k: [B, T, H, D], float64, float32, float16 or bfloat16.
        v: [B, T, H, V], the dtype of q.
        log_decay: [B, T, H, D], natural logarithm of the decay, finite and at most 0; the dtype of q or the dtype of
            the state.
        scale: factor of the output, D**-0.5 by default.
        state: [N, H, D, V], the memory to begin with, float32 (float64 for float64 input); zeros by default.
        cu_seqlens: [N + 1] integers, B = 1: the row holds N documents, and cu_seqlens is where each begins and, last,
            where the row ends. Each document has a state of its own. Documents may be empty. Without it every row is
            a sequence, N = B.
        mask: [B, T], 1 = real token, 0 = padding, on the left, the right or both sides. Padding writes nothing,
            decays nothing, has output 0 and no gradient.
        backend: "reference" (token by token), "torch" (in chunks), or "auto", the fastest for the input's device.

    Returns:
        WriteRuleResult: output [B, T, H, V] in the dtype of v, state [N, H, D, V] after the last token. Sums and
        states are float32 (float64 for float64 input). Both are differentiable in every tensor argument.

    Raises:
        TypeError, ValueError: an argument has a wrong type, shape, dtype, device or backend name; on a CPU also for
        log_decay that is not finite or above 0, and a mask with holes.
    """
    check_backend(backend, BACKENDS)
    sequences, state = check_write_arguments(q, k, v, state, cu_seqlens, mask)
    check_gate("log_decay", log_decay, tuple(q.shape), q, highest=0.0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if sequences.mask is not None:
        padding = ~sequences.mask[:, :, None, None]
        q, k, v, log_decay = (x.masked_fill(padding, 0) for x in (q, k, v, log_decay))

    if backend == "auto":
        backend = "torch"
    if backend == "reference":
        return gated_linear_attention_reference(q, k, v, log_decay, state, scale, sequences.boundaries)
    layout = ChunkLayout.of(q, sequences.boundaries, chunk_length(q.shape[-1]))
    return chunked_gated_linear_attention(q, k, v, log_decay, state, scale, layout)
