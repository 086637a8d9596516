"""Keeps what the judge says of mistakes in its tests: tests/conftest.py asks at the end for the texts that no test made it say."""

import said_texts

from bitnet_np.judge.hypothesis import Hypothesis
from bitnet_np.judge.measures import Judgement
from bitnet_np.judge.report.report import OperationVerdict, Report


def _keep(record, texts):
    """Keep texts(record) of each one that is made."""
    made = record.__init__

    def kept(self, *arguments, **options):
        made(self, *arguments, **options)
        said_texts.SAID.update(filter(None, texts(self)))

    record.__init__ = kept


_keep(Hypothesis, lambda cause: [cause.text] if cause.id.startswith("read.") else [])  # those of known mistakes are made to be tried
_keep(OperationVerdict, lambda verdict: [verdict.hypothesis])
_keep(Judgement, lambda judgement: [judgement.explanation])
_keep(Report, lambda report: report.notes)
