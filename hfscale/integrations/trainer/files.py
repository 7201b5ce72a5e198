"""Write a Trainer's checkpoints: plain Hugging Face directories with a training state, which are always complete.

::

    checkpoint-N/   config.json, model.safetensors ... (any layout, and stock transformers, reads them)
                    tokenizer, training_args.bin, trainer_state.json: Trainer's own
                    hfscale_state/: weights, optimizer, schedule and RNG states (hfscale.save_state)
                    optimizer.pt, scheduler.pt: for resuming with stock Trainer in one process (:mod:`.stock_state`)
    .incomplete/checkpoint-N/   while it is written: it appears by one rename, once all of its bytes are on the disk
    .replaced/checkpoint-N/     an older one of the same name, until the new one is in its place

A callback may keep states in another place than this directory, such as memory (:mod:`.resume_callbacks`). Such a state
is a training state alone, with Trainer's own small files in it.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from transformers.trainer import TRAINER_STATE_NAME

from ..._compat.accelerate import stock_optimizer
from ..._compat.replaced import attribute_replaced
from ..._compat.transformers.trainer import TrainerHooks
from ...checkpoint.load import load_weights
from ...checkpoint.save import save_pretrained
from ...checkpoint.state import load_state, save_state
from ...checkpoint.state_format import INDEX as STATE_INDEX
from ...distributed.files.complete import read_mark, size_problems
from ...distributed.files.directories import sync
from ...distributed.files.reader import SafetensorsFile
from ...distributed.files.sources import find_source, has_weights, written_elsewhere
from ...distributed.files.writer import INDEX, REPLACED
from ...distributed.mesh import Mesh
from ...errors import CheckpointError
from ...train.runtime import Runtime, runtime_of
from ...train.runtime.writing import all_or_none
from . import stock_state
from .resume_callbacks import StatesAside, TrainerRandomStreams

_STATE = "hfscale_state"
_ASIDE = ".incomplete"
_REPLACED = ".replaced"
# Files of an old checkpoint that must not be mixed with files of a new one.
_OWN = (
    *REPLACED,
    "*.pt",
    "*.pth",
    _STATE,
)
_UNFINISHED = f"has no {TRAINER_STATE_NAME}, which is written last"
_OF_ACCELERATE = (
    "is a state of Accelerate's save_state, not a Trainer's: put the model's config.json into it, load it with "
    "hfscale.from_pretrained, and continue training from its weights"
)
_MOST_READ = 16 << 20  # maximum bytes of a file whose checksum is compared before a resume
_log = logging.getLogger(__name__)


class Checkpoints(TrainerHooks):
    """Provide hooks that write and read the checkpoints of a Trainer."""

    _streams: TrainerRandomStreams

    @property
    def runtime(self) -> Runtime:
        """Return the model's runtime, which holds its plan, its mesh, and the runtime objects of its features."""
        return runtime_of(self.model)

    @property
    def states_aside(self) -> StatesAside | None:
        """Return the trainer's callback that keeps states elsewhere than on the disk; ``None`` if there is none."""
        callbacks = self.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, StatesAside)), None)

    def kept_in_memory(self) -> AbstractContextManager[Path] | None:
        """Return a context that yields a directory. Trainer writes its small files there, and the callback
        :attr:`states_aside` then saves them with the run's state. Return ``None`` if there is no such callback, or if
        it does not save after this step.
        """
        aside = self.states_aside
        return aside.kept(self) if aside is not None and aside.due else None

    @contextmanager
    def written_aside(self, target: Path) -> Iterator[Path]:
        """Write the checkpoint to a temporary directory; rename it to ``target`` after the block if no rank failed."""
        mesh = self.runtime.mesh
        aside = target.parent / _ASIDE
        with all_or_none(mesh, f"{target} could not be written"):
            try:
                if mesh.is_first:
                    _finish_replacing(target.parent)
                    _remove(aside)  # files that a killed process left
                    aside.mkdir(parents=True)
                mesh.all_gather_object(None)
                with _best_named(self.state, target):
                    yield aside
                mesh.all_gather_object(None)
                if mesh.is_first:
                    _put_in_place(aside / target.name, target)
                    _rotate(target, self.args.save_total_limit, self.state.best_model_checkpoint)
            finally:
                if mesh.is_first:
                    _remove(aside)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a plain Hugging Face directory, or an adapter in PEFT's format; call it on every rank."""
        directory = output_dir or self.args.output_dir
        save_pretrained(self.model, directory)
        written = attribute_replaced(self.model, "save_pretrained", lambda *_, **__: None)
        with all_or_none(self.runtime.mesh, f"{directory} could not be written"), written:
            super().save_model(directory, _internal_call)

    def write_state(self, directory: Path) -> None:
        """Write optimizer, schedule and RNG states in hfscale's own format; on every rank."""
        optimizer = self.optimizer
        scheduler = self.lr_scheduler
        step = self.state.global_step
        save_state(
            self.model, directory / _STATE, optimizer=optimizer, step=step, scheduler=scheduler
        )
        with all_or_none(self.runtime.mesh, f"{directory} could not be written"):
            stock_state.write(self.runtime, directory, stock_optimizer(optimizer), scheduler)

    def read_state(self, checkpoint: Path) -> None:
        """Read optimizer, schedule and RNG states; if there are none, leave their initial values, like Trainer."""
        model = self.model
        optimizer = self.optimizer
        scheduler = self.lr_scheduler
        if _has_state(checkpoint):
            load_state(model, _state_of(checkpoint), optimizer=optimizer, scheduler=scheduler)
        else:
            _read_foreign_state(self.runtime, checkpoint, stock_optimizer(optimizer), scheduler)
        rows = self.get_total_train_batch_size(self.args)
        self._streams.read(checkpoint, _has_state(checkpoint), rows)

    def write_random_states(self, directory: Path) -> None:
        """Write the RNG states that stock Trainer reads, and the RNG states at the beginning of the epoch."""
        with all_or_none(self.runtime.mesh, f"{directory} could not be written"):
            self._streams.write(directory, self.get_total_train_batch_size(self.args))

    def put_back_random_states(self) -> None:
        """Restore the checkpoint's RNG states, after the trained batches were skipped."""
        self._streams.put_back()

    def read_weights(self, checkpoint: Path) -> None:
        """Read the weights of a checkpoint without a training state. Do nothing for a checkpoint with a training state,
        since :meth:`read_state` reads its weights too.
        """
        if not _has_state(checkpoint):
            self.read_best_weights(checkpoint)

    def read_best_weights(self, checkpoint: Path) -> None:
        """Read the weights from a checkpoint's plain Hugging Face files."""
        load_weights(self.model, checkpoint)


