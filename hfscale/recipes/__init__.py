"""Run recipes (YAML files that describe a training run) from start to end: read the settings, prepare the data, train,
and write results.
"""

from importlib.util import find_spec
from pathlib import Path

from ..errors import ConfigError

LIBRARY = Path(__file__).parent / "library"  # the recipes that come with hfscale

_PACKAGES = {
    "datasets": "datasets",
    "matplotlib": "matplotlib",
    "omegaconf": "omegaconf",
    "yaml": "PyYAML",
}


def check_installed() -> None:
    """Raise :class:`ConfigError` if packages that only recipes need are not installed."""
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"recipes need {', '.join(missing)}, which the rest of hfscale does not need, but which "
            f'{"is" if len(missing) == 1 else "are"} not installed: pip install "hfscale[recipes]"'
        )
