"""`autopar show`: a plan that was saved, as a table, as a page, or as a chart of its schedule."""

from __future__ import annotations

import argparse
import shutil

from autopar.cli.files import write_files
from autopar.costs.plans.plan import Plan
from autopar.costs.plans.schema import PIPELINE_FORMAT, refusing
from autopar.errors import InputError
from autopar.files.reading import read_json, read_text
from autopar.views.report.table import plan_table


def show(options: argparse.Namespace) -> int:
    """Print the plan of a file, or the schedule of its pipeline, and write it as a page."""
    with refusing(f"plan: {options.file!r}", "autopar plan --save"):
        values = read_json(read_text(options.file))
    if isinstance(values, dict) and PIPELINE_FORMAT in values:
        from autopar.planning.pipeline.plan import PipelinePlan  # imports PyTorch; other plans do not
        from autopar.views.report.schedule_chart import schedule_chart

        plan = PipelinePlan.load(options.file)
        width = shutil.get_terminal_size().columns
        print(schedule_chart(plan, width) if options.schedule else plan)
    else:
        plan = Plan.load(options.file)
        if options.schedule:
            raise InputError(
                f"{options.file} is a plan in one piece on {plan.mesh}, and --schedule charts a pipeline; plan with "
                "an axis pp, as in --mesh pp=2."
            )
        print(plan_table(plan, verbose=options.verbose))
    write_files((options.html, plan.to_html))
    return 0
