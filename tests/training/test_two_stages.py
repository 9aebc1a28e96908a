"""The two-stage pipeline with default calls: supervised training, a saved checkpoint, preferences from there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from agilerl.algorithms.dpo import DPO
from agilerl.algorithms.sft import SFT
from agilerl.training.llm import train_llm_dataset
from agilerl.utils.utils import save_llm_checkpoint
from tests.helpers import tiny_model
from tests.training.agents import TOKENIZER, make_env, make_pair_env


@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_preferences_start_where_supervision_ended(tmp_path: Path, epochs: int, dropout: float) -> None:
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    shared = {"pad_token_id": TOKENIZER.eos_token_id, "pad_token": TOKENIZER.eos_token, "lora_config": config}
    sft = SFT(actor_network=tiny_model("llama", vocab_size=len(TOKENIZER)), lr=1e-2, **shared)
    train_llm_dataset([sft], make_env(), num_epochs=epochs, checkpoint_path=tmp_path / "run", verbose=False)
    save_llm_checkpoint(sft, str(tmp_path / "sft"))
    trained = {name: tensor.clone() for name, tensor in sft._resources.adapters.read("actor").items()}
    assert any(tensor.any() for name, tensor in trained.items() if "lora_B" in name)

    for path in (tmp_path / "sft", tmp_path / "run"):  # what the user saved, and what the loop did
        dpo = DPO(actor_network=tiny_model("llama", vocab_size=len(TOKENIZER)), **shared)
        dpo.load_checkpoint(str(path))
        for role in ("actor", "reference"):
            held = dpo._resources.adapters.read(role)
            assert all(torch.equal(held[name], tensor) for name, tensor in trained.items())
        env = make_pair_env()
        assert float(dpo.test(env, loop=None)) == 0.0
        metrics = dpo.learn(env.reset())
        assert metrics["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert metrics["loss"] == pytest.approx(math.log(2) + metrics["nll"], abs=1e-6)
        assert metrics["reward_margin"] == 0.0
        held = dpo._resources.adapters.read("reference")
        assert all(torch.equal(held[name], tensor) for name, tensor in trained.items())
