"""A run file or a checkpoint from anybody runs no code of its folder, unless the user says that he trusts it."""

import functools
import json
import operator
import os
import re
import shlex
import sys

import pytest
from tests.checkpoint.test_files import signed

from rl8x import Trainer, trusted
from rl8x.checkpoint import CheckpointError, listed
from rl8x.cli.main import main
from rl8x.config import RunSpec
from rl8x.importing import UntrustedError, import_class, import_named, module_named, needs_trust, texts
from rl8x.models import MLPModel, Model
from rl8x.trusted import is_remembered

SMALL = {"num_envs": 2, "horizon": 4, "seed": 1, "device": "cpu"}
MODULE = """
import dataclasses, pathlib
pathlib.Path("imported").touch()

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from rl8x import HitsUpperBound, PPOConfig
from rl8x.distributions import Categorical
from rl8x.envs import CartPole
from rl8x.models import MLPModel

class Task(CartPole): pass
class Simulator(CartPoleEnv): pass
class Wrapper(gymnasium.Wrapper): pass
class Net(MLPModel): pass
class Choice(Categorical): pass
class Enough(HitsUpperBound): pass

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PPOConfig): pass

def make_task(num_envs, **options):
    return CartPole(num_envs, **options)

gymnasium.register(f"{__name__}-v0", entry_point=Simulator)
"""
POSITIONS = {
    "environment": {"env": "M.Task"},
    "factory": {"env": "M.make_task"},
    "id": {"env": "M:M-v0"},
    "class in env_kwargs": {"env": "CartPole-v1", "env_kwargs": {"wrappers": [{"$class": "M.Wrapper"}]}},
    "model": {"algorithm_config": {"model": "M.Net"}},
    "distribution": {"algorithm_config": {"distribution": "M.Choice"}},
    "algorithm": {"algorithm": "M.Config"},
    "inner condition": {"stop_conditions": [{"not": {"all": [{"M.Enough": ["env/steps", 0]}]}}]},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a module that leaves a mark when it is imported; nothing of it stays imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"{module_of(tmp_path)}.py").write_text(MODULE)
    yield tmp_path
    for name in (module_of(tmp_path), "others", "others.tools"):
        sys.modules.pop(name, None)


def module_of(folder):
    return re.sub(r"\W", "_", f"mine_{folder.name}")


def forget(folder):
    """Begin as another process would."""
    sys.modules.pop(module_of(folder), None)
    sys.path[:] = [entry for entry in sys.path if entry != str(folder)]
    (folder / "imported").unlink(missing_ok=True)


def one_line(capsys):
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.filterwarnings("ignore:.*simulator's state cannot be saved")
@pytest.mark.parametrize("position", POSITIONS)
def test_no_place_of_a_run_file_or_a_checkpoint_runs_code_without_trust(position, folder, capsys):
    named = json.loads(json.dumps(POSITIONS[position]).replace("M", module_of(folder)))
    rest = {"tracking": False, "max_steps": 1, "eval_env": False, "progress": "none", "checkpoints": {"directory": "c"}}
    options = {**SMALL, **named.get("algorithm_config", {})}
    (folder / "run.json").write_text(json.dumps({"env": "CartPole", **rest, **named, "algorithm_config": options}))
    assert main(["train", "-f", "run.json"]) == 2
    line = one_line(capsys)
    assert f"would import the module '{module_of(folder)}' and run its code" in line
    assert "--trust" in line
    assert not (folder / "imported").exists()
    assert not (folder / "c").exists()

    assert main(["train", "-f", "run.json", "--trust"]) == 0
    assert (folder / "imported").exists()
    (command,) = [line for line in capsys.readouterr().out.splitlines() if "rl8x resume" in line]
    words = shlex.split(command.partition("rl8x ")[2].partition(", N above")[0])
    assert words == ["resume", "c", "--max-steps", "N"]  # the trust is remembered

    resume = ["resume", "c", "--max-steps", "2", "--progress", "none"]
    trusted.memory().rename("memory")
    forget(folder)
    assert main(resume) == 2
    assert "--trust" in one_line(capsys)
    assert not (folder / "imported").exists()
    (folder / "memory").rename(trusted.memory())
    assert main(resume) == 0
    assert (folder / "imported").exists()
    output = capsys.readouterr()
    assert "2 steps" in output.out
    assert "remembered" not in output.err


def types(folder, *words):
    """Whether a command line is accepted in a new process."""
    forget(folder)
    return main(["train", *words, "num_envs=2", "horizon=4", "device=cpu", "--dry-run", "--progress=none"]) == 0


def reads(folder, env):
    """Whether a run file that names an environment is accepted in a new process."""
    (folder / "run.json").write_text(json.dumps({"env": env, "tracking": False}))
    return types(folder, "-f", str(folder / "run.json"))


