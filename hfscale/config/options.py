"""Define the user's options other than the layout, such as precision and memory, and check that they fit together."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from accelerate import GradScalerKwargs

from ..errors import ConfigError, check_choice, check_number, check_switch
from .float8 import Float8Config
from .memory import MemoryConfig
from .parallel import ParallelConfig
from .routing import RoutingConfig
from .sections import SECTIONS

MIXED_PRECISIONS = {
    "no": None,
    **dict.fromkeys(("bf16", "bf16_params", "fp8"), torch.bfloat16),
    "fp16": torch.float16,
}
"""Map each value of ``mixed_precision`` to the dtype in which forward passes compute; ``None``: that of the weights.
For ``fp8`` this is the dtype outside 8-bit products. With ``bf16_params`` parameters are cast when they are used, and
autocast is off.
"""


@dataclass(frozen=True)
class Options:
    """Hold the options of a run other than the layout: precision, memory, routing, kernels, compilation. Raise
    :class:`ConfigError` for an unknown or invalid value.
    """

    mixed_precision: str = "no"  # a key of :data:`MIXED_PRECISIONS`
    # router and load balancing of MoE layers; ``None``: the model's own router
    routing: RoutingConfig | None = None
    memory: MemoryConfig | None = None  # recomputation, offloading and compression
    loss_scaling: GradScalerKwargs | None = None  # scaling of the loss under ``"fp16"``
    float8: Float8Config | None = None  # scales of 8-bit products under ``"fp8"``
    # whether to use Liger's kernels, or a switch per kernel by name
    use_liger_kernel: bool | Mapping[str, bool] = False
    # weight of the multi-token-prediction loss; ``None``: the model has no MTP layers
    mtp_loss_weight: float | None = None
    # whether to compile each layer with torch's default backend (``"auto"``: only on devices with Triton kernels), or
    # the name of another backend
    compile: bool | str = False
    # whether LoRA is computed by one fused operator instead of PEFT's own code
    fused_adapters: bool = True

    def __post_init__(self) -> None:
        for name, kind in SECTIONS.items():
            if not isinstance(given := getattr(self, name), kind | None):
                raise ConfigError(
                    f"{name} must be a hfscale.{kind.__name__}, got {given!r}: pass one, or leave this argument out"
                )
        check_choice("mixed_precision", self.mixed_precision, tuple(MIXED_PRECISIONS))
        self._check_loss_scaling()
        if self.float8 is not None and self.mixed_precision != "fp8":
            raise ConfigError(
                f"float8= needs mixed_precision='fp8', got {self.mixed_precision!r}: leave float8 out"
            )
        self._check_liger()
        if self.mtp_loss_weight is not None:
            check_number("mtp_loss_weight", self.mtp_loss_weight, above=0)
        check_switch("fused_adapters", self.fused_adapters)
        if self.compile == "cudagraphs":
            raise ConfigError(
                "compile='cudagraphs' replays kernels on the memory addresses of one batch, but hfscale's layers run "
                "collectives, gather weights and get batches of any length: use compile=True"
            )
        known = ("auto", *torch.compiler.list_backends(()))
        if not isinstance(self.compile, bool) and self.compile not in known:
            raise ConfigError(
                f"compile must be True, False or one of {', '.join(known)}, got {self.compile!r}: pass one of these"
            )

    @property
    def memory_levers(self) -> MemoryConfig:
        """The memory options; the defaults if ``memory`` is ``None``."""
        return self.memory or MemoryConfig()

    @property
    def scaling(self) -> GradScalerKwargs:
        """Settings of the gradient scaler for ``"fp16"``; torch's defaults if ``loss_scaling`` is ``None``."""
        return self.loss_scaling or GradScalerKwargs()

    @property
    def around_products(self) -> str:
        """The mixed precision, by Accelerate's name, of all operations except matrix products in 8 bits."""
        return "bf16" if self.mixed_precision in ("fp8", "bf16_params") else self.mixed_precision

    @property
    def casts_parameters(self) -> bool:
        """Return whether mixed precision casts the parameters when they are used, instead of using autocast."""
        return self.mixed_precision == "bf16_params"

    @property
    def products(self) -> Float8Config | None:
        """The options of matrix products in 8 bits; ``None`` unless ``mixed_precision`` is ``"fp8"``."""
        return (self.float8 or Float8Config()) if self.mixed_precision == "fp8" else None

    def _check_liger(self) -> None:
        given = self.use_liger_kernel
        if isinstance(given, bool):
            return
        if not (
            isinstance(given, Mapping) and all(isinstance(value, bool) for value in given.values())
        ):
            raise ConfigError(
                f"use_liger_kernel must be True, False or a dict like {{'rope': False}}, got {given!r}: pass one of "
                "these"
            )
        for name in ("cross_entropy", "fused_linear_cross_entropy"):
            if given.get(name):
                raise ConfigError(
                    f"use_liger_kernel={given!r} cannot include {name}, which needs a full head, because hfscale may "
                    "shard the head: leave this entry out; hfscale computes head and loss in chunks itself, without "
                    "full logits"
                )

    def check_device(self, device: torch.device) -> None:
        """Raise :class:`ConfigError` if the device does not support ``mixed_precision``. CPUs emulate fp8 products."""
        if self.mixed_precision == "fp8" and device.type == "cuda" and torch.version.hip is None:
            capability = torch.cuda.get_device_capability(device)
            if capability < (8, 9):
                raise ConfigError(
                    f"mixed_precision='fp8' needs a GPU with fp8 matmuls (compute capability 8.9 or more), but "
                    f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: use "
                    "mixed_precision='bf16'"
                )

    def check_quantized(self) -> None:
        """Raise :class:`ConfigError` if these options cannot be used with quantized weights."""
        if self.mtp_loss_weight is not None:
            raise ConfigError(
                "mtp_loss_weight cannot be used with quantization_config, but both were given: leave out either "
                "mtp_loss_weight or quantization_config"
            )
        if self.products is not None:
            raise ConfigError(
                "mixed_precision='fp8' cannot be used with quantization_config, because weights held in 4 or 8 bits "
                "are multiplied in 16 bits: use mixed_precision='bf16', or leave quantization_config out (adapters "
                "over an unquantized base can use fp8)"
            )

    def _check_loss_scaling(self) -> None:
        given = self.loss_scaling
        if given is None:
            return
        if not isinstance(given, GradScalerKwargs):
            raise ConfigError(
                f"loss_scaling must be an accelerate.GradScalerKwargs, got {given!r}: pass one, or leave loss_scaling "
                "out"
            )
        if self.mixed_precision != "fp16":
            raise ConfigError(
                f"loss_scaling= needs mixed_precision='fp16', got {self.mixed_precision!r}: leave loss_scaling out"
            )
        fits = (
            given.init_scale > 0
            and given.growth_factor > 1 > given.backoff_factor > 0 < given.growth_interval
        )
        if not (fits and given.enabled):
            raise ConfigError(
                "loss_scaling must have init_scale and growth_interval above 0, growth_factor above 1, backoff_factor "
                f"between 0 and 1, and enabled=True, got {given}: change the fields that do not fit"
            )

    def check_fits(self, layout: ParallelConfig) -> None:
        """Raise :class:`ConfigError` if the layout shards sequences, and :attr:`routing` needs full sequences."""
        routing = self.routing
        if (
            layout.cuts_sequences
            and routing is not None
            and (routing.capacity is not None or routing.draws)
        ):
            raise ConfigError(
                f"routing={routing} needs the tokens of full sequences on each rank (for its capacity or its random "
                f"draws), but cp_size={layout.cp} splits sequences over ranks: use router='model' without "
                "capacity_factor, or cp_size=1"
            )


NO_OPTIONS = Options()  # all defaults
