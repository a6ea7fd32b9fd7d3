"""Documents are tested with the further wordings that training gives them."""

import training  # noqa: F401
