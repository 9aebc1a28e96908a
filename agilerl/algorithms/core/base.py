"""The two shells of an agent, under the path where scripts look for them."""

from agilerl.algorithms.core.evolvable import EvolvableAlgorithm
from agilerl.algorithms.core.llm import LLMAlgorithm

__all__ = ["EvolvableAlgorithm", "LLMAlgorithm"]
