"""What processes do together, in three of them under gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ccq.processes import Processes, processes
from tests.several import run_processes


class Stubborn(ValueError):
    """Cannot be made again from its message."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def meet(folder: Path) -> None:
    with processes() as group:
        found: dict[str, Any] = {
            "gathered": group.gather(lambda: group.rank**2),
            "first": group.from_first(lambda: group.rank + 7),
            "sum": group.sum([1, group.rank]),
        }
        for name, failing in (("one", {2}), ("some", {1, 2}), ("first", {0})):
            call = group.from_first if name == "first" else group.gather
            try:
                call(lambda failing=failing: _fail_in(failing, group))
            except ValueError as error:
                found[f"failed {name}"] = str(error)
        try:
            group.gather(lambda: _stubborn(group))
        except RuntimeError as error:
            found["stubborn"] = str(error)
        (folder / f"{group.rank}.json").write_text(json.dumps(found))


def _fail_in(ranks: set[int], group: Processes) -> int:
    if group.rank in ranks:
        raise ValueError(f"broken in {group.rank}")
    return group.rank


def _stubborn(group: Processes) -> None:
    if group.rank == 1:
        raise Stubborn("this", "that")


def test_three_processes_share_values_and_errors(tmp_path: Path) -> None:
    assert run_processes(3, meet, tmp_path, log=tmp_path / "log") == [0, 0, 0], (tmp_path / "log").read_text()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    expected = {
        "gathered": [0, 1, 4],
        "first": 7,
        "sum": [3, 3],
        "failed one": "broken in 2",
        "failed some": "broken in 1",
        "failed first": "broken in 0",
        "stubborn": "Stubborn: this and that",
    }
    assert found == [expected] * 3


def test_alone_nothing_is_communicated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with processes() as group:
        assert (group.rank, group.count, group.is_first) == (0, 1, True)
        assert group.gather(lambda: "a") == ["a"]
        assert group.from_first(lambda: "b") == "b"
        with pytest.raises(Stubborn, match="this and that"):
            group.gather(lambda: (_ for _ in ()).throw(Stubborn("this", "that")))
