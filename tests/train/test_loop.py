"""Training: the loss by hand, the start of a pair, and runs that are interrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ccq.data.needles import training_batch
from ccq.data.tokenizer import NeedleVocabulary
from ccq.models.configuration import CCQConfig
from ccq.models.presets import preset
from ccq.train import Progress, Stage, TrainConfig, initial_model, train
from ccq.train.checkpoint import load_checkpoint
from ccq.train.loop import losses, make_optimizer
from ccq.train.metrics import mean_gate

VOCABULARY = NeedleVocabulary(remember=50, recall=51, keys=tuple(range(52, 60)), values=tuple(range(60, 64)))
TOKENS = np.random.default_rng(0).integers(0, 50, 4000).astype(np.uint16)
CONFIG = TrainConfig(stages=(Stage(32, 2, 4), Stage(40, 2, 4)), warmup_steps=2, log_every=3, checkpoint_seconds=0)


def model_config(arm: str) -> CCQConfig:
    return preset(
        f"{arm}-tiny", vocab_size=64, hidden_size=16, num_layers=1, head_dim=8, value_head_dim=8, intermediate_size=16
    )


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


@pytest.mark.parametrize("backbone", ["gla", "gated-deltanet"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_pair_starts_from_the_same_weights_bit_for_bit(backbone: str, seed: int) -> None:
    before = torch.random.get_rng_state()
    plain = initial_model(model_config(backbone), seed).state_dict()
    read = initial_model(model_config(f"{backbone}+ccq"), seed).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert plain.keys() < read.keys()
    for name, value in plain.items():
        assert torch.equal(value, read[name]), name
    assert not torch.equal(
        initial_model(model_config(backbone), seed + 1).state_dict()["lm_head.weight"], plain["lm_head.weight"]
    )


def test_loss_is_the_mean_over_text_plus_the_mean_over_answers() -> None:
    model = initial_model(model_config("gla+ccq"), 0)
    batch = training_batch(TOKENS, seed=0, step=0, batch_size=3, length=40, vocabulary=VOCABULARY, needles=4)
    text_loss, answer_loss = losses(model, batch)
    logits = model(batch.tokens[:, :-1]).logits.detach().double()
    by_hand: dict[str, list[float]] = {"text": [], "answer": []}
    for row in range(3):
        for position in range(39):
            target = int(batch.tokens[row, position + 1])
            loss = float(logits[row, position].logsumexp(0) - logits[row, position, target])
            previous = batch.tokens[row, : position + 1].tolist()
            questions_begun = VOCABULARY.recall in previous
            if target in VOCABULARY.values and questions_begun:
                by_hand["answer"].append(loss)
            elif target not in VOCABULARY.values and target not in VOCABULARY.keys:
                by_hand["text"].append(loss)
    assert len(by_hand["answer"]) == 3 * 4
    assert text_loss.item() == pytest.approx(np.mean(by_hand["text"]), rel=1e-5)
    assert answer_loss.item() == pytest.approx(np.mean(by_hand["answer"]), rel=1e-5)


def test_decay_leaves_out_vectors_and_the_gate_bias() -> None:
    model = initial_model(model_config("gated-deltanet+ccq"), 0)
    optimizer = make_optimizer(model, CONFIG)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, kept = ({names[p] for p in group["params"]} for group in optimizer.param_groups)
    assert decayed | kept == set(names.values())
    assert all(
        "proj" in name or "conv1d" in name or "embeddings" in name or "gate_weight" in name or "lm_head" in name
        for name in decayed
    )
    for part in ("gate_bias", "A_log", "dt_bias", "norm.weight"):
        assert any(name.endswith(part) for name in kept), part


@pytest.mark.parametrize("arm", ["gla+ccq", "gated-deltanet"])
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, arm: str, stop: int) -> None:
    whole = train(model_config(arm), CONFIG, TOKENS, VOCABULARY, seed=3)

    def kill(progress: Progress) -> None:
        if progress.step == stop:
            raise Killed

    checkpoint = tmp_path / "checkpoint.pt"
    with pytest.raises(Killed):
        train(model_config(arm), CONFIG, TOKENS, VOCABULARY, seed=3, checkpoint=checkpoint, on_progress=kill)
    saved = load_checkpoint(checkpoint)
    assert saved is not None
    assert saved.step == stop
    resumed = train(model_config(arm), CONFIG, TOKENS, VOCABULARY, seed=3, checkpoint=checkpoint)
    assert resumed.curve == whole.curve
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_the_curve_has_its_points_and_the_losses_fall() -> None:
    config = TrainConfig(stages=(Stage(40, 8, 150),), warmup_steps=5, log_every=50)
    trained = train(model_config("gla+ccq"), config, TOKENS % 7, VOCABULARY, seed=0)
    assert [point["step"] for point in trained.curve] == [1, 50, 100, 150]
    assert [point["tokens"] for point in trained.curve] == [320 * step for step in (1, 50, 100, 150)]
    assert trained.curve[0]["gate_mean"] == pytest.approx(0.01, abs=1e-3)
    assert trained.curve[0]["text_loss"] == pytest.approx(np.log(64), abs=0.3)
    # Text of seven equally likely tokens, ln 7 nats each; the markers between them cost a little less.
    assert trained.curve[-1]["text_loss"] == pytest.approx(np.log(7), abs=0.3)


def test_mean_gate_is_that_of_a_fixed_gate() -> None:
    tokens = torch.from_numpy(TOKENS[:20].astype(np.int64)).view(1, 20)
    config = preset("gla+ccq-tiny", vocab_size=64, gate=0.3)
    assert mean_gate(initial_model(config, 0), tokens) == pytest.approx(0.3)
    assert mean_gate(initial_model(model_config("gla"), 0), tokens) is None


def test_a_loss_that_is_not_finite_stops_the_run_and_says_where() -> None:
    config = TrainConfig(stages=(Stage(32, 2, 200),), warmup_steps=0, learning_rate=1e30, gradient_clip=1e30)
    with pytest.raises(FloatingPointError, match=r"not finite at step \d+ .*lower learning rate than 1e\+30"):
        train(model_config("gla"), config, TOKENS, VOCABULARY, seed=0)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 half a file"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    checkpoint.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint.pt is damaged.*delete it to train"):
        train(model_config("gla"), CONFIG, TOKENS, VOCABULARY, seed=0, checkpoint=checkpoint)


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    train(model_config("gla"), CONFIG, TOKENS, VOCABULARY, seed=0, checkpoint=checkpoint)
    with pytest.raises(ValueError, match="belongs to another model"):
        train(model_config("gated-deltanet"), CONFIG, TOKENS, VOCABULARY, seed=0, checkpoint=checkpoint)
    torch.save({"format": "other"}, checkpoint)
    with pytest.raises(ValueError, match="not a checkpoint of this version"):
        load_checkpoint(checkpoint)
