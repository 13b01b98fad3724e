"""The `autopar` command.

autopar plan        prints a plan without any device, as a table; saves it as JSON, as a page, as a trace
autopar explain     says why one part of a plan is as it is
autopar demo        trains a small model on this machine's CPU, beside one process
autopar calibrate   measures this machine and writes its hardware profile
autopar bench       measures strategies on this machine, beside their predictions and beside PyTorch's own tools
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from autopar import api
from autopar.benchmarking import command as bench_command
from autopar.calibration import command as calibrate_command
from autopar.cost.optimizer import NAMES as OPTIMIZERS
from autopar.errors import AutoparError, InputError
from autopar.models.catalogue import NAMES, LanguageModel
from autopar.models.named import named
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.schedules.schedule import NAMES as SCHEDULES
from autopar.planning.request import OFFLOADED
from autopar.planning.settings import DEPTHS
from autopar.plans.plan import Plan
from autopar.program.precision import NAMED
from autopar.program.recompute_segments import RECOMPUTATIONS
from autopar.report.table import plan_table
from autopar.sharding.mesh import Mesh
from autopar.strategies.presets import PRESETS

DEFAULT_AXES = ("dp", "tp")
FAILED, DISAGREES = 2, 1  # exit statuses: an error, and losses or bytes that are not as expected
MAX_COUNT = 10**7  # of samples, tokens, layers, …: tensors of them can be counted in 64 bits
MAX_RANKS = 64
INTERRUPTED = 130  # as of shells: 128 and the number of SIGINT
OF_ONE_PLAN = ("save", "html", "trace", "plan_cache")
SHOW_TRACEBACK = "AUTOPAR_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; errors go to stderr without a traceback of ours."""
    options = _parser().parse_args(argv)
    try:
        status = options.command(options)
        sys.stdout.flush()
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if os.environ.get(SHOW_TRACEBACK):
            raise
        print(f"autopar: {_of_ours(error)}", file=sys.stderr)
    else:
        return status
    return FAILED


