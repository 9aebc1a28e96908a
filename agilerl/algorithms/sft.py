"""Supervised fine-tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from agilerl.algorithms.core.llm import LLMAlgorithm
from agilerl.algorithms.core.registry import HyperparameterConfig
from agilerl.algorithms.core.settings import LLMSettings, finite
from agilerl.algorithms.core.token_objective import TokenObjective
from agilerl.data.collate import inputs_of, samples_of
from agilerl.distributed import FSDPConfig
from agilerl.losses import choose_loss
from agilerl.models.router_loss import find_routers
from agilerl.models.segments import Sample
from agilerl.optim import CosineLRScheduleConfig
from agilerl.typing import SFTPrompts

__all__ = ["SFT", "SFTSettings"]


@dataclass(frozen=True, kw_only=True)
class SFTSettings(LLMSettings):
    """Constructor arguments of `SFT`."""

    router_aux_loss_coef: float = 0.0

    def problems(self) -> list[str | None]:
        """Sentences about values that cannot be used."""
        return [*super().problems(), finite("router_aux_loss_coef", self.router_aux_loss_coef)]


class SFT(LLMAlgorithm):
    """Supervised fine-tuning: token-level cross-entropy on the response of each (prompt, response) pair.

    The loss of an optimizer step is the sum of weighted token losses over the sum of weights, over all rows of the step
    and all ranks, so that neither micro-batch size nor padding nor rank count changes it.

    Args:
        pad_token_id: Id of the padding token. Padding is told by the mask, so it may equal the end token.
        pad_token: The padding token's text.
        model_name: Preset, folder or Hub name of the model, used when no ``actor_network`` is given.
        actor_network: A causal LM, or a ``PeftModel``, whose adapter becomes the actor.
        model_config: Further arguments of ``from_pretrained``; only with ``model_name``.
        hp_config: Hyper-parameters that evolution may change; None turns mutations off.
        index: Index in the population.
        batch_size: Rows per ``learn`` over all ranks.
        lr: Peak learning rate.
        max_grad_norm: Global gradient norm above which gradients are scaled down; None never clips.
        update_epochs: Passes over each batch.
        calc_position_embeddings: Positions count real tokens. False uses the columns of a padded batch.
        micro_batch_size_per_gpu: Rows per forward pass: memory only, never the result. None uses a token budget.
        mini_batch_size: Rows per optimizer step on one rank; None takes ``batch_size`` / ranks.
        device: "cpu", "cuda" or "cuda:N".
        lora_config: Attach LoRA adapters with this configuration; None with a plain network trains all of it.
        fsdp_config: Shard the model over the ranks with FSDP2.
        wrap: Place the model and build the optimizer now; False leaves it to `wrap_models`.
        clone: Attach no adapters and build no optimizer: the agent is about to take over another's.
        seed: Owns adapter initialisation, dropout and order.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, more time, same result.
        use_liger_loss: Use the Liger kernel where it can run; elsewhere the package's own, with the same result.
        chunk_rows: Rows of logits held at once; None derives it from the vocabulary.
        use_separate_reference_adapter: Keep a frozen "reference" adapter beside "actor", for a later stage.
        quantization_config: A ``BitsAndBytesConfig`` to load ``model_name`` with (QLoRA).
        activation_offload: Keep activations in host memory between forward and backward (GPU).
        moe_lora_recompute: Recompute LoRA on routed experts in the backward pass; None does so outside checkpointed blocks.
        lora_target_scope: Restrict LoRA to this part of a multimodal model, such as "language_model".
        cosine_lr_schedule_config: Schedule of the rate over ``learn`` calls; None holds it constant.
        weight_decay: Decoupled weight decay of matrices.
        lora_plus_ratio: Learning rate of the LoRA B factors relative to A's (LoRA+, arXiv 2402.12354).
        router_aux_loss_coef: Weight of the routers' balance in a mixture of experts, taken row by row (arXiv 2412.19437, section
            2.1.2), so that no batch size changes it; 0 leaves it out.
        tokenizer: Or the processor of a vision-language model; saved with checkpoints. None takes the environment's when
            there is one.

    Raises:
        ValueError: A setting cannot be used, or settings contradict each other; all problems are told together.
    """

    objective: ClassVar[str] = "sft"
    """Objective of the environments it trains on."""

    _settings: SFTSettings

    def __init__(
        self,
        pad_token_id: int,
        pad_token: str,
        model_name: str | None = None,
        actor_network: nn.Module | None = None,
        model_config: dict[str, Any] | None = None,
        hp_config: HyperparameterConfig | None = None,
        index: int = 0,
        batch_size: int = 16,
        lr: float = 5e-5,
        max_grad_norm: float | None = 0.1,
        update_epochs: int = 1,
        calc_position_embeddings: bool = True,
        micro_batch_size_per_gpu: int | None = None,
        mini_batch_size: int | None = None,
        device: str | torch.device = "cpu",
        lora_config: Any = None,
        fsdp_config: FSDPConfig | None = None,
        wrap: bool = True,
        clone: bool = False,
        seed: int = 42,
        gradient_checkpointing: bool = True,
        use_liger_loss: bool = True,
        chunk_rows: int | None = None,
        use_separate_reference_adapter: bool = False,
        quantization_config: Any = None,
        activation_offload: bool = False,
        moe_lora_recompute: bool | None = None,
        lora_target_scope: str | None = None,
        *,
        cosine_lr_schedule_config: CosineLRScheduleConfig | None = None,
        weight_decay: float = 0.0,
        lora_plus_ratio: float | None = None,
        router_aux_loss_coef: float = 0.0,
        tokenizer: Any = None,
    ) -> None:
        settings = SFTSettings.of(locals())
        super().__init__(
            settings,
            actor_network=actor_network,
            index=index,
            device=device,
            wrap=wrap,
            clone=clone,
            tokenizer=tokenizer,
        )

    def learn(self, experiences: SFTPrompts, training: bool = True) -> dict[str, float]:
        """Update the weights on a batch; every call ends with an optimizer step and leaves nothing pending.

        Args:
            experiences: ``input_ids`` and ``attention_mask`` (Long [B, L]) with ``prompt_lengths``, or with
                ``response_weights`` (Float [B, L]), as a `DatasetEnv` gives them; images in ``inputs``, a dict for each row.
            training: False computes the same numbers without gradients and with dropout off.

        Returns:
            ``loss`` (all NLL / all weights of the call, each step at the weights before it), ``perplexity``, ``tokens``
            (trained), ``real_tokens``, ``padding_share``, ``router_aux_loss`` where asked for (1 is even use), and when
            training ``grad_norm`` (of the last step, before clipping) and seconds by phase, ``learn_phase_<phase>_s``.

        Raises:
            NonFiniteError: The loss or a gradient is not finite; no weight has been changed by that step.
        """
        if not training:
            return self._metrics(self._evaluate(experiences))
        sums, more = self._train(experiences)
        return {**self._metrics(sums), **more}

    def test(self, env: Any, loop: int | None = 1, *args: Any, **kwargs: Any) -> np.ndarray:
        """Negative mean loss on the test split, weighted by token; higher is better. Appended to ``fitness``.

        Args:
            env: Environment with ``objective="sft"``.
            loop: Batches to read, from the start of the split, the same every time; None reads all of it.
            *args: Not used.
            **kwargs: Not used.

        Returns:
            0-d array.
        """
        sums = self._evaluate_env(env, loop)
        return self._append_fitness(-sums.mean("loss", "weight"))

    def _make_objective(self) -> TokenObjective:
        loss = choose_loss(self._settings.use_liger_loss, self._runtime.device)
        coef = self._settings.router_aux_loss_coef
        if coef:
            find_routers(self._resources.model)  # refuses a model without
        return TokenObjective(self._resources.head, self._resources.packer, self._settings.chunk_rows, loss, coef)

    def _rows(self, batch: SFTPrompts) -> list[Sample]:
        rows = zip(samples_of(batch), inputs_of(batch), strict=True)
        return [Sample(ids, weights, inputs) for (ids, weights), inputs in rows]

    @staticmethod
    def _metrics(sums: Any) -> dict[str, float]:
        loss = sums.mean("loss", "weight")
        cells = sums.totals["cells"]
        more = {}
        if "router_aux" in sums.totals:
            more["router_aux_loss"] = sums.mean("router_aux", "real_tokens")
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "tokens": sums.units["trained_tokens"],
            "real_tokens": sums.units["real_tokens"],
            "padding_share": 1.0 - sums.units["real_tokens"] / cells if cells else 0.0,
            **more,
        }
