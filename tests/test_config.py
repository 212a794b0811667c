from __future__ import annotations

import json
import math
import string
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rl8x.config import RunSpec, apply_overrides, dump_run, load_run_file, parse_value
from rl8x.importing import import_named
from rl8x.plain import thawed
from rl8x.studies.definition import StudyConfig

RUN = {
    "env": "CartPole",
    "env_config": {"length": {"uniform": [0.25, 1.0]}},
    "algorithm_config": {"num_envs": 64, "lr": 3e-4, "model_config": {"hidden": [64, 64]}},
    "steps_per_eval": 5,
    "stop_conditions": [{"plateau": {"name": "returns/mean", "patience": 10}}, {"wall_time": "10m"}],
}
YAML = """
env: CartPole
env_config: {length: {uniform: [0.25, 1.0]}}
algorithm_config:
  num_envs: 64
  lr: 3e-4            # YAML 1.1 would read a text
  model_config: {hidden: [64, 64]}
steps_per_eval: 5
stop_conditions:
  - plateau: {name: returns/mean, patience: 10}
  - wall_time: 10m
"""
TOML = """
env = "CartPole"
steps_per_eval = 5
stop_conditions = [{plateau = {name = "returns/mean", patience = 10}}, {wall_time = "10m"}]
[env_config]
length = {uniform = [0.25, 1.0]}
[algorithm_config]
num_envs = 64
lr = 3e-4
model_config = {hidden = [64, 64]}
"""


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# -- reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"), [("r.yaml", YAML), ("r.yml", YAML), ("r.toml", TOML), ("r.json", json.dumps(RUN))]
)
def test_the_same_run_in_every_format(tmp_path, name, text):
    path = write(tmp_path, name, text)
    assert load_run_file(path) == RUN
    run = RunSpec.from_file(path)
    expected = ["Plateau('returns/mean', patience=10, rtol=0.001)", "WallTime('10m')"]
    assert [repr(condition) for condition in run.run.conditions()] == expected
    config = run.algorithm.make_config()
    assert (config.num_envs, config.lr, config.model_config) == (64, 3e-4, {"hidden": [64, 64]})
    assert RunSpec.from_plain(run.to_plain()) == run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["lr=1e-3"], {"lr": 1e-3, "lr_schedule": None}),
        (["algorithm_config.lr=1e-3"], {"lr": 1e-3, "lr_schedule": None}),
        (["lr_schedule=[[0, 0.1]]"], {"lr_schedule": [[0, 0.1]]}),
        (["algorithm=sac", "tau=0.01"], {"tau": 0.01, "lr_schedule": [[0, 0.01]]}),
    ],
)
def test_words_behind_a_file_mean_the_same_for_a_run_and_a_study(tmp_path, words, expected):
    text = "env: Pendulum\nmax_steps: 1\nalgorithm_config: {lr_schedule: [[0, 0.01]]}\n"
    run = write(tmp_path, "run.yaml", text)
    assert thawed(RunSpec.from_file(run, words).algorithm.algorithm_config) == expected
    study = write(tmp_path, "study.yaml", text + "train: {fixed: {}}\ntest: {length: [0.5, 1]}\n")
    assert thawed(StudyConfig.from_file(study, words).run["algorithm_config"]) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e6", 1e6),
        ("-1.5E+3", -1500.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 10),
        ("true", True),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("null", None),
        ("", None),
        (".inf", math.inf),
        ("[1, 2e0]", [1, 2.0]),
        ("{a: {b: x}}", {"a": {"b": "x"}}),
        ("10m", "10m"),
        ("a: b: c", "a: b: c"),
    ],
)
def test_values_are_yaml_1_2(text, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**9), 10**9),
        st.floats(allow_nan=False),
        st.text(string.printable, max_size=12),
        st.sampled_from(["3e-4", "no", "true", "null", "1:30", "010", "<<", "=", "", "2026-01-02", "1_0"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(min_size=1, max_size=8), plain, max_size=4))