def _of_ours(error: Exception) -> str:
    """What to say of an error that nobody meant to raise."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"internal error: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno}). This is a "
        f"mistake of autopar's: report it with the traceback that {SHOW_TRACEBACK}=1 shows."
    )


def parse_mesh(text: str, hardware: str = "cpu") -> Mesh:
    """A mesh as people write it: "dp=2,tp=4", or "2x4" for the axes dp and tp.

    >>> print(parse_mesh("2x4"))
    dp=2 × tp=4

    Raises InputError where the text is no mesh.
    """
    words = text.split(",") if "=" in text else text.split("x")
    if "=" not in text and len(words) <= len(DEFAULT_AXES):
        words = [f"{name}={size}" for name, size in zip(DEFAULT_AXES, words, strict=False)]
    pairs = [word.partition("=")[::2] for word in words]
    names = [name.strip() for name, _ in pairs]
    if not all(size.strip().isdecimal() for _, size in pairs) or len(set(names)) < len(names):
        raise InputError(
            f'{text!r} is no mesh; write axes with sizes, "dp=2,tp=4", or one or two sizes, "2x4", for dp and tp.'
        )
    return Mesh({name: int(size) for name, (_, size) in zip(names, pairs, strict=True)}, hardware)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autopar", description="Automatic parallelization of PyTorch models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="train a small model on this machine's CPU, beside one process"))
    _add_plan(commands.add_parser("plan", help="print the plan of a model for a mesh that need not be there"))
    _add_explain(commands.add_parser("explain", help="say why one part of a plan is as it is"))
    measuring = commands.add_parser("calibrate", help="measure this machine and write its hardware profile")
    calibrate_command.add_arguments(measuring)
    measuring.set_defaults(command=calibrate_command.run)
    comparing = commands.add_parser("bench", help="measure strategies on this machine, beside their predictions")
    bench_command.add_arguments(comparing)
    comparing.set_defaults(command=_bench)
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="processes to start (4); the product of the mesh")
    parser.add_argument("--mesh", help='axes and sizes, "2x2" or "dp=2,tp=2"')
    parser.add_argument("--steps", type=_positive, default=30)
    parser.add_argument("--layers", type=_positive, default=4)
    parser.add_argument("--batch", type=_positive, default=8, help="sequences of the global batch (8)")
    parser.add_argument("--sequence", type=_positive, default=128, help="bytes of a sequence (128)")
    parser.set_defaults(command=_demo)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_planning(parser)
    parser.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page to look at")
    parser.add_argument("--trace", metavar="FILE", help="write the predicted step as a trace for Perfetto or Chrome")
    parser.add_argument("--verbose", action="store_true", help="show every operation")
    parser.add_argument(
        "--decode",
        type=_positive,
        metavar="TOKENS",
        help="plan generation: --batch prompts of --sequence tokens, so many new ones each",
    )
    parser.add_argument(
        "--within", type=float, metavar="SECONDS", help="with --decode and --mesh auto: the first token"
    )
    parser.set_defaults(command=_plan)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_planning(parser)
    parser.add_argument("name", help="a module, parameter or operation of the model, as in the plan's table")
    parser.set_defaults(command=_explain)


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """What both commands need to make a plan."""
    parser.add_argument(
        "model",
        help=f"one of {', '.join(NAMES)}, or MODULE:FUNCTION that returns a model, or a model and its example inputs",
    )
    parser.add_argument("--mesh", required=True, help='axes and sizes, "dp=2,tp=2" or "2x2", or "auto" with --devices')
    parser.add_argument("--devices", type=_positive, help="with --mesh auto: how many devices to arrange")
    parser.add_argument("--max-axes", type=_positive, help="with --mesh auto: at most so many axes (2, or 3)")
    parser.add_argument("--hardware", default="cpu", help="name or path of a hardware profile (cpu)")
    parser.add_argument("--batch", type=_positive, default=8, help="sequences or images of the global batch (8)")
    parser.add_argument("--sequence", type=_positive, default=128, help="tokens of a sequence (128)")
    parser.add_argument("--layers", type=_positive, help="layers of a built-in model, instead of its own number")
    parser.add_argument("--memory", help='hard limit per device, such as "80GB"')
    parser.add_argument(
        "--imbalance",
        type=float,
        default=1.0,
        help="times its share of rows that the busiest device has of experts (1)",
    )
    parser.add_argument(
        "--recompute", choices=("auto", *RECOMPUTATIONS), default="auto", help="layers computed again (auto)"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--offload", choices=OFFLOADED, default="none", help="what is on the host (none)")
    parser.add_argument("--host-memory", help='hard limit per host of what is offloaded, such as "512GB"')
    parser.add_argument("--master-copies", action="store_true", help="float32 copies of parameters of lower precision")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 under autocast")
    parser.add_argument(
        "--prefetch", type=_depth, choices=("auto", *DEPTHS), default="auto", help="layers ahead (auto)"
    )
    parser.add_argument("--precision", choices=tuple(NAMED), help="in which dtypes to store, compute and reduce")
    parser.add_argument("--mode", choices=("auto", "semi_auto", "manual"), default="auto")
    parser.add_argument("--strategy", metavar="NAME", help=f"plan by a preset: {', '.join(PRESETS)}")
    parser.add_argument("--solver", choices=("auto", "ilp"), default="auto")
    parser.add_argument("--pipeline", metavar="AXIS", help='the axis whose ranks run stages; "pp" is taken by itself')
    parser.add_argument("--schedule", choices=SCHEDULES, help="of the pipeline; the best one is taken")
    parser.add_argument("--microbatches", type=_positive, help="into how many parts a batch is split")
    parser.add_argument("--chunks", type=_positive, help="stages per rank of the pipeline")
    parser.add_argument("--capacity-factor", type=float, help="drop rows of experts beyond so many times a fair share")
    parser.add_argument("--loss-tiles", type=_tiles, help='tiles of the loss of a linear layer, "auto" or "off"')
    parser.add_argument("--mlp-tiles", type=_tiles, help='tiles of MLPs, "auto" or "off"')
    parser.add_argument(
        "--weight-tiles", action="store_true", help="gather weights a tile at a time where --memory asks"
    )
    parser.add_argument("--inference", action="store_true", help="plan the forward alone, without training")
    parser.add_argument("--plan-cache", metavar="FOLDER", help="keep plans there, and take them from there")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS", help="for solving (120)")


def _tiles(text: str) -> int | Literal["auto", False]:
    if text not in ("auto", "off") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f'{text!r} is no number, "auto" or "off"')
    return "auto" if text == "auto" else False if text == "off" else _positive(text)


def _depth(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    if number > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text[:20]} is more than {MAX_COUNT}")
    return number


def _demo(options: argparse.Namespace) -> int:
    from autopar import demo  # starts no process group, but needs all of torch.distributed

    mesh = _demo_mesh(options.ranks, options.mesh)
    if mesh.num_devices > MAX_RANKS:
        raise InputError(f"{mesh.num_devices} ranks are as many processes on this machine; give at most {MAX_RANKS}.")
    settings = demo.DemoRun(mesh, options.steps, options.layers, options.batch, options.sequence)
    return 0 if demo.run(settings) else DISAGREES


def _bench(options: argparse.Namespace) -> int:
    meshes = [parse_mesh(text) for text in options.mesh or ()]
    return 0 if bench_command.run(options, meshes) else DISAGREES


def _demo_mesh(ranks: int | None, text: str | None) -> Mesh:
    """The mesh that was asked for, or dp=2 with the rest on tp."""
    if text is None:
        num_ranks = 4 if ranks is None else ranks
        return parse_mesh(f"2x{num_ranks // 2}" if num_ranks > 2 and num_ranks % 2 == 0 else str(num_ranks))
    mesh = parse_mesh(text)
    if "pp" in mesh.axes:
        raise InputError(f"the demo trains no pipeline, and {text} has the axis pp; call it otherwise.")
    if ranks not in (None, mesh.num_devices):
        raise InputError(f"--ranks {ranks} and --mesh {text} ({mesh.num_devices} ranks) differ; give one of them.")
    return mesh


def _plan(options: argparse.Namespace) -> int:
    if options.decode is not None:
        print(_generation(options))
        return 0
    if options.within is not None:
        raise InputError("--within is when the first token of --decode has to come; give both, or leave it out.")
    plan = _made(options)
    print(plan_table(plan, verbose=options.verbose) if isinstance(plan, Plan) else plan)
    for path, write in ((options.save, plan.save), (options.html, plan.to_html), (options.trace, plan.to_trace)):
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise InputError(f"the plan cannot be saved: {error}; give a file that can be written.") from error
            print(f"\nsaved in {path}")
    return 0


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """What any plan takes of the options, training or not."""
    return {
        "hardware": options.hardware,
        "mode": options.mode,
        "strategy": options.strategy,
        "memory": options.memory,
        "recompute": options.recompute,
        "optimizer": options.optimizer,
        "master_copies": options.master_copies,
        "offload": options.offload,
        "host_memory": options.host_memory,
        "solver": options.solver,
        "time_limit": options.time_limit,
        "pipeline": options.pipeline,
        "schedule": options.schedule,
        "microbatches": options.microbatches,
        "chunks": options.chunks,
        "capacity_factor": options.capacity_factor,
        "loss_tiles": options.loss_tiles,
        "mlp_tiles": options.mlp_tiles or None,
        "weight_tiles": options.weight_tiles,
        "imbalance": options.imbalance,
        "precision": options.precision,
        "prefetch": options.prefetch,
    }


def _generation(options: argparse.Namespace) -> object:
    """The plan of generation that the options ask for."""
    for name in OF_ONE_PLAN:
        if getattr(options, name):
            raise InputError(
                f"--{name} beside --decode, which makes two plans; save what autopar.plan_generation returns."
            )
    model, _ = named(options.model, options.batch, options.sequence, options.layers)
    auto = options.mesh == "auto"
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
        return api.plan_generation(
            model.decoder if isinstance(model, LanguageModel) else model,
            "auto" if auto else parse_mesh(options.mesh, options.hardware),
            batch=options.batch,
            prompt=options.sequence,
            tokens=options.decode,
            devices=options.devices,
            max_axes=options.max_axes or len(DEFAULT_AXES),
            within=options.within,
            **_asked(options),
        )


def _explain(options: argparse.Namespace) -> int:
    plan = _made(options)
    if not isinstance(plan, Plan):
        raise InputError(
            f"explain speaks of one plan, and on {plan.mesh} every stage has its own; plan without the axis "
            f"{plan.axis}, or ask plan.stages[0].plan.explain(…) in Python."
        )
    print(plan.explain(options.name))
    return 0


def _made(options: argparse.Namespace) -> Plan | PipelinePlan:
    """The plan that the options ask for."""
    model, example_inputs = named(options.model, options.batch, options.sequence, options.layers)
    auto = options.mesh == "auto"
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
        return api.plan(
            model,
            "auto" if auto else parse_mesh(options.mesh, options.hardware),
            example_inputs,
            devices=options.devices,
            max_axes=options.max_axes,
            **_asked(options),
            plan_cache=options.plan_cache,
            training=not options.inference,
        )
