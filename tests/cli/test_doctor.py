"""What `rl8x doctor` says, against what is installed, and on machines where something is broken."""

import importlib.metadata
import importlib.util
import os
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rl8x import trusted
from rl8x.cli import doctor
from rl8x.importing import import_named

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def probed(monkeypatch):
    """What importing each package gives, without importing it in another process; errors can be put in."""
    errors = {}
    told = {"threads": 3, "cuda": None, "gpus": [], "mps": False}
    monkeypatch.setattr(doctor, "_probe", lambda names: ({name: errors.get(name) for name in names}, told))
    return errors


def test_versions_are_those_of_the_metadata(probed, mlruns, monkeypatch, call):
    monkeypatch.setenv("RL8X_CACHE_DIR", str(mlruns.parent / "cache"))
    (mlruns.parent / "cache").mkdir()
    (mlruns.parent / "cache" / "a.so").write_bytes(bytes(2_500_000))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    text = call("doctor")
    assert text.startswith("rl8x      0.1.0, in ")
    assert text.rstrip().endswith("everything essential works")
    for needed in map(Requirement, PROJECT["dependencies"]):
        assert f" {needed.name} {importlib.metadata.version(needed.name)}\n" in text
    assert f"{mlruns.parent}/cache, 1 program, 2.5 MB (`rl8x cache`)" in text
    assert "torch takes 3, by OMP_NUM_THREADS=3" in text
    assert f"sqlite:///{mlruns}/mlflow.db, {os.path.getsize(mlruns / 'mlflow.db') / 1e6:.1f} MB" in text
    assert f"cpu, {len(os.sched_getaffinity(0))} of {os.cpu_count()} processors" in text


def test_trust_that_is_remembered_is_shown(probed, mlruns, monkeypatch, call):
    monkeypatch.syspath_prepend(mlruns.parent)
    for name in ("kept_module", "changed_module"):
        (mlruns.parent / f"{name}.py").write_text("from rl8x.envs import CartPole\n")
        import_named(f"{name}.CartPole", trust=True)
        sys.modules.pop(name)
    with open(mlruns.parent / "changed_module.py", "a") as file:
        file.write("# changed")
    text = call("doctor")
    assert f"trust     2 modules, by {trusted.memory()}, which may be deleted" in text
    assert f"{mlruns.parent}/kept_module.py\n" in text
    assert f"{mlruns.parent}/changed_module.py, which has changed, so that rl8x asks again\n" in text
    trusted.memory().chmod(0o602)
    assert "trusted.json is not used, since" in call("doctor")
    trusted.memory().unlink()
    assert "trust     0 modules" in call("doctor")


def test_each_extra_is_there_with_what_it_is_for(probed, mlruns, monkeypatch, call):
    extras = PROJECT["optional-dependencies"].keys() - {"dev", "test-all"}
    assert extras <= doctor.FEATURES.keys()
    missing = {"imageio", "h5py"}

    def version(name, found=importlib.metadata.version):
        if name in missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    lines = {line.split()[0]: line for line in call("doctor").partition("\nextra ")[2].splitlines()[1:] if line}
    assert lines["video"].endswith("pip install 'imageio[ffmpeg]>=2.34'")
    assert lines["hdf5"].endswith("pip install 'h5py>=3.8'")
    assert lines["minari"].endswith("pip install 'minari[hdf5]>=0.5.4'")  # which needs it too
    assert lines["studies"].endswith("installed")


TOO_OLD, TOO_NEW = ({"torch": version} for version in ("1.2.3", "2.16.0"))


@pytest.mark.parametrize(
    ("faults", "versions", "said"),
    [
        ({"torch": "OSError: no libtorch.so"}, {}, "torch: OSError: no libtorch.so; pip install 'torch<"),
        ({"yaml": "ends Python (exit -11)"}, {}, "PyYAML: ends Python (exit -11); pip install 'PyYAML>="),
        ({}, TOO_OLD, "torch: 1.2.3, but <2.16,>=2.13 is needed; pip install 'torch<2.16,>=2.13'"),
        ({}, TOO_NEW, "torch: 2.16.0, but <2.16,>=2.13 is needed; pip install 'torch<2.16,>=2.13'"),
    ],
)
def test_what_is_broken_is_said_with_the_command_that_mends_it(
    probed, mlruns, monkeypatch, call, faults, versions, said
):
    probed.update(faults)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or version(name))
    text = call("doctor", code=1)
    assert f"broken: {said}" in text
    assert text.rstrip().endswith("something essential is broken")
    assert "\nextra " in text


def test_a_store_that_cannot_be_used_is_broken_and_shows_no_password(probed, mlruns, monkeypatch, call):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "gopher://me:geheimnis@host/x")
    text = call("doctor", code=1)
    assert "broken: tracking: " in text
    assert "geheimnis" not in text


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_runs_are_eager_and_nothing_is_broken(probed, mlruns, monkeypatch, call, compiler):
    monkeypatch.setenv("CXX", compiler)
    assert 'runs are eager and execution="compile" is refused' in call("doctor")


def test_a_compiler_of_no_name_is_the_usual_one_and_a_file_is_no_cache(probed, mlruns, monkeypatch, call, tmp_path):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "g++ is not there: " in call("doctor")
    for place, said in ((tmp_path / "file", "which is no folder"), (tmp_path / "none", "not made yet")):
        (tmp_path / "file").touch()
        monkeypatch.setenv("RL8X_CACHE_DIR", str(place))
        assert f"{place}, {said}" in call("doctor")


def test_what_cannot_be_found_out_hides_nothing_else(probed, mlruns, monkeypatch, call):
    for name in ("_devices", "_threads", "_cache", "_requirements"):
        monkeypatch.setattr(doctor, name, {"_requirements": dict}.get(name, lambda *args: 1 / 0))
    text = call("doctor")
    assert text.count("cannot be found out: ZeroDivisionError: division by zero") == 3
    assert "what else it needs is not known" in text
    assert f"sqlite:///{mlruns}" in text


def test_a_package_that_ends_python_or_prints_is_no_end_of_the_diagnosis(tmp_path, monkeypatch):
    broken = {"one": "raise RuntimeError('torn')", "two": "print('[1]\\n{}')", "three": "import os; os._exit(3)"}
    broken["four"] = ""
    for name, code in broken.items():
        (tmp_path / f"rl8x_broken_{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    found, told = doctor._probe([f"rl8x_broken_{name}" for name in broken])
    assert list(found.values()) == [
        "RuntimeError: torn",
        None,
        "ends Python (exit status 3)",
        "not tried, as rl8x_broken_three ends Python (exit status 3)",
    ]
    assert told == {}


def test_a_package_that_takes_too_long_is_the_only_one_that_is_blamed(mlruns, monkeypatch, call):
    monkeypatch.setattr(doctor, "_IMPORT_S", 0.0)
    text = call("doctor", code=1)
    assert "mlflow: not tried, as torch is not imported within 0 s" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("broken:")] == ["torch:"]
