"""What a model is asked to go on from, of rows of every format."""

import pytest
from datasets import Dataset

from hfscale.recipes.pictures import samples
from hfscale.recipes.results import _ENVIRONMENT

SECTION = _ENVIRONMENT.get_template("samples.md")


class Numbers:
    """A tokenizer whose words are numbers."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(str(int(token)) for token in tokens)


ROWS = {
    "stream": ({"input_ids": list(range(100))}, range(32), range(32, 56)),
    "short": ({"input_ids": [5, 6, 7, 8, 9]}, [5, 6], [7, 8, 9]),
    "answered": (
        {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, -100]},
        [5, 6],
        [7, 8],
    ),
    "packed": (
        {
            "input_ids": [5, 6, 7, 5, 9],
            "labels": [-100, -100, 7, -100, 9],
            "position_ids": [0, 1, 2, 0, 1],
        },
        [5, 6],
        [7],
    ),
    "packed, one": (
        {"input_ids": [5, 6, 7], "labels": [-100, -100, 7], "position_ids": [0, 1, 2]},
        [5, 6],
        [7],
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_parts(kind: str) -> None:
    row, asked, wanted = ROWS[kind]
    data = Dataset.from_list([row]).with_format("torch")
    found = samples(Numbers(), data, ["a|b\nc"], ["d"])
    assert [sample[1:] for sample in found] == [
        (" ".join(map(str, asked)), " ".join(map(str, wanted)), "a|b\nc", "d")
    ]
    assert "<code>a&#124;b</code><br><code>c</code> | <code>d</code> |" in SECTION.render(
        shown=found
    )


def test_no_samples() -> None:
    assert samples(Numbers(), Dataset.from_list([{"input_ids": [1]}]), [], []) == []
    assert SECTION.render(shown=[]) == ""
