"""Training in the Hugging Face way: loss, accumulation, checkpointing, autocast, Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.helpers import assert_close
from tests.models.small import VOCABULARY, checkpoint_blocks, make, random_tokens
from torch.utils.data import Dataset

from ccq.models import ARMS, CCQCache, CCQForCausalLM, load_model, preset


def gradients(model: CCQForCausalLM, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("arm", ["gla+ccq", "transformer"])
def test_the_loss_is_that_of_the_next_token(arm: str) -> None:
    model, tokens = make(arm, torch.float32), random_tokens(3, 8)
    labels = tokens.clone()
    labels[0, :4] = -100
    output = model(tokens, labels=labels)
    losses = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    counted = labels[:, 1:] != -100
    assert_close("mean", output.loss, losses[counted].mean(), 1e-6)
    assert_close("sum", model(tokens, labels=labels, num_items_in_batch=7).loss, losses[counted].sum() / 7, 1e-6)


@pytest.mark.parametrize("arm", ARMS)
def test_documents_of_a_packed_row_train_as_they_do_alone(arm: str) -> None:
    model = make(arm, torch.float32).train()
    documents = [random_tokens(1, length) for length in (5, 1, 7, 2)]
    boundaries = torch.tensor([0, 5, 6, 6, 13, 15])  # one of them is empty
    tokens = torch.cat(documents, 1)
    items = 15 - 4
    packed = model(tokens, labels=tokens, cu_seqlens=boundaries, num_items_in_batch=items).loss
    alone = sum(model(d, labels=d, num_items_in_batch=items).loss for d in documents)
    assert_close("loss", packed, alone, 1e-6)
    expected = gradients(model, alone)
    for name, gradient in gradients(model, packed).items():
        assert_close(name, gradient, expected[name], 2e-5, floor=1e-7)


def test_one_batch_of_eight_equals_eight_of_one() -> None:
    model, tokens = make("gated-deltanet+ccq", torch.float32).train(), random_tokens(8, 6)
    labels = tokens.clone()
    for row in range(8):
        labels[row, : row % 5] = -100
    items = int((labels[:, 1:] != -100).sum())
    whole = gradients(model, model(tokens, labels=labels).loss)
    parts = sum(
        model(row.unsqueeze(0), labels=label.unsqueeze(0), num_items_in_batch=items).loss
        for row, label in zip(tokens, labels, strict=True)
    )
    for name, gradient in gradients(model, parts).items():
        assert_close(name, gradient, whole[name], 2e-5, floor=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("arm", ARMS)
def test_gradient_checkpointing_changes_no_gradient(arm: str, reentrant: bool) -> None:
    model, tokens = make(arm).train(), random_tokens(2, 7)
    expected = gradients(model, model(tokens, labels=tokens).loss)
    checkpoint_blocks(model, reentrant)
    calls: list[int] = []
    hook = model.model.layers[0].attn_norm.register_forward_hook(lambda *_: calls.append(1))
    model(tokens, labels=tokens).loss.backward()
    hook.remove()
    assert len(calls) == 2, "the first block ran once forward and once more for its gradients"
    for name, parameter in model.named_parameters():
        assert_close(name, parameter.grad, expected[name], 1e-12)


def test_gradient_checkpointing_goes_back_through_a_cache() -> None:
    model, tokens = make("gla+ccq").train(), random_tokens(2, 8)
    expected = gradients(model, model(tokens).logits[:, 5:].square().sum())
    checkpoint_blocks(model, False)
    cache = CCQCache(model.config)
    model(tokens[:, :5], cache=cache)
    got = gradients(model, model(tokens[:, 5:], cache=cache).logits.square().sum())
    for name, gradient in got.items():
        assert_close(name, gradient, expected[name], 1e-9)


@pytest.mark.parametrize("arm", ARMS)
def test_autocast_stays_close_and_keeps_states_in_float32(arm: str) -> None:
    model, tokens = make(arm, torch.float32), random_tokens(2, 40)
    expected = model(tokens).logits
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens, labels=tokens)
    assert_close("logits", output.logits.float(), expected, 0.1)
    output.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    if arm != "transformer":
        assert all(layer.state.memory.dtype == torch.float32 for layer in output.cache.layers)


@pytest.mark.parametrize("backbone", ["gla", "gated-deltanet"])
def test_under_autocast_one_copy_of_a_norm_is_kept(backbone: str) -> None:
    """In bfloat16, by all linear maps that read it together: five or six in a mixer, two behind it."""
    torch.manual_seed(0)
    model = CCQForCausalLM(preset(f"{backbone}-tiny")).train()
    block = model.model.layers[0]
    normed: list[torch.Tensor] = []
    for module in (block.attn_norm, block.mlp_norm):
        module.register_forward_hook(lambda *call: normed.append(call[-1][0]))
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    x = torch.randn(2, 10, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        block(x, None, None, None, False)
    for name, value in zip(("mixer", "mlp"), normed, strict=True):
        rows = value.detach().bfloat16().flatten(0, -2)
        copies = {
            each.untyped_storage().data_ptr()
            for each in kept
            if each.dtype == torch.bfloat16
            and each.shape[-1] == 64
            and each.numel() == rows.numel()
            # A view of it for one map and not for another is the same copy.
            and torch.equal(each.detach().reshape(rows.shape), rows)
        }
        assert len(copies) == 1, f"{name}: {len(copies)} copies"


class Lines(Dataset[dict[str, list[int]]]):
    """Sequences in which every token is the one before it plus two."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        tokens = [(row + 2 * i) % VOCABULARY for i in range(12)]
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.filterwarnings("ignore")  # of libraries that the Trainer uses
def test_the_trainer_trains(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = make("gla+ccq", torch.float32, initializer_range=0.2, gate="presplit")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=30,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-2,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=30,
        save_strategy="steps",
        save_steps=30,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Lines(), eval_dataset=Lines())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] > 1.0 > 0.5 > losses[-1]
    predicted = trainer.predict(Lines())
    assert predicted.predictions.shape == (32, 12, VOCABULARY)
    kept = load_model(tmp_path / "checkpoint-30")
    sequence = torch.tensor([[(3 + 2 * i) % VOCABULARY for i in range(12)]])
    assert torch.equal(kept.generate(sequence[:, :4], max_new_tokens=8), sequence)
