"""Store what flash-linear-attention's kernels return for small inputs, for the tests of `ccq.ops.gla`,
`ccq.ops.gated_delta_rule` and `ccq.ops.ssd` (its "simple GLA").

    python scripts/make_write_rule_fixtures.py tests/ops/fixtures/write_rules.safetensors

Needs flash-linear-attention (the stored file was made with 0.6.0) and a way to run its Triton kernels: a GPU, or a
module `fla_on_cpu` on PYTHONPATH that prepares Triton's interpreter when imported and has `patch_ranges()` to call
after `import fla`, with TRITON_INTERPRET=1 set. The tests read the stored file only and need neither.

Every case holds its inputs, output, final state, the gradients that arrive at both, and the gradients of all inputs,
in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: make_write_rule_fixtures.py FILE.safetensors")
    on_cpu = find_spec("fla_on_cpu") is not None
    if on_cpu:
        import fla_on_cpu
    import fla
    import triton

    if on_cpu:
        fla_on_cpu.patch_ranges()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla, fused_recurrent_gla
    from fla.ops.simple_gla import chunk_simple_gla

    device = "cpu" if on_cpu else "cuda"
    stored: dict[str, Tensor] = {}

    def run(name: str, rule: Callable, inputs: dict[str, Tensor], boundaries: Tensor | None, **options: bool) -> None:
        leaves = {key: x.to(device).requires_grad_() for key, x in inputs.items()}
        gates = {"gk" if rule is fused_recurrent_gla else "g": leaves["log_decay"]}
        if "beta" in leaves:
            gates["beta"] = leaves["beta"]
        output, state = rule(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            **gates,
            initial_state=leaves["state"],
            output_final_state=True,
            cu_seqlens=None if boundaries is None else boundaries.to(device),
            **options,
        )
        grad_output, grad_final = torch.randn(output.shape), torch.randn(state.shape)
        torch.autograd.backward((output, state), (grad_output.to(device), grad_final.to(device)))
        case = {
            **inputs,
            "output": output,
            "final": state,
            "grad_output": grad_output,
            "grad_final": grad_final,
            **{f"grad_{key}": x.grad for key, x in leaves.items()},
        }
        if boundaries is not None:
            case["cu_seqlens"] = boundaries
        stored.update({f"{name}/{key}": x.detach().cpu().contiguous() for key, x in case.items()})

    torch.manual_seed(0)
    documents = torch.tensor([0, 9, 9, 24], dtype=torch.int64)
    run("gla/dense", chunk_gla, gla_inputs((1, 65, 1, 16), 24, 1, mild), None)
    run("gla/strong decay", chunk_gla, gla_inputs((1, 65, 1, 16), 16, 1, strong), None)
    run("gla/packed", chunk_gla, gla_inputs((1, 24, 1, 16), 16, 3, mild), documents.clone())
    run("gla/token by token", fused_recurrent_gla, gla_inputs((1, 11, 2, 16), 16, 1, strong), None)
    run("gated_delta_rule/dense", chunk_gated_delta_rule, delta_inputs((1, 65, 1, 16), 24, 1, mild), None)
    run("gated_delta_rule/strong decay", chunk_gated_delta_rule, delta_inputs((1, 65, 1, 16), 16, 1, strong), None)
    run("gated_delta_rule/packed", chunk_gated_delta_rule, delta_inputs((1, 24, 2, 16), 16, 3, mild), documents.clone())
    run("ssd/dense", chunk_simple_gla, scalar_decay_inputs((1, 65, 2, 16), 24, 1, mild), None)
    run("ssd/strong decay", chunk_simple_gla, scalar_decay_inputs((1, 65, 1, 16), 16, 1, strong), None)
    run("ssd/packed", chunk_simple_gla, scalar_decay_inputs((1, 24, 2, 16), 16, 3, mild), documents.clone())

    versions = {"flash-linear-attention": fla.__version__, "triton": triton.__version__, "torch": torch.__version__}
    versions["run on"] = "Triton's interpreter" if on_cpu else torch.cuda.get_device_name()
    save_file(stored, sys.argv[1], metadata=versions)
    print(f"{len(stored)} tensors, {sum(x.numel() * x.element_size() for x in stored.values())} bytes, {versions}")


def mild(shape: tuple[int, ...]) -> Tensor:
    return F.logsigmoid(torch.randn(shape)) / 4


def strong(shape: tuple[int, ...]) -> Tensor:
    return -3 * torch.rand(shape)


def gla_inputs(
    shape: tuple[int, ...], value_size: int, sequences: int, decay: Callable[[tuple[int, ...]], Tensor]
) -> dict[str, Tensor]:
    """`shape` is that of q, [B, T, H, D]."""
    return {
        "q": torch.randn(shape),
        "k": torch.randn(shape),
        "v": torch.randn(*shape[:3], value_size),
        "log_decay": decay(shape),
        "state": torch.randn(sequences, *shape[2:], value_size),
    }


def scalar_decay_inputs(
    shape: tuple[int, ...], value_size: int, sequences: int, decay: Callable[[tuple[int, ...]], Tensor]
) -> dict[str, Tensor]:
    return {**gla_inputs(shape, value_size, sequences, decay), "log_decay": decay(shape[:3])}


def delta_inputs(
    shape: tuple[int, ...], value_size: int, sequences: int, decay: Callable[[tuple[int, ...]], Tensor]
) -> dict[str, Tensor]:
    inputs = gla_inputs(shape, value_size, sequences, decay)
    return {
        **inputs,
        "q": F.normalize(inputs["q"], dim=-1),
        "k": F.normalize(inputs["k"], dim=-1),
        "log_decay": decay(shape[:3]),
        "beta": torch.rand(shape[:3]),
    }


if __name__ == "__main__":
    main()
