"""Copy contents of a checkpoint that the stock class does not load: tensors of layers that draft tokens for speculative
decoding, and a tokenizer's files.

transformers ignores these tensors, so a plain save would lose them, and speculative decoding would stop working. These
tensors do not train: a save copies each of them unchanged from the checkpoint that the model was loaded from.
"""

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from .._compat.transformers.classes import class_name
from ..distributed.files.directories import leads_out
from ..distributed.files.reader import TensorOnDisk
from ..distributed.files.replace import ADAPTER_CONFIG
from ..distributed.files.sources import open_weights
from ..distributed.files.writer import CheckpointWriter
from ..errors import CheckpointError
from .coverage import carried_by
from .stored_forms.forms import as_plain
from .stored_forms.scheme import form_in
from .written_form import PlainForm

_log = logging.getLogger(__name__)
_SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
_WRITTEN = ("config.json", "generation_config.json", ADAPTER_CONFIG, "trainer_state.json")
_MOST_NAMED = 3


def carried_tensors(model: nn.Module, written: PlainForm) -> dict[str, TensorOnDisk]:
    """Return the tensors of a model's source checkpoint that the model's class does not load, which a save copies, by
    the names under which they are ``written``. Log their names.
    """
    carried = carried_by(model)
    if carried is None or not carried.names:
        return {}
    found = {
        name: tensor for name, tensor in _source(carried.directory).items() if name in carried.names
    }
    lost = sorted(carried.names - found.keys())
    if found:
        _log.info(
            "%d tensors that %s does not load are copied unchanged from %s: %s",
            len(found), class_name(model), carried.directory, _some(found),
        )  # fmt: skip
    if lost:
        _log.warning(
            "%d tensors that %s does not load cannot be copied, because %s no longer has them, so this checkpoint "
            "lacks them: %s",
            len(lost), class_name(model), carried.directory, _some(lost),
        )  # fmt: skip
    return written.layout(found)


def stored_keys(model: nn.Module) -> list[str]:
    """Return the names of all tensors in the checkpoint that a model was loaded from; empty if it no longer exists."""
    carried = carried_by(model)
    return [] if carried is None else list(_source(carried.directory))


def _source(directory: Path) -> dict[str, TensorOnDisk]:
    with suppress(CheckpointError):  # a damaged source counts as missing
        return as_plain(open_weights(directory), form_in(directory))
    return {}


def copy_tensors(tensors: Mapping[str, TensorOnDisk], writer: CheckpointWriter) -> None:
    """Copy ``tensors`` from their files to the checkpoint that ``writer`` writes, one tensor at a time."""
    for name, tensor in tensors.items():
        writer.add(name, tensor[...])


def copy_files(model: nn.Module, staging: Path, target: Path) -> None:
    """Copy the files of a tokenizer, a processor and custom code to ``staging``, except files that are already in
    ``staging`` or ``target``.
    """
    carried = carried_by(model)
    if carried is None or not carried.directory.is_dir():
        return
    for path in sorted(carried.directory.iterdir()):
        wanted = (
            path.suffix in _SUFFIXES
            and path.name not in _WRITTEN
            and not path.name.endswith(".index.json")
        )
        known = (staging / path.name).exists() or (target / path.name).exists()
        if (
            wanted
            and path.is_file()
            and not known
            and not leads_out(path, carried.directory / "config.json")
        ):
            shutil.copyfile(path, staging / path.name)


def _some(names: Any) -> str:
    first = sorted(names)[:_MOST_NAMED]
    return ", ".join(first) + (", ..." if len(names) > len(first) else "")