@pytest.mark.parametrize("name", ["M.Task", "M.make_task", "M:M-v0"])
def test_what_was_typed_is_trusted_until_it_changes_or_is_forgotten(name, folder, capsys):
    name, file = name.replace("M", module_of(folder)), folder / f"{module_of(folder)}.py"
    assert not reads(folder, name)
    assert types(folder, name)
    assert f"your trust in {file} is remembered until it changes" in capsys.readouterr().err
    assert reads(folder, name)
    assert (folder / "imported").exists()
    memory = trusted.memory()
    assert [path.stat().st_mode & 0o777 for path in (memory, memory.parent)] == [0o600, 0o700]

    file.write_text(MODULE + "\n# another\n")
    capsys.readouterr()
    assert not reads(folder, name)
    assert "has changed since you trusted it" in one_line(capsys)
    assert not (folder / "imported").exists()
    file.write_text(MODULE)
    assert reads(folder, name)
    memory.unlink()
    assert not reads(folder, name)


def test_trust_in_a_module_is_none_in_its_copy_its_neighbours_or_functions_that_nobody_named(folder, capsys):
    module, copy = module_of(folder), folder / "copy"
    (folder / "others.py").write_text(MODULE)
    assert types(folder, f"{module}.Task")
    for env, refused in (("others.Task", "would import"), (f"{module}.make_task", "not a subclass")):
        assert not reads(folder, env)
        assert refused in capsys.readouterr().err
    assert reads(folder, f"{module}.Task")
    assert types(folder, f"{module}.make_task")
    assert reads(folder, f"{module}.make_task")
    (folder / f"{module}.py").write_text(MODULE.replace("CartPole(num_envs", "print(num_envs"))
    assert types(folder, f"{module}.Task")  # trusted anew, and of its functions none
    assert not reads(folder, f"{module}.make_task")
    copy.mkdir()
    for place in (folder, copy):
        (place / f"{module}.py").write_text(MODULE)
    os.chdir(copy)
    forget(copy)
    assert not reads(folder, f"{module}.make_task")


def test_what_a_trusted_module_imports_is_trusted_with_it_and_must_stay_as_it_is(folder):
    module, package = module_of(folder), folder / "others"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tools.py").write_text("from rl8x.models import MLPModel\nclass Net(MLPModel): pass\n")
    (folder / f"{module}.py").write_text(f"import others.tools\n{MODULE}")
    names = (module, "others", "others.tools")

    def trusted_names():
        for name in names:
            sys.modules.pop(name, None)
        return [is_remembered(name) for name in names]

    assert types(folder, f"{module}.Task")
    assert trusted_names() == [True, True, True]
    assert "others" not in sys.modules  # nothing of it was run to find that out
    with open(package / "tools.py", "a") as file:
        file.write("# another")
    assert trusted_names() == [False, False, False]


@pytest.mark.parametrize("harm", ["open file", "open folder", "link", "damaged", "other form"])
def test_a_memory_that_others_could_have_written_or_that_is_damaged_is_none(harm, folder):
    assert types(folder, f"{module_of(folder)}.Task")
    memory = trusted.memory()
    assert list(trusted.entries()) == [str(folder / f"{module_of(folder)}.py")]
    if harm == "open file":
        memory.chmod(0o666)
    elif harm == "open folder":
        memory.parent.chmod(0o777)
    elif harm == "link":
        memory.symlink_to(memory.rename(folder / "there"))
    else:
        memory.write_text({"damaged": "{", "other form": '{"a": 1}'}[harm])
    try:
        assert trusted.entries() == {}
        assert not is_remembered(module_of(folder))
        if harm == "open folder":
            assert types(folder, f"{module_of(folder)}.Task")
            assert trusted.entries() == {}
    finally:
        memory.parent.chmod(0o700)


def test_what_the_user_names_himself_is_trusted_and_what_stands_in_the_file_beside_it_is_not(folder, capsys):
    own = ["num_envs=2", "horizon=4", "device=cpu", "max_steps=1", "tracking=false", "progress=none"]
    module = module_of(folder)
    (folder / "others.py").write_text(MODULE.replace('"imported"', '"imported others"'))
    (folder / "run.yaml").write_text("env: others.Task\n")
    assert main(["train", "CartPole", *own, "checkpoints.directory=c"]) == 0
    assert main(["resume", "c", "--max-steps", "9", "--stop", f"{module}.Enough: [env/steps, 1]"]) == 0
    assert (folder / "imported").exists()
    trusted.memory().unlink()
    assert types(folder, "CartPole", f"model={module}.Net")
    trusted.memory().unlink()
    forget(folder)
    assert main(["train", "-f", "run.yaml", *own, f"model={module}.Net"]) == 2
    assert "'others.Task' would import the module 'others'" in capsys.readouterr().err
    assert main(["train", "-f", "run.yaml", *own, "env=CartPole", "--trust"]) == 0
    assert not (folder / "imported others").exists()


CALLABLES = ["os.system", "subprocess.Popen", "builtins.exec", "rl8x.cli.main.main", "rl8x.cli.bench.subprocess"]