def _read_foreign_state(runtime: Runtime, checkpoint: Path, optimizer: Any, scheduler: Any) -> None:
    """Read another trainer's states of optimizer and schedule, or warn that there are none."""
    with all_or_none(runtime.mesh, f"{checkpoint} could not be loaded"):
        was_read = stock_state.read(runtime, checkpoint, optimizer, scheduler)
    if not was_read and runtime.mesh.is_first:
        _log.warning(
            "%s has no optimizer state: training continues from its weights and step, but the optimizer's moments "
            "and the schedule start anew",
            checkpoint,
        )


@contextmanager
def _best_named(state: Any, target: Path) -> Iterator[None]:
    """Record the best checkpoint by its final path, next to ``target``, inside the ``with`` block."""
    save = state.save_to_json

    def name_it() -> None:
        best = target.with_name(f"checkpoint-{state.best_global_step}")
        if state.best_global_step and (best == target or best.is_dir()):
            state.best_model_checkpoint = str(best)

    def save_to_json(path: str) -> None:
        name_it()
        save(path)

    with attribute_replaced(state, "save_to_json", save_to_json):
        yield
    name_it()


def _has_state(checkpoint: Path) -> bool:
    return _state_of(checkpoint).is_dir()


def _state_of(checkpoint: Path) -> Path:
    """Return the directory for a checkpoint's training state; for a state in memory, this is the checkpoint itself."""
    return checkpoint if (checkpoint / STATE_INDEX).exists() else checkpoint / _STATE


