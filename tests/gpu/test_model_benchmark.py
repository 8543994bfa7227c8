"""What `ccq bench model` replays is the training step that it times eagerly."""

from __future__ import annotations

import copy

import pytest
import torch

from ccq.bench.measure import Card
from ccq.bench.model import _subject
from ccq.models import CCQForCausalLM, preset

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(autouse=True)
def as_users_have_it() -> None:
    """Filling what `torch.empty` returns would be part of every graph."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("arm", ["gla", "gla+ccq", "gated-deltanet+ccq"])
def test_replayed_steps_train_as_eager_ones(arm: str) -> None:
    card, config = Card(), preset(f"{arm}-tiny", vocab_size=50)
    model = CCQForCausalLM(config)
    eager, replayed = (_subject(copy.deepcopy(model), config, card.device) for _ in range(2))
    tokens = torch.randint(50, (2, 70), device=card.device)
    with replayed.recordable():
        replay = card.capture(lambda: replayed.step(tokens))
    # Three steps before the recording, which takes none itself.
    for _ in range(4):
        replay()
    for _ in range(7):
        eager.step(tokens)
    for name, value in eager.module.state_dict().items():
        assert torch.equal(value, replayed.module.state_dict()[name]), name


def test_a_step_that_waits_for_the_gpu_is_refused_and_spoils_nothing() -> None:
    card = Card()
    numbers = torch.arange(4.0, device=card.device)
    with pytest.raises(RuntimeError, match="synchronizing"):
        card.capture(lambda: numbers.sum().item())
    total = torch.zeros((), device=card.device)
    replay = card.capture(lambda: total.add_(numbers.sum()))
    replay()
    assert total.item() == 4 * 6
    torch.randn(3, device=card.device)  # torch's generator is as it was
