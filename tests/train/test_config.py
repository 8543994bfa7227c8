"""Recipes: what is read, what is refused, and the ones that are shipped."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from ccq.models import ARMS
from ccq.models.counts import parameter_count
from ccq.train.config import Recipe, load_recipe
from ccq.train.run import model_config

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(path for path in RECIPES.rglob("*.yaml") if path.name != "base.yaml")
SMALL = """
model: {preset: gla+ccq-tiny, gate: 0.25}
data: {folder: data/x, length: 64}
training: {steps: 10, tokens_per_step: 256}
optimizer: {learning_rate: 1e-3, warmup_steps: 2}
system: {rows: 2}
"""


def write(folder: Path, text: str = SMALL, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_values_are_read_and_typed(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    # YAML 1.1 takes 1e-3 for a text.
    assert recipe.optimizer.learning_rate == 0.001
    assert recipe.model.config().gate == 0.25 and recipe.model.config().arm == "gla+ccq"
    assert recipe.batch_size == 4 and recipe.training.total_steps == 10
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_tokens_become_whole_steps(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ["training.steps=null", "training.tokens=1_000"])
    assert recipe.training.total_steps == round(1000 / 256)


def test_set_replaces_single_values(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ["training.steps=7", "model.gate=presplit", "optimizer.betas=[0.8, 0.9]"])
    assert recipe.training.steps == 7
    assert recipe.model.config().gate == "presplit"
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.data == load_recipe(write(tmp_path)).data


def test_how_to_prepare_a_folder_is_not_taken_over_for_another(tmp_path: Path) -> None:
    prepared = SMALL.replace("{folder: data/x, ", "{folder: data/x, stdlib_tokenizer: 300, ")
    path = write(tmp_path, prepared)
    wanted = {
        (): ("data/x", 300),
        ("data.length=32",): ("data/x", 300),
        ("data.folder=data/x",): ("data/x", 300),
        ("data.folder=data/y",): ("data/y", None),
        ("data.folder=data/y", "data.stdlib_tokenizer=400"): ("data/y", 400),
        ("data.stdlib_tokenizer=400", "data.folder=data/y"): ("data/y", 400),
        ("data.folder=null", "data.synthetic_tokens=999"): (None, None),
    }
    for changes, expected in wanted.items():
        data = load_recipe(path, changes).data
        assert (data.folder, data.stdlib_tokenizer) == expected, changes
    other = write(tmp_path, "base: recipe.yaml\ndata: {folder: data/y}\n", "other.yaml")
    assert load_recipe(other).data.stdlib_tokenizer is None


def test_a_base_is_replaced_value_by_value(tmp_path: Path) -> None:
    write(tmp_path, name="base.yaml")
    (tmp_path / "below").mkdir()
    middle = write(tmp_path / "below", "base: ../base.yaml\ntraining: {steps: 20}\n", "middle.yaml")
    top = write(tmp_path, "base: below/middle.yaml\nmodel: {centred: false}\n", "top.yaml")
    assert load_recipe(middle).training.steps == 20
    recipe = load_recipe(top)
    assert recipe.training.steps == 20 and recipe.training.tokens_per_step == 256
    assert recipe.model.options == {"gate": 0.25, "centred": False}


def test_a_base_in_a_circle_is_named(tmp_path: Path) -> None:
    write(tmp_path, "base: b.yaml\n", "a.yaml")
    write(tmp_path, "base: a.yaml\n", "b.yaml")
    with pytest.raises(ValueError, match=r"a.yaml is based on itself, through .*b.yaml"):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "optimizer.lerning_rate=1",
            r"unknown key optimizer.lerning_rate \(did you mean 'learning_rate'\?\); accepted",
        ),
        ("optimiser.eps=1", r"unknown key optimiser \(did you mean 'optimizer'\?\); accepted: model, data, training"),
        ("model.gaet=1", r"model: unknown model option 'gaet' \(did you mean 'gate'\?\)"),
        ("model.preset=gla+cqc-tiny", r"model.preset: unknown preset 'gla\+cqc-tiny' \(did you mean 'gla\+ccq-tiny'"),
        ("model.gate=sigmoid", r"model: gate must be one of"),
        ("training.steps=ten", r"training.steps must be a whole number, got 'ten'"),
        ("training.steps=1.5", r"training.steps must be a whole number, got 1.5"),
        ("training.steps=true", r"training.steps must be a whole number, got True"),
        ("training.steps=0", r"training.steps must be at least 1, got 0"),
        ("training.tokens=100", r"training: give tokens or steps, one of them"),
        ("training.tokens_per_step=100", r"training.tokens_per_step must be a multiple of data.length, got 100 and 64"),
        ("data.length=[64]", r"data.length must be a whole number, got \[64\]"),
        ("data.folder=null", r"data: give folder, made by `ccq data prepare`, or synthetic_tokens"),
        ("data.pack_documents=1", r"data.pack_documents must be true or false, got 1"),
        ("optimizer.learning_rate=fast", r"optimizer.learning_rate must be a number, got 'fast'"),
        ("optimizer.learning_rate=.inf", r"optimizer.learning_rate must be a finite number above 0, got inf"),
        ("optimizer.betas=0.9", r"optimizer.betas must be a list of 2 numbers, got 0.9"),
        ("optimizer.betas=[0.9, 1.0]", r"optimizer.betas must be in 0 ... 1, 1 left out"),
        ("optimizer.name=adam", r"optimizer.name must be one of adamw, muon \(did you mean 'adamw'\?\), got 'adam'"),
        ("optimizer.final_learning_rate_share=2", r"must be in 0 ... 1, got 2"),
        ("optimizer.weight_decay=-1", r"optimizer.weight_decay must be at least 0, got -1"),
        ("optimizer.weight_decay=.inf", r"optimizer.weight_decay must be a finite number of at least 0, got inf"),
        ("system.dtype=float16", r"system.dtype must be one of bfloat16, float32"),
        ("system.rows=0", r"system.rows must be at least 1, got 0"),
        ("system=1", r"--set takes SECTION.KEY=VALUE, such as training.steps=100; got 'system=1'"),
        ("system.rows", r"--set takes SECTION.KEY=VALUE"),
        ("system.rows=[", r"--set system.rows=\[: '\[' is not a value of YAML"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(write(tmp_path), [change])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "recipe.yaml is not YAML"),
        ("- 1", "must hold sections of keys and values"),
        ("model: 3", "model must be a section of keys and values, got 3"),
        (SMALL.replace("warmup_steps: 2", ""), "the file lacks optimizer.warmup_steps"),
        (SMALL.replace("system: {rows: 2}", ""), "the file lacks system.rows"),
    ],
)
def test_files_that_cannot_be_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(write(tmp_path, text))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_shipped_recipe_can_be_used(path: Path) -> None:
    recipe = load_recipe(path)
    config = model_config(recipe, None)
    if path.parent.name in ("tiny", "500m", "1.3b"):
        arm = re.sub("-(uncentred|(fixed|mean|decayed)-gate)$", "", path.stem)
        assert (config.arm, recipe.model.preset) == (arm, f"{arm}-{path.parent.name}")
    assert recipe.batch_size % recipe.system.rows == 0


def test_there_is_a_tiny_recipe_for_every_arm() -> None:
    gates = {f"gla+ccq-{kind}-gate" for kind in ("fixed", "mean", "decayed")}
    assert {path.stem for path in SHIPPED if path.parent.name == "tiny"} == {*ARMS, *gates}


@pytest.mark.parametrize(
    ("scale", "tokens", "per_step", "steps"),
    # Table 1 and section 4.1 of arXiv:2606.01294; the steps follow.
    [("500m", 15e9, 262_144, 57_220), ("1.3b", 40e9, 524_288, 76_294)],
)
def test_recipes_of_the_paper_have_its_values(scale: str, tokens: float, per_step: int, steps: int) -> None:
    found = {path.stem: load_recipe(path) for path in SHIPPED if path.parent.name == scale}
    models = {"transformer", "mamba2", "gla", "gla-hedgehog", "gated-deltanet", "gla+ccq", "gated-deltanet+ccq"}
    table_7 = {"gated-deltanet+ccq-uncentred", "gated-deltanet+ccq-fixed-gate"}
    assert found.keys() == models | (table_7 if scale == "1.3b" else set())
    layers = {"500m": (35, 65, 21, 1024), "1.3b": (24, 48, 21, 2048)}[scale]
    for name, recipe in found.items():
        assert (recipe.training.tokens, recipe.training.tokens_per_step) == (tokens, per_step)
        assert recipe.training.total_steps == steps
        assert recipe.data.length == 4096
        optimizer = recipe.optimizer
        assert (optimizer.name, optimizer.betas, optimizer.weight_decay) == ("adamw", (0.9, 0.95), 0.1)
        assert (optimizer.learning_rate, optimizer.warmup_steps) == (1e-3, 1024)
        assert (optimizer.final_learning_rate_share, optimizer.gradient_clip) == (0, 1)
        assert recipe.system.dtype == "bfloat16"
        config = model_config(recipe, None)
        expected = {"transformer": layers[0], "mamba2": layers[1]}.get(name, layers[2])
        assert (config.num_layers, config.hidden_size) == (expected, layers[3])
        # "500M" and "1.3B"
        assert math.isclose(parameter_count(config), {"500m": 0.5e9, "1.3b": 1.35e9}[scale], rel_tol=0.05)
    if scale == "1.3b":
        uncentred, fixed = (model_config(found[name], None) for name in sorted(table_7, reverse=True))
        assert (uncentred.centred, uncentred.gate) == (False, "presplit")
        assert (fixed.centred, fixed.gate) == (True, 0.1)
