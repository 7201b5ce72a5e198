"""Torch's selective checkpointing: keep the results of chosen operators while the rest is recomputed.

Torch's two modes count every operator, and expect a recomputation to call each as often as the first pass did. With
data ranks that does not hold: experts' weights that replicas share are gathered inside of a layer unless they are
gathered already, so that a recomputation may gather where the first pass did not. Here the modes see only the chosen
operators.
"""

from collections.abc import Collection
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts


def kept_results(operators: Collection[Any]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the modes for the first pass, which keeps the results of ``operators``, and for the recomputation."""
    first, again = create_selective_checkpoint_contexts(list(operators))
    return _Of(operators, first), _Of(operators, again)


class _Of(TorchDispatchMode):
    """Pass ``operators`` to ``mode``, and run all others as they are."""

    def __init__(self, operators: Collection[Any], mode: TorchDispatchMode) -> None:
        super().__init__()
        self._operators, self._mode = frozenset(operators), mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignore operators inside of compiled blocks, as torch's own modes do."""
        return True

    def __enter__(self) -> Any:
        with self._mode:  # resets its counts
            pass
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass one operator to the mode, or run it."""
        if func in self._operators:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
