"""Define the user's options for matrix products in 8 bits: :class:`Float8Config`."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, check_choice, check_names, check_switch
from .declared import Spelled

FLOAT8_RECIPES = ("tensorwise", "rowwise")  # granularity of scales, with torchao's names


@dataclass(frozen=True)
class Float8Config(Spelled):
    """Options of ``mixed_precision="fp8"``.

    Attributes:
        recipe: granularity of the scales. ``"tensorwise"``: one scale per tensor, from its largest entry; gradients in
            e5m2, all other operands in e4m3. ``"rowwise"``: one scale, a power of two, for each vector that is
            contracted in the product; all operands in e4m3. It is more exact than ``"tensorwise"``, and slower.
        leave_out: ends of the names of modules that compute in 16 bits, like ``["down_proj", "layers.0.mlp"]``. Heads,
            embeddings, routers and experts never compute in 8 bits.
        fp8_all_gather: whether data ranks that shard a weight (``dp_shard_size``) all-gather 8 bits per entry instead
            of 16; the results are the same, because shards use the scale of the full weight. By default they do under
            ``"tensorwise"``. ``"rowwise"`` does not support it: it needs two 8-bit copies of each weight, which are as
            many bits as one 16-bit copy.

    Raises:
        ConfigError: a value is unknown or impossible.
    """

    recipe: str = "tensorwise"
    leave_out: Sequence[str] = ()
    fp8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        if str(self.recipe).lower().startswith("mx"):
            raise ConfigError(
                f"recipe={self.recipe!r}: hfscale does not support MX formats (a scale per 32 entries, for Blackwell "
                "GPUs): use 'rowwise', whose scales are closest to MX, or 'tensorwise'"
            )
        check_choice("recipe", self.recipe, FLOAT8_RECIPES)
        check_names("leave_out", self.leave_out, '["down_proj"]')
        if self.fp8_all_gather is not None:
            check_switch("fp8_all_gather", self.fp8_all_gather)
        if self.fp8_all_gather and self.recipe == "rowwise":
            raise ConfigError(
                "fp8_all_gather=True cannot be used with recipe='rowwise', which needs two copies of each weight in 8 "
                "bits, scaled for the output and for the gradient of the input, and these are no smaller than one "
                "copy in 16 bits: use 'tensorwise', or leave fp8_all_gather out"
            )
        object.__setattr__(self, "leave_out", tuple(self.leave_out))

    @property
    def gathers(self) -> bool:
        """Return whether data ranks all-gather sharded weights in 8 bits."""
        return self.recipe == "tensorwise" and self.fp8_all_gather is not False
