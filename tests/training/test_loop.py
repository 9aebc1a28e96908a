"""``train_llm_dataset`` with one agent: budgets, evaluation, records, checkpoints, mistakes."""

from __future__ import annotations

import csv
import inspect
import math
import signal

import pytest
import torch
from peft import PeftModel

from agilerl.checkpoint import verify
from agilerl.training.llm import train_llm_dataset
from tests.helpers import tiny_model
from tests.training.agents import TOKENIZER, make_agent, make_env, make_population


class Recorder:
    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.closed = True

    def of(self, kind):
        return [record for record in self.records if record["kind"] == kind]


def train(pop, env, **kwargs):
    recorder = Recorder()
    quiet = {"verbose": False, "checkpoints": False, "sinks": [recorder]}
    result = train_llm_dataset(pop, env, **(quiet | kwargs))
    return *result, recorder


def count_steps(agent) -> list[int]:
    steps = []
    agent.optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps


def test_the_documented_signature():
    names = list(inspect.signature(train_llm_dataset).parameters)
    assert names[:23] == [
        "pop", "env", "env_fn", "init_hp", "save_elite", "elite_path", "wb", "tensorboard", "tensorboard_log_dir", "csv",
        "csv_log_dir", "evo_steps", "checkpoint_steps", "checkpoint_path", "selection_strategy", "tournament", "mutation",
        "wandb_api_key", "wandb_kwargs", "evaluation_interval", "verbose", "max_steps", "num_epochs",
    ]  # fmt: skip
    parameters = inspect.signature(train_llm_dataset).parameters
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in names[23:])
    defaults = {name: parameters[name].default for name in names[1:23]}
    assert defaults.pop("evaluation_interval") == 10
    assert defaults.pop("verbose") is True
    assert {name for name, value in defaults.items() if value is False} == {"wb", "tensorboard", "csv"}
    assert all(value in (None, False) for value in defaults.values())


def test_one_pass_by_default_with_a_smaller_last_step():
    agent, env = make_agent(), make_env(train=20)
    steps = count_steps(agent)
    pop, fitness, recorder = train([agent], env)
    assert pop == [agent]
    assert agent.steps == 20
    assert len(steps) == math.ceil(20 / 8)
    assert env.num_epochs == 1
    assert [record["rows"] for record in recorder.of("train")] == [8, 16, 20]
    assert fitness == [agent.fitness[-1]]


def test_env_batches_are_gathered_to_the_agents_batch_size():
    agent = make_agent(batch_size=32)
    steps = count_steps(agent)
    train([agent], make_env(train=64, batch=16))
    assert len(steps) == 2


def test_epochs_have_remainders_of_their_own():
    agent = make_agent(batch_size=2)
    steps = count_steps(agent)
    train([agent], make_env(train=9), num_epochs=3)
    assert len(steps) == 15  # ceil(9 / 2) in each of three epochs
    assert agent.steps == 27
    one_row = make_agent(batch_size=8)
    steps = count_steps(one_row)
    train([one_row], make_env(train=1, test=1))
    assert len(steps) == 1


def test_max_steps_is_exact_and_num_epochs_wins():
    agent = make_agent()
    train([agent], make_env(train=20), max_steps=13)
    assert agent.steps == 13
    with pytest.warns(UserWarning, match="num_epochs=1 and max_steps=3"):
        train([agent], make_env(train=20), max_steps=3, num_epochs=1)
    assert agent.steps == 33


def test_a_second_call_goes_on_in_the_data():
    agent, env = make_agent(), make_env(train=20)
    train([agent], env, max_steps=8)
    train([agent], env, max_steps=12)
    assert env.num_epochs == 1


