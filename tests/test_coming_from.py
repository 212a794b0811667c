"""Each rl8x name in the right columns of the pages for users of other libraries exists."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import keyword
import re
from functools import cache
from typing import Any

import pytest
from tests.pages import ROOT
from tests.test_site import exported, packages

from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.algorithms import DQNConfig, SACConfig
from rl8x.cli.main import COMMANDS
from rl8x.config import algorithm_configs
from rl8x.envs import registry
from rl8x.envs.mjlab_env import MjlabEnv
from rl8x.policy import Act, Policy
from rl8x.spaces import AsymmetricDict
from rl8x.video import record_video

DOCS = ROOT / "docs"
PAGES = ("coming-from-sb3.md", "coming-from-cleanrl.md", "coming-from-rsl-rl.md")
# What such spans hold beside names of rl8x: values of options, keys of a schedule, variables, Gymnasium's names.
OTHER = {
    *("interp", "kind", "points", "state", "std", "eps", "all", "sync", "async", "bar", "adam"),
    *("rl8x", "config", "env", "path", "N", "teacher", "v1", "Dict", "action_mask", "info", "final_obs"),
}


def parameters(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def words_of(name: str, value: Any) -> set[str]:
    """A name, and what it is used with: its arguments, attributes and their arguments, or its keys."""
    if isinstance(value, dict):
        return {name, *map(str, value)}
    if not inspect.isclass(value):
        return {name, *parameters(value)}
    own = [cls for cls in value.__mro__ if cls.__module__.startswith("rl8x")]
    members = {key: member for cls in own for key, member in vars(cls).items() if not key.startswith("_")}
    inner = {word for member in members.values() for word in parameters(getattr(member, "__func__", member))}
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    return {name, *members, *inner, *fields}.union(*(parameters(cls.__init__) for cls in own))


@cache
def known() -> set[str]:
    words = {*OTHER, *COMMANDS, *keyword.kwlist, *registry.BUILTIN}
    for package in packages():
        module = importlib.import_module(package)
        words = words.union(*(words_of(name, getattr(module, name)) for name in exported(module)))
    for value in (Policy, Act, AsymmetricDict, MjlabEnv, record_video, *algorithm_configs().values()):
        words |= words_of(value.__name__, value)
    return words


@cache
def metrics() -> set[str]:
    """The metrics of a trainer with each kind of loss."""
    small = {"num_envs": 2, "horizon": 2, "device": "cpu"}
    built = [
        PPOConfig(**small).build("CartPole"),
        SACConfig(**small).build("Pendulum"),
        DQNConfig(**small).build("CartPole"),
    ]
    return {name for algorithm in built for name in Trainer(algorithm, tracker=NullTracker()).metric_names}


def right_columns(page: str) -> list[str]:
    rows = [line.strip("|") for line in (DOCS / page).read_text().splitlines() if re.match(r"\| (?!.*rl8x \|$)", line)]
    return [row.replace("\\|", "OR").split(" | ")[1] for row in rows]


@pytest.mark.parametrize("page", PAGES)
def test_each_name_of_rl8x_exists(page: str) -> None:
    spans = [span for cell in right_columns(page) for span in re.findall(r"`([^`]+)`", cell)]
    assert len(spans) > 60
    for span in spans:
        text = re.sub(r"\b\d[\d_.]*(?:e-?\d+)?\b", "", span)
        for word in re.findall(r"[A-Za-z_][\w/]*", "" if span.startswith("src/") else text):
            if word == "episodes/info":  # an environment's own
                continue
            if "/" in word:
                assert any(name == word or name.startswith(f"{word}/") for name in metrics()), f"{word} in `{span}`"
            else:
                assert word in known() or word == "OR", f"{word} in `{span}`"


@pytest.mark.parametrize("page", PAGES)
def test_arguments_are_those_of_what_is_called(page: str) -> None:
    """`Config(name=...)` names an argument that it takes."""
    modules = [importlib.import_module(package) for package in packages()]
    importable = {name: getattr(module, name) for module in modules for name in exported(module)}
    for cell in right_columns(page):
        for name, arguments in re.findall(r"(\w+)\(([^()]*)\)", cell):
            value = importable.get(name, getattr(Trainer, name, None))
            if value is not None:
                assert set(re.findall(r"(\w+)=", arguments)) <= parameters(value), cell
