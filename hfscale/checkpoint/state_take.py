"""Take a state from a run as it is now: what one rank has of it. Other ranks are told nothing, nothing is written."""

import hashlib
import io
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._host.transformers.saving import write_configs
from ..errors import CheckpointError
from ..mesh import Mesh
from ..runtime import Runtime
from ..runtime.full_tensors import tensors_of_stage
from ..runtime.writing import is_writer
from .random_states import random_states
from .state_contents import StateContents, contents_of


@dataclass
class TakenState:
    """What this rank has of a state that is not written yet.

    Attributes:
        mesh: the ranks that write it.
        runtime: of the run.
        contents: its tensors, of which ``contents.held`` are written: the run's own, or copies.
        step: what the caller counted.
        digests: of the states of what else was given, by name.
        rest: what else this rank writes: a file's bytes.
        entries: what this rank tells of the tensors that a converter is to save.
        stored: key in the file of an adapter -> name of a parameter; empty where there is none, and on other ranks.
        beside: files that lie beside a Hugging Face checkpoint's weights, by name; of the first rank.
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
    """What this rank has of a run as it is now. Tensors are the run's own; all else is a copy.

    Raises:
        CheckpointError: something of this rank's cannot be written.
    """
    contents = contents_of(runtime, optimizer)
    states = {name: other.state_dict() for name, other in others.items()}
    parts = {type(part).__name__: state for part in runtime.parts if (state := part.state(runtime))}
    random = random_states(runtime.mesh)
    rest = _plain_bytes({"random": random, "others": states, "options": contents.options, "parts": parts})
    writes = is_writer(runtime.mesh)
    stored = {k: v for part in runtime.parts for k, v in part.stored_names(runtime).items()} if writes else {}
    digests = {name: _digest(state) for name, state in states.items()}
    entries, beside = tensors_of_stage(runtime), _beside(runtime)
    return TakenState(runtime.mesh, runtime, contents, step, digests, rest, entries, stored, beside)


def _beside(runtime: Runtime) -> dict[str, bytes]:
    """Configs, and code that came with the model."""
    if not is_writer(runtime.mesh):
        return {}
    with tempfile.TemporaryDirectory() as written:
        write_configs(runtime.model, Path(written))
        for part in runtime.parts:
            part.write_configs(runtime, Path(written))
        return {path.name: path.read_bytes() for path in sorted(Path(written).iterdir()) if path.is_file()}


def _plain_bytes(content: dict[str, Any]) -> bytes:
    """As ``torch.save`` writes it, if ``torch.load(weights_only=True)`` reads it."""
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
    """The same for equal states."""
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
