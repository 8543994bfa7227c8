"""The record of a training beside its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from ccq.models.training_record import TRAINING_FILE, read_training_record, write_training_record


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_training_record(folder, seed=3, steps=10, tokens=1280, settings={"optimizer": {"learning_rate": 0.01}})
    assert read_training_record(folder) == {
        "seed": 3,
        "steps": 10,
        "tokens": 1280,
        "settings": {"optimizer": {"learning_rate": 0.01}},
    }


def test_a_model_without_a_record_has_none(tmp_path: Path) -> None:
    assert read_training_record(tmp_path) is None
    assert read_training_record("organisation/name-of-the-hub") is None


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"seed": 1}', '{"seed": "x", "steps": 1, "tokens": 1, "settings": {}}']
)
def test_a_damaged_record_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / TRAINING_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"training\.json is damaged .*delete it"):
        read_training_record(tmp_path)
