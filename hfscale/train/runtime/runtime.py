"""Define the runtime object of a parallelized model, and the interfaces of the layout's features and of the executor of
steps.

The :class:`Runtime` is attached to the model and holds its plan and its mesh, an executor and parts. A :class:`Part` is
the code of one feature (tensor, expert and data axes, adapters, ...): it is installed into the model once, and a step
calls its hooks. An :class:`Executor` runs the microbatches of a step: one after another, or through pipeline stages.
Building, training and saving loop over the parts. :class:`DataAxes`, :class:`ContextAxis` and :class:`SequenceAxis`
define the operations of one axis in a step; they do nothing if the axis has one rank. The classes refer to each other,
so they are in one file.
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
"""A hook: a method of :class:`Part` that does nothing unless a subclass implements it, such as ``Part.around_step``."""


class Part:
    """Implement one feature of a layout (an axis, adapters, ...) in one model. Steps, saves and builds of the model
    call its methods, called hooks, which do nothing by default.
    """

    masks_padding = False  # whether the part reads from the attention mask which tokens are padding
    is_logged = False  # whether a trainer logs the part's :meth:`metrics` with the loss
    state_key = ""  # the key of :meth:`state` in saved states; stays when the class is renamed

    def is_needed(self, runtime: "Runtime") -> bool:
        """Return whether this feature is used in the model, according to its plan and options; otherwise it is not
        installed.
        """
        return True

    def install(self, runtime: "Runtime", weights: LocalWeights | None) -> None:
        """Install this feature in the model, whose parameters already have their local shapes. ``weights``, if given,
        holds the values that the parameters get afterwards.
        """

    def take_out(self, runtime: "Runtime", weights: LocalWeights) -> None:
        """Finish undoing the installation of this feature, after hooks and replaced attributes were already removed.
        Weights that the feature keeps outside of the model's parameters are added to ``weights``.
        """

    def plan_without(self, runtime: "Runtime", live: Mapping[str, nn.Parameter]) -> Plan | None:
        """Return the model's plan without this feature if stock code has removed the feature (such as merged adapters)
        from the model, whose parameters are now ``live``. Return ``None`` if the feature is still in the model. Called
        only in one process.
        """
        return None

    def check_step(
        self, runtime: "Runtime", batches: Sequence[Batch], user_loss: bool = False
    ) -> None:
        """Raise :class:`ConfigError` if this feature cannot run the microbatches of a step. ``user_loss`` is whether
        the loss is a user's ``loss_fn``, which sums over full outputs and is divided after the backward pass.
        """

    def around_step(
        self, runtime: "Runtime", microbatches: Sequence[Microbatch], train: bool
    ) -> AbstractContextManager[None]:
        """Return a context manager that is active during a whole step, around all forward and backward passes over this
        rank's ``microbatches``. ``train`` is whether it is a training step.
        """
        return nullcontext()

    def loss_factor(self, runtime: "Runtime") -> float:
        """Return the factor by which this feature requires a loss to be multiplied before its backward pass (a loss
        scale, or the number of data ranks).
        """
        return 1.0

    def around_stage_pass(
        self, runtime: "Runtime", arrives: int | None, leaves: bool
    ) -> AbstractContextManager[None]:
        """Return a context manager that is active during one forward pass through a pipeline stage.

        Args:
            arrives: the number of tokens per sample in the hidden states that come from another stage; ``None`` on the
                first stage.
            leaves: whether hidden states are sent to another stage.
        """
        return nullcontext()

    def around_gradients(self, runtime: "Runtime") -> AbstractContextManager[None]:
        """Return a context manager that is active during the backward passes of a step; at its end, gradients of which
        each rank has only one term are summed over ranks.
        """
        return nullcontext()

    def around_interleaved(
        self, runtime: "Runtime", backward: bool
    ) -> AbstractContextManager[None]:
        """Return a context manager that is active while a pipeline schedule runs the passes of several microbatches in
        turn. Meanwhile, this feature must run no collective between layers.
        """
        return nullcontext()

    def local_view(self, module: str) -> str | None:
        """If a user's hook on ``module`` would get only this rank's shard of its inputs in the present forward pass,
        describe the shard for a warning; otherwise return ``None``.
        """
        return None

    def metrics(self, runtime: "Runtime") -> Mapping[str, float]:
        """Return this feature's numbers for the training log, by name, the same on every rank."""
        return {}

    def state(self, runtime: "Runtime") -> dict[str, Any]:
        """Return this feature's state for a saved run: plain data that is valid in every layout."""
        return {}

    def put_state(self, runtime: "Runtime", state: dict[str, Any]) -> None:
        """Restore this feature's state, as :meth:`state` returned it; not called if the state was empty."""


