"""Every read step in a model: arms, configuration, training, decoding, files and counts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.helpers import assert_close, relative_error
from tests.models.small import assert_same_cache, make, random_tokens, small

from ccq.analysis.gate import measure_reads
from ccq.models import (
    ARMS,
    READS,
    CCQConfig,
    CCQForCausalLM,
    load_model,
    load_state,
    parse_arm,
    preset,
    save_model,
    save_state,
)
from ccq.models.counts import flops_per_token, parameter_count, state_bytes
from ccq.nn.read import ReadStep
from ccq.nn.reads import READS as KINDS

OTHERS = [name for name in READS if name not in ("none", "ccq")]
ITERATE = {"mesa": 1e-8, "exact": 1e-10}


def tolerance(name: str) -> float:
    return ITERATE.get(name, 1e-11)


def test_every_read_step_makes_an_arm_of_every_linear_backbone() -> None:
    assert tuple(KINDS) == READS
    for backbone in ("gla", "gla-hedgehog", "gated-deltanet", "mamba2"):
        for name in READS:
            assert parse_arm(f"{backbone}+{name}") == (backbone, None if name == "none" else name)
            assert preset(f"{backbone}+{name}-tiny").arm == f"{backbone}+{name}"
    assert [arm for arm in ARMS if "+" in arm] == [f"{arm}+ccq" for arm in ARMS if f"{arm}+ccq" in ARMS]
    with pytest.raises(
        ValueError, match=r"unknown arm 'gla\+messa' \(did you mean 'gla\+mesa'\?\).*: none, normalize, "
    ):
        parse_arm("gla+messa")
    with pytest.raises(ValueError, match=r"unknown arm 'transformer\+mesa'"):
        parse_arm("transformer+mesa")
    with pytest.raises(ValueError, match=r"unknown preset 'gla\+mesa-2b'"):
        preset("gla+mesa-2b")


def test_none_is_the_backbone() -> None:
    torch.manual_seed(0)
    plain = make("gla")
    torch.manual_seed(0)
    none = make("gla+none")
    tokens = random_tokens(2, 9)
    assert not none.read_steps()
    assert torch.equal(plain(tokens).logits, none(tokens).logits)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("backbone", ["gla", "gated-deltanet", "mamba2"])
def test_trains_a_step_and_decodes_what_prefill_says(backbone: str, name: str) -> None:
    model, tokens = make(f"{backbone}+{name}"), random_tokens(2, 12)
    loss = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), f"{parameter_name} receives no gradient"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-4 * parameter.grad / parameter.grad.norm()
        after = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        assert after < loss
        whole = model(tokens)
        cache, logits = model(tokens[:, :5]).cache, []
        for token in tokens[:, 5:].split(1, 1):
            output = model(token, cache=cache)
            logits.append(output.logits)
        assert_close("decode", torch.cat(logits, 1), whole.logits[:, 5:], tolerance(name))
        assert_same_cache(cache, whole.cache, tolerance(name))


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_caches_are_moved_kept_on_disk_and_switched_off(name: str, tmp_path: Path) -> None:
    model, tokens, more = make(f"gla+{name}"), random_tokens(3, 6), random_tokens(3, 2)
    cache = model(tokens).cache
    save_state(cache, tmp_path / "state", model)
    loaded = load_state(tmp_path / "state", model)
    assert_same_cache(loaded, cache, 0.0)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    expected = model(torch.cat((tokens[order], more), 1))
    assert_close("reordered", model(more, cache=cache).logits, expected.logits[:, 6:], tolerance(name))
    cache.reset()
    again = model(tokens, cache=cache)
    assert_close("after reset", again.logits, model(tokens).logits, tolerance(name))
    model.set_read("off")
    off = model(more, cache=loaded)
    assert all(layer.state.statistics is None for layer in off.cache.layers)
    unit = make("gla+normalize")
    unit.load_state_dict({key: x for key, x in model.state_dict().items() if ".read." not in key})
    assert_close("off", model(tokens).logits, unit(tokens).logits, 1e-12)


@pytest.mark.parametrize("name", OTHERS)
def test_files_hold_every_bit(name: str, tmp_path: Path) -> None:
    model = make(f"gated-deltanet+{name}", torch.float32)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config.arm == f"gated-deltanet+{name}"
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[key]) for key, x in ours.items())
    tokens = random_tokens(1, 9)
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_counts_are_those_of_the_model(name: str) -> None:
    config = small(f"gla+{name}")
    model = CCQForCausalLM(config).eval()
    assert parameter_count(config) == model.parameter_count
    plain = small("gla")
    assert parameter_count(config) - parameter_count(plain) == model.read_parameter_count
    cache = model(random_tokens(1, 3)).cache
    states = [layer.state.statistics or () for layer in cache.layers]
    kept = sum(x.numel() * x.element_size() for state in states for x in state)
    assert state_bytes(config) - state_bytes(plain) == kept == sum(read.state_bytes for read in model.read_steps())
    assert (flops_per_token(config) > flops_per_token(plain)) == (name != "normalize")


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_one_seed_starts_from_the_weights_of_its_backbone(name: str) -> None:
    streams, models = [], []
    for arm in ("gla", f"gla+{name}"):
        torch.manual_seed(3)
        models.append(CCQForCausalLM(small(arm)))
        streams.append(torch.get_rng_state())
    assert torch.equal(*streams)
    read = models[1].state_dict()
    assert all(torch.equal(x, read[key]) for key, x in models[0].state_dict().items())


@pytest.mark.parametrize("name", OTHERS)
def test_gate_and_correction_are_measured(name: str) -> None:
    model = make(f"gla+{name}", torch.float32)
    measured = measure_reads(model, random_tokens(2, 8))
    assert measured is not None
    size = measured.correction["relative_size"]
    assert (size > 1e-4) == (name != "normalize")


UNBOUNDED = ("ccq-raw", "ccq-strength")
"""They may enlarge what rounding has done before them."""


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in UNBOUNDED])
@torch.no_grad()
def test_bfloat16_and_autocast_cost_no_more_than_the_backbone_does(name: str) -> None:
    """At most twice the error that the same model has with its read step off; states stay float32."""
    exact = make(f"gla+{name}", torch.bfloat16).float()
    half = copy.deepcopy(exact).bfloat16()
    tokens = random_tokens(2, 40)
    errors: dict[str, list[float]] = {}
    for mode in ("on", "off"):
        exact.set_read(mode)
        half.set_read(mode)
        expected, output = exact(tokens).logits, half(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            cast = exact(tokens)
        errors[mode] = [relative_error(each.logits, expected) for each in (output, cast)]
        states = [layer.state.statistics for each in (output, cast) for layer in each.cache.layers]
        fields = [x for state in states if state is not None for x in state]
        assert all(x.dtype in (torch.float32, torch.int64) for x in fields)
    assert max(errors["on"]) < 2 * max(errors["off"]), errors


def test_read_options_reach_the_read_step_and_the_file(tmp_path: Path) -> None:
    config = small("gla+richardson", read_options={"steps": 5})
    model = CCQForCausalLM(config)
    assert all(read.steps == 5 for read in model.read_steps())
    save_model(model, tmp_path)
    assert load_model(tmp_path).read_steps()[0].steps == 5
    assert CCQConfig.from_pretrained(tmp_path).read_options == {"steps": 5}
    assert CCQForCausalLM(small("gla+query-weighted", read_options={"landmarks": 3})).read_parameter_count == 2 * (
        2 * 8 + 2 + 2 * 3 * 4
    )
    for arm, given, message in (
        ("gla+richardson", {"step": 5}, r"unknown option 'step' of read step richardson \(did you mean 'steps'\?\)"),
        ("gla+ccq", {"steps": 5}, "unknown option 'steps' of read step ccq; accepted in read_options: none"),
        ("gla", {"steps": 5}, "unknown option 'steps' of read step none"),
        ("gla+mesa", {"steps": 0}, "read_options: steps must be a whole number of at least 1, got 0"),
        ("gla+mesa", [5], "read_options must be a table of names and values, or None"),
    ):
        with pytest.raises(ValueError, match=message):
            small(arm, read_options=given)


def test_the_gate_of_the_configuration() -> None:
    gates = {"ccq-fixed": ("presplit", 0.1), "exact": ("head", "head"), "ccq-strength": (0.3, 0.3)}
    for name, (given, made) in gates.items():
        (read, *_) = CCQForCausalLM(small(f"gla+{name}", gate=given)).read_steps()
        assert isinstance(read, ReadStep)
        assert read.gate == made
    assert CCQForCausalLM(small("gla+ccq-fixed", gate=0.03)).read_steps()[0].gate == 0.03
    assert not CCQForCausalLM(small("gla+ccq-uncentred")).read_steps()[0].centred
