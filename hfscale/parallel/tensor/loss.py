"""Compute the loss over a sharded vocabulary, in place of the stock model's ``loss_function``.

Data flow of a training step with labels::

    hidden [b, s, h] --enter--> head: lazy logits --the model's scaling, softcap--> lazy logits
                                   --loss_function--> chunks of rows: head, loss terms, gradients --> scalar

:class:`VocabParallelLoss` shifts the *labels* (never the logits), drops the rows without a label, and runs the head on
one chunk of the remaining rows at a time. Logits ``[b, s, V/t]`` therefore never exist, and ``output.logits`` is
``None``. Without labels, or in evaluation, the head runs as in the stock model, and the ranks' slices of the logits are
all-gathered.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..._compat.replaced import attribute_replaced
from ..._compat.transformers.classes import class_name
from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import gather_from_tp_region
from ...distributed.ops.head_cross_entropy import AnyRows, HeadRows, LinearRows, head_cross_entropy
from ...distributed.ops.vocab_cross_entropy import (
    RowTerms,
    Targets,
    VocabularySlice,
    vocab_cross_entropy,
)
from ...errors import ConfigError
from ...plan import Plan
from ...train.runtime import Runtime
from ...train.runtime.batches import Microbatch
from ...train.runtime.objective import KeepsOutputs
from .edges import install_head_edge
from .lazy_logits import LazyLogits, defer_logits

if TYPE_CHECKING:  # imported only for token scores, with a teacher, or with sequence parallelism
    from ...distributed.ops.divergence import TaughtRows
    from .scoring import Scoring
    from .sequence.region import SequenceRegion

_IGNORED = -100


@dataclass(frozen=True)
class LossPass:
    """Hold settings for the loss of one forward pass, which the stock model could not pass on to its loss function."""

    # the loss's divisor; ``None``: the divisor that the model passes, or the pass's number of labels
    count: Tensor | None = None
    label_smoothing: float = 0.0
    shifted: bool = False  # whether labels are shifted already: the label at a position is the position's target
    # labels that were counted before the pass, and the number of valid labels among them
    counted: Any = None
    valid: int | None = None
    scoring: "Scoring | None" = None  # computes per-token scores in place of the loss
    # replaces the cross entropy by the divergence from this teacher
    teacher: "TaughtRows | None" = None
    terms: list["LossTerm"] = field(default_factory=list)  # further terms, which features add


@dataclass
class _Call:
    """Record, during one call of the model, whether it has labels, whether its logits may be read, and whether the loss
    ran.
    """

    with_labels: bool = False
    shows_logits: bool = True  # whether the caller may read the logits
    called_loss: bool = False  # whether the model called the loss function


@dataclass
class LossTerm:
    """Add the cross entropy of additional rows of logits, ``n b`` rows that follow the model's own ``b`` rows.

    A feature creates a term for a pass (:attr:`LossPass.terms`), and appends the hidden states of the term's rows to
    those of the model. The rows of several terms follow one another in the order of the list.
    """

    targets: Tensor  # ``[n, b, s]``
    weight: float  # factor of the term: the mean over ``n`` of the rows' loss
    hits: Tensor  # output ``[n, b, s]``: whether a position has a target and no logit is larger than the target's
    loss: Tensor | None = None  # output: the unweighted term, divided like the model's loss


def _split_rows(logits: Tensor, terms: Sequence[LossTerm]) -> Sequence[Tensor]:
    """Split logits into the model's own rows and those of each term."""
    rows = terms[0].targets.shape[1]
    split = logits.split_rows if isinstance(logits, LazyLogits) else logits.split
    return split([rows, *(len(term.targets) * rows for term in terms)])


