"""`set_read`: every intervention against another way to the same numbers, with caches, padding, packing and files."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import assert_close
from tests.models.small import assert_same_cache, greedy, make, random_tokens, small
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ccq.models import (
    CCQConfig,
    CCQForCausalLM,
    attach,
    detach,
    load_model,
    read_intervention,
    read_layers,
    read_steps,
    save_model,
    set_read,
)
from ccq.models.cache import fingerprint
from ccq.models.counts import parameter_count
from ccq.models.intervention import (
    GATE_VALUES_FILE,
    GateValues,
    ReadIntervention,
    load_gate_values,
    save_gate_values,
    switch_read,
)
from ccq.models.observation import observe_reads
from ccq.nn import CurvatureConditionedQuery, GatedLinearAttention
from ccq.nn.reads import READS
from ccq.nn.reads.normalize import NormalizeRead

numbers = st.one_of(st.none(), st.sets(st.integers(0, 40), min_size=1, max_size=6).map(lambda x: tuple(sorted(x))))
gates = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"gate": st.just("mean"), "values": st.sampled_from([None, "0a1b2c3d4e5f"])}),
    st.fixed_dictionaries({"gate": st.just("shuffled"), "seed": st.integers(0, 99)}),
)


@given(st.floats(allow_nan=False, allow_infinity=False), numbers, numbers, gates)
@settings(deadline=None, max_examples=100)
def test_a_text_stands_for_an_intervention(scale: float, layers: Any, heads: Any, gate: dict[str, Any]) -> None:
    intervention = ReadIntervention(scale=scale, layers=layers, heads=heads, **gate)
    assert ReadIntervention.parse(str(intervention)) == intervention


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("on", "on"),
        ("off", "off"),
        ("scale=1.0", "on"),
        ("scale=2.50", "scale=2.5"),
        ("layers=5,0,3-4, 3", "layers=0,3-5"),
        ("heads=1,scale=-1,layers=0,2,gate=mean", "scale=-1,layers=0,2,heads=1,gate=mean"),
        ("gate=shuffled", "gate=shuffled,seed=0"),
    ],
)
def test_texts_have_one_form(text: str, same: str) -> None:
    assert str(ReadIntervention.parse(text)) == same


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not KEY=VALUE"),
        ("none", "'none' is not KEY=VALUE"),
        ("off,scale=2", "'off' stands alone"),
        ("scale=2,on", "'on' stands alone"),
        ("scales=2", r"unknown key 'scales' \(did you mean 'scale'\?\)"),
        ("scale=two", "scale must be a number, got 'two'"),
        ("scale=nan", "scale must be a finite number, got nan"),
        ("scale=1,2", "'2' is not KEY=VALUE"),
        ("scale=1,scale=2", "scale is there twice"),
        ("layers=", "layers must be a whole number of at least 0, got ''"),
        ("layers=-1", "layers must be a whole number of at least 0, got ''"),
        ("layers=5-3", "layers has the range 5-3, which ends before it starts"),
        ("layers=0-99999999999", "layers goes up to 99999999999, which no model has"),
        ("gate=median", "gate must be mean or shuffled, got 'median'"),
        ("seed=1", "seed is that of gate=shuffled"),
        ("gate=mean,seed=1", "seed is that of gate=shuffled"),
        ("scale=2,values=0a", "values are those of gate=mean"),
    ],
)
def test_other_texts_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"is no read intervention: {reason}.*Accepted: on, off, or some of scale=X"):
        ReadIntervention.parse(text)


@pytest.mark.parametrize(
    "fields",
    [{"layers": (1, 0)}, {"layers": ()}, {"heads": (0, 0)}, {"heads": (-1,)}, {"enabled": False, "scale": 2.0}],
)
def test_impossible_interventions_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be numbers from 0 on, in ascending|off cannot be changed besides"):
        ReadIntervention(**fields)


def values_of(model: CCQForCausalLM, tokens: int = 5) -> GateValues:
    """Drawn, not collected: what the model is to be given."""
    heads = model.read_steps()[0].num_heads
    layers = tuple(torch.rand(tokens, heads) for _ in model.read_steps())
    return GateValues(layers, fingerprint(model), {"source": "drawn"})


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq", "mamba2+ccq", "gla+ccq-two-reads"])
@torch.no_grad()
def test_scale_is_another_lambda(arm: str) -> None:
    model, tokens = make(arm, gate=0.3), random_tokens(2, 9)
    for scale in (0.5, 2.0, -1.0):
        model.set_read(f"scale={scale}")
        other = make(arm, gate=0.3 * scale)
        other.load_state_dict(model.state_dict())
        assert_close(f"scale {scale}", model(tokens).logits, other(tokens).logits, 1e-12)
    model.set_read("scale=0")
    nothing = model(tokens)
    model.set_read("off")
    assert torch.equal(nothing.logits, model(tokens).logits)
    # Without a correction, but not without statistics: such a text can go on with one.
    model.set_read("on")
    model(tokens, cache=nothing.cache)


@torch.no_grad()
def test_layers_are_the_others_off() -> None:
    model, tokens = make("gated-deltanet+ccq", num_layers=3), random_tokens(2, 9)
    on = model(tokens).logits
    model.set_read("layers=0,2")
    some = model(tokens[:, :4])
    for token in tokens[:, 4:].split(1, 1):
        some = model(token, cache=some.cache)
    assert [layer.state.statistics is None for layer in some.cache.layers] == [False, True, False]
    by_hand = make("gated-deltanet+ccq", num_layers=3)
    by_hand.load_state_dict(model.state_dict())
    by_hand.read_steps()[1].enabled = False
    assert_same_cache(some.cache, by_hand(tokens).cache, 1e-11)
    assert torch.equal(model(tokens).logits, by_hand(tokens).logits)
    model.set_read("layers=0-2")
    assert torch.equal(model(tokens).logits, on)


@torch.no_grad()
def test_heads_are_a_gate_of_zero_in_the_others() -> None:
    model, tokens = make("gla+ccq"), random_tokens(2, 9)
    model.set_read("heads=1,scale=2")
    got = model(tokens).logits
    other = make("gla+ccq")
    other.load_state_dict(model.state_dict())
    for read in other.read_steps():

        def doubled(*arguments: Any, own: Any = read.gate_and_query, **options: Any) -> tuple[Tensor, Tensor]:
            gate, query = own(*arguments, **options)
            return gate * torch.tensor([0.0, 2.0]), query

        read.gate_and_query = doubled
    assert_close("heads", got, other(tokens).logits, 1e-12)


@pytest.mark.parametrize(
    "arm",
    [
        "mamba2+ccq",
        *(
            f"{backbone}+{name}"
            for backbone in ("gla", "gated-deltanet")
            for name, kind in READS.items()
            # A fixed lambda is no gate that could have values.
            if "gate" in kind.takes and name != "ccq-fixed"
        ),
    ],
)
@torch.no_grad()
def test_mean_is_a_fixed_lambda_of_each_layer_and_head(arm: str) -> None:
    """The intervention on a trained gate against a model that was made with these numbers in its configuration."""
    groups = {"num_groups": 2} if arm.startswith("mamba2") else {}
    model, tokens = make(arm, **groups), random_tokens(2, 9)
    values = values_of(model)
    means = [[sum(column) / len(column) for column in zip(*layer.tolist(), strict=True)] for layer in values.layers]
    assert [pytest.approx(layer) for layer in means] == values.means()
    done = model.set_read("gate=mean", gate_values=values)
    assert str(done) == f"gate=mean,values={values.digest}"
    fixed = make(arm, gate=values.mean_gate(model), **groups)
    fixed.load_state_dict({key: x for key, x in model.state_dict().items() if ".read.gate" not in key})
    for seen, expected in zip(observed_gates(fixed, tokens), means, strict=True):
        assert_close("lambda", seen, torch.tensor(expected).expand_as(seen), 1e-6)
    assert_close("mean", model(tokens).logits, fixed(tokens).logits, 1e-6)
    with pytest.raises(ValueError, match=f"asks for other gate_values than the given, which are {values.digest}"):
        model.set_read("gate=mean,values=0", gate_values=values)
    assert model.set_read(str(done), gate_values=values) == done


def observed_gates(model: CCQForCausalLM, tokens: Tensor, **options: Any) -> list[Tensor]:
    with observe_reads(model) as observed:
        model(tokens, use_cache=False, **options)
    return [calls[0].gate for calls in observed]


@torch.no_grad()
def test_shuffled_puts_every_value_at_another_token() -> None:
    model = make("gla+ccq")
    values = values_of(model, tokens=40)
    assert str(model.set_read("gate=shuffled", gate_values=values)) == f"gate=shuffled,seed=0,values={values.digest}"
    tokens = random_tokens(2, 90)
    seen = observed_gates(model, tokens)
    orders = []
    for gate, layer in zip(seen, values.layers, strict=True):
        assert torch.equal(gate[:, :40].sort(1).values, layer.double().sort(0).values.expand(2, -1, -1))
        assert torch.equal(gate[:, :40], gate[:, 40:80])
        assert torch.equal(gate[0], gate[1])
        orders += [(gate[0, :40, head, None] == layer[:, head].double()).int().argmax(1).tolist() for head in (0, 1)]
    # An order of its own for each layer and head, in which hardly a value stays or keeps its neighbour.
    assert len({tuple(order) for order in orders}) == 4
    for order in orders:
        assert sum(i == place for i, place in enumerate(order)) <= 6
        assert sum(b - a == 1 for a, b in pairwise(order)) <= 6
    model.set_read("gate=shuffled,seed=1", gate_values=values)
    assert not torch.equal(observed_gates(model, tokens)[0], seen[0])
    model.set_read("gate=shuffled,seed=0", gate_values=copy.deepcopy(values))
    assert all(map(torch.equal, observed_gates(model, tokens), seen))


CHANGES = [
    "gate=shuffled",
    "gate=mean,scale=-0.5",
    "scale=2,layers=1,heads=0",
    "gate=shuffled,seed=3,scale=0.5,layers=0,heads=1",
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet+ccq", "gla+exact", "mamba2+ccq-mean"])
@torch.no_grad()
def test_batches_padding_packing_and_caches_change_nothing(arm: str, change: str) -> None:
    model = make(arm)
    heads = model.read_steps()[0].num_heads
    change = change.replace("heads=1", f"heads={heads - 1}")
    needs_values = "gate" in change
    model.set_read(change, gate_values=values_of(model) if needs_values else None)
    short, long = random_tokens(1, 6), random_tokens(1, 11)
    alone = [model(short).logits[0], model(long).logits[0]]
    padded = torch.cat((torch.cat((torch.zeros(1, 5, dtype=torch.int64), short), 1), long))
    mask = torch.ones(2, 11)
    mask[0, :5] = 0
    output = model(padded, attention_mask=mask)
    assert_close("padded", output.logits[0, 5:], alone[0], 1e-9)
    assert_close("beside", output.logits[1], alone[1], 1e-9)
    packed = model(torch.cat((short, long), 1), cu_seqlens=torch.tensor([0, 6, 17]))
    assert_close("packed", packed.logits[0], torch.cat(alone), 1e-9)
    more = random_tokens(2, 4)
    whole = [model(torch.cat((text, more[i : i + 1]), 1)).logits[0, -4:] for i, text in enumerate((short, long))]
    for cache in (output.cache, packed.cache):
        steps = torch.cat([model(token, cache=cache).logits for token in more.split(1, 1)], 1)
        for row in range(2):
            assert_close("decode", steps[row], whole[row], 1e-9)


@torch.no_grad()
def test_generation_goes_on_with_the_intervention() -> None:
    model, prompt = make("gated-deltanet+ccq"), random_tokens(1, 7)
    model.set_read("gate=shuffled,scale=3", gate_values=values_of(model))
    expected = greedy(model, prompt, 8)
    mask = torch.ones_like(prompt)
    answer = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)[:, 7:]
    assert torch.equal(answer, expected)


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@torch.no_grad()
def test_one_graph_decodes_every_token() -> None:
    torch._dynamo.reset()
    model, tokens = make("gated-deltanet+ccq", torch.float32, num_layers=1), random_tokens(2, 8)
    model.set_read("gate=shuffled,scale=2,heads=1", gate_values=values_of(model))
    expected = model(tokens).logits
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    cache = model(tokens[:, :5]).cache
    for i in range(5, 8):
        assert_close(str(i), compiled(tokens[:, i : i + 1], cache=cache).logits[:, 0], expected[:, i], 1e-5)
    assert counter.frame_count == 1, "a later token compiled again"


@pytest.mark.parametrize("change", ["off", *CHANGES])
@torch.no_grad()
def test_on_is_what_was_and_files_never_change(change: str, tmp_path: Path) -> None:
    model, tokens = make("gla+ccq", torch.float32), random_tokens(2, 9)
    on, state = model(tokens), copy.deepcopy(model.state_dict())
    save_model(model, tmp_path / "before")
    model.set_read(change, gate_values=values_of(model) if "gate" in change else None)
    changed = model(tokens).logits
    assert not torch.equal(changed, on.logits)
    assert torch.equal(copy.deepcopy(model)(tokens).logits, changed)
    save_model(model, tmp_path / "after")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    assert torch.equal(load_model(tmp_path / "after")(tokens).logits, on.logits)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    model.set_read("on")
    again = model(tokens)
    assert torch.equal(again.logits, on.logits)
    assert_same_cache(again.cache, on.cache, 0.0)


@pytest.mark.parametrize(
    ("arm", "change", "message"),
    [
        ("gla", "off", "arm 'gla' has no read step that 'off' could be done to"),
        ("gla+ccq", "layers=0-3", "layers=0-3: the read steps are in layers 0-1, not 2-3"),
        ("gla+ccq", "heads=2", "heads=2: the read steps have heads 0-1, not 2"),
        ("mamba2+ccq", "heads=1", "heads=1: the read steps have heads 0, not 1"),
        ("gla+ccq", "gate=mean", "gate=mean needs gate_values"),
        ("gla+normalize", "scale=2", "read step 'normalize' has no correction; accepted: on, off"),
        ("gla+comba", "gate=mean", r"read step 'comba' has no gate; accepted: on, off, scale=X, layers=\.\.\., heads="),
        ("gla+mesa", "gate=shuffled", "read step 'mesa' has no gate; accepted"),
        ("gla+ccq-fixed", "gate=mean", "read step 'ccq-fixed' has a fixed lambda, the same for every token; accepted"),
        ("gla+ccq-decay", "gate=shuffled", "read step 'ccq-decay' does not count its tokens.*heads=..., gate=mean"),
        ("gla+query-weighted", "gate=shuffled", "read step 'query-weighted' does not count its tokens"),
    ],
)
@torch.no_grad()
def test_what_cannot_be_done_is_refused_and_changes_nothing(arm: str, change: str, message: str) -> None:
    model, tokens = make(arm), random_tokens(1, 5)
    before = model(tokens).logits
    with pytest.raises(ValueError, match=message):
        model.set_read(change)
    assert torch.equal(model(tokens).logits, before)


def test_a_model_says_what_was_done_to_it() -> None:
    model = make("gla")
    assert model.read_intervention is None
    attach(model)
    assert str(model.read_intervention) == "on"
    done = model.set_read("scale=2,heads=0")
    assert done == model.read_intervention == model.model.read_intervention
    with pytest.raises(ValueError, match="layers"):
        model.set_read("layers=7")
    assert model.read_intervention == done
    assert [read.factors.tolist() for read in read_steps(model)] == [[2, 0]] * 2
    # With the read steps goes what was done to them.
    attach(detach(model))
    assert str(model.read_intervention) == "on"


def test_a_container_with_a_number_is_no_layer() -> None:
    def layer(reads: bool) -> torch.nn.Module:
        return GatedLinearAttention(8, 2, 4, 4, read=CurvatureConditionedQuery(2, 4, gate=0.1) if reads else None)

    def model(*reads: bool) -> torch.nn.Module:
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(map(layer, reads))})

    for reads, expected in (((True, True), [0, 1]), ((False, True, True), [1, 2]), ((False, True), [1])):
        for wrapped in (
            model(*reads),
            torch.nn.ModuleList([model(*reads)]),
            torch.nn.ModuleDict({"7": torch.nn.ModuleDict({"5": model(*reads)})}),
        ):
            assert read_layers(wrapped) == expected
    # Layers of another name: by what tells them apart.
    blocks = torch.nn.ModuleDict(
        {"3": torch.nn.ModuleDict({"h": torch.nn.ModuleList(map(layer, (False, True, True)))})}
    )
    assert read_layers(blocks) == [1, 2]
    assert read_layers(torch.nn.Linear(2, 2)) == []


@torch.no_grad()
def test_layers_of_ones_own_are_changed_by_their_numbers() -> None:
    """Read steps in plain modules: in the layers of a list, and in one layer alone, which no number names."""

    def read(gate: float) -> CurvatureConditionedQuery:
        return CurvatureConditionedQuery(2, 4, gate=gate)

    layers = torch.nn.ModuleList(GatedLinearAttention(8, 2, 4, 4).double() for _ in range(4))
    x = torch.randn(2, 9, 8).double()

    def outputs(*gates: float | None) -> list[Tensor]:
        for layer, gate in zip(layers, gates, strict=True):
            layer.read = None if gate is None else read(gate)
        return [layer(x).output for layer in layers]

    expected, on = outputs(0.0, None, 0.15, 0.0), outputs(0.3, None, 0.3, 0.3)
    assert read_layers(layers) == [0, 2, 3]
    assert str(set_read(layers, "layers=2,scale=0.5")) == str(read_intervention(layers)) == "scale=0.5,layers=2"
    for number, layer in enumerate(layers):
        assert_close(f"layer {number}", layer(x).output, expected[number], 1e-12)
        assert torch.equal(layer(x).output, on[number]) == (number == 1)
    alone = layers[2]
    assert read_layers(alone) == [0]
    set_read(alone, "layers=0")
    assert torch.equal(alone(x).output, on[2])
    with pytest.raises(ValueError, match="layers=0-1,4: the read steps are in layers 0,2-3, not 1,4"):
        set_read(layers, "layers=0-1,4")
    with pytest.raises(ValueError, match="CurvatureConditionedQuery has a fixed lambda, the same for every token"):
        set_read(layers, "gate=mean")
    # One step that this cannot be done to is enough, and none is changed.
    layers[3].read, before = NormalizeRead(2, 4), read_intervention(layers)
    with pytest.raises(ValueError, match="scale=2: read step NormalizeRead has no correction; accepted: on, off"):
        set_read(layers, "scale=2")
    assert read_intervention(layers) == before and torch.equal(layers[2](x).output, on[2])
    with pytest.raises(ValueError, match=r"Linear has no read step that 'off' .* that ccq.attach has put one into"):
        set_read(torch.nn.Linear(1, 1), "off")
    assert read_intervention(torch.nn.Linear(1, 1)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_numbers_are_kept_in_the_dtype_of_the_sums(dtype: torch.dtype) -> None:
    """Beside the weights of its layer; a step without any (a fixed gate) takes the model's."""
    step = CurvatureConditionedQuery(1, 4, gate=0.5)
    holder = torch.nn.Module()
    holder.read = step
    for model in (torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=dtype), holder), step):
        set_read(model, "scale=0.1")
        expected = torch.promote_types(dtype, torch.float32) if model is not step else torch.float32
        assert torch.equal(step.factors, torch.tensor([0.1], dtype=expected))


