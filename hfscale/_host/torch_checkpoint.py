"""Results of chosen operators, kept while what is around them is computed again (torch's selective checkpointing).

Torch's two modes count every operator, and expect a recomputation to call each as often as the first pass did. Data
ranks need not: weights of experts that replicas share are gathered inside of a layer, if they are not whole already,
so that a recomputation may gather where the first pass did not. Here the modes see the chosen operators alone.
"""

from collections.abc import Collection
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts


def kept_results(operators: Collection[Any]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts for the first pass, which keeps what ``operators`` return, and for the recomputation, which takes it."""
    first, again = create_selective_checkpoint_contexts(list(operators))
    return _Of(operators, first), _Of(operators, again)


class _Of(TorchDispatchMode):
    """Within: ``mode`` is asked about ``operators``, and others run as they are."""

    def __init__(self, operators: Collection[Any], mode: TorchDispatchMode) -> None:
        super().__init__()
        self._operators, self._mode = frozenset(operators), mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's own: what a compiled block runs is its own affair."""
        return True

    def __enter__(self) -> Any:
        with self._mode:  # which begins to count anew
            pass
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        if func in self._operators:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
