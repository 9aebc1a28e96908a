"""The one description of a run: what can be set, how it is read, and where each value came from.

``schema`` holds the sections and the documentation of every field, ``load`` reads a YAML file and overrides into it. To
add a setting, add a field with a docstring to its section; the loader, the suggestions and the docs follow.
"""

from agilerl.config.load import LoadedConfig, load_config
from agilerl.config.schema import RunConfig

__all__ = ["LoadedConfig", "RunConfig", "load_config"]
