"""The package as a whole: who imports whom, what is declared, and that every recipe is one the program takes."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from mu_grpo_trl.recipe import read_recipe
from mu_grpo_trl.train import check_recipe

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mu_grpo_trl"
RECIPES = sorted(
    path
    for path in (ROOT / "recipes").rglob("*.yaml")
    if path.relative_to(ROOT / "recipes").parts[0] not in ("accelerate", "bases", "eval", "lab")
)
ACCELERATE = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))

LAYERS = (
    {"__main__"},
    {"cli"},
    {"completion", "planning"},
    {"evaluation", "export", "lab", "stage_cli", "train"},
    {"trainer"},
    {"hub"},
    {"report"},
    {
        "anchors",
        "callbacks",
        "checkpoints",
        "guards",
        "lm_head",
        "policy",
        "preflight",
        "running",
        "staging",
        "stored",
        "update",
    },
    {"phases", "replicas"},
    {"config", "data", "options", "ranks", "recipe", "trackers"},
    {"rewards", "rollout"},
    {"collapse", "locks", "losses", "metrics", "schedule", "signals", "stage", "telemetry"},
)
"""A module imports from its own layer or from one below. A new top-level module needs a place here."""

ON_CPU = {"quickstart", "smollm2-135m-cpu", "smollm2-135m-lora-cpu", "deepscaler-smollm2-cpu"}
LEAF_LIBRARIES = {"numpy", "pyarrow", "torch"}
PAPER_MODELS = {
    "llama-3.2-3b-instruct": ("meta-llama/Llama-3.2-3B-Instruct", 8192),
    "qwen2.5-math-7b": ("Qwen/Qwen2.5-Math-7B", 4096),
    "qwen3-1.7b-base": ("Qwen/Qwen3-1.7B-Base", 8192),
    "qwen3-8b-base": ("Qwen/Qwen3-8B-Base", 8192),
    "deepseek-r1-distill-qwen-7b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 8192),
}


# Imports


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def import_nodes(node: ast.AST, top_level: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Each import below `node` and whether it runs when the module is imported; those for type checkers never run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, top_level
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        else:
            deeper = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from import_nodes(child, top_level and not deeper)


@cache
def imports_of(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Absolute names of what module `name` imports: `(when it is imported, when its functions run)`."""
    path = modules()[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for node, top_level in import_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found[top_level] |= {alias.name for alias in node.names}
            continue
        start = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*start, *([node.module] if node.module else [])])
        for alias in node.names:
            target = f"{base}.{alias.name}"
            found[top_level].add(target if target in modules() else base)
    return frozenset(found[True]), frozenset(found[False])


def place_of(name: str) -> str:
    """Top-level part of the package a module belongs to (`mu_grpo_trl.stage.reader` → `stage`)."""
    return name.split(".")[1]


def is_leaf(name: str) -> bool:
    return name != "mu_grpo_trl" and place_of(name) in LAYERS[-1]


def third_party(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"mu_grpo_trl"}


def test_every_module_has_a_place_in_the_layers():
    known = {"mu_grpo_trl", *(f"mu_grpo_trl.{place}" for layer in LAYERS for place in layer)}
    strangers = [name for name in modules() if ".".join(name.split(".")[:2]) not in known]
    assert not strangers, f"{strangers} have no place in LAYERS: add them where they may import what they import."


def test_imports_run_downward():
    rank = {place: depth for depth, layer in enumerate(LAYERS) for place in layer}
    upward = [
        f"{name} imports {target}"
        for name in modules()
        if name != "mu_grpo_trl"
        for target in imports_of(name)[0]
        if target.startswith("mu_grpo_trl.") and rank.get(place_of(target), 0) < rank.get(place_of(name), 0)
    ]
    assert not upward