@pytest.mark.parametrize("path", CALLABLES)
def test_nothing_but_a_class_of_a_kind_is_called_by_its_name_alone(path, tmp_path):
    data = {"env": "CartPole", "algorithm_config": SMALL}
    for wrong in (
        {"env": path},
        {"algorithm": path},
        {"algorithm_config": {"model": path}},
        {"algorithm_config": {"model_config": {"hidden_sizes": {"$class": path}}}},
        {"env": "CartPole-v1", "env_kwargs": {"wrappers": [{"$class": path}]}},
        {"stop_conditions": [{path: ["true"]}]},
    ):
        with pytest.raises(ValueError, match=r"subclass of|must name a subclass"):
            RunSpec.from_plain({**data, **wrong}).make_algorithm()


def test_nor_by_a_checkpoint(tmp_path):
    data = {"env": "CartPole-v1", "algorithm_config": SMALL, "tracking": False}
    trainer = Trainer.from_spec(RunSpec.from_plain({**data, "checkpoints": {"directory": str(tmp_path)}}))
    trainer.run(max_steps=1, progress="none")
    path = listed(trainer.checkpoints.directory)[-1]
    about = json.loads((path / "checkpoint.json").read_text())
    refusal = r"is not a subclass of .*--trust|must name a subclass of"
    for place, value, message in (
        ("spec.algorithm", "subprocess.Popen", refusal),
        ("spec.env", "os.system", refusal),
        ("spec.env_kwargs", {"wrappers": [{"$class": "subprocess.Popen"}]}, refusal),
        ("resolved.config.model", {"$class": "subprocess.Popen"}, refusal),
        ("resolved.config.distribution", "subprocess.Popen", refusal),
        ("spec.env", "not_there:CartPole", "would import the module 'not_there'"),
        ("spec.env", "not_there:CartPole-v1", "would import the module 'not_there'"),
    ):
        changed = json.loads(json.dumps({name: about[name] for name in ("spec", "resolved")}))
        *outer, last = place.split(".")
        functools.reduce(operator.getitem, outer, changed)[last] = value
        signed(path, changed)
        with pytest.raises(CheckpointError, match=message):
            Trainer.resume(path)


def test_a_script_needs_no_trust_for_what_it_has_imported(folder):
    sys.path.append(str(folder))
    module = module_of(folder)
    data = {"env": f"{module}.Task", "algorithm_config": {**SMALL, "model": f"{module}.Net"}, "tracking": False}
    with pytest.raises(UntrustedError, match=f"'{module}.Net' would import"):
        RunSpec.from_plain(data)
    assert type(RunSpec.from_plain(data, trust=True).make_algorithm().env).__name__ == "Task"
    assert type(RunSpec.from_plain(data).make_algorithm().policy.model).__name__ == "Net"
    with pytest.raises(UntrustedError, match="is not a subclass of Env"):
        RunSpec.from_plain({**data, "env": f"{module}.make_task"}).make_algorithm()
    with pytest.raises(ValueError, match="unknown key 'trust'"):
        RunSpec.from_plain({**data, "trust": True})


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("a.b.C", "a.b"),
        ("a.b:Env-v0", "a.b"),
        ("a:ALE/Pong-v5\n", "a"),
        ("ALE/Pong-v5", None),
        ("CartPole-v1", None),
        ("cuda:0", None),
        ("eval/returns/mean", None),
        ("a file: x-v3", None),
    ],
)
def test_what_names_a_module(text, module):
    assert module_named(text) == module
    assert needs_trust(text) == (module is not None)


def test_what_is_our_own_or_there_already_needs_no_trust():
    assert import_named("rl8x.models.MLPModel") is MLPModel
    assert import_class("rl8x.models.MLPModel", (Model,)) is MLPModel
    assert not needs_trust("torch.nn.ReLU")
    assert import_named("json.dumps") is json.dumps
    with pytest.raises(UntrustedError, match=r"'this\.s' would import the module 'this'"):
        import_named("this.s", trust=["other.s"])
    assert "this" not in sys.modules
    assert set(texts({"a": [1, {"b": "c"}], "d": ("e", None)})) == {"a", "b", "c", "d", "e"}


def test_without_a_home_nothing_of_the_working_directory_is_taken_for_the_users_memory(folder, monkeypatch):
    assert types(folder, f"{module_of(folder)}.Task")
    (folder / "~").mkdir()
    moved = trusted.memory().rename(folder / "~" / "trusted.json")
    monkeypatch.setattr("platformdirs.user_config_dir", lambda *_, **options: "~")
    assert trusted.entries() == {}
    moved.unlink()
    assert types(folder, f"{module_of(folder)}.Task")
    assert list((folder / "~").iterdir()) == []


def test_trust_in_python_is_remembered_and_that_of_a_script_that_imports_or_of_mlflow_is_not(folder):
    sys.path.append(str(folder))
    module = module_of(folder)
    data = {"env": f"{module}.Task", "algorithm_config": SMALL, "tracking": False}
    with trusted.nothing_remembered():
        RunSpec.from_plain(data, trust=True).make_algorithm()
    assert trusted.entries() == {}
    RunSpec.from_plain(data, trust=True).make_algorithm()  # it is imported already
    assert trusted.entries() == {}
    sys.modules.pop(module)
    RunSpec.from_plain(data, trust=True).make_algorithm()
    sys.modules.pop(module)
    assert type(RunSpec.from_plain(data).make_algorithm().env).__name__ == "Task"
