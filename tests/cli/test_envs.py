from __future__ import annotations

from rl8x.config import RunSpec, parse_value
from rl8x.envs import BUILTIN


def words_of(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_list_has_every_environment_with_spaces_parameters_bounds_and_units(call):
    out = " ".join(words_of(call("envs")))
    assert all(name in out for name in BUILTIN)
    assert "CartPole Box[4] -> Discrete(2), episodes end with the task or after 500 steps" in out
    assert "CartPoleInfinite Box[5] -> Discrete(3), episodes never end" in out
    assert "length 0.5 in [0.025, 10] m" in out


def test_one_environment_in_full(call):
    lines = words_of(call("envs", "CartPole"))
    table = ["env_config default low high unit", "gravity 9.8 0.1 100 m/s^2 gravitational acceleration"]
    assert {"action Discrete(2)", "episodes end with the task or after 500 steps", *table} <= {*lines}


def test_every_example_of_an_environment_is_legal(call):
    for name, cls in BUILTIN.items():
        example = call("envs", name).splitlines()[-1]
        if "env_config." in example:
            key, _, value = example.partition("env_config.")[2].partition("=")
            cls(4, seed=0).parameter_state.configure({key: parse_value(value.strip("'"))})
            RunSpec.from_plain({"env": name, "env_config": {key: parse_value(value.strip("'"))}})


def test_gymnasiums_and_ones_own_are_described(call, tmp_path, monkeypatch):
    out = call("envs", "CartPole-v1")
    lines = words_of(out)
    assert lines[0] == "CartPole-v1"
    assert "cart-pole problem" in out
    assert "## " not in out
    end = "episodes end with the task or after 500 steps"
    assert {"action Discrete(2)", end, "env_kwargs sutton_barto_reward=False"} <= {*lines}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_task.py").write_text(
        'from rl8x.envs import CartPole\n\nclass Cart(CartPole):\n    """A cart of my own."""\n'
    )
    out = call("envs", "my_own_task.Cart")
    assert "A cart of my own." in out
    assert "rl8x train my_own_task.Cart env_config.gravity=" in out