class VocabParallelLoss(KeepsOutputs):
    """Compute token cross entropy, divided by the number of valid labels or by a given count."""

    shift = 1
    needs_labels = ignores = divides = True

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        weight = plan.by_name[f"{plan.head}.weight"]
        self.group = mesh.tp_group
        cut = weight.cut_over("tp")
        size = mesh.layout.tp
        self.lengths = [
            cut.local_length(weight.shape[0], r) if cut else weight.shape[0] for r in range(size)
        ]
        self.start = sum(self.lengths[: mesh.tp_rank])
        self.expected_gradient = 1.0
        self.head: nn.Module | None = None
        self.current = (
            LossPass()
        )  # the settings of calls outside of a step; :meth:`passing` sets those of a step
        self._call = _Call()

    def passing(self, **values: Any) -> AbstractContextManager[LossPass]:
        """Use these values of the fields of :class:`LossPass` in all losses computed inside the ``with`` block."""
        return attribute_replaced(self, "current", replace(self.current, **values, terms=[]))

    def trains(self, model: nn.Module) -> bool:
        """Return whether passes with labels now compute the loss of a step or of a model in training mode, and not
        statistics of single tokens.
        """
        return self.current.scoring is None and (self.current.count is not None or model.training)

    def check_smoothing(self, label_smoothing: float) -> None:
        """Accept label smoothing, since this loss supports it. Losses that do not support it raise an error here."""

    def count_labels(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return, as tensors on the device, a microbatch's number of labels, and of labels outside the vocabulary."""
        targets = batch.get("shift_labels")
        if targets is None:  # no position predicts the first label
            targets = batch["labels"][..., self.shift :]
        valid = targets != _IGNORED
        return valid.sum(), (valid & (targets.clamp(0, sum(self.lengths) - 1) != targets)).sum()

    def loss_of(
        self, model: nn.Module, batch: Microbatch, count: Tensor, label_smoothing: float
    ) -> Tensor:
        """Return the loss of one microbatch, divided by ``count``, the number of valid labels of the step.

        No full logits are computed.
        """
        given = batch.get("labels") if batch.get("shift_labels") is None else batch["shift_labels"]
        with (
            self.passing(
                count=count,
                label_smoothing=label_smoothing,
                shifted=batch.shifted,
                counted=given,
                valid=batch.valid,
            ),
            batch.kept_apart(),
        ):
            output = model(**batch)
        if self._kept is not None:
            self._kept.append(output)
        return output[0] if isinstance(output, tuple) else output.loss

    @contextmanager
    def scoring(self, temperature: float = 1.0, read: Any = None) -> "Iterator[Scoring]":
        """Compute the log-probability of each label and other statistics of each token, in forward passes with labels
        inside the ``with`` block: see ``Scoring``.
        """
        from .scoring import Scoring

        scoring = Scoring(temperature, read)
        with self.passing(scoring=scoring):
            yield scoring

    def distilling(self, teacher: "TaughtRows") -> AbstractContextManager[Any]:
        """Compute the divergence from a teacher in place of the cross entropy inside the ``with`` block."""
        return self.passing(teacher=teacher)

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        label_smoothing: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the loss of ``logits [b, s, V/t]``, this rank's slice of the vocabulary, lazy or real; refuse
        ``label_smoothing`` outside ``[0, 1]``.
        """
        current = self.current
        self._call.called_loss = True
        smoothing = current.label_smoothing if label_smoothing is None else label_smoothing
        if not 0.0 <= smoothing <= 1.0:
            raise ConfigError(
                f"label_smoothing must be between 0 and 1, got {smoothing!r}: use 0.1, for example, or leave it out"
            )
        vocabulary = VocabularySlice(
            self.start, sum(self.lengths), max(self.lengths), self.group, smoothing
        )
        further: Sequence[Tensor] = ()
        if current.terms:
            logits, *further = _split_rows(logits, current.terms)
        given, targets = self._flat_targets(logits, labels, shift_labels)
        count = num_items_in_batch if current.count is None else current.count
        if current.scoring is not None:
            total = current.scoring.take(logits, targets, vocabulary)
            return total / (
                (targets != ignore_index).sum().clamp(min=1) if count is None else count
            )
        was_counted = given is current.counted and ignore_index == _IGNORED
        valid = current.valid if was_counted else None
        loss = self._mean(logits, targets, vocabulary, count, ignore_index, valid)
        if not current.terms:
            return loss
        count = (targets != ignore_index).sum() if count is None else torch.as_tensor(count)
        for term, rows in zip(current.terms, further, strict=True):
            every = term.targets.flatten()
            hits = term.hits.view(-1)
            divisor = count * len(term.targets)
            mean = self._mean(rows, every, vocabulary, divisor, _IGNORED, hits=hits)
            term.loss = mean.detach()
            loss = loss + term.weight * mean
        return loss

    def _mean(
        self,
        logits: Tensor,
        targets: Tensor,
        vocabulary: VocabularySlice,
        count: Tensor | int | None,
        ignore_index: int,
        valid: int | None = None,
        hits: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the cross entropies of rows with a target, divided by ``count``.

        By default ``count`` is the number of rows with a target. ``targets`` is ``[N]``.
        """
        if isinstance(logits, LazyLogits) and logits.value is not None:
            logits = logits.materialize()
        teacher = self.current.teacher
        if isinstance(logits, LazyLogits) or teacher is not None:
            assert self.head is not None
            if isinstance(logits, LazyLogits):
                head = _rows_of(self.head, logits)
                hidden = logits.hidden
            else:
                head = AnyRows(torch.clone, [], None, logits.requires_grad)
                hidden = logits
            return head_cross_entropy(
                hidden.reshape(-1, hidden.shape[-1]),
                targets,
                head,
                vocabulary=vocabulary,
                divisor=count,
                ignore_index=ignore_index,
                dtype=logits.dtype,
                valid=valid,
                expected=self.expected_gradient,
                hits=hits,
                teacher=teacher,
            )
        rows = logits.reshape(-1, logits.shape[-1])
        total = vocab_cross_entropy(rows, targets, ignore_index=ignore_index, vocabulary=vocabulary)
        if hits is not None:
            of_chunk = Targets.of_slice(targets, vocabulary, rows.shape[1])
            hits |= RowTerms(rows.detach(), of_chunk, vocabulary).hits(rows.detach()) & (
                targets != ignore_index
            )
        return total / ((targets != ignore_index).sum() if count is None else count)

    def _flat_targets(
        self, logits: Tensor, labels: Tensor | None, shift_labels: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the labels as the caller passed them, and the target of every position of ``logits``, ``[b s]``."""
        given = labels if shift_labels is None else shift_labels
        if given is None:
            raise ConfigError(
                "the loss needs labels or shift_labels, got neither: pass one of them to the model"
            )
        targets = given
        if shift_labels is None and not self.current.shifted:  # the last positions have no target
            targets = nn.functional.pad(given, (0, self.shift), value=_IGNORED)[..., self.shift :]
        targets = targets.reshape(-1).to(logits.device)
        if targets.numel() != logits.shape[:-1].numel():
            raise ConfigError(
                f"the loss must get one label per position, got {targets.numel()} labels for "
                f"{logits.shape[:-1].numel()} positions: leave out logits_to_keep in a forward pass with labels"
            )
        return given, targets

    def before_model(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Record whether the call has labels, and whether the caller may read its logits.

        This is a forward pre-hook of the model.
        """
        named = (
            dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
            if args
            else {}
        )
        given = {**named, **kwargs}
        with_labels = given.get("labels") is not None
        # A caller that passes embeddings, like PEFT's CPT, may compute another loss from the logits.
        around = self.group is None and given.get("inputs_embeds") is not None
        unseen = (
            self.current.count is not None
            or self.current.scoring is not None
            or (model.training and torch.is_grad_enabled() and not around)
        )
        unseen = unseen and self._kept is None
        self._call = _Call(with_labels, shows_logits=not (with_labels and unseen))

    def run_head(
        self,
        forward: Callable[..., Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the head's output: lazy logits if only the loss reads them, else real logits. Without labels these are
        gathered; with labels they stay sharded for the loss.
        """
        call = self._call
        if call.shows_logits or len(args) != 1 or kwargs:
            logits = forward(*args, **kwargs)
            if call.with_labels:
                return logits
            return gather_from_tp_region(logits, self.lengths, self.group)
        assert self.head is not None
        (hidden,) = args
        trains = hidden.requires_grad or any(p.requires_grad for p in self.head.parameters())
        return defer_logits(forward, hidden, trains)

    def after_model(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> Any:
        """Gather the logits if the caller may read them, else drop them (forward hook of the model)."""
        call = self._call
        self._call = _Call()
        if not call.with_labels:
            return output
        if not call.called_loss:
            return self._left_alone(model, output)
        logits = None
        if call.shows_logits:
            own = output[1] if isinstance(output, tuple) else output.logits
            logits = gather_from_tp_region(own, self.lengths, self.group)
        if isinstance(output, tuple):  # (loss, logits, ...)
            others = (None if isinstance(extra, LazyLogits) else extra for extra in output[2:])
            return output[0], logits, *others
        output.logits = logits
        return output

    def _left_alone(self, model: nn.Module, output: Any) -> Any:
        """Return the output of a model that has computed its loss itself, without calling ``loss_function``.

        Raises:
            ConfigError: the vocabulary is sharded, or the loss must be divided by a number of labels.
        """
        its = (
            f"{class_name(model)} computes its loss itself instead of calling model.loss_function, so this loss "
            "cannot"
        )
        if self.group is not None:
            raise ConfigError(
                f"{its} be computed over a sharded vocabulary: call the model without labels, and compute the loss "
                "from its logits"
            )
        if self.current.count is not None:
            raise ConfigError(
                f"{its} be divided by the number of labels in a step: call loss = model(**batch).loss and "
                "loss.backward() in a loop instead of train_step"
            )
        if isinstance(output, tuple):
            return tuple(
                value.materialize() if isinstance(value, LazyLogits) else value for value in output
            )
        # A model whose forward method was replaced may return no logits.
        if isinstance(getattr(output, "logits", None), LazyLogits):
            output.logits = output.logits.materialize()
        return output


def _rows_of(head: nn.Module, lazy: LazyLogits) -> HeadRows:
    """Return the object with which the loss runs the head on some rows: by explicit matrix products if the head is a
    stock linear layer, else by autograd.
    """
    needed = lazy.hidden.requires_grad
    # Listed in each pass, because FSDP2 replaces parameters between steps.
    parameters = list(head.parameters())
    if copies := getattr(head, "modules_to_save", None):
        parameters = _without_unread(head, copies, parameters)
    by_hand = (
        getattr(inspect.unwrap(lazy.head), "__func__", None) is nn.Linear.forward
        and all(
            type(p) in (nn.Parameter, Tensor) and p.dtype == lazy.hidden.dtype for p in parameters
        )
        and not torch.is_autocast_enabled(lazy.hidden.device.type)
    )
    if by_hand:
        return LinearRows(head.weight, head.bias, lazy.finish, lazy.reusable, needed)  # type: ignore[arg-type]
    return AnyRows(lazy.head, [p for p in parameters if p.requires_grad], lazy.finish, needed)


def _without_unread(
    head: Any, copies: nn.ModuleDict, parameters: list[nn.Parameter]
) -> list[nn.Parameter]:
    """Return the ``parameters`` that the head reads: not those of ``copies`` that PEFT keeps for adapters that are not
    active (``modules_to_save``), which would get gradients of zeros, and decay.
    """
    unread = {
        id(parameter)
        for name, copy in copies.items()
        if name not in head.active_adapters
        for parameter in copy.parameters()
    }
    return [parameter for parameter in parameters if id(parameter) not in unread]


def install_loss(runtime: Runtime, regions: "Sequence[SequenceRegion]") -> VocabParallelLoss | None:
    """Install :class:`VocabParallelLoss` in the model and return it, if hfscale can compute the loss from the head's
    output; else return ``None``.
    """
    plan = runtime.plan
    model = runtime.model
    if plan.head is None:
        return None
    loss = VocabParallelLoss(plan, runtime.mesh)
    if not runtime.is_local(plan.head):  # another stage has the head; this one only counts labels
        return loss
    loss.head = head = model.get_submodule(plan.head)
    if (group := runtime.mesh.tp_group) is not None:
        install_head_edge(head, group, regions)
    # A partial, not a closure, so that deep copies of the model work.
    head.forward = partial(loss.run_head, head.forward)
    model.register_forward_pre_hook(loss.before_model, with_kwargs=True)
    model.register_forward_hook(loss.after_model)
    model.loss_function = loss
    return loss
