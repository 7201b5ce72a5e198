"""The pairs of options and configs that the family sweep draws."""

from itertools import islice

from family_variants import CONFIGS, OPTIONS, PICKS, layout_of, pairs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def test_families_meet_all_pairs_between_them() -> None:
    met = {
        pair
        for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        for pair in islice(pairs(family), PICKS)
    }
    assert len(met) >= 0.9 * len(OPTIONS) * len(CONFIGS)
    assert {option for option, _ in met} == set(OPTIONS)
    assert {config for _, config in met} == set(CONFIGS)
    assert all(layout_of(option).total_size in (2, 4) for option in OPTIONS)
