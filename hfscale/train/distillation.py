"""Distill a teacher, which has a layout, precision and quantization of its own, into a student on the same ranks.

The teacher runs first, up to its head; its last hidden states move to the ranks that have the student's head, never
logits. Its head is copied there once, cut over the vocabulary as the student's is::

    batches --teacher's layout--> hidden states [b, s, h] --rows and tokens of this rank--+--> chunks of rows: both
    microbatches --student's layout--> hidden states of this rank's rows and tokens ------+    heads, divergence

:mod:`hfscale.train.teacher` puts files between the two.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoTokenizer

from .._compat.peft import IN_FRONT, adapters_switched_off
from .._compat.torch import tree_map
from .._compat.transformers.classes import class_name
from ..config.options import MIXED_PRECISIONS
from ..distributed.ops.divergence import TaughtRows, TeacherRows
from ..distributed.ops.vocab_cross_entropy import VocabularySlice
from ..errors import ConfigError, check_number
from .inputs import prepare
from .outputs import KeptOutputs
from .runtime import Batch, Objective, Runtime, StepLoss, runtime_of
from .runtime.batches import Microbatch
from .runtime.full_tensors import full_tensors, tensors_to_save


class ModelTeacher:
    """Teach from a model on the same ranks; see :class:`hfscale.Teacher`."""

    def __init__(
        self,
        model: nn.Module,
        student: nn.Module,
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
    ) -> None:
        check_number("beta", beta, least=0, most=1)
        check_number("temperature", temperature, above=0)
        self.beta = beta
        self.temperature = temperature
        self._teacher, self._student = runtime_of(model), runtime_of(student)
        self._loss = loss_over_vocabulary(self._student)
        self._head: TeacherRows | None = None  # without rows; made behind the first pass
        # The operations behind the teacher's head, where this rank has it.
        self._finish: tuple[Any] | None = None
        check_vocabulary(vocabulary_of(self._teacher), self._student)
        self._check_adapters()
        # Which distinct batches of the student's this rank runs: all that the ranks of the teacher's batch have.
        mesh = self._teacher.mesh
        own = self._student.mesh.batch_rank
        turns = dict[int, dict[int, None]]()
        for group, batch in mesh.all_gather_object((mesh.batch_rank, own)):
            turns.setdefault(group, {})[batch] = None
        self._turns = list(turns[mesh.batch_rank])
        # As many on every rank.
        self._turns += self._turns[-1:] * (max(map(len, turns.values())) - len(self._turns))

    def check(self, runtime: Runtime) -> None:
        """Refuse to teach another model than the student."""
        if runtime is not self._student:
            raise ConfigError(
                "teacher was made for another student: make hfscale.Teacher(teacher, model) for this one"
            )
        loss_over_vocabulary(runtime)  # adapters may have been added since

    @torch.no_grad()
    def signals(self, batch: Batch | Sequence[Batch]) -> list[tuple[Tensor, ...]]:
        """Return what teaches each of this rank's batches, the last hidden states ``[b, s, h]``; collective."""
        model = self._teacher.model
        itself = self._teacher is self._student
        signals = list[tuple[Tensor, ...]]()
        given = self._own_batches(batch)
        with adapters_switched_off(model) if itself else nullcontext(), evaluating(model):
            for turn in self._turns:
                made = scored(self._teacher, given[turn], self._hidden)
                if turn == self._student.mesh.batch_rank:
                    signals = [(each["hidden"],) for each in made]
        if self._head is None:
            self._head = self._copied_head()
        return signals

    def _hidden(self, logits: Any, _: VocabularySlice) -> dict[str, Tensor]:
        self._finish = (logits.finish,)
        return {"hidden": logits.hidden.to(_computes_in(self._teacher))}

    def objective(
        self, signals: Sequence[tuple[Tensor, ...]], counts: Sequence[Tensor]
    ) -> Objective:
        """Return the objective of a step: the sum of divergences, each microbatch's divided by its count."""
        pieces = len(counts) // len(signals)  # microbatches that the schedule cuts of a batch

        def loss(called: Any, microbatch: Microbatch, index: int) -> Tensor:
            with self._loss.distilling(
                self._rows(signals[index // pieces], microbatch, index % pieces)
            ):
                return self._loss.loss_of(called, microbatch, counts[index], 0.0)

        return Objective(loss)

    def loss(
        self, batch: Batch, divisor: Tensor | float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of one batch, for a loop that calls ``loss.backward()``: the sum over labels, divided by
        their number or ``divisor``; the sum of the entropies of the student's distributions; and the number of labels.
        """
        device = self._student.mesh.device
        if self._student.plan.stages is not None or self._student.mesh.layout.cp > 1:
            raise ConfigError(
                "pipeline stages and context ranks need hfscale.train_step(model, batch, teacher=...)"
            )
        signals = self.signals(batch)[0]
        (microbatch,), _ = prepare(self._student, batch, train=False)
        labels = self._loss.count_labels(microbatch)[0]
        entropy = torch.zeros(microbatch["labels"].numel(), dtype=torch.float64, device=device)
        with self._loss.distilling(
            replace(
                self._rows(signals, microbatch, 0),
                entropy=entropy,
            )
        ):
            count = torch.as_tensor(
                labels.clamp(min=1) if divisor is None else divisor, device=device
            )
            loss = self._loss.loss_of(self._student.model, microbatch, count, 0.0)
        return loss, entropy.sum(), labels

    def _rows(self, signals: tuple[Tensor, ...], batch: Microbatch, piece: int) -> TaughtRows:
        """Return the teacher's rows for a microbatch, the given ``piece`` of a batch."""
        count = len(batch["labels"])
        own_tokens = self._student.context.own_tokens
        rows = slice(piece * count, (piece + 1) * count)
        return self._taught(*(own_tokens(batch, signal[rows]).flatten(0, 1) for signal in signals))

    def _taught(self, hidden: Tensor) -> TaughtRows:
        assert self._head is not None  # since the hidden states were made
        return replace(self._head, hidden=hidden)

    def _own_batches(self, batch: Any) -> dict[int, Any]:
        """Return the student's distinct batches that this rank runs, by number."""
        own = self._student.mesh.batch_rank
        group = self._teacher.mesh.sharing
        if group is None or set(self._turns) == {own}:
            return {own: batch}
        every: list[Any] = [None] * dist.get_world_size(group)
        sent = tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, batch)
        dist.all_gather_object(every, (own, sent), group=group)
        return dict(every)

    def _copied_head(self) -> TeacherRows:
        """Return the teacher's head over the student's slice of the vocabulary, on ranks with its head; collective."""
        runtime = self._teacher
        student = self._student
        mesh = self._student.mesh
        told = mesh.all_gather_object((student.is_local(str(student.plan.head)), self._finish))
        to = [rank for rank, (has_head, _) in enumerate(told) if has_head]
        planned = [
            runtime.plan.by_name.get(f"{runtime.plan.head}.{part}") for part in ("weight", "bias")
        ]
        names = [each.tied_to or each.name for each in planned if each is not None]
        entries = [
            each for each in tensors_to_save(runtime) if each.planned and each.planned.name in names
        ]
        cut = student.plan.by_name[f"{student.plan.head}.weight"].cut_over("tp")
        copied = dict[str, Tensor]()
        for entry, (_, whole) in zip(
            entries,
            full_tensors(runtime, entries, to=to),
            strict=True,
        ):
            if entry.planned and whole.numel():
                own = whole if cut is None else cut.take(whole, mesh.tp_rank).clone()
                copied[entry.planned.name] = own.detach().to(mesh.device, _computes_in(runtime))
        weight, bias, *_ = *(copied.get(name) for name in names), None, None
        nothing = torch.empty(0, device=mesh.device)
        weight = nothing if weight is None else weight
        finish = next(known[0] for _, known in told if known is not None)
        given: dict[str, Any] = {
            "hidden": nothing,
            "weight": weight,
            "bias": bias,
            "finish": finish,
        }
        return TeacherRows(**given, beta=self.beta, temperature=self.temperature)

    def _check_adapters(self) -> None:
        runtime = self._teacher
        plan = self._teacher.plan
        if runtime is self._student:
            added = {adapter.name for adapter in plan.adapters}
            trained = [
                planned.name
                for planned, parameter in runtime.parameters()
                if parameter.requires_grad
            ]
            if runtime.mesh.largest(not added or any(name not in added for name in trained))[0]:
                raise ConfigError(
                    "the student can be its own teacher only where nothing but adapters train: give it a peft_config, "
                    "or load the teacher as a model of its own"
                )
        elif any(adapter.base.startswith(f"{plan.head}.") for adapter in plan.adapters):
            raise ConfigError(
                "the teacher has adapters of its head: merge them first (hfscale.merge_and_unload)"
            )


def scored(
    runtime: Runtime,
    batch: Batch | Sequence[Batch],
    read: Callable[[Any, VocabularySlice], dict[str, Tensor]],
) -> list[Mapping[str, Tensor]]:
    """Run a model up to its head; return what ``read`` makes of each batch's lazy logits, on all its ranks."""
    kept, loss = KeptOutputs(runtime), loss_over_vocabulary(runtime)
    microbatches, count = prepare(runtime, batch, train=False)

    def keep(called: Any, microbatch: Microbatch, index: int) -> Tensor:
        with loss.scoring(read=read) as seen:
            nothing = loss.loss_of(called, microbatch, count, 0.0)
        kept.keep(seen.made, microbatch, index)
        return nothing

    runtime.run_step(runtime.model, microbatches, Objective(keep), backward=False)
    return list(kept.gathered(1 if isinstance(batch, Mapping) else len(batch)))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation in the with block."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def vocabulary_of(runtime: Runtime) -> dict[str, Any]:
    """Return what tells a model's vocabulary from others."""
    loss = loss_over_vocabulary(runtime)
    name = runtime.model.name_or_path
    size = runtime.plan.by_name[f"{runtime.plan.head}.weight"].shape[0]
    return {
        "vocabulary": size,
        "shift": loss.shift,
        "tokenizer": _tokenizer_of(runtime.model),
        "model": name,
    }


def check_vocabulary(its: Mapping[str, Any], student: Runtime) -> None:
    """Refuse a teacher whose :func:`vocabulary_of` is not the student's; collective."""
    own = vocabulary_of(student)
    if its["vocabulary"] != own["vocabulary"] or its["shift"] != own["shift"]:
        raise ConfigError(
            f"the teacher has a vocabulary of {its['vocabulary']} tokens and the student one of {own['vocabulary']}, "
            "and the divergence compares them token by token, of models that are both causal or both have an encoder: "
            "use a teacher with the student's tokenizer; if only padding differs, load one with "
            "resize_token_embeddings=..."
        )
    apart = (
        None not in (its["tokenizer"], own["tokenizer"]) and its["tokenizer"] != own["tokenizer"]
    )
    if student.mesh.largest(apart)[0]:  # a file may be missing on one node
        raise ConfigError(
            f"the tokenizers beside the teacher ({its['model']}) and the student ({own['model']}) have different "
            "vocabularies, and the divergence compares them token by token: use a teacher with the student's tokenizer"
        )


def loss_over_vocabulary(runtime: Runtime) -> StepLoss:
    """Return the loss of a model; refuse one that is not over a vocabulary, and prompts in front of one's tokens."""
    if any(adapter.kept_in in IN_FRONT for adapter in runtime.plan.adapters):
        raise ConfigError(
            f"{class_name(runtime.model)} has a prompt in front of its tokens, and teacher and student must have the "
            "same ones: distill with LoRA, or without adapters"
        )
    if runtime.loss is None or runtime.plan.head is None or runtime.plan.loss is None:
        raise ConfigError(
            f"{class_name(runtime.model)} has no loss over a vocabulary that hfscale computes: distill a causal "
            "language model into another"
        )
    return runtime.loss


def _computes_in(runtime: Runtime) -> torch.dtype:
    own = runtime.plan.by_name[f"{runtime.plan.head}.weight"].dtype
    return MIXED_PRECISIONS[runtime.options.mixed_precision] or own


def _tokenizer_of(model: Any) -> str | None:
    """Return a checksum of the tokenizer's vocabulary beside a model's checkpoint; ``None`` where there is none."""
    if not model.name_or_path:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model.name_or_path, local_files_only=True, trust_remote_code=False
        )
        return hashlib.sha256(
            json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()
        ).hexdigest()
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
    ):  # no files, or of a kind that this process cannot read
        return None
