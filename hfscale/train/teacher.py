"""Define the teacher of a distillation: a model on the same ranks, or the most probable tokens that a model has stored
in files before::

    write:  batches --teacher's layout--> hidden states --head--> k most probable tokens --> DIR/00000.safetensors, ...
    train:  microbatches --digest of each text--> the text's rows of the files --> divergence over k + 1 events

The ``k + 1`` events at a position are the ``k`` stored tokens, and any other token. A text is what a row of a batch
gives the model to predict its last label: the attended tokens before this label, and their positions if positions
restart.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..distributed.ops.divergence import StoredRows, TaughtRows, top_tokens
from ..distributed.ops.head_cross_entropy import rows_per_chunk
from ..distributed.ops.vocab_cross_entropy import VocabularySlice
from ..errors import ConfigError, check_count, check_number
from .distillation import (
    ModelTeacher,
    check_vocabulary,
    evaluating,
    loss_over_vocabulary,
    scored,
    vocabulary_of,
)
from .inputs import microbatches_of
from .runtime import Batch, Runtime, runtime_of
from .runtime.writing import all_or_none

_ABOUT = "teacher.json"
_STORED = ("log_probs", "tokens", "rest")


@dataclass
class TeacherWriter:
    """Write the files of a stored teacher, one per group of batches (a shard); see :meth:`hfscale.Teacher.write`."""

    runtime: Runtime
    batches: Sequence[Batch]
    directory: Path
    top_k: int
    temperature: float
    each: int  # batches per shard

    def __post_init__(self) -> None:
        check_count("top_k", self.top_k)
        check_count("batches_per_shard", self.each)
        check_number("temperature", self.temperature, above=0)
        known = vocabulary_of(self.runtime)
        if self.top_k > known["vocabulary"]:
            raise ConfigError(
                f"top_k={self.top_k} is more than the vocabulary of {known['vocabulary']} tokens: use fewer"
            )
        asked = {"top_k": self.top_k, "temperature": self.temperature}
        self._about = {**known, **asked, "shards": -(-len(self.batches) // self.each)}

    @torch.no_grad()
    def write(self) -> None:
        """Write the files (shards) that the directory lacks; each data rank writes one at a time. Collective."""
        mesh = self.runtime.mesh
        with all_or_none(mesh, f"{self.directory} cannot be written"):
            missing = mesh.all_gather_object(self._missing() if mesh.rank == 0 else None)[0]
        if isinstance(missing, str):
            raise ConfigError(missing)
        with evaluating(self.runtime.model):
            for first in range(0, len(missing), mesh.batch_world):
                own = (
                    missing[first + mesh.batch_rank :][:1]
                    if mesh.batch_rank < len(missing) - first
                    else []
                )
                tensors = self._shard(own[0] if own else None)
                failure = ""
                if own and mesh.speaks_for_batch:
                    try:
                        file = _shard_file(self.directory, own[0])
                        part = file.with_suffix(
                            ".part"
                        )  # temporary name until the file is complete
                        save_file(tensors, part)
                        part.replace(file)
                    except OSError as error:
                        failure = str(error)
                mesh.all_gather_object(None, failure)

    def _missing(self) -> list[int] | str:
        """Return the numbers of the files (shards) that the directory lacks, or a text that says why it cannot be
        written.
        """
        path = self.directory / _ABOUT
        try:
            digests = "".join(digest for batch in self.batches for _, digest, _ in _texts(batch))
            about = {**self._about, "texts": hashlib.sha256(digests.encode()).hexdigest()}
            self.directory.mkdir(parents=True, exist_ok=True)
            then = json.loads(path.read_text()) if path.is_file() else about
            apart = [
                f"{name}={then.get(name)!r}"
                for name, value in about.items()
                if then.get(name) != value
            ]
            if apart:
                return f"{self.directory} holds another teacher ({', '.join(apart)}): write to another directory"
            if not path.is_file():
                part = path.with_suffix(".part")
                part.write_text(json.dumps(about, indent=2) + "\n")
                part.replace(path)
        except ConfigError as error:  # a batch that cannot be stored
            return str(error)
        except (OSError, ValueError) as error:
            return f"{self.directory} cannot be written: {error}"
        return [
            shard
            for shard in range(self._about["shards"])
            if not _shard_file(self.directory, shard).is_file()
        ]

    def _shard(self, shard: int | None) -> dict[str, Tensor]:
        """Run the teacher on the batches of file number ``shard``, and return the file's tensors. With ``None``, the
        forward passes still run, because other ranks gather weights in them, but there is nothing to return.
        """
        first = 0 if shard is None else shard * self.each
        columns: dict[str, list[Tensor]] = {name: [] for name in _STORED}
        digests = list[str]()
        lengths = list[int]()
        for place in range(first, first + self.each):
            counts = shard is not None and place < len(self.batches)
            batch = self.batches[place if counts else 0]
            made = scored(self.runtime, batch, self._read)[0]
            for row, digest, places in (
                _texts(batch) if counts and self.runtime.mesh.speaks_for_batch else ()
            ):
                digests.append(digest)
                lengths.append(len(places))
                for name, parts in columns.items():
                    parts.append(made[name][row, places.to(made[name].device)].cpu())
        if not digests:
            return {}
        joined = {name: torch.cat(parts) for name, parts in columns.items()}
        keys = torch.tensor(
            [list(bytes.fromhex(digest)) for digest in digests],
            dtype=torch.uint8,
        )
        return {
            **joined,
            "tokens": joined["tokens"].int(),
            "digests": keys,
            "lengths": torch.tensor(lengths),
        }

    def _read(self, logits: Any, vocabulary: VocabularySlice) -> dict[str, Tensor]:
        """Return the most probable tokens of every position with their log-probabilities, and the log of the remaining
        probability. Logits are computed for a few rows at a time.
        """
        hidden = logits.hidden
        rows = hidden.reshape(-1, hidden.shape[-1])
        shape = hidden.shape[:-1]
        step = rows_per_chunk(len(rows), 2 * vocabulary.widest, rows.device)
        asked = self.top_k, self.temperature, vocabulary
        parts = [top_tokens(logits.logits(chunk), *asked) for chunk in rows.split(step)]
        joined = (torch.cat(each) for each in zip(*parts, strict=True))
        return {
            name: each.view(*shape, *each.shape[1:])
            for name, each in zip(_STORED, joined, strict=True)
        }


class StoredTeacher(ModelTeacher):
    """Read a teacher's most probable tokens from files, for a distillation; see :meth:`hfscale.Teacher.stored`."""

    def __init__(self, directory: Path, student: nn.Module, beta: float) -> None:
        check_number("beta", beta, least=0, most=1)
        self._directory, self._student = directory, runtime_of(student)
        self._loss = loss_over_vocabulary(self._student)
        if not (directory / _ABOUT).is_file():
            raise ConfigError(
                f"{directory} has no {_ABOUT}, so it holds no stored teacher: give a directory that "
                "hfscale.Teacher.write has written"
            )
        about = json.loads((directory / _ABOUT).read_text())
        self.beta = beta
        self.temperature = float(about["temperature"])
        check_vocabulary(about, self._student)
        missing = [
            shard for shard in range(about["shards"]) if not _shard_file(directory, shard).is_file()
        ]
        if missing:
            raise ConfigError(
                f"{directory} has not been written to the end, because it lacks {len(missing)} of {about['shards']} "
                "shards: call hfscale.Teacher.write again, which writes the missing shards"
            )
        self._places = dict[
            str, tuple[Any, int, int]
        ]()  # digest -> file, and the place of the text's positions in it
        for shard in range(about["shards"]):
            file = safe_open(_shard_file(directory, shard), "pt")
            if not file.keys():  # no text of the file has a label
                continue
            ends = file.get_tensor("lengths").cumsum(0).tolist()
            for digest, start, stop in zip(
                file.get_tensor("digests").tolist(), [0, *ends], ends, strict=False
            ):
                self._places[bytes(digest).hex()] = file, start, stop

    def signals(self, batch: Batch | Sequence[Batch]) -> list[tuple[Tensor, ...]]:
        """Read what is stored for the texts of each batch: log-probabilities ``[b, s, k]`` of the ``k`` most probable
        tokens, their ids ``[b, s, k]``, and the log of the remaining probability ``[b, s]``. Ranks without the
        student's head read nothing. Collective.
        """
        given = microbatches_of(batch)
        try:
            texts = [_texts(each) for each in given]
            refusal = ""
        except ConfigError as error:
            texts = []
            refusal = str(error)
        unknown = sum(digest not in self._places for each in texts for _, digest, _ in each)
        if unknown:
            refusal = (
                f"{unknown} text(s) of the step are not among those stored in {self._directory}"
            )
        if self._student.mesh.largest(bool(refusal))[0]:
            raise ConfigError(
                f"{refusal or 'another rank has a text that is not stored'}: store these texts with the same "
                "tokenization (hfscale.Teacher.write), or use a model as the teacher"
            )
        if not self._student.is_local(str(self._student.plan.head)):
            return [()] * len(given)
        return [self._read(each, found_rows) for each, found_rows in zip(given, texts, strict=True)]

    def _read(
        self, batch: Mapping[str, Any], texts: list[tuple[int, str, Tensor]]
    ) -> tuple[Tensor, ...]:
        shape = batch["input_ids"].shape
        device = self._student.mesh.device
        made = list[Tensor]()
        for name in _STORED:
            places_of = [(row, places, self._places[digest]) for row, digest, places in texts]
            parts = [file.get_slice(name)[start:stop] for _, _, (file, start, stop) in places_of]
            whole = (
                torch.zeros(
                    *shape,
                    *parts[0].shape[1:],
                    dtype=parts[0].dtype,
                )
                if parts
                else torch.zeros(*shape, 1)
            )
            for (row, places, _), part in zip(places_of, parts, strict=True):
                whole[row, places] = part  # no other position has a label
            made.append(whole.to(device))
        return tuple(made)

    def _taught(self, log_probs: Tensor, tokens: Tensor, rest: Tensor) -> TaughtRows:  # type: ignore[override]
        return StoredRows(
            stored=log_probs,
            tokens=tokens.long(),
            rest=rest,
            beta=self.beta,
            temperature=self.temperature,
        )


