"""Convert a saved state to a Hugging Face directory, one tensor at a time, without a GPU; describe directories."""

import logging
import shutil
from collections import Counter
from datetime import datetime, timezone
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .._compat.peft import NEW_WEIGHTS
from .._compat.transformers.added_layers import stored_names
from .._compat.transformers.classes import empty_model
from .._compat.transformers.stored import AsStored
from ..config.parallel import AXES, ParallelConfig
from ..distributed.files.complete import MARK, content_problems, read_mark
from ..distributed.files.replace import ADAPTER_CONFIG, finish_move
from ..distributed.files.sources import find_source, has_weights, written_elsewhere
from ..distributed.files.weight_files import open_tensors, weight_files
from ..distributed.files.writer import REPLACED, CheckpointWriter
from ..distributed.mesh import Mesh
from ..errors import CheckpointError
from ..features.adapters.prompts import written_by_peft
from ..features.adapters.several import config_in_state
from ..features.adapters.storage import WEIGHTS, read_config
from ..features.added_layers import named_in
from ..train.runtime.writing import all_or_none, atomic_directory
from .convert_source import describe_source
from .copied import carried_tensors, copy_files, copy_tensors, stored_keys
from .coverage import note_carried
from .save import write_parameter
from .state_directory import candidates, find_whole, mark_of, problems_of, states_in
from .state_format import INDEX, StateIndex, StateReader
from .stored_forms.scheme import describe_form
from .written_form import written_form

_log = logging.getLogger(__name__)
_CONFIGS = (".json", ".py", ".jinja")


def convert_state(
    source: Path,
    target: Path,
    *,
    max_shard_size: str | int = "5GB",
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> StateIndex:
    """Write the weights of a state as a Hugging Face directory, or an adapter as PEFT's; return the state's index.

    The written bytes equal the bytes that :func:`hfscale.save_pretrained` would have written. ``source`` is the
    directory of one state, or of several states. ``quantization`` is that of :func:`hfscale.save_pretrained`.
    """
    alone = Mesh(ParallelConfig(), torch.device("cpu"), dict.fromkeys(AXES, 0))
    with all_or_none(alone, f"{source} could not be read"):
        directory = find_whole(source, alone, verify=True)
    reader = StateReader(directory)
    index = reader.index
    missing = [name for name, key in index.stored.items() if key not in index.tensors]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} weights, for example {missing[0]}, because the run held them in 4 or 8 "
            "bits and states do not contain such weights: take these weights from the checkpoint that the model was "
            "loaded from"
        )
    with atomic_directory(target, stale=REPLACED) as staging:
        if index.adapter:
            _write_adapters(reader, staging.path)
        else:
            _write_model(reader, staging.path, max_shard_size, trust_remote_code, quantization)
    return index


def _write_adapters(reader: StateReader, target: Path) -> None:
    """Write each adapter of a state to the place where the model would write it: the adapter ``default``, or a single
    adapter, to ``target`` itself, and further adapters to directories of their names.
    """
    places: dict[str, dict[str, str]] = {}
    for stored, key in reader.index.stored.items():
        place, _, name = stored.rpartition("/")
        places.setdefault(place, {})[name] = key
    for place, keys in places.items():
        below = target / place
        below.mkdir(exist_ok=True)
        shutil.copyfile(reader.directory / config_in_state(place), below / ADAPTER_CONFIG)
        config, _ = read_config(str(below))
        tensors = {name: reader.whole(key) for name, key in keys.items()}
        written = written_by_peft(config, tensors)
        save_file(written, below / WEIGHTS, metadata={"format": "pt"})
    _tell_of_others(reader.directory, reader.index)


def _tell_of_others(directory: Path, index: StateIndex) -> None:
    """Warn if a state has adapters that are not converted, because its index does not tell which files their tensors
    belong in. Older versions of hfscale listed only the active adapter in the index.
    """
    listed = set(index.stored.values())
    others = [
        key
        for key in index.tensors
        if key not in listed and any(part in key for part in NEW_WEIGHTS)
    ]
    if others:
        _log.warning(
            "%s lists only its active adapter, because an older version of hfscale wrote it, so its %d tensors of "
            "other adapters (%s, for example) are not written: load the state into a model with all of its adapters, "
            "and save the adapters from that model",
            directory,
            len(others),
            others[0],
        )


