"""Messages on names; those of other libraries are answered from a table that says what docs/coming-from-*.md say."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest
from tests.pages import ROOT

from rl8x import DQNConfig, PPOConfig, SACConfig, TD3Config, keys
from rl8x.cli.main import COMMANDS
from rl8x.conditions.base import nearest_metrics
from rl8x.config import algorithm_configs
from rl8x.config.spec import FIELDS as RUN_KEYS
from rl8x.envs import CartPole, Pendulum
from rl8x.models import GRUModel, MLPModel
from rl8x.names import NAMES, WORDS, check_arguments, did_you_mean

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
BUILT = (
    PPOConfig(num_envs=2).build(CartPole),
    DQNConfig(num_envs=2).build(CartPole),
    SACConfig(num_envs=2).build(Pendulum),
)
EVALUATED = (*keys.summary("returns"), *keys.summary("episodes/lengths"), "episodes/info/is_success/mean")
METRICS = {*keys.TRAINER_METRICS, "losses/distillation", *(name for built in BUILT for name in built.metrics)}
METRICS |= {"episodes/info/is_success/mean", *(keys.EVAL_PREFIX + name for name in EVALUATED)}


def metric_rows():
    """Metrics of other libraries, each with the one in its place in the right column."""
    for page in sorted((ROOT / "docs").glob("coming-from-*.md")):
        for line in page.read_text().partition("## Metrics")[2].partition("\n## ")[0].splitlines():
            left, right = (re.findall(r"`(\w+/[\w/]+)`", cell) for cell in f"{line} | ".split(" | ")[:2])
            yield from zip(left, right, strict=False)


def is_alike(plain: str, here: str) -> bool:
    """Whether each config that has an option finds it by the spelling of another name."""
    configs = [[field.name for field in dataclasses.fields(each)] for each in algorithm_configs().values()]
    hints = [did_you_mean(plain, legal, most=3, cutoff=0.5) for legal in configs if here in legal]
    return bool(hints) and all(hint.startswith(f" Did you mean {here!r}") for hint in hints)


def test_the_table_says_what_the_pages_say():
    assert len(ROWS) > 60
    assert {("learning_rate", "lr"), ("--num-steps", "horizon")} <= ROWS
    for name, here in ROWS:
        plain = name.lstrip("-").replace("-", "_")
        here = SECOND.get(plain, here)
        if here is not None and plain not in NOT_ASKED and not (plain in FIELDS and plain not in NAMES):
            answers = (plain, *NAMES.get(plain, ()), *re.findall(r"\w+", WORDS.get(plain, "")))
            assert here in answers or is_alike(plain, here), f"{name}: {here}"


def test_metrics_of_other_libraries_are_answered_as_the_pages_have_them():
    found = [(name, here) for name, here in metric_rows() if name not in METRICS and here in METRICS]
    assert len(found) > 40
    for name, here in found:
        said = nearest_metrics(name, METRICS)
        first = re.match(r" (?:It is '([^']+)' here\.|Nearest: ([^,.]+))", said)
        assert first is not None, name
        assert (first[1] or first[2]) in (here, "losses/total"), f"{name}: {said}"  # PPO's loss; DQN's is another


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("return", " Nearest: returns/mean, "),  # a quantity's mean, not another statistic of it
        ("eval/return", " Nearest: eval/returns/mean, "),
        ("returns/sdt", " Nearest: returns/mean, "),
        ("return/std", " Nearest: returns/std, "),
        ("mean_reward", " It is 'episodes/returns/mean' here."),
        ("eval/mean_reward", " It is 'eval/returns/mean' here."),
        ("kl", " Nearest: monitors/kl_div."),  # a part of a name
        ("q9", " There are algorithm/collects, "),
    ],
)
def test_metrics_that_are_near_are_means_of_the_same_source(name, here):
    assert nearest_metrics(name, METRICS).startswith(here)


def test_what_the_table_answers_exists():
    others = {"shared", "initial_std", "activation", "hidden_sizes", "hidden_size", *COMMANDS, *METRICS, "returns/mean"}
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
