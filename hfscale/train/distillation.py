"""Distill a teacher model into a student model on the same ranks; the teacher has its own layout, precision and
quantization.

The teacher runs first, up to its output head. Its last hidden states, not its logits, are sent to the ranks that have
the student's head. The teacher's head is copied to these ranks once, sharded over the vocabulary like the student's
head. There, the logits of both models, and the divergence between them, are computed for a few rows at a time::

    batches --teacher's layout--> teacher's hidden states of this rank's tokens [b, s, h] --+--> both heads -->
    microbatches --student's layout--> student's hidden states of the same tokens ----------+    divergence

:mod:`hfscale.train.teacher` can store the teacher's most probable tokens in files instead, so that the teacher runs
before the student's training.
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
    """Compute the token distributions of a teacher model for a student model that trains on the same ranks; see
    :class:`hfscale.Teacher`.
    """

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
        self._head: TeacherRows | None = None  # without rows; created after the first forward pass
        # The operations after the teacher's head, on ranks that have the head.
        self._finish: tuple[Any] | None = None
        check_vocabulary(vocabulary_of(self._teacher), self._student)
        self._check_adapters()
        # The student's batches that this rank's teacher runs on: batches of all ranks that share the teacher's batch.
        mesh = self._teacher.mesh
        own = self._student.mesh.batch_rank
        turns = dict[int, dict[int, None]]()
        for group, batch in mesh.all_gather_object((mesh.batch_rank, own)):
            turns.setdefault(group, {})[batch] = None
        self._turns = list(turns[mesh.batch_rank])
        # Repeat the last batch, so that every rank makes the same number of runs.
        self._turns += self._turns[-1:] * (max(map(len, turns.values())) - len(self._turns))

    def check(self, runtime: Runtime) -> None:
        """Raise :class:`ConfigError` unless ``runtime`` is that of the student for which this teacher was made."""
        if runtime is not self._student:
            raise ConfigError(
                "teacher was made for another student: make hfscale.Teacher(teacher, model) for this student"
            )
        loss_over_vocabulary(runtime)  # adapters may have been added since

    @torch.no_grad()
    def signals(self, batch: Batch | Sequence[Batch]) -> list[tuple[Tensor, ...]]:
        """Run the teacher and return its last hidden states ``[b, s, h]`` for each of this rank's batches, each in a
        tuple; collective.
        """
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
        """Return the loss of a distillation step: the sum, over microbatches, of the divergence from the teacher over
        all labels, divided by the microbatch's entry in ``counts``. ``signals`` is the result of :meth:`signals`.
        """
        pieces = len(counts) // len(signals)  # microbatches into which the schedule splits a batch

        def loss(called: Any, microbatch: Microbatch, index: int) -> Tensor:
            with self._loss.distilling(
                self._rows(signals[index // pieces], microbatch, index % pieces)
            ):
                return self._loss.loss_of(called, microbatch, counts[index], 0.0)

        return Objective(loss)

    def loss(
        self, batch: Batch, divisor: Tensor | float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the distillation loss of one batch for a loop that calls ``loss.backward()`` itself.

        Returns:
            three values: the loss, which is the sum of the divergences at all labels, divided by the number of labels,
                or by ``divisor`` if given; the sum of the entropies of the student's distributions at these labels; and
                the number of labels.
        """
        device = self._student.mesh.device
        if self._student.plan.stages is not None or self._student.mesh.layout.cuts_sequences:
            raise ConfigError(
                "Teacher.loss cannot run with pipeline stages or context ranks: use hfscale.train_step(model, batch, "
                "teacher=...), which can"
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
        """Return what the loss needs of the teacher for one microbatch: its hidden states for the microbatch's tokens,
        and its head. A schedule may split a batch into several microbatches; ``piece`` is the microbatch's index in its
        batch.
        """
        count = len(batch["labels"])
        own_tokens = self._student.context.own_tokens
        rows = slice(piece * count, (piece + 1) * count)
        return self._taught(*(own_tokens(batch, signal[rows]).flatten(0, 1) for signal in signals))

    def _taught(self, hidden: Tensor) -> TaughtRows:
        assert self._head is not None  # set when the hidden states were computed
        return replace(self._head, hidden=hidden)

    def _own_batches(self, batch: Any) -> dict[int, Any]:
        """Return the batches on which this rank runs the teacher, by the index of the student's distinct batch
        (``batch_rank``). They are the batches of all ranks that run the teacher together with this rank, gathered from
        these ranks.
        """
        own = self._student.mesh.batch_rank
        group = self._teacher.mesh.sharing
        if group is None or set(self._turns) == {own}:
            return {own: batch}
        every: list[Any] = [None] * dist.get_world_size(group)
        sent = tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, batch)
        dist.all_gather_object(every, (own, sent), group=group)
        return dict(every)

    def _copied_head(self) -> TeacherRows:
        """Copy the teacher's head to the ranks that have the student's head, sharded over the vocabulary like the
        student's head; collective.
        """
        runtime = self._teacher
        student = self._student
        mesh = self._student.mesh
        told = mesh.all_gather_object((student.is_local(str(student.plan.head)), self._finish))
        to = [rank for rank, (has_head, _) in enumerate(told) if has_head]
        planned = [
            runtime.plan.by_name.get(f"{runtime.plan.head}.{part}") for part in ("weight", "bias")
        ]
        names = [each.first_name for each in planned if each is not None]
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
        nothing = torch.empty(0, device=mesh.device)
        return TeacherRows(
            hidden=nothing,
            weight=copied.get(names[0], nothing),
            bias=copied.get(names[1]) if len(names) > 1 else None,
            finish=next(known[0] for _, known in told if known is not None),
            beta=self.beta,
            temperature=self.temperature,
        )

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
                    "the student can be its own teacher only if nothing but adapters trains: give the student a "
                    "peft_config, or load the teacher as a second model"
                )
        elif any(adapter.base.startswith(f"{plan.head}.") for adapter in plan.adapters):
            raise ConfigError(
                "the teacher has adapters of its head, which distillation does not support: merge them first "
                "(hfscale.merge_and_unload)"
            )


