"""Offline batches in OpenAI's Batch file format: a file of requests in, a file of answers out.

``requests`` reads and orders the input and counts progress, ``output`` writes and resumes the output file, and ``run``
runs the model.
"""

from inlay.batch.requests import BatchCounts, Stage
from inlay.batch.run import BatchJob, run_batch

#: Names of earlier releases.
Counts, Job = BatchCounts, BatchJob

__all__ = ["BatchCounts", "BatchJob", "Counts", "Job", "Stage", "run_batch"]
