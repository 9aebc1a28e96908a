"""The frozen settings of an agent: what its constructor was given, checked together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from agilerl.algorithms.core.hyperparameters import HyperparameterConfig
from agilerl.algorithms.core.plan import BatchPlan
from agilerl.distributed import FSDPConfig
from agilerl.errors import ConfigError
from agilerl.optim import CosineLRScheduleConfig

__all__ = ["LLMSettings", "finite", "positive_int"]


def finite(name: str, value: Any, *, minimum: float = 0.0, exclusive: bool = False) -> str | None:
    """A sentence if ``value`` is not a finite number of at least (above, if ``exclusive``) ``minimum``."""
    bound = f"above {minimum:g}" if exclusive else f"at least {minimum:g}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and (value > minimum or (value == minimum and not exclusive)):
        return None
    return f"{name} must be a finite number {bound}, found {value!r}"


def positive_int(name: str, value: Any) -> str | None:
    """A sentence if ``value`` is not a whole number of at least 1."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return None
    return f"{name} must be a whole number of at least 1, found {value!r}"


@dataclass(frozen=True, kw_only=True)
class LLMSettings:
    """Constructor arguments of a language-model agent. Initial values of mutable hyper-parameters are among them.

    Attributes are described where users meet them, at `agilerl.algorithms.sft.SFT`.
    """

    restorable: ClassVar[tuple[str, ...]] = ("cosine_lr_schedule_config", "seed")
    """Settings besides the mutable hyper-parameters that a live agent can take over from a checkpoint."""

    pad_token_id: int
    pad_token: str
    model_name: str | None = None
    model_config: dict[str, Any] | None = None
    hp_config: HyperparameterConfig | None = None
    batch_size: int = 16
    lr: float = 5e-5
    max_grad_norm: float | None = 0.1
    update_epochs: int = 1
    calc_position_embeddings: bool = True
    micro_batch_size_per_gpu: int | None = None
    mini_batch_size: int | None = None
    lora_config: Any = None
    fsdp_config: FSDPConfig | None = None
    seed: int = 42
    gradient_checkpointing: bool = True
    use_liger_loss: bool = True
    chunk_rows: int | None = None
    use_separate_reference_adapter: bool = False
    quantization_config: Any = None
    activation_offload: bool = False
    moe_lora_recompute: bool | None = None
    lora_target_scope: str | None = None
    cosine_lr_schedule_config: CosineLRScheduleConfig | None = None
    weight_decay: float = 0.0
    lora_plus_ratio: float | None = None

    def __post_init__(self) -> None:
        problems = [p for p in self.problems() if p]
        if problems:
            raise ConfigError("; ".join(problems) + ".")

    def problems(self) -> list[str | None]:
        """Sentences about values that cannot be used; None where there is nothing to say."""
        found = [
            finite("lr", self.lr, exclusive=True),
            None if self.max_grad_norm is None else finite("max_grad_norm", self.max_grad_norm, exclusive=True),
            positive_int("update_epochs", self.update_epochs),
            finite("weight_decay", self.weight_decay),
            None if self.lora_plus_ratio is None else finite("lora_plus_ratio", self.lora_plus_ratio, exclusive=True),
            None if self.chunk_rows is None else positive_int("chunk_rows", self.chunk_rows),
        ]
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            found.append(f"seed must be a whole number of at least 0, found {self.seed!r}")
        if not isinstance(self.pad_token_id, int) or isinstance(self.pad_token_id, bool) or self.pad_token_id < 0:
            found.append(f"pad_token_id must be a token id, found {self.pad_token_id!r}")
        try:
            BatchPlan.derive(self.batch_size, self.micro_batch_size_per_gpu, self.mini_batch_size)
        except ConfigError as error:
            found.append(str(error).rstrip("."))
        if self.hp_config is not None and not isinstance(self.hp_config, HyperparameterConfig):
            found.append(f"hp_config must be a HyperparameterConfig, found {type(self.hp_config).__name__}")
        if self.fsdp_config is not None and not isinstance(self.fsdp_config, FSDPConfig):
            found.append(f"fsdp_config must be an FSDPConfig, found {type(self.fsdp_config).__name__}")
        schedule = self.cosine_lr_schedule_config
        if schedule is not None and schedule.actor_start_step:
            found.append("cosine_lr_schedule_config.actor_start_step must be 0: there is no critic to warm up first")
        return found

    def needing_adapter(self) -> list[str]:
        """Names of set arguments that have a meaning only where a LoRA adapter is trained."""
        needs = {
            "use_separate_reference_adapter": self.use_separate_reference_adapter,
            "lora_target_scope": self.lora_target_scope,
            "lora_plus_ratio": self.lora_plus_ratio,
            "moe_lora_recompute": self.moe_lora_recompute is not None,
        }
        return [name for name, is_set in needs.items() if is_set]

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """The settings among a constructor's arguments."""
        return cls(**{field.name: arguments[field.name] for field in dataclasses.fields(cls)})

    def describe(self) -> dict[str, Any]:
        """The settings as plain containers, for checkpoints."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, CosineLRScheduleConfig | FSDPConfig):
        return dataclasses.asdict(value)
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(getattr(value, "value", value)) if not isinstance(value, type) else value.__name__
