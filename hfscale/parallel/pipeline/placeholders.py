"""Make a pipeline stage out of a stock model: replace the modules of other stages by placeholders.

A stage runs the stock model's full forward pass on the ids, masks and positions of the full batch, so that masks,
rotary tables and everything else around the layers are computed as in the stock model. Only the hidden states come from
the previous stage::

    stage 1 of 3, layers 2 and 3 of 6

    ids --embedding--> nothing --layer 0--> --layer 1--> --layer 2--> --layer 3--> --layer 4--> ... norm, head
    (placeholder)        (placeholders return the input)  (its own)  (placeholders take the output)  (placeholders)

Modules that no stage of a rank holds are replaced permanently, before weights are loaded. A rank with several stages
also replaces the modules of its other stages, but only during the forward pass of one stage.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.replaced import entries_replaced
from ..._compat.torch import own_modules, own_parameters
from ..._compat.transformers.hidden_states import hidden_states_of
from ...errors import ConfigError
from ...plan import Plan, Stage, StagePlan
from ...plan.drafting.boundary_modules import lend
from ...train.runtime.parameter_names import module_at


@dataclass
class StageForward:
    """Hold what the placeholders need to know about the running forward pass of a stage: what it received, and what it
    will send.
    """

    first: int = 0  # index of the stage's first layer; placeholders of earlier layers return the received hidden states
    # samples and tokens of the batch (of the encoder's input in encoder-decoders)
    shape: tuple[int, int] = (0, 0)
    under_way: bool = False  # whether a forward pass of the stage is running
    # hidden states from the previous stage; ``None`` on the first stage
    arriving: Tensor | None = None
    arrived: bool = False  # whether a placeholder has returned the received hidden states already
    leaving: Tensor | None = None  # hidden states after the stage's last layer, once computed
    border: int | None = None  # in encoder-decoders, the index of the decoder's first layer
    target: tuple[int, int] = (0, 0)  # samples and tokens of the decoder's input
    memory: Tensor | None = None  # the encoder's output

    def blank(self, target: bool, width: int | None) -> Tensor:
        """Return zeros ``[b, s, h]`` for all tokens of the encoder's input (with ``target``: of the decoder's input).

        The zeros are a new tensor, because stock code may scale them in place.
        """
        stream = next(
            tensor for tensor in (self.arriving, self.leaving, self.memory) if tensor is not None
        )
        shape = self.target if target else self.shape
        return torch.zeros(
            *shape, width or stream.shape[-1], dtype=stream.dtype, device=stream.device
        )

    def arrive(
        self, arrived: Tensor | None, source: tuple[int, int], target: tuple[int, int]
    ) -> None:
        """Begin a forward pass of a stage with the hidden states that it received.

        Args:
            arrived: the hidden states from the previous stage; ``None`` on the first stage.
            source: numbers of samples and of tokens of the encoder's input, or of a decoder-only model's input.
            target: numbers of samples and of tokens of the decoder's input.
        """
        self.shape = source
        self.target = target
        self.arriving = arrived
        if arrived is None or self.border is None or self.first < self.border:
            return
        self.memory = arrived if self.first == self.border else arrived[:, target[1] :]
        self.arriving = None if self.first == self.border else arrived[:, : target[1]]
        self.arrived = self.first == self.border

    def leave(self, stream: Tensor | None, index: int) -> None:
        """Record the hidden states that the stage sends: the input of the layer after its last layer. Later calls in a
        pass change nothing.
        """
        if self.leaving is not None:
            return
        if self.border is not None and index >= self.border:
            assert stream is not None
            assert self.memory is not None
            stream = (
                self.memory if index == self.border else torch.cat([stream, self.memory], dim=1)
            )
        self.leaving = stream


class _Placeholder(nn.Module):
    """Replace a module of another stage, without its parameters; other attributes are read from the original module."""

    def __init__(self, absent: nn.Module, passage: StageForward) -> None:
        super().__init__()
        self.__dict__.update(_absent=absent, _passage=passage)  # not registered as a submodule
        self.training = absent.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` without the module's hooks, which run only on the stage that holds the real module.

        Raises:
            ConfigError: the call is outside of a stage's pass.
        """
        if not self._passage.under_way:
            raise ConfigError(
                f"the {type(self._absent).__name__} is on another pipeline stage, so modules of the model (for example "
                "model.model) cannot be called by themselves: use hfscale.train_step(model, batch, loss_fn=...), "
                "hfscale.eval_step or hfscale.token_scores, which run all stages"
            )
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_absent", "_passage"):  # copy reads them before any attribute is set
            raise AttributeError(name)
        if name in own_modules(self):
            return own_modules(self)[name]
        attribute = getattr(self.__dict__["_absent"], name)
        passage = self.__dict__["_passage"]
        if isinstance(attribute, nn.Module) and not (
            passage.arriving is None and passage.leaving is None
        ):
            # Stock code may call a submodule of the replaced module directly.
            return PlaceholderModule(attribute, passage, None)
        return attribute

    def keep(self, path: str) -> None:
        """Keep one submodule, at ``path`` inside the replaced module: the placeholder holds it under the same path."""
        child, _, rest = path.partition(".")
        module = getattr(self._absent, child)
        if rest:
            inner = own_modules(self).setdefault(child, _Placeholder(module, self._passage))
            assert isinstance(inner, _Placeholder)
            inner.keep(rest)
        else:
            own_modules(self)[child] = module

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Placeholder":
        """Copy the placeholder; the copy shares the replaced module and the stage's state.

        PEFT makes such copies of a head that is trained in full.
        """
        for shared in (self._absent, self._passage):
            memo[id(shared)] = shared
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class PlaceholderLayer(_Placeholder):
    """Replace a layer of another stage.

    ``returns`` is the number of entries of the tuple that the layer returns, or ``None`` if it returns a tensor.
    """

    def __init__(
        self, absent: nn.Module, passage: StageForward, index: int, returns: int | None
    ) -> None:
        super().__init__(absent, passage)
        self.__dict__.update(_index=index, _returns=returns)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for a layer of another stage. For a layer before this stage, return the hidden states that the stage
        received; for a layer after it, record the stage's output.
        """
        passage: StageForward = self._passage
        stream: Tensor | None = hidden_states_of(args, kwargs)
        if self._index < passage.first:
            stream = passage.arriving
            passage.arrived = True
        else:
            passage.leave(stream, self._index)
        return _in_shape(stream, self._returns)


class PlaceholderModule(_Placeholder):
    """Replace a module of another stage that is not a layer: an embedding, the last norm, or the head."""

    def __init__(
        self, absent: nn.Module, passage: StageForward, returns: int | None, target: bool = False
    ) -> None:
        super().__init__(absent, passage)
        self.__dict__.update(_returns=returns, _target=target)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros of the shape of the module's output, whose values no result depends on."""
        passage: StageForward = self._passage
        # Stock code of encoder-decoders adds a bias to the head's output, so this output needs the right width.
        wide = passage.border is not None and isinstance(self._absent, nn.Linear)
        return _in_shape(
            passage.blank(self._target, self._absent.out_features if wide else None), self._returns
        )