class Teacher(ModelTeacher):
    """Teach a student model to predict the token distributions of a teacher model. The loss is a divergence over the
    full vocabulary at every label.

    It is the generalized Jensen-Shannon divergence (Agarwal et al. 2024) of logits divided by ``temperature``: forward
    KL at ``beta=0``, reverse KL at ``beta=1``. Create the object on every rank. It copies the teacher's head, so the
    teacher must not train.

    Args:
        model: a parallelized causal language model, in any layout of these ranks. Or the student itself, if only its
            adapters train: the teacher is then the model without adapters.
        student: the model that trains.
        beta: weight of the teacher in the mixture of both distributions, 0 to 1.
        temperature: divisor of both models' logits.

    Raises:
        ConfigError: the models have different vocabularies, or one of them has no language-model head with a loss.
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

        If it was interrupted, a further call continues after the last complete file.

        Args:
            model: a parallelized causal language model, in any layout.
            batches: all batches, with ``labels``, the same on every rank; data ranks divide them.
            directory: the directory for ``teacher.json`` and a safetensors file for every ``batches_per_shard``
                batches.
            top_k: the number of tokens to store at each position.
            temperature: divisor of the logits.
            batches_per_shard: the number of batches per file.
        """
        TeacherWriter(
            runtime_of(model), batches, Path(directory), top_k, temperature, batches_per_shard
        ).write()

    @staticmethod
    def stored(
        directory: str | Path,
        student: nn.Module,
        *,
        beta: float = 0.5,
    ) -> StoredTeacher:
        """Return a teacher that reads the files that :meth:`write` has stored, with the temperature that was used
        there. The loss is the divergence over ``top_k + 1`` events at each position: the stored tokens, and any other
        token. Texts are found by their token ids, in any order of rows.

        Raises:
            ConfigError: the student has another vocabulary, or files are missing. Later, in a step, on all ranks: a
                batch has a text that is not stored.
        """
        return StoredTeacher(Path(directory), student, beta)


