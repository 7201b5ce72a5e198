"""List all attributes of other libraries that hfscale replaces until the process ends, and replace them.

All other replacements are undone at the end of a ``with`` block. The functions listed in this file are also called
directly by code of users and of other libraries, outside of hfscale's calls. Most of the original functions would then
take a rank's shards for the whole model, without an error. ``HFSCALE_GUARDS=0`` leaves out all of these replacements.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from types import ModuleType, TracebackType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..config.environment import guards_are_on

_STEP = "torch.optim.optimizer.Optimizer.step"
LASTING = {
    "accelerate.accelerator.Accelerator.prepare": "refuses a model that is spread over ranks",
    "accelerate.accelerator.Accelerator.prepare_model": "refuses a model that is spread over ranks",
    "bitsandbytes.backends.cpu.ops": "its logger leaves out a recommendation, made in every process",
    "peft.peft_model.PeftModel.__init__": "refuses a model that is spread over ranks",
    "peft.tuners.tuners_utils.BaseTuner.inject_adapter": "refuses a model that is spread over ranks",
    "peft.utils.save_and_load._get_tp_info": "refuses to return shards as adapters' full weights",
    "sys.excepthook": "tells other ranks what ends this one, and what held memory that has run out",
    "torch.compiler.config.recompile_limit": "64 graphs of one kind of layer instead of 8",
    "torch.amp.grad_scaler.GradScaler.step": "refuses gradients of which each rank holds another shard",
    "torch.amp.grad_scaler.GradScaler.unscale_": "refuses gradients of which each rank holds another shard",
    "torch.distributed.tensor.DTensor.data": "refuses assignments, which change nothing",
    "torch.nn.utils.clip_grad_norm_": "refuses gradients of which each rank holds another shard",
    "torch.nn.utils.get_total_norm": "refuses tensors of which each rank holds another shard",
    _STEP: "follows replaced parameters; refuses optimizers that need more than a shard",
    "trl.*Config.__post_init__": "keeps the generation_batch_size that it was given",
}
"""Map of the dotted name of an attribute of another library (with wildcards) to what hfscale's replacement does. The
replacements last until the process ends; most are made for the first model on several ranks.
"""

_undo: dict[str, Callable[[], None]] = {}
_told: list[tuple[Callable[[BaseException], Any], Callable[[Any], None] | None]] = []


def replace_for_good(holder: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``holder.name``, an attribute of a module or class, by ``make(holder.name)``; do it only once."""
    place = place_of(holder, name)
    if _is_wanted(place):
        stock = getattr(holder, name)
        setattr(holder, name, make(stock))
        _undo[place] = functools.partial(setattr, holder, name, stock)


def check_first(
    holder: Any,
    name: str,
    check: Callable[..., tuple[Any, ...]],
) -> None:
    """Replace the function ``holder.name`` by one that first calls ``check`` with the call's arguments, and then the
    original function with the positional arguments that ``check`` returns. Keyword-only arguments are passed on
    unchanged.
    """

    def make(function: Any) -> Any:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            # Arguments given by name become positional, so that ``check`` gets them in the function's order.
            given = inspect.signature(function).bind(*args, **kwargs)
            return function(*check(*given.args, **given.kwargs), **given.kwargs)

        return checked

    replace_for_good(holder, name, make)


def check_assigned(holder: type, name: str, check: Callable[[Any, Any], None]) -> None:
    """Call ``check(object, value)`` before ``object.name = value``, for objects of ``holder``, a class with a data
    descriptor ``name``.
    """

    def make(stock: Any) -> property:
        def assign(to: Any, value: Any) -> None:
            check(to, value)
            stock.__set__(to, value)

        return property(stock.__get__, assign, stock.__delete__)

    replace_for_good(holder, name, make)


def check_every_step(check: Callable[..., None]) -> None:
    """Call ``check(optimizer, ...)`` before every step of every optimizer."""
    if _is_wanted(_STEP):
        _undo[_STEP] = register_optimizer_step_pre_hook(check).remove


def at_an_uncaught_error(
    told: Callable[[BaseException], Any], behind: Callable[[Any], None] | None = None
) -> None:
    """Register two functions for an error that ends this process: ``told(error)`` is called before the traceback is
    printed, and ``behind(result of told)`` after it. The pair that was registered last is called first.
    """
    replace_for_good(sys, "excepthook", _hook_around)
    if (told, behind) not in _told:
        _told.append((told, behind))


def _hook_around(before: Callable[..., Any]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hooks = [(behind, told(error)) for told, behind in reversed(_told)]
        before(kind, error, trace)
        for behind, answer in hooks:
            if behind is not None:
                behind(answer)

    return hook


def leave_out_of_log(name: str, words: str) -> None:
    """Drop messages that contain ``words`` from the log of the logger ``name``."""
    if not _is_wanted(name):
        return

    def keeps(record: logging.LogRecord) -> bool:
        return words not in str(record.msg)

    logger = logging.getLogger(name)
    logger.addFilter(keeps)
    _undo[name] = functools.partial(logger.removeFilter, keeps)


def place_of(holder: Any, name: str) -> str:
    """Return the name by which :data:`LASTING` lists an attribute of a module or class."""
    if isinstance(holder, ModuleType):
        return f"{holder.__name__}.{name}"
    return f"{holder.__module__}.{holder.__qualname__}.{name}"


def changed_places() -> list[str]:
    """Return the dotted names of the attributes of other libraries that hfscale has replaced at present, sorted."""
    return sorted(_undo)


def undo_all() -> None:
    """Restore all attributes of other libraries that the functions of this file have replaced."""
    while _undo:
        _undo.popitem()[1]()


def _is_wanted(place: str) -> bool:
    """Return whether to replace the attribute with the dotted name ``place``: guards are on, and it is not replaced
    yet. Raise LookupError if :data:`LASTING` does not list it.
    """
    if not any(fnmatchcase(place, known) for known in LASTING):
        raise LookupError(
            f"{place} must be listed in LASTING of {__name__} before hfscale changes it: add it to that list"
        )
    return guards_are_on() and place not in _undo
