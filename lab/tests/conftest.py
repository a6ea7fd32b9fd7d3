"""The lab's tests use the settings of the wheel's tests."""

from tests.conftest import any_model, patient, pytest_collection_finish, rotary_model

__all__ = ["any_model", "patient", "pytest_collection_finish", "rotary_model"]
