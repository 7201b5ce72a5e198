"""Choose how the weights of a GGUF file are read: by slices, or, of other architectures, by transformers as a whole."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .._compat.transformers.classes import stock_class
from .._compat.transformers.gguf import tokenizer_of_gguf, weights_of_gguf
from ..distributed.files.dequantized import WordsInMemory
from ..distributed.files.gguf_file import GgufFile
from ..distributed.files.gguf_names import BY_SLICES
from ..distributed.files.pieces import Piece, TensorInPieces
from ..distributed.files.reader import TensorOnDisk
from ..distributed.files.sources import Source, gguf_source
from ..errors import first_line

_log = logging.getLogger(__name__)


def readable(path: Path, model: Any, tells: bool = False) -> Source:
    """Return the source of the weights in a file for a stock ``model`` on the meta device; ``tells``: of what all ranks
    read.
    """
    architecture = GgufFile(path).architecture
    if architecture in BY_SLICES:
        return gguf_source(path)
    if tells:
        _log.warning(
            "%s: every rank reads all of this file, since its architecture (%s) is read by slices for %s alone",
            path,
            architecture,
            ", ".join(BY_SLICES),
        )
    kind = stock_class(model)
    tensors = weights_of_gguf(kind, path, model.config, model.dtype)
    return Source("a GGUF file", path.parent, lambda _: _in_memory(tensors))


def _in_memory(tensors: Mapping[str, Tensor]) -> dict[str, TensorOnDisk]:
    found: dict[str, TensorOnDisk] = {}
    for name, tensor in tensors.items():
        whole = Piece((0,) * tensor.ndim, WordsInMemory(tensor, ()))
        found[name] = TensorInPieces(name, tensor.shape, tensor.dtype, [whole])
    return found


def write_small_files(path: Path, model: Any, target: Path) -> None:
    """Write the config of a ``model`` that a file describes to ``target``, and the tokenizer that is in the file."""
    model.config.save_pretrained(target)
    try:
        tokenizer_of_gguf(path).save_pretrained(target)
    except Exception as error:  # whatever transformers says of tokens that it does not know
        _log.warning(
            "%s: transformers makes no tokenizer of what is in this file (%s): copy the model's own beside the weights",
            path,
            first_line(error),
        )
