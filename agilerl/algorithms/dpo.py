"""Direct preference optimisation."""

from __future__ import annotations

import copy
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn

from agilerl.algorithms.core.evolvable import EvolvableAlgorithm
from agilerl.algorithms.core.hyperparameter_attribute import HyperparameterAttribute
from agilerl.algorithms.core.llm import LLMAlgorithm
from agilerl.algorithms.core.pair_objective import PairObjective, ReferenceLogprobs
from agilerl.algorithms.core.registry import HyperparameterConfig
from agilerl.algorithms.core.settings import LLMSettings, finite
from agilerl.algorithms.core.update import Sums
from agilerl.data.collate import preference_samples_of
from agilerl.distributed import FSDPConfig
from agilerl.distributed.checkpointing import blocks_of
from agilerl.errors import UnsupportedError
from agilerl.losses.preference import PREFERENCE_LOSSES, needs_reference
from agilerl.models.head import Head, find_head
from agilerl.models.segments import Sample
from agilerl.models.shared_prompt import Pair
from agilerl.optim import CosineLRScheduleConfig
from agilerl.typing import PreferencePrompts

__all__ = ["DPO", "DPOSettings"]


@dataclass(frozen=True, kw_only=True)
class DPOSettings(LLMSettings):
    """Constructor arguments of `DPO`."""

    restorable: ClassVar[tuple[str, ...]] = (
        *LLMSettings.restorable,
        "loss_type",
        "label_smoothing",
        "simpo_margin",
    )

    beta: float = 0.1
    nll_alpha: float = 1.0
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    simpo_margin: float = 0.5
    share_prompt: bool = True

    def problems(self) -> list[str | None]:
        """Sentences about values that cannot be used."""
        found = super().problems()
        found += [
            finite("beta", self.beta, exclusive=True),
            finite("nll_alpha", self.nll_alpha),
            finite("label_smoothing", self.label_smoothing),
            finite("simpo_margin", self.simpo_margin),
        ]
        if self.loss_type not in PREFERENCE_LOSSES:
            found.append(f"loss_type must be one of {', '.join(PREFERENCE_LOSSES)}, found {self.loss_type!r}")
        elif self.label_smoothing and self.loss_type in ("ipo", "hinge"):
            found.append(f"label_smoothing belongs to the sigmoid losses, found it with loss_type {self.loss_type!r}")
        if isinstance(self.label_smoothing, (int, float)) and self.label_smoothing >= 0.5:
            found.append(f"label_smoothing must be below 0.5, found {self.label_smoothing!r}")
        return found