def test_modules_do_not_import_each_other_in_circles():
    graph = {
        name: {target for target in imports_of(name)[0] if target in modules()} - {name, "mu_grpo_trl"}
        for name in modules()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize("name", [name for name in modules() if is_leaf(name)])
def test_leaves_import_only_torch_numpy_and_pyarrow(name: str):
    at_import, in_functions = imports_of(name)
    assert third_party(at_import) <= LEAF_LIBRARIES
    assert third_party(in_functions) <= LEAF_LIBRARIES | {"datasets"}
    inside = {place_of(target) for target in at_import | in_functions if target.startswith("mu_grpo_trl.")}
    assert inside <= LAYERS[-1]


def test_a_stage_is_read_without_importing_trl_or_transformers():
    program = (
        "import sys, mu_grpo_trl.stage, mu_grpo_trl.losses, mu_grpo_trl.schedule, mu_grpo_trl.telemetry; "
        "print(sorted({'trl', 'transformers', 'accelerate', 'peft'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stderr


def test_every_imported_library_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {distribution_name(line) for line in project["dependencies"]}
    optional = {distribution_name(line) for lines in project["optional-dependencies"].values() for line in lines}
    # deepspeed and vllm are reached through accelerate and a server; tqdm and huggingface_hub come with transformers.
    provided = required | optional | {"tqdm", "huggingface-hub"}
    distributions = packages_distributions()
    undeclared = {
        f"{name}: {library}"
        for name in modules()
        for library in third_party(imports_of(name)[0] | imports_of(name)[1])
        if not {distribution_name(found) for found in distributions.get(library, [library])} & provided
    }
    assert not undeclared


def distribution_name(requirement: str) -> str:
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


# Size and cleanliness


def test_the_trainer_is_wiring_only():
    lines = len((PACKAGE / "trainer.py").read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"trainer.py has {lines} lines: logic has leaked into it; move it where it belongs."


def test_no_file_names_a_path_of_one_machine():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    local_path = re.compile(rb"(?<![\w.~$}<>-])/(?:home/\w|root/|Users/\w|work/|tmp/w/)")
    named = [
        f"{name}: {found[0].decode()}"
        for name in filter(None, listing.split("\0"))
        if (ROOT / name).is_file() and (found := local_path.search((ROOT / name).read_bytes()))
    ]
    assert not named


# Recipes


def load_recipe(path: Path) -> dict:
    return {key: setting.value for key, setting in read_recipe(path).items()}


def config_of(recipe: dict, output_dir: Path):
    """The recipe's `MuGRPOConfig`, on a machine without its devices."""
    from mu_grpo_trl.config import MuGRPOConfig

    names = {field.name for field in fields(MuGRPOConfig)}
    values = {key: value for key, value in recipe.items() if key in names}
    here = {"use_cpu": True, "bf16": False, "report_to": "none", "output_dir": str(output_dir)}
    return MuGRPOConfig(**(values | here))


def stem(path: Path) -> str:
    return path.stem


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "recipes").as_posix()


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_every_recipe_is_a_valid_configuration(path: Path, tmp_path: Path):
    recipe = load_recipe(path)
    config = config_of(recipe, tmp_path)
    for name in ("stage_updates", "prompts_per_update", "max_steps", "learning_rate", "max_completion_length"):
        assert getattr(config, name) == recipe[name]


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_the_header_of_a_recipe_launches_it_and_says_on_what_and_for_how_long(path: Path):
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"--config recipes/{name_of(path)}" in header
    for config in re.findall(r"--config_file (\S+)", header):
        assert (ROOT / config).is_file()
    if path.stem not in ON_CPU:
        assert "\n# Hardware: " in header
        assert "\n# Hours: " in header


def test_the_index_of_the_recipes_is_complete_and_gives_paper_hardware_and_hours():
    index = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\S+)\]\((\S+)\) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", index, flags=re.MULTILINE)
    assert all(shown == linked for shown, linked, *_ in rows)
    assert sorted(linked for _, linked, *_ in rows) == sorted(map(name_of, RECIPES))


def test_no_two_recipes_write_into_one_folder():
    folders = {name_of(path): load_recipe(path)["output_dir"] for path in RECIPES}
    assert len(set(folders.values())) == len(folders)


def test_there_is_a_recipe_for_every_experiment_of_the_paper():
    methods = ("grpo-mu4", "grpo-mu1024", "m2po")
    table1 = {f"table1/{model}-{method}" for model in PAPER_MODELS for method in methods} | {*PAPER_MODELS}
    scopes = {f"ablations/scope-{scope}" for scope in ("none", "trigger", "suffix", "non-trigger-suffix")}
    sweeps = {f"ablations/{sweep}" for sweep in (
        "tau-1e-1", "tau-1e-2", "tau-1e-6", "upper-3", "upper-10", "upper-inf", "mu-4", "mu-512", "mu-2048", "mu-4096"
    )}  # fmt: skip
    budget = {f"fixed-budget/batch-{size}" for size in (32, 64, 128, 256)}
    names = {name_of(path).removesuffix(".yaml") for path in RECIPES}
    assert names == table1 | scopes | sweeps | budget | ON_CPU


