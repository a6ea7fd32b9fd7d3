"""Documents are tested with the further wordings of training."""

import inlay_lab.train  # noqa: F401
