"""Messages on names; those of other libraries are answered from a table that says what docs/coming-from-*.md say."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest
from tests.pages import ROOT

from rl8x import DQNConfig, PPOConfig, TD3Config
from rl8x.cli.main import COMMANDS
from rl8x.config import algorithm_configs
from rl8x.config.spec import FIELDS as RUN_KEYS
from rl8x.models import GRUModel, MLPModel
from rl8x.names import NAMES, WORDS, check_arguments

FIELDS = {*RUN_KEYS} | {each.name for config in algorithm_configs().values() for each in dataclasses.fields(config)}
# Names that `renamed` of a run file understands, and what is no option.
NOT_ASKED = {"distribution_cls", "optimizer_cls", "model_cls", "wandb_entity", "num_actions", "set_random_seed"}
# Second names of rows with several answers, in order.
SECOND = {
    "activation_fn": "activation",
    "cuda": "device",
    "features_extractor_kwargs": None,
    "hiddens": "hidden_sizes",
    "optimizer_kwargs": "optimizer_config",
    "track": "tracking",
    "wandb_project_name": "experiment_name",
}


def rows():
    """Names of the left columns and the option that the right column begins with, where that is one."""
    for page in sorted((ROOT / "docs").glob("coming-from-*.md")):
        for line in page.read_text().splitlines():
            cells = re.split(r"(?<!\\) \| ", line.strip("| "))
            right = re.match(r"`(\w+)`", cells[{2: 1}.get(len(cells), 2)]) if len(cells) > 1 else None
            if right is None or right[1] not in FIELDS or not line.startswith("| "):
                continue
            for name in re.findall(r"`(-{0,2}[a-z][\w-]*)`", cells[0]):
                yield name, right[1]


ROWS = set(rows())


def test_the_table_says_what_the_pages_say():
    assert len(ROWS) > 60
    assert {("learning_rate", "lr"), ("--num-steps", "horizon")} <= ROWS
    for name, here in ROWS:
        plain = name.lstrip("-").replace("-", "_")
        here = SECOND.get(plain, here)
        if here is not None and plain not in NOT_ASKED and not (plain in FIELDS and plain not in NAMES):
            assert plain == here or here in NAMES[plain], f"{name}: {here}"


def test_what_the_table_answers_exists():
    others = {"shared", "initial_std", "activation", "hidden_sizes", "hidden_size", *COMMANDS}
    assert {here for names in NAMES.values() for here in names} <= FIELDS | others
    for model, arguments in ((MLPModel, ("shared", "activation", "hidden_sizes")), (GRUModel, ("hidden_size",))):
        check_arguments(model, dict.fromkeys(arguments), "model_config", num_positional=2)
    classes = {"PPOConfig": PPOConfig, "DQNConfig": DQNConfig, "TD3Config": TD3Config}
    for words in WORDS.values():
        for call, arguments in re.findall(r"`(\w+Config)\(([^`]*)\)`", words):
            eval(f"{call}({arguments})", classes)
        options = set(re.findall(r"`([a-z]\w*)(?:=[^`]*)?`", words))
        # A part of an observation, an argument of environments, and a method of configs.
        assert options <= FIELDS | {"action_mask", "team_return", "build"}, words


# -- defaults on the same pages

DEFAULTS_ON = ("coming-from-sb3.md", "coming-from-cleanrl.md", "coming-from-rsl-rl.md")


def defaults(page: str) -> list[tuple[str, str, str]]:
    """Return option, algorithm and default of each cell in a column of defaults, which comes after that of rl8x."""
    found: list[tuple[str, str, str]] = []
    header: list[str] | None = None
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells
        elif not set(line) <= {"|", "-"} and (at := header.index("rl8x") + 1) < len(header) and cells[at]:
            names, told = header[at].split(", "), cells[at].split(", ")
            option = re.findall(r"`(\w+)", cells[at - 1])[0]
            found += zip([option] * len(names), names, told * len(names) if len(told) == 1 else told, strict=True)
    return found


@pytest.mark.parametrize("page", DEFAULTS_ON)
def test_defaults_are_those_of_the_configs(page: str) -> None:
    """`-` is where an algorithm has no option of that name."""
    configs = algorithm_configs()
    for option, algorithm, told in defaults(page):
        fields = {field.name: field for field in dataclasses.fields(configs[algorithm])}
        if told == "-":
            assert option not in fields, f"{algorithm}: {option}"
        else:
            factory = fields[option].default_factory
            default = fields[option].default if factory is dataclasses.MISSING else factory()
            assert ast.literal_eval(told) == default, f"{algorithm}: {option}"
    assert len(defaults(page)) > 20
