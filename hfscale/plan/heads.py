"""Which tensor sizes the attention heads allow."""

from math import gcd

from .draft import Draft


def check_heads(draft: Draft, groups: int) -> None:
    """Refuse tensor sizes that would cut a head, where the heads come in ``groups`` that are each cut."""
    config = draft.config.get_text_config(decoder=True) if hasattr(draft.config, "get_text_config") else draft.config
    heads = key_heads = getattr(config, "decoder_attention_heads", None)  # the other names mean the encoder's
    if not heads:
        heads = getattr(config, "num_attention_heads", None)
        names = ("num_key_value_heads", "num_kv_heads")
        key_heads = next((count for name in names if (count := getattr(config, name, None))), heads)
    if not heads or not key_heads:
        return
    common = gcd(heads, key_heads) // groups
    if common % draft.tp or not common:
        valid = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
        grouped = f", which come in {groups} groups" if groups > 1 else ""
        draft.problem(
            f"tp_size={draft.tp} does not divide the {heads} attention heads and {key_heads} key/value heads of "
            f"{draft.config.model_type!r}{grouped}: use tp_size {valid or 1}"
        )