def test_values_of_another_model_are_refused() -> None:
    model = make("gla+ccq")
    values = values_of(model)
    with torch.no_grad():
        model.read_steps()[1].gate_bias.add_(1)
    with pytest.raises(ValueError, match="gate_values are those of another model; make them of this one"):
        model.set_read("gate=mean", gate_values=values)


def test_values_are_kept_in_a_file(tmp_path: Path) -> None:
    model = make("gla+ccq")
    values, path = values_of(model), tmp_path / GATE_VALUES_FILE
    save_gate_values(values, path)
    found = load_gate_values(path)
    assert all(map(torch.equal, found.layers, values.layers))
    assert (found.model, found.text, found.digest) == (values.model, {"source": "drawn"}, values.digest)
    other = GateValues((values.layers[1], values.layers[0]), values.model, values.text)
    assert other.digest != values.digest
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="is damaged"):
        load_gate_values(path)
    save_gate_values(GateValues((torch.zeros(0, 2),), "", {}), path)
    with pytest.raises(ValueError, match="does not hold a table"):
        load_gate_values(path)


@torch.no_grad()
def test_what_a_command_does(tmp_path: Path) -> None:
    """The option --read, with the values in the model's folder or elsewhere."""
    model, tokens = make("gla+ccq"), random_tokens(1, 6)
    folder = str(tmp_path)
    assert switch_read(make("gla"), folder, None) is None
    assert switch_read(torch.nn.Linear(1, 1), folder, None) is None
    assert switch_read(model, folder, None) == "on"
    assert switch_read(model, folder, "layers=0,scale=2.0") == "scale=2,layers=0"
    with pytest.raises(ValueError, match=f"{GATE_VALUES_FILE} does not exist; `ccq gates {folder}` writes them"):
        switch_read(model, folder, "gate=mean")
    values = values_of(model)
    save_gate_values(values, tmp_path / GATE_VALUES_FILE)
    text = switch_read(model, folder, "gate=mean")
    assert text == f"gate=mean,values={values.digest}"
    by_default = model(tokens).logits
    model.set_read("on")
    assert switch_read(model, "of the hub", text, tmp_path / GATE_VALUES_FILE) == text
    assert torch.equal(model(tokens).logits, by_default)
    with pytest.raises(ValueError, match="--gate-values is for --read gate=mean and gate=shuffled"):
        switch_read(model, folder, "scale=2", tmp_path / GATE_VALUES_FILE)
    with pytest.raises(ValueError, match="has no read step that 'off' could be done to; leave --read out"):
        switch_read(make("gla"), folder, "off")


