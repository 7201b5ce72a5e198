"""What ranks of a run that was killed and went on tell, beside those of one that nothing interrupted, in words."""

from typing import Any

import torch

Told = dict[str, Any]
"""``start``, the step that a rank went on from; from there ``losses``, ``norms``, ``scales``; the last ``weights``."""


def differences(eight_bits: bool, expected: Told, found: list[Told]) -> str:
    """From one process, in float64 to rounding; states in 8 bits step where a rounding moves them to the next value."""
    loss, norm, weight = (1e-12, 1e-11, 1e-10) if not eight_bits else (2e-5, 1e-3, 0.05)
    for rank, told in enumerate(found):
        start = told["start"]
        if told["scales"] != expected["scales"][start:]:
            return f"loss scales on rank {rank}: {told['scales']} and {expected['scales'][start:]}"
        for kind, limit in (("losses", loss), ("norms", norm)):
            for step, (mine, theirs) in enumerate(
                zip(told[kind], expected[kind][start:], strict=True), start + 1
            ):
                if abs(mine - theirs) > limit * abs(theirs):
                    return f"{kind} of step {step} on rank {rank}: {mine!r} and {theirs!r}"
        if told["weights"].keys() != expected["weights"].keys():
            return f"names on rank {rank}: {sorted(told['weights'].keys() ^ expected['weights'].keys())[:3]}"
        for name, theirs in expected["weights"].items():
            if float((told["weights"][name] - theirs).abs().max()) > weight * float(
                theirs.abs().max()
            ):
                return f"{name} on rank {rank}"
    return ""


def not_bit_by_bit(whole: list[Told], found: list[Told]) -> str:
    """What of a run that goes on in its layout is not what it is where nothing comes between."""
    for rank, (told, expected) in enumerate(zip(found, whole, strict=True)):
        for kind in ("losses", "norms", "scales"):
            if told[kind] != expected[kind][told["start"] :]:
                return f"{kind} on rank {rank}: {told[kind]} and {expected[kind][told['start'] :]}"
        for name, theirs in expected["weights"].items():
            if not torch.equal(told["weights"][name], theirs):
                return f"{name} on rank {rank} is not, bit by bit, that of the run that nothing interrupted"
    return ""


def further_off(exact: Told, whole: list[Told], found: list[Told]) -> str:
    """What of a resumed run is further from the ``exact`` one than four times what is so of the ``whole`` one."""
    for rank, told in enumerate(found):
        start = told["start"]
        if told["scales"] != whole[0]["scales"][start:]:
            return f"loss scales on rank {rank}: {told['scales']} and {whole[0]['scales'][start:]}"
        for kind, measure in (
            ("losses", _off_in_steps),
            ("norms", _off_in_steps),
            ("weights", _off_in_weights),
        ):
            mine = measure(exact[kind], told[kind])
            usual = measure(exact[kind], whole[0][kind])
            if not mine <= 4 * usual + 1e-9:
                return f"{kind} on rank {rank} are {mine:.2g} off, and {usual:.2g} where nothing was interrupted"
    return ""


def _off_in_steps(exact: list[float], found: list[float]) -> float:
    pairs = list(zip(exact[len(exact) - len(found) :], found, strict=True))
    return max(abs(mine - theirs) / max(abs(theirs), 1e-30) for theirs, mine in pairs)


def _off_in_weights(exact: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    apart = sum(float((found[name].double() - value).pow(2).sum()) for name, value in exact.items())
    return float((apart / sum(float(value.pow(2).sum()) for value in exact.values())) ** 0.5)