def test_what_is_written_is_read_as_the_same(tmp_path, data):
    assert load_run_file(write(tmp_path, "run.yaml", dump_run(data))) == data


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.yaml", "env: CartPole\nenv: Pendulum", "the key 'env' occurs twice at line 2, column 1"),
        ("r.yaml", "env: [", "line 1"),
        ("r.yaml", "env: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("r.yaml", "env: !!timestamp 2026-01-02", "env is a date"),
        ("r.yaml", "a: &x [*x]", "nested too deeply"),
        ("r.yaml", "a: &x {<<: *x}", "nested too deeply: .x stands within"),
        ("r.yaml", "k" * 900 + ": 1\n" + "k" * 900 + ": 2", r"the key 'k{79} occurs twice at line 2"),
        ("r.yaml", 'a: "\\UFFFFFFFF"', "not plain YAML"),
        ("r.yaml", f"a: [1, {2**64}]", r"a\[1\] is a whole number of more than 64 bits"),
        ("r.toml", f"a = {10**400}", "a is a whole number of more than 64 bits"),
        ("r.toml", "a" + ' . "b"' * 40 + " = 1", "nested too deeply or too large"),
        ("r.yaml", "a: 1\n" + "#" * 2**22, "too large: a run file has at most 4 MiB"),
        ("r.yaml", "1: 2", "r.yaml: keys are texts; got 1"),
        ("r.yaml", "- 1", r"is a mapping, such as `env: CartPole`; got \[1\]"),
        ("r.yaml", b"env: \xff", "'utf-8' codec can't decode byte 0xff in position 5"),
        ("r.json", '{"env": "A", "env": "B"}', "the key 'env' occurs twice"),
        ("r.json", '{"env": ', "line 1 column 9"),
        ("r.json", '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}", "maximum recursion depth exceeded"),
        ("r.txt", "env: A", "ends in .yaml, .yml, .toml, .json; got '.txt'"),
    ],
)
def test_files_that_cannot_be_read_say_where(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message) as refusal:
        load_run_file(write(tmp_path, name, text))
    assert str(tmp_path / name) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    for name, why in {"none": "No such file", "folder": "Is a directory"}.items():
        with pytest.raises(ValueError, match=rf"{name}\.yaml: cannot be read: {why}"):
            load_run_file(tmp_path / f"{name}.yaml")


@pytest.mark.parametrize(
    ("name", "text"),
    [("r.yaml", "env: A\nseed: 1\n"), ("r.toml", 'env = "A"\nseed = 1\n'), ("r.json", '{"env": "A",\n"seed": 1}')],
)
def test_files_that_editors_on_windows_write_are_read(tmp_path, name, text):
    written = text.replace("\n", "\r\n").encode("utf-8-sig")
    assert load_run_file(write(tmp_path, name, written)) == {"env": "A", "seed": 1}


def test_anchors_and_merges_work(tmp_path):
    text = "a: &base {x: 1, y: 2}\nb: {<<: *base, y: 3}\nc: {<<: *base}"
    assert load_run_file(write(tmp_path, "r.yaml", text))["b"] == {"x": 1, "y": 3}


def doubled(first, each, count=60):
    """Lines that each have twice what the line before has, by its anchor."""
    return f"a0: &a0 {first}\n" + "".join(f"a{i}: &a{i} {each.replace('*', f'*a{i - 1}')}\n" for i in range(1, count))


@pytest.mark.parametrize(
    "text",
    [
        doubled("{x: 1}", "{<<: [*, *]}"),
        doubled("[1]", "[*, *]"),
        doubled("{x: 1}", "{p: *, q: *}"),
        doubled("[1]", "[*, *]") + "? *a59\n: 1",
        doubled("{x: 1}", "{<<: {<<: [*, *]}, y: *}"),
        "a: &a [1, 2]\nb: [" + "*a," * 7_000 + "]",
        "a: [" + "1," * 20_000 + "]",
    ],
    ids=["merges", "lists", "mappings", "a key", "merges of merges", "one alias", "no alias"],
)
def test_what_a_text_stands_for_is_counted_before_it_is_made(tmp_path, text, monkeypatch):
    monkeypatch.setattr("rl8x.plain.MAX_VALUES", 20_000)
    with pytest.raises(ValueError, match="too large: more than 20,000 values, with what its aliases stand for at"):
        load_run_file(write(tmp_path, "r.yaml", text))
    if len(text) < 10_000:
        assert parse_value(text) == text  # as anything else that is not YAML
        with pytest.raises(ValueError, match="is not a list or mapping in YAML: too large"):
            parse_value("{" + text.strip().replace("\n", ", ") + "}")


# -- overrides ------------------------------------------------------------------------------------------


