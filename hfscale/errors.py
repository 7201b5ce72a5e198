"""The exceptions hfscale raises. Every message says what was asked, what was found and what to do."""


class HFScaleError(Exception):
    """Root of every error raised by hfscale."""


class ConfigError(HFScaleError, ValueError):
    """A field of a :class:`~hfscale.ParallelConfig`, or an argument, is unknown or impossible in itself."""


class PlanError(HFScaleError, ValueError):
    """A layout does not fit a model. The message lists every problem found, each with the valid values."""


class MeshError(HFScaleError, RuntimeError):
    """The processes that were started do not fit the layout."""


class CheckpointError(HFScaleError, RuntimeError):
    """A checkpoint could not be read or written whole."""