def _write_model(
    reader: StateReader,
    target: Path,
    size: str | int,
    trusted: bool,
    quantization: str | None,
) -> None:
    directory = reader.directory
    tensors = reader.index.tensors
    stored = reader.index.stored
    try:
        model = empty_model(directory, trusted)
    except (LookupError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{directory}: the model cannot be built from its config: {error}: correct its config.json"
        ) from error
    contents: dict[str, Tensor] = {
        name: torch.empty(
            tensors[key].shape,
            dtype=reader.dtype(key),
            device="meta",
        )
        for name, key in stored.items()
    }
    if reader.index.carried is not None:
        source, names = reader.index.carried
        note_carried(model, Path(source), names)
    for added in named_in(stored):
        added.add(model)
        stored_names(model).read(model, stored_keys(model))
    converted = AsStored(model, contents)
    again = written_form(quantization, model)
    carried = carried_tensors(model, again)
    count = sum(
        prod(tensors[key].shape) for key in set(stored.values()) if key.startswith("weights/")
    )
    writer = CheckpointWriter(target, {**again.layout(converted.layout), **carried}, size, count)
    for name, key in stored.items():
        write_parameter(writer, converted, again, name, reader.whole(key))
    copy_tensors(carried, writer)
    writer.finish()
    for path in directory.iterdir():
        if path.suffix in _CONFIGS and path.name not in (INDEX, MARK):
            shutil.copyfile(path, target / path.name)
    copy_files(model, target, target)
    if again.form is not None:
        describe_form(target, again.form)


def inspect(source: Path, verify: bool = True) -> tuple[str, bool]:
    """Return a description of ``source`` in lines of text, and whether all of it is complete; ``verify`` reads every
    file.
    """
    finish_move(source)
    if (foreign := find_source(source)) is not None and not states_in(source):
        text, whole = describe_source(foreign, source, verify)
        return "\n".join(text), whole
    files = weight_files(source)
    is_state = (source / INDEX).exists() or not files
    states = states_in(source)
    if not states and not has_weights(source) and (other := written_elsewhere(source)) is not None:
        what, _, tool = other.partition(": ")
        return f"{source}: {what}, which hfscale does not read\n  {tool}", False
    states = (states or candidates(source)) if is_state else [source]
    if states[0] == source or len(states) == 1:
        text, problems = _state(states[0], verify) if is_state else _checkpoint(source, files)
        return "\n".join(
            [*text, *(f"  not whole: {problem}" for problem in problems)]
        ), not problems
    lines = [f"{source}: {len(states)} states, the newest first"]
    whole = True
    for state in states:
        problems = _problems(state, verify)
        when = datetime.fromtimestamp(mark_of(state).written, timezone.utc).strftime(
            "%Y-%m-%d %H:%M:%S UTC"
        )
        lines.append(
            f"  {state.name}: {f'not whole: {problems[0]}' if problems else f'whole, written {when}'}"
        )
        whole = whole and not problems
    return "\n".join(lines), whole


def _problems(state: Path, verify: bool) -> list[str]:
    problems = problems_of(state)
    if not problems and verify:
        mark = read_mark(state)
        problems = content_problems(state, mark, mark.files)
    return problems


def _state(directory: Path, verify: bool) -> tuple[list[str], list[str]]:
    problems = _problems(directory, verify)
    try:
        reader = StateReader(directory)
        index = reader.index
        # bytes of full tensors, by kind
        sizes = Counter[str]()
        for key, tensor in index.tensors.items():
            sizes[key.partition("/")[0]] += prod(tensor.shape) * reader.dtype(key).itemsize
    except CheckpointError as error:
        return [f"{directory}: a state that cannot be read"], [*problems, str(error)]
    layout = (
        " x ".join(f"{axis}{size}" for axis, size in index.sizes.items() if size > 1)
        or "one process"
    )
    step = "no step given" if index.step is None else f"step {index.step}"
    lines = [
        f"{directory}: a state of {'a model with adapters' if index.adapter else 'a model'}, {step}"
    ]
    lines.append(
        f"  layout: {layout}, {index.world} ranks, {index.batch_world} distinct batches in a step"
    )
    lines += [
        f"  pipeline rank {rank}: layers {layers}" for rank, layers in enumerate(index.layers)
    ]
    counts = Counter(key.partition("/")[0] for key in index.tensors)
    lines += [f"  {kind}: {counts[kind]} tensors, {sizes[kind]:,} bytes" for kind in counts]
    if index.others:
        lines.append(f"  besides: {', '.join(index.others)}")
    lines.append(
        "  written by " + ", ".join(f"{name} {version}" for name, version in index.versions.items())
    )
    return lines, problems


def _checkpoint(source: Path, files: list[Path]) -> tuple[list[str], list[str]]:
    problems = []
    tensors = 0
    total = 0
    for file in files:
        try:
            found = open_tensors([file]).values()
            tensors = tensors + len(found)
            total = total + sum(prod(t.shape) * t.dtype.itemsize for t in found)
        except CheckpointError as error:
            problems.append(str(error))
    what = "an adapter" if (source / ADAPTER_CONFIG).exists() else "a Hugging Face checkpoint"
    lines = [f"{source}: {what}, {len(files)} files, {tensors} tensors, {total:,} bytes"]
    if not any((source / name).exists() for name in ("config.json", ADAPTER_CONFIG)):
        problems.append("it has no config.json")
    return lines, problems
