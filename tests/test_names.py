"""Messages on names; those of other libraries are answered from a table that says what docs/coming-from-*.md say."""

from __future__ import annotations

import dataclasses
import re

import pytest
from tests.pages import ROOT

import rl8x
from rl8x import PPOConfig
from rl8x.algorithms import DQNConfig, PQNConfig, SACConfig, TD3Config
from rl8x.cli.main import COMMANDS
from rl8x.config import algorithm_configs
from rl8x.config.spec import FIELDS as RUN_KEYS
from rl8x.models import GRUModel, MLPModel
from rl8x.names import NAMES, WORDS, called_here, check_arguments, unknown_name

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
                yield page.name, name, right[1]


ROWS = {(name, here): page for page, name, here in rows()}


def test_the_pages_have_rows():
    assert len(ROWS) > 60
    assert ("learning_rate", "lr") in ROWS
    assert ("--num-steps", "horizon") in ROWS


@pytest.mark.parametrize(("name", "here"), sorted(ROWS))
def test_the_table_says_what_the_pages_say(name, here):
    plain = name.lstrip("-").replace("-", "_")
    here = SECOND.get(plain, here)
    if here is not None and plain not in NOT_ASKED and not (plain in FIELDS and plain not in NAMES):
        assert plain == here or here in NAMES[plain]


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


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (PPOConfig, "learning_rate", "PPOConfig has no option 'learning_rate'. It is 'lr' here."),
        (PPOConfig, "n_steps", "It is 'horizon' here."),
        (DQNConfig, "n_steps", "It is 'n_step' here."),
        (PPOConfig, "batch_size", "It is 'sgd_minibatch_size' here."),
        (PPOConfig, "ent_coef", "It is 'entropy_coeff' here."),
        (SACConfig, "ent_coef", "It is 'alpha' here."),
        (PPOConfig, "num_steps", "It is 'horizon' here."),
        (PPOConfig, "eps_clip", "It is 'clip_param' here."),
        (PQNConfig, "start_e", "It is 'epsilon' here."),
        (PPOConfig, "net_arch", 'Here that is `model_config={"hidden_sizes": [64, 64]}`.'),
        (PPOConfig, "total_timesteps", 'Here that is `HitsUpperBound("env/steps", N)` in `run('),
        (PPOConfig, "num_env", "Nearest: num_envs, num_threads"),
        (PPOConfig, "qqq", "There are seed, device,"),
    ],
)
def test_in_python(config, name, message):
    with pytest.raises(ValueError, match="has no option") as error:
        config(**{name: 1})
    assert message in str(error.value)


def test_of_the_root_package():
    with pytest.raises(AttributeError, match=r"no attribute 'DDPG'\. Here that is `TD3Config\(num_critics=1, "):
        rl8x.DDPG  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'whatever'$"):
        rl8x.whatever  # noqa: B018


def test_a_name_of_nobody_is_not_answered():
    assert called_here("whatever", FIELDS) == ""
    assert called_here("n_steps", []) == ""


class Thing:
    def __init__(self, given, *, width=1, depth=2):
        pass


class Open:
    def __init__(self, given, **anything):
        pass


class Plain:
    def __init__(self, given):
        pass


def test_the_message_has_the_nearest_and_all():
    assert (
        unknown_name("colour", "gren", ["blue", "green"])
        == "no colour 'gren'. Did you mean 'green'? There are blue, green."
    )
    assert unknown_name("colour", "xyz", ["blue", "green"]) == "no colour 'xyz'. There are blue, green."


def test_only_arguments_of_the_class_pass():
    check_arguments(Thing, {"width": 3, "depth": 4}, "config", num_positional=1)
    check_arguments(Open, {"whatever": 3}, "config", num_positional=1)
    with pytest.raises(ValueError, match="no argument 'widht' of Thing in `config`"):
        check_arguments(Thing, {"widht": 3}, "config", num_positional=1)
    with pytest.raises(ValueError, match="'given'"):
        check_arguments(Thing, {"given": 3}, "config", num_positional=1)
    with pytest.raises(ValueError, match="Plain takes nothing in `config`"):
        check_arguments(Plain, {"width": 3}, "config", num_positional=1)
