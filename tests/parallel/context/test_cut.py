"""A rank's part of a batch: by name, labels shifted first."""

import pytest
import torch

from hfscale import ConfigError
from hfscale.parallel.context.cut_batch import cut_batch

IDS = torch.arange(22).view(2, 11)
POSITIONS = torch.arange(11)[None]


def test_labels_are_shifted_before_they_are_cut() -> None:
    found = torch.full((2, 11), -1)
    for rank in range(2):
        whole, part = cut_batch({"input_ids": IDS, "labels": IDS}, 2, rank, 1, POSITIONS)
        assert torch.equal(part["input_ids"], IDS[:, whole.places()])
        assert torch.equal(part["position_ids"], whole.places()[None])
        found[:, whole.places()] = part["labels"]
    assert torch.equal(found[:, :-1], IDS[:, 1:])
    assert (found[:, -1] == -100).all()


def test_padding_and_documents_are_known_whole() -> None:
    mask = torch.ones_like(IDS)
    whole, part = cut_batch({"input_ids": IDS, "attention_mask": mask}, 2, 0, 1, POSITIONS)
    assert whole.padding is None
    assert "attention_mask" not in part
    mask[0, :2] = 0
    whole, part = cut_batch({"input_ids": IDS, "attention_mask": mask}, 2, 0, 1, POSITIONS)
    assert torch.equal(whole.padding, mask.bool())
    assert torch.equal(part["attention_mask"], mask[:, whole.places()])
    packed = torch.cat((torch.arange(4), torch.arange(7)))[None]
    whole, part = cut_batch({"input_ids": IDS, "position_ids": packed}, 2, 1, 1, POSITIONS)
    assert whole.documents.tolist() == [[0] * 4 + [1] * 7] * 2
    assert torch.equal(part["position_ids"], packed[:, whole.places()])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": IDS[:, :1]}, "sequences of 1 tokens are cut over cp_size=2"),
        ({"labels": IDS}, "whose shape gives its numbers of rows and tokens, got only labels"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 11, 11)},
            "attention_mask of 4 dims",
        ),
        (
            {"input_ids": IDS, "pixel_values": torch.ones(2, 3, 4)},
            r"pixel_values of shape \(2, 3, 4\) cannot be cut",
        ),
        ({"input_ids": IDS, "token_type_ids": IDS[:, :5]}, "token_type_ids"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cut_batch(batch, 2, 0, 1, POSITIONS)