def test_an_ablation_differs_from_the_default_in_one_option_of_the_method(tmp_path: Path):
    default = config_of(load_recipe(ROOT / "recipes" / "qwen2.5-math-7b.yaml"), tmp_path).to_dict()
    expected = {
        "tau-1e-1": ("veto_threshold", 0.1), "tau-1e-2": ("veto_threshold", 0.01),
        "tau-1e-6": ("veto_threshold", 1e-6),
        "upper-3": ("epsilon_high", 2.0), "upper-10": ("epsilon_high", 9.0), "upper-inf": ("epsilon_high", math.inf),
        "scope-none": ("veto_scope", "none"), "scope-trigger": ("veto_scope", "trigger"),
        "scope-suffix": ("veto_scope", "suffix"), "scope-non-trigger-suffix": ("veto_scope", "non_trigger_suffix"),
        "mu-4": ("stage_updates", 4), "mu-512": ("stage_updates", 512), "mu-2048": ("stage_updates", 2048),
        "mu-4096": ("stage_updates", 4096),
    }  # fmt: skip
    for path in sorted((ROOT / "recipes" / "ablations").glob("*.yaml")):
        ours = config_of(load_recipe(path), tmp_path).to_dict()
        differing = {name: value for name, value in ours.items() if value != default[name]}
        assert differing.pop("run_name") == f"qwen2.5-math-7b-{path.stem}"
        if path.stem == "mu-4":
            assert differing.pop("save_at_stage_end") is False
        assert [*differing.items()] == [expected[path.stem]]


@pytest.mark.parametrize("model", PAPER_MODELS)
def test_the_baselines_of_table_1_differ_from_mu_grpo_in_the_objective_and_staleness_alone(model: str, tmp_path: Path):
    default = config_of(load_recipe(ROOT / "recipes" / f"{model}.yaml"), tmp_path)
    for method, objective, updates, clip in (
        ("grpo-mu4", "grpo", 4, (0.8, 1.2)),
        ("grpo-mu1024", "grpo", 1024, (0.8, 1.2)),
        ("m2po", "m2po", 1024, None),
    ):
        config = config_of(load_recipe(ROOT / "recipes" / "table1" / f"{model}-{method}.yaml"), tmp_path)
        assert (config.objective, config.stage_updates, config.veto_scope) == (objective, updates, "none")
        assert clip is None or config.clip_range == clip
        assert config.m2po_threshold == 0.04
        method_options = {"objective", "stage_updates", "veto_scope", "epsilon", "epsilon_high", "run_name"}
        others = {name for name, value in config.to_dict().items() if value != default.to_dict()[name]}
        assert others <= method_options | {"save_at_stage_end"}


def test_the_fixed_budget_takes_as_many_updates_as_its_stage_gives():
    prompts = 40315
    for size, updates in ((32, 1259), (64, 629), (128, 314), (256, 157)):
        recipe = load_recipe(ROOT / "recipes" / "fixed-budget" / f"batch-{size}.yaml")
        assert (recipe["prompts_per_update"], recipe["max_steps"]) == (size, updates)
        assert updates == prompts // size == 1259 * 32 // size
        assert recipe.get("train_on_stage") == (None if size == 32 else "runs/fixed-budget/batch-32/stages/stage-000")


# Composition


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / "recipe.yaml"


