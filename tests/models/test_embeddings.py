"""New tokens: they get rows, the rows train, and both are there after a reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from agilerl.algorithms import SFT
from agilerl.errors import ModelError
from agilerl.models import add_tokens, attach_lora, load_base_model, merge_adapter, resize_embeddings, train_tokens
from agilerl.models.tie import has_tied_head
from tests.helpers import tiny_model, tiny_tokenizer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def rows(model: Any) -> torch.Tensor:
    return model.get_input_embeddings().weight.detach()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_new_rows_are_the_mean_and_the_old_ones_stay(tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    before, head = rows(model).clone(), model.lm_head.weight.detach().clone()
    resize_embeddings(model, 131)
    assert rows(model).shape[0] == model.lm_head.weight.shape[0] == model.config.vocab_size == 131
    assert has_tied_head(model) == tied
    assert torch.equal(rows(model)[:128], before)
    assert torch.equal(model.lm_head.weight[:128], head)
    torch.testing.assert_close(rows(model)[128:], before.mean(dim=0).expand(3, -1))
    with pytest.raises(ModelError, match="has 131 rows; it cannot shrink to 130"):
        resize_embeddings(model, 130)
    resize_embeddings(model, 131)


def test_growing_draws_nothing_and_repeats_itself() -> None:
    state = torch.get_rng_state()
    first, second = tiny_model("llama"), tiny_model("llama")
    for model in (first, second):
        resize_embeddings(model, 130)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(rows(first), rows(second))


def test_tokens_that_fit_need_no_rows() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    size = len(tokenizer)
    assert add_tokens(model, tokenizer, ["<a>", "<b>"]) == [size, size + 1]
    assert rows(model).shape[0] == 128
    assert add_tokens(model, tokenizer, ["<b>", "<c>"]) == [size + 1, size + 2]
    assert tokenizer("x<b>")["input_ids"][-1] == size + 1


def test_an_adapter_for_rows_that_are_not_there_is_refused() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [5, 129]})
    with pytest.raises(ModelError, match=r"trains token 129, and the model has 128 .*embedding_rows': 130"):
        attach_lora(tiny_model("llama"), config, seed=0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("way", ["network", "name"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_added_tokens_train_and_come_back(tied: bool, way: str, tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    tiny_model("llama", tie_word_embeddings=tied, spread=0.1).save_pretrained(base)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<fill{i}>" for i in range(128 - len(tokenizer))])
    model = load_base_model(base)
    ids = add_tokens(model, tokenizer, ["<call>", "<done>"], special=True)
    assert ids == [128, 129]
    source: dict[str, Any] = {"actor_network": model}
    if way == "name":
        source = {"model_name": base, "model_config": {"embedding_rows": 130}}
    lora = train_tokens(LORA, model, ids)
    assert set(lora.trainable_token_indices) == ({"embed_tokens"} if tied else {"embed_tokens", "lm_head"})
    assert LORA.trainable_token_indices is None
    agent = SFT(0, "<pad>", batch_size=2, lr=1e-2, lora_config=lora, use_liger_loss=False, **source)
    batch = {
        "input_ids": torch.tensor([[128, 9, 129, 11], [7, 128, 30, 129]]),
        "attention_mask": torch.ones(2, 4, dtype=torch.long),
        "prompt_lengths": [1, 1],
    }
    before = agent.actor(input_ids=batch["input_ids"]).logits.detach().clone()
    for _ in range(2):
        agent.learn(batch)
    trained = agent.actor.eval()(input_ids=batch["input_ids"]).logits.detach()
    assert not torch.allclose(trained[..., 128:], before[..., 128:])
    agent.save_checkpoint(str(tmp_path / "checkpoint"))

    loaded = SFT.load(str(tmp_path / "checkpoint")).actor.eval()
    torch.testing.assert_close(loaded(input_ids=batch["input_ids"]).logits, trained, rtol=1e-5, atol=1e-6)
    grown: Any = AutoModelForCausalLM.from_pretrained(base)
    resize_embeddings(grown, 130)
    plain = PeftModel.from_pretrained(grown, str(tmp_path / "checkpoint"))
    torch.testing.assert_close(plain(input_ids=batch["input_ids"]).logits, trained, rtol=1e-5, atol=1e-6)
    merge_adapter(plain).model.save_pretrained(tmp_path / "merged")
    merged = load_base_model(str(tmp_path / "merged"))
    assert has_tied_head(merged) == tied
    torch.testing.assert_close(merged(input_ids=batch["input_ids"]).logits, trained, rtol=1e-4, atol=1e-5)
