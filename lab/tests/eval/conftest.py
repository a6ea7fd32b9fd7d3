"""Documents are tested with the further wordings that training gives them."""

import inlay_lab.train  # noqa: F401
