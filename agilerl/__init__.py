"""AgileRL: supervised fine-tuning of language models, right first, then fast.

Importing the package itself loads no heavy dependency; import what you use from its sub-packages.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
