"""The same run on one process and on several, replicated, sharded and split, gives the same result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agilerl.checkpoint import read_checkpoint
from tests.distributed import scenarios
from tests.distributed.compare import assert_same_run, assert_same_tensors
from tests.distributed.conftest import Ranks
from tests.distributed.scenarios import global_batches, make_agent, train

EXACT, SINGLE = 1e-12, 1e-6
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("layout", scenarios.LAYOUTS)
@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_two_ranks_equal_one(two: Ranks, alone: dict, scenario: str, layout: str) -> None:
    tolerance = SINGLE if scenario.endswith("float32") else EXACT
    assert_same_run(two.value("scenarios")[f"{scenario}/{layout}"], alone[scenario], tolerance)


@pytest.mark.parametrize("run", ["sigmoid/fsdp", *(f"{name}/ddp" for name in scenarios.PREFERENCES)])
def test_preference_optimisation_on_two_ranks_equals_one(two: Ranks, run: str) -> None:
    assert_same_run(two.value("dpo")[run], scenarios.run_dpo("ddp", run.split("/")[0]), EXACT)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("scenario", scenarios.PICTURED)
def test_images_on_one_rank_only(two: Ranks, scenario: str, layout: str) -> None:
    assert_same_run(two.value("pictures")[f"{scenario}/{layout}"], scenarios.run_pictures(scenario, "ddp"), EXACT)


def test_collectives(two: Ranks) -> None:
    for rank in range(2):
        assert two.value("collectives", rank) == {
            "sum": [2.0, 1.0],
            "max": [1.0, 0.0],
            "nan_wins": True,
            "any": [True, False],
            "broadcast": {"from": 0},
            "main": True,
        }


def test_replicas_start_from_rank_0(two: Ranks) -> None:
    assert two.value("replicas_start_from_rank_0", 1) is True


def test_a_non_finite_rank_stops_all_before_any_weight_changes(two: Ranks) -> None:
    for rank in range(2):
        found = two.value("non_finite_raises_everywhere", rank)
        assert found == {"raised": ["NonFiniteError", "NonFiniteError"], "everywhere": True}


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_a_model_loaded_by_slices_is_the_model(two: Ranks, models: Path, kind: str) -> None:
    found = two.value("skeleton")[kind]
    agent = make_agent(folder=str(models / kind))
    assert found["was_skeleton"]
    assert found["fingerprint"] == agent._resources.base["fingerprint"]
    assert found["packing"] == agent.packing[0]
    for name, parameter in agent.actor.named_parameters():
        assert torch.equal(found["weights"][name], parameter.detach()), name
    buffers = dict(agent.actor.named_buffers())
    assert found["buffers"].keys() == buffers.keys()
    assert buffers
    assert all(torch.equal(found["buffers"][name], buffer) for name, buffer in buffers.items())
    assert_same_run(found["run"], train(agent), EXACT)


def test_a_model_loaded_by_slices_trains_as_a_whole(two: Ranks, models: Path) -> None:
    assert_same_run(two.value("skeleton_full"), train(make_agent(folder=str(models / "tied"), lora=False)), EXACT)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("form", ["saved", "state", "snapshot"])
def test_what_two_sharded_ranks_saved_goes_on_in_one_process(two: Ranks, models: Path, kind: str, form: str) -> None:
    expected = two.value("save_fsdp")[kind]
    agent = make_agent(folder=str(models / "plain"), lora=kind == "lora", lr=1.0)
    agent.load_checkpoint(models / f"{form}_{kind}", load_optimizer=True)
    assert_same_run(train(agent, global_batches()[2:]), expected, EXACT)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("form", ["saved", "state", "snapshot"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_what_two_sharded_ranks_saved_goes_on_on_two(two: Ranks, kind: str, form: str, layout: str) -> None:
    assert_same_run(two.value("resume")[f"{kind}/{form}/{layout}"], two.value("save_fsdp")[kind], EXACT)


def test_a_saved_adapter_is_whole(two: Ranks, models: Path) -> None:
    two.value("save_fsdp")
    tensors = read_checkpoint(models / "saved_lora").adapters["actor"].tensors
    expected = {n: p for n, p in make_agent(folder=str(models / "plain")).actor.named_parameters() if "lora_" in n}
    assert sorted(t.shape for t in tensors.values()) == sorted(p.shape for p in expected.values())


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_clones_share_frozen_shards_and_go_on_alone(two: Ranks, kind: str) -> None:
    for rank in range(2):
        found = two.value("clones", rank)[kind]
        assert found["shared"]
        assert found["own"]
        assert found["names"]
        assert found["parent_unchanged"]
    assert_same_run(two.value("clones")[kind]["twin"], two.value("clones")[kind]["parent"], 0.0)


def test_unwrapping_gives_the_whole_model_and_wrapping_goes_on(two: Ranks, models: Path) -> None:
    found = two.value("unwrap")
    agent = make_agent(folder=str(models / "plain"))
    train(agent, global_batches()[:2])
    logits = agent.actor.eval()(input_ids=torch.arange(8)[None]).logits
    assert found["whole"]
    assert torch.allclose(found["logits"], logits, atol=EXACT)
    assert_same_run(found["run"], train(agent, global_batches()[2:]), EXACT)


def test_the_sharded_actor_is_an_ordinary_model(two: Ranks, models: Path) -> None:
    agent = make_agent(folder=str(models / "tied"))
    ids = torch.arange(3, 11)[None]
    first = agent.actor.eval()(input_ids=ids).logits
    train(agent, global_batches()[:2])
    second = agent.actor.eval()(input_ids=ids).logits
    new = agent.actor.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for rank in range(2):
        found = two.value("ordinary_model", rank)
        assert torch.allclose(found["logits"][0], first, atol=EXACT)
        assert torch.allclose(found["logits"][1], second, atol=EXACT)
        assert torch.equal(found["generated"], new)
        loss = agent._evaluate(scenarios.batch_of(global_batches()[1], 0, 1)).mean("loss", "weight")
        assert found["loss"] == pytest.approx(loss, rel=EXACT)


def test_bfloat16_compute_keeps_float32_shards(two: Ranks) -> None:
    found = two.value("mixed_precision")
    for kind in ("lora", "full"):
        expected = train(make_agent(dtype="float32", lora=kind == "lora", lr=1e-3))["metrics"]
        assert found[kind]["dtypes"] == ["torch.float32"]
        losses = [step[0] for step in found[kind]["metrics"]]
        assert losses == pytest.approx([step[0] for step in expected], rel=0.05)
    assert found["bfloat16"]["metrics"] == found["full"]["metrics"] or all(
        step[0] == pytest.approx(other[0], rel=0.05)
        for step, other in zip(found["bfloat16"]["metrics"], found["full"]["metrics"], strict=True)
    )


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_split_matrices_equal_whole_ones(two: Ranks, family: str, kind: str) -> None:
    # Gemma-2's attention takes its softmax in float32.
    tolerance = 1e-5 if family == "gemma2" else EXACT
    expected = train(make_agent(family=family, lora=kind == "lora"))
    assert_same_run(two.value("tensor_parallel")[f"{family}/{kind}"], expected, tolerance)


def test_layouts_that_do_not_fit_are_refused(two: Ranks) -> None:
    assert two.value("refusals", 1) is True


@pytest.mark.slow
class TestFourRanks:
    """Four ranks: uneven shards, replicas of shards, and splits with replicas."""

    @pytest.mark.parametrize("layout", scenarios.LAYOUTS)
    @pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
    def test_four_ranks_equal_one(self, four: Ranks, alone: dict, scenario: str, layout: str) -> None:
        tolerance = SINGLE if scenario.endswith("float32") else EXACT
        assert_same_run(four.value("scenarios")[f"{scenario}/{layout}"], alone[scenario], tolerance)

    @pytest.mark.parametrize("kind", ["lora", "full"])
    @pytest.mark.parametrize("family", ["llama", "qwen2"])
    @pytest.mark.parametrize("grid", ["hybrid", "tp2", "tp2_replicated"])
    def test_grids_equal_one(self, four: Ranks, grid: str, family: str, kind: str) -> None:
        expected = train(make_agent(family=family, lora=kind == "lora"))
        assert_same_run(four.value("grids")[f"{grid}/{family}/{kind}"], expected, EXACT)

    @pytest.mark.parametrize("layout", ["ddp", "fsdp"])
    @pytest.mark.parametrize("kind", ["lora", "full"])
    def test_what_two_ranks_saved_goes_on_on_four(self, two: Ranks, four: Ranks, kind: str, layout: str) -> None:
        found = four.value("resume")[f"{kind}/saved/{layout}"]
        assert_same_run(found, two.value("save_fsdp")[kind], EXACT)

    def test_slices(self, four: Ranks, models: Path) -> None:
        expected = {n: p.detach() for n, p in make_agent(folder=str(models / "plain")).actor.named_parameters()}
        assert_same_tensors(four.value("skeleton")["plain"]["weights"], expected, 0.0)
