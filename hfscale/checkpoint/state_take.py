"""Take a rank's state of a run as it is now, without communication and without writing."""

import hashlib
import io
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._compat.transformers.saving import write_configs
from ..distributed.mesh import Mesh
from ..errors import CheckpointError
from ..features.adapters import Adapters
from ..features.adapters.storage import write_adapter_config
from ..train.runtime import Runtime
from ..train.runtime.full_tensors import tensors_of_stage
from ..train.runtime.writing import is_writer
from .random_states import random_states
from .state_contents import StateContents, contents_of


@dataclass
class TakenState:
    """This rank's state that is not written yet.

    Attributes:
        mesh: the ranks that write it.
        runtime: of the run.
        contents: its tensors, of which ``contents.held`` are written: the run's own, or copies.
        step: the caller's step number.
        digests: of the states of other objects, by name.
        rest: this rank's other data, as the bytes of a file.
        entries: this rank's entries of the tensors that a converter saves.
        stored: key in the file of an adapter -> name of a parameter; empty without one, and on other ranks.
        beside: config files of a Hugging Face checkpoint, by name; on the first rank.
    """

    mesh: Mesh
    runtime: Runtime
    contents: StateContents
    step: int | None
    digests: dict[str, str]
    rest: bytes
    entries: list[tuple[Any, ...]]
    stored: dict[str, str]
    beside: dict[str, bytes]


def take_state(
    runtime: Runtime, optimizer: torch.optim.Optimizer | None, step: int | None, others: dict[str, Any]
) -> TakenState:
    """Return this rank's state of a run as it is now. Tensors are the run's own; everything else is copied.

    Raises:
        CheckpointError: something on this rank cannot be written.
    """
    contents = contents_of(runtime, optimizer)
    states = {name: other.state_dict() for name, other in others.items()}
    parts = {part.state_key: state for part in runtime.parts if (state := part.state(runtime))}
    random = random_states(runtime.mesh)
    rest = _plain_bytes({"random": random, "others": states, "options": contents.options, "parts": parts})
    writes = is_writer(runtime.mesh)
    adapters = runtime.part(Adapters)
    stored = adapters.stored_names(runtime) if writes and adapters is not None else {}
    digests = {name: _digest(state) for name, state in states.items()}
    entries, beside = tensors_of_stage(runtime), _beside(runtime)
    return TakenState(runtime.mesh, runtime, contents, step, digests, rest, entries, stored, beside)


def _beside(runtime: Runtime) -> dict[str, bytes]:
    """Return the config files, and code that came with the model."""
    if not is_writer(runtime.mesh):
        return {}
    with tempfile.TemporaryDirectory() as written:
        write_configs(runtime.model, Path(written))
        if (adapters := runtime.part(Adapters)) is not None:
            write_adapter_config(adapters.whole, adapters.name, Path(written))
        return {path.name: path.read_bytes() for path in sorted(Path(written).iterdir()) if path.is_file()}


def _plain_bytes(content: dict[str, Any]) -> bytes:
    """Return the bytes of ``torch.save``, if ``torch.load(weights_only=True)`` can read them."""
    for name, state in content["others"].items():
        file = io.BytesIO()
        try:
            torch.save(state, file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"the state of {name!r} is not plain data (numbers, strings, tensors, lists, dicts): {error}"
            ) from error
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _digest(state: Any) -> str:
    """Return a digest that is equal for equal states."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=repr):
                digest.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            digest.update(f"[{len(value)}".encode())
            for each in value:
                add(each)
        else:
            digest.update(repr(value).encode())

    add(state)
    return digest.hexdigest()