class DPO(LLMAlgorithm):
    """Direct preference optimisation (arXiv 2305.18290) on (prompt, chosen, rejected) triples, with an NLL term.

    The loss is the mean over pairs of ``-log sigmoid(beta * ((pi_c - ref_c) - (pi_r - ref_r)))`` on summed log-probabilities
    of the answers, plus ``nll_alpha`` times the token-mean NLL of the chosen answers. Dropout is off in every pass that
    enters the ratio: the first step's preference loss is ln 2. Constructor arguments are those of
    `agilerl.algorithms.sft.SFT`, with ``lr=5e-6`` and ``use_separate_reference_adapter=True``, and these:

    Args:
        beta: Strength of the preference; larger keeps the policy closer to the reference.
        nll_alpha: Weight of the NLL term.
        use_separate_reference_adapter: Keep the reference as a frozen adapter: the policy that training starts from, or
            the one that `load_checkpoint` brings. False with LoRA takes the base model without adapters as the
            reference, and in a full fine-tune a frozen copy of the whole network (which then is the only possibility).
        loss_type: "sigmoid", "ipo", "hinge", "sigmoid_norm" or "simpo"; see `agilerl.losses.preference`.
        label_smoothing: Share of labels assumed to be wrong, for the sigmoid losses.
        simpo_margin: Target margin of the "simpo" loss.
        share_prompt: Compute the prompt of a pair once where the architecture allows; the result is the same.
    """

    objective: ClassVar[str] = "preference"

    beta = HyperparameterAttribute(partial(finite, exclusive=True))
    nll_alpha = HyperparameterAttribute(finite)

    mutable: ClassVar[tuple[str, ...]] = (*LLMAlgorithm.mutable, "beta", "nll_alpha")

    _settings: DPOSettings

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
        lr: float = 5e-6,
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
        use_separate_reference_adapter: bool = True,
        quantization_config: Any = None,
        activation_offload: bool = False,
        moe_lora_recompute: bool | None = None,
        lora_target_scope: str | None = None,
        beta: float = 0.1,
        nll_alpha: float = 1.0,
        *,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        simpo_margin: float = 0.5,
        share_prompt: bool = True,
        cosine_lr_schedule_config: CosineLRScheduleConfig | None = None,
        weight_decay: float = 0.0,
        lora_plus_ratio: float | None = None,
        tokenizer: Any = None,
    ) -> None:
        settings = DPOSettings.of(locals())
        self._reference = ReferenceLogprobs()
        self._frozen: tuple[nn.Module, Head] | None = None
        super().__init__(
            settings,
            actor_network=actor_network,
            index=index,
            device=device,
            wrap=wrap,
            clone=clone,
            tokenizer=tokenizer,
        )

    def learn(self, experiences: PreferencePrompts, training: bool = True) -> dict[str, float]:
        """Update the weights on a batch of pairs.

        Args:
            experiences: Both sides padded, as a `DatasetEnv` with ``objective="preference"`` gives them.
            training: False computes the same numbers without gradients.

        Returns:
            Means over pairs: ``loss``, ``preference_loss``, ``chosen_reward`` and ``rejected_reward`` (beta times the
            log-ratio to the reference), ``reward_margin``, ``accuracy`` (share of pairs with a positive margin),
            ``preferred`` (share of pairs whose chosen answer is the likelier one under the policy),
            ``chosen_logp``, ``rejected_logp``; over tokens: ``nll`` of the chosen answers, ``kl`` (log-ratio to the
            reference per answer token; an estimate on the data's answers that can be negative); ``tokens``,
            ``real_tokens``, ``padding_share``; when training ``grad_norm`` and seconds by phase.
        """
        if not training:
            return self._metrics(self._evaluate(experiences))
        sums, more = self._train(experiences)
        return {**self._metrics(sums), **more}

    def test(self, env: Any, loop: int | None = 1, *args: Any, **kwargs: Any) -> np.ndarray:
        """Held-out reward margin; higher is better. Appended to ``fitness``.

        The margin is taken at the constructor's ``beta``: when evolution mutates ``beta``, fitness does not grow with it.

        Args:
            env: Environment with ``objective="preference"``.
            loop: Batches to read, from the start of the test split; None reads all of it.
            *args: Not used.
            **kwargs: Not used.
        """
        sums = self._evaluate_env(env, loop)
        ratio = sums.mean("chosen_ratio", "pairs") - sums.mean("rejected_ratio", "pairs")
        return self._append_fitness(self._settings.beta * ratio)

    def evaluate(self, env: Any, loop: int | None = None) -> dict[str, float]:
        """The numbers of `learn` over the test split, without training; ``fitness`` does not grow.

        Args:
            env: Environment with ``objective="preference"``.
            loop: Batches to read, from the start of the split; None reads all of it.
        """
        return self._metrics(self._evaluate_env(env, loop))

    def clone(self, index: int | None = None, wrap: bool = True) -> Self:
        """Create an independent copy; the frozen reference and what was computed under it are shared."""
        twin = super().clone(index, wrap)
        twin._reference.values = dict(self._reference.values)
        return twin

    # -- reference ---------------------------------------------------------------------------------------------------

    def _inherit(self, parent: EvolvableAlgorithm) -> None:
        super()._inherit(parent)
        self._reference = ReferenceLogprobs()
        self._frozen = parent._frozen

    @contextmanager
    def _as_reference(self) -> Generator[tuple[nn.Module, Head], None, None]:
        resources = self._resources
        if resources.adapters is None:
            yield self._frozen_network()
        elif "reference" in resources.adapters.names:
            with resources.adapters.select("reference"):
                yield resources.model, resources.head
        else:
            with resources.adapters.disabled():
                yield resources.model, resources.head

    def _frozen_network(self) -> tuple[nn.Module, Head]:
        """A frozen copy of the whole network, made when it is first needed: before the first step changes a weight."""
        if self._settings.fsdp_config is not None:
            raise UnsupportedError("DPO on all weights of a sharded model is not supported: give a lora_config.")
        if self._frozen is None:
            network = copy.deepcopy(self._resources.model).requires_grad_(False).eval()
            self._frozen = (network, find_head(network))
        return self._frozen

    def _reference_changed(self) -> None:
        self._reference.clear()
        self._frozen = None

    def set_reference_policy(self, reference_update_tracker: int) -> None:
        """Refresh the reference when the tracker advances; a full fine-tune takes a new frozen copy."""
        advances = reference_update_tracker > self._state.reference_update_tracker
        super().set_reference_policy(reference_update_tracker)
        if advances and self._resources.adapters is None:
            self._reference_changed()

    def _extra_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"reference_logprobs": self._reference.tensors()}
        if self._frozen is not None:
            state["reference_network"] = self._frozen[0].state_dict()
        return state

    def _restore_extra_state(self, state: dict[str, Any]) -> None:
        if "reference_logprobs" in state:
            self._reference.load(state["reference_logprobs"])
        if "reference_network" in state:
            self._frozen_network()[0].load_state_dict(state["reference_network"])

    # -- parts -------------------------------------------------------------------------------------------------------

    def _make_objective(self) -> PairObjective:
        settings = self._settings
        return PairObjective(
            head=self._resources.head,
            packer=self._resources.packer,
            values=self._state.hyperparameters,
            loss_type=settings.loss_type,
            label_smoothing=settings.label_smoothing,
            margin=settings.simpo_margin,
            share_prompt=settings.share_prompt,
            reference=self._reference,
            as_reference=self._as_reference,
            chunk_rows=settings.chunk_rows,
        )

    def _rows(self, batch: PreferencePrompts) -> list[Pair]:
        chosen, rejected = preference_samples_of(batch)
        return [Pair(Sample(*good), Sample(*bad)) for good, bad in zip(chosen, rejected, strict=True)]

    @contextmanager
    def _mode(self, *, training: bool) -> Generator[None, None, None]:
        """Dropout is off in training too; blocks are told that they train, so that checkpointing works."""
        with super()._mode(training=False):
            if training:
                for _, block in blocks_of(self.actor):
                    block.training = not _has_own_dropout(block)
            yield

    def _metrics(self, sums: Sums) -> dict[str, float]:
        pairs = partial(sums.mean, unit="pairs")
        nll = sums.mean("nll", "chosen_weight")
        chosen, rejected = self.beta * pairs("chosen_ratio"), self.beta * pairs("rejected_ratio")
        compares = needs_reference(self._settings.loss_type)
        cells = sums.totals["cells"]
        return {
            "loss": pairs("preference_loss") + self.nll_alpha * nll,
            "preference_loss": pairs("preference_loss"),
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "reward_margin": chosen - rejected,
            "accuracy": pairs("accuracy"),
            "preferred": pairs("preferred"),
            "chosen_logp": pairs("chosen_logp"),
            "rejected_logp": pairs("rejected_logp"),
            "nll": nll,
            "perplexity": math.exp(nll) if nll < 700 else math.inf,
            **({"kl": sums.mean("kl", "answer_weight")} if compares else {}),
            "tokens": sums.units["trained_tokens"],
            "real_tokens": sums.units["real_tokens"],
            "padding_share": 1.0 - sums.units["real_tokens"] / cells if cells else 0.0,
        }


def _has_own_dropout(block: nn.Module) -> bool:
    """Whether a block applies dropout by itself, under its own training flag, instead of through a module."""
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(block).items())