class Executor:
    """Run a step's microbatches one after another."""

    under_way = False  # whether microbatches of earlier steps are in flight
    # what ranks that share a batch exchange as they compare it; ``None``: nothing besides
    reports: "Reports | None" = None

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime

    def share_out(self, given: Sequence[Batch]) -> Sequence[Batch]:
        """Return the microbatches into which the batches given to a step are split; by default, these batches
        themselves.
        """
        return given

    def uncut(self) -> AbstractContextManager[None]:
        """Inside the ``with`` block, do not split given batches into microbatches, if the schedule allows it."""
        return nullcontext()

    def fewest_rows(self) -> int:
        """Return the smallest number of rows that a batch must have to be split into microbatches."""
        return 1

    def passes_together(self, microbatches: int) -> int:
        """Return how many passes of a step with this number of microbatches run collectives of data ranks; all ranks
        must run the same number of such passes.
        """
        return microbatches

    def older_weights(self) -> Sequence[Tensor]:
        """Return the copies of earlier weights that are kept for microbatches in flight, whose forward pass ran before
        the last update.
        """
        return ()

    def waiting_gradients(self) -> Sequence[Tensor]:
        """Return the gradients that this executor keeps and has not yet added to parameters' ``.grad``."""
        return ()

    def run(
        self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective, backward: bool
    ) -> Tensor:
        """Run the forward passes of a step over this rank's microbatches; with ``backward``, also the backward passes,
        which leave gradients in ``.grad``.

        ``model`` is the module to call: the parallelized model, or a wrapper of it (PEFT, ``torch.compile``).
        ``objective`` computes the loss of a microbatch. Return the loss of the whole step, the same on every rank: the
        sum over the microbatches of all distinct batches.
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
        """Finish the microbatches that are still in flight, and yield their losses: see :func:`hfscale.drain`."""
        return iter(())

    def check_plain_call(self, call: str) -> None:
        """Raise :class:`ConfigError` if a user's own loop cannot call the model directly, since pipeline stages run
        only in training steps. ``call`` names what the user called.
        """


class Reports(Protocol):
    """Exchange further numbers when a step begins with a comparison of the batches of ranks that share a batch."""

    def numbers_to_compare(self, train: bool) -> tuple[list[int], list[Tensor]]:
        """Return the numbers that this rank sends: integers, and tensors on a device."""
        ...

    def compare_numbers(self, told: list[list[int]]) -> None:
        """Check the numbers ``told`` by each rank, in the order of ranks."""
        ...


class DataAxes:
    """Define what a step needs of the data axes: reductions of gradients, and gathering of sharded parameters. By
    default, there is one data rank, and nothing to do.
    """

    def before_backward(self, last: bool) -> None:
        """Prepare for the backward pass of one microbatch. Gradients are reduced over data ranks in the ``last`` one of
        a step, or in every one if the layout says so (``reduce_each_microbatch``).
        """

    def accumulate_late_gradients(self) -> None:
        """Include gradients that a pipeline schedule computes separately from the backward pass of activations, where
        autograd calls no hooks, in the gradients to reduce.
        """

    def after_microbatch(self) -> None:
        """Reduce the gradients of the microbatch whose backward pass has ended, if the layout reduces gradients for
        each microbatch.
        """

    def release(self) -> None:
        """Free the full parameters that were gathered over data ranks, so that the model holds its shards again."""

    def as_shards(self) -> AbstractContextManager[None]:
        """Inside the ``with`` block, which writes into shards, hold only shards of the parameters. Afterwards, gather
        those parameters again that were gathered before.
        """
        return nullcontext()


class ContextAxis:
    """Define what a step needs of the context axis: sharding of sequences, and gathering of tokens. By default, there
    is one context rank, and nothing to do.
    """

    def shard_batch(self, batch: Microbatch) -> Microbatch:
        """Return the batch with this rank's tokens only, of sequences that are sharded over context ranks."""
        return batch

    def gather_tokens(self, batch: Microbatch, own: Tensor) -> Tensor:
        """All-gather a per-token output ``[b, s_local, ...]`` over context ranks into ``[b, s, ...]``, in the order of
        tokens.
        """
        return own

    def own_tokens(self, batch: Microbatch, whole: Tensor) -> Tensor:
        """Select this rank's tokens from a full per-token tensor ``[b, s, ...]``: the inverse of `gather_tokens`."""
        return whole


