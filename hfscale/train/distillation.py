"""Distill a teacher, which has a layout, precision and quantization of its own, into a student on the same ranks.

Both see the same batches. The teacher runs first, in its layout, up to its head; what moves is its last hidden states,
never logits. Its head is copied once, cut over the student's tensor ranks as the student's is, to the ranks that have
the student's head, where both heads run on chunks of rows (:mod:`hfscale.distributed.ops.divergence`)::

    batches --teacher's layout--> hidden states [b, s, h] --this rank's rows and tokens--+
                                                                                          +--> divergence, gradients
    microbatches --student's layout--> hidden states of this rank's rows and tokens ------+
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoTokenizer

from .._compat.peft import adapters_switched_off
from .._compat.torch import tree_map
from .._compat.transformers.classes import class_name
from ..config.options import MIXED_PRECISIONS
from ..distributed.ops.divergence import TeacherRows
from ..errors import ConfigError, check_number
from ..plan import ParameterPlan
from .inputs import prepare
from .outputs import KeptOutputs
from .runtime import Batch, Objective, Runtime, StepLoss, runtime_of
from .runtime.batches import Microbatch
from .runtime.full_tensors import full_parameters


class Teacher:
    """Teach a student the distribution of every labelled token, by a divergence over the full vocabulary.

    The divergence is the generalized Jensen-Shannon divergence (Agarwal et al. 2024), of logits divided by
    ``temperature``: forward KL, from the teacher to the student, at ``beta=0``; reverse KL at ``beta=1``. Make it, and
    use it, on every rank. It copies the teacher's head, so the teacher must not train.

    Args:
        model: a parallelized causal language model, in any layout of these ranks. The student itself, where only
            adapters train: its teacher is then the model without them.
        student: the model that trains.
        beta: weight of the teacher in the mixture of both distributions, 0 to 1.
        temperature: divisor of both models' logits.

    Raises:
        ConfigError: the models have different vocabularies, or one of them has no head that a loss runs on.
    """

    def __init__(self, model: nn.Module, student: nn.Module, *, beta: float = 0.5, temperature: float = 1.0) -> None:
        check_number("beta", beta, least=0, most=1)
        check_number("temperature", temperature, above=0)
        self.beta, self.temperature = beta, temperature
        self._teacher, self._student = runtime_of(model), runtime_of(student)
        self._loss, self._its_loss = _loss_over_vocabulary(self._student), _loss_over_vocabulary(self._teacher)
        self._check_vocabularies()
        self._check_adapters()
        self._turns = self._distinct_batches()
        compute = MIXED_PRECISIONS[self._teacher.options.mixed_precision]
        self._dtype = compute or _of_head(self._teacher, "weight").dtype
        self._head: TeacherRows | None = None  # without rows; made behind the first pass
        self._finish: tuple[Any] | None = None  # the operations behind the teacher's head, where this rank has it

    def check(self, runtime: Runtime) -> None:
        """Refuse to teach another model than the student."""
        if runtime is not self._student:
            raise ConfigError("teacher was made for another student: make hfscale.Teacher(teacher, model) for this one")

    @torch.no_grad()
    def hidden_states(self, batch: Batch | Sequence[Batch]) -> list[Tensor]:
        """Return the teacher's last hidden states, ``[b, s, h]``, for each of this rank's batches; collective."""
        own: list[Tensor] = []
        with ExitStack() as stack:
            stack.enter_context(_in_evaluation(self._teacher.model))
            if self._teacher is self._student:
                stack.enter_context(adapters_switched_off(self._teacher.model))
            given = self._shared(batch)
            for turn in self._turns:
                made = self._run(given[turn])
                own = made if turn == self._student.mesh.batch_rank else own
        if self._head is None:
            self._head = self._copied_head()
        return own

    def objective(self, states: Sequence[Tensor], counts: Sequence[Tensor]) -> Objective:
        """Return the objective of a step: the sum of divergences, each microbatch's divided by its count."""
        pieces = len(counts) // len(states)  # microbatches that the schedule cuts of a batch

        def loss(called: Any, microbatch: Microbatch, index: int) -> Tensor:
            with self._loss.distilling(self._rows(states[index // pieces], microbatch, index % pieces)):
                return self._loss.of(called, microbatch, counts[index], 0.0)

        return Objective(loss)

    def loss(self, batch: Batch, divisor: Tensor | float | None = None) -> Tensor:
        """Return the loss of one batch, with gradients, for a loop that calls ``loss.backward()``; not with stages or
        context ranks, whose loop is that of :func:`hfscale.train_step`.

        Args:
            divisor: of the sum over labels; by default their number in this batch.
        """
        return self.loss_and_entropy(batch, divisor)[0]

    def loss_and_entropy(self, batch: Batch, divisor: Tensor | float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return :meth:`loss`, the sum of the entropies of the student's distributions, and the number of labels."""
        layout = self._student.mesh.layout
        if self._student.plan.stages is not None or layout.cp > 1:
            raise ConfigError(f"{layout.describe()}: use hfscale.train_step(model, batch, teacher=teacher)")
        states = self.hidden_states(batch)[0]
        (microbatch,), _ = prepare(self._student, batch, train=False)
        labels = self._loss.look(microbatch)[0]
        count = torch.as_tensor(labels.clamp(min=1) if divisor is None else divisor, device=labels.device)
        rows = self._rows(states, microbatch, 0)
        rows = replace(rows, entropy=rows.hidden.new_zeros(len(rows.hidden), dtype=torch.float64))
        with self._loss.distilling(rows):
            loss = self._loss.of(self._student.model, microbatch, count, 0.0)
        assert rows.entropy is not None
        return loss, rows.entropy.sum(), labels

    def _rows(self, states: Tensor, batch: Microbatch, piece: int) -> TeacherRows:
        """Return the teacher's rows for a microbatch, the given ``piece`` of a batch."""
        assert self._head is not None  # since the hidden states were made
        count = len(batch["labels"])
        own = self._student.context.own_tokens(batch, states[piece * count : (piece + 1) * count])
        return replace(self._head, hidden=own.flatten(0, 1))

    def _run(self, batch: Batch | Sequence[Batch]) -> list[Tensor]:
        """Run the teacher up to its head; return the hidden states of each batch on all ranks that share it."""
        runtime, kept = self._teacher, KeptOutputs(self._teacher)
        microbatches, count = prepare(runtime, batch, train=False)

        def keep(called: Any, microbatch: Microbatch, index: int) -> Tensor:
            with self._its_loss.head_inputs() as seen:
                nothing = self._its_loss.of(called, microbatch, count, 0.0)
            self._finish = (seen.finish,)
            kept.keep({"hidden": seen.hidden.to(self._dtype)}, microbatch, index)
            return nothing

        with runtime.around(lambda part: part.around_step(runtime, microbatches, train=False)):
            runtime.executor.run(runtime.model, microbatches, Objective(keep), backward=False)
        return [each["hidden"] for each in kept.gathered(1 if isinstance(batch, Mapping) else len(batch))]

    def _distinct_batches(self) -> list[int]:
        """Return which of the student's distinct batches this rank runs through the teacher, in order: those of all
        ranks that share the teacher's batch; as many on every rank.
        """
        teacher, student = self._teacher.mesh, self._student.mesh
        groups: dict[int, dict[int, None]] = {}
        for group, batch in teacher.all_gather_object((teacher.batch_rank, student.batch_rank)):
            groups.setdefault(group, {})[batch] = None
        turns = list(groups[teacher.batch_rank])
        return turns + turns[-1:] * (max(map(len, groups.values())) - len(turns))

    def _shared(self, batch: Any) -> dict[int, Any]:
        """Return the student's distinct batches that this rank runs, by number."""
        own, group = self._student.mesh.batch_rank, self._teacher.mesh.sharing
        if group is None or set(self._turns) == {own}:
            return {own: batch}
        every: list[Any] = [None] * dist.get_world_size(group)
        sent = tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, batch)
        dist.all_gather_object(every, (own, sent), group=group)
        return dict(every)

    def _copied_head(self) -> TeacherRows:
        """Return the teacher's head over the student's slice of the vocabulary, on ranks with its head; collective."""
        runtime, student, mesh = self._teacher, self._student, self._student.mesh
        told = mesh.all_gather_object((student.is_local(student.plan.head or ""), self._finish))
        to = [rank for rank, (has_head, _) in enumerate(told) if has_head]
        names = {part: _of_head(runtime, part) for part in ("weight", "bias") if _has_bias(runtime) or part == "weight"}
        wanted = {planned.tied_to or planned.name: part for part, planned in names.items()}
        cut, found = _of_head(student, "weight").cut_over("tp"), dict[str, Tensor]()
        for name, whole in full_parameters(runtime, lambda planned: planned.name in wanted, to=to):
            if not whole.numel():
                continue
            own = whole if cut is None else cut.take(whole, mesh.tp_rank).clone()
            found[wanted[name]] = own.detach().to(mesh.device, self._dtype)
        nothing = torch.empty(0, device=mesh.device)
        finish = next(known[0] for _, known in told if known is not None)
        weight = found.get("weight", nothing)
        return TeacherRows(nothing, weight, found.get("bias"), finish, self.beta, self.temperature)

    def _check_vocabularies(self) -> None:
        sizes = [_of_head(runtime, "weight").shape[0] for runtime in (self._teacher, self._student)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the teacher has a vocabulary of {sizes[0]} tokens and the student one of {sizes[1]}, and the "
                "divergence compares them token by token: use a teacher with the student's tokenizer; if only padding "
                "differs, load one of them with resize_token_embeddings=..."
            )
        known = [_tokenizer_of(runtime.model) for runtime in (self._teacher, self._student)]
        if None not in known and known[0] != known[1]:
            raise ConfigError(
                f"the tokenizers saved beside the teacher ({self._teacher.model.name_or_path}) and the student "
                f"({self._student.model.name_or_path}) have different vocabularies, and the divergence compares them "
                "token by token: use a teacher with the student's tokenizer"
            )
        if self._loss.shift != self._its_loss.shift:
            raise ConfigError("the teacher and the student must both be causal, or both have an encoder")

    def _check_adapters(self) -> None:
        runtime, plan = self._teacher, self._teacher.plan
        if runtime is self._student:
            added = {adapter.name for adapter in plan.adapters}
            trained = [planned.name for planned, each in runtime.parameters() if each.requires_grad]
            if runtime.mesh.largest(any(name not in added for name in trained))[0] or not added:
                raise ConfigError(
                    "the student can be its own teacher only where nothing but adapters train: give it a peft_config, "
                    "or load the teacher as a model of its own"
                )
        elif any(adapter.base.startswith(f"{plan.head}.") for adapter in plan.adapters):
            raise ConfigError("the teacher has adapters of its head: merge them first (hfscale.merge_and_unload)")


def _loss_over_vocabulary(runtime: Runtime) -> StepLoss:
    """Return the loss of a model whose head it runs; refuse others."""
    if runtime.loss is None or runtime.plan.head is None or runtime.plan.loss is None:
        raise ConfigError(
            f"{class_name(runtime.model)} has no loss over a vocabulary that hfscale computes: distill a causal "
            "language model into another"
        )
    return runtime.loss


def _of_head(runtime: Runtime, part: str) -> ParameterPlan:
    return runtime.plan.by_name[f"{runtime.plan.head}.{part}"]


def _has_bias(runtime: Runtime) -> bool:
    return f"{runtime.plan.head}.bias" in runtime.plan.by_name


def _tokenizer_of(model: Any) -> dict[str, int] | None:
    """Return the vocabulary of the tokenizer beside a model's checkpoint; ``None`` where there is none at hand."""
    try:
        found = AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True, trust_remote_code=False)
        return dict(found.get_vocab()) if model.name_or_path else None
    except (OSError, ValueError, KeyError, ImportError):  # no files, or of a kind that this process cannot read
        return None


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation mode inside the ``with`` block."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
