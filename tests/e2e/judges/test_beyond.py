"""The table of what a model knows beyond its trained length: which losses and answers count where."""

from __future__ import annotations

from tests.e2e.judges.beyond import NEWEST, PLACES, TRAINED, table

CODES = 4


def test_a_loss_counts_in_its_part_of_the_text_and_a_code_where_it_is_asked_for() -> None:
    length = PLACES[-1]
    hidden = set(range(9_000, 9_010))
    ends = [length * (number + 1) // (CODES + 1) for number in range(CODES)]
    losses = [99.0 if at in hidden else at // PLACES[0] for at in range(1, length)]
    right = {str(place): [True] * sum(end <= place for end in ends) for place in PLACES[1:]}
    newest = [{"name": NEWEST, "begin": end - 2 * PLACES[0], "losses": [0.5] * (2 * PLACES[0])} for end in PLACES[2:]]
    lines = table([{"name": "way", "begin": 0, "losses": losses, "right": right}, *newest], hidden, ends)
    cells = {line.split(" | ")[0].lstrip("| "): line.strip(" |").split(" | ")[1:] for line in lines}
    assert cells["way"] == ["1.000", "2.000", "3.000", "2", "3", "4"]
    assert [cell.strip() for cell in cells[NEWEST][:3]] == ["", "0.500", "0.500"]
    assert sum(length - TRAINED < end for end in ends) == 2 == int(lines[3].strip(" |").split(" | ")[-1])


def test_a_shorter_text_has_fewer_columns() -> None:
    places = PLACES[:3]
    losses, right = [2.0] * (places[-1] - 1), {str(place): [True] for place in places[1:]}
    *_, row = table([{"name": "way", "begin": 0, "losses": losses, "right": right}], set(), [10], places)
    assert row == "| way | 2.000 | 2.000 | 1 | 1 |"