def resumed_from(
    resume: Any,
    output: Path,
    mesh: Mesh,
    newest: Callable[[Path | None], Path | None] | None = None,
) -> Any:
    """Return the checkpoint to resume from (``True``: the newest complete one) on all ranks. ``newest`` is called with
    the checkpoint on the disk, and returns a newer state that is kept in another place, such as memory, if there is
    one.
    """
    if not isinstance(resume, str | Path) and resume is not True:
        return resume
    resumed: Any = resume
    problem = ""
    if mesh.is_first:
        try:
            resumed = _newest_whole(output) if resume is True else _whole(Path(resume))
        except (OSError, CheckpointError) as error:
            problem = str(error)
    resumed, problem = mesh.all_gather_object((resumed, problem))[0]
    if problem:
        raise CheckpointError(problem)
    if resume is True and newest is not None:
        kept = newest(_state_of(Path(resumed)) if isinstance(resumed, str) else None)
        # No checkpoint and no problem: training begins at step 0.
        return (None if resumed is True else resumed) if kept is None else str(kept)
    return resumed


def problem_of(checkpoint: Path) -> str | None:
    """Return a text that describes a checkpoint's defect and is printed after its name; ``None`` if no defect is found.
    No large file is read.
    """
    if (problem := _not_of_a_trainer(checkpoint)) is not None:
        return problem
    path = checkpoint / TRAINER_STATE_NAME
    try:
        int(json.loads(path.read_bytes())["global_step"])
        if _has_state(checkpoint):
            path = _state_of(checkpoint)
            for each in size_problems(path, read_mark(path)):
                raise CheckpointError(each)
        weights = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*model*.bin")]
        if not weights and not _has_state(checkpoint) and find_source(checkpoint) is None:
            return "has no weights"
        for path in sorted(
            {
                *weights,
                *checkpoint.glob("*.pt"),
                *checkpoint.glob("*.pth"),
                *checkpoint.glob("*.bin"),
            }
        ):
            if path.suffix == ".safetensors":
                SafetensorsFile(path)  # reads and checks the header
                continue
            with ZipFile(path) as file:
                damaged = file.testzip() if path.stat().st_size <= _MOST_READ else None
            if damaged:
                raise BadZipFile(f"the checksum of {damaged} does not match its content")
        if (path := checkpoint / INDEX).exists():
            missing = {*json.loads(path.read_bytes())["weight_map"].values()} - {
                each.name for each in weights
            }
            if missing:
                return f"lacks {min(missing)}"
    except (OSError, ValueError, LookupError, TypeError, BadZipFile, CheckpointError) as error:
        return f"has a damaged {path.name} ({error})"
    return None


def _not_of_a_trainer(checkpoint: Path) -> str | None:
    """Return why a directory is no complete Trainer checkpoint that hfscale can read; ``None`` if it is one."""
    readable = _has_state(checkpoint) or has_weights(checkpoint) or _in_torch_files(checkpoint)
    if not readable and (other := written_elsewhere(checkpoint)) is not None:
        return f"holds {other}; then load OUT and train from its weights: the optimizer's state is not converted"
    if (checkpoint / TRAINER_STATE_NAME).exists():
        return None
    return _OF_ACCELERATE if any(checkpoint.glob("random_states_*.pkl")) else _UNFINISHED


def _in_torch_files(checkpoint: Path) -> bool:
    """Return whether the weights of a model or adapter are in files of ``torch.save``."""
    return any(
        not file.name.startswith("pytorch_model_fsdp") for file in checkpoint.glob("*model*.bin")
    )


