"""Names that look like parts of a label: of data sets in the report."""

from __future__ import annotations

import re

import pytest
from analysis_rows import kernel, make

from megatron_patches.analysis.report import Extras, report
from megatron_patches.analysis.sections import Source


@pytest.mark.parametrize("dataset", ["train", "trained on 512", "a, b"])
def test_a_data_set_may_have_any_name(dataset: str) -> None:
    rows = [make("kerple_log", 1, 512, 20.0, dataset=dataset)]
    kernels = [kernel(h, dataset=dataset, train_length=512) for h in range(2)]
    page = report([Source("rows", rows)], Extras(kernels=kernels))
    (line,) = re.findall(r"<tr([^>]*)><th[^>]*>kerple_log, [^<]*trained on 512</th>", page)
    assert 'data-method="kerple_log"' in line