def _in_shape(x: Tensor | None, returns: int | None) -> Any:
    return x if returns is None else (x, *(None for _ in range(returns - 1)))


def drop_other_stages(model: nn.Module, plan: Plan, rank: int) -> None:
    """Replace the modules that no stage of pipeline rank ``rank`` holds by placeholders; do nothing without stages."""
    if plan.stages is None:
        return
    passage = StageForward()
    for name, make in _boundary(plan.stages, passage).items():
        if any(stage.is_local(name) for stage in plan.stages.of_rank(rank)):
            continue
        owner, _, child = name.rpartition(".")
        holder = model.get_submodule(owner)
        if child in own_modules(holder):
            own_modules(holder)[child] = placeholder = make(holder.get_submodule(child))
            for loan in plan.stages.loans:
                if loan.lender == name and plan.is_local(rank, loan.name):
                    placeholder.keep(loan.name.removeprefix(f"{name}."))
        else:  # a parameter, not a module
            absent = holder.get_parameter(child)
            del own_parameters(holder)[child]
            setattr(holder, child, torch.zeros((), device="meta").expand(absent.shape))


def run_stages_apart(
    model: nn.Module, stages: StagePlan, own: tuple[Stage, ...]
) -> Callable[[Stage], Any]:
    """Prepare a model that holds the stages ``own`` to run one stage at a time.

    Return a function that takes a stage and returns a context manager, inside which the model runs this stage only.
    """
    passage = next(
        module._passage for module in model.modules() if isinstance(module, _Placeholder)
    )
    made = _boundary(stages, passage)
    swaps: dict[int, list[tuple[dict[str, Any], str, nn.Module]]] = {
        stage.index: [] for stage in own
    }
    for name, make in made.items():
        holders = [stage for stage in own if stage.is_local(name)]
        owner, _, child = name.rpartition(".")
        children = own_modules(model.get_submodule(owner))
        if holders and len(holders) < len(own) and child in children:
            placeholder = make(model.get_submodule(name))
            for stage in own:
                if stage not in holders:
                    swaps[stage.index].append((children, child, placeholder))
    # Lend to the stage's first layer of the list, unless this layer is the lender.
    for loan, stage in product(stages.loans, own):
        layers = [layer for layer in stage.layers if layer.rpartition(".")[0] == loan.layer_list]
        if layers and layers[0] != loan.lender:
            lend(loan, module_at(model, loan.name), module_at(model, layers[0]))
    active: list[Stage] = []
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def stage_forward(*args: Any, **kwargs: Any) -> Any:
        # Replaced inside forward, so that hooks on the model (FSDP's) find all modules of the rank.
        with entries_replaced(swaps[active[0].index]):
            return forward(*args, **kwargs)

    model.forward = stage_forward  # type: ignore[method-assign]
    places = stages.places
    if stages.stacks is not None:
        passage.border = places[stages.stacks.first]
        encoder = model.get_submodule(stages.stacks.encoder)
        encoder.register_forward_hook(lambda _, args, output: setattr(passage, "memory", output[0]))

    @contextmanager
    def running(stage: Stage) -> Iterator[StageForward]:
        active[:] = [stage]
        passage.first = places[stage.layers[0]]
        passage.arrived = False
        passage.leaving = None
        passage.under_way = True
        try:
            yield passage
        finally:
            active.clear()
            passage.arriving = passage.leaving = passage.memory = None
            passage.under_way = False

    return running


def _boundary(
    stages: StagePlan, passage: StageForward
) -> dict[str, Callable[[nn.Module], _Placeholder]]:
    """Return the function that makes a placeholder for a module, by the module's name, for each module that some stages
    lack.
    """
    returns = dict(stages.module_returns)
    places = stages.places
    stacks = stages.stacks
    # these modules are inside a layer, whose placeholder keeps them
    lent = {loan.name for loan in stages.loans}
    made: dict[str, Callable[[nn.Module], _Placeholder]] = {}
    for stage in stages.stages:
        for name in stage.layers:
            made[name] = functools.partial(
                PlaceholderLayer,
                passage=passage,
                index=places[name],
                returns=returns.get(name, stages.returns),
            )
        for name in (name for name in stage.modules if name not in lent):
            target = stacks is not None and not name.startswith(f"{stacks.encoder}.")
            made[name] = functools.partial(
                PlaceholderModule, passage=passage, returns=returns.get(name), target=target
            )
    return made