def scored(
    runtime: Runtime,
    batch: Batch | Sequence[Batch],
    read: Callable[[Any, VocabularySlice], dict[str, Tensor]],
) -> list[Mapping[str, Tensor]]:
    """Run a model's forward pass up to its head on the batches of a step, and call ``read`` on the logits of each
    microbatch. The logits are lazy: only those that ``read`` uses are computed. Return the tensors that ``read``
    returned, one mapping per batch, on all of the model's ranks.
    """
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
    """Switch a model to evaluation mode inside the ``with`` block, and restore each module's mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def vocabulary_of(runtime: Runtime) -> dict[str, Any]:
    """Return the properties of a model that must be equal in teacher and student: the size of the vocabulary, the shift
    of labels, and a checksum of the tokenizer; also the model's name, for errors.
    """
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
    """Raise :class:`ConfigError` if the teacher's vocabulary, described by ``its`` (the result of
    :func:`vocabulary_of`), differs from the student's. Call it on every rank.
    """
    own = vocabulary_of(student)
    if its["vocabulary"] != own["vocabulary"] or its["shift"] != own["shift"]:
        raise ConfigError(
            f"the teacher has a vocabulary of {its['vocabulary']} tokens and the student one of {own['vocabulary']}, "
            "but the divergence compares vocabularies token by token, and only those of two causal models or of two "
            "encoder-decoders: use a teacher with the student's tokenizer; if the vocabularies differ only by "
            "padding, load the smaller one with resize_token_embeddings=..."
        )
    apart = (
        None not in (its["tokenizer"], own["tokenizer"]) and its["tokenizer"] != own["tokenizer"]
    )
    if student.mesh.largest(apart)[0]:  # one node may lack a tokenizer file
        raise ConfigError(
            f"the tokenizers of the teacher ({its['model']}) and the student ({own['model']}) have different "
            "vocabularies, but the divergence compares them token by token: use a teacher with the student's tokenizer"
        )


def loss_over_vocabulary(runtime: Runtime) -> StepLoss:
    """Return the loss function of a model for distillation. Raise :class:`ConfigError` if the model's loss is not a
    cross entropy over a vocabulary, or if a trained prompt precedes its tokens.
    """
    if any(adapter.kept_in in IN_FRONT for adapter in runtime.plan.adapters):
        raise ConfigError(
            f"{class_name(runtime.model)} has an adapter that adds a prompt (virtual tokens) before the text, but "
            "teacher and student must have the same tokens: distill with LoRA, or without adapters"
        )
    if runtime.loss is None or runtime.plan.head is None or runtime.plan.loss is None:
        raise ConfigError(
            f"{class_name(runtime.model)} has no loss over a vocabulary that hfscale can compute: distill a causal "
            "language model into another"
        )
    return runtime.loss


def _computes_in(runtime: Runtime) -> torch.dtype:
    own = runtime.plan.by_name[f"{runtime.plan.head}.weight"].dtype
    return MIXED_PRECISIONS[runtime.options.mixed_precision] or own


def _tokenizer_of(model: Any) -> str | None:
    """Return a checksum of the vocabulary of the tokenizer that is saved with a model's checkpoint; ``None`` if no
    tokenizer can be read.
    """
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
    ):  # the files are missing, or this process cannot read their format
        return None
