"""Players who see a row but cannot tell its keys apart, to hold against the chance that a task states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from ccq.data.loader import IGNORE_INDEX
from ccq.data.recall import AssociativeRecall
from ccq.data.statements import STATE, HiddenStatements

Value = tuple[int, ...]
Player = Callable[[list[Value], list[Value]], Value]
"""Says one of the values that are not answered yet: all of them in the order of the row, and those of them that stand
behind the value answered just before in the same answer.
"""

PLAYERS: dict[str, Player] = {
    "most frequent": lambda left, behind: Counter(left).most_common()[0][0],
    "rarest": lambda left, behind: Counter(left).most_common()[-1][0],
    "first": lambda left, behind: left[0],
    "nearest to the question": lambda left, behind: left[-1],
    "next": lambda left, behind: (behind or left)[0],
}


def check_chance(task: HiddenStatements | AssociativeRecall, rows: int = 2000) -> None:
    """No player is right more often than chance, and one who draws on all that is known beside keys is as often."""
    asked_statements = getattr(task, "asked_statements", None)

    def knows_how_often(left: list[Value], behind: list[Value]) -> Value:
        """The next value that is stated as often as those asked."""
        counts = Counter(left)
        return next(value for value in behind or left if asked_statements in (None, counts[value]))

    batch = task.batch(seed=11, step=0, batch_size=rows)
    shares: dict[str, list[float]] = {name: [] for name in (*PLAYERS, "knows how often")}
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        said = [target for target in targets if target != IGNORE_INDEX]
        for name, player in (*PLAYERS.items(), ("knows how often", knows_how_often)):
            right = recall_answers(task, tokens, said, player) if isinstance(task, AssociativeRecall) else None
            shares[name].append(statement_answers(task, tokens, said, player) if right is None else right)
    for name, each in shares.items():
        error = 4 * np.std(each) / rows**0.5
        assert np.mean(each) <= task.chance + error, f"{name}: {np.mean(each)} where {task} says {task.chance}"
        if name == "knows how often":
            assert np.mean(each) >= task.chance - error, f"{name}: {np.mean(each)} where {task} says {task.chance}"


def recall_answers(task: AssociativeRecall, tokens: list[int], said: list[int], player: Player) -> float:
    """The share of answers that a player has right. No answer can be read in the row."""
    values = [(token,) for token in tokens[1 : 2 * task.pairs : 2]]
    return said.count(player(values, [])[0]) / len(said)


def statement_answers(task: HiddenStatements, tokens: list[int], said: list[int], player: Player) -> float:
    """The share of answer tokens that a player has right who goes on with a value once its first token is known."""
    size = task.value_tokens
    values = [tuple(tokens[at + 2 : at + 2 + size]) for at, token in enumerate(tokens) if token == STATE]
    answers = [tuple(said[at : at + size]) for at in range(0, len(said), size)]
    a_question = len(answers) // task.queries
    given: list[Value] = []
    right = 0
    for number, answer in enumerate(answers):
        left = [value for value in values if value not in given]
        behind = values[values.index(given[-1]) + 1 :] if number % a_question else []
        right += player(left, [value for value in behind if value in left])[0] == answer[0]
        going_on = next(value for value in left if value[0] == answer[0])
        right += sum(token == word for token, word in zip(going_on[1:], answer[1:], strict=True))
        given.append(answer)
    return right / len(said)
