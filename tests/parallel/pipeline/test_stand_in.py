"""What answers for the parts of a model that are on another stage."""

import copy

import torch
from torch import nn

from hfscale.parallel.pipeline.stand_in import AbsentModule, StageForward


def test_children_answer_too() -> None:
    """Stock code may call what is inside of an absent module by itself: ModernVBERT calls a text model's embedding."""
    with torch.device("meta"):
        absent = nn.ModuleDict({"tokens": nn.Embedding(11, 4)})
    passage = StageForward(under_way=True, shape=(2, 3))
    stand_in = AbsentModule(absent, passage, None)
    assert stand_in.tokens is absent["tokens"]  # between steps it is what it is
    passage.arriving = torch.ones(2, 3, 4, dtype=torch.float64)
    found = stand_in.tokens(torch.zeros(2, 3, dtype=torch.long))
    assert torch.equal(found, torch.zeros(2, 3, 4, dtype=torch.float64))
    assert stand_in.tokens.num_embeddings == 11
    assert not list(stand_in.parameters())


def test_a_copy_answers_in_the_same_passage() -> None:
    """PEFT copies a head that is to be trained whole, on every stage."""
    passage = StageForward(under_way=True, shape=(1, 2), arriving=torch.ones(1, 2, 3))
    stand_in = AbsentModule(nn.Linear(3, 5, device="meta"), passage, None)
    copied = copy.deepcopy(stand_in)
    assert copied is not stand_in
    assert copied._modules is not stand_in._modules
    assert torch.equal(copied(torch.ones(1, 2, 3)), torch.zeros(1, 2, 3))
