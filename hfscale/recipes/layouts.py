"""The layout of a run: the recipe's, or the first of its fallbacks that the processes fit that are left."""

import hfscale

from .launch import is_launched
from .schema import Recipe


def layout_of(recipe: Recipe) -> hfscale.ParallelConfig:
    """Return the recipe's layout; under a launcher, the one for as many processes as were started.

    Raises:
        MeshError: none of several is.
    """
    first, *others = (hfscale.ParallelConfig(**fields) for fields in (recipe.parallel, *recipe.fallbacks))
    return hfscale.fitting_layout([first, *others]) if others and is_launched() else first
