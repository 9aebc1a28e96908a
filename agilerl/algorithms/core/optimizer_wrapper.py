"""The optimizer of an agent, under the path where scripts look for it."""

from agilerl.optim import OptimizerWrapper

__all__ = ["OptimizerWrapper"]