def test_periodic_evaluations_are_small_and_the_last_reads_everything():
    agent, env = make_agent(batch_size=2), make_env(train=24, test=8, batch=2)
    loops = []
    test = agent.test
    agent_test = lambda env, loop=1: (loops.append(loop), test(env, loop))[1]  # noqa: E731
    agent.__dict__["test"] = agent_test
    _, _, recorder = train([agent], env, evaluation_interval=4)
    assert loops == [1, 1, None]  # a quarter of 4 x 2 rows is one batch of 2; the last iteration is measured once
    assert [record["rows"] for record in recorder.of("eval")] == [8, 16, 24]
    loops.clear()
    train([agent], env, evaluation_interval=6, eval_batches=3)
    assert loops == [3, None]
    loops.clear()
    train([agent], env, evaluation_interval=None)
    assert loops == [None]


def test_records_hold_what_the_run_did():
    agent = make_agent()
    _, fitness, recorder = train([agent], make_env(train=16))
    first, last = recorder.of("train")
    assert first["lr"] == agent.lr
    assert first["tokens"] > 0
    assert first["epoch"] == 0
    assert last["epoch"] == 1
    assert {"loss", "perplexity", "grad_norm", "padding_share", "elapsed_s", "iteration", "agent"} <= set(first)
    assert not any(key.startswith("learn_phase") for key in first)
    (final,) = recorder.of("eval")
    assert final["fitness"] == fitness[0] == -final["loss"]
    assert recorder.closed
    assert agent.scores == [-first["loss"], -last["loss"]]


def test_it_learns():
    agent, env = make_agent(batch_size=7, lr=3e-2), make_env(train=28, test=7)
    before = float(agent.test(env, loop=None))
    _, (after,), _ = train([agent], env, num_epochs=6)
    assert after > before + 1.0


def test_checkpoints_at_steps_and_at_the_end(tmp_path):
    agent, env = make_agent(), make_env(train=20)
    train([agent], env, checkpoints=True, checkpoint_steps=8, checkpoint_path=tmp_path / "run", keep_last=3)
    base = tiny_model("llama", vocab_size=len(TOKENIZER))
    loaded = PeftModel.from_pretrained(base, tmp_path / "run")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.allclose(loaded.eval()(ids).logits, agent.actor.eval()(ids).logits, atol=1e-6)
    assert (tmp_path / "run" / "tokenizer_config.json").exists()


def test_default_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train([make_agent()], make_env(train=8), checkpoints=True)
    assert (tmp_path / "saved_checkpoints" / "actor").is_dir()
    train([make_agent()], make_env(train=8), checkpoints=True, elite_path="elite")
    assert (tmp_path / "elite" / "actor").is_dir()
    train([make_agent()], make_env(train=8), checkpoints=True, elite_path="best", checkpoint_path="run")
    assert (tmp_path / "best" / "actor").is_dir()
    assert (tmp_path / "run" / "training.pt").exists()
    assert not (tmp_path / "best" / "training.pt").exists()


