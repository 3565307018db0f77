"""docs/recipe.md is what the code says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from meshwright.spec.document import recipe_markdown
from meshwright.spec.hints import sections
from meshwright.spec.optimizers import OPTIMIZERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipe.md"


def test_the_page_is_current() -> None:
    hint = "python -m meshwright.spec.document > docs/recipe.md"
    assert PAGE.read_text(encoding="utf-8") == recipe_markdown(), f"make it anew: {hint}"


def test_every_section_key_and_optimizer_is_on_the_page() -> None:
    page = recipe_markdown()
    for name, section in sections().items():
        _, _, part = page.partition(f"\n## `[{name}]`\n")
        part = part.partition("\n## ")[0]
        for field in dataclasses.fields(section):
            assert field.metadata.get("open") or f"| `{field.name}` |" in part
    assert all(f"`torch.optim.{known.torch_name}`" in page for known in OPTIMIZERS.values())


def test_required_keys_are_marked() -> None:
    rows = [line.split(" | ")[0].strip("| `") for line in recipe_markdown().splitlines() if "**required**" in line]
    assert rows == ["global_batch_size", "lr", "steps"]
