"""The commands of a comparison, from one table with sources."""

from harness.recipes.commands import Recipe, recipe
from harness.recipes.table import ModelRecipe, load_models

__all__ = ["ModelRecipe", "Recipe", "load_models", "recipe"]