def test_later_bases_win_over_earlier_ones_and_own_keys_over_all(tmp_path: Path):
    recipe = write(
        tmp_path,
        recipe="base: [sub/one.yaml, sub/two.yaml]\nseed: 5\n",
        sub__one="base: root.yaml\nbeta: 0.1\nsave_steps: 1\nseed: 1\n",
        sub__two="beta: 0.2\nreward_funcs: [b]\nseed: 2\n",
        sub__root="save_steps: 7\nlogging_steps: 3\nreward_funcs: [a, c]\n",
    )
    expected = {"save_steps": 1, "logging_steps": 3, "reward_funcs": ["b"], "beta": 0.2, "seed": 5}
    assert load_recipe(recipe) == expected
    assert check_recipe(recipe) == expected
    assert read_recipe(recipe)["logging_steps"].path.name == "root.yaml"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"recipe": "base: other.yaml", "other": "base: recipe.yaml"}, "recipe.yaml → other.yaml → recipe.yaml"),
        ({"recipe": "base: recipe.yaml"}, "`base` goes in a circle"),
        ({"recipe": "base: nowhere.yaml"}, "nowhere.yaml' cannot be read .* It is a `base` of .*recipe.yaml"),
        ({"recipe": "base: 3"}, "recipe.yaml: `base=3` is not the path of a recipe"),
        ({"recipe": "base: other.yaml", "other": "sed: 3"}, "other.yaml: unknown key 'sed'. Did you mean 'seed'"),
        ({"recipe": "base: other.yaml", "other": "seed: x"}, "other.yaml: `seed='x'` is not a whole number"),
        ({"recipe": "base: other.yaml", "other": "seed: 1\nseed: 2"}, "other.yaml is not YAML: .*more than once"),
    ],
)
def test_a_base_that_is_wrong_is_named(tmp_path: Path, files: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        check_recipe(write(tmp_path, **files))


def test_a_base_may_be_named_twice_when_it_is_not_its_own(tmp_path: Path):
    recipe = write(tmp_path, recipe="base: [one.yaml, two.yaml]", one="base: two.yaml\nseed: 1", two="seed: 2")
    assert load_recipe(recipe) == {"seed": 2}


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_recipes_of_the_paper_carry_its_values(name: str, tmp_path: Path):
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    config = config_of(recipe, tmp_path)
    model, context = PAPER_MODELS[name]

    assert (recipe["model_name_or_path"], config.context_limit) == (model, context)
    assert (config.max_steps, config.stage_updates, config.prompts_per_update) == (4096, 1024, 32)
    assert (config.num_generations, config.temperature, config.top_p) == (8, 1.0, 1.0)
    assert (config.objective, config.veto_scope, config.veto_threshold) == ("mu_grpo", "sequence", 1e-4)
    assert (config.clip_range, config.beta) == ((0.0, 5.0), 0.0)
    assert (config.learning_rate, config.lr_scheduler_type, config.weight_decay) == (1e-6, "constant", 0.01)
    assert (config.adam_beta1, config.adam_beta2, config.warmup_steps) == (0.9, 0.999, 0)
    assert config.save_steps == 200


# Launching


@pytest.mark.parametrize("path", ACCELERATE, ids=stem)
def test_accelerate_launch_takes_every_configuration(path: Path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    expected = {  # processes, nodes, and how they share the model
        "cpu": (1, 1, None),
        "cpu_ddp": (2, 1, "multi_gpu"),
        "cpu_zero3": (2, 1, "use_deepspeed"),
        "single_gpu": (1, 1, None),
        "ddp": (4, 1, "multi_gpu"),
        "fsdp2": (4, 1, "use_fsdp"),
        "zero3": (4, 1, "use_deepspeed"),
        "zero3_2nodes": (8, 2, "use_deepspeed"),
    }
    command = ["--config_file", str(path), "-m", "mu_grpo_trl.train"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))

    strategies = [name for name in ("multi_gpu", "use_deepspeed", "use_fsdp") if getattr(args, name)]
    processes, nodes, strategy = expected[path.stem]
    assert (args.num_processes, args.num_machines, strategies) == (processes, nodes, [strategy] if strategy else [])
    on_cpu = path.stem.startswith("cpu")
    assert (args.use_cpu, args.mixed_precision) == (on_cpu, "no" if on_cpu else "bf16")


@pytest.mark.parametrize("name", ["zero3", "zero3_2nodes", "cpu_zero3"])
def test_zero3_shards_parameters_and_can_save_them(name: str):
    config = yaml.safe_load((ROOT / "recipes" / "accelerate" / f"{name}.yaml").read_text())["deepspeed_config"]
    assert (config["zero_stage"], config["zero3_init_flag"], config["zero3_save_16bit_model"]) == (3, True, True)


def test_fsdp2_saves_a_model_that_from_pretrained_opens():
    config = yaml.safe_load((ROOT / "recipes" / "accelerate" / "fsdp2.yaml").read_text())["fsdp_config"]
    assert (config["fsdp_version"], config["fsdp_state_dict_type"]) == (2, "FULL_STATE_DICT")
