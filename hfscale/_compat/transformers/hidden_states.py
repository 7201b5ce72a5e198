"""Find the hidden states in the arguments of stock layers and blocks: the first positional argument, or a named one."""

from typing import Any

_NAME = "hidden_states"


def hidden_states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states among the arguments of a call; ``None`` if there are none."""
    return args[0] if args else kwargs.get(_NAME)


def with_hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], states: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call with the hidden states replaced by ``states``."""
    return (
        ((states, *args[1:]), kwargs)
        if args
        else (
            args,
            {
                **kwargs,
                _NAME: states,
            },
        )
    )


def other_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the named arguments other than the hidden states."""
    return {name: value for name, value in kwargs.items() if name != _NAME}
