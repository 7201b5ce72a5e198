"""Make a stage out of a stock model: stand-ins for what it does not hold.

A stage runs the stock model's own code from beginning to end, with the whole batch's ids, masks and positions, so that
masks, rotary tables and whatever else lies around the layers come out as always. Only the stream comes from elsewhere::

    stage 1 of 3, layers 2 and 3 of 6

    ids --embedding--> nothing --layer 0--> --layer 1--> --layer 2--> --layer 3--> --layer 4--> ... norm, head
        (stand-in)            (stand-ins give what arrived)   (its own)   (stand-ins take it: it leaves)  (stand-ins)

What no stage of a rank holds is replaced for good, before anything is loaded; a rank with several stages swaps, for the
time of one stage's forward pass, what its other stages hold.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..._host.torch import own_modules, own_parameters
from ..._host.transformers.hidden_states import hidden_states_of
from ...plan import Plan, Stage, StagePlan


@dataclass
class Passage:
    """The forward pass of one stage that is under way.

    Attributes:
        first: index of the stage's first layer; the stand-ins of the layers before it give what arrived.
        shape: samples and tokens of the batch.
        arriving: the stream from the stage before; ``None`` on the first stage.
        arrived: whether it was taken.
        leaving: the stream behind the stage's last layer, once it has got there.
    """

    first: int = 0
    shape: tuple[int, int] = (0, 0)
    arriving: Tensor | None = None
    arrived: bool = False
    leaving: Tensor | None = None

    def blank(self) -> Tensor:
        """Zeros for all tokens, ``[b, s, h]``; the stream itself may be cut along the sequence.

        In memory of their own, which lives as long as the forward pass: stock code scales an embedding in place.
        """
        stream = self.leaving if self.arriving is None else self.arriving
        assert stream is not None  # stand-ins are in front of or behind the layers of another stage
        return torch.zeros(*self.shape, stream.shape[-1], dtype=stream.dtype, device=stream.device)


class _StandIn(nn.Module):
    """A module without parameters that answers for an absent one; other attributes are read from that."""

    def __init__(self, absent: nn.Module, passage: Passage) -> None:
        super().__init__()
        self.__dict__.update(_absent=absent, _passage=passage)  # not registered: it is nobody's child
        self.training = absent.training

    def __getattr__(self, name: str) -> Any:
        if name in ("_absent", "_passage"):  # asked for by copy, before there is anything here
            raise AttributeError(name)
        found, passage = getattr(self.__dict__["_absent"], name), self.__dict__["_passage"]
        if isinstance(found, nn.Module) and not (passage.arriving is None and passage.leaving is None):
            return AbsentModule(found, passage, None)  # which stock code calls by itself, past what holds it
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StandIn":
        """One more for the same absent module, in the same passage: PEFT copies heads that are to be trained whole."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        shared = {name: self.__dict__[name] for name in ("_absent", "_passage")}
        made.__dict__.update(copy.deepcopy({**self.__dict__, **dict.fromkeys(shared)}, memo) | shared)
        return made


class AbsentLayer(_StandIn):
    """For a layer of another stage; ``returns`` as in :class:`hfscale.plan.stages.StagePlan`."""

    def __init__(self, absent: nn.Module, passage: Passage, index: int, returns: int | None) -> None:
        super().__init__(absent, passage)
        self.__dict__.update(_index=index, _returns=returns)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What arrived, in front of the stage's layers; behind them, what it is given, which leaves."""
        passage: Passage = self._passage
        stream: Tensor | None = hidden_states_of(args, kwargs)
        if self._index < passage.first:
            stream, passage.arrived = passage.arriving, True
        elif passage.leaving is None:
            passage.leaving = stream
        return _in_shape(stream, self._returns)


class AbsentModule(_StandIn):
    """For what another stage has around its layers: an embedding, the last norm, the head."""

    def __init__(self, absent: nn.Module, passage: Passage, returns: int | None) -> None:
        super().__init__(absent, passage)
        self.__dict__.update(_returns=returns)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros; they are of no consequence."""
        passage: Passage = self._passage
        return _in_shape(passage.blank(), self._returns)


def _in_shape(x: Tensor | None, returns: int | None) -> Any:
    return x if returns is None else (x, *(None for _ in range(returns - 1)))


def leave_out(model: nn.Module, plan: Plan, rank: int) -> None:
    """Replace what no stage of pipeline rank ``rank`` holds by stand-ins. No-op for one rank."""
    if plan.stages is None:
        return
    passage = Passage()
    for name, make in _boundary(plan.stages, passage).items():
        if any(stage.is_local(name) for stage in plan.stages.of_rank(rank)):
            continue
        owner, _, child = name.rpartition(".")
        holder = model.get_submodule(owner)
        if child in own_modules(holder):
            own_modules(holder)[child] = make(holder.get_submodule(child))
        else:  # a parameter of the model's own
            absent = holder.get_parameter(child)
            del own_parameters(holder)[child]
            setattr(holder, child, torch.zeros((), device="meta").expand(absent.shape))


def passage_of(model: nn.Module) -> Passage:
    """What the stand-ins of a model share."""
    return next(module._passage for module in model.modules() if isinstance(module, _StandIn))


def run_stages_apart(model: nn.Module, stages: StagePlan, own: tuple[Stage, ...]) -> Callable[[Stage], Any]:
    """Prepare a model that holds the stages ``own`` to run one of them at a time.

    Returns:
        a context manager: within, the model's forward pass is that of the given stage.
    """
    passage = passage_of(model)
    made = _boundary(stages, passage)
    swaps: dict[int, list[tuple[dict[str, Any], str, nn.Module]]] = {stage.index: [] for stage in own}
    for name, make in made.items():
        holders = [stage for stage in own if stage.is_local(name)]
        owner, _, child = name.rpartition(".")
        children = own_modules(model.get_submodule(owner))
        if holders and len(holders) < len(own) and child in children:
            stand_in = make(model.get_submodule(name))
            for stage in own:
                if stage not in holders:
                    swaps[stage.index].append((children, child, stand_in))
    active: list[Stage] = []
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def stage_forward(*args: Any, **kwargs: Any) -> Any:
        # Inside of forward, so that hooks on the model (FSDP's) see all that the rank holds.
        swapped = [(children, child, children[child]) for children, child, _ in swaps[active[0].index]]
        for children, child, stand_in in swaps[active[0].index]:
            children[child] = stand_in
        try:
            return forward(*args, **kwargs)
        finally:
            for children, child, module in swapped:
                children[child] = module

    model.forward = stage_forward  # type: ignore[method-assign]
    firsts = {stage.index: int(stage.layers[0].rpartition(".")[2]) for stage in own}

    @contextmanager
    def running(stage: Stage) -> Iterator[Passage]:
        active[:] = [stage]
        passage.first, passage.arrived, passage.leaving = firsts[stage.index], False, None
        try:
            yield passage
        finally:
            active.clear()
            passage.arriving = passage.leaving = None

    return running


def _boundary(stages: StagePlan, passage: Passage) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Every module that is some stage's -> what makes a stand-in for it."""
    returns = dict(stages.module_returns)
    made: dict[str, Callable[[nn.Module], nn.Module]] = {}
    for stage in stages.stages:
        for name in stage.layers:
            index = int(name.rpartition(".")[2])
            made[name] = functools.partial(AbsentLayer, passage=passage, index=index, returns=stages.returns)
        for name in stage.modules:
            made[name] = functools.partial(AbsentModule, passage=passage, returns=returns.get(name))
    return made
