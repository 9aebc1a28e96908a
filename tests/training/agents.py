"""Tiny agents, rows and envs for tests of the loop."""

from __future__ import annotations

from typing import Any, TypeVar

from peft import LoraConfig

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.algorithms.dpo import DPO
from agilerl.algorithms.sft import SFT
from agilerl.llm_envs import DatasetEnv
from tests.helpers import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
Agent = TypeVar("Agent", SFT, DPO)
NAMES = ("one", "two", "three", "four", "five", "six", "seven")


def rows(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"say {NAMES[n % 7]} {n}", "response": NAMES[n % 7]} for n in range(start, start + count)]


def make_env(train: int = 20, test: int = 8, batch: int = 4, **kwargs: Any) -> DatasetEnv:
    return DatasetEnv(
        rows(train), rows(test, start=1000), TOKENIZER, objective="sft", data_batch_size_per_gpu=batch, **kwargs
    )


def make_pair_env(train: int = 20, test: int = 8, batch: int = 4, **kwargs: Any) -> DatasetEnv:
    def pairs(count: int, start: int) -> list[dict[str, str]]:
        return [
            {"prompt": row["prompt"], "chosen": row["response"], "rejected": NAMES[(n + 3) % 7]}
            for n, row in enumerate(rows(count, start), start)
        ]

    splits = pairs(train, 0), pairs(test, 1000)
    return DatasetEnv(*splits, TOKENIZER, objective="preference", data_batch_size_per_gpu=batch, **kwargs)


def make_agent(*, lora: bool = True, dropout: float = 0.0, **kwargs: Any) -> SFT:
    return _agent(SFT, lora, dropout, kwargs)


def make_pair_agent(*, dropout: float = 0.0, **kwargs: Any) -> DPO:
    return _agent(DPO, True, dropout, kwargs)


def _agent(algorithm: type[Agent], lora: bool, dropout: float, kwargs: dict[str, Any]) -> Agent:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=dropout) if lora else None
    defaults: dict[str, Any] = {"batch_size": 8, "lr": 1e-2, "gradient_checkpointing": False, "max_grad_norm": 1.0}
    if "actor_network" not in kwargs:
        defaults["actor_network"] = tiny_model("llama", vocab_size=len(TOKENIZER))
    return algorithm(TOKENIZER.eos_token_id, TOKENIZER.eos_token, lora_config=config, **(defaults | kwargs))


def make_population(size: int, **kwargs: Any) -> list[SFT]:
    config = HyperparameterConfig(
        lr=RLParameter(1e-4, 1e-1, shrink_factor=0.5, grow_factor=2.0), batch_size=RLParameter(2, 16, dtype=int)
    )
    first = make_agent(**({"hp_config": config} | kwargs))
    return [first, *(first.clone(index=n) for n in range(1, size))]
