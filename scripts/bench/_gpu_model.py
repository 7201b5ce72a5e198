"""Seconds and bytes that counts of a layer come to on GPUs, for Llama 8B with adapters: a model, and no measurement.

Counts are of an eighth of its widths and tokens, so bytes a token are times 8. Kernels take the time of their bytes at
``_BANDWIDTH`` of the memory's, products that of their operations at ``_PRODUCTS`` of the tensor cores', as one H100 was
measured to do (2.78 TB/s, 660 TFLOP/s); thin products take 3.2 times that of their bytes in float32 without tensor
cores, and 1.5 times in bfloat16. That gives 286 ms for stock LoRA of 2,048 tokens on it (265 were measured) and 231 on
an H200 (242). What the host takes, and kernels too small to fill a GPU, are left out. Memory: 36.0 GiB (36.5).
"""

from dataclasses import dataclass

LAYERS = 32
WIDTH = 4096
WORDS = 128_256
OF_A_LAYER = 218_103_808  # weights
OUTSIDE = 2 * WORDS * WIDTH
SCALE = 8
ADAPTERS = 0.67e9  # bytes of factors, gradients and AdamW's states
_BANDWIDTH = 0.83
_PRODUCTS = 0.667
_ATTENTION = 0.39
_LOGITS = {"stock": (30, 10), "hfscale": (10, 2.5)}  # bytes moved, and held, for each


@dataclass(frozen=True)
class GPU:
    """What makers say of a GPU."""

    terabytes: float  # a second
    teraflops: float  # dense, bfloat16, summed in float32
    gigabytes: int


GPUS = {
    "H100": GPU(3.35, 989, 80),
    "H200": GPU(4.8, 989, 141),
    "A100": GPU(2.04, 312, 80),
    "B200": GPU(8.0, 2250, 180),
    "RTX 4090": GPU(1.01, 165, 24),
    "RTX 5090": GPU(1.79, 209, 32),
}


def milliseconds(
    gpu: GPU, recipe: str, side: str, counts: dict[str, float], rows: int, length: int
) -> float:
    """Return the milliseconds of a step of ``rows x length`` tokens."""
    tokens = rows * length
    products = counts["base products launched"] / 7
    flops = 2 * tokens * (products * OF_A_LAYER * LAYERS + 2 * WORDS * WIDTH)
    passes = 2.5 + counts["attention launched"] - 1
    attention = 2 * tokens * length * WIDTH * passes * LAYERS
    thin = counts["thin products bytes a token"]
    wide = counts["bytes a token beside base products"] - thin - counts["attention bytes a token"]
    slow = 3.2 if side in ("stock", "stock, checkpointed", "stock, compiled") else 1.5
    decoded = 0.0
    if recipe == "qlora":  # compiled layers dequantize as plain ones do
        decoded = (counts["dequantizations"] or 14) * OF_A_LAYER / 7 * 2.5 * LAYERS
    moved = SCALE * tokens * LAYERS * (wide + slow * thin) + decoded
    moved += tokens * WORDS * _LOGITS[side.partition(",")[0]][0]
    seconds = flops / (gpu.teraflops * 1e12 * _PRODUCTS)
    seconds += attention / (gpu.teraflops * 1e12 * _ATTENTION)
    return 1000 * (seconds + moved / (gpu.terabytes * 1e12 * _BANDWIDTH))


def gibibytes(recipe: str, side: str, counts: dict[str, float], tokens: int) -> float:
    """Return the peak of memory of a step."""
    in_bits = 0.5 + 4 / 64 if recipe == "qlora" else 2
    total = LAYERS * OF_A_LAYER * in_bits + OUTSIDE * 2 + ADAPTERS
    total += SCALE * counts["kept bytes a token"] * tokens * LAYERS
    if "checkpointed" in side or "TRL" in side:  # what one layer keeps as it runs again
        total += SCALE * 20_000 * tokens + (2 * OF_A_LAYER if recipe == "qlora" else 0)
    total += tokens * WORDS * _LOGITS[side.partition(",")[0]][1]
    return float(total / 2**30)


def modelled(recipe: str, sides: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return by side the GiB, and the milliseconds on each GPU that has as many, of a step of 2,048 tokens, and of
    four and of one row of 8,192.
    """
    found: dict[str, dict[str, float]] = {}
    for side, counts in sides.items():
        if side in ("model", "stock, no adapters", "hfscale", "hfscale, compiled"):
            continue
        of = found[side] = {}
        for rows, length in ((1, 2048), (4, 2048), (1, 8192)):
            size = gibibytes(recipe, side, counts, rows * length)
            of[f"{rows} x {length}: GiB"] = round(size, 1)
            for name, gpu in GPUS.items():
                if size * 2**30 < gpu.gigabytes * 1e9:
                    time = milliseconds(gpu, recipe, side, counts, rows, length)
                    of[f"{rows} x {length}: ms on {name}"] = round(time, 1)
    return found