def _checkpoints(output: Path) -> list[Path]:
    """Return the directories that Trainer treats as checkpoints, in the order of their steps."""
    inside = output.iterdir() if output.is_dir() else ()
    checkpoints = [
        path for path in inside if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()
    ]
    return sorted(checkpoints, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[-1])


def _newest_whole(output: Path) -> str | bool | None:
    _finish_replacing(output)
    problems: dict[Path, str] = {}
    for path in reversed(_checkpoints(output)):
        problem = problem_of(path)
        if problem is None:
            if problems:
                _log.warning(
                    "resume_from_checkpoint=True resumes from %s, because newer checkpoints cannot be used: %s",
                    path,
                    _listed(problems),
                )
            return str(path)
        problems[path] = problem
    if {*problems.values()} - {_UNFINISHED}:
        raise CheckpointError(
            f"{output} has no complete checkpoint to resume from: {_listed(problems)}; to train from the start, leave "
            "resume_from_checkpoint out"
        )
    if not problems and not (output / _ASIDE).exists():
        return True  # Trainer itself raises for this value
    _log.warning(
        "%s has no complete checkpoint, because its first save was interrupted: training begins at step 0",
        output,
    )
    return None


def _listed(problems: dict[Path, str]) -> str:
    return "; ".join(f"{path} {problem}" for path, problem in problems.items())


def _whole(checkpoint: Path) -> str:
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"Can't find a valid checkpoint at {checkpoint}: resume_from_checkpoint must be a directory that exists"
        )
    problem = problem_of(checkpoint)
    if problem is None:
        return str(checkpoint)
    whole = [path for path in _checkpoints(checkpoint.parent) if problem_of(path) is None]
    advice = (
        f"resume_from_checkpoint={str(whole[-1])!r} is complete: use it"
        if whole
        else "its directory has no complete checkpoint: train from the start"
    )
    raise CheckpointError(f"{checkpoint} cannot be used: it {problem}; {advice}")


def _remove(path: Path) -> None:
    """Remove a directory, or a link to a directory, but not the link's target."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _put_in_place(source: Path, target: Path) -> None:
    """Sync a checkpoint to the disk, and rename it to ``target``."""
    for directory, _, names in os.walk(source):
        for name in [*names, ""]:  # the empty name is the directory itself
            sync(Path(directory, name))
    if target.exists():
        replaced = target.parent / _REPLACED
        replaced.mkdir(exist_ok=True)
        target.rename(replaced / target.name)
    source.rename(target)
    sync(target.parent)
    _finish_replacing(target.parent)


def _finish_replacing(output: Path) -> None:
    """Remove replaced checkpoints, after other programs' files in them were moved to the new checkpoints. If a new
    checkpoint is missing, restore the replaced one.
    """
    replaced = output / _REPLACED
    if replaced.is_symlink() or not replaced.is_dir():
        return
    for old in replaced.iterdir():
        if not (output / old.name).exists():
            old.rename(output / old.name)
            continue
        for file in old.iterdir():
            known = any(fnmatch(file.name, pattern) for pattern in _OWN)
            if not known and not (output / old.name / file.name).exists():
                file.rename(output / old.name / file.name)
    _remove(replaced)


def _rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Keep ``limit`` complete checkpoints up to ``newest``, the best checkpoint, and checkpoints of later steps; remove
    all remaining ones.
    """
    if limit is None or limit <= 0:
        return
    kept = {
        newest.resolve(),
        *([Path(best).resolve()] if best else []),
    }
    older = [path for path in _checkpoints(newest.parent) if _step(path) < _step(newest)]
    rest = [path for path in older if path.resolve() not in kept]
    whole = [path for path in rest if problem_of(path) is None]
    room = max(0, limit - len(kept))
    staying = whole[len(whole) - room :]
    for path in rest:
        if path not in staying:
            aside = newest.parent / _ASIDE
            aside.mkdir(exist_ok=True)
            path.rename(aside / path.name)
            _remove(aside)
