"""The one description of a run. Each field's docstring is its documentation (docs/configuration.md is made of them)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from agilerl.config.data import DataSection
from agilerl.config.evolution import EvolutionSection
from agilerl.config.section import Section
from agilerl.config.sharding import FSDPSection

__all__ = [
    "CheckpointSection",
    "DPOSection",
    "EvaluationSection",
    "LogSection",
    "LoraSection",
    "ModelSection",
    "OutputSection",
    "RunConfig",
    "SFTSection",
    "TrainingSection",
]


class ModelSection(Section):
    """The model that is trained."""

    other_names: ClassVar = {"model": "name", "path": "name", "model_name_or_path": "name", "torch_dtype": "dtype"}

    name: str = Field(default="smollm2-135m", min_length=1)
    """A preset (`smollm2-135m`), a local folder or a Hub name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. `auto`: bfloat16 on a GPU that has it, float32 on a CPU."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1` ...; `auto` takes a GPU if there is one."""
    quantization: Literal["none", "int8", "nf4"] = "none"
    """Hold the frozen base in 8 or 4 bits (QLoRA); needs the extra `quant`."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    attention: str | None = None
    """Attention implementation asked of transformers (`sdpa`, `eager`, ...); nothing: its own choice."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""
    adapter: str | None = None
    """A checkpoint or PEFT adapter folder to go on from, with a fresh optimizer; its LoRA settings are used."""


class LoraSection(Section):
    """Low-rank adapters (LoRA). Switch them off to train all weights."""

    other_names: ClassVar = {
        "r": "rank",
        "lora_r": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "use_rslora": "rslora",
        "use_dora": "dora",
        "targets": "target_modules",
    }

    enabled: bool = True
    """`false`: full fine-tuning, every weight is trained."""
    rank: int = Field(default=16, ge=1)
    """Rank of the update; higher learns more and costs more."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update: alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs that is dropped in training."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: `all-linear` (all but the head), one regular expression, or a list of names."""
    target_scope: str | None = None
    """Only layers below this path; nothing: all, of a vision-language model those of its `language_model`."""
    modules_to_save: list[str] | None = None
    """Modules trained as a whole beside the adapters, such as `lm_head` or `embed_tokens`."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), which keeps high ranks stable (arXiv 2312.03732)."""
    dora: bool = False
    """Learn magnitude and direction apart (DoRA, arXiv 2402.09353); slower."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        if isinstance(value, (str, list, tuple)) and not value:
            raise ValueError("is empty, so nothing would be adapted; name layers, or use all-linear")
        return value if not isinstance(value, tuple) else list(value)


class _TrainerSection(Section):
    """Settings that SFT and DPO share."""

    other_names: ClassVar = {
        "learning_rate": "lr",
        "per_device_train_batch_size": "micro_batch_size_per_gpu",
        "micro_batch_size": "micro_batch_size_per_gpu",
        "gradient_accumulation_steps": "micro_batch_size_per_gpu",
        "grad_clip": "max_grad_norm",
        "gradient_clipping": "max_grad_norm",
        "lr_scheduler_type": "schedule",
        "warmup_ratio": "warmup_proportion",
        "train_batch_size": "batch_size",
    }

    lr: float = Field(default=5e-5, gt=0)
    """Peak learning rate."""
    batch_size: int = Field(default=16, ge=1)
    """Rows per optimizer step, over all processes together."""
    micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """Rows per forward pass: a memory knob that never changes the result. Nothing: a token budget by model size."""
    mini_batch_size: int | None = Field(default=None, ge=1)
    """Rows per process and optimizer step; nothing: batch_size / processes."""
    update_epochs: int = Field(default=1, ge=1)
    """Passes over each gathered batch."""
    max_grad_norm: float = Field(default=0.1, gt=0)
    """Gradients are scaled down to this norm."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate over the run: constant, or warmed up and then lowered along a cosine."""
    warmup_proportion: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps with a rising rate (cosine schedule only). The first step's rate is never zero."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last rate as a share of the peak (cosine schedule only)."""
    gradient_checkpointing: bool = True
    """Compute activations again in the backward pass: less memory, more time, the same result."""
    activation_offload: bool = False
    """Keep activations in host memory during the forward pass (GPU only)."""
    calc_position_embeddings: bool = True
    """Count positions from each row's first real token; `false` keeps the model's own columns (the padded path)."""
    use_liger_loss: bool = True
    """Use the Liger loss kernel where it is installed and usable (GPU); the result is the same."""
    chunk_rows: int | None = Field(default=None, ge=1)
    """Rows of logits made at a time; nothing: by vocabulary size."""
    moe_lora_recompute: bool | None = None
    """Mixture-of-experts LoRA: compute expert activations again in backward. Nothing: where it pays."""
    use_separate_reference_adapter: bool = False
    """Also keep a reference adapter, for a second stage that expects one."""


class SFTSection(_TrainerSection):
    """Supervised fine-tuning."""

    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the routers' balance loss in a mixture of experts, taken row by row; 0 leaves it out."""


