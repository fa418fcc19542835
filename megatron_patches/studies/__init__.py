"""Studies: a YAML file of methods x datasets x seeds x lengths x protocols, planned and carried out."""

from .cost import Cost, estimate, report
from .execute import carry_out
from .plan import Plan, make_plan
from .record import record
from .run import Run
from .schema import ROOT, Study, load_study
from .slurm import write_script
from .steps import Step

__all__ = [
    "ROOT",
    "Cost",
    "Plan",
    "Run",
    "Step",
    "Study",
    "carry_out",
    "estimate",
    "load_study",
    "make_plan",
    "record",
    "report",
    "write_script",
]
