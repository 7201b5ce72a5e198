"""Describe a directory: states, a checkpoint, or an adapter; whether it is complete, and who wrote it."""

from collections import Counter
from datetime import datetime, timezone
from math import prod
from pathlib import Path

from ..distributed.files.complete import content_problems, read_mark
from ..distributed.files.reader import SafetensorsFile, open_tensors
from ..distributed.files.replace import finish_move
from ..errors import CheckpointError
from .state_directory import candidates, mark_of, problems_of, states_in
from .state_format import INDEX, StateIndex, StateReader


def inspect(source: Path, verify: bool = True) -> tuple[str, bool]:
    """Return a description of ``source`` in lines of text, and whether all is complete; ``verify`` reads all of it."""
    finish_move(source)
    files = sorted(source.glob("*.safetensors"))
    if files and not (source / INDEX).exists():
        return _checkpoint(source, files)
    states = states_in(source) or candidates(source)
    if states[0] == source or len(states) == 1:
        text, problems = _state(states[0], verify)
        return "\n".join([*text, *(f"  not whole: {problem}" for problem in problems)]), not problems
    lines, whole = [f"{source}: {len(states)} states, the newest first"], True
    for state in states:
        problems = _problems(state, verify)
        when = datetime.fromtimestamp(mark_of(state).written, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        lines.append(f"  {state.name}: {f'not whole: {problems[0]}' if problems else f'whole, written {when}'}")
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
        index = StateIndex.read(directory)
        reader, sizes = StateReader(directory, index), Counter[str]()  # bytes of full tensors, by kind
        for key, tensor in index.tensors.items():
            sizes[key.partition("/")[0]] += prod(tensor.shape) * reader.dtype(key).itemsize
    except CheckpointError as error:
        return [f"{directory}: a state that cannot be read"], [*problems, str(error)]
    layout = " x ".join(f"{axis}{size}" for axis, size in index.sizes.items() if size > 1) or "one process"
    step = "no step given" if index.step is None else f"step {index.step}"
    lines = [f"{directory}: a state of {'a model with adapters' if index.adapter else 'a model'}, {step}"]
    lines.append(f"  layout: {layout}, {index.world} ranks, {index.batch_world} distinct batches in a step")
    lines += [f"  pipeline rank {rank}: layers {layers}" for rank, layers in enumerate(index.layers)]
    counts = Counter(key.partition("/")[0] for key in index.tensors)
    lines += [f"  {kind}: {counts[kind]} tensors, {sizes[kind]:,} bytes" for kind in counts]
    if index.others:
        lines.append(f"  besides: {', '.join(index.others)}")
    lines.append("  written by " + ", ".join(f"{name} {version}" for name, version in index.versions.items()))
    return lines, problems


def _checkpoint(source: Path, files: list[Path]) -> tuple[str, bool]:
    problems, tensors, total = [], 0, 0
    for file in files:
        try:
            SafetensorsFile(file)
            found = open_tensors([file]).values()
            tensors, total = tensors + len(found), total + sum(prod(t.shape) * t.dtype.itemsize for t in found)
        except CheckpointError as error:
            problems.append(str(error))
    what = "an adapter" if (source / "adapter_config.json").exists() else "a Hugging Face checkpoint"
    lines = [f"{source}: {what}, {len(files)} files, {tensors} tensors, {total:,} bytes"]
    if not any((source / name).exists() for name in ("config.json", "adapter_config.json")):
        problems.append("it has no config.json")
    return "\n".join([*lines, *(f"  not whole: {problem}" for problem in problems)]), not problems
