"""The shell of a language-model agent: documented members, each a short delegation to a collaborator."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from agilerl.algorithms.core import saving
from agilerl.algorithms.core.evolvable import EvolvableAlgorithm
from agilerl.algorithms.core.hyperparameter_attribute import HyperparameterAttribute
from agilerl.algorithms.core.plan import BatchPlan
from agilerl.algorithms.core.registry import NetworkGroup, OptimizerConfig
from agilerl.algorithms.core.resources import Resources, build_actor, build_optimizer
from agilerl.algorithms.core.settings import LLMSettings, finite, positive_int
from agilerl.algorithms.core.spaces import action_dim, state_dim
from agilerl.algorithms.core.state import random_stream
from agilerl.algorithms.core.update import Objective, Sums, Updater
from agilerl.checkpoint import (
    CheckpointContent,
    HostBuffers,
    LLMCheckpointSnapshot,
    read_checkpoint,
    tokenizer_difference,
    write_checkpoint,
)
from agilerl.distributed import Runtime, activation_offload, make_runtime
from agilerl.errors import CheckpointError, ConfigError, ModelError
from agilerl.metrics import PhaseTimer
from agilerl.models.modules import in_mode
from agilerl.models.share import share_base
from agilerl.optim import CosineLRScheduleConfig, OptimizerWrapper, lr_multiplier, multiplier_function

__all__ = ["LLMAlgorithm"]

logger = logging.getLogger(__name__)


def _optional_int(name: str, value: Any) -> str | None:
    return None if value is None else positive_int(name, value)


def _norm(name: str, value: Any) -> str | None:
    return None if value is None else finite(name, value, exclusive=True)


class LLMAlgorithm(EvolvableAlgorithm):
    """A language-model agent: one causal LM with adapters by role, one optimizer, one runtime.

    Sub-classes build their settings, offer an `Objective` and turn batches into rows.
    """

    objective: ClassVar[str]
    """Objective of the environments it trains on."""

    batch_size = HyperparameterAttribute(positive_int)
    lr = HyperparameterAttribute(partial(finite, exclusive=True))
    max_grad_norm = HyperparameterAttribute(_norm)
    update_epochs = HyperparameterAttribute(positive_int)
    micro_batch_size_per_gpu = HyperparameterAttribute(_optional_int, effective=True)
    mini_batch_size = HyperparameterAttribute(_optional_int, effective=True)

    mutable: ClassVar[tuple[str, ...]] = (
        "batch_size", "lr", "max_grad_norm", "update_epochs", "micro_batch_size_per_gpu", "mini_batch_size",
    )  # fmt: skip
    """Hyper-parameters that may be assigned and mutated."""

    _resource_names = EvolvableAlgorithm._resource_names | {"tokenizer"}

    def __init__(
        self,
        settings: LLMSettings,
        *,
        actor_network: nn.Module | None = None,
        index: int = 0,
        device: str | torch.device = "cpu",
        wrap: bool = True,
        clone: bool = False,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(index)
        self._settings = settings
        self._state.hyperparameters = {name: getattr(settings, name) for name in self.mutable}
        self.hp_config = settings.hp_config
        self.tokenizer = tokenizer
        self._runtime = make_runtime(device, settings.fsdp_config)
        self._hyperparameters_changed()
        self.register_network_group(NetworkGroup("actor", policy=True))
        self.registry.register_optimizer(
            OptimizerConfig("optimizer", "actor", "lr", torch.optim.AdamW, {"weight_decay": settings.weight_decay})
        )
        will_wrap = wrap and not clone
        model, base = build_actor(settings, actor_network, self._runtime, add_adapters=not clone, will_wrap=will_wrap)
        if will_wrap:  # before the model is looked into: a sharding runtime loads the weights here
            model = self._runtime.prepare(model, gradient_checkpointing=settings.gradient_checkpointing)
        with self._runtime.running(model):
            is_alone = self._runtime.world_size == 1 and not self._runtime.lockstep
            resources = Resources.of(model, settings, base, is_alone=is_alone)
        resources.is_wrapped = will_wrap
        self._adopt(resources)
        if will_wrap:
            self.wrap_models()

    # -- what sub-classes provide ------------------------------------------------------------------------------------

    def _make_objective(self) -> Objective[Any]:
        raise NotImplementedError

    def _rows(self, batch: Any) -> list[Any]:
        """The rows of a padded batch, without padding."""
        raise NotImplementedError

    # -- resources ---------------------------------------------------------------------------------------------------

    def _adopt(self, resources: Resources) -> None:
        self._resources = resources
        self._host_buffers = HostBuffers()
        self._updater: Updater[Any] = Updater(
            self._make_objective(),
            resources.model,
            self._runtime,
            partial(activation_offload, self._settings.activation_offload, self._runtime.device),
        )

    @property
    def actor(self) -> nn.Module:
        """The network: a ``PeftModel`` with LoRA, else the causal LM; an ordinary one at any time."""
        return self._resources.model

    @property
    def optimizer(self) -> OptimizerWrapper | None:
        """The one optimizer; None until `wrap_models` ran."""
        return self._resources.optimizer

    @property
    def runtime(self) -> Runtime:
        """Where the agent runs: device, ranks, collectives."""
        return self._runtime

    @property
    def device(self) -> str:
        """Device of the agent, such as "cpu" or "cuda:0"."""
        return str(self._runtime.device)

    @property
    def settings(self) -> LLMSettings:
        """What the constructor was given, frozen."""
        return self._settings

    @property
    def packing(self) -> tuple[str, str]:
        """How rows reach the model ("packed", "native" or "padded"), and why."""
        return self._resources.packer.path, self._resources.packer.reason

    def wrap_models(self) -> None:
        """Place or shard the actor, then build the optimizer on its parameters; again after `unwrap_models`."""
        resources = self._resources
        if not resources.is_wrapped:
            model = self._runtime.prepare(resources.model, gradient_checkpointing=self._settings.gradient_checkpointing)
            resources = self._moved_to(model, is_wrapped=True)
        if resources.optimizer is None:
            self._install_optimizer(self.registry.optimizers[0])
            if resources.optimizer_state is not None:
                self._runtime.load_optimizer(resources.model, self._torch_optimizer, resources.optimizer_state)
                resources.optimizer_state = None
        self.apply_lr()

    def unwrap_models(self) -> None:
        """Undo `wrap_models`; the moments of the optimizer come back with the next `wrap_models`."""
        resources = self._resources
        if resources.optimizer is not None:
            collected = self._runtime.collect_optimizer(resources.model, self._torch_optimizer)
            resources.optimizer_state = self._runtime.broadcast(collected)  # every rank needs it to load it again
            resources.optimizer = None
        if resources.is_wrapped:
            self._moved_to(self._runtime.unprepare(resources.model), is_wrapped=False)

    def _moved_to(self, model: nn.Module, *, is_wrapped: bool) -> Resources:
        """Go on with ``model``, which the runtime may have built anew."""
        moments = self._resources.optimizer_state
        resources = self._resources.around(model)
        resources.is_wrapped, resources.optimizer_state = is_wrapped, moments
        self._adopt(resources)
        return resources

    def _install_optimizer(self, config: OptimizerConfig) -> OptimizerWrapper:
        wrapper = build_optimizer(self.actor, self._settings, self.lr)
        self._runtime.prepare_optimizer(wrapper.optimizer)
        self._resources.optimizer = wrapper
        self.apply_lr()
        return wrapper

    @property
    def _torch_optimizer(self) -> torch.optim.Optimizer:
        if self._resources.optimizer is None:
            raise ConfigError(f"This {self.algo} agent has no optimizer yet: call wrap_models() first.")
        return self._resources.optimizer.optimizer

    def _copy_network(self, network: nn.Module) -> nn.Module:
        return share_base(network)

    def recompile(self) -> None:
        """Compile the blocks of the actor with ``torch.compile`` where that pays: on one CUDA device.

        Elsewhere it says why not and changes nothing.
        """
        if self._runtime.device.type != "cuda" or self._runtime.world_size > 1:
            logger.warning("recompile: compiling pays on a single CUDA device; %s is left as it is.", self.device)
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        for module in self.actor.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile(dynamic=True)

    def set_training_mode(self, training: bool) -> None:
        """Set the training mode of the agent and its network."""
        self.training = training
        self.actor.train(training)

    def clean_up(self) -> None:
        """Let go of network, optimizer and their memory; the agent cannot be used afterwards."""
        super().clean_up()
        for name in ("_updater", "_resources", "_host_buffers"):
            self.__dict__.pop(name, None)
        if self._runtime.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- batch sizes -------------------------------------------------------------------------------------------------

    @property
    def batch_plan(self) -> BatchPlan:
        """Sizes of the next ``learn`` call, derived from the present hyper-parameters."""
        values = self._state.hyperparameters
        return BatchPlan.derive(
            values["batch_size"],
            values["micro_batch_size_per_gpu"],
            values["mini_batch_size"],
            dp_size=self._runtime.dp_size,
        )

    @property
    def batch_size_per_process(self) -> int:
        """Rows of one ``learn`` on this rank."""
        return self.batch_plan.batch_size_per_process

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes per optimizer step."""
        return self.batch_plan.gradient_accumulation_steps

    def configure_batch_size_per_process(
        self,
        batch_size: int,
        micro_batch_size_per_gpu: int | None,
        mini_batch_size: int | None,
        group_size: int = 1,
    ) -> None:
        """Set the batch sizes together; what follows from them is derived.

        Args:
            batch_size: Rows per ``learn`` over all data-parallel ranks; must divide by their number.
            micro_batch_size_per_gpu: Rows per forward pass; None leaves it to a token budget.
            mini_batch_size: Rows per optimizer step on one rank; None takes all.
            group_size: Completions per prompt, for algorithms that sample groups; 1 here.
        """
        if group_size != 1:
            raise ConfigError(f"group_size must be 1: {self.algo} samples no groups, found {group_size!r}.")
        BatchPlan.derive(batch_size, micro_batch_size_per_gpu, mini_batch_size, dp_size=self._runtime.dp_size)
        self._state.hyperparameters.update(
            batch_size=batch_size,
            micro_batch_size_per_gpu=micro_batch_size_per_gpu,
            mini_batch_size=mini_batch_size,
        )

    def _hyperparameters_changed(self) -> None:
        """Check and apply what follows from the hyper-parameters."""
        _ = self.batch_plan
        if "_resources" in self.__dict__:
            self.apply_lr()

    # -- learning rate -----------------------------------------------------------------------------------------------

    @property
    def current_lr(self) -> float:
        """Actor learning rate the next ``learn`` call trains with."""
        return self.lr * lr_multiplier(self._settings.cosine_lr_schedule_config, self._state.schedule_step)

    @property
    def current_lr_critic(self) -> float:
        """Equal to `current_lr`: there is no critic."""
        return self.current_lr

    @property
    def lr_schedule_step(self) -> int:
        """Learn steps the schedule has taken; 0 without a schedule."""
        return self._state.schedule_step

    def apply_lr(self) -> None:
        """Set the rate of the schedule's current step on the optimizer."""
        if self._resources.optimizer is not None:
            self._resources.optimizer.lr = self.lr
            self._resources.optimizer.set_rates(self.current_lr)

    @staticmethod
    def update_lr(
        optimizer: OptimizerWrapper,
        lr: float | tuple[float, float | None],
        scheduler_config: CosineLRScheduleConfig | None = None,
        schedule_step: int = 0,
    ) -> LambdaLR | None:
        """Set the peak rate of each parameter group and build a schedule on it.

        Args:
            optimizer: The optimizer.
            lr: Peak rate, or the (actor, critic) pair; a None critic uses the actor's. Critic rates apply to groups
                whose role is "critic".
            scheduler_config: Schedule; None holds the rate constant.
            schedule_step: Steps the schedule has taken already.

        Returns:
            Scheduler at ``schedule_step``, or None without a schedule.
        """
        actor, critic = lr if isinstance(lr, tuple) else (lr, None)
        optimizer.lr = actor
        optimizer.set_rates(actor, critic)
        if scheduler_config is None:
            return None
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        multipliers = [
            multiplier_function(scheduler_config, is_critic=group.get("role") == "critic")
            for group in optimizer.param_groups
        ]
        return LambdaLR(optimizer.optimizer, multipliers, last_epoch=schedule_step - 1)

    # -- learning and evaluating -------------------------------------------------------------------------------------

    def _train(self, batch: Any) -> tuple[Sums, dict[str, float]]:
        """Train on a batch: totals and the metrics that all algorithms report."""
        optimizer = self._resources.optimizer
        if optimizer is None:
            raise ConfigError(f"This {self.algo} agent has no optimizer yet: call wrap_models() before learn().")
        timer = PhaseTimer(self._runtime.device)
        if self._resources.adapters is not None and self._resources.adapters.active != "actor":
            self._resources.adapters.activate("actor")
        self.apply_lr()
        with timer.phase("prepare"):
            rows = self._rows(batch)
        key = (self._settings.seed, self._state.learn_calls, self._runtime.dp_rank)
        with self._mode(training=True), random_stream(self._runtime.device, *key):
            sums, grad_norm = self._updater.train(
                rows,
                self.batch_plan,
                optimizer,
                epochs=self.update_epochs,
                max_grad_norm=self.max_grad_norm,
                timer=timer,
            )
        self._state.learn_calls += 1
        if self._settings.cosine_lr_schedule_config is not None:
            self._state.schedule_step += 1
            self.apply_lr()
        return sums, {"grad_norm": grad_norm, **timer.seconds()}

    def _evaluate(self, batch: Any) -> Sums:
        """Totals over a batch, dropout off, no gradients."""
        with self._mode(training=False):
            return self._updater.evaluate(self._rows(batch), self.batch_plan.micro_batch_size_per_gpu)

    def _evaluate_env(self, env: Any, loop: int | None) -> Sums:
        """Totals over ``loop`` batches of the test split from its start; None takes all of it."""
        if loop is not None and (isinstance(loop, bool) or not isinstance(loop, int) or loop < 1):
            raise ConfigError(
                f"loop must be a whole number of at least 1, or None for the whole test split; found {loop!r}."
            )
        if self.tokenizer is None:
            self.tokenizer = getattr(env, "tokenizer_with_template", getattr(env, "tokenizer", None))
        sums = Sums()
        for batch in self._test_batches(env, loop):
            part = self._evaluate(batch)
            sums.add(part.totals, part.units)
        return sums

    @staticmethod
    def _test_batches(env: Any, loop: int | None) -> Any:
        if hasattr(env, "test_batches"):
            return env.test_batches(limit=loop)
        return _reset_batches(env, loop)

    def _mode(self, *, training: bool) -> AbstractContextManager[None]:
        """Put the network in a mode; every module's own comes back afterwards."""
        return in_mode(self.actor, training=training)

    # -- adapters ----------------------------------------------------------------------------------------------------

    def _adapter_roles(self) -> Any:
        if self._resources.adapters is None:
            raise ModelError(f"This {self.algo} agent trains the whole network: it has no adapters.")
        return self._resources.adapters

    def use_adapter(self, adapter_name: str) -> None:
        """Switch the active adapter. "reference" is never trained; others keep every trained adapter trainable.

        Raises:
            ValueError: There is no such adapter; the message lists those that exist.
        """
        self._adapter_roles().activate(adapter_name)

    @contextmanager
    def select_adapter(self, adapter_name: str) -> Generator[None, None, None]:
        """Switch the adapter for the time of a ``with`` block; the actor is active again afterwards."""
        roles = self._adapter_roles()
        roles.activate(adapter_name)
        try:
            yield
        finally:
            roles.activate("actor")

    def update_existing_adapter(self, checkpoint_dir: str, adapter_name: str) -> None:
        """Overwrite an adapter's weights in place from a checkpoint; parameters and optimizer stay the same objects.

        Args:
            checkpoint_dir: Checkpoint folder, or the folder of one adapter.
            adapter_name: Adapter to overwrite; read from the checkpoint's adapter of that role, else from its actor.
        """
        if adapter_name not in self._adapter_roles().names:
            known = ", ".join(self._adapter_roles().names)
            raise ModelError(f"There is no adapter {adapter_name!r} to overwrite; there are: {known}.")
        content = read_checkpoint(checkpoint_dir, need_optimizer=False)
        saved = content.adapters.get(adapter_name) or content.adapters.get("actor")
        if saved is None:
            raise CheckpointError(f"{checkpoint_dir} holds no adapter.")
        saving.write_adapter(self._resources, self._runtime, adapter_name, saved)

    def set_reference_policy(self, reference_update_tracker: int) -> None:
        """Refresh the reference when the tracker advances past the stored value.

        With a reference adapter, the actor is copied onto it. Without one the reference is the base model, which cannot
        move: the request is acknowledged with one warning.
        """
        if reference_update_tracker <= self._state.reference_update_tracker:
            return
        self._state.reference_update_tracker = int(reference_update_tracker)
        adapters = self._resources.adapters
        if adapters is not None and "reference" in adapters.names:
            adapters.copy("actor", "reference")
            self._reference_changed()
        else:
            _warn_once("The reference is the base model, which cannot move: set_reference_policy changed nothing.")

    def _reference_changed(self) -> None:
        """Called after the reference adapter was overwritten."""

    # -- copies ------------------------------------------------------------------------------------------------------

    def clone(self, index: int | None = None, wrap: bool = True) -> Self:
        """Create an independent copy on the same frozen tensors, with its own adapters and optimizer state.

        A full fine-tune has no frozen tensors: its clone copies the whole network.

        Args:
            index: Index of the clone; None keeps the parent's.
            wrap: Kept for callers that pass it; a clone is wrapped exactly where its parent is.
        """
        del wrap
        if self._resources.adapters is None:
            _warn_once(
                "clone() of a full fine-tune copies the whole network and its moments; LoRA agents share their base."
            )
        twin = object.__new__(type(self))
        object.__setattr__(twin, "_state", self._state.copy())
        twin.registry = saving.copy_registry(self.registry)
        twin.grama_scores = dict(self.grama_scores)
        twin.training = self.training
        twin._grama = None
        twin._settings = self._settings
        twin.tokenizer = self.tokenizer
        twin._runtime = self._runtime
        twin._inherit(self)
        twin._adopt(self._resources.shared_copy(self._runtime))
        if self._resources.optimizer is not None:
            twin._install_optimizer(twin.registry.optimizers[0]).copy_state(self._resources.optimizer)
        twin._resources.optimizer_state = saving.copy_plain(self._resources.optimizer_state)
        if index is not None:
            twin.index = index
        return twin

    def _inherit(self, parent: Any) -> None:
        """Take over what a sub-class holds besides settings, state and resources; called on a fresh clone."""

    @classmethod
    def population(
        cls,
        size: int,
        device: str | torch.device = "cpu",
        resume_from_checkpoint: str | None = None,
        **kwargs: Any,
    ) -> list[Self]:
        """Create a population on one frozen base: agent 0 is built, the others are its clones.

        Args:
            size: Number of agents.
            device: Torch device.
            resume_from_checkpoint: Checkpoint to continue from. Members found in its ``population`` folder are restored
                each to its own place; otherwise every agent starts from the one that is there.
            **kwargs: Constructor arguments.
        """
        if problem := positive_int("size", size):
            raise ConfigError(problem + ".")
        first = cls(device=device, **{"index": 0, **kwargs})
        members = saving.member_folders(resume_from_checkpoint)
        if members and len(members) != size:
            raise CheckpointError(f"{resume_from_checkpoint} holds a population of {len(members)}; size is {size}.")
        if resume_from_checkpoint is not None and not members:
            first.load_checkpoint(resume_from_checkpoint, load_optimizer=True)
            first.index = 0
        agents = [first, *(first.clone(index=i) for i in range(1, size))]
        for agent, folder in zip(agents, members, strict=False):
            agent.load_checkpoint(str(folder), load_optimizer=True)
        return agents

    def _input_arguments(self) -> dict[str, Any]:
        from dataclasses import fields

        values = {f.name: getattr(self._settings, f.name) for f in fields(self._settings)}
        values |= {name: getattr(self, name) for name in self.mutable}
        return values | super()._input_arguments() | {"device": self.device}

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _capture(self, lora_only: bool = True, save_optimizer: bool = True) -> CheckpointContent:
        """What a checkpoint of this agent holds; collective, empty of tensors off the main process."""
        content = saving.capture(self._resources, self._runtime, lora_only=lora_only, save_optimizer=save_optimizer)
        content.algorithm = self.algo
        content.settings = self._settings.describe()
        content.state = self._state.describe() | {"algorithm": self._extra_state()}
        content.tokenizer = self.tokenizer
        return content

    def _extra_state(self) -> dict[str, Any]:
        """Plain state that a sub-class keeps besides `AgentState`."""
        return {}

    def _restore_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what `_extra_state` gave."""

    def snapshot_checkpoint(self, lora_only: bool = True, save_optimizer: bool = True) -> LLMCheckpointSnapshot:
        """Copy the checkpoint into host memory; later training does not change it. All ranks call this together.

        ``release()`` on a snapshot that is written hands its memory to the next one, which then costs a copy and no more.

        Args:
            lora_only: See `save_checkpoint`.
            save_optimizer: See `save_checkpoint`.
        """
        return LLMCheckpointSnapshot.of(self._capture(lora_only, save_optimizer), self._host_buffers)

    def save_checkpoint(
        self, path: str | os.PathLike[str], lora_only: bool = True, save_optimizer: bool = True
    ) -> None:
        """Save weights and state to a folder, replacing an earlier checkpoint there atomically.

        Args:
            path: Folder.
            lora_only: Write adapters only (a full fine-tune: an ordinary model folder ``actor/``). False puts the full
                state dict into ``attributes.pt``.
            save_optimizer: Save the optimizer's moments too.
        """
        content = self._capture(lora_only, save_optimizer)
        if self._runtime.is_main:
            write_checkpoint(content, path)
        self._runtime.barrier()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        load_optimizer: bool = False,
        overwrite_reference_adapter: bool | None = None,
        overwrite_critic_adapter: bool = False,
        restore_config: bool = True,
        restore_hyperparameters: bool = True,
    ) -> None:
        """Load weights and state from a checkpoint folder. From another algorithm's checkpoint, weights only.

        Args:
            path: Folder that `save_checkpoint` wrote.
            load_optimizer: Restore the moments too; warns and starts fresh where the checkpoint has none.
            overwrite_reference_adapter: Copy the loaded actor onto the reference even if the checkpoint has one; None
                does so only where it has none.
            overwrite_critic_adapter: Refused: there is no critic.
            restore_config: Take over the checkpoint's settings; False keeps this agent's and restores the training
                state only.
            restore_hyperparameters: False keeps this agent's values of the mutable hyper-parameters (those of
                ``hp_config``; without one, all of them).

        Raises:
            CheckpointError: The checkpoint does not fit this agent; the message names the difference.
        """
        content = read_checkpoint(path, need_optimizer=load_optimizer)
        if self.tokenizer is not None and content.tokenizer is not None:
            different = tokenizer_difference(content.tokenizer, self.tokenizer)
            if different is not None:
                raise CheckpointError(f"{path} was trained with another tokenizer: {different}.")
        self._load_weights(content, overwrite_reference_adapter, overwrite_critic_adapter, path)
        if content.algorithm != self.algo:
            return
        self._restore_state(content, restore_config, restore_hyperparameters)
        if not overwrite_reference_adapter:
            self._restore_extra_state(content.state.get("algorithm", {}))
        if load_optimizer:
            self._restore_optimizer(content, path)
        self.apply_lr()

    def load_weights(
        self,
        path: str | os.PathLike[str],
        overwrite_reference_adapter: bool | None = None,
        overwrite_critic_adapter: bool = False,
    ) -> None:
        """Load weights only.

        Args:
            path: Folder that `save_checkpoint` wrote.
            overwrite_reference_adapter: See `load_checkpoint`.
            overwrite_critic_adapter: See `load_checkpoint`.
        """
        content = read_checkpoint(path, need_optimizer=False)
        self._load_weights(content, overwrite_reference_adapter, overwrite_critic_adapter, path)

    def _load_weights(
        self, content: CheckpointContent, overwrite_reference: bool | None, overwrite_critic: bool, path: Any
    ) -> None:
        if overwrite_critic:
            raise ConfigError(f"overwrite_critic_adapter must be False: {self.algo} has no critic.")
        saving.restore_weights(content, self._resources, self._runtime, overwrite_reference, str(path))
        self._reference_changed()

    def _restore_state(self, content: CheckpointContent, restore_config: bool, restore_hyperparameters: bool) -> None:
        own = dict(self._state.hyperparameters)
        declared = set(self.hp_config.names())
        self._state.restore(content.state, hyperparameters=True, index=restore_config)
        for name, value in own.items():
            from_config = restore_config and (restore_hyperparameters or bool(declared))
            if not (restore_hyperparameters if name in declared else from_config):
                self._state.hyperparameters[name] = value
        if restore_config:
            self._settings = saving.merged_settings(self._settings, content.settings)
            self._adopt(self._resources)
        self._hyperparameters_changed()

    def _restore_optimizer(self, content: CheckpointContent, path: Any) -> None:
        if content.optimizer is None:
            import warnings

            warnings.warn(
                f"{path} holds no optimizer state (it was saved with save_optimizer=False); the optimizer starts fresh.",
                UserWarning,
                stacklevel=3,
            )
            return
        if self._resources.optimizer is None:
            self._resources.optimizer_state = content.optimizer
            return
        self._runtime.load_optimizer(self.actor, self._torch_optimizer, content.optimizer)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: str | torch.device = "cpu",
        accelerator: Any = None,
        *,
        model_name: str | None = None,
    ) -> Self:
        """Rebuild an agent from a checkpoint alone; the base model is found by its name or path.

        Args:
            path: Folder that `save_checkpoint` wrote.
            device: Device to load the agent on.
            accelerator: Must be None: ranks come from torchrun.
            model_name: Where the base model is now, if it has moved; it must be the same one.

        Raises:
            CheckpointError: It is another algorithm's checkpoint, or its base model cannot be found.
        """
        if accelerator is not None:
            raise ConfigError("accelerator must be None: distributed runs are started with torchrun.")
        content = read_checkpoint(path)
        if content.algorithm != cls.__name__:
            raise CheckpointError(
                f"{path} is a checkpoint of {content.algorithm}; build a {cls.__name__} and call load_checkpoint on it."
            )
        if model_name is not None:
            content.settings["model_name"] = model_name
        kwargs = saving.constructor_arguments(content, Path(path))
        try:
            agent = cls(device=device, **kwargs)
        except ModelError as error:
            raise CheckpointError(
                f"The base model of {path} cannot be loaded: {error} If it has moved, say where it is with model_name."
            ) from error
        agent.load_checkpoint(path, load_optimizer=content.optimizer is not None)
        agent.tokenizer = content.tokenizer
        return agent

    # -- small documented members ------------------------------------------------------------------------------------

    def get_action(self, *args: Any, **kwargs: Any) -> Any:
        """Not available: the algorithm learns from a fixed data set.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{self.algo} learns from a fixed data set and takes no actions; use agent.actor.generate for text."
        )

    def preprocess_observation(self, observation: Any) -> Any:
        """Return ``observation`` as it is."""
        return observation

    def to_device(self, *experiences: Any) -> tuple[Any, ...]:
        """Return the experiences on the agent's device; dicts, lists and tuples of tensors keep their form."""
        return tuple(_moved(item, self._runtime.device) for item in experiences)

    @staticmethod
    def get_state_dim(observation_space: Any) -> Any:
        """Input size of a network for a Gymnasium space: a shape, or a collection of shapes for a collection."""
        return state_dim(observation_space)

    @staticmethod
    def get_action_dim(action_space: Any) -> Any:
        """Output size of a network for a Gymnasium space: an int, or a collection of ints for a collection."""
        return action_dim(action_space)

    def _append_fitness(self, value: float) -> np.ndarray:
        self.fitness.append(value)
        return np.asarray(value)


def _moved(item: Any, device: torch.device) -> Any:
    if isinstance(item, (Tensor, nn.Module)):
        return item.to(device)
    if isinstance(item, Mapping):
        return {name: _moved(value, device) for name, value in item.items()}
    if isinstance(item, tuple):
        return tuple(_moved(value, device) for value in item)
    return [_moved(value, device) for value in item] if isinstance(item, list) else item


def _reset_batches(env: Any, loop: int | None) -> Generator[Any, None, None]:
    """Batches of an environment that offers nothing but ``eval_mode`` and ``reset``."""
    if loop is None:
        raise ConfigError(f"{type(env).__name__} cannot say where its test split ends; give loop a number of batches.")
    with env.eval_mode():
        for _ in range(loop):
            yield env.reset()


_told: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _told:
        _told.add(message)
        logger.warning(message)
