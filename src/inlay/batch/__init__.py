"""Offline batches in OpenAI's Batch file format: a file of requests in, a file of answers out.

``requests`` reads and orders the input, ``output`` writes and resumes the output file, ``run`` runs the model, and
``counts`` tracks progress.
"""

from inlay.batch.counts import Counts, Stage
from inlay.batch.run import Job, run_batch

__all__ = ["Counts", "Job", "Stage", "run_batch"]