class SequenceAxis:
    """Define what a step needs of sequence parallelism, which shards hidden states between attention and MLP modules
    over tensor ranks. By default, they are not sharded.
    """

    def local_seqlen(self, tokens: int) -> int:
        """Return how many of the ``tokens`` of a sample this rank holds in the hidden states between attention and MLP
        modules, in training.
        """
        return tokens

    def is_seq_sharded(self, module: str) -> bool:
        """Return whether the module ``module`` of a layer gets only this rank's tokens in the present forward pass."""
        return False


class AdapterAxis(Protocol):
    """Define the interface by which other code reads the adapters that PEFT has added to a model."""

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
        """Map each key of PEFT's adapter files to the key of the same tensor in a saved state of hfscale."""
        ...

    def buffer_names(self) -> dict[str, str]:
        """Map the names of buffers in PEFT's wrappers on this rank to names that are the same on all ranks."""
        ...

    def read_saved(self, directory: str, runtime: "Runtime") -> dict[str, Tensor]:
        """Read a saved adapter from ``directory``, and return this rank's shards by name."""
        ...


class PromptAxis(Protocol):
    """Define how steps add a trained prompt (as in prompt tuning) to batches."""

    @property
    def tokens(self) -> int:
        """Return how many tokens the prompt puts in front of each row; 0 for prefixes, and while it is off."""
        ...

    def in_front(self, batch: Batch) -> Batch:
        """Return the batch with the prompt's tokens in front of each row."""
        ...

    def without(self, batch: Batch) -> Batch:
        """Return the batch without the tokens that :meth:`in_front` has put in front of each row."""
        ...


class RandomAxis:
    """Define how the random streams of ranks that get the same batch are synchronized: the ranks draw equal numbers
    (dropout of replicated values), or different numbers where they compute different values. By default, there is
    nothing to synchronize.
    """

    agreed = True  # whether the ranks have the same streams; otherwise they synchronize before the next step

    def synchronize(self, runtime: "Runtime") -> None:
        """Synchronize the streams, before the first training step and after the user's seeding; collective."""


class PassObserver:
    """Define the measurements that an optimizer makes in training passes between its steps, such as QK-clip's
    attention scores. By default, there are none.
    """

    needs_rows = ""
    """A text that completes the error for a rank whose batch has no rows: the optimizer's name, and why its
    measurements must not run on rows of padding. Empty if such batches are accepted.
    """

    def drop(self) -> None:
        """Drop the measurements since the optimizer's last step, because its next step is skipped."""