class DPOSection(_TrainerSection):
    """Direct preference optimisation (`agilerl dpo`)."""

    lr: float = Field(default=5e-6, gt=0)
    """Peak learning rate."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference."""
    nll_alpha: float = Field(default=1.0, ge=0)
    """Weight of the chosen answer's own loss."""
    use_separate_reference_adapter: bool = True
    """Keep the reference as an adapter of its own: the policy that training starts from."""
    loss_type: Literal["sigmoid", "ipo", "hinge", "sigmoid_norm", "simpo"] = "sigmoid"
    """Loss on a pair; `docs/dpo.md` gives each with its paper."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of labels taken to be wrong (sigmoid losses)."""
    simpo_margin: float = Field(default=0.5, ge=0)
    """Target margin of the `simpo` loss."""
    share_prompt: bool = True
    """Compute the prompt of a pair once for both answers where the model allows; the result is the same."""


class TrainingSection(Section):
    """How long to train, and how often to look."""

    other_names: ClassVar = {
        "num_epochs": "epochs",
        "num_train_epochs": "epochs",
        "eval_steps": "evaluation_interval",
        "steps": "max_steps",
    }

    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training rows; nothing: one pass, or what max_steps says."""
    max_steps: int | None = Field(default=None, ge=1)
    """Rows to train on (a step is one row), instead of epochs; needed for streams of unknown length."""
    evaluation_interval: int = Field(default=10, ge=1)
    """Optimizer updates between two looks at held-out rows."""
    eval_batches: int | None = Field(default=None, ge=1)
    """Batches per periodic evaluation; nothing: a quarter of the rows trained in between. The last one reads all."""
    seed: int = Field(default=42, ge=0)
    """Owns everything random: adapters, dropout, order, split, evolution."""

    @model_validator(mode="after")
    def _one_budget(self) -> TrainingSection:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("epochs and max_steps are both set; keep the one you mean")
        return self


class EvaluationSection(Section):
    """What is measured on held-out rows before and after training."""

    other_names: ClassVar = {"max_tokens": "max_new_tokens", "num_samples": "samples"}

    enabled: bool = True
    """Measure before and after training; `false`: only the training loop's own held-out loss."""
    exact_match: bool = True
    """Let the model answer held-out prompts and compare with the expected answers, character by character."""
    limit: int | None = Field(default=200, ge=1)
    """Held-out rows that are answered for exact match; nothing: all."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest answer."""
    batch_size: int = Field(default=16, ge=1)
    """Rows answered together."""
    samples: int = Field(default=4, ge=0)
    """Answers shown side by side, before and after."""


class CheckpointSection(Section):
    """Saving."""

    other_names: ClassVar = {"save_steps": "steps", "checkpoint_steps": "steps", "save_total_limit": "keep_last"}

    steps: int | None = Field(default=None, ge=1)
    """Rows between two saves; nothing: at the end only (and when interrupted)."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept in the folder's history."""
    keep_best: int = Field(default=1, ge=0)
    """Best checkpoints kept beside them, by held-out loss."""
    save_optimizer: bool = True
    """Also save optimizer state, which resuming needs."""
    lora_only: bool = True
    """Save adapters only; `false`: all weights in one file."""
    background: bool = True
    """Write while training goes on."""
    on_error: Literal["raise", "warn"] = "raise"
    """When a save fails, for instance on a full disk: stop, or warn and train on."""


class LogSection(Section):
    """Where numbers go, beside the checkpoint folder."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """Live display, plain lines or nothing; `auto`: live on a terminal, plain elsewhere."""
    csv: bool = True
    """Write metrics.csv."""
    jsonl: bool = False
    """Write metrics.jsonl."""
    tensorboard: bool = False
    """Write TensorBoard events; needs the extra `tensorboard`."""
    wandb: bool = False
    """Log to Weights & Biases; needs the extra `wandb`. Offline unless a key is set."""
    wandb_project: str = "agilerl"
    """Project name there."""
    folder: str | None = None
    """Folder of the log files; nothing: `logs` in the output folder."""

    @field_validator("console", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        return {False: "off", True: "auto", "no": "off", "false": "off"}.get(value, value)  # type: ignore[call-overload]


class OutputSection(Section):
    """Where the result goes."""

    other_names: ClassVar = {"output_dir": "path", "dir": "path", "folder": "path"}

    path: str = Field(default="outputs/sft", min_length=1)
    """Checkpoint folder."""
    overwrite: bool = False
    """Replace a checkpoint that is already there; only files that this program wrote are removed."""


class RunConfig(Section):
    """A whole run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    lora: LoraSection = LoraSection()
    sft: SFTSection = SFTSection()
    dpo: DPOSection = DPOSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    evolution: EvolutionSection = EvolutionSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    output: OutputSection = OutputSection()
    fsdp: FSDPSection = FSDPSection()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every setting included."""
        return self.model_dump(mode="json")
