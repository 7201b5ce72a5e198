"""What a run starts from and writes to, checked before anything is loaded."""

from pathlib import Path

from .schema import FinetuneRecipe, Recipe, RecipeError


def check_places(recipe: Recipe) -> None:
    """Refuse a base that is not a checkpoint, and a base or an adapter that the run would replace."""
    if isinstance(recipe, FinetuneRecipe):
        _check_base(recipe)
        _check_adapter(recipe)


def _check_base(recipe: FinetuneRecipe) -> None:
    base = Path(recipe.base)
    if base.is_dir() and not (base / "config.json").is_file():
        raise RecipeError(f"base={recipe.base!r} is a directory without config.json: give that of a checkpoint")
    # A Hub id has at most one slash.
    if not base.is_dir() and (recipe.base.count("/") > 1 or recipe.base.startswith(("/", "."))):
        raise RecipeError(
            f"base={recipe.base!r} is not there: pretrain first (hfscale train demo_pretrain makes the demo's), or "
            "give the directory of a checkpoint or the id of a model on the Hub"
        )
    if base.resolve() == (recipe.directory / "checkpoint").resolve():
        raise RecipeError(
            f"base={recipe.base!r} is where name={recipe.name!r} will be written: choose another name, so that the "
            "checkpoint to start from is kept"
        )


def _check_adapter(recipe: FinetuneRecipe) -> None:
    """Refuse to go on with an adapter that the run would replace."""
    path = recipe.adapter.get("path")
    if path is not None and Path(path).resolve() == (recipe.directory / "adapter").resolve():
        raise RecipeError(
            f"adapter.path={path!r} is where name={recipe.name!r} will be written: choose another name, so that the "
            "adapter to start from is kept"
        )
