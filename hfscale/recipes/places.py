"""Check the paths that a run will read and write, before any model or data is loaded."""

from dataclasses import asdict
from pathlib import Path

from ..distributed.files.replace import finish_move
from .read import load_recipe
from .schema import FinetuneRecipe, Recipe, RecipeError


def check_places(recipe: Recipe) -> None:
    """Raise :class:`RecipeError` if the base model's path is not a checkpoint, or if this run would overwrite its base
    model, its adapter, or an earlier run. Also check that the trackers are installed.
    """
    if isinstance(recipe, FinetuneRecipe):
        _check_base(recipe)
    # A run that only writes a stored teacher writes nothing into its own directory.
    if not (isinstance(recipe, FinetuneRecipe) and recipe.teacher.write):
        _check_earlier_run(recipe)
    if recipe.tracking:
        from .run_log import check_trackers  # imports transformers

        check_trackers(recipe.tracking)


def _check_base(recipe: FinetuneRecipe) -> None:
    base = Path(recipe.base)
    finish_move(base)
    if base.is_dir() and not (base / "config.json").is_file():
        raise RecipeError(
            f"base={recipe.base!r} is a directory without config.json: give the directory of a checkpoint"
        )
    # A Hub id has at most one slash.
    if not base.is_dir() and (recipe.base.count("/") > 1 or recipe.base.startswith(("/", "."))):
        raise RecipeError(
            f"base={recipe.base!r} does not exist: pretrain first (hfscale train demo_pretrain makes the demo's base), "
            "or "
            "give the directory of a checkpoint or the id of a model on the Hub"
        )
    starts = {
        "base": (recipe.base, "checkpoint"),
        "adapter.path": (recipe.adapter.get("path"), "adapter"),
    }
    for key, (path, written) in starts.items():
        if path is not None and Path(path).resolve() == (recipe.directory / written).resolve():
            raise RecipeError(
                f"{key}={path!r} would be overwritten by name={recipe.name!r}: choose another name, so that the "
                f"{written} to start from is kept"
            )


def _check_earlier_run(recipe: Recipe) -> None:
    """Raise :class:`RecipeError` if an earlier run with the same name would be overwritten, or resumed with a recipe
    that computes something else.
    """
    directory = recipe.directory
    if recipe.saved_state is not None:
        path = directory / "recipe.yaml"
        now = _decisive(recipe)
        then = _decisive(load_recipe(type(recipe), path))
        for key in sorted({*now, *then}):
            if now.get(key) != then.get(key):
                raise RecipeError(
                    f"{recipe.saved_state} was saved with {key}={then.get(key)}, but the recipe has {now.get(key)}: "
                    f"use the saved value ({path}) to resume, or choose another name"
                )
        return
    names = [name for name in ("checkpoint", "adapter") if (directory / name).exists()]
    names += ["metrics.jsonl"] if recipe.metrics.exists() and recipe.metrics.stat().st_size else []
    names += ["state"] if recipe.has_state else []
    if not names or recipe.replace:
        return
    if recipe.training.resume:
        from ..distributed.processes import restarted  # imports torch

        training = recipe.training
        saves = training.save_every is not None or training.memory_every is not None
        # Metrics alone are no results of another run: this job wrote them before its first save.
        if (saves or restarted()) and names == ["metrics.jsonl"]:
            return
        raise RecipeError(
            f"training.resume=true needs a saved state, but {directory} has {', '.join(names)} and no state to resume "
            "from (training.save_every writes states): choose another name, or replace the directory with "
            "replace=true"
        )
    go_on = "go on with it (training.resume=true), " if "state" in names else ""
    raise RecipeError(
        f"{directory} has a run already ({', '.join(names)}): choose another name, {go_on}or replace that run "
        "(replace=true)"
    )


def _decisive(recipe: Recipe) -> dict[str, object]:
    """Return the recipe's keys that influence the trained weights, with their values; other keys may change when a run
    is resumed. Omitted are, for example, ``name``, ``parallel`` and ``training.log_every``.
    """
    free = {"name", "replace", "parallel", "fallbacks", "save_check"}
    free |= {
        f"training.{name}" for name in ("log_every", "evaluate_every", "save_every", "memory_every")
    }
    free |= {"training.resume", "training.restarts", "training.watchdog"}
    flat: dict[str, object] = {}
    for key, value in asdict(recipe).items():
        if isinstance(value, dict) and key not in free:
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if key not in free}
