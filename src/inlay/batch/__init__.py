"""Offline batches in OpenAI's Batch file format: a file of requests in, a file of answers out, whatever happens.

``requests`` reads the input and says which requests run together, ``output`` is the file that is written and taken up
again, ``run`` the model at work, ``counts`` how far it is.
"""

from inlay.batch.counts import Counts, Stage
from inlay.batch.run import Job, run_batch

__all__ = ["Counts", "Job", "Stage", "run_batch"]