def test_csv_has_one_header_and_blanks(tmp_path):
    train([make_agent()], make_env(train=16), csv=True, csv_log_dir=tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [record["kind"] for record in records] == ["train", "train", "eval"]
    assert records[-1]["grad_norm"] == ""


def test_a_failing_sink_never_stops_training():
    class Broken(Recorder):
        def write(self, record):
            raise RuntimeError("no disk")

    agent = make_agent()
    with pytest.warns(RuntimeWarning, match="no disk"):
        train([agent], make_env(train=8), sinks=[Broken()])
    assert agent.steps == 8


def test_env_fn_is_called_once_and_its_env_closed():
    made = []

    def env_fn():
        env = make_env(train=8)
        env.close = lambda: made.append("closed")
        made.append("made")
        return env

    train_llm_dataset(make_population(2), env_fn=env_fn, verbose=False, checkpoints=False)
    assert made == ["made", "closed"]


def test_the_agent_takes_the_envs_tokenizer():
    agent = make_agent()
    assert agent.tokenizer is None
    train([agent], make_env(train=8))
    assert agent.tokenizer is TOKENIZER


def test_contradicting_metadata_is_named():
    with pytest.warns(UserWarning, match="BATCH_SIZE=32, the agents train with batch_size=8"):
        train([make_agent()], make_env(train=8), init_hp={"BATCH_SIZE": 32, "UPDATE_EPOCHS": 1})


def test_mistakes_are_told_together_and_before_training():
    agent, env = make_agent(), make_env(train=8)
    with pytest.raises(ValueError, match=r"evo_steps .*max_steps .*eval_batches "):
        train([agent], env, evo_steps=0, max_steps=-1, eval_batches=1.5)
    for name in ("checkpoint_steps", "evaluation_interval", "num_epochs"):
        for value in (0, -3, True, "4"):
            with pytest.raises(ValueError, match=name):
                train([agent], env, **{name: value})
    with pytest.raises(ValueError, match="exactly one of env and env_fn, got neither"):
        train([agent], None)
    with pytest.raises(ValueError, match="got both"):
        train([agent], env, env_fn=lambda: env)
    with pytest.raises(ValueError, match="pop is empty"):
        train([], env)
    with pytest.raises(ValueError, match="same agent twice"):
        train([agent, agent], env)
    with pytest.raises(ValueError, match="world_size 2"):
        train([agent], make_env(world_size=2))
    with pytest.raises(ValueError, match="mutation without selection"):
        train([agent], env, mutation=object())
    with pytest.raises(ValueError, match="two names for one thing"):
        train([agent], env, tournament=object(), selection_strategy=object())
    with pytest.warns(UserWarning, match="evo_steps=3 has no effect"):
        train([agent], env, evo_steps=3)
    assert agent.steps == 8  # only the last call trained


def test_rows_longer_than_the_models_positions_are_refused():
    agent = make_agent(lora=False)
    agent.actor.config.max_position_embeddings = 3
    with pytest.raises(ValueError, match="max_context_length=3"):
        train([agent], make_env(train=8))


def test_an_unwritable_folder_is_told_before_training(tmp_path):
    (tmp_path / "file").write_text("x")
    agent = make_agent()
    with pytest.raises(OSError, match="file"):
        train([agent], make_env(train=8), checkpoints=True, checkpoint_path=tmp_path / "file")
    assert agent.steps == 0


def test_a_signal_in_the_final_evaluation_is_heard_between_batches_and_nothing_is_lost(tmp_path):
    def run(env, **kwargs):
        return train(
            [make_agent()], env, checkpoints=True, checkpoint_path=tmp_path, evaluation_interval=None, **kwargs
        )

    env, read = make_env(train=16, test=8, batch=2), []
    batches = env.test_batches

    def interrupted(*args, **kwargs):
        for batch in batches(*args, **kwargs):
            read.append(1)
            if len(read) == 1:
                signal.raise_signal(signal.SIGINT)
            yield batch

    env.test_batches = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(env)
    assert len(read) == 1  # the other three batches were not waited for
    pop, fitness, recorder = run(make_env(train=16, test=8, batch=2), resume=True)
    assert not recorder.of("train")
    assert pop[0].fitness == fitness
    straight = make_agent()
    assert train([straight], make_env(train=16, test=8, batch=2), evaluation_interval=None)[1] == fitness


def test_a_step_that_is_not_finite_in_the_middle_keeps_the_checkpoint_before_it(tmp_path, monkeypatch):
    agent, env = make_agent(), make_env(train=40)
    weight = next(p for n, p in agent.actor.named_parameters() if "layers.1" in n and not p.requires_grad)
    learn, seen = type(agent).learn, []

    def poisoned(self, batch):
        seen.append(len(batch["prompt_lengths"]))
        if sum(seen) > 24:  # three steps of 8 rows went well
            with torch.no_grad():
                weight.fill_(math.nan)
        return learn(self, batch)

    monkeypatch.setattr(type(agent), "learn", poisoned)
    with pytest.raises(ValueError, match=r"Non-finite training step.*No weight was changed"):
        train([agent], env, checkpoints=True, checkpoint_path=tmp_path / "out", checkpoint_steps=8)
    assert verify(tmp_path / "out").is_ok
    kept = make_agent()
    kept.load_checkpoint(tmp_path / "out")
    assert kept.steps == 24
    tensors = [p for n, p in kept.actor.named_parameters() if p.requires_grad]
    trained = [p for n, p in agent.actor.named_parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(tensors, trained, strict=True))