FIXED = [[0.125, 0.5], [0.0, 2.0]]


@pytest.mark.parametrize("read", ["ccq", "query-weighted", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_model_with_a_lambda_for_each_layer_and_head_is_saved_and_loaded(
    read: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, tokens = make(f"gla+{read}", torch.float32, gate=FIXED), random_tokens(2, 9)
    assert not any(".read.gate" in name or "fixed" in name for name in model.state_dict())
    assert [gate.tolist() for gate in observed_gates(model, tokens)] == [[[row] * 9] * 2 for row in FIXED]
    assert parameter_count(model.config) == model.parameter_count
    save_model(model, tmp_path)
    loaded = load_model(tmp_path, dtype=dtype)
    assert loaded.config.gate == FIXED
    assert [step.fixed.tolist() for step in loaded.read_steps()] == FIXED
    if dtype == torch.float32:
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ([[0.1, 0.2]], "gate must have a list for each of the 2 layers, got 1"),
        ([0.1, 0.2], "gate must have a list of 2 numbers for layer 0, got 0.1"),
        ([[0.1, 0.2], [0.1]], "or a list of 2 such numbers, one a head"),
        ([[0.1, 0.2], ["presplit", 0.1]], "or a list of 2 such numbers, one a head"),
    ],
)
def test_a_lambda_for_each_layer_and_head_must_fit(gate: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small("gla+ccq", gate=gate)
    assert isinstance(small("mamba2+ccq", gate=[[0.1], [0.2]]), CCQConfig)
