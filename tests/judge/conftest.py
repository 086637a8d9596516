"""Keeps what the judge says of mistakes in its tests: tests/conftest.py asks at the end for the texts that no test made it say."""

import said_texts

from bitnet_np.judge.hypothesis import Hypothesis
from bitnet_np.judge.measures import Judgement
from bitnet_np.judge.readings import table
from bitnet_np.judge.report.report import OperationVerdict, Report


def _keep(record, texts):
    """Keep texts(record) of each one that is made."""
    made = record.__init__

    def kept(self, *arguments, **options):
        made(self, *arguments, **options)
        said_texts.SAID.update(filter(None, texts(self)))

    record.__init__ = kept


table.Hypothesis = lambda text, id: said_texts.SAID.add(text) or Hypothesis(text, id)  # each reading that finds something
_keep(OperationVerdict, lambda verdict: [verdict.hypothesis])
_keep(Judgement, lambda judgement: [judgement.explanation])
_keep(Report, lambda report: report.notes)
