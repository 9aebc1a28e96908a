from __future__ import annotations

from pathlib import Path

from agilerl.config.markdown import configuration_page
from agilerl.config.names import sections_of
from agilerl.config.schema import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_of_settings_is_current():
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), "run: python scripts/generate-docs"


def test_every_setting_has_a_row():
    page = configuration_page()
    for name, section in sections_of(RunConfig).items():
        part = page.split(f"## `{name}`\n")[1].split("\n## ")[0]
        for key in section.model_fields:
            assert f"| `{key}` |" in part
