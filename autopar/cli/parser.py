"""The arguments of every command, and the function that runs it; read without PyTorch."""

from __future__ import annotations

import argparse

import autopar
from autopar.cli.groups import OF_PLANS, add_flags, whole_number
from autopar.console import names
from autopar.tools.benchmarking import command as bench_command
from autopar.tools.calibration import command as calibrate_command

HERE = "autopar.cli"
BY_DEFAULT = "the model's own; of built-in models bf16-mixed where products in bfloat16 are faster, as on GPUs"


def parser() -> argparse.ArgumentParser:
    """Return the parser; each command leaves its function as `command`, as in "autopar.cli.planning:plan"."""
    parser = argparse.ArgumentParser(prog="autopar", description="Automatic parallelization of PyTorch models.")
    parser.add_argument("--version", action="version", version=f"autopar {autopar.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="train a small model on this machine's CPU, compared with one process"))
    _add_plan(commands.add_parser("plan", help="print the plan of a model for a mesh that need not be there"))
    _add_show(commands.add_parser("show", help="print a plan that was saved, or the schedule of a pipeline"))
    _add_explain(commands.add_parser("explain", help="say why one part of a plan is as it is"))
    measuring = commands.add_parser("calibrate", help="measure this machine and write its hardware profile")
    calibrate_command.add_arguments(measuring)
    measuring.set_defaults(command="autopar.tools.calibration.command:run")
    comparing = commands.add_parser("bench", help="measure strategies on this machine, compared with predictions")
    bench_command.add_arguments(comparing)
    comparing.set_defaults(command=f"{HERE}.running:bench")
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="processes to start (4); the product of the mesh")
    parser.add_argument("--mesh", help='axes and sizes, "2x2" or "dp=2,tp=2"')
    parser.add_argument("--steps", type=whole_number, default=30)
    parser.add_argument("--layers", type=whole_number, default=4)
    parser.add_argument("--batch", type=whole_number, default=8, help="sequences of the global batch (8)")
    parser.add_argument("--sequence", type=whole_number, default=128, help="bytes of a sequence (128)")
    parser.set_defaults(command=f"{HERE}.running:train_demo")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_planning(parser)
    parser.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page to look at")
    parser.add_argument("--trace", metavar="FILE", help="write the predicted step as a trace for Perfetto or Chrome")
    parser.add_argument("--verbose", action="store_true", help="show every operation")
    parser.add_argument(
        "--decode",
        type=whole_number,
        metavar="TOKENS",
        help="plan generation: --batch prompts of --sequence tokens, so many new ones each",
    )
    parser.add_argument("--within", type=float, metavar="SECONDS", help="with --decode and --devices: the first token")
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="RECIPE",
        help='with --devices: plan this, too, and compare: "pp=4,dp=8,tp=8 --microbatches 16 --schedule 1f1b"',
    )
    parser.add_argument("--tokens", help='with --days: the least devices that train on so many, such as "1T"')
    parser.add_argument("--days", type=float, help="until --tokens have to be trained on")
    parser.add_argument(
        "--largest",
        choices=("batch", "sequence"),
        help="the largest batch in one piece, or sequence, that fits --devices within --memory",
    )
    parser.set_defaults(command=f"{HERE}.sizing:plan")


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a plan, as autopar plan --save or plan.save wrote it")
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page to look at")
    parser.add_argument("--verbose", action="store_true", help="show every operation")
    parser.add_argument("--schedule", action="store_true", help="chart the schedule of a pipeline, a line per rank")
    parser.set_defaults(command=f"{HERE}.showing:show")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_planning(parser)
    parser.add_argument("name", help="a module, parameter or operation of the model, as in the plan's table")
    parser.set_defaults(command=f"{HERE}.planning:explain")


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """Add the planning options of both commands."""
    parser.add_argument(
        "model",
        help=f"one of {', '.join(names.MODELS)}, or MODULE:FUNCTION that returns a model, or (model, example inputs)",
    )
    parser.add_argument("--mesh", help='axes and sizes, "dp=2,tp=2" or "2x2"; without it --devices are arranged')
    parser.add_argument("--devices", type=whole_number, help="how many devices to arrange in the best mesh")
    parser.add_argument("--hardware", default="cpu", help="name or path of a hardware profile (cpu)")
    parser.add_argument("--batch", type=whole_number, default=8, help="sequences or images of the global batch (8)")
    parser.add_argument("--sequence", type=whole_number, default=128, help="tokens of a sequence (128)")
    parser.add_argument("--layers", type=whole_number, help="layers of a built-in model, instead of its own number")
    for group in OF_PLANS:
        add_flags(parser, group)
    parser.add_argument("--optimizer", choices=names.OPTIMIZERS, default="adamw")
    parser.add_argument("--master-copies", action="store_true", help="float32 copies of parameters of lower precision")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 under autocast")
    parser.add_argument(
        "--precision", choices=names.PRECISIONS, help=f"dtypes to store, compute and reduce in ({BY_DEFAULT})"
    )
    parser.add_argument("--mode", choices=("auto", "semi_auto", "manual"), default="auto")
    short = ", ".join(f"{alias} ({preset})" for alias, preset in names.ALIASES.items())
    presets = ", ".join(names.PRESETS)
    parser.add_argument(
        "--strategy", metavar="NAME", help=f"plan by a preset: {presets}, or in short {short}; several as fsdp+tp+cp"
    )
    parser.add_argument("--microbatches", type=whole_number, help="into how many parts a batch is split")
    parser.add_argument("--inference", action="store_true", help="plan the forward alone, without training")
