from __future__ import annotations

from rl8x.cli.main import main
from rl8x.envs import BUILTIN


def test_the_list_has_every_environment_with_spaces_parameters_bounds_and_units(capsys):
    assert main(["envs"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(name in out for name in BUILTIN)
    assert "CartPole Box[4] -> Discrete(2), episodes end with the task or after 500 steps" in out
    assert "CartPoleInfinite Box[5] -> Discrete(3), episodes never end" in out
    assert "length 0.5 in [0.025, 10] m" in out


def test_one_environment_in_full(capsys):
    assert main(["envs", "CartPole"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "action Discrete(2)" in lines
    assert "episodes end with the task or after 500 steps" in lines
    assert "env_config default low high unit" in lines
    assert "gravity 9.8 0.1 100 m/s^2 gravitational acceleration" in lines


def test_every_example_of_an_environment_is_legal(capsys):
    from rl8x.config import RunSpec, parse_value

    for name, cls in BUILTIN.items():
        assert main(["envs", name]) == 0
        example = capsys.readouterr().out.splitlines()[-1]
        if "env_config." in example:
            key, _, value = example.partition("env_config.")[2].partition("=")
            cls(4, seed=0).parameter_state.configure({key: parse_value(value.strip("'"))})
            RunSpec.from_plain({"env": name, "env_config": {key: parse_value(value.strip("'"))}})


def test_gymnasiums_and_ones_own_are_described(capsys, tmp_path, monkeypatch):
    assert main(["envs", "CartPole-v1"]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "CartPole-v1"
    assert "cart-pole problem" in out
    assert "## " not in out
    assert "action Discrete(2)" in lines
    assert "episodes end with the task or after 500 steps" in lines
    assert "env_kwargs sutton_barto_reward=False" in lines
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_task.py").write_text(
        'from rl8x.envs import CartPole\n\nclass Cart(CartPole):\n    """A cart of my own."""\n'
    )
    assert main(["envs", "my_own_task.Cart"]) == 0
    out = capsys.readouterr().out
    assert "A cart of my own." in out
    assert "rl8x train my_own_task.Cart env_config.gravity=" in out
