"""The chat template that training used is saved with the result, and the caller's tokenizer stays as it was."""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig
from transformers import AutoTokenizer

from agilerl.algorithms.sft import SFT
from agilerl.llm_envs import DatasetEnv
from agilerl.training.llm import train_llm_dataset
from tests.helpers import CHATML, tiny_model, tiny_tokenizer


def test_a_chosen_template_comes_back_from_the_output_folder_alone(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(all_bytes=True)
    assert tokenizer.chat_template is None
    rows = [{"prompt": [{"role": "user", "content": f"n {i}"}], "response": "yes"} for i in range(4)]
    env = DatasetEnv(rows, rows[:1], tokenizer, objective="sft", chat_template=CHATML, data_batch_size_per_gpu=4)
    agent = SFT(
        tokenizer.eos_token_id,
        tokenizer.eos_token,
        actor_network=tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=256),
        lora_config=LoraConfig(r=2, target_modules=["q_proj"]),
        batch_size=4,
    )
    train_llm_dataset([agent], env, checkpoint_path=str(tmp_path), verbose=False)
    assert tokenizer.chat_template is None
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    message = [{"role": "user", "content": "n 3"}]
    wanted = env.tokenizer_with_template.apply_chat_template(message, tokenize=False)
    assert loaded.apply_chat_template(message, tokenize=False) == wanted
    assert "n 3" in wanted
