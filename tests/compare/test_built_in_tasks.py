"""The built-in synthetic tasks: what can be had without their keys is what their chance says, and it is not much."""

from __future__ import annotations

import pytest
import torch
from tests.data.keyless import check_chance

from ccq.compare.grid import GridSettings, SyntheticTask
from ccq.data.recall import AssociativeRecall
from ccq.data.statements import HiddenStatements


def built_in(name: str) -> SyntheticTask:
    task = GridSettings.from_dict({"arms": ["gla"], "tasks": [name]}).task(name)
    assert isinstance(task, SyntheticTask)
    return task


@pytest.mark.parametrize("name", ["recall", "needle", "needles", "frequent-needle"])
def test_a_task_with_keys_needs_them(name: str) -> None:
    for _, task in built_in(name).settings:
        assert isinstance(task, (AssociativeRecall, HiddenStatements))
        assert task.chance < 0.4
        check_chance(task, rows=1000)


def test_settings_of_the_frequent_needle_differ_in_the_asked_key_alone() -> None:
    first, *others = (
        setting.task.batch(seed=4, step=0, batch_size=20) for setting in built_in("frequent-needle").settings
    )
    for other in others:
        assert torch.equal(first.inputs[:, :-1], other.inputs[:, :-1])
        assert (first.inputs[:, -1] != other.inputs[:, -1]).all()
