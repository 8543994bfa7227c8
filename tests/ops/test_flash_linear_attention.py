"""Everything around flash-linear-attention's kernels that needs no GPU: when they are used, in which configurations,
and how the operators call them. tests/gpu/test_write_rules.py tests the kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import assert_close
from tests.ops.fixtures import fla_stand_in
from tests.ops.fixtures.write_rules import Inputs, WriteRuleBattery
from tests.ops.gated_delta_rule import test_gated_delta_rule
from tests.ops.gla import test_gla
from tests.ops.ssd import test_ssd
from torch import Tensor, library

from ccq.ops import flash_linear_attention, write_rule_step
from ccq.ops.gated_delta_rule import fused as gated_delta_rule_fused
from ccq.ops.gla import fused as gla_fused
from ccq.ops.ssd import fused as ssd_fused
from ccq.ops.write_rule import WriteRuleResult

RULES: dict[str, WriteRuleBattery] = {
    "gla": test_gla.TestGatedLinearAttention(),
    "gated_delta_rule": test_gated_delta_rule.TestGatedDeltaRule(),
    "ssd": test_ssd.TestStateSpaceDuality(),
    "ssd in groups": test_ssd.TestSharedKeys(),
}
OPERATORS: dict[str, Any] = {
    "gla": gla_fused,
    "gated_delta_rule": gated_delta_rule_fused,
    "ssd": ssd_fused,
    "ssd in groups": ssd_fused,
}
FUNCTIONS = {"gla": "gated_linear_attention", "gated_delta_rule": "gated_delta_rule", "ssd": "state_space_duality"}
PAPER = {"256/512", "64/64", "64/128", "128/128", "128/256"}
SIZES = {
    "gla": PAPER,
    "gated_delta_rule": PAPER,
    "ssd": {"128/64"},
    "rms_norm_gated": {"64/64", "128/128", "256/256", "512/512"},
}
# The blocks that each kernel is free to choose, from its source.
KERNELS = {
    "gla": {
        "chunk_local_cumsum_vector_kernel": {"BS"},
        "chunk_fwd_kernel_h": {"BK", "BV"},
        "chunk_gla_fwd_A_kernel_intra_sub_inter": {"BK"},
        "chunk_gla_fwd_A_kernel_intra_sub_intra": set(),
        "chunk_gla_fwd_kernel_o": {"BK", "BV"},
        "chunk_bwd_kernel_dh": {"BK", "BV"},
        "chunk_gla_bwd_kernel_dv": {"BK", "BV"},
        "chunk_gla_bwd_kernel_dA": set(),
        "chunk_gla_bwd_kernel_intra": set(),
        "chunk_gla_bwd_kernel_inter": {"BK", "BV"},
        "fused_recurrent_fwd_kernel": set(),
    },
    "gated_delta_rule": {
        "chunk_local_cumsum_scalar_kernel": set(),
        "chunk_gated_delta_rule_fwd_kkt_solve_kernel": {"BK"},
        "recompute_w_u_fwd_kernel": set(),
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {"BV"},
        "chunk_fwd_kernel_o": {"BK", "BV"},
        "chunk_bwd_kernel_dv_local": set(),
        "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": {"BV"},
        "chunk_bwd_kernel_dqkwg": set(),
        "prepare_wy_repr_bwd_kernel": set(),
    },
    "ssd": {
        "chunk_local_cumsum_scalar_kernel": set(),
        "chunk_fwd_kernel_h": {"BK", "BV"},
        "chunk_fwd_kernel_o": {"BK", "BV"},
        "chunk_bwd_kernel_dh": {"BK", "BV"},
        "chunk_bwd_kernel_dv": set(),
        "chunk_bwd_kernel_dqkwg": set(),
    },
    "rms_norm_gated": {"layer_norm_gated_fwd_kernel": {"BT"}, "layer_norm_gated_bwd_kernel": {"BT"}},
}
# Those of gated linear attention that ccq.ops.gla.kernels and ccq.ops.write_rule_step replace: the tables keep them for
# the package's own layers, which `ccq bench layer` runs beside these.
REPLACED = {
    "chunk_gla_fwd_A_kernel_intra_sub_inter",
    "chunk_gla_fwd_A_kernel_intra_sub_intra",
    "chunk_gla_bwd_kernel_intra",
    "fused_recurrent_fwd_kernel",
}
INSTALLED = importlib.util.find_spec("fla") is not None

by_rule = pytest.mark.parametrize("rule", RULES)
by_function = pytest.mark.parametrize("rule", FUNCTIONS)
needs_package = pytest.mark.skipif(not INSTALLED, reason="needs flash-linear-attention")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fla_stand_in.install(monkeypatch)


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flash_linear_attention, "_warned", set())
    flash_linear_attention._reason_against.cache_clear()
    yield
    flash_linear_attention._reason_against.cache_clear()


# The files of configurations.


@pytest.mark.parametrize("name", flash_linear_attention.tables())
def test_every_file_is_complete_and_well_formed(name: str) -> None:
    table = flash_linear_attention.tables()[name]
    is_any = name == "any.json"
    assert name == flash_linear_attention.card_file(table.card)
    assert (table.capability is None) == is_any
    assert tuple(table.operations) == tuple(KERNELS) == flash_linear_attention.OPERATIONS
    for rule, by_sizes in table.operations.items():
        assert set(by_sizes) == ({"any"} if is_any else {"any"} | SIZES[rule])
        for sizes, configurations in by_sizes.items():
            assert configurations.keys() == KERNELS[rule].keys()
            size, value_size = (0, 0) if sizes == "any" else map(int, sizes.split("/"))
            for kernel, configuration in configurations.items():
                blocks = KERNELS[rule][kernel]
                assert configuration.keys() == blocks | {"num_warps", "num_stages"}
                assert all(configuration[block] in (16, 32, 64, 128) for block in blocks)
                assert configuration["num_warps"] in (1, 2, 4, 8, 16) and configuration["num_stages"] in (1, 2, 3, 4)
                if kernel in ("chunk_gla_bwd_kernel_dv", "chunk_gla_bwd_kernel_inter"):
                    # A larger tile would be loaded past the end of the tensors.
                    assert configuration["BK"] == 32 or configuration["BK"] < size
                    assert configuration["BV"] == 64 or configuration["BV"] < value_size
                if kernel == "prepare_wy_repr_bwd_kernel":
                    # Four warps are miscompiled on Hopper in the same kernel of the delta rule.
                    assert configuration["num_warps"] == 2


def test_the_files_are_shipped_with_the_package() -> None:
    import ccq.ops

    folder = Path(ccq.ops.__file__).parent / "configurations"
    assert {path.name for path in folder.iterdir()} == set(flash_linear_attention.tables())
    assert 'packages = ["src/ccq"]' in Path(__file__).parents[2].joinpath("pyproject.toml").read_text()


def test_a_file_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must have the schema ccq-write-rule-configurations/1, got 'other'"):
        flash_linear_attention.parse_table(json.dumps({"schema": "other"}))


def test_a_card_takes_its_own_file_or_that_of_its_kind_or_the_one_for_any() -> None:
    choose = flash_linear_attention.table_for
    assert choose("NVIDIA H200", "9.0").card == "NVIDIA H200"
    assert choose("NVIDIA H100 80GB HBM3", "9.0").capability == "9.0"
    assert choose("NVIDIA A100-SXM4-40GB", "8.0").card == "any"
    assert flash_linear_attention.card_file("NVIDIA A100-SXM4-40GB") == "nvidia_a100_sxm4_40gb.json"


@pytest.mark.parametrize(
    ("size", "value_size", "expected"),
    [
        (64, 64, "64/64"),
        (64, 128, "64/128"),
        (256, 512, "256/512"),
        (256, 1024, "256/512"),
        (256, 256, "128/256"),
        (192, 384, "128/256"),
        (96, 128, "64/128"),
        (96, 96, "64/64"),
        (256, 128, "128/128"),
        (64, 48, "any"),
        (32, 512, "any"),
    ],
)
def test_sizes_take_the_largest_listed_ones_that_fit_inside(size: int, value_size: int, expected: str) -> None:
    table = flash_linear_attention.tables()["nvidia_h200.json"]
    numbered = {
        rule: {sizes: {"kernel": {"BK": i}} for i, sizes in enumerate(table.operations[rule])}
        for rule in ("gla", "gated_delta_rule")
    }
    marked = table._replace(operations=numbered)
    for rule, entries in numbered.items():
        assert marked.choose(rule, size, value_size) is entries[expected]


@pytest.mark.parametrize(
    ("size", "value_size", "expected"),
    [(128, 64, "128/64"), (256, 512, "128/64"), (64, 64, "any"), (128, 48, "any"), (32, 32, "any")],
)
def test_the_sizes_of_mamba2(size: int, value_size: int, expected: str) -> None:
    table = flash_linear_attention.tables()["nvidia_h200.json"]
    assert table.choose("ssd", size, value_size) is table.operations["ssd"][expected]


class Kernel:
    """The part of an autotuner that is called."""

    def __init__(self, name: str) -> None:
        self.base_fn = type(name, (), {})
        self.fn = self
        self.arg_names = ["x", "BK"]
        self.configs = [Config({"BK": 16}, 1, 2), Config({"BK": 32}, 2, 3)]
        self.early_config_prune: Callable[..., list[Config]] | None = None
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *args: Any, **arguments: Any) -> None:
        self.launched.append((args, arguments))


class Config:
    def __init__(self, kwargs: dict[str, int], num_warps: int, num_stages: int) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


def test_a_kernel_is_launched_as_the_table_says() -> None:
    kernel = Kernel("known")
    launcher = flash_linear_attention.Launcher({"known": {"BK": 64, "num_warps": 8, "num_stages": 4}})
    launcher.launch(kernel, (1,), {"grid": (2,)})
    assert kernel.launched == [((1,), {"grid": (2,), "BK": 64, "num_warps": 8, "num_stages": 4})]


def test_a_kernel_that_is_not_in_the_table_takes_the_first_candidate() -> None:
    kernel = Kernel("unknown")
    kernel.early_config_prune = lambda configs, named, **arguments: [
        config for config in configs if config.kwargs["BK"] > named["x"] and arguments["K"] == 64
    ]
    flash_linear_attention.Launcher({}).launch(kernel, (16,), {"K": 64})
    assert kernel.launched == [((16,), {"K": 64, "BK": 32, "num_warps": 2, "num_stages": 3})]


def test_an_autotuner_is_redirected_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_linear_attention, "redirect_autotuners", lambda: None)
    kernel = Kernel("known")
    tuned: list[Any] = []
    kernel.fn = Kernel("inner")
    kernel.run = lambda *args, **arguments: tuned.append((args, arguments))  # type: ignore[method-assign]
    flash_linear_attention._redirect(kernel)
    launcher = flash_linear_attention.Launcher({"known": {"BK": 64, "num_warps": 8, "num_stages": 4}})
    kernel.run(1, K=2)
    with flash_linear_attention.using(launcher):
        kernel.run(3, K=4)
    kernel.run(5, K=6)
    assert tuned == [((1,), {"K": 2}), ((5,), {"K": 6})]
    assert kernel.fn.launched == [((3,), {"K": 4, "BK": 64, "num_warps": 8, "num_stages": 4})]


def test_a_shared_table_is_for_every_caller_and_for_its_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_linear_attention, "redirect_autotuners", lambda: None)
    tuned: list[str] = []
    kernels = {}
    for name in ("chunk_gla_bwd_kernel_dA", "layer_norm_gated_fwd_kernel", "another_kernel"):
        kernel = kernels[name] = Kernel(name)
        kernel.fn = Kernel("inner")
        kernel.run = lambda *_, name=name, **__: tuned.append(name)  # type: ignore[method-assign,misc]
        flash_linear_attention._redirect(kernel)
    operations = flash_linear_attention.tables()["any.json"].operations
    with flash_linear_attention.sharing("gla", torch.device("cpu"), 256, 512):
        thread = threading.Thread(target=lambda: [kernel.run(K=1) for kernel in kernels.values()])
        thread.start()
        thread.join()
    kernels["chunk_gla_bwd_kernel_dA"].run(K=2)
    assert tuned == ["another_kernel", "chunk_gla_bwd_kernel_dA"]
    for name, rule in (("chunk_gla_bwd_kernel_dA", "gla"), ("layer_norm_gated_fwd_kernel", "rms_norm_gated")):
        assert kernels[name].fn.launched == [((), {"K": 1, **operations[rule]["any"][name]})]


@needs_package
@pytest.mark.parametrize(("card", "capability"), [("NVIDIA H200", (9, 0)), ("any", (8, 9))])
def test_configurations_compile_and_fit(card: str, capability: tuple[int, int]) -> None:
    """Needs no GPU, but a minute for each pair of sizes, so the largest stand for all."""
    limit = {(9, 0): 227, (8, 9): 99}[capability]
    script = Path(__file__).with_name("compile_write_rules.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), card, *map(str, capability), "256/512"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for rule, kernels in KERNELS.items():
        assert {row["kernel"] for row in found if row["rule"] == rule} == kernels.keys() - REPLACED
    for row in found:
        assert row["shared"] <= limit * 1024, row
        # Other configurations than the package's own have not been seen to be right by anyone.
        assert row["offered"] or card == "any", row


@needs_package
@pytest.mark.parametrize("module", fla_stand_in.STAND_INS)
def test_the_package_has_the_functions_that_are_called(module: str) -> None:
    package = importlib.util.find_spec("fla")
    assert package is not None and package.submodule_search_locations
    # Read, not imported: the package wants a GPU.
    text = Path(package.submodule_search_locations[0], *module.split(".")[1:]).with_suffix(".py").read_text()
    for function in fla_stand_in.STAND_INS[module]:
        start = text.index(f"\ndef {function.__name__}(")
        end = re.compile(r"\)( ->[^\n]*)?:\n").search(text, start)
        assert end is not None
        for name in inspect.signature(function).parameters:
            assert re.search(rf"\b{name}\b", text[start : end.start()]), name


# When the kernels are used.


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """These releases are installed."""
    monkeypatch.setattr(flash_linear_attention, "_version", lambda package: versions.get(package.replace("-", "_")))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "fla" else find(name))


@pytest.mark.parametrize(
    ("rule", "capability", "fla", "triton", "expected"),
    [
        ("gla", (9, 0), "0.6.0", "3.7.0", ""),
        ("gated_delta_rule", (9, 0), "0.6.3", "3.7.1", ""),
        ("gated_delta_rule", (9, 0), "0.6.0", "3.8.0+git1", ""),
        ("gated_delta_rule", (8, 0), "0.6.0", "3.6.0", ""),
        ("gated_delta_rule", (9, 0), "0.6.0", "3.3.1", ""),
        ("gated_delta_rule", (9, 0), "0.6.0", "3.7.0", "Triton 3.7.0 compiles wrong gradients"),
        ("gated_delta_rule", (9, 0), "0.6.0", "3.6.0", "install Triton 3.7.1 or newer"),
        ("ssd", (9, 0), "0.6.0", "3.7.0", "Triton 3.7.0 compiles wrong gradients"),
        ("ssd", (9, 0), "0.6.0", "3.7.1", ""),
        ("ssd", (8, 0), "0.6.0", "3.7.0", ""),
        ("gla", (9, 0), "0.5.1", "3.7.1", "0.5.1 is installed, but 0.6.x is needed"),
        ("gla", (9, 0), "0.7.0", "3.7.1", "0.7.0 is installed, but 0.6.x is needed"),
    ],
)
def test_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, rule: str, capability: tuple[int, int], fla: str, triton: str, expected: str
) -> None:
    pretend(monkeypatch, fla_core=fla, triton=triton)
    reason = flash_linear_attention._reason_against(rule, capability)
    assert (reason == "") == (expected == "") and expected in reason


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_linear_attention, "_version", lambda package: None)
    assert "pip install 'ccq-attention[gpu]'" in flash_linear_attention._reason_against("gla", (9, 0))


@pytest.mark.parametrize(
    ("device", "dtype", "size", "value_size", "expected"),
    [
        ("cuda", torch.bfloat16, 256, 512, "fused"),
        ("cuda", torch.float16, 16, 16, "fused"),
        ("cuda", torch.float32, 64, 64, "chunked"),
        ("cuda", torch.float64, 64, 64, "chunked"),
        ("cuda", torch.bfloat16, 60, 64, "chunked"),
        ("cuda", torch.bfloat16, 64, 100, "chunked"),
        ("cuda", torch.bfloat16, 272, 64, "chunked"),
        ("cpu", torch.bfloat16, 64, 64, "chunked"),
    ],
)
@pytest.mark.parametrize("usable", [True, False])
@by_function
def test_auto_takes_the_kernels_where_they_can_run(
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    device: str,
    dtype: torch.dtype,
    size: int,
    value_size: int,
    expected: str,
    usable: bool,
) -> None:
    name = FUNCTIONS[rule]
    module = importlib.import_module(f"ccq.ops.{rule}")
    monkeypatch.setattr(flash_linear_attention, "reason_against", lambda *_: "" if usable else "it rains")
    taken: list[str] = []
    monkeypatch.setattr(module, f"fused_{name}", lambda *_: taken.append("fused"))
    monkeypatch.setattr(module, f"chunked_{name}", lambda *_: taken.append("chunked"))
    # A fake tensor of a device that this machine need not have.
    fake: Any = torch._subclasses.FakeTensorMode() if device == "cuda" else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as told, fake:
        warnings.simplefilter("always")
        q = torch.zeros(1, 3, 2, size, dtype=dtype, device=device)
        v = torch.zeros(1, 3, 2, value_size, dtype=dtype, device=device)
        gate = torch.zeros(1, 3, 2, dtype=dtype, device=device)
        gates = {"gla": (q,), "gated_delta_rule": (gate, gate), "ssd": (gate,)}[rule]
        for _ in range(2):
            getattr(module, name)(q, q, v, *gates)
    assert taken == [expected if usable else "chunked"] * 2
    # One warning, and only if these kernels would have been used.
    assert len(told) == (expected == "fused" and not usable)
    assert all("several times slower" in str(w.message) and "because it rains" in str(w.message) for w in told)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_the_compiler_calls_what_it_cannot_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_linear_attention, "_version", lambda package: None)

    def function(x: Tensor) -> Tensor:
        reason = flash_linear_attention.reason_against("gla", None)
        if reason:
            flash_linear_attention._warn_once("gla", reason)
            return x + 1
        return x - 1

    with pytest.warns(RuntimeWarning, match="is not installed"):
        found = torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(2))
    assert found.tolist() == [1.0, 1.0]


@by_rule
def test_what_the_kernels_do_not_take_is_named(rule: str) -> None:
    def call(size: int, value_size: int, dtype: torch.dtype) -> None:
        inputs = RULES[rule].inputs(1, 3, size=size, value_size=value_size)
        half = {name: x.to(torch.float32 if name == "state" else dtype) for name, x in inputs.items()}
        type(RULES[rule]).rule(**half, backend="fla")

    with pytest.raises(TypeError, match=r"float16 or bfloat16, got float32.*tf32; take backend='torch'"):
        call(16, 16, torch.float32)
    with pytest.raises(ValueError, match=r"multiples of 16 for D \(up to 256\) and V, got D 16 and V 20"):
        call(16, 20, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"needs tensors on a GPU, got cpu; take backend='torch'"):
        call(16, 16, torch.bfloat16)


# How the operators call them.


def run(rule: str, inputs: Inputs, *grads: Tensor | None, backend: str, **options: Any) -> Inputs:
    return RULES[rule].run(inputs, *grads, backend=backend, **options)


def check(rule: str, inputs: Inputs, *grads: Tensor | None, **options: Any) -> Inputs:
    single = {name: x.float() for name, x in inputs.items()}
    actual = run(rule, single, *grads, backend="fla", **options)
    expected = run(rule, {name: x.double() for name, x in single.items()}, *grads, backend="reference", **options)
    for name, value in expected.items():
        # Sums of decays are float32.
        assert_close(name, actual[name], value, 2e-6, floor=1e-7)
    return actual


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("tokens", [0, 1, 2, 65])
@pytest.mark.parametrize("arrives", ["both", "output", "final state"])
@by_rule
def test_every_gradient_arrives(rule: str, arrives: str, tokens: int) -> None:
    inputs = RULES[rule].inputs(2, tokens)
    output, final = RULES[rule].random_gradients(inputs)
    check(rule, inputs, None if arrives == "final state" else output, None if arrives == "output" else final)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("boundaries", [[0, 0, 16], [0, 5, 5, 70, 71], [0, 1], [0, 0], [0]], ids=str)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@by_rule
def test_packed_documents(rule: str, integers: torch.dtype, boundaries: list[int]) -> None:
    inputs = RULES[rule].inputs(1, boundaries[-1], sequences=len(boundaries) - 1)
    grads = RULES[rule].random_gradients(inputs)
    check(rule, inputs, *grads, cu_seqlens=torch.tensor(boundaries, dtype=integers))


@pytest.mark.usefixtures("stand_in")
@by_rule
def test_padding(rule: str) -> None:
    inputs = RULES[rule].inputs(3, 20)
    mask = torch.ones(3, 20)
    mask[0, :4], mask[1, 15:], mask[2] = 0, 0, 0
    for name in ("q", "k", "v"):
        inputs[name][mask == 0] = float("nan")
    actual = check(rule, inputs, *RULES[rule].random_gradients(inputs), mask=mask)
    assert not actual["output"][mask == 0].any()


@pytest.mark.usefixtures("stand_in")
@by_rule
def test_the_gates_may_be_in_half_precision(rule: str) -> None:
    inputs = {name: x.float() if name == "state" else x.half() for name, x in RULES[rule].inputs(2, 20).items()}
    grads = RULES[rule].random_gradients(inputs)
    actual = run(rule, inputs, *(x.half() for x in grads), backend="fla")
    expected = run(rule, {name: x.double() for name, x in inputs.items()}, *grads, backend="reference")
    for name, value in expected.items():
        assert_close(name, actual[name], value, 2e-3)


@pytest.mark.usefixtures("stand_in")
@by_rule
def test_without_a_state(rule: str) -> None:
    inputs = RULES[rule].inputs(2, 10)
    grads = RULES[rule].random_gradients(inputs)
    del inputs["state"]
    check(rule, inputs, *grads, scale=0.7)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("rule", ["ssd", "ssd in groups"])
def test_a_token_that_erases_the_state_leaves_the_others_their_decays(rule: str) -> None:
    inputs = {name: x.float() for name, x in RULES[rule].inputs(1, 60).items()}
    inputs["log_decay"] = inputs["log_decay"] / 30
    inputs["log_decay"][:, 10] = -1e6
    grads = RULES[rule].random_gradients(inputs)
    actual = run(rule, inputs, *grads, backend="fla")
    expected = run(rule, {name: x.double() for name, x in inputs.items()}, *grads, backend="reference")
    for name, value in expected.items():
        # Spacing of the sums: 1.5e-5. Nothing of the state is left.
        assert_close(name, actual[name], value, 2e-5, floor=1e-7)


@pytest.mark.usefixtures("stand_in")
@by_rule
def test_strided_tensors(rule: str) -> None:
    inputs = RULES[rule].inputs(2, 10)
    strided = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in inputs.items()}
    one = torch.ones(()).double()
    check(rule, strided, one.expand(inputs["v"].shape), one.expand(inputs["state"].shape))


@pytest.mark.usefixtures("stand_in")
@by_function
def test_one_token_is_no_kernel_of_the_package(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients it is this library's own, where that can run; with them, and elsewhere, it is the recurrence in
    PyTorch.
    """
    monkeypatch.setattr(f"ccq.ops.{rule}.fused_{FUNCTIONS[rule]}", lambda *_: pytest.fail("called"))
    inputs = {name: x.float() for name, x in RULES[rule].inputs(3, 1).items()}
    exact = run(rule, {name: x.double() for name, x in inputs.items()}, backend="reference")
    own = WriteRuleResult(inputs["v"], inputs["state"])
    monkeypatch.setattr(write_rule_step, "write_token", lambda *_, in_place: own)
    for chosen in (False, True):
        monkeypatch.setattr(write_rule_step, "is_chosen", lambda *_, chosen=chosen: chosen)
        result = type(RULES[rule]).rule(**inputs, backend="fla")
        assert (result is own) == chosen
        if not chosen:
            assert_close("output", result.output, exact["output"], 1e-6)
            assert_close("state", result.state, exact["final state"], 1e-6)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("boundaries", [None, [0, 3, 3, 12]])
