"""The settings of a comparison: everything that moves a figure, and the presets."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ccq.compare.training import Stage, TrainConfig
from ccq.data.tokenizer import Tokenizer
from ccq.models.configuration import ARMS, CCQConfig, parse_arm
from ccq.models.presets import preset as model_preset


@dataclass(frozen=True)
class CompareSettings:
    """One comparison. Equal settings give equal figures on one machine, but for the measured times."""

    preset: str
    """The preset these settings started from."""
    model: str
    """Scale of the model presets, see `ccq.models.presets`."""
    train: TrainConfig
    arms: tuple[str, ...] = ("gla", "gla+ccq", "gated-deltanet", "gated-deltanet+ccq")
    seeds: int = 1
    """Seeds 0 ... seeds - 1, the same for every arm."""
    text: str | None = None
    """Folder of text files; None reads the sources of Python's standard library."""
    max_characters: int = 4_000_000
    vocabulary: int = 512
    """Tokens of the BPE that is trained on the text, needle words included."""
    keys: int = 32
    values: int = 16
    multiples: tuple[int, ...] = (1, 2, 4)
    """Evaluated lengths, in training lengths."""
    windows: int = 200
    """Needle questions at each length, one a window."""
    depth_bins: int = 5
    perplexity_tokens: int = 65_536
    read_tokens: int = 8_192
    """Held-out tokens over which gate and correction are measured."""

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError(f"arms is empty; accepted: {', '.join(ARMS)}")
        for arm in self.arms:
            parse_arm(arm)
        repeated = sorted({arm for arm in self.arms if self.arms.count(arm) > 1})
        if repeated:
            raise ValueError(f"arms are named more than once: {', '.join(repeated)}")
        for name in ("seeds", "windows", "depth_bins", "perplexity_tokens", "read_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")

    def model_config(self, arm: str, tokenizer: Tokenizer) -> CCQConfig:
        """The model of an arm for a tokenizer, which a small corpus can leave with fewer tokens than were asked for."""
        return model_preset(
            f"{arm}-{self.model}", vocab_size=tokenizer.vocabulary_size, eos_token_id=tokenizer.separator
        )

    @property
    def lengths(self) -> list[int]:
        """Evaluated lengths in tokens."""
        return [multiple * self.train.training_length for multiple in self.multiples]

    def plan(self) -> list[tuple[str, str, int, int, int]]:
        """Task, arm, seed, steps and tokens of every run, in the order in which they start."""
        return [
            ("text", arm, seed, self.train.steps, self.train.tokens) for seed in range(self.seeds) for arm in self.arms
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values as JSON holds them."""
        values = dataclasses.asdict(self)
        values["arms"], values["multiples"] = list(self.arms), list(self.multiples)
        values["train"]["stages"] = [dataclasses.asdict(stage) for stage in self.train.stages]
        values["train"]["betas"] = list(self.train.betas)
        return values


PRESETS: dict[str, CompareSettings] = {
    # Four arms in a few minutes on two cores. Recall is learned on short windows in large batches, where a step sees
    # many questions, and then carried over to longer ones; starting at 256 tokens it does not appear in this time, and
    # with half of the first batches whether it does hangs on how the processor rounds.
    "tiny": CompareSettings(
        preset="tiny",
        model="tiny",
        train=TrainConfig(stages=(Stage(32, 64, 800), Stage(64, 16, 200), Stage(128, 8, 100), Stage(256, 8, 200))),
    ),
    # Every part of the job in seconds; nothing is learned.
    "smoke": CompareSettings(
        preset="smoke",
        model="tiny",
        train=TrainConfig(stages=(Stage(64, 8, 6),), warmup_steps=2, log_every=2),
        max_characters=200_000,
        windows=20,
        perplexity_tokens=1024,
        read_tokens=512,
    ),
}


def compare_preset(
    name: str, *, arms: tuple[str, ...] | None = None, seeds: int | None = None, text: Path | None = None
) -> CompareSettings:
    """The settings of preset `name`, with what is given replaced.

    Raises:
        ValueError: the preset or an arm is unknown, or `seeds` is not positive.
    """
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, list(PRESETS), 1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(f"unknown preset {name!r}{hint}; accepted: {', '.join(PRESETS)}")
    changes: dict[str, Any] = {"arms": arms, "seeds": seeds, "text": None if text is None else str(text.resolve())}
    return dataclasses.replace(PRESETS[name], **{key: value for key, value in changes.items() if value is not None})
