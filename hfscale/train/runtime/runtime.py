"""Define the runtime of a parallelized model, and the interfaces of its parts and its executor.

These classes depend on each other. A :class:`Part` is one feature of a layout (tensor, experts, data, adapters, ...):
it is installed into the model once, and its hooks are called at fixed places. An :class:`Executor` runs the
microbatches of a step: one after another, or through pipeline stages. The :class:`Runtime` is attached to the model and
holds its plan, mesh, executor and parts. Building, training and saving loop over parts. :class:`DataAxes`,
:class:`ContextAxis` and :class:`SequenceAxis` define the calls of a step to one axis, and do nothing if the axis has
one rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.transformers.classes import class_name, forward_arguments, stock_class
from ...config.options import Options
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...plan import ParameterPlan, Plan
from ...plan.feature_plans import OwnLossPlan
from .batches import Microbatch
from .module_contents import ModuleContents
from .objective import Objective, OwnLoss, StepLoss
from .parameter_names import LiveParameters
from .shards import LocalWeights
from .snapshot import Undo

_ATTRIBUTE = "_hfscale"
_P = TypeVar("_P", bound="Part")

Batch = Mapping[str, Any]
Hook = Callable[..., Any]
"""A method of :class:`Part` that subclasses may implement, such as ``Part.around_step``."""


class Part:
    """Implement one feature of a layout in one model. Hooks do nothing by default."""

    masks_padding = False  # whether the part reads from the attention mask which tokens are padding
    is_logged = False  # whether a trainer logs the part's :meth:`metrics` with the loss
    state_key = ""  # the key of :meth:`state` in saved states; stays when the class is renamed

    def is_needed(self, runtime: "Runtime") -> bool:
        """Return whether the plan or an option requests this feature; otherwise the runtime omits the part."""
        return True

    def install(self, runtime: "Runtime", weights: LocalWeights | None) -> None:
        """Install this feature in the model, which has local sizes; ``weights``, if given, are set afterwards."""

    def take_out(self, runtime: "Runtime", weights: LocalWeights) -> None:
        """Add weights that are not among the model's parameters to ``weights``, after the installation was undone."""

    def plan_without(self, runtime: "Runtime", live: Mapping[str, nn.Parameter]) -> Plan | None:
        """Return the plan without this feature if stock code has removed the feature from a model, whose parameters are
        now ``live``; ``None`` if the feature is still in the model. Called only in one process.
        """
        return None

    def check_step(
        self, runtime: "Runtime", batches: Sequence[Batch], user_loss: bool = False
    ) -> None:
        """Raise :class:`ConfigError` if this part cannot run the microbatches of a step. ``user_loss`` is whether the
        loss is a user's ``loss_fn``, which sums over full outputs and is divided after the backward pass.
        """

    def around_step(
        self, runtime: "Runtime", microbatches: Sequence[Microbatch], train: bool
    ) -> AbstractContextManager[None]:
        """Wrap all passes of one step over this rank's ``microbatches``."""
        return nullcontext()

    def loss_factor(self, runtime: "Runtime") -> float:
        """Return this part's factor on a loss before its backward pass."""
        return 1.0

    def around_stage_pass(
        self, runtime: "Runtime", arrives: int | None, leaves: bool
    ) -> AbstractContextManager[None]:
        """Wrap one forward pass through a pipeline stage: ``arrives`` is the number of tokens per sample that come from
        another stage (``None`` on the first stage), and ``leaves`` is whether hidden states are sent to another stage.
        """
        return nullcontext()

    def around_gradients(self, runtime: "Runtime") -> AbstractContextManager[None]:
        """Wrap the backward passes of a step; at the end, reduce gradients that are partial over ranks."""
        return nullcontext()

    def around_interleaved(
        self, runtime: "Runtime", backward: bool
    ) -> AbstractContextManager[None]:
        """Wrap several passes in flight at once, during which this part must run no collective between layers."""
        return nullcontext()

    def local_view(self, module: str) -> str | None:
        """Describe the tokens that a hook on a module reads in this pass; ``None``: all tokens."""
        return None

    def metrics(self, runtime: "Runtime") -> Mapping[str, float]:
        """Return numbers about the training so far, the same on every rank."""
        return {}

    def state(self, runtime: "Runtime") -> dict[str, Any]:
        """Return this part's own state for a saved run: plain data that is valid in every layout."""
        return {}

    def put_state(self, runtime: "Runtime", state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state` returned; not called if the returned state was empty."""


class Executor:
    """Run a step's microbatches one after another."""

    under_way = False  # whether microbatches of earlier steps are in flight
    # what ranks that share a batch exchange as they compare it; ``None``: nothing besides
    reports: "Reports | None" = None

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime

    def share_out(self, given: Sequence[Batch]) -> Sequence[Batch]:
        """Return the microbatches of a step, by default the given batches."""
        return given

    def uncut(self) -> AbstractContextManager[None]:
        """Avoid splitting batches into microbatches inside the ``with`` block, if possible."""
        return nullcontext()

    def fewest_rows(self) -> int:
        """Return the number of rows of the smallest batch that can be split into microbatches."""
        return 1

    def passes_together(self, microbatches: int) -> int:
        """Return the number of passes per step in which data ranks run collectives, which must be equal on all
        ranks.
        """
        return microbatches

    def older_weights(self) -> Sequence[Tensor]:
        """Return the stashed weights for microbatches in flight that began before the last update."""
        return ()

    def waiting_gradients(self) -> Sequence[Tensor]:
        """Return gradients that have not yet been added to a parameter's ``.grad``."""
        return ()

    def run(
        self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective, backward: bool
    ) -> Tensor:
        """Run forward passes over the microbatches; with ``backward``, leave gradients in ``.grad``. Return the loss of
        the whole step, on every rank: the sum of ``objective`` over the microbatches of all distinct batches. ``model``
        is the module that is called: the runtime's model, or a wrapper around it (PEFT, ``torch.compile``).
        """
        run = self._train if backward else self._evaluate
        return self._runtime.sum_of_shares(run(model, batches, objective))

    def _train(
        self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective
    ) -> Tensor:
        runtime = self._runtime
        total: Tensor | None = None
        with runtime.around(Part.around_gradients):
            for index, batch in enumerate(batches):
                runtime.data.before_backward(last=index == len(batches) - 1)
                loss = objective.loss(model, batch, index)
                (loss * runtime.loss_factor()).backward()
                total = loss.detach() if total is None else total + loss.detach()
        assert total is not None  # every step has a microbatch
        return total

    def _evaluate(
        self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective
    ) -> Tensor:
        total = sum(objective.loss(model, batch, index) for index, batch in enumerate(batches))
        self._runtime.data.release()
        return torch.as_tensor(total, device=self._runtime.mesh.device)

    def drain(self) -> Iterator[Tensor]:
        """Finish the microbatches in flight: see :func:`hfscale.drain`."""
        return iter(())

    def check_plain_call(self, call: str) -> None:
        """Raise :class:`ConfigError` if a user's own loop cannot call the model directly."""


class Reports(Protocol):
    """Exchange further numbers when a step begins with a comparison of the batches of ranks that share a batch."""

    def numbers_to_compare(self, train: bool) -> tuple[list[int], list[Tensor]]:
        """Return the numbers that this rank sends: integers, and tensors on a device."""
        ...

    def compare_numbers(self, told: list[list[int]]) -> None:
        """Check the numbers ``told`` by each rank, in the order of ranks."""
        ...


class DataAxes:
    """Reduce gradients and shard parameters over the data axes."""

    def before_backward(self, last: bool) -> None:
        """Prepare for a backward pass; gradients are reduced in the ``last`` backward pass of a step."""

    def accumulate_late_gradients(self) -> None:
        """Add up gradients that were computed without autograd's hooks."""

    def after_microbatch(self) -> None:
        """Reduce the gradients of one of several microbatches, if the layout requires it."""

    def release(self) -> None:
        """Free gathered parameters that forward passes keep for backward passes, so that parameters are shards
        again.
        """

    def as_shards(self) -> AbstractContextManager[None]:
        """Release gathered parameters for a ``with`` block that writes into shards, and gather the same parameters
        again afterwards.
        """
        return nullcontext()


class ContextAxis:
    """Shard the sequences of a batch over the context axis."""

    def shard_batch(self, batch: Microbatch) -> Microbatch:
        """Return this rank's shard of the sequences in ``batch``."""
        return batch

    def gather_tokens(self, batch: Microbatch, own: Tensor) -> Tensor:
        """All-gather a per-token output ``[b, s_local, ...]`` into ``[b, s, ...]``: the inverse of `shard_batch`."""
        return own

    def own_tokens(self, batch: Microbatch, whole: Tensor) -> Tensor:
        """Return this rank's tokens of ``whole [b, s, ...]``: the inverse of `gather_tokens`."""
        return whole


class SequenceAxis:
    """Shard the hidden states between blocks over the tensor axis (sequence parallelism)."""

    def local_seqlen(self, tokens: int) -> int:
        """Return how many of ``tokens`` per sample this rank has in the hidden states between blocks in training."""
        return tokens

    def is_seq_sharded(self, module: str) -> bool:
        """Return whether a module of the layers processes only this rank's tokens in the present forward pass."""
        return False


class AdapterAxis(Protocol):
    """Define the interface to the adapters that PEFT has added to a model."""

    peft_model: Any  # PEFT's model around this rank's model
    whole: Any  # PEFT's model around the full model, on the meta device
    stock_plan: Plan  # the plan without adapters
    source: (
        str | None
    )  # the path or Hub id of the saved adapter from which they were loaded, if any

    @property
    def name(self) -> str:
        """Return PEFT's name of the active adapter; of several active adapters, the first one's name."""
        ...

    @property
    def names(self) -> list[str]:
        """Return PEFT's names of all adapters."""
        ...

    def stored_names(self, runtime: "Runtime") -> dict[str, str]:
        """Map the keys of PEFT's file to the keys of the same tensors in a saved state."""
        ...

    def buffer_names(self) -> dict[str, str]:
        """Map this rank's names of the wrappers' buffers to names that are equal on all ranks."""
        ...

    def read_saved(self, directory: str, runtime: "Runtime") -> dict[str, Tensor]:
        """Return this rank's shards of a saved adapter."""
        ...

    def in_front(self, runtime: "Runtime", batch: Batch) -> Batch:
        """Return a batch with the tokens of a prompt in front of its rows, if the adapter is a prompt."""
        ...

    def without_prompt(self, runtime: "Runtime", batch: Batch) -> Batch:
        """Return a batch without the tokens of a prompt in front of its rows."""
        ...

    def tokens_in_front(self, runtime: "Runtime") -> int:
        """Return how many tokens a prompt adds in front of each row."""
        ...


class RandomAxis(Protocol):
    """Synchronize random streams of ranks that share a batch: they draw equal numbers, or different numbers where the
    ranks compute different values.
    """

    agreed: bool  # whether the ranks have the same streams; otherwise they synchronize before the next step

    def synchronize(self, runtime: "Runtime") -> None:
        """Synchronize the streams, before the first training step and after the user's seeding; collective."""


class PassObserver(Protocol):
    """Define the interface of an optimizer's measurements in the training passes between two of its steps."""

    needs_rows: str
    """For an error: a text that names the optimizer, and why a rank without rows must not compute on padding."""

    def drop(self) -> None:
        """Drop the measurements, because the step is skipped."""


@dataclass
class Runtime:
    """Hold the live state of one parallelized model."""

    model: Any  # the stock model itself, even if it is wrapped now
    plan: Plan
    mesh: Mesh
    options: Options  # the user's choices in addition to the layout
    parts: tuple[Part, ...]  # the features of the layout, in the order of installation
    # Runs the steps: a loop by default; pipeline stages install their own executor.
    executor: Executor = field(init=False)
    # the operations of the data, context and tensor axes in a step; they do nothing if the axis has one rank
    data: DataAxes = field(default_factory=DataAxes)
    context: ContextAxis = field(default_factory=ContextAxis)
    sequence: SequenceAxis = field(default_factory=SequenceAxis)
    # The loss for which steps are normalized; ``None`` if the model keeps its own loss.
    loss: StepLoss | None = None
    # Removes everything from the model that makes it compute with other ranks; see :mod:`.snapshot`.
    restore: Undo | None = None
    steps: int = 0  # number of training steps that have begun
    compiled: bool | str = (
        False  # how the layers are compiled now; values are those of :attr:`Options.compile`
    )
    # Whether the optimizer preserves small updates of 16-bit weights.
    keeps_small_updates: bool = False
    adapters: AdapterAxis | None = None
    streams: RandomAxis | None = None
    observer: PassObserver | None = None  # an optimizer's measurements of training passes
    # The id of the run, stored in its saved states; empty before it saves or loads one.
    run: str = ""
    stored_layout: Any = (
        None  # cache: the latest weight stream's tensors, and how transformers stores them
    )

    def __post_init__(self) -> None:
        self.executor, self.contents = Executor(self), ModuleContents(self.model)
        self._live = LiveParameters(self.model, self.contents)
        self._planned = self.plan  # the plan without parameters that were added later
        self._parts_seen = self.parts
        self._implementing = dict[str, tuple[Part, ...]]()  # hook -> the parts that implement it
        planned = self.plan.feature(OwnLossPlan)
        if planned is not None:
            self.loss = OwnLoss(planned, class_name(self.model))

    def named_buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the model's buffers, each with its common name on all ranks and its name on this rank."""
        names = {} if self.adapters is None else self.adapters.buffer_names()
        for name, buffer in self.model.named_buffers():
            yield names.get(name, name), name, buffer

    def attach(self) -> None:
        """Set this runtime as an attribute of the model, where :func:`find_runtime` finds it."""
        setattr(self.model, _ATTRIBUTE, self)
        self._live.by_name()  # record stock names now, before stock code changes modules

    def called_by(self, model: nn.Module) -> None:
        """Record ``model``, a module around the runtime's model; in one process, its parameters are then trained and
        counted.
        """
        if self.mesh.layout.total_size == 1:
            self._live.look_around(model)

    @property
    def around_it(self) -> nn.Module:
        """Return the outermost module that a caller has passed in place of the model, or the model itself."""
        return self._live.outermost

    def latecomers(self) -> tuple[str, ...]:
        """Return the names of parameters that were added to the model after planning; only in one process."""
        if self.mesh.layout.total_size > 1:
            return ()
        self.live_parameters()
        return tuple(
            planned.name for planned in self.plan.parameters[len(self._planned.parameters) :]
        )

    def part(self, kind: type[_P]) -> _P | None:
        """Return the part of a class; ``None`` if there is none."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        return None

    @cached_property
    def forward_arguments(self) -> tuple[frozenset[str], bool]:
        """The names of the model's arguments, and whether it takes other named arguments."""
        return forward_arguments(stock_class(self.model).forward)

    def parts_with(self, hook: Hook) -> tuple[Part, ...]:
        """Return the parts whose class implements a hook of :class:`Part`, in order: few of them, for most hooks."""
        if self._parts_seen is not self.parts:  # stock code has removed a part
            self._parts_seen = self.parts
            self._implementing.clear()
        name = hook.__name__
        if name not in self._implementing:
            self._implementing[name] = tuple(
                part for part in self.parts if getattr(type(part), name) is not hook
            )
        return self._implementing[name]

    @contextmanager
    def around(self, hook: Hook, *args: Any) -> Iterator[None]:
        """Enter the context that each part's ``hook(runtime, *args)`` returns, the first part's outermost."""
        with ExitStack() as stack:
            for part in self.parts_with(hook):
                context = getattr(part, hook.__name__)(self, *args)
                if not isinstance(context, nullcontext):
                    stack.enter_context(context)
            yield

    def run_step(
        self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective, backward: bool
    ) -> Tensor:
        """Run the passes of one step, with every part around them: see :meth:`Executor.run`."""
        with self.around(Part.around_step, batches, backward):
            return self.executor.run(model, batches, objective, backward)

    def local_view(self, module: str) -> str | None:
        """Describe the tokens that a hook on a module reads in this pass; ``None``: all tokens."""
        return next(
            (seen for part in self.parts if (seen := part.local_view(module)) is not None), None
        )

    def loss_factor(self) -> float:
        """Return the factor on a loss before its backward pass."""
        factor = 1.0
        for part in self.parts_with(Part.loss_factor):
            factor *= part.loss_factor(self)
        return factor

    def sum_of_shares(self, total: Tensor) -> Tensor:
        """All-reduce a step's loss in place over the ranks that have a term of the loss, and over pipeline stages."""
        for group in self.mesh.groups_of_terms:
            dist.all_reduce(total, group=group)
        return total

    def parameters(self) -> list[tuple[ParameterPlan, Tensor]]:
        """Return every owned parameter that this rank holds, with its plan, in plan order."""
        self.data.release()  # otherwise, gathered weights would be returned instead of FSDP2's shards
        live = self.live_parameters()
        held = self.plan.local_names(self.mesh.pp_rank)
        here = [planned for planned in self.plan.owned() if planned.name in held]
        if self.mesh.layout.total_size == 1:  # stock code may have removed modules
            here = [planned for planned in here if held[planned.name] in live]
        return [(planned, live[held[planned.name]]) for planned in here]

    def live_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their stock names and by their names with PEFT's wrappers."""
        live = self._live.by_name()
        if self.mesh.layout.total_size == 1 and self._live.changed():
            self._plan_anew(live)
        return live

    def _plan_anew(self, live: Mapping[str, nn.Parameter]) -> None:
        """Update the plan of a model in one process: add parameters that stock code has added, and drop removed
        features.
        """
        for part in self.parts:
            if (rest := part.plan_without(self, live)) is not None:
                self.parts = tuple(other for other in self.parts if other is not part)
                self.adapters = None  # the only feature that stock code removes
                self._planned = rest
        from .latecomers import with_latecomers

        self.plan = with_latecomers(self._planned, live)

    def forget_parameters(self) -> None:
        """Drop all references to parameters, called when `take_apart` undoes the sharding of the model."""
        self._live.forget()

    @property
    def shares_casts(self) -> bool:
        """Return whether microbatches in flight share one low-precision copy of each weight (FSDP2 makes its own
        copies).
        """
        staged = self.plan.stages is not None and self.mesh.data_world == 1
        return staged and self.options.mixed_precision != "no" and not self.options.casts_parameters

    def counts(self, planned: ParameterPlan) -> bool:
        """Return whether this rank's stage is the stage that counts a parameter (for example in norms), because several
        stages may hold a copy of the parameter.
        """
        return self.plan.primary_rank(planned.name) == self.mesh.pp_rank

    def is_local(self, name: str) -> bool:
        """Return whether a parameter or module of the given name is on this rank's stages."""
        return self.plan.is_local(self.mesh.pp_rank, name)


def runtime_of(model: nn.Module) -> Runtime:
    """Return the runtime of a model that hfscale parallelized, through any wrapper; raise :class:`ConfigError` for
    other models.
    """
    runtime = find_runtime(model)
    if runtime is None and not hasattr(model, "config"):
        raise ConfigError(
            f"{class_name(model)} is no model of transformers, and hfscale parallelizes only those: leave it out of "
            "this call, and move it to the device yourself; over ranks, average its gradients in the loop"
        )
    if runtime is None:
        raise ConfigError(
            f"{class_name(model)} was not parallelized by hfscale: build it with hfscale.from_pretrained or "
            "hfscale.from_config, or pass it through hfscale.parallelize"
        )
    if model is not runtime.model:
        runtime.called_by(model)
    return runtime


def find_runtime(model: nn.Module) -> Runtime | None:
    """Return the runtime of a model like :func:`runtime_of`, or ``None`` if there is none."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if _ATTRIBUTE in module.__dict__:
            return module.__dict__[_ATTRIBUTE]
    return None
