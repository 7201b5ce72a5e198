"""Recognize checkpoints of other trainers by the names of files alone, and name the tool that converts each.

No file is opened, because the metadata of torch's distributed checkpoints are pickles.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from ...distributed.files.sources import AddedSource
from ...distributed.files.weight_files import SLICED

_DEEP = 2  # levels of subdirectories to search
_MOST = 200  # at most so many directories are searched
_NO_WEIGHTS = (
    "optimizer",
    "scheduler",
    "scaler",
    "rng_state",
    "random_states",
    "sampler",
    "training_args",
)
_BESIDE = "copy the model's config.json and tokenizer into the same directory"
_CONFIG = "the config of its model as config="
_IN_STOCK_CODE = (
    "load it once in stock code (model.load_state_dict(...); model.save_pretrained(OUT))"
)


@dataclass(frozen=True)
class _Kind:
    """Describe one format of checkpoints, and the ``tool`` that converts it. ``{}`` in ``tool`` stands for the
    checkpoint's directory.
    """

    names: tuple[str, ...]  # patterns; a path in the directory must match each
    what: str
    tool: str


_KINDS = (
    _Kind(
        (SLICED,),
        "slices of weights, as transformers' save_pretrained(distributed_checkpoint=True) writes them",
        "give {} itself",
    ),
    _Kind(
        ("pytorch_model_fsdp_*/.metadata",),
        "FSDP's shards, as Accelerate and Trainer write them",
        "give {} itself, and " + _CONFIG,
    ),
    _Kind(
        ("pytorch_model_fsdp*rank*.bin",),
        "FSDP's shards, a file of each rank",
        "load them once in Accelerate over as many ranks, and save with state_dict_type FULL_STATE_DICT",
    ),
    _Kind(("pytorch_model_fsdp.bin",), "FSDP's full state dict", "give {} itself, and " + _CONFIG),
    _Kind(
        ("zero_to_fp32.py",),
        "DeepSpeed's ZeRO partitions",
        "merge them once (python {}/zero_to_fp32.py {} OUT --safe_serialization), and " + _BESIDE,
    ),
    *(
        _Kind(
            (name,),
            "DeepSpeed's partitions",
            "merge them once by the zero_to_fp32.py that DeepSpeed writes next to them, or by "
            "deepspeed.utils.zero_to_fp32, and " + _BESIDE,
        )
        for name in ("*_model_states.pt", "global_step*/*_model_states.pt")
    ),
    *(
        _Kind(
            names,
            "a checkpoint of Megatron's",
            "export it where its model is built: AutoBridge.export_ckpt of Megatron-Bridge writes a Hugging Face "
            "directory",
        )
        for names in (
            ("common.pt", "metadata.json"),
            ("latest_checkpointed_iteration.txt",),
            ("mp_rank_*/model_optim_rng.pt",),
            ("weights/common.pt",),
        )
    ),
    _Kind(
        (".metadata",),
        "a distributed checkpoint of torch's (DCP), as FSDP2, torchtitan and Lightning write them",
        "give {} itself, and " + _CONFIG,
    ),
    _Kind(("*.gguf",), "weights in GGUF files", "give the path of one to hfscale.from_pretrained"),
    _Kind(
        ("consolidated*.pth",),
        "weights as Meta publishes Llama",
        "convert them once with transformers' convert_llama_weights_to_hf.py",
    ),
    _Kind(
        ("pytorch_model*.bin",),
        "weights of transformers in files of torch.save (pytorch_model.bin)",
        "give the directory that has them, with its config.json: they are read as safetensors are",
    ),
    *(
        _Kind((name,), f"weights in a file of torch.save ({name})", _IN_STOCK_CODE)
        for name in ("*.pt", "*.pth", "*.ckpt")
    ),
    *(
        _Kind((name,), f"weights of another framework ({name})", "convert them once to PyTorch")
        for name in ("*.nemo", "*.msgpack", "*.h5", "*.npz")
    ),
)
"""The known formats of checkpoints. The first format that fits counts, so special formats precede general ones."""


def recognize(source: Path) -> str | None:
    """Return a phrase with the format of the checkpoint in ``source`` or in its subdirectories, and the tool that
    converts it.

    Return ``None`` if no format is recognized.
    """
    if source.is_file():
        return _of({source.name}, source.parent)
    for directory in islice(_directories(source, _DEEP), _MOST):
        if (found := _of(_paths(directory), directory)) is not None:
            return found
    return None


def _of(paths: set[str], directory: Path) -> str | None:
    for kind in _KINDS:
        if all(any(_fits(path, name) for path in paths) for name in kind.names):
            tool = kind.tool.replace("{}", str(directory))
            return f"{kind.what}: {tool}"
    return None


def _fits(path: str, name: str) -> bool:
    return path.count("/") == name.count("/") and fnmatch(path, name)


def _paths(directory: Path) -> set[str]:
    """Return the paths, relative to ``directory``, of the files that may contain weights, in it and in its
    subdirectories.
    """
    files = (
        file
        for place in _directories(directory, 1)
        for file in place.iterdir()
        if not file.is_dir()
    )
    found = (file for file in islice(files, 50 * _MOST) if not file.name.startswith(_NO_WEIGHTS))
    return {file.relative_to(directory).as_posix() for file in found}


def _directories(directory: Path, deep: int) -> Iterator[Path]:
    """Yield a directory and its subdirectories down to ``deep`` levels, level by level, except hidden ones."""
    level = [directory]
    for _ in range(deep + 1):
        level = [each for each in level if each.is_dir()]
        yield from level
        level = [
            inner
            for each in level
            for inner in sorted(each.iterdir())
            if not inner.name.startswith(".")
        ]


class _Others(AddedSource):
    def recognize(self, source: Path) -> str | None:
        return recognize(source)


OTHERS = _Others()