def test_overrides_lead_into_mappings_and_leave_the_data_alone():
    before = json.dumps(RUN)
    data = apply_overrides(
        RUN, ["algorithm_config.lr=1e-3", "env_config.gravity=[1, 2]", "a.b.c=x=y", "steps_per_eval="]
    )
    assert data["algorithm_config"] == {**RUN["algorithm_config"], "lr": 1e-3}
    assert data["env_config"] == {"length": {"uniform": [0.25, 1.0]}, "gravity": [1, 2]}
    assert data["a"] == {"b": {"c": "x=y"}}
    assert data["steps_per_eval"] is None
    assert json.dumps(RUN) == before


# -- the run --------------------------------------------------------------------------------------------


def test_rl8s_names_are_understood():
    run = RunSpec.from_plain(
        {"env_cls": "Pendulum", "algorithm_cls": "PPOConfig", "algorithm_config": {"model_cls": "lstm"}}
    )
    assert (run.env.env, run.algorithm.make_config().model) == ("Pendulum", "lstm")


def test_a_module_that_breaks_when_imported_shows_its_own_error(tmp_path, monkeypatch):
    write(tmp_path, "breaks_on_import.py", "1 / 0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(ZeroDivisionError):
        import_named("breaks_on_import.Env", trust=True)


@pytest.mark.parametrize(
    ("data", "plain"),
    [
        ({"max_steps": 1e6, "env_config": None, "stop_conditions": None}, {"max_steps": 1_000_000}),
        # the defaults, and no change of them
        ({"env_config": {}, "eval_env_config": {}}, {"env_config": {}, "eval_env_config": {}}),
        # one condition needs no list
        ({"stop_conditions": {"wall_time": 5}}, {"stop_conditions": [{"wall_time": 5}]}),
        ({"stop_conditions": "a > 1 and b < 2"}, {"stop_conditions": ["a > 1 and b < 2"]}),
    ],
)
def test_a_run_is_written_as_it_is_meant(data, plain):
    run = RunSpec.from_plain({"env": "A", **data})
    assert run.to_plain() == {"env": "A", **plain}
    assert type(run.run.max_steps) is type(plain.get("max_steps"))
    assert run == RunSpec.from_plain({"env": "A", **plain})


def result_or_refusal(function, *arguments):
    """What the function returns, or the one line with which it refuses."""
    try:
        return function(*arguments)
    except (ValueError, TypeError) as error:
        lines = str(error).splitlines()
    assert len(lines) == 1
    return lines[0]


KEYS = ["env", "env_cls", "env_config", "algorithm", "algorithm_config", "stop_conditions", "max_steps", "seed"]
KINDS = ["plateau", "all", "any", "not", "hits_upper_bound", "wall_time", "confirmed", "non_finite", "name", "patience"]
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 9),
        st.floats(),
        st.sampled_from(["CartPole", "PPO", "mlp", "x.y", "rl8x.keys.OBS", "2h", "returns/mean", "auto", ""]),
        st.text(max_size=6),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([*KINDS, "num_envs", "lr", "model", "lr_schedule", "device"]), inner, max_size=3
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*KEYS, "other"]), values, max_size=5), st.booleans())
@example({"stop_conditions": [{"confirmed": {"by": {"all": []}}}]}, True)
@example({"stop_conditions": [{"not": {"not": None}}]}, True)
@example({"algorithm_config": {"lr_schedule": {"kind": [], "points": 3}}}, True)
def test_any_plain_data_is_accepted_or_refused_in_one_line(data, complete):
    if complete:
        data = {"env": "CartPole", **{key: value for key, value in data.items() if key != "env_cls"}}
    run = result_or_refusal(RunSpec.from_plain, data)
    if isinstance(run, RunSpec):
        assert RunSpec.from_plain(run.to_plain()).to_plain() == run.to_plain() or "nan" in repr(run)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(
        st.binary(max_size=60),
        st.text(max_size=60).map(str.encode),
        st.text("abe: [],{}&*!|>-?%@\"'\n\t#<1.", max_size=60).map(str.encode),
    ),
    suffix=st.sampled_from(["yaml", "toml", "json"]),
)
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path, text, suffix):
    assert isinstance(result_or_refusal(load_run_file, write(tmp_path, f"r.{suffix}", text)), dict | str)
