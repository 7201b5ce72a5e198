"""Teachers of a student: a model on the same ranks, or what one has stored."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from .distillation import ModelTeacher
from .runtime import Batch, runtime_of
from .stored_teacher import StoredTeacher, TeacherWriter


class Teacher(ModelTeacher):
    """Teach a student the distribution of every labelled token, by a divergence over the full vocabulary.

    It is the generalized Jensen-Shannon divergence (Agarwal et al. 2024) of logits divided by ``temperature``: forward
    KL at ``beta=0``, reverse KL at ``beta=1``. Make it on every rank. It copies the teacher's head, so the teacher must
    not train.

    Args:
        model: a parallelized causal language model, in any layout of these ranks. Or the student itself, where only
            adapters train: its teacher is then the model without them.
        student: the model that trains.
        beta: weight of the teacher in the mixture of both distributions, 0 to 1.
        temperature: divisor of both models' logits.

    Raises:
        ConfigError: the models have different vocabularies, or one of them has no head that a loss runs on.
    """

    @staticmethod
    def write(
        model: nn.Module,
        batches: Sequence[Batch],
        directory: str | Path,
        *,
        top_k: int = 64,
        temperature: float = 1.0,
        batches_per_shard: int = 16,
    ) -> None:
        """Store a model's ``top_k`` most probable tokens of every position, for :meth:`stored`; call it on every rank.

        A run that was cut short goes on behind the last shard that is whole.

        Args:
            model: a parallelized causal language model, in any layout.
            batches: all batches, with ``labels``, the same on every rank; data ranks divide them.
            directory: gets ``teacher.json`` and a file of safetensors for every ``batches_per_shard`` batches.
            temperature: divisor of the logits.
        """
        TeacherWriter(runtime_of(model), batches, Path(directory), top_k, temperature, batches_per_shard).write()

    @staticmethod
    def stored(directory: str | Path, student: nn.Module, *, beta: float = 0.5) -> StoredTeacher:
        """Return a teacher that reads what :meth:`write` stored, at its temperature: the divergence of ``top_k + 1``
        events, the last of which is any other token. It knows texts by their token ids, in any order of rows.

        Raises:
            ConfigError: the student has another vocabulary, or files are missing; in a step, on all ranks: a batch has
                a text that is not stored.
        """
        return StoredTeacher(Path(directory), student, beta)
