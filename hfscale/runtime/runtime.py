"""A parallelized model at work: the parts of its layout, what runs its steps, and what both are handed.

Three classes that need each other. A :class:`Part` is one feature of a layout (tensor, experts, data, adapters, ...):
it is installed into the model once, and asked at fixed places whatever else there is. An :class:`Executor` runs the
microbatches of a step: one after the other, or through pipeline stages. The :class:`Runtime` is what the model
carries: its plan, its ranks, its executor, its parts; it names no axis. Building, training and saving loop over parts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from .._host.transformers.classes import class_name
from ..errors import ConfigError
from ..mesh import Mesh
from ..options import Options
from ..plan import ParameterPlan, Plan
from .batches import Microbatch
from .local_weights import LocalWeights
from .names import stock_name
from .objective import Objective, StepLoss
from .snapshot import Undo

_ATTRIBUTE = "_hfscale"

Batch = Mapping[str, Any]


class Part:
    """One feature of a layout, in one model. Every hook does nothing unless a part says otherwise.

    Attributes:
        masks_padding: whether it asks the attention mask which tokens are padding.
    """

    masks_padding = False

    def install(self, runtime: "Runtime", weights: LocalWeights | None) -> None:
        """Make the model, which has its local sizes, do this part's share of the work.

        Args:
            weights: what is to be put into a model on the meta device; ``None`` where they are in place.
        """

    def take_out(self, runtime: "Runtime", weights: LocalWeights) -> None:
        """After everything installed has been undone: add to ``weights`` what the model's own parameters lack."""

    def check_step(self, runtime: "Runtime", batches: Sequence[Batch]) -> None:
        """Refuse, by :class:`ConfigError`, the microbatches of a step for what this part cannot do with them."""

    def check_user_loss(self, runtime: "Runtime") -> None:
        """Refuse, by :class:`ConfigError`, a loss of the user's own: a sum over whole outputs, divided afterwards."""

    def own_tokens(self, runtime: "Runtime", batch: Microbatch) -> Microbatch:
        """What this rank computes of a microbatch that other ranks are given too."""
        return batch

    def around_step(
        self, runtime: "Runtime", microbatches: Sequence[Microbatch], train: bool
    ) -> AbstractContextManager[None]:
        """Within: all passes of one step over this rank's ``microbatches``."""
        return nullcontext()

    def loss_factor(self, runtime: "Runtime") -> float:
        """By what a loss is multiplied before its backward pass, on behalf of this part."""
        return 1.0

    def around_gradients(self, runtime: "Runtime") -> AbstractContextManager[None]:
        """Within: backward passes leave gradients; on leaving, those that are sums over ranks are whole."""
        return nullcontext()

    def around_interleaved(self, runtime: "Runtime", backward: bool) -> AbstractContextManager[None]:
        """Within: any number of passes of which some are under way at once, and no collective of this part's between
        their layers.
        """
        return nullcontext()

    def before_backward(self, runtime: "Runtime", last: bool) -> None:
        """A backward pass begins: the last of its step, or another."""

    def accumulate_late_gradients(self, runtime: "Runtime") -> None:
        """Gradients were made without autograd's hooks."""

    def after_microbatch(self, runtime: "Runtime") -> None:
        """The gradients of one of several microbatches are complete on this rank."""

    def release(self, runtime: "Runtime") -> None:
        """Give up what a forward pass keeps for a backward pass that does not come."""

    def begin_stage_pass(self, arrives: int | None, leaves: bool) -> None:
        """A pass through one pipeline stage begins: ``arrives`` tokens per sample come from another stage (``None`` on
        the first), and go on to another (``leaves``).
        """

    def end_stage_pass(self, runtime: "Runtime") -> None:
        """A pass through one stage ended, and its output goes on to another."""

    def local_tokens(self, tokens: int) -> int:
        """Of ``tokens`` per sample in the hidden states between blocks, how many this rank has while training."""
        return tokens

    def all_tokens(self, runtime: "Runtime", batch: Microbatch, own: Tensor) -> Tensor:
        """Of what this rank has made of each of its tokens, ``[b, s, ...]``, that of all tokens: after `own_tokens`."""
        return own

    def cuts_tokens(self, module: str) -> bool:
        """Whether the hidden states that a module of the layers reads now are this rank's tokens only."""
        return False

    def local_view(self, module: str) -> str | None:
        """Return, in words, what a hook on a module sees of its tokens in this pass; ``None``: all of them."""
        return None

    def check_model(self, runtime: "Runtime") -> None:
        """Refuse, by :class:`ConfigError`, what has become of the model since it was built, alike on every rank."""

    def as_built(self) -> AbstractContextManager[None]:
        """Within: the model has what was trained, to be saved, whatever was put in its place since."""
        return nullcontext()

    def save(self, runtime: "Runtime", directory: Path) -> bool:
        """Whether this part has written, in place of the model, what is to be saved of it; collective.

        Raises:
            ConfigError: the model cannot be saved as it is.
        """
        return False

    def stored_names(self, runtime: "Runtime") -> dict[str, str]:
        """Of what :meth:`save` writes in place of the model: names in its files -> names of parameters. Asked of the
        first rank.
        """
        return {}

    def write_configs(self, runtime: "Runtime", directory: Path) -> None:
        """Write what lies beside the weights that :meth:`save` writes."""

    def metrics(self, runtime: "Runtime") -> Mapping[str, float]:
        """Numbers about the training so far, alike on every rank."""
        return {}

    def before_state(self, runtime: "Runtime", resumed: bool) -> None:
        """The state of a run is about to be written, or has been read back."""

    def state(self, runtime: "Runtime") -> dict[str, Any]:
        """What a saved state holds of this part besides: plain data, which means the same in every layout."""
        return {}

    def put_state(self, runtime: "Runtime", state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` said; not asked where it said nothing."""


class Executor:
    """What runs the microbatches of a step.

    Attributes:
        under_way: whether gradients of earlier steps are still to come.
    """

    under_way = False

    def share_out(self, given: Sequence[Batch]) -> list[dict[str, Any]]:
        """The microbatches of a step."""
        raise NotImplementedError

    def uncut(self) -> AbstractContextManager[None]:
        """Within: batches are not cut into microbatches, where that can be."""
        return nullcontext()

    def fewest_rows(self) -> int:
        """Rows of the smallest batch that can be shared out."""
        return 1

    def passes_together(self, microbatches: int) -> int:
        """In how many passes of a step data ranks wait for each other: they must have the same number."""
        return microbatches

    def older_weights(self) -> Sequence[Tensor]:
        """Weights that microbatches under way were computed with, where the parameters have moved on."""
        return ()

    def waiting_gradients(self) -> Sequence[Tensor]:
        """Gradients that are in no parameter's ``.grad`` yet."""
        return ()

    def agrees(self, train: bool) -> bool:
        """Whether a step begins with an exchange between the ranks that share its batch."""
        return True

    def tell(self, train: bool) -> tuple[list[int], list[Tensor]]:
        """What this rank tells the others in that exchange: numbers on the host, and on the device."""
        return [], []

    def hear(self, told: list[list[int]]) -> None:
        """What each rank told, by rank."""

    def run(self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective, backward: bool) -> Tensor:
        """Forward passes over the microbatches; with ``backward``, gradients are in ``.grad`` afterwards.

        Args:
            model: what the caller calls: the runtime's, or what has been put around it (PEFT, ``torch.compile``).
            objective: makes the loss of each; the step's is their sum, over all distinct batches.

        Returns:
            the loss of the whole step, on every rank.
        """
        raise NotImplementedError

    def drain(self) -> Iterator[Tensor]:
        """Finish what is under way: see :func:`hfscale.drain`."""
        return iter(())

    def check_plain_call(self, call: str) -> None:
        """Refuse, by :class:`ConfigError`, what a loop of the user's own does with the model as a whole."""


_P = TypeVar("_P", bound=Part)


@dataclass
class Runtime:
    """The live state of one parallelized model.

    Attributes:
        model: the stock model itself, whatever wraps it now.
        plan: what became of its parameters.
        mesh: the ranks.
        options: what was asked for beside the layout.
        parts: the features of its layout, in the order in which they were installed.
        executor: what runs its steps.
        loss: the loss that steps are normalized for; ``None`` where the model keeps its own.
        restore: takes out of the model what makes it compute with other ranks; see :mod:`.snapshot`.
        steps: how many training steps have begun.
        keeps_small_updates: whether an optimizer was made that loses no small update of weights in 16 bits.
        run: the id of the run, which the states it saves have; empty before it saves or loads one.
    """

    model: Any
    plan: Plan
    mesh: Mesh
    options: Options
    parts: tuple[Part, ...]
    executor: Executor = field(default_factory=Executor)
    loss: StepLoss | None = None
    restore: Undo | None = None
    steps: int = 0
    keeps_small_updates: bool = False
    run: str = ""

    def attach(self) -> None:
        """Make this runtime findable from the model."""
        setattr(self.model, _ATTRIBUTE, self)

    def part(self, kind: type[_P]) -> _P | None:
        """The part of one kind; ``None`` where there is none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @contextmanager
    def around(self, context_of: Callable[[Part], AbstractContextManager[None]]) -> Iterator[None]:
        """Within a context of every part, the first one's outermost."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(context_of(part))
            yield

    def cuts_tokens(self, module: str) -> bool:
        """Whether the hidden states that a module of the layers reads now are this rank's tokens only."""
        return any(part.cuts_tokens(module) for part in self.parts)

    def local_view(self, module: str) -> str | None:
        """In words, what a hook on a module sees in this pass, if that is a part of it."""
        return next((seen for part in self.parts if (seen := part.local_view(module)) is not None), None)

    def check_model(self) -> None:
        """Look at the model before it is used: :class:`ConfigError`, where it is no longer what was built."""
        for part in self.parts:
            part.check_model(self)

    def release(self) -> None:
        """Give up what forward passes keep for backward passes that do not come: parameters are this rank's shards."""
        for part in self.parts:
            part.release(self)

    def loss_factor(self) -> float:
        """By what a loss is multiplied before its backward pass."""
        return math.prod(part.loss_factor(self) for part in self.parts)

    def sum_of_shares(self, total: Tensor) -> Tensor:
        """The loss of a step, of ranks' shares of it; of several stages, one has a share. In place."""
        for group in (*self.mesh.loss_groups, *self.mesh.groups("pp")):
            dist.all_reduce(total, group=group)
        return total

    def parameters(self) -> list[tuple[ParameterPlan, Tensor]]:
        """Every owned parameter that this rank holds with its plan, in the plan's order."""
        self.release()  # or gathered weights would be taken for them
        live = self.live_parameters()
        held = self.plan.local_names(self.mesh.ranks["pp"])
        return [(planned, live[held[planned.name]]) for planned in self.plan.owned() if planned.name in held]

    def live_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by all their names, those with adapters around them and the stock ones."""
        here = dict(self.model.named_parameters(remove_duplicate=False))
        return {**{stock_name(name): parameter for name, parameter in here.items()}, **here}

    def unplanned_parameters(self) -> list[str]:
        """Parameters that train and that the plan does not know: put into the model by others since."""
        trains = (name for name, parameter in self.model.named_parameters() if parameter.requires_grad)
        known = self.plan.by_name
        return [name for name in trains if name not in known and stock_name(name) not in known]

    def counts(self, planned: ParameterPlan) -> bool:
        """Whether this rank's stage is the one that counts an owned parameter; others may hold a copy."""
        return self.plan.primary_rank(planned.name) == self.mesh.ranks["pp"]

    def is_local(self, name: str) -> bool:
        """Whether this rank has a parameter or module of the layers, or of what is around them on one stage only."""
        return self.plan.is_local(self.mesh.ranks["pp"], name)


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a model that hfscale parallelized, seen through any wrapper.

    Raises:
        ConfigError: hfscale has not parallelized it.
    """
    found = find_runtime(model)
    if found is None:
        raise ConfigError(
            f"{class_name(model)} was not parallelized by hfscale: build it with hfscale.from_pretrained or "
            "hfscale.from_config, or pass it through hfscale.parallelize"
        )
    return found


def find_runtime(model: nn.Module) -> Runtime | None:
    """Like :func:`runtime_of`, ``None`` where there is none."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if _ATTRIBUTE in module.__dict__:
            found: Runtime = module.__dict__[_ATTRIBUTE]
            return found
    return None
