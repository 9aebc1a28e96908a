"""Does evolution find a learning rate that nobody told it? A study that runs in a few minutes on two CPU cores.

A tiny random model learns to answer with the partner of a word. Its learning rate starts 30 times too low. Three runs:
one agent that keeps it, one agent that keeps it and gets four times the rows, and four agents that evolve.

    python examples/evolve.py [output folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

from peft import LoraConfig
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

from agilerl.algorithms import SFT
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.llm_envs import DatasetEnv
from agilerl.training.llm import lineage_table, read_lineage, train_llm_dataset, winning_settings

GOOD_LR = 1e-2
WORDS = [f"w{n}" for n in range(20)]
CALLS = ["say", "tell", "give", "name"]
MANNERS = ["please", "now", "again", "slowly", "quickly"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: n for n, word in enumerate(["<end>", "<unk>", *CALLS, *MANNERS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unk>")


def make_env(tokenizer: PreTrainedTokenizerFast) -> DatasetEnv:
    partner = {word: WORDS[(7 * n + 3) % len(WORDS)] for n, word in enumerate(WORDS)}
    prompts = [(f"{call} {manner} {word}", word) for call in CALLS for manner in MANNERS for word in WORDS]
    rows = [{"prompt": prompt, "response": partner[word]} for prompt, word in prompts]
    held_out = rows[::7]
    train = [row for row in rows if row not in held_out]
    return DatasetEnv(train, held_out, tokenizer, objective="sft", data_batch_size_per_gpu=8)


def make_agents(size: int, tokenizer: PreTrainedTokenizerFast) -> list[SFT]:
    set_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "initializer_range": 0.3}  # wide, as in a trained model: heads can be sure
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), eos_token_id=0, **shape)
    ranges = HyperparameterConfig(lr=RLParameter(1e-5, 1.0, shrink_factor=0.5, grow_factor=2.0))
    return SFT.population(
        size,
        pad_token_id=tokenizer.eos_token_id,
        pad_token=tokenizer.eos_token,
        actor_network=AutoModelForCausalLM.from_config(config),
        lora_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        hp_config=ranges,
        batch_size=8,
        lr=GOOD_LR / 30,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
    )


def main(folder: Path) -> None:
    console, tokenizer = Console(), make_tokenizer()
    epochs = 2
    quiet = {"verbose": False, "evaluation_interval": None}
    for name, passes in (("one agent", epochs), ("one agent, four times the rows", 4 * epochs)):
        env = make_env(tokenizer)
        _, (fitness,) = train_llm_dataset(make_agents(1, tokenizer), env, num_epochs=passes, checkpoints=False, **quiet)
        console.print(f"{name}: held-out loss {-fitness:.4f}")

    population, fitnesses = train_llm_dataset(
        make_agents(4, tokenizer),
        make_env(tokenizer),
        num_epochs=epochs,
        evo_steps=4,
        eval_batches=4,
        selection_strategy=TournamentSelection(tournament_size=2, elitism=True, population_size=4),
        mutation=Mutations(
            no_mutation=0.2, architecture=0, new_layer_prob=0, parameters=0, activation=0, rl_hp=0.8, rand_seed=0
        ),
        pre_training_mut=True,
        checkpoint_path=folder,
        **quiet,
    )
    best = population[fitnesses.index(max(fitnesses))]
    console.print(lineage_table(read_lineage(folder)))
    console.print(f"four agents that evolve: held-out loss {-max(fitnesses):.4f}, settings {winning_settings(best)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "evolved"))