@by_rule
def test_the_operators_keep_their_promises(rule: str, boundaries: list[int] | None, with_state: bool) -> None:
    sequences = None if boundaries is None else 3
    inputs = {name: x.float() for name, x in RULES[rule].inputs(1, 12, sequences=sequences).items()}
    operator = OPERATORS[rule]
    *values, state = (x.requires_grad_() for x in inputs.values())
    start = state if with_state else None
    library.opcheck(operator.forward.overload, (*values, start, 0.5, boundaries), atol=1e-6, rtol=1e-6)
    plain = [x.detach() for x in values]
    start = None if start is None else start.detach()
    output, final, *kept = operator.forward(*plain, start, 0.5, boundaries)
    for d_final in (final, None):
        arguments = (*plain[:3], *plain[4:], *kept, start, output, d_final, 0.5, boundaries)
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        library.opcheck(operator.backward.overload, arguments, test_utils=checks)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("with_state", [True, False])
@by_rule
def test_compiled_without_a_break_it_is_the_same(rule: str, with_state: bool) -> None:
    torch._dynamo.reset()
    inputs = {name: x.float() for name, x in RULES[rule].inputs(2, 12).items()}
    if not with_state:
        del inputs["state"]
    names = list(inputs)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        output, state = type(RULES[rule]).rule(**dict(zip(names, values, strict=True)), backend="fla")
        return output * 2, state

    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().clone().requires_grad_() for x in inputs.values()]
        outputs = call(*leaves)
        results.append((*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), leaves)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(compiled, eager)


def test_the_chunks_of_packed_documents_by_hand() -> None:
    row = torch.empty(1, 200, 1, 16)
    packed = flash_linear_attention.packing([0, 0, 65, 65, 70, 200], row)
    assert packed.cu_seqlens is not None and packed.cu_seqlens.tolist() == [0, 0, 65, 65, 70, 200]
    assert packed.chunk_indices is not None
    assert packed.chunk_indices.tolist() == [[1, 0], [1, 1], [3, 0], [4, 0], [4, 1], [4, 2]]
    # The same tensors again: what the package derives from them is found by their identity.
    again = flash_linear_attention.packing([0, 0, 65, 65, 70, 200], row)
    assert again.cu_seqlens is packed.cu_seqlens
    assert flash_linear_attention.packing(None, row) == (None, None)


def test_importing_the_write_rules_imports_neither_triton_nor_the_package() -> None:
    rules = ", ".join(f"ccq.ops.{rule}" for rule in FUNCTIONS)
    code = f"import sys, {rules}; print({{'triton', 'fla'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()"]
