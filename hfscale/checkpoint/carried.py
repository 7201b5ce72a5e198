"""Copy checkpoint contents that the stock class does not load: ``mtp.*``, drafters, a tokenizer's files.

transformers ignores such tensors, so a plain save would lose them, and with them speculative decoding. They do not
train: a save copies them, one by one and unchanged, from the checkpoint that the model was loaded from.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .._compat.transformers.classes import class_name
from ..distributed.files.reader import TensorOnDisk, open_tensors

_log = logging.getLogger(__name__)
_SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
_WRITTEN = ("config.json", "generation_config.json", "adapter_config.json", "trainer_state.json")
_MOST_NAMED = 3


@dataclass(frozen=True)
class Carried:
    """Hold what a save copies from the checkpoint in ``directory``.

    Attributes:
        tensors: stored name -> shape and dtype of each tensor that the model has no parameter or buffer for.
    """

    directory: Path
    tensors: Mapping[str, tuple[Any, ...]]


def note_carried(model: Any, files: Sequence[str | Path], stored: Mapping[str, TensorOnDisk], own: set[str]) -> None:
    """Record on a new model what else its checkpoint holds; ``own`` are the stored names that the model loads.

    A model of another class than the checkpoint's (a classifier of a causal LM's) takes nothing along: a head that it
    replaced is not part of it.
    """
    if class_name(model) in (model.config.architectures or ()):
        others = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items() if name not in own}
        model._hfscale_carried = Carried(Path(files[0]).parent, others)


def carried_tensors(model: nn.Module) -> dict[str, TensorOnDisk]:
    """Return the tensors to copy, by stored name, and log which these are.

    A tensor that is not in the source any more is left out with a warning: a run is not lost for it.
    """
    carried = _carried(model)
    if carried is None or not carried.tensors:
        return {}
    files = sorted(carried.directory.glob("*.safetensors"))
    stored = {name: tensor for name, tensor in open_tensors(files).items() if name in carried.tensors}
    found = {name: t for name, t in stored.items() if (t.shape, t.dtype) == carried.tensors[name]}
    if found:
        _log.info(
            "%d tensors that %s does not load are copied from %s as they are: %s",
            len(found), class_name(model), carried.directory, _some(found),
        )  # fmt: skip
    if lost := sorted(carried.tensors.keys() - found.keys()):
        _log.warning(
            "%d tensors that %s does not load are no longer in %s, so this checkpoint lacks them: %s",
            len(lost), class_name(model), carried.directory, _some(lost),
        )  # fmt: skip
    return found


def copy_files(model: nn.Module, staging: Path, target: Path) -> None:
    """Copy a tokenizer's, a processor's and custom code's files to ``staging``, unless there or in ``target``."""
    carried = _carried(model)
    for path in sorted(carried.directory.iterdir()) if carried is not None and carried.directory.is_dir() else ():
        wanted = path.suffix in _SUFFIXES and path.name not in _WRITTEN and not path.name.endswith(".index.json")
        known = (staging / path.name).exists() or (target / path.name).exists()
        if wanted and path.is_file() and not known:
            shutil.copyfile(path, staging / path.name)


def _carried(model: nn.Module) -> Carried | None:
    return getattr(model, "_hfscale_carried", None)


def _some(names: Any) -> str:
    """Return the first few names in words."""
    first = sorted(names)[:_MOST_NAMED]
    return ", ".join(first) + (", ..." if len(names) > len(first) else "")