@dataclass
class Runtime:
    """Hold everything that hfscale knows of one parallelized model while it runs: plan, mesh, options, features and
    executor. It is an attribute of the model.
    """

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
    prompt: PromptAxis | None = None  # the prompt that the adapters train
    streams: RandomAxis = field(default_factory=RandomAxis)
    observer: PassObserver = field(default_factory=PassObserver)  # an optimizer's measurements
    # The id of the run, stored in its saved states; empty before it saves or loads one.
    run: str = ""
    stored_layout: Any = (
        None  # cache: the latest weight stream's tensors, and how transformers stores them
    )

    def __post_init__(self) -> None:
        self.executor, self.contents = Executor(self), ModuleContents(self.model)
        self._live = LiveParameters(self.model, self.contents)
        self._planned = self.plan  # the plan without parameters that were added later
        planned = self.plan.feature(OwnLossPlan)
        if planned is not None:
            self.loss = OwnLoss(planned, class_name(self.model))

    def named_buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the model's buffers as (name that is the same on all ranks, name on this rank, buffer). The names
        differ only in PEFT's wrappers.
        """
        names = {} if self.adapters is None else self.adapters.buffer_names()
        for name, buffer in self.model.named_buffers():
            yield names.get(name, name), name, buffer

    def attach(self) -> None:
        """Attach this runtime to the model, as an attribute by which :func:`find_runtime` finds it."""
        setattr(self.model, _ATTRIBUTE, self)
        self._live.by_name()  # record stock names now, before stock code changes modules

    def called_by(self, model: nn.Module) -> None:
        """Record that a caller passed ``model``, a module that contains the parallelized model, to an hfscale function.
        In one process, its other parameters are then trained and included in norms and saves.
        """
        if self.is_alone:
            self._live.look_around(model)

    @property
    def around_it(self) -> nn.Module:
        """Return the outermost module that a caller has passed as the model: a wrapper of the parallelized model, or
        the parallelized model itself.
        """
        return self._live.outermost

    @property
    def is_alone(self) -> bool:
        """Return whether this process holds the full model, and there are no other ranks."""
        return self.mesh.layout.total_size == 1

    def latecomers(self) -> tuple[str, ...]:
        """Return the names of parameters that were added to the model after planning. Only in one process; over several
        ranks, return none.
        """
        if not self.is_alone:
            return ()
        self.live_parameters()
        return tuple(
            planned.name for planned in self.plan.parameters[len(self._planned.parameters) :]
        )

    def part(self, kind: type[_P]) -> _P | None:
        """Return the installed feature of class ``kind``; ``None`` if it is not installed."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        return None

    @cached_property
    def forward_arguments(self) -> tuple[frozenset[str], bool]:
        """The names of the model's arguments, and whether it takes other named arguments."""
        return forward_arguments(stock_class(self.model).forward)

    def parts_with(self, hook: Hook) -> tuple[Part, ...]:
        """Return the installed features whose class implements the given hook of :class:`Part`, in the order of
        installation.
        """
        name = hook.__name__
        return tuple(part for part in self.parts if getattr(type(part), name) is not hook)

    @contextmanager
    def around(self, hook: Hook, *args: Any) -> Iterator[None]:
        """Enter the context managers that ``hook(runtime, *args)`` of all installed features return, in the order of
        installation.
        """
        with ExitStack() as stack:
            for part in self.parts_with(hook):
                context = getattr(part, hook.__name__)(self, *args)
                if not isinstance(context, nullcontext):
                    stack.enter_context(context)
            yield

    def run_step(
        self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective, backward: bool
    ) -> Tensor:
        """Run the passes of one step inside the context managers of all features: see :meth:`Executor.run`."""
        with self.around(Part.around_step, batches, backward):
            return self.executor.run(model, batches, objective, backward)

    def local_view(self, module: str) -> str | None:
        """If a user's hook on ``module`` would get only this rank's shard of its inputs in the present forward pass,
        describe the shard for a warning; otherwise return ``None``.
        """
        return next(
            (seen for part in self.parts if (seen := part.local_view(module)) is not None), None
        )

    def loss_factor(self) -> float:
        """Return the factor by which a loss is multiplied before its backward pass: the product of the factors that
        features require (a loss scale, the number of data ranks).
        """
        factor = 1.0
        for part in self.parts_with(Part.loss_factor):
            factor *= part.loss_factor(self)
        return factor

    def sum_of_shares(self, total: Tensor) -> Tensor:
        """Sum the terms of a step's loss that ranks have computed: all-reduce ``total`` in place over ranks with
        distinct batches or tokens, and over pipeline stages.
        """
        for group in self.mesh.groups_of_terms:
            dist.all_reduce(total, group=group)
        return total

    def parameters(self) -> list[tuple[ParameterPlan, Tensor]]:
        """Return the parameters that this rank holds, each with its plan, in the plan's order; a tied one is returned
        once, under its first name.
        """
        self.data.release()  # otherwise, gathered weights would be returned instead of FSDP2's shards
        live = self.live_parameters()
        held = self.plan.local_names(self.mesh.pp_rank)
        here = [planned for planned in self.plan.owned() if planned.name in held]
        if self.is_alone:  # stock code may have removed modules
            here = [planned for planned in here if held[planned.name] in live]
        return [(planned, live[held[planned.name]]) for planned in here]

    def live_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's present parameters by their names in the stock model, and also by their names with PEFT's
        wrappers.
        """
        live = self._live.by_name()
        if self.is_alone and self._live.changed():
            self._plan_anew(live)
        return live

    def _plan_anew(self, live: Mapping[str, nn.Parameter]) -> None:
        """Update the plan of a model in one process after stock code has changed the model: add new parameters, and
        drop a feature (adapters) that was removed.
        """
        for part in self.parts:
            if (rest := part.plan_without(self, live)) is not None:
                self.parts = tuple(other for other in self.parts if other is not part)
                self.adapters = None  # the only feature that stock code removes
                self._planned = rest
        from .latecomers import with_latecomers

        self.plan = with_latecomers(self._planned, live)

    def forget_parameters(self) -> None:
        """Drop all references to the model's parameters, since the sharding of the model was undone (`take_apart`)."""
        self._live.forget()

    @property
    def shares_casts(self) -> bool:
        """Return whether the microbatches in flight in a pipeline share one low-precision copy of each weight. Data
        ranks do not need this, because FSDP2 makes the copies.
        """
        staged = self.plan.stages is not None and self.mesh.data_world == 1
        return staged and self.options.mixed_precision != "no" and not self.options.casts_parameters

    def counts(self, planned: ParameterPlan) -> bool:
        """Return whether this rank's pipeline stage is the one that includes the parameter in norms and saves. If
        several stages hold the parameter (a tied embedding), only one of them does.
        """
        return self.plan.primary_rank(planned.name) == self.mesh.pp_rank

    def is_local(self, name: str) -> bool:
        """Return whether the parameter or module ``name`` belongs to a pipeline stage of this rank."""
        return self.plan.is_local(self.mesh.pp_rank, name)


def runtime_of(model: nn.Module) -> Runtime:
    """Return the runtime object of a model that hfscale has parallelized; ``model`` may also be a module that wraps it.
    Raise :class:`ConfigError` for other models.
    """
    runtime = find_runtime(model)
    if runtime is None and not hasattr(model, "config"):
        raise ConfigError(
            f"{class_name(model)} is not a model of transformers, and hfscale parallelizes only such models: leave it "
            "out of this call, and move it to the device yourself; over several ranks, average its gradients in the "
            "training loop"
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
    """Return the runtime object of a model that hfscale has parallelized, or of such a model inside ``model``; ``None``
    if there is none.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if _ATTRIBUTE in module.__dict__:
            return module.__dict__[_ATTRIBUTE]
    return None
