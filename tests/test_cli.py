"""The command line: what it accepts, what it prints, and how it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main, parse_mesh, planning
from autopar.cli.flags import in_shell_terms
from autopar.console.names import ALIASES
from autopar.costs.plans.plan import Plan
from autopar.errors import InputError
from autopar.ir.sharding.mesh import Mesh
from autopar.models import named
from autopar.strategies.presets import preset_named
from autopar.tools import demo

HERE = "tests.test_cli"


class _Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def perceptron() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return _Perceptron(), (torch.zeros(4, 8),)


def no_model() -> int:
    return 3


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("dp=2,tp=4", {"dp": 2, "tp": 4}),
        ("tp=4, ep=2", {"tp": 4, "ep": 2}),
        ("2x4", {"dp": 2, "tp": 4}),
        ("4", {"dp": 4}),
    ],
)
def test_a_mesh_is_read_with_its_axes_in_order(text: str, axes: dict[str, int]) -> None:
    mesh = parse_mesh(text, "h100")
    assert list(mesh.axes.items()) == list(axes.items())
    assert mesh.hardware == "h100"


def warns() -> int:
    warnings.warn("time_limit=5 passed.", RuntimeWarning, stacklevel=1)
    return 3


def test_a_warning_at_the_script_of_the_command_is_one_line_in_terms_of_the_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [__file__])
    assert main(["plan", f"{HERE}:warns", "--mesh", "2"]) == 2
    assert capsys.readouterr().err.startswith("autopar: warning: --time-limit 5 passed.\nautopar: ")
    monkeypatch.setattr(sys, "argv", ["autopar"])
    with pytest.warns(RuntimeWarning, match="^time_limit=5 passed"):
        assert main(["plan", f"{HERE}:warns", "--mesh", "2"]) == 2


@pytest.mark.parametrize("text", ["", "dp", "dp=", "dp=two", "2x", "2x2x2", "dp=2,dp=2", "-4", "dp=2,4"])
def test_text_that_is_no_mesh_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(repr(text))} is no mesh; write axes with sizes"):
        parse_mesh(text)


def test_an_error_is_one_line_on_stderr_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--mesh", "none"]) == 2
    specified = capsys.readouterr()
    assert specified.err.startswith("autopar: 'none' is no mesh")
    assert specified.err.count("\n") == 1
    assert specified.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--ranks", "3", "--mesh", "2x2"], "--ranks 3 and --mesh 2x2 (4 ranks) differ; give one of them."),
        (["plan", "lama", "--mesh", "2"], "no built-in model 'lama'"),
        (["plan", "no_such_module:model", "--mesh", "2"], "No module named 'no_such_module'"),
        (["plan", f"{HERE}:nothing", "--mesh", "2"], f"the module {HERE} has no function 'nothing'"),
        (["plan", f"{HERE}:no_model", "--mesh", "2"], "returned a int; return an nn.Module"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["plan"], ["demo", "--steps", "0"], ["demo", "--steps", "x"]])
def test_what_no_command_accepts_ends_with_its_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.startswith("usage: autopar")


def test_help_and_version_do_without_pytorch() -> None:
    code = "import sys, atexit; from autopar.cli import main; atexit.register(lambda: print(*sys.modules)); main()"
    for arguments in (["--help"], ["--version"], ["plan", "--help"], ["bench", "--help"], ["calibrate", "--help"]):
        ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert not {"torch", "numpy", "sympy", "ortools", "pandas"} & set(ran.stdout.split())
        assert ran.stdout.startswith(
            f"autopar {autopar.__version__}\n" if arguments == ["--version"] else "usage: autopar"
        )


def test_importing_autopar_imports_what_is_used_alone() -> None:
    code = "import sys, torch; before = set(sys.modules); import autopar; print(*(set(sys.modules) - before))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"autopar", "autopar.errors"} == set(ran.stdout.split())


def test_reading_a_plan_does_without_tracers_and_compilers() -> None:
    code = "import sys, autopar; autopar.Plan, autopar.Mesh; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "ortools", "transformers", "sympy", "pandas"} & set(ran.stdout.split())


@pytest.mark.parametrize(
    ("message", "specified"),
    [
        ("devices=64 beside a mesh of 2.", "--devices 64 beside a mesh of 2."),
        (
            "give Memory(limit='8 GB', weight_tiles=True) or memory='8GB'",
            "give --memory '8 GB' --weight-tiles or --memory 8GB",
        ),
        (
            "Memory(offload='none') is given with training=False, which",
            "--offload none is given with --inference, which",
        ),
        ("Memory(loss_tiles='none'); leave weight_tiles out", "--loss-tiles none; leave --weight-tiles out"),
        ("Pipeline(split_points=('a', 'b')) is given", "--split-points a,b is given"),
        ("Run(seed=3) and Memory(prefetch=2)", "Run(seed=3) and Memory(prefetch=2)"),
        ('(Experts(imbalance=0.5); give mesh="auto")', "(--imbalance 0.5; give --mesh auto)"),
        ('write Mesh({"dp": 2}, memory="h100")', 'write Mesh({"dp": 2}, memory="h100")'),
        (
            "Traceback (most recent call last):\n  f(x, memory=2)",
            "Traceback (most recent call last):\n  f(x, memory=2)",
        ),
    ],
)
def test_an_error_names_flags_and_leaves_python_as_it_is(message: str, specified: str) -> None:
    known = (
        "devices",
        "weight_tiles",
        "memory",
        "offload",
        "inference",
        "loss_tiles",
        "split_points",
        "imbalance",
        "mesh",
    )
    assert in_shell_terms(message, known) == specified


@pytest.mark.parametrize(("alias", "preset"), sorted(ALIASES.items()))
def test_an_alias_means_its_preset(alias: str, preset: str) -> None:
    assert preset_named(alias) == preset == preset_named(preset)


def test_an_alias_plans_as_its_preset_does(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fsdp", "zero3"):
        assert main(["plan", "tiny-mlp", "--mesh", "2", "--strategy", name]) == 0
    first, second = capsys.readouterr().out.split("plan for the mesh")[1:]
    assert first == second


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("pp", '--strategy pp is no preset: a pipeline is an axis of the mesh. Name an axis "pp", as in pp=4,tp=2'),
        ("fsdpp", 'Did you mean "fsdp"?'),
        ("megatorn", 'Did you mean "megatron"?'),
    ],
)
def test_a_strategy_that_is_no_preset_is_refused_before_capture(
    name: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "tiny-mlp", "--mesh", "2", "--strategy", name]) == 2
    assert found in capsys.readouterr().err


def test_a_saved_plan_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    main(["plan", "tiny-mlp", "--mesh", "2", "--save", str(file)])
    capsys.readouterr()
    assert main(["show", str(file), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{Plan.load(file)}\n\nsaved in {page}\n" and page.exists()
    assert main(["show", str(file), "--schedule"]) == 2
    assert "is a plan in one piece on dp=2, and --schedule charts a pipeline" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_schedule_of_a_saved_pipeline_is_charted_within_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pipeline.json"
    options = ["--mesh", "pp=2", "--microbatches", "2", "--schedule", "1f1b", "--save", str(file)]
    assert main(["plan", "tiny-mlp", *options]) == 0
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["show", str(file), "--schedule"]) == 0
    _, first, second, _ = capsys.readouterr().out.splitlines()
    assert len(first) == len(second) == 60
    for line in (first, second):
        assert set(re.findall(r"[FBO]\d?", line)) == {"F0", "F1", "B0", "B1", "O"}
    assert first.startswith("rank 0  F0") and second.startswith("rank 1  .")


def test_built_in_models_are_planned_in_bf16_mixed_on_gpus_and_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    arguments = ["plan", "tiny-mlp", "--mesh", "2", "--save", str(file)]
    specified = (
        "note: tiny-mlp was planned in {}, the default of built-in models on h100; --precision fp32 plans in float32"
    )
    cases: list[tuple[list[str], str | None]] = [
        (["--hardware", "h100"], "bf16-mixed"),
        (["--hardware", "h100", "--inference"], "bf16"),
        (["--hardware", "h100", "--precision", "fp32"], None),
        ([], None),
    ]
    for options, precision in cases:
        assert main([*arguments, *options]) == 0
        out = capsys.readouterr().out
        assert (specified.format(precision) in out) == (precision is not None), out
        assert ("bfloat16" in file.read_text()) == (precision is not None)


@pytest.mark.parametrize(
    ("ranks", "text", "axes"),
    [
        (None, None, {"dp": 2, "tp": 2}),
        (8, None, {"dp": 2, "tp": 4}),
        (3, None, {"dp": 3}),
        (2, None, {"dp": 2}),
        (2, "tp=2", {"tp": 2}),
        (None, "1x2", {"dp": 1, "tp": 2}),
    ],
)
def test_the_demo_takes_ranks_or_a_mesh(ranks: int | None, text: str | None, axes: dict[str, int]) -> None:
    arguments = ["demo", *(["--ranks", str(ranks)] if ranks else []), *(["--mesh", text] if text else [])]
    found: list[demo.DemoRun] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "run", lambda settings: found.append(settings) or True)
        assert main(arguments) == 0
    assert found[0].mesh == Mesh(axes)


def test_a_demo_whose_losses_or_bytes_differ_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda _: False)
    assert main(["demo"]) == 1


def test_a_plan_is_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", f"{HERE}:perceptron", "--mesh", "dp=2,tp=2", "--save", str(file)]) == 0
    plan = Plan.load(file)
    assert plan.mesh == Mesh({"dp": 2, "tp": 2})
    out = capsys.readouterr().out
    before, after = str(plan).split("\n  memory", 1)
    assert out.startswith(before) and "\n  timeline " in out, "what a plan that was loaded does not have"
    assert out.split("\n  memory", 1)[1].startswith(after)
    assert re.search(r"^down +linear ", out, re.MULTILINE)
    assert out.endswith(f"saved in {file}\n")


def test_a_plan_that_cannot_be_saved_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:perceptron", "--mesh", "2", "--save", str(tmp_path)]) == 2
    assert "autopar: the plan cannot be saved: " in capsys.readouterr().err


def test_a_plan_that_does_not_fit_in_memory_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:perceptron", "--mesh", "2", "--memory", "1B"]) == 2
    assert capsys.readouterr().err.startswith("autopar: ")


def test_a_verbose_plan_shows_the_elementwise_calls(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", f"{HERE}:perceptron", "--mesh", "2"])
    brief = capsys.readouterr().out
    main(["plan", f"{HERE}:perceptron", "--mesh", "2", "--verbose"])
    verbose = capsys.readouterr().out
    assert " relu " in verbose
    assert len(verbose.splitlines()) > len(brief.splitlines())


def test_a_built_in_model_is_planned_for_its_batch(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "demo", "--layers", "1", "--mesh", "dp=2", "--batch", "4", "--sequence", "8"]
    assert main(arguments) == 0
    assert "q_proj" in capsys.readouterr().out


def test_a_plan_has_the_precision_that_is_requested(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = ["plan", f"{HERE}:perceptron", "--mesh", "2", "--save", str(file)]
    assert main(arguments) == 0 and "bfloat16" not in file.read_text()
    assert main([*arguments, "--precision", "bf16-mixed"]) == 0 and "bfloat16[32, 8]" in file.read_text()


def test_the_module_of_a_model_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    (tmp_path / "model_of_this_folder.py").write_text("def make():\n    return 7\n")
    assert named.called("model_of_this_folder:make") == 7


USERS = """
import sys
from torch import nn
def divides(): return inner()
def inner(): return 1 / 0
def leaves(): sys.exit(3)
def needs(x): return x
def interrupts(): raise KeyboardInterrupt
def three(): return 3
def raises():
    class Model(nn.Linear):
        def forward(self, x): raise ValueError("mine is broken")
    import torch
    return Model(2, 2), (torch.ones(2, 2),)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "found"),
    [
        (["users:divides"], 2, ["users:divides: divides failed", "in divides", "in inner", "ZeroDivisionError"]),
        (["users:leaves"], 2, ["in leaves", "SystemExit: 3"]),
        (["users:needs"], 2, ["TypeError: needs() missing 1 required positional argument"]),
        (["users:interrupts"], 130, ["autopar: interrupted"]),
        (["users:three"], 2, ["users:three returned a int; return an nn.Module"]),
        (["users:raises"], 2, ["mine is broken"]),
        (["users:nothing"], 2, ["the module users has no function 'nothing'"]),
        (["broken:f"], 2, ["importing broken failed", "SyntaxError"]),
        (["lacking:f"], 2, ["importing lacking failed", "lacking.py", "No module named 'not_there'"]),
        (["absent:f"], 2, ["No module named 'absent'; write MODULE:FUNCTION"]),
        (["folder/users.py:f"], 2, ["'folder/users.py' is no name of a module"]),
        ([":f"], 2, ["'' is no name of a module"]),
        (["tiny-mlp", "--hardware", ""], 2, ["hardware '' is not known"]),
        (["tiny-mlp", "--save", ""], 2, ["the plan cannot be saved", "Is a directory"]),
        (
            ["tiny-mlp", "--capacity-factor", "2"],
            2,
            ["--capacity-factor 2 limits the rows", "Leave --capacity-factor out"],
        ),
        (
            ["tiny-mlp", "--loss-tiles", "2000"],
            2,
            ["--loss-tiles 2000; give a whole number of at least 1, at most 1024"],
        ),
        (["tiny-mlp", "--mlp-tiles", "2000"], 2, ["--mlp-tiles 2000; give a whole number of at least 1, at most 1024"]),
        (["tiny-mlp", "--bfloat16", "--precision", "bf16"], 2, ["this is inside of autocast('cpu', torch.bfloat16)"]),
        (["tiny-mlp", "--time-limit", "nan"], 2, ["--time-limit nan; give seconds of at least 0"]),
        (["tiny-mlp", "--imbalance", "0.5"], 2, ["--imbalance 0.5; give a finite number of at least 1"]),
        (["tiny-mlp", "--devices", "5"], 2, ["--devices 5 with a mesh of 2"]),
        (["tiny-mlp", "--microbatches", "3"], 2, ["does not divide into 3 micro-batches"]),
        (["tiny-mlp", "--memory", "9" * 500 + "GB"], 2, ["is no size"]),
    ],
    ids=lambda value: None,
)
def test_of_what_fails_only_the_users_part_is_shown(
    arguments: list[str],
    status: int,
    found: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in (("users", USERS), ("broken", "def f(:"), ("lacking", "import not_there")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["plan", "--mesh", "2", *arguments]) == status
    for name in ("users", "broken", "lacking"):
        sys.modules.pop(name, None)
    error = capsys.readouterr().err
    assert error.startswith("autopar: ") and "/autopar/" not in error and "importlib" not in error
    for text in found:
        assert text in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "pp=2"], "the demo trains no pipeline, and pp=2 has the axis pp"),
        (["--ranks", "99999"], "99999 ranks are as many processes on this machine; give at most 64"),
    ],
)
def test_a_demo_that_cannot_run_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_mistake_of_autopars_is_one_line_and_its_traceback_is_there_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mistaken(*_: object, **__: object) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr(planning, "made", mistaken)
    assert main(["plan", "tiny-mlp", "--mesh", "2"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("autopar: internal error: IndexError: out of range (test_cli.py:") and error.count("\n") == 1
    )
    monkeypatch.setenv("AUTOPAR_TRACEBACK", "1")
    with pytest.raises(IndexError):
        main(["plan", "tiny-mlp", "--mesh", "2"])


def test_a_reader_that_leaves_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["plan", "tiny-mlp", "--mesh", "2"]) == 0
    assert not capsys.readouterr().err
