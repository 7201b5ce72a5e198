"""What answers for the parts of a model that are on another stage."""

import copy

import torch
from torch import nn

from hfscale.parallel.pipeline.placeholders import PlaceholderModule, StageForward


def test_children_answer_too() -> None:
    """Stock code may call what is inside of an absent module by itself: ModernVBERT calls a text model's embedding."""
    with torch.device("meta"):
        absent = nn.ModuleDict({"tokens": nn.Embedding(11, 4)})
    passage = StageForward(under_way=True, shape=(2, 3))
    placeholder = PlaceholderModule(absent, passage, None)
    assert placeholder.tokens is absent["tokens"]  # between steps it is what it is
    passage.arriving = torch.ones(2, 3, 4, dtype=torch.float64)
    found = placeholder.tokens(torch.zeros(2, 3, dtype=torch.long))
    assert torch.equal(found, torch.zeros(2, 3, 4, dtype=torch.float64))
    assert placeholder.tokens.num_embeddings == 11
    assert not list(placeholder.parameters())


def test_a_copy_answers_in_the_same_passage() -> None:
    """PEFT copies a head that is to be trained whole, on every stage."""
    passage = StageForward(under_way=True, shape=(1, 2), arriving=torch.ones(1, 2, 3))
    placeholder = PlaceholderModule(nn.Linear(3, 5, device="meta"), passage, None)
    copied = copy.deepcopy(placeholder)
    assert copied is not placeholder
    assert copied._modules is not placeholder._modules
    assert torch.equal(copied(torch.ones(1, 2, 3)), torch.zeros(1, 2, 3))
