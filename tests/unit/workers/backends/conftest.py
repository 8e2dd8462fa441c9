import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """These networks are tiny; more threads would only wait for each other on a busy machine."""
    torch.set_num_threads(1)
