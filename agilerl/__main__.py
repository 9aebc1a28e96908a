"""``python -m agilerl`` is the command ``agilerl``; torchrun starts it this way."""

from agilerl.cli import script

script()
