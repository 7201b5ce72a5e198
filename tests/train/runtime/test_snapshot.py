"""What was done to a model between two looks is taken back; what others did in the meantime stays."""

import copy
from typing import Any

import torch
from torch import nn

from hfscale.train.runtime.snapshot import watch


class Doubled(nn.Linear):
    """A class in the place of the stock one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


def change(changed: nn.Sequential) -> list[str]:
    """Hooks, a class, a function in the place of ``forward``, an attribute with another value and a new one."""
    seen: list[str] = []

    def note(module: nn.Module, *_: Any) -> None:
        seen.append(type(module).__name__)

    changed[0].register_forward_hook(note)
    changed[0].register_forward_pre_hook(note, with_kwargs=True)
    changed[0].__class__ = Doubled
    changed[0].out_features = 7
    changed[0].added = "here"
    changed[1].forward = lambda x: x
    return seen


X = torch.arange(6.0).view(2, 3) - 2


def test_everything_is_taken_back() -> None:
    changed = model()
    stock = model()
    stop = watch(changed)
    seen = change(changed)
    undo = stop()
    assert not torch.equal(changed(X), stock(X))
    assert seen
    undo()
    seen.clear()
    assert torch.equal(changed(X), stock(X))
    assert not seen
    assert type(changed[0]) is nn.Linear
    assert changed[0].out_features == 3
    assert not hasattr(changed[0], "added")
    assert "forward" not in changed[1].__dict__


def test_what_others_do_stays() -> None:
    changed = model()
    others: list[str] = []
    changed[0].register_forward_hook(lambda *_: others.append("before"))
    stop = watch(changed)
    change(changed)
    undo = stop()
    changed[0].register_forward_hook(lambda *_: others.append("after"))
    changed[2].mine = 1
    changed.append(nn.Linear(2, 2))  # modules that came later are not looked at
    undo()
    changed(X)
    assert others == ["before", "after"]
    assert changed[2].mine == 1
    assert len(changed) == 4


def test_parameters_are_not_put_back() -> None:
    """They are the business of who takes a model apart."""
    changed = model()
    stop = watch(changed)
    weight = nn.Parameter(torch.zeros(3, 3))
    changed[0].weight = weight
    stop()()
    assert changed[0].weight is weight


def test_a_copy_takes_its_own_changes_back() -> None:
    changed = model()
    stop = watch(changed)
    change(changed)
    copied, undo = copy.deepcopy((changed, stop()))
    undo()
    assert type(copied[0]) is nn.Linear
    assert type(changed[0]) is Doubled
    assert torch.equal(copied(X), model()(X))
