"""Let pipeline stages agree, before a step, on which stages train and on the state of tied tensors.

Each step begins with one exchange of integers between ranks, in which every rank reports this list::

    [its index in its stage | per stage: does it train? | per tied tensor: its state | per tied tensor: sum of its bits]

Ranks of different stages with the same index hold the same shards of tied tensors. The state of a tied tensor says
whether the rank has it, whether it trains or is frozen, and whether this has changed since the last step. The sums are
computed on the device, and the exchange appends them to the numbers from the CPU.

A tied tensor, for example an embedding on the first stage that is the head's weight on the last stage, has a copy on
several stages. Every copy gets the sum of the gradients of all copies. Copies that start equal therefore stay equal
under any optimizer that works elementwise or tensor by tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.torch import has_accumulation_hook
from ...errors import ConfigError
from ...train.runtime import Runtime, local_tensor
from ...train.runtime.shards import gradients_aside

# states of a tied tensor; _CHANGED is added if requires_grad changed
_ABSENT = 0
_FROZEN = 1
_TRAINS = 2
_CHANGED = 2

# bytes of an entry -> the integer dtype of the same width
_INTEGERS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}


@dataclass(frozen=True)
class _Report:
    # ranks of different stages with the same number hold the same shards of tied tensors
    rank_in_stage: int
    trains: list[int]  # per stage, whether an untied parameter of this rank trains in it
    # per tied tensor, :data:`_ABSENT`, :data:`_FROZEN` or :data:`_TRAINS`, plus :data:`_CHANGED` if it changed since
    # the last step
    ties: list[int]
    sums: list[int]  # per tied tensor, the sum of its bits


class StageAgreement:
    """Exchange with all other stages, before a step, which stages train, and the state of tied tensors."""

    def __init__(self, runtime: Runtime) -> None:
        assert runtime.plan.stages is not None
        self._runtime = runtime
        self._stages = runtime.plan.stages
        # name of an owned parameter -> the parameter's name on this rank
        self._held = runtime.plan.local_names(runtime.mesh.pp_rank)
        owned = [planned.name for planned in runtime.plan.owned()]
        self._tied = [name for name in owned if len(runtime.plan.holders(name)) > 1]
        live = runtime.live_parameters()
        self._tie_trains = {
            name: live[self._held[name]].requires_grad for name in self._tied if name in self._held
        }
        self._own_stages: dict[str, list[int]] = {}
        self._reports: list[_Report] = []
        self._thawed: set[int] = set()  # stages with a tied tensor that trains
        # alone: whether this rank runs without the other ranks; if so, all stages are assumed to train
        # loss_type: the dtype of the loss, which only ranks with the last stage compute
        self.loss_type = torch.float32
        self.alone = False

    def numbers_to_compare(self, train: bool) -> tuple[list[int], list[Tensor]]:
        """Return what this rank reports to the other ranks before a step: which of its stages train, and the state and
        the sum of bits of each tied tensor.

        The sums are on the device; the other integers are on the CPU.

        Raises:
            ConfigError: a parameter has a hook that would run on an incomplete gradient.
        """
        live = self._runtime.live_parameters()
        wide = any(parameter.dtype == torch.float64 for parameter in live.values())
        self.loss_type = torch.float64 if wide else torch.float32
        trains = [0] * len(self._stages.stages)
        states = [_ABSENT] * len(self._tied)
        zero = torch.zeros(1, dtype=torch.int64, device=self._runtime.mesh.device)
        sums = [zero] * len(self._tied)
        if train:
            for stage in self._training_stages(live):
                trains[stage] = 1
            for index, name in enumerate(self._tied):
                if name in self._held:
                    tied = live[self._held[name]]
                    states[index] = _TRAINS if tied.requires_grad else _FROZEN
                    states[index] += _CHANGED * (tied.requires_grad != self._tie_trains[name])
                    sums[index] = _sum_of_bits(tied)
        return [self._runtime.mesh.rank_in_stage, *trains, *states], sums

    def _training_stages(self, live: dict[str, nn.Parameter]) -> set[int]:
        """Return the stages of this rank in which a parameter trains; parameters that are tied to another stage do not
        count.
        """
        tied = {id(live[self._held[name]]) for name in self._tied if name in self._held}
        stages = set()
        for name, parameter in live.items():
            if not parameter.requires_grad:
                continue
            if has_accumulation_hook(parameter):
                raise ConfigError(
                    f"{name} has a hook that runs when its gradient is accumulated, but with pipeline stages gradients "
                    "are complete only when train_step returns: remove the hook, and step the optimizer after "
                    "train_step"
                )
            if id(parameter) not in tied:
                if name not in self._own_stages:
                    own = self._stages.of_rank(self._runtime.mesh.pp_rank)
                    self._own_stages[name] = [stage.index for stage in own if stage.is_local(name)]
                stages.update(self._own_stages[name])
        return stages

    def compare_numbers(self, told: list[list[int]]) -> None:
        """Read the reports ``told`` of all ranks, and set ``requires_grad`` of each tied tensor to the same value on
        all of its stages.

        If ``requires_grad`` was changed on some of the tensor's stages since the last step, the changed value is used.
        """
        ties = 1 + len(self._stages.stages)
        sums = ties + len(self._tied)
        self._reports = [
            _Report(
                numbers[0],
                numbers[1:ties],
                numbers[ties:sums],
                numbers[sums:],
            )
            for numbers in told
        ]
        live = self._runtime.live_parameters() if self._tied else {}
        self._thawed.clear()
        for index, name in enumerate(self._tied):
            states = [
                report.ties[index] for report in self._reports if report.ties[index] != _ABSENT
            ]
            states = [state for state in states if state > _TRAINS] or states
            if not states:  # in an evaluation, ranks report no states
                continue
            trains = all(state in (_TRAINS, _TRAINS + _CHANGED) for state in states)
            if name in self._held:
                live[self._held[name]].requires_grad_(trains)
                self._tie_trains[name] = trains
            if trains:
                self._thawed.update(*(tie.stages for tie in self._stages.ties if name in tie.names))

    def training_stages(self) -> list[bool]:
        """Return, per stage, whether this stage or an earlier one trains.

        Raises:
            ConfigError: the copies of a tied tensor differ.
        """
        if self.alone:
            return [True] * len(self._stages.stages)
        mine = self._runtime.mesh.rank_in_stage
        for index, name in enumerate(self._tied):
            same = (report for report in self._reports if report.rank_in_stage == mine)
            here = [report for report in same if report.ties[index] != _ABSENT]
            if len({report.sums[index] for report in here}) > 1:
                names = " = ".join(
                    next(tie.names for tie in self._stages.ties if name in tie.names)
                )
                raise ConfigError(
                    f"{names} is one tied tensor with a copy on each of several stages, and these copies differ since "
                    "the last update: use the same optimizer options under all of its names (a parameter group "
                    "chosen by name may have only some of them), or load the model again if its weights were changed "
                    "by hand on one stage"
                )
        return [
            any(any(report.trains[: stage + 1]) for report in self._reports)
            or any(thawed <= stage for thawed in self._thawed)
            for stage in range(len(self._stages.stages))
        ]


def _sum_of_bits(parameter: Tensor) -> Tensor:
    """Return the sum ``[1]`` of a tensor's entries, with their bits read as integers.

    An integer sum is exact in any order of summation, so equal tensors have equal sums.
    """
    share = local_tensor(parameter.detach())
    return share.view(_INTEGERS[share.element_size()]).sum(dtype=torch.int64).view(1)


class TiedGradients:
    """Sum the gradients of tensors that several stages hold."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[
            tuple[int, ...], list[bool]
        ] = {}  # for each group of copies of one tensor, which copies get a gradient; known after the first step

    @contextmanager
    def summed(self) -> Iterator[None]:
        """After the ``with`` block, sum the block's gradients of tied tensors over the tensors' stages.

        The sums are added to the gradients from before the block.
        """
        plan = self._runtime.plan
        copies = (
            [(p, plan.holders(planned.name)) for planned, p in self._runtime.parameters()]
            if plan.ties
            else []
        )
        # this rank's trained copies of tied tensors, each with the pipeline ranks that hold a copy of the same tensor
        tied = [
            (copy, holders) for copy, holders in copies if len(holders) > 1 and copy.requires_grad
        ]
        with gradients_aside([parameter for parameter, _ in tied]):
            yield
            # in the plan's order, which is equal on all ranks
            for holders in dict.fromkeys(tie for _, tie in tied):
                self._sum([parameter for parameter, tie in tied if tie == holders], holders)

    def _sum(self, copies: list[Tensor], holders: tuple[int, ...]) -> None:
        key = tuple(map(id, copies))
        if key not in self._known:  # exchanged once, because it depends only on the model
            here = torch.tensor([copy.grad is not None for copy in copies], dtype=torch.int64)
            dist.all_reduce(
                here, op=dist.ReduceOp.MAX, group=self._runtime.mesh.tie_reports[holders]
            )
            self._known[key] = [bool(count) for count in here.tolist()]
        for copy, used in zip(copies, self._known[key], strict=True):
            if copy.grad is not None and not used:
                raise ConfigError(
                    "a tied tensor (one parameter with copies on several stages) had no gradient in the first step "
                    "but has one now, while other stages expect none: load the model again before training on "
                    "batches that give it a gradient"
                )
            if used:
                if copy.grad is None:  # another stage has a gradient
                    copy.grad = torch.zeros_like(copy)
                dist.all_reduce(local_tensor(copy.grad), group=self._runtime.mesh.ties[holders])


def list_under_first_names(runtime: Runtime) -> None:
    """Make ``named_parameters`` list tied tensors under the stock model's names on every stage.

    Code that chooses parameters by name then chooses the same tensors on all stages.
    """
    held = runtime.plan.local_names(runtime.mesh.pp_rank)
    first = {here: owned for owned, here in held.items() if here != owned}
    if not first:
        return
    listed = runtime.model.named_parameters

    def named_parameters(
        prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        start = f"{prefix}." if prefix else ""
        for name, parameter in listed(prefix, recurse, remove_duplicate):
            own = name.removeprefix(start)
            yield (start + first[own] if remove_duplicate and own in first else name), parameter

    runtime.model.named_parameters = named_parameters
