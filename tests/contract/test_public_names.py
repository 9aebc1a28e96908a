"""The documented import paths, and ``__all__`` of every module."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

PATHS = {
    "agilerl.algorithms.sft": ["SFT"],
    "agilerl.algorithms.dpo": ["DPO"],
    "agilerl.algorithms": ["SFT", "DPO"],
    "agilerl.algorithms.core.base": ["EvolvableAlgorithm", "LLMAlgorithm"],
    "agilerl.algorithms.core.registry": [
        "RLParameter",
        "HyperparameterConfig",
        "make_default_hp_config",
        "NetworkGroup",
        "OptimizerConfig",
        "MutationRegistry",
    ],
    "agilerl.algorithms.core.optimizer_wrapper": ["OptimizerWrapper"],
    "agilerl.llm_envs": ["DatasetEnv"],
    "agilerl.training.llm": ["train_llm_dataset"],
    "agilerl.hpo.mutation": ["Mutations"],
    "agilerl.hpo.tournament": ["TournamentSelection"],
    "agilerl.distributed": ["FSDPConfig", "get_rank", "get_world_size", "is_main_process"],
    "agilerl.utils.utils": ["save_llm_checkpoint"],
    "agilerl.utils.algo_utils": ["CosineLRScheduleConfig"],
    "agilerl.utils.llm_utils": ["adapt_lora_config_for_model", "build_bnb_quantization_config"],
    "agilerl.typing": ["SFTPrompts", "PreferencePrompts"],
}
ROOT = Path(__file__).parents[2]
# Found by file, so that one that cannot be imported fails by its own name.
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "agilerl").rglob("*.py"))
]


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PATHS.items() for name in names])
def test_documented_path(path: str, name: str) -> None:
    module = importlib.import_module(path)
    assert hasattr(module, name)
    assert name in module.__all__


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_all_is_declared_and_holds(name: str) -> None:
    module = importlib.import_module(name)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    if all(isinstance(node, ast.Expr | ast.ImportFrom) and "__future__" in ast.dump(node) for node in tree.body[1:]):
        return  # nothing but the words that say what the folder is
    assert isinstance(module.__all__, list | tuple)
    assert len(set(module.__all__)) == len(module.__all__)
    missing = [entry for entry in module.__all__ if not hasattr(module, entry)]
    assert not missing, f"{name}.__all__ names {missing}"