def _texts(batch: Mapping[str, Any]) -> list[tuple[int, str, Tensor]]:
    """Return, for every row of a batch that has a label: the row's index, a digest of its text (the tokens from which
    labels are predicted), and the positions of the text's tokens in the row.
    """
    ids, labels, mask, positions = (
        batch.get(key) for key in ("input_ids", "labels", "attention_mask", "position_ids")
    )
    if (
        ids is None
        or labels is None
        or batch.get("shift_labels") is not None
        or (mask is not None and mask.ndim != 2)
    ):
        raise ConfigError(
            "a stored teacher finds texts by input_ids, labels and an attention_mask of shape [rows, tokens], which "
            "this batch lacks or replaces: leave out shift_labels, inputs_embeds and masks with more dims"
        )
    ids = ids.cpu()
    labelled = labels.cpu() != -100
    attended = torch.ones_like(labelled) if mask is None else mask.cpu() != 0
    if (labelled[:, 1:] & ~attended[:, :-1]).any():
        raise ConfigError(
            "a stored teacher cannot predict a token that follows padding: set the label of this token to -100"
        )
    texts = []
    for row in labelled[:, 1:].any(1).nonzero().flatten().tolist():
        # The digest covers all input that predicts a label.
        places = attended[row, : int(labelled[row].nonzero()[-1])].nonzero().flatten()
        parts = [ids[row, places]]
        if positions is not None and positions.ndim == 2:
            own = positions.cpu().expand(len(ids), -1)[row, places]
            parts += [] if bool((own.diff() == 1).all()) else [own]
        data = b"|".join(part.to(torch.int64).numpy().tobytes() for part in parts)
        texts.append((row, hashlib.sha256(data).hexdigest()[:32], places))
    return texts


def _shard_file(directory: Path, shard: int) -> Path:
    return directory / f"{shard:05}.safetensors"
